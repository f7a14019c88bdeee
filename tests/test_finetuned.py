"""Checkpoints that users made: finetuned with upstream's recipe, or of other sizes than the published ones."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import Voice, slow
from safetensors.torch import load_file, save_file

from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint
from qwen3_tts_cuda_graphs.cli.__main__ import main
from qwen3_tts_cuda_graphs.common.loading import load
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.speech import complete_speakers


@pytest.fixture(scope="module")
def finetuned(checkpoint, tmp_path_factory):
    """What upstream's recipe makes of a Base model: its type changed, one speaker in a free row of the embedding.

    And what merging a LoRA makes of it: low-rank changes to projections, saved in float32.
    """
    folder = tmp_path_factory.mktemp("finetuned") / "checkpoint"
    shutil.copytree(checkpoint("base"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["tts_model_type"] = "custom_voice"
    config["talker_config"]["spk_id"] = {"Anna_2": 3000}
    config["talker_config"]["spk_is_dialect"] = {"somebody_else": "sichuan_dialect"}
    (folder / "config.json").write_text(json.dumps(config))

    weights = load_file(folder / "model.safetensors")
    weights = {name: weight.float() for name, weight in weights.items() if not name.startswith("speaker_encoder.")}
    weights["talker.model.codec_embedding.weight"][3000] = torch.load(folder / "speaker.pt", weights_only=True).float()
    generator = torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            rows, columns = weight.shape
            weight += 0.1 * torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_finetuned_speaker_speaks(finetuned, recording):
    """Upstream looks a speaker up in lower case, so that one that was named with capitals could not be found, and in
    a table of dialects, where a finetuned one need not be."""
    voice = Voice("preset", lambda kind: finetuned, recording)
    assert voice.fast.get_supported_speakers() == ["anna_2"]
    config = voice.upstream.model.config.talker_config
    config.spk_id, config.spk_is_dialect = {"anna_2": 3000}, {"anna_2": False}  # as upstream needs it
    for speaker in ("Anna_2", "anna_2"):
        voice.assert_same_tokens(text="Hello there.", speaker=speaker, max_new_tokens=10, seed=2)


@pytest.mark.parametrize("words, answer", [("--list-speakers", "anna_2"), ("--speaker Anna_2 --text Hi.", "out.wav:")])
def test_a_finetuned_speaker_on_the_command_line(words, answer, finetuned, call):
    """It is read from the checkpoint, not from a list of the published ones, and may be written with capitals."""
    options = f"--output out.wav --max-seq-len 64 --device cpu --model {finetuned}"
    code, stdout, stderr = call(main, *words.split(), *options.split())
    assert code == 0 and stdout.lower().split()[0] == answer, stderr


def test_a_finetuned_speaker_in_the_server(finetuned):
    (model,) = pytest.importorskip("qwen3_tts_cuda_graphs.serving.service").Service(str(finetuned), "cpu").models
    assert model.resolve_voice("Anna_2") == "anna_2"


def test_speakers_that_the_model_cannot_have():
    """They ended in an IndexError or a KeyError of the first request, on a GPU in a device-side assert."""
    config = SimpleNamespace(vocab_size=3072, spk_id={"Bob": 3072}, spk_is_dialect=None, codec_language_id={"x": 1})
    with pytest.raises(ValueError, match="speaker 'bob' has the id 3072, beyond the 3072"):
        complete_speakers(config)
    config.spk_id, config.spk_is_dialect = {"Bob": 3071}, {"BOB": "klingon"}
    with pytest.raises(ValueError, match="dialect 'klingon', which is none of x"):
        complete_speakers(config)
    config.spk_is_dialect = {"BOB": "x"}
    complete_speakers(config)
    assert (config.spk_id, config.spk_is_dialect) == ({"bob": 3071}, {"bob": "x"})


SIZES = {
    "more layers and codes, one KV head": (
        dict(num_hidden_layers=3, num_key_value_heads=1, num_code_groups=16),
        dict(num_hidden_layers=2, num_key_value_heads=4),
    ),
    "one width for both, no groups": (
        dict(hidden_size=48, intermediate_size=80, num_attention_heads=2, num_key_value_heads=2),
        dict(hidden_size=48),
    ),
    "wider heads": (
        dict(
            head_dim=32,
            rope_scaling=dict(interleaved=True, mrope_section=[8, 4, 4], rope_type="default", type="default"),
        ),
        dict(head_dim=8, num_attention_heads=6, num_key_value_heads=3),
    ),
}


@pytest.fixture
def folder(sizes, tmp_path):
    """A checkpoint of these sizes."""
    talker, predictor = SIZES[sizes]
    write_checkpoint(tmp_path, "tiny", talker=talker, predictor=predictor)
    return tmp_path


@pytest.mark.parametrize("sizes", [[*SIZES][0], *slow(*[*SIZES][1:])])
def test_other_sizes_give_upstreams_tokens(folder, recording):
    """A number of layers, heads or columns that is written into the code instead of read from the config."""
    voice = Voice("x-vector", lambda kind: folder, recording)
    voice.end_comes_up(False)
    (codes,) = voice.assert_same_tokens(text="Hello.", max_new_tokens=10, seed=3)
    assert len(codes) == 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", SIZES)
def test_other_sizes_run_without_the_megakernel(folder):
    """Sizes that the kernel does not support must choose another path, not end in a compiler's message."""
    tts = load(str(folder), max_seq_len=256)
    assert tts.speech.path.startswith("separate kernels, no megakernel:")
    speaker = torch.load(folder / "speaker.pt", weights_only=True)
    wavs, _ = tts.generate_voice_clone("Hello.", voice_clone_prompt=speaker_prompt(speaker), max_new_tokens=15)
    assert len(wavs[0]) > 0
