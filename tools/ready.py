"""`bench.py --ready`: how long until a process speaks?

Each run starts two new processes, one after the other. The first imports upstream, loads its model, accelerates it and
makes ten requests. The second is `generate.py --stream`; it is timed from its start to its first audio. Both read the
same files, so the disk's cache is as warm for one as for the other. Before them, one process of the first kind starts
with an empty cache of compiled kernels.

python tools/ready.py MODEL speaker.pt    is the first of these processes
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.load import ROOT, TEXT

REQUESTS = 10
LIMIT = 300.0  # seconds that a process may take
WAV_HEADER = 44  # bytes


def time_ready(model: str, speaker_file: Path, runs: int) -> Iterator[tuple[str, dict]]:
    """A row of the benchmark, after every run again: medians of the runs so far, and the one with an empty cache."""
    library, shell = [], []
    with tempfile.TemporaryDirectory() as kernels:
        environment = os.environ | {"QWEN3_TTS_KERNEL_CACHE": kernels}
        cold = run_library(model, speaker_file, environment)
        for _ in range(runs):
            library.append(run_library(model, speaker_file, environment))
            shell.append(run_shell(model, speaker_file, environment))
            yield "ready", medians(library, shell) | dict(accelerate_empty_cache_s=cold["accelerate_s"])


def medians(library: list[dict], shell: list[float]) -> dict:
    median = statistics.median
    upstream = [run["imported_and_loaded_s"] for run in library]
    first = [run["first_audio_ms"][0] for run in library]
    tenth = [run["first_audio_ms"][-1] for run in library]
    return dict(
        upstream_imported_and_loaded_s=median(upstream),
        accelerate_s=median(run["accelerate_s"] for run in library),
        shell_to_first_audio_s=median(shell),
        shell_to_first_audio_per_upstream=median(map(float.__truediv__, shell, upstream)),
        first_request_ms=median(first),
        tenth_request_ms=median(tenth),
        first_per_tenth=median(map(float.__truediv__, first, tenth)),
        runs=len(library),
    )


def run_library(model: str, speaker_file: Path, environment: dict) -> dict:
    start = time.monotonic()
    output = first_output([__file__, model, str(speaker_file)], None, environment)
    times = json.loads(output.splitlines()[-1])
    return times | dict(imported_and_loaded_s=times["loaded_at"] - start)


def run_shell(model: str, speaker_file: Path, environment: dict) -> float:
    options = ["--model", model, "--speaker", str(speaker_file), "--text", TEXT, "--stream", "--output", "-"]
    start = time.monotonic()
    first_output([str(ROOT / "generate.py"), *options], WAV_HEADER + 1, environment)
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
            raise ValueError(f"{Path(program[0]).name} has failed: {reason[0]}")
    return output


def main(model: str, speaker_file: str) -> None:
    import torch

    from generate import accelerate, load_upstream

    tts = load_upstream(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loaded_at = time.monotonic()  # the same clock in all processes
    accelerate(tts)
    accelerate_s = time.monotonic() - loaded_at

    from cli.voices import speaker_prompt
    from generate import stream

    voice = dict(language="English", voice_clone_prompt=speaker_prompt(torch.load(speaker_file, weights_only=True)))
    first_audio_ms = []
    for _ in range(REQUESTS):
        start = time.perf_counter()
        chunks = stream(tts.generate_voice_clone, text=TEXT, max_new_tokens=40, **voice)
        next(chunks)
        first_audio_ms.append((time.perf_counter() - start) * 1e3)
        chunks.close()
    print(json.dumps(dict(loaded_at=loaded_at, accelerate_s=accelerate_s, first_audio_ms=first_audio_ms)))


if __name__ == "__main__":
    main(*sys.argv[1:])
