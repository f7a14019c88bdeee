"""`bench.py --ready`: how long until a process speaks?

Each run starts two new processes, one after the other. The first imports upstream, loads its model, accelerates it and
makes ten requests. The second is `qwen3-tts speak --stream`, timed from its start to its first audio. Both read the
same files, so the disk's cache is as warm for one as for the other. Before them, one process of the first kind starts
with an empty cache of compiled kernels.

python -m qwen3_tts_cuda_graphs.bench.ready MODEL speaker.pt    is the first of these processes
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from qwen3_tts_cuda_graphs.bench.listeners import TEXT, listen  # nothing heavy: the first such import is upstream's

REQUESTS = 10
LIMIT = 300.0  # seconds that a process may take
WAV_HEADER = 44  # bytes


def time_ready(checkpoint, effort) -> Iterator[tuple[str, dict]]:
    """A row of the benchmark, after every run again: medians of the runs so far, and the one with an empty cache."""
    runs = []
    with tempfile.TemporaryDirectory() as kernels:
        environment = os.environ | {"QWEN3_TTS_KERNEL_CACHE": kernels}
        empty_cache = run_library(checkpoint, environment)
        for _ in range(effort.processes):
            library = run_library(checkpoint, environment)
            runs.append(library | dict(shell_to_first_audio_s=run_shell(checkpoint, environment)))
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            yield "ready", row | dict(runs=len(runs), accelerate_empty_cache_s=empty_cache["accelerate_s"])


def run_library(checkpoint, environment: dict) -> dict:
    start = time.monotonic()
    program = ["-m", "qwen3_tts_cuda_graphs.bench.ready", checkpoint.model, str(checkpoint.speaker_file)]
    output = first_output(program, None, environment)
    times = json.loads(output.splitlines()[-1])
    return dict(upstream_imported_and_loaded_s=times.pop("loaded_at") - start) | times


def run_shell(checkpoint, environment: dict) -> float:
    voice = ["--model", checkpoint.model, "--speaker", str(checkpoint.speaker_file)]
    start = time.monotonic()
    program = ["-m", "qwen3_tts_cuda_graphs", "speak", *voice, "--text", TEXT, "--stream", "--output", "-"]
    first_output(program, WAV_HEADER + 1, environment)
    return time.monotonic() - start


def first_output(program: list[str], count: int | None, environment: dict | None = None) -> bytes:
    """The first bytes that a Python program prints; None: all of them. Then it is stopped."""
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, *program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
            killer = threading.Timer(LIMIT, process.kill)
            killer.start()
            output = process.stdout.read(count)
            killer.cancel()
            if count is not None:
                process.kill()
        if len(output) < (count or 1):
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["it took too long"]
            raise ValueError(f"{' '.join(program[:3])} has failed: {reason[0]}")
    return output


def main(model: str, speaker_file: str) -> None:
    import torch

    from qwen3_tts_cuda_graphs.common.loading import load_upstream
    from qwen3_tts_cuda_graphs.speech import accelerate

    tts = load_upstream(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loaded_at = time.monotonic()  # the same clock in all processes
    accelerate(tts)
    accelerate_s = time.monotonic() - loaded_at

    from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
    from qwen3_tts_cuda_graphs.speech.streaming import stream

    voice = speaker_prompt(torch.load(speaker_file, weights_only=True))
    arguments = dict(text=TEXT, language="English", voice_clone_prompt=voice, max_new_tokens=40)
    requests = [listen(lambda: stream(tts.generate_voice_clone, **arguments), leave_after=0) for _ in range(REQUESTS)]
    times = dict(first_request_ms=requests[0].first_audio_ms, tenth_request_ms=requests[-1].first_audio_ms)
    print(json.dumps(dict(loaded_at=loaded_at, accelerate_s=accelerate_s, **times)))


if __name__ == "__main__":
    main(*sys.argv[1:])
