"""How much is measured, and how a call is timed. Every row speaks the same text with the same settings.

Figures are medians. Beside each, a row has the minimum and maximum (`..._spread`) and the number of runs (`..._runs`).
"""

import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from qwen3_tts_cuda_graphs.bench import MEGAKERNEL, SEPARATE
from qwen3_tts_cuda_graphs.bench.listeners import listen
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of
from qwen3_tts_cuda_graphs.speech.streaming import stream

ON_GPU = torch.cuda.is_available()
TEXT = (
    "Real time speech synthesis means that the first sound arrives before you notice the wait. A voice that "
    "answers at once seems present, and one that hesitates does not, however well it speaks. So we count the "
    "milliseconds from the last letter of the question to the first sound of the answer, and all that follow."
)

PUBLISHED_TOKENS = 63  # number of TEXT's tokens in a published model; in a random checkpoint every byte is a token

Row = dict[str, Any]
NamedRows = Iterator[tuple[str, Row]]


@dataclass(frozen=True)
class Effort:
    """How much is measured. The defaults are those of a full run on a GPU."""

    is_quick: bool = False  # leaves out some rows
    runs: int = 3
    frames: tuple[int, int] = (40, 120)  # the two lengths of a whole call
    upstream_frames: tuple[int, int] = (4, 16)  # the same for upstream, which is slow
    first_audio_runs: int = 20
    late_chunk_frames: int = 750  # length of the stream (60 s) that is checked for late chunks

    # --streams
    streams: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256)  # numbers of listeners who ask at once
    streams_runs: int = 5  # for each of these numbers, because single runs differ by 5 to 10%
    long_streams: tuple[int, ...] = (320, 400)  # numbers of listeners who ask at once, for 60 s each
    poisson_seconds: float = 60  # duration of requests at random times
    lists: tuple[int, ...] = (4, 16, 64)  # numbers of texts in a list

    # --ready
    ready_runs: int = 5

    # --listen
    sentences: int | None = None  # per language; None: all
    recognizer: str = ""  # hub id or folder of the speech recognizer


SMALL = Effort(
    runs=1,
    frames=(8, 24),
    upstream_frames=(2, 6),
    first_audio_runs=5,
    late_chunk_frames=24,
    streams=(1, 2, 4),
    streams_runs=1,
    long_streams=(),
    poisson_seconds=0,
    lists=(2,),
    ready_runs=1,
    sentences=1,
)


def choose_effort(is_quick: bool, recognizer: str) -> Effort:
    return replace(SMALL if is_quick or not ON_GPU else Effort(), is_quick=is_quick, recognizer=recognizer)


# ---- The calls


def speech_arguments(frames: int, texts: int = 1, text: str = TEXT, **voice) -> dict:
    """Arguments of upstream's methods that speak a text, or a list of the same text, for a number of frames."""
    return dict(text=[text] * texts, language="English", max_new_tokens=frames + 1, **voice)  # the last has no audio


def whole_call(method: Callable, **voice) -> Callable[[int], float]:
    """Return a function that speaks a number of frames and returns the seconds of audio."""

    def speak(frames: int) -> float:
        (audio,), rate = method(**speech_arguments(frames, **voice))
        return len(audio) / rate

    return speak


def streamed_call(method: Callable, chunk_frames: int | None = None, **voice) -> Callable[[int], Generator]:
    """Return a function that starts a stream of a number of frames."""
    return lambda frames: stream(method, chunk_frames=chunk_frames, **speech_arguments(frames, **voice))


# ---- Timers


def clock(fn: Callable[[], Any]) -> tuple[float, Any]:
    """Call `fn` with the GPU idle before and after. Returns the milliseconds and the result."""
    synchronize()
    start = time.perf_counter()
    result = fn()
    synchronize()
    return (time.perf_counter() - start) * 1e3, result


def repeat(run: Callable[[], Any], runs: int) -> list:
    """Call `run` once as a warm-up, and then `runs` times. Returns the results except that of the warm-up."""
    return [run() for _ in range(1 + runs)][1:]


def median_of(name: str, values: Sequence[float]) -> Row:
    return {name: statistics.median(values), f"{name}_spread": [min(values), max(values)], f"{name}_runs": len(values)}


def time_whole_calls(speak: Callable[[int], float], frames: tuple[int, int], effort: Effort) -> Row:
    """Time calls of two lengths: x real time is that of the longer one, ms per frame the slope between them."""

    def run() -> tuple[float, float, float]:
        (short_ms, short), (long_ms, long) = (clock(partial(speak, length)) for length in frames)
        if long <= short:
            raise ValueError(f"the speech ends after {round(long * FRAME_RATE)} frames: too soon to time")
        return long, long / (long_ms / 1e3), (long_ms - short_ms) / ((long - short) * FRAME_RATE)

    seconds, x_real_time, ms_per_frame = zip(*repeat(run, effort.runs))
    medians = median_of("x_real_time", x_real_time) | median_of("ms_per_frame", ms_per_frame)
    return dict(frames=round(seconds[-1] * FRAME_RATE), **medians)


def time_stream(start_stream: Callable[[int], Generator], effort: Effort) -> Row:
    """Time to the first audio, from the call to samples on the host, and x real time of whole streams."""
    start = partial(start_stream, effort.frames[-1])

    def first_audio_ms() -> float:
        synchronize()
        return listen(start, leave_after=0).first_audio_ms

    def x_real_time() -> float:
        ms, heard = clock(partial(listen, start))
        return heard.seconds / (ms / 1e3)

    first_audio = median_of("first_audio_ms", repeat(first_audio_ms, effort.first_audio_runs))
    return first_audio | median_of("x_real_time", repeat(x_real_time, effort.runs))


def load_measured(model: str):
    """Free earlier models, reset the peak of the memory that `peak_gib` returns, and load upstream's model."""
    gc.collect()
    tts = load_upstream(model)
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return tts


def available_paths(tts) -> list[str]:
    """The paths of fast/ that run on this machine, the fastest last."""
    return [SEPARATE] if SOURCE.why_not(*stacks_of(tts.model.talker)) else [SEPARATE, MEGAKERNEL]


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
