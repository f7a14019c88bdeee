"""Simulated listeners of a stream, which may come from a model, the engine or a server. Standard library only.

A listener reads its stream as fast as it comes, and plays it from the first chunk on. An underrun is a chunk that
arrives after the player needs it.
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
MAX_THREADS = 10_000  # an executor starts only as many as it needs
HEAD_START = 0.3  # seconds by which a listener's thread starts before its request

StartStream = Callable[[], Generator]  # yields tuples that begin with the samples and their rate


@dataclass
class Hearing:
    """What one listener has heard, and when."""

    asked: float  # time.perf_counter() of the request
    first_audio_ms: float | None = None
    seconds: float = 0.0  # of audio
    underruns: int = 0


def listen(start_stream: StartStream, leave_after: float = math.inf, ask_at: float = 0.0) -> Hearing:
    """Start a stream, not before the time `ask_at`, and listen until more than `leave_after` seconds of audio have
    come."""
    sleep_until(ask_at)
    heard = Hearing(asked=time.perf_counter())
    with contextlib.closing(start_stream()) as chunks:
        for samples, rate, *_ in chunks:
            now = time.perf_counter()
            if heard.first_audio_ms is None:
                heard.first_audio_ms = (now - heard.asked) * 1e3
                playback_began = now
            elif now > playback_began + heard.seconds:
                heard.underruns += 1
            heard.seconds += len(samples) / rate
            if heard.seconds > leave_after:
                break
    return heard


def poisson_arrivals(per_second: float, seconds: float) -> Iterator[float]:
    """Times in seconds at which independent listeners start their requests."""
    generator = random.Random(0)
    arrival = 0.0
    while (arrival := arrival + generator.expovariate(per_second)) < seconds:
        yield arrival


def listen_at(
    start_stream: StartStream, arrivals: Iterable[float], threads: int = MAX_THREADS
) -> tuple[list[Hearing], float]:
    """Start a listener, in a thread of its own, at each of these times, so that slow answers delay nobody else.

    Threads start ahead of their listeners' requests: the start of a hundred threads takes longer than an answer, and is
    not what is measured. Returns what the listeners heard, and the seconds until all had finished.
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
    """A row of the results. wall: seconds that all listeners took together"""
    times = sorted(heard.first_audio_ms for heard in listeners if heard.first_audio_ms is not None)
    return dict(
        listeners=len(listeners),
        audio_seconds_per_second=sum(heard.seconds for heard in listeners) / wall,
        first_audio_ms=statistics.median(times) if times else None,
        first_audio_p95_ms=percentile(times, 0.95),
        first_audio_p99_ms=percentile(times, 0.99),
        underruns=sum(heard.underruns for heard in listeners),
    )


def percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least this share of all values does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None
