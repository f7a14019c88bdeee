"""`bench.py --streams`: many listeners, and lists of texts, on one GPU through speech/engine.py."""

import statistics
from collections.abc import Callable, Generator
from functools import partial

import torch

from qwen3_tts_cuda_graphs.bench.listeners import listen_at, poisson_arrivals, summary
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.timing import (
    Effort,
    NamedRows,
    Row,
    clock,
    load_measured,
    median_of,
    repeat,
    speech_arguments,
)
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.engine import Engine

REQUESTS_PER_SECOND = 20
POISSON_FRAMES = round(4.6 * FRAME_RATE)
LONG_FRAMES = round(60 * FRAME_RATE)
COLUMNS = ["audio_seconds_per_second", "first_audio_ms", "first_audio_p95_ms", "first_audio_p99_ms"]
COLUMNS += ["underruns", "seconds_to_capture"]


def measure(checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    rows = max(*effort.streams, *effort.long_streams, *effort.lists)
    tts = load_measured(checkpoint.model)
    before = memory_gib()
    capture_ms, engine = clock(lambda: Engine(accelerate(tts, rows=rows)))
    engine_row = dict(seconds_to_capture=capture_ms / 1e3, gib_per_stream=(memory_gib() - before) / rows)

    def stream_of(frames: int) -> Callable[[], Generator]:
        arguments = speech_arguments(frames, **checkpoint.voice())
        return lambda: engine.stream(tts.generate_voice_clone, **arguments)

    with engine:
        for count in effort.streams:
            name = "1 stream alone" if count == 1 else f"{count} streams at once"
            listeners_at_once = partial(listen_at, stream_of(effort.frames[-1]), [0.0] * count)
            runs = [summary(*heard) for heard in repeat(listeners_at_once, effort.streams_runs)]
            yield name, medians(runs) | engine_row
        if effort.poisson_seconds:
            arrivals = poisson_arrivals(REQUESTS_PER_SECOND, effort.poisson_seconds)
            row = summary(*listen_at(stream_of(POISSON_FRAMES), arrivals))
            yield f"{REQUESTS_PER_SECOND} requests per second for {effort.poisson_seconds:g} s", row
        for count in effort.long_streams:
            yield f"{count} listeners for 60 s", summary(*listen_at(stream_of(LONG_FRAMES), [0.0] * count))
        yield "lists", {str(count): time_list(tts, engine, checkpoint, count, effort) for count in effort.lists}


def medians(runs: list[Row]) -> Row:
    """The median of each figure over the runs, and the sum of the underruns."""
    columns = {name: [row[name] for row in runs] for name in runs[0]}
    row = {name: statistics.median(values) if None not in values else None for name, values in columns.items()}
    speed = "audio_seconds_per_second"
    return row | median_of(speed, columns[speed]) | dict(underruns=sum(columns["underruns"]))


def time_list(tts, engine: Engine, checkpoint: Checkpoint, texts: int, effort: Effort) -> Row:
    """Audio seconds per second of a list of texts. Upstream's method and the engine take turns."""
    arguments = speech_arguments(effort.frames[-1], texts, **checkpoint.voice(texts))
    calls = {
        "upstream_method": partial(tts.generate_voice_clone, **arguments),
        "engine": partial(engine.generate, tts.generate_voice_clone, **arguments),
    }

    def run() -> list[float]:
        timed = map(clock, calls.values())
        return [sum(map(len, audios)) / rate / (ms / 1e3) for ms, (audios, rate) in timed]

    speeds = zip(*repeat(run, effort.runs))
    return {name: statistics.median(values) for name, values in zip(calls, speeds)}


def memory_gib() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
