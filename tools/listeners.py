"""`bench.py --streams`: many listeners on one GPU, through serving.engine.

Every listener is a thread that reads its stream as fast as it comes. It counts an underrun for each chunk that arrives
after a player that started with the first chunk would have needed it.
"""

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch

from cli.checkpoints import FRAME_RATE
from serving.engine import Engine


class Listener(threading.Thread):
    """Asks for one stream and takes the times."""

    def __init__(self, start_stream: Callable[[], Iterator]):
        super().__init__(daemon=True)
        self.start_stream = start_stream
        self.seconds = 0.0
        self.underruns = 0
        self.first_audio_ms = None
        self.error = None

    def run(self) -> None:
        asked = time.perf_counter()
        try:
            for audio, rate in self.start_stream():
                now = time.perf_counter()
                if self.first_audio_ms is None:
                    self.first_audio_ms = (now - asked) * 1e3
                    playback = now
                elif now > playback + self.seconds:
                    self.underruns += 1
                self.seconds += len(audio) / rate
        except Exception as error:
            self.error = error


def at_once(start_stream: Callable[[], Iterator], count: int) -> dict:
    """`count` requests in the same instant."""
    listeners = [Listener(start_stream) for _ in range(count)]
    start = time.perf_counter()
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join()
    return summary(listeners, time.perf_counter() - start)


def poisson(start_stream: Callable[[], Iterator], per_second: float, seconds: float, seed: int = 0) -> dict:
    """Requests that arrive independently of each other."""
    dice = random.Random(seed)
    listeners = []
    start = time.perf_counter()
    arrival = start
    while (arrival := arrival + dice.expovariate(per_second)) < start + seconds:
        time.sleep(max(0.0, arrival - time.perf_counter()))
        listeners.append(Listener(start_stream))
        listeners[-1].start()
    for listener in listeners:
        listener.join()
    return summary(listeners, time.perf_counter() - start)


def summary(listeners: list[Listener], wall: float) -> dict:
    failed = [listener.error for listener in listeners if listener.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(listeners)} streams failed: {failed[0]}")
    first_audio = sorted(listener.first_audio_ms for listener in listeners)
    return dict(
        listeners=len(listeners),
        audio_seconds_per_second=sum(listener.seconds for listener in listeners) / wall,
        first_audio_ms=statistics.median(first_audio),
        first_audio_p95_ms=first_audio[math.ceil(0.95 * len(first_audio)) - 1],
        underruns=sum(listener.underruns for listener in listeners),
    )


def time_streams(
    tts, request: dict, counts: tuple[int, ...], poisson_seconds: float, held: tuple[int, ...]
) -> Iterator[tuple[str, dict]]:
    """Rows of the benchmark. `request` are arguments of generate_voice_clone; `held` numbers of listeners to try."""

    def speak(**changes) -> Callable[[], Iterator]:
        return lambda: engine.stream(tts.generate_voice_clone, **request | changes)

    before = memory_gib()
    start = time.perf_counter()
    with Engine(tts, max_streams=max(*counts, *held)) as engine:
        seconds = time.perf_counter() - start
        gib_per_stream = (memory_gib() - before) / engine.max_streams
        at_once(speak(), 2)  # warm-up
        for count in counts:
            at_once(speak(), count)
            name = "1 stream alone" if count == 1 else f"{count} streams at once"
            row = at_once(speak(), count)
            yield name, row | dict(seconds_to_capture=seconds, gib_per_stream=gib_per_stream)
        if poisson_seconds:
            short = speak(max_new_tokens=round(4.6 * FRAME_RATE) + 1)
            yield f"20 requests per second for {poisson_seconds:g} s", poisson(short, 20, poisson_seconds)
        for count in held:
            row = at_once(speak(max_new_tokens=round(60 * FRAME_RATE) + 1), count)
            yield f"{count} listeners for 60 s", row


def memory_gib() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
