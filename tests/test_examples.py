"""The examples: all of them compile, and those whose packages are installed run against a real server."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from helpers import ROOT
from serving_helpers import FRAME, LIMIT, RunningServer, load_speech

from qwen3_tts_cuda_graphs.common.subtitles import format_subtitles
from qwen3_tts_cuda_graphs.prompts.script import Cue, Part

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    speech = load_speech(checkpoint("custom_voice"), tmp_path_factory.mktemp("voices"))
    with RunningServer(speech) as server:
        yield server
    speech.close()


def run(folder, name, *arguments):
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=LIMIT, check=True)


@pytest.fixture
def run_here(monkeypatch, capfdbinary, tmp_path):
    """run_here(name, argument, ...) -> stdout, stderr of an example in this process, which has its packages."""
    monkeypatch.chdir(tmp_path)

    def run_here(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capfdbinary.readouterr()

    return run_here


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_compile_and_say_how_to_run_them(path):
    source = path.read_text()
    compile(source, str(path), "exec")
    assert f"python examples/{path.name}" in source and "Run with " in source and "pip install " in source
    assert len(source.splitlines()) <= 60


def test_the_openai_client(server, run_here, tmp_path):
    """Whole, streamed and as server-sent events."""
    url = ["--url", f"http://127.0.0.1:{server.port}/v1"]
    run_here("openai_client.py", "Hello there.", "whole.mp3", *url)
    assert soundfile.info(tmp_path / "whole.mp3").duration > 0.05
    streamed, _ = run_here("openai_client.py", "Hello there.", "-", *url)
    assert len(streamed) > 0 and len(streamed) % FRAME == 0
    audio, events = run_here("openai_client.py", "Hello there.", "-", "--sse", *url)
    assert len(audio) > 0 and len(audio) % FRAME == 0
    assert f"'output_tokens': {len(audio) // FRAME}" in events.decode()


@pytest.mark.parametrize(
    "name, needs, path",
    [
        ("pipecat_tts.py", ["pipecat"], "/v1"),
        ("livekit_openai.py", ["livekit.plugins.openai"], "/v1"),
        ("websocket_client.py", ["websockets"], "/v1/audio/speech/stream"),
        ("livekit_websocket.py", ["livekit.plugins.baseten"], "/v1/audio/speech/stream"),
        ("realtimetts_engine.py", ["RealtimeTTS", "pyaudio"], "/v1"),
    ],
)
def test_other_clients(server, tmp_path, name, needs, path):
    """Not installed by setup.sh: run where somebody has installed them."""
    for module in needs:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if not found:
            pytest.skip(f"{module} is not installed")
    scheme = "ws" if path.endswith("stream") else "http"
    muted = ["muted"] if name.startswith("realtimetts") else []
    printed = run(tmp_path, name, f"{scheme}://127.0.0.1:{server.port}{path}", *muted).stdout.decode()
    assert "s of audio" in printed or (tmp_path / "realtimetts.wav").stat().st_size > 2 * 1920


ALIGNER = """
from types import SimpleNamespace

class Qwen3ForcedAligner:
    @classmethod
    def from_pretrained(cls, model, **options):
        return cls()

    def align(self, audio, text, language):
        samples, rate = audio
        times = dict(start_time=round(float(samples[0]), 3), end_time=len(samples) / rate + 1)
        return [[SimpleNamespace(text=word, **times) for word in text.split()]]
"""


def test_word_times(tmp_path):
    """The aligner, here a stand-in, gets the samples of each part; its times begin with the part's, and end with it."""
    (tmp_path / "qwen_asr.py").write_text(ALIGNER)
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(bool)\n")
    samples = np.repeat(np.float32([0.05, 0, 0.1]), [2400, 1200, 3600])
    soundfile.write(tmp_path / "book.wav", samples, 24000, "FLOAT")
    parts = [Cue(Part("One two."), 0, 2400), Cue(Part("..."), 2400, 3600), Cue(Part("Drei."), 3600, 7200)]
    (tmp_path / "book.json").write_text(format_subtitles(".json", parts, 24000))
    command = [sys.executable, ROOT / "examples" / "word_times.py", "book.wav", "book.json", "--language", "German"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=LIMIT, check=True)
    words = [part["words"] for part in json.loads((tmp_path / "book.json").read_text())["parts"]]
    assert [len(of_part) for of_part in words] == [2, 0, 1]
    assert words[0][1] == {"text": "two.", "start_seconds": 0.05, "end_seconds": 0.1}
    assert words[2] == [{"text": "Drei.", "start_seconds": 0.25, "end_seconds": 0.3}]
