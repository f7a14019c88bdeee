"""Listeners of a stream, whoever speaks: a model, the engine or a server. Needs only Python's standard library.

A listener reads its stream as fast as it comes and plays from the first chunk on. An underrun is a chunk that arrives
after the player needs it.
"""

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

TEXT = "Real time speech synthesis means that the first sound arrives before you notice the wait."
NO_LIMIT = 10_000  # threads; only as many are started as are needed
HEAD_START = 0.3  # seconds in which hundreds of threads are started, before their listeners ask

StartStream = Callable[[], Generator]  # yields samples, how many of them make a second, and what a listener ignores


@dataclass
class Hearing:
    """What one request was like."""

    asked: float  # time.perf_counter()
    first_audio_ms: float | None = None
    seconds: float = 0.0  # of audio
    underruns: int = 0


def listen(start_stream: StartStream, leave_after: float = math.inf, ask_at: float = 0.0) -> Hearing:
    """Ask for a stream at this time and take the times. `leave_after`: seconds of audio after which the listener goes
    away."""
    sleep_until(ask_at)
    listener = Hearing(asked=time.perf_counter())
    with contextlib.closing(start_stream()) as chunks:
        for samples, rate, *_ in chunks:
            now = time.perf_counter()
            if listener.first_audio_ms is None:
                listener.first_audio_ms = (now - listener.asked) * 1e3
                playback_began = now
            elif now > playback_began + listener.seconds:
                listener.underruns += 1
            listener.seconds += len(samples) / rate
            if listener.seconds > leave_after:
                break
    return listener


def poisson_arrivals(per_second: float, seconds: float, seed: int = 0) -> Iterator[float]:
    """Times at which independent listeners ask."""
    dice = random.Random(seed)
    arrival = 0.0
    while (arrival := arrival + dice.expovariate(per_second)) < seconds:
        yield arrival


def crowd(start_stream: StartStream, arrivals: Iterable[float], threads: int = NO_LIMIT) -> dict:
    return summary(*listen_at(start_stream, arrivals, threads))


def listen_at(
    start_stream: StartStream, arrivals: Iterable[float], threads: int = NO_LIMIT
) -> tuple[list[Hearing], float]:
    """A listener in a thread of its own at each of these times. Slow answers do not delay later listeners. Returns
    what they heard, and how many seconds it took.

    Each thread is started a little before its time: what starts threads is not what is measured, and a hundred of them
    take longer to start than to be answered.
    """
    began = time.perf_counter() + HEAD_START
    with ThreadPoolExecutor(threads, "listener") as pool:
        futures = []
        for arrival in arrivals:
            sleep_until(began + arrival - HEAD_START)
            futures.append(pool.submit(listen, start_stream, ask_at=began + arrival))
    return [future.result() for future in futures], time.perf_counter() - began


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def summary(listeners: list[Hearing], wall: float) -> dict:
    times = sorted(listener.first_audio_ms for listener in listeners if listener.first_audio_ms is not None)
    return dict(
        listeners=len(listeners),
        audio_seconds_per_second=sum(listener.seconds for listener in listeners) / wall,
        first_audio_ms=statistics.median(times) if times else None,
        first_audio_p95_ms=percentile(times, 0.95),
        first_audio_p99_ms=percentile(times, 0.99),
        underruns=sum(listener.underruns for listener in listeners),
    )


def percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that is not below this share of all values."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None
