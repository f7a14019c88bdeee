"""Folders of users: each one speaks as with upstream, or is refused in one line that names the file.

A case changes a copy of one small checkpoint, in which the unchanged files are links.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import soundfile
import torch
from helpers import ROOT, Voice, run_program, slow
from safetensors.torch import load_file, save_file
from serving_helpers import SHORT, RunningServer, load_speech

from qwen3_tts_cuda_graphs.cli import clone
from qwen3_tts_cuda_graphs.cli.__main__ import main
from qwen3_tts_cuda_graphs.common.loading import load
from qwen3_tts_cuda_graphs.common.model_config import read_config
from qwen3_tts_cuda_graphs.serving.service import read_speakers
from qwen3_tts_cuda_graphs.upstream import VoiceClonePromptItem

NULLS = "temperature", "repetition_penalty", "top_k", "top_p", "subtalker_temperature"
NOT_NEEDED = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
NOT_ASCII = "zażółć gęślą 今天"
ON_CPU = "--device", "cpu"
WEIGHTS = "model.safetensors"
CODEC = "speech_tokenizer/model.safetensors"
SMALL = "config.json", "generation_config.json", "tokenizer_config.json", "speech_tokenizer/config.json"
NAMED = *SMALL, "speech_tokenizer/preprocessor_config.json", "vocab.json", "merges.txt", WEIGHTS, CODEC


class Folder:
    """A copy of a checkpoint whose files can be replaced."""

    def __init__(self, original, path):
        self.path = path
        (path / "speech_tokenizer").mkdir(parents=True)
        for file in original.rglob("*"):
            if file.is_file() and file.name != "tokenizer.json":  # as the published ones, which have vocab.json
                (path / file.relative_to(original)).symlink_to(file)

    def remove(self, *names):
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def write(self, name, content):
        self.remove(name)
        if isinstance(content, str):
            content = content.encode()
        (self.path / name).write_bytes(content)

    def cut(self, name, part):
        content = (self.path / name).read_bytes()
        self.write(name, content[: int(len(content) * part)])

    def update(self, name, **values):
        self.write(name, json.dumps(json.loads((self.path / name).read_bytes()) | values, ensure_ascii=False))

    def update_talker(self, **values):
        talker = json.loads((self.path / "config.json").read_bytes())["talker_config"]
        self.update("config.json", talker_config=talker | values)

    def save(self, change, name=WEIGHTS):
        weights = load_file(self.path / name)
        weights = change(weights) or weights
        self.remove(name)
        save_file({key: weight.contiguous() for key, weight in weights.items()}, self.path / name, {"format": "pt"})

    def pickle(self, name, shards=1):
        """Store the weights as pytorch_model.bin, or in shards with an index."""
        weights = load_file(self.path / name)
        place = (self.path / name).parent
        self.remove(name)
        if shards == 1:
            torch.save(weights, place / "pytorch_model.bin")
            return
        files = {key: f"pytorch_model-{n % shards + 1:05}-of-{shards:05}.bin" for n, key in enumerate(weights)}
        for file in set(files.values()):
            torch.save({key: weights[key] for key in files if files[key] == file}, place / file)
        (place / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    def make_a_folder(self, name):
        self.remove(name)
        (self.path / name).mkdir()


def without(prefix):
    return lambda weights: {name: weight for name, weight in weights.items() if not name.startswith(prefix)}


def prefixed(weights):
    return {f"module.{name}": weight for name, weight in weights.items()}


def with_nan(weights):
    name = sorted(name for name, weight in weights.items() if weight.dim() == 2)[0]
    weights[name] = weights[name].clone()
    weights[name][-1, -1] = float("nan")


def as_upstreams_recipe(folder):
    """Make it a finetuned speaker: another type, no speaker encoder, float32, and an optimizer's file beside."""
    folder.update("config.json", tts_model_type="custom_voice")
    folder.update_talker(spk_id={"anna": 2999}, spk_is_dialect={"anna": False})
    folder.save(lambda weights: {name: weight.float() for name, weight in without("speaker_encoder.")(weights).items()})
    folder.write("optimizer.bin", b"not for us")
    folder.write("trainer_state.json", "{broken")


