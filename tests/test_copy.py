"""The reference stands alone: its files in an empty folder load a model and speak, with upstream's tokens."""

import os
import shutil
import subprocess
import sys

import pytest
import soundfile
import torch
from helpers import GREEDY, ROOT, slow

FILES = "cudagraph_talker.py", "cudagraph_predictor.py", "generate.py"
COMMANDS = "generate.py", "extract_speaker.py"

PROGRAM = """
import runpy, shutil, sys, warnings
from pathlib import Path

sys.modules["qwen3_tts_cuda_graphs"] = None  # setup.sh has installed it: it is not there for the copy

import no_compiler
import torch
from safetensors.torch import load_file, save_file

import generate

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="the speech was cut off")
captured = []  # every function that was captured, and how often it was replayed


def counting_capture(pool, fn):
    replay, entry = capture(pool, fn), [fn, 0]
    captured.append(entry)

    def counted():
        entry[1] += 1
        replay()

    return counted


capture = generate.GraphPool.capture
generate.GraphPool.capture = counting_capture
folder, recording = sys.argv[1:]
tts = generate.accelerate(generate.load_upstream(folder, "cpu"), max_seq_len=256)
model, loop = tts.model, tts.model.talker.generate.__self__
for method, arguments, seed, expected, after in torch.load("requests.pt", weights_only=True):
    results = []
    model.generate = lambda **kwargs: results.append(type(model).generate(model, **kwargs)) or results[0]
    for entry in captured:
        entry[1] = 0
    torch.manual_seed(seed)
    getattr(tts, method)(**arguments)
    del model.generate
    assert torch.equal(torch.rand(1), after)
    for number, (row, expected_row) in enumerate(zip(results[0][0], expected, strict=True)):
        assert torch.equal(row, expected_row), arguments
        assert torch.equal(loop.graphs.rows.codes[number, : len(row)], row)
    # Every frame went through the captured steps: they were replayed once per frame.
    frames = max(map(len, expected))
    replays = {type(fn.__self__).__name__: count for fn, count in captured if count}
    assert replays.keys() == {"TalkerGraph", "PredictorGraph"}
    assert all(frames - 1 <= count <= frames + 1 for count in replays.values()) and frames > 1

files = [Path(module.__file__) for module in sys.modules.values() if getattr(module, "__file__", None)]
print("own:", *sorted({file.name for file in files if file.parent == Path.cwd()}))
if recording:
    incomplete = shutil.copytree(folder, "incomplete")
    weights = load_file(f"{folder}/model.safetensors")
    weights = {f"module.{name}": weight for name, weight in weights.items()}
    save_file(weights, f"{incomplete}/model.safetensors", {"format": "pt"})
    for folder_or_name in (incomplete, "tinny"):
        try:
            generate.load(folder_or_name, "cpu")
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


@pytest.mark.parametrize("name", ["x-vector", *slow("preset", "designed")])
def test_the_copy_speaks_with_upstreams_tokens(name, voices, recording, tmp_path):
    """Something of the project that the core needs when it loads or speaks, and which a copy does not have.

    Without the package, the two scripts are commands with a few options, and a missing file is one line.
    """
    voice, copy, recorded = voices(name).end_comes_up(True), tmp_path / "copy", tmp_path / "voice.wav"
    copy.mkdir()
    for file in {*FILES, *COMMANDS}:
        shutil.copy(ROOT / file, copy)
    soundfile.write(recorded, *recording)
    (copy / "program.py").write_text(PROGRAM)
    requests = []
    for seed, (text, settings) in enumerate(((["Hello."], GREEDY), (["Hello."], {}), (["One.", "Two, longer."], {}))):
        arguments = voice.arguments | dict(text=text, max_new_tokens=12, **settings)
        requests.append((voice.method, arguments, seed, *voice.codes(voice.upstream, seed, **arguments)))
    torch.save(requests, copy / "requests.pt")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}  # for no_compiler
    command = [sys.executable, "program.py", voice.folder, recorded if name == "x-vector" else ""]
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    own, *commands = result.stdout.splitlines()
    assert own.split()[1:] == sorted([*FILES, "program.py"])

    files = {*FILES, *COMMANDS, "program.py", "requests.pt"}
    if name == "x-vector":
        files |= {"me.pt", "out.wav"}
        assert [line for line in result.stderr.splitlines() if "error" in line] == [
            "extract_speaker.py: error: there is no recording nowhere.wav",
            "generate.py: error: there is no speaker file nobody.pt: make one with extract_speaker.py",
        ]
        info = soundfile.info(copy / "out.wav")
        assert info.samplerate == 24000 and info.frames > 0 and info.frames % 1920 == 0
        weights, unknown, *commands = commands
        assert weights.startswith("error: incomplete has 100 missing weights: speaker_encoder.")
        assert unknown.startswith("error: there is no folder tinny: give another, a hub id, or one of 0.6B, 1.7B, ")
        spoken = f"out.wav: {info.frames / 24000:.2f} s of audio"
        assert commands == ["me.pt: 64 numbers from 2.0 s of audio", spoken]
    assert {path.name for path in copy.iterdir() if path.is_file()} == files
