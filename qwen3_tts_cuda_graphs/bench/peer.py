"""faster-qwen3-tts on the same checkpoint, in a process of its own: it needs transformers 5.

`./setup.sh none --transformers5 --test` puts it into .venv5.
"""

import importlib.metadata
import os
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path

import torch
import transformers

from qwen3_tts_cuda_graphs.bench import PEER, ROOT
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.processes import print_rows, rows_from
from qwen3_tts_cuda_graphs.bench.timing import ON_GPU, TEXT, Effort, NamedRows, time_stream, time_whole_calls
from qwen3_tts_cuda_graphs.common.model_names import hub_name


def run_peer(checkpoint: Checkpoint, python: Path = ROOT / ".venv5" / "bin" / "python") -> NamedRows:
    """Run `time_peer` in a process of `python` and yield its rows. If it fails, print why and yield no more."""
    environment = os.environ | {"PYTHONPATH": f"{python.parents[1] / 'peers'}{os.pathsep}{ROOT}"}
    try:
        yield from rows_from("peer", checkpoint.model, checkpoint.speaker_file, python=python, environment=environment)
    except (OSError, ValueError) as error:
        print(f"{PEER} left out: {error}")


def time_peer(model: str, speaker_file: str, effort: Effort) -> NamedRows:
    from faster_qwen3_tts import FasterQwen3TTS

    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    tts = FasterQwen3TTS.from_pretrained(hub_name(model), device=device, dtype=dtype)
    voice = {"ref_spk_embedding": [torch.load(speaker_file, weights_only=True).to(device, dtype)]}

    def arguments(frames: int) -> dict:
        length = dict(max_new_tokens=frames, min_new_tokens=frames)
        return dict(text=TEXT, language="English", voice_clone_prompt=voice, **length)

    def speak(frames: int) -> float:
        (audio, *_), rate = tts.generate_voice_clone(**arguments(frames))
        return len(audio) / rate

    def start_stream(chunk_size: int, frames: int) -> Generator:
        return tts.generate_voice_clone_streaming(**arguments(frames), chunk_size=chunk_size)

    row = time_whole_calls(speak, effort.frames, effort)
    yield PEER, row | dict(version=importlib.metadata.version(PEER), transformers=transformers.__version__)
    for size in (1, 8):
        yield f"{PEER}, chunks of {size}", time_stream(partial(start_stream, size), effort)


if __name__ == "__main__":
    print_rows(time_peer(*sys.argv[1:], Effort()))