def with_more_in_it(folder):
    folder.save(lambda weights: {name: weight.half() for name, weight in weights.items()} | {"ema.step": torch.ones(1)})
    folder.update("config.json", note=NOT_ASCII)
    folder.write("merges.txt", (folder.path / "merges.txt").read_bytes() + b"\n\n")


SPEAKING = {
    "only the needed files": lambda folder: folder.remove(*NOT_NEEDED),
    "pytorch_model.bin": lambda folder: (folder.pickle(WEIGHTS), folder.pickle(CODEC)),
    "pytorch_model.bin in shards": lambda folder: folder.pickle(WEIGHTS, 3),
    "unexpected weights, float16, not ASCII, empty lines": with_more_in_it,
    "upstream's recipe": as_upstreams_recipe,
    "settings are null": lambda folder: folder.update("generation_config.json", **dict.fromkeys(NULLS)),
    "do_sample is null": lambda folder: folder.update("generation_config.json", do_sample=None),
    "max_new_tokens is null": lambda folder: folder.update("generation_config.json", max_new_tokens=None),
}
REFUSED = {  # what is done -> what the line must have in it
    "keys with a prefix": (lambda folder: folder.save(prefixed), r"has \d\d\d missing weights: "),
    "a prefix in the codec's": (lambda folder: folder.save(prefixed, CODEC), "speech_tokenizer has .* missing weights"),
    "no speaker encoder": (lambda folder: folder.save(without("speaker_encoder.")), "missing weights: speaker_encoder"),
    "one weight less": (
        lambda folder: folder.save(without("talker.codec_head")),
        "has 1 missing weights: talker.codec_head",
    ),
    "the codec's weights": (
        lambda folder: folder.write(WEIGHTS, (folder.path / CODEC).read_bytes()),
        "missing weights",
    ),
    "NaN": (lambda folder: folder.save(with_nan), "has 1 NaN weights"),
    "NaN in the codec": (lambda folder: folder.save(with_nan, CODEC), "speech_tokenizer has 1 NaN weights"),
    "another width": (lambda folder: folder.update_talker(intermediate_size=48), "mismatched weights: .*mlp"),
    "fewer heads than fit": (lambda folder: folder.update_talker(num_attention_heads="many"), "config"),
    "a word for a number": (
        lambda folder: folder.update("generation_config.json", temperature="hot"),
        "temperature 'hot'",
    ),
    "merges of other tokens": (
        lambda folder: folder.write("merges.txt", "#version: 0.2\nqqq zzz\n"),
        "line 2 of .*merges.txt",
    ),
    "a vocabulary of words": (lambda folder: folder.update("vocab.json", zzz="word"), "vocab.json"),
    "a pickle that runs something": (
        lambda folder: (folder.remove(WEIGHTS), folder.write("pytorch_model.bin", b"cos\nsystem\n(S'touch ran'\ntR.")),
        "weights",
    ),
    "an index of nothing": (
        lambda folder: (folder.remove(WEIGHTS), folder.write(f"{WEIGHTS}.index.json", "{}")),
        "index.json does not say",
    ),
    "a shard is missing": (
        lambda folder: (folder.pickle(WEIGHTS, 2), folder.remove("pytorch_model-00002-of-00002.bin")),
        "it has no pytorch_model-00002-of-00002.bin",
    ),
    **{
        f"{name} is cut": (lambda folder, name=name: folder.cut(name, 0.6), name)
        for name in NAMED
        if name != "merges.txt"
    },
    **{
        f"{name} is empty": (lambda folder, name=name: folder.write(name, b""), name)
        for name in NAMED
        if name != "merges.txt"
    },
    **{f"{name} is a folder": (lambda folder, name=name: folder.make_a_folder(name), name) for name in NAMED},
    **{f"{name} is a list": (lambda folder, name=name: folder.write(name, "[1, 2]"), name) for name in SMALL},
    **{f"{name} is binary": (lambda folder, name=name: folder.write(name, b"\xff\xfe\x00"), name) for name in NAMED},
}


