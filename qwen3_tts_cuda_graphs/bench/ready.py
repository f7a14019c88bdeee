"""`bench.py --ready`: how long until a process speaks?

Each run starts three new processes, one after the other. The first imports upstream, loads its model, accelerates it
and makes ten requests. The second is `qwen3-tts speak --stream`, timed from its start to its first audio. The third is
`qwen3-tts serve`, timed from its start to its first audio, and again from `kill -9` of its engine to the next. All read
the same files, so the disk's cache is as warm for one as for the other. Before them, one process of the first kind
starts with an empty cache of compiled kernels.

The first process is this module as a program: python -m qwen3_tts_cuda_graphs.bench.ready MODEL speaker.pt
"""

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

# Nothing here imports torch: the program must meet upstream's imports first.
from qwen3_tts_cuda_graphs.bench.listeners import TEXT, listen
from qwen3_tts_cuda_graphs.bench.over_http import running_server, wait_for_first_audio
from qwen3_tts_cuda_graphs.bench.processes import output_of, print_rows, rows_from
from qwen3_tts_cuda_graphs.common.quick_start import bytecode_environment, keep_bytecode

REQUESTS = 10
WAV_HEADER = 44  # bytes
COLUMNS = []  # no table: the row is printed as text


def measure(checkpoint, effort) -> Iterator[tuple[str, dict]]:
    """Yield the row again after every run, with the medians of the runs so far."""
    runs = []
    keep_bytecode()  # where all processes below look for it
    with tempfile.TemporaryDirectory() as kernels:
        environment = os.environ | bytecode_environment() | {"QWEN3_TTS_KERNEL_CACHE": kernels}
        empty_cache = time_library(checkpoint, environment)
        for _ in range(effort.ready_runs):
            library = time_library(checkpoint, environment)
            shell = dict(shell_to_first_audio_s=time_shell(checkpoint, environment))
            runs.append(library | shell | time_server(checkpoint, environment))
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            yield "ready", row | dict(runs=len(runs), accelerate_empty_cache_s=empty_cache["accelerate_s"])


def time_library(checkpoint, environment: dict) -> dict:
    start = time.monotonic()
    ((_, times),) = rows_from("ready", checkpoint.model, checkpoint.speaker_file, environment=environment)
    return dict(upstream_imported_and_loaded_s=times.pop("loaded_at") - start) | times


def time_shell(checkpoint, environment: dict) -> float:
    voice = ["--model", checkpoint.model, "--speaker", checkpoint.speaker_file]
    program = ["-m", "qwen3_tts_cuda_graphs", "speak", *voice, "--text", TEXT, "--stream", "--output", "-"]
    start = time.monotonic()
    output = output_of(program, WAV_HEADER + 1, environment=environment)
    next(output)
    return time.monotonic() - start


def time_server(checkpoint, environment: dict) -> dict:
    start = time.monotonic()
    voice = ["--model", checkpoint.model, "--speaker", checkpoint.speaker_file]
    with running_server(*voice, environment=environment) as (server, url):
        wait_for_first_audio(server, url)
        ready = time.monotonic()
        os.kill(engine_process_of(server.pid), signal.SIGKILL)
        killed = time.monotonic()
        wait_for_first_audio(server, url)
        return dict(server_to_first_audio_s=ready - start, server_healed_s=time.monotonic() - killed)


def engine_process_of(server: int) -> int:
    """The child process of the server that runs the model. Its other children encode audio, or are spares."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server and b".serving.worker\0" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise ValueError("the server has no engine")


def first_requests(model: str, speaker_file: str) -> Iterator[tuple[str, dict]]:
    """Load a model, accelerate it and make requests, in this process."""
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
    start = partial(stream, tts.generate_voice_clone, **arguments)
    requests = [listen(start, leave_after=0) for _ in range(REQUESTS)]
    times = dict(first_request_ms=requests[0].first_audio_ms, tenth_request_ms=requests[-1].first_audio_ms)
    yield "ready", dict(loaded_at=loaded_at, accelerate_s=accelerate_s, **times)


if __name__ == "__main__":
    print_rows(first_requests(*sys.argv[1:]))
