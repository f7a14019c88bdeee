"""The reference stands alone: its files in an empty folder load a model and speak, with upstream's tokens."""

import os
import shutil
import subprocess
import sys

import pytest
import soundfile
from helpers import ROOT

FILES = "cudagraph_talker.py", "cudagraph_predictor.py", "generate.py"
COMMANDS = "generate.py", "extract_speaker.py"
OTHER_KINDS = "custom_voice", "voice_design"

PROGRAM = """
import runpy, shutil, sys, warnings
from pathlib import Path

sys.modules["qwen3_tts_cuda_graphs"] = None  # setup.sh has installed it: it is not there for the copy

import torch
from safetensors.torch import load_file, save_file

import generate
from generate import accelerate, load, load_upstream

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="the speech was cut off")
captured = []  # every function that was captured, and how often it was replayed


def counting_capture(graphs, fn):
    replay, entry = capture(graphs, fn), [fn, 0]
    captured.append(entry)

    def counted():
        entry[1] += 1
        replay()

    return counted


capture = generate.Graphs.capture
generate.Graphs.capture = counting_capture


def codes(tts, method, seed, **arguments):
    model, results = tts.model, []
    model.generate = lambda **kwargs: results.append(type(model).generate(model, **kwargs)) or results[0]
    torch.manual_seed(seed)
    getattr(tts, method)(**arguments)
    del model.generate
    return results[0][0], float(torch.rand(1))


def voice(kind, folder, rows):
    if kind == "base":
        speaker = torch.load(folder / "speaker.pt", weights_only=True)
        return "generate_voice_clone", dict(
            voice_clone_prompt=dict(
                ref_code=None,
                ref_spk_embedding=[speaker] * rows,
                x_vector_only_mode=[True] * rows,
                icl_mode=[False] * rows,
            )
        )
    if kind == "custom_voice":
        return "generate_custom_voice", dict(speaker=["aiden"] * rows)
    return "generate_voice_design", dict(instruct=["a warm narrator"] * rows)


greedy = dict(do_sample=False, subtalker_dosample=False)
kind, folder, recording = sys.argv[1:]
upstream = load_upstream(folder, "cpu")
if kind == "base":
    ours = accelerate(load_upstream(folder, "cpu"), max_seq_len=256)
else:
    ours = load(folder, "cpu", max_seq_len=256)
decoder = ours.model.talker.generate.__self__
total = 0

requests = (["Hello."], 0, greedy), (["Hello."], 3, {}), (["One.", "Two, longer."], 4, {}), (["Three."], 5, {})
for texts, seed, settings in requests:
    method, arguments = voice(kind, Path(folder), len(texts))
    arguments |= dict(text=texts, language=["English"] * len(texts), max_new_tokens=12, **settings)
    expected, after = codes(upstream, method, seed, **arguments)
    for entry in captured:
        entry[1] = 0
    tokens, after_ours = codes(ours, method, seed, **arguments)

    assert after_ours == after
    for row, expected_row in zip(tokens, expected, strict=True):
        assert torch.equal(row, expected_row), (kind, texts)
    # Every frame went through the captured steps: they were replayed once per frame, and hold what was returned.
    frames = max(map(len, tokens))
    total += frames
    replays = {type(fn.__self__).__name__: count for fn, count in captured if count}
    assert replays.keys() == {"TalkerGraph", "PredictorGraph"}
    assert all(frames - 1 <= count <= frames + 1 for count in replays.values())
    for row, tokens_of_row in enumerate(tokens):
        assert torch.equal(decoder.graphs.rows.codes[row, : len(tokens_of_row)], tokens_of_row)
assert total > 20
print(kind)

files = [Path(module.__file__) for module in sys.modules.values() if getattr(module, "__file__", None)]
print("own:", *sorted({file.name for file in files if file.parent == Path.cwd()}))
if kind == "base":
    incomplete = shutil.copytree(folder, "incomplete")
    weights = load_file(f"{folder}/model.safetensors")
    weights = {f"module.{name}": weight for name, weight in weights.items()}
    save_file(weights, f"{incomplete}/model.safetensors", {"format": "pt"})
    for model in (incomplete, "tinny"):
        try:
            load(model, "cpu")
        except ValueError as error:
            print("error:", error)
    for line in (
        "extract_speaker.py --ref_audio nowhere.wav",
        f"extract_speaker.py --ref_audio {recording} --output me.pt --model {folder}",
        f"generate.py --model {folder} --speaker me.pt --text Hello! --output out.wav",
        f"generate.py --model {folder} --speaker nobody.pt --text Hello! --output out.wav",
    ):
        sys.argv = line.split()
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert end.code == 2
"""


@pytest.mark.parametrize("kind", ["base", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)])
def test_the_copy_speaks_with_upstreams_tokens(kind, checkpoint, recording, tmp_path):
    """Something of the project that the core needs when it loads or speaks, and which a copy does not have.

    Without the package, the two scripts are commands with a few options, and a missing file is one line.
    """
    copy, voice = tmp_path / "copy", tmp_path / "voice.wav"
    copy.mkdir()
    for name in {*FILES, *COMMANDS}:
        shutil.copy(ROOT / name, copy)
    soundfile.write(voice, *recording)
    (copy / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "program.py", kind, checkpoint(kind), voice]
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    spoken, own, *commands = result.stdout.splitlines()
    assert spoken == kind
    assert own.split()[1:] == sorted([*FILES, "program.py"])

    files = {*FILES, *COMMANDS, "program.py"}
    if kind == "base":
        files |= {"me.pt", "out.wav"}
        assert [line for line in result.stderr.splitlines() if "error" in line] == [
            "extract_speaker.py: error: there is no recording nowhere.wav",
            "generate.py: error: there is no speaker file nobody.pt: make one with extract_speaker.py",
        ]
        info = soundfile.info(copy / "out.wav")
        assert info.samplerate == 24000 and info.frames > 0 and info.frames % 1920 == 0
        weights, unknown, *commands = commands
        assert weights.startswith("error: incomplete has 104 missing weights: speaker_encoder.")
        assert unknown.startswith("error: there is no folder tinny: give another, a hub id, or one of 0.6B, 1.7B, ")
        spoken = f"out.wav: {info.frames / 24000:.2f} s of audio"
        assert commands == ["me.pt: 64 numbers from 2.0 s of audio", spoken]
    assert sorted(path.name for path in copy.iterdir() if path.is_file()) == sorted(files)