@pytest.fixture
def folder(checkpoint, tmp_path):
    return Folder(checkpoint(), tmp_path / "model")


@pytest.mark.parametrize("case", SPEAKING)
def test_a_folder_that_speaks_as_upstream_does(case, folder, call, recording, tmp_path):
    SPEAKING[case](folder)
    is_finetuned = case == "upstream's recipe"
    voice = Voice("preset" if is_finetuned else "x-vector", lambda kind: folder.path, recording)
    speaker = {"speaker": "anna"} if is_finetuned else {}
    limit = {} if case == "max_new_tokens is null" else {"max_new_tokens": 6}
    voice.assert_same_tokens(text="Hi", seed=2, **limit, **speaker)
    words = "--model", folder.path, "--text", "Hi", "--output", "out.wav", "--max-seq-len", "64", "--seed", "1"
    code, stdout, stderr = call(main, *words, *ON_CPU)
    assert code == 0 and "s of audio" in stdout, stderr
    assert "weights" not in stderr


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_refused(case, folder, call, tmp_path):
    """Missing weights are not initialized at random, and broken files do not end in tracebacks."""
    change, wanted = REFUSED[case]
    change(folder)
    read_config.cache_clear()
    with pytest.raises(ValueError, match=wanted) as error:
        load(str(folder.path), "cpu", max_seq_len=64)
    assert "\n" not in str(error.value) and str(folder.path) in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    speaker = folder.path / "speaker.pt"
    code, stdout, stderr = call(
        main, "--model", folder.path, "--speaker", speaker, "--text", "Hi", "--output", "o.wav", *ON_CPU
    )
    assert (code, stdout) == (2, "") and stderr == f"error: {error.value}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_configs_are_utf8_in_every_locale(folder):
    """They are not read in the locale's encoding."""
    folder.update("config.json", note=NOT_ASCII)
    program = f"""
        from qwen3_tts_cuda_graphs.common.model_config import read_config
        print(ascii(read_config({str(folder.path)!r})["note"]))
    """
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = run_program(program, ROOT, env=os.environ | locale)
    assert result.stdout.strip() == ascii(NOT_ASCII), result.stderr


@pytest.mark.parametrize(
    "case", ["keys with a prefix", *slow("NaN in the codec", "vocab.json is cut", "config.json is cut")]
)
def test_such_a_model_is_not_served(case, folder, tmp_path):
    """The server does not become ready with it."""
    change, wanted = REFUSED[case]
    change(folder)
    command = [sys.executable, *"-m qwen3_tts_cuda_graphs serve --port 0 --device cpu --model".split(), folder.path]
    options = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    result = subprocess.run(command, timeout=120, **options)
    (line,) = (line for line in result.stderr.splitlines() if "warning" not in line)
    assert result.returncode == 2 and line.startswith("error: ") and re.search(wanted, line), result.stderr
    assert "ready" not in result.stdout


@pytest.mark.parametrize("case", ["no speaker encoder", "NaN", "config.json is binary"])
def test_no_voice_is_extracted_with_such_a_model(case, folder, call, tmp_path, recording):
    """With random weights it would be another voice each time."""
    REFUSED[case][0](folder)
    soundfile.write(tmp_path / "voice.wav", *recording)
    code, _, stderr = call(clone.main, "--model", folder.path, "--ref-audio", "voice.wav", *ON_CPU)
    assert code == 2 and stderr.splitlines()[-1].startswith("error: ") and not (tmp_path / "speaker.pt").exists()


@pytest.fixture(scope="module")
def demo_voice(checkpoint, recording):
    """demo_voice(with_transcript): the content of a file as upstream's demo writes it."""
    tts = load(str(checkpoint()), "cpu", max_seq_len=64)

    def make(with_transcript):
        items = tts.create_voice_clone_prompt(recording, "what it says", x_vector_only_mode=not with_transcript)
        return {"items": [dataclasses.asdict(item) for item in items]}

    return make


