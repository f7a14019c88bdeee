"""`bench.py --ready`: how long until a process speaks?

Each run starts three new processes, one after the other. The first imports upstream, loads its model, accelerates it
and makes ten requests. The second is `qwen3-tts speak --stream`, timed from its start to its first audio. The third is
`qwen3-tts serve`, timed from its start to its first audio, and again from `kill -9` of its engine to the next. All read
the same files, so the disk's cache is as warm for one as for the other. Before them, one process of the first kind
starts with an empty cache of compiled kernels.

python -m qwen3_tts_cuda_graphs.bench.ready MODEL speaker.pt    is the first of these processes
"""

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Nothing heavy: the first such import is upstream's.
from qwen3_tts_cuda_graphs.bench.listeners import TEXT, listen
from qwen3_tts_cuda_graphs.bench.over_http import running_server, until_it_speaks
from qwen3_tts_cuda_graphs.bench.processes import print_rows, printed_by, rows_from
from qwen3_tts_cuda_graphs.common.quick_start import bytecode_environment, keep_bytecode

REQUESTS = 10
WAV_HEADER = 44  # bytes


def time_ready(checkpoint, effort) -> Iterator[tuple[str, dict]]:
    """A row of the benchmark, after every run again: medians of the runs so far, and the one with an empty cache."""
    runs = []
    keep_bytecode()  # in the user's folder, for all of them
    with tempfile.TemporaryDirectory() as kernels:
        environment = os.environ | bytecode_environment() | {"QWEN3_TTS_KERNEL_CACHE": kernels}
        empty_cache = run_library(checkpoint, environment)
        for _ in range(effort.processes):
            library = run_library(checkpoint, environment)
            shell = dict(shell_to_first_audio_s=run_shell(checkpoint, environment))
            runs.append(library | shell | run_server(checkpoint, environment))
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            yield "ready", row | dict(runs=len(runs), accelerate_empty_cache_s=empty_cache["accelerate_s"])


def run_library(checkpoint, environment: dict) -> dict:
    start = time.monotonic()
    ((_, times),) = rows_from("ready", checkpoint.model, checkpoint.speaker_file, environment=environment)
    return dict(upstream_imported_and_loaded_s=times.pop("loaded_at") - start) | times


def run_shell(checkpoint, environment: dict) -> float:
    voice = ["--model", checkpoint.model, "--speaker", checkpoint.speaker_file]
    program = ["-m", "qwen3_tts_cuda_graphs", "speak", *voice, "--text", TEXT, "--stream", "--output", "-"]
    start = time.monotonic()
    output = printed_by(program, WAV_HEADER + 1, environment=environment)
    next(output)
    return time.monotonic() - start


def run_server(checkpoint, environment: dict) -> dict:
    start = time.monotonic()
    voice = ["--model", checkpoint.model, "--speaker", checkpoint.speaker_file]
    with running_server(*voice, environment=environment) as (server, url):
        until_it_speaks(server, url)
        ready = time.monotonic()
        os.kill(engine_of(server.pid), signal.SIGKILL)
        killed = time.monotonic()
        until_it_speaks(server, url)
        return dict(server_to_first_audio_s=ready - start, server_healed_s=time.monotonic() - killed)


def engine_of(server: int) -> int:
    """The process of its model. Others encode, or wait."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server and b".serving.worker\0" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise ValueError("the server has no engine")


def first_requests(model: str, speaker_file: str) -> Iterator[tuple[str, dict]]:
    """The first of these processes, in itself."""
    import torch

    from qwen3_tts_cuda_graphs.common.loading import load_upstream
    from qwen3_tts_cuda_graphs.speech import accelerate

    tts = load_upstream(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loaded_at = time.monotonic()  # the same clock in all processes
    accelerate(tts)
    accelerate_s = time.monotonic() - loaded_at

    from qwen3_tts_cuda_graphs.prompts.clone_prompts import speaker_prompt
    from qwen3_tts_cuda_graphs.speech.streaming import stream

    voice = speaker_prompt(torch.load(speaker_file, weights_only=True))
    arguments = dict(text=TEXT, language="English", voice_clone_prompt=voice, max_new_tokens=40)
    requests = [listen(lambda: stream(tts.generate_voice_clone, **arguments), leave_after=0) for _ in range(REQUESTS)]
    times = dict(first_request_ms=requests[0].first_audio_ms, tenth_request_ms=requests[-1].first_audio_ms)
    yield "ready", dict(loaded_at=loaded_at, accelerate_s=accelerate_s, **times)


if __name__ == "__main__":
    print_rows(first_requests(*sys.argv[1:]))
