"""Speech from a language model that is still writing, simulated: a piece of text every 20 ms.

First audio is counted from the moment at which the text that it needs has arrived. A player starts with the first
chunk; a gap is a time in which it has nothing to play.
"""

import statistics
import time
from collections.abc import Callable, Iterator

from fast.arriving_text import ArrivingText
from fast.prompts import decoder_of
from fast.streaming import stream

TOKENS_PER_SECOND = 50
CHARACTERS_PER_TOKEN = 4  # of English, in a usual language model


class LanguageModel:
    """An iterator of pieces at a steady rate. `times` are those at which they came."""

    def __init__(self, text: str, tokens_per_second: float):
        self.pieces = pieces_of(text)
        self.interval = 1 / tokens_per_second
        self.times = []

    def __iter__(self) -> Iterator[str]:
        start = time.perf_counter()
        for number, piece in enumerate(self.pieces, 1):
            time.sleep(max(0.0, start + number * self.interval - time.perf_counter()))
            self.times.append(time.perf_counter())
            yield piece


def pieces_of(text: str) -> list[str]:
    return [text[start : start + CHARACTERS_PER_TOKEN] for start in range(0, len(text), CHARACTERS_PER_TOKEN)]


def pieces_to_begin(method: Callable, text: str, **arguments) -> int:
    """How many pieces the first audio needs."""
    arriving = ArrivingText(decoder_of(method.__self__), method, **arguments)
    for number, piece in enumerate(pieces_of(text), 1):
        arriving.push(piece)
        if arriving.can_begin:
            return number
    return number


def time_arriving_text(
    method: Callable, text: str, runs: int, tokens_per_second: float = TOKENS_PER_SECOND, **arguments
) -> dict:
    """A row of the benchmark. `arguments` are those of the method but the text."""
    needed = pieces_to_begin(method, text, **arguments)
    first_audio = []
    gaps = []
    for run in range(runs + 1):
        model = LanguageModel(text, tokens_per_second)
        played_until = None
        for audio, rate in stream(method, text=model, **arguments):
            now = time.perf_counter()
            if played_until is None:
                first_ms = (now - model.times[needed - 1]) * 1e3
                played_until = now
            elif now > played_until:
                gaps.append((now - played_until) * 1e3)
                played_until = now
            played_until += len(audio) / rate
        if run == 0:  # warm-up
            gaps.clear()
        else:
            first_audio.append(first_ms)
    return dict(
        first_audio_ms=statistics.median(first_audio),
        first_audio_max_ms=max(first_audio),
        underruns=len(gaps),
        longest_gap_ms=max(gaps, default=0.0),
        pieces_to_begin=needed,
        tokens_per_second=tokens_per_second,
        runs=runs,
    )