@pytest.mark.parametrize("with_transcript", [False, True], ids=["x-vector", "in-context"])
def test_a_voice_of_upstreams_demo(with_transcript, demo_voice, checkpoint, call, tmp_path):
    """The file that its button "save voice" writes can be used."""
    content = demo_voice(with_transcript)
    torch.save(content, tmp_path / "demo.pt")
    words = "--model", checkpoint(), "--speaker", "demo.pt", "--text", "Hi", "--seed", 3, "--max-seq-len", 128
    code, _, stderr = call(main, *words, "--output", "out.wav", "--non-streaming-mode", *ON_CPU)
    assert code == 0, stderr
    tts = load(str(checkpoint()), "cpu", max_seq_len=128)
    torch.manual_seed(3)
    voice = [VoiceClonePromptItem(**item) for item in content["items"]]
    (expected,), rate = tts.generate_voice_clone("Hi", voice_clone_prompt=voice, non_streaming_mode=True)
    audio, _ = soundfile.read(tmp_path / "out.wav")
    assert len(audio) == len(expected) and abs(audio - expected).max() < 1e-3

    speech = load_speech(checkpoint(), tmp_path / "voices", speakers=read_speakers([tmp_path / "demo.pt"]))
    with RunningServer(speech) as server:
        assert server.speak(voice="demo", **SHORT).status == 200
    speech.close()


BAD_ITEMS = {
    "no items": lambda voice: {"items": []},
    "two items": lambda voice: {"items": voice["items"] * 2},
    "another dict": lambda voice: {"state_dict": {}},
    "items of numbers": lambda voice: {"items": [1]},
    "no speaker": lambda voice: {"items": [voice["items"][0] | {"ref_spk_embedding": None}]},
    "of another size": lambda voice: {"items": [voice["items"][0] | {"ref_spk_embedding": torch.ones(7)}]},
    "no codes": lambda voice: {"items": [voice["items"][0] | {"ref_code": None}]},
    "codes of another model": lambda voice: {"items": [voice["items"][0] | {"ref_code": torch.full((9, 3), 10**6)}]},
    "codes in words": lambda voice: {"items": [voice["items"][0] | {"ref_code": ["a"]}]},
    "no transcript": lambda voice: {"items": [voice["items"][0] | {"ref_text": ""}]},
}


@pytest.mark.parametrize("case", BAD_ITEMS)
def test_a_broken_voice_of_upstreams_demo(case, demo_voice, checkpoint, call, tmp_path):
    torch.save(BAD_ITEMS[case](demo_voice(True)), tmp_path / "demo.pt")
    words = "--model", checkpoint(), "--speaker", "demo.pt", "--text", "Hi", "--output", "out.wav"
    code, stdout, stderr = call(main, *words, *ON_CPU)
    assert (code, stdout) == (2, "") and stderr.startswith("error: ") and stderr.count("\n") == 1
    assert "demo.pt" in stderr or case == "codes of another model" and "the codebooks have 0 to" in stderr
    assert not (tmp_path / "out.wav").exists()


@pytest.mark.parametrize("name", ["tinny", "models/tinny", "a/b/c", ""])
def test_a_name_that_is_no_folder(name, tmp_path):
    """`load` raises an error that names it, instead of Hugging Face's traceback of three screens."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    with contextlib.chdir(tmp_path), pytest.raises(ValueError, match="tiny$" if name == "tinny" else "give") as error:
        load(name)
    assert error.value.__suppress_context__ or error.value.__context__ is None


@pytest.mark.parametrize("script", ["generate.py", "extract_speaker.py", "bench.py", "setup.sh", "benchmark.sh"])
def test_a_script_through_a_link_is_the_same_program(script, tmp_path):
    """Each script finds its files, and generate.py has all options of the package's command line."""
    if script == "benchmark.sh" and not (ROOT / ".venv/bin/python").exists():
        pytest.skip("it would make .venv")
    (tmp_path / script).symlink_to(ROOT / script)
    program = [sys.executable] if script.endswith(".py") else ["bash"]
    helps = [
        subprocess.run([*program, path, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for path in (ROOT / script, tmp_path / script)
    ]
    assert helps[0].returncode == helps[1].returncode == 0, helps[1].stderr
    assert helps[0].stdout == helps[1].stdout
