"""Speech from a language model that is still writing, simulated: a piece of text every 20 ms.

First audio is counted from the moment at which the text that it needs has arrived.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from qwen3_tts_cuda_graphs.bench.listeners import listen
from qwen3_tts_cuda_graphs.bench.timing import Row
from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.speech.streaming import stream

TOKENS_PER_SECOND = 50
CHARACTERS_PER_TOKEN = 4  # of English, in a usual language model


def language_model(pieces: list[str], times: list[float]) -> Iterator[str]:
    """Pieces at a steady rate. `times` gets those at which they came."""
    start = time.perf_counter()
    for number, piece in enumerate(pieces, 1):
        time.sleep(max(0.0, start + number / TOKENS_PER_SECOND - time.perf_counter()))
        times.append(time.perf_counter())
        yield piece


def pieces_to_begin(method: Callable, pieces: list[str], arguments: dict) -> int:
    """How many pieces the first audio needs."""
    arriving = ArrivingText(method, **arguments)
    for number, piece in enumerate(pieces, 1):
        arriving.push(piece)
        if arriving.can_begin:
            return number
    return len(pieces)


def time_arriving_text(method: Callable, runs: int, text: list[str], **arguments) -> Row:
    """`arguments` are those of the method."""
    starts = range(0, len(text[0]), CHARACTERS_PER_TOKEN)
    pieces = [text[0][start : start + CHARACTERS_PER_TOKEN] for start in starts]
    needed = pieces_to_begin(method, pieces, arguments)
    first_audio = []
    underruns = 0
    for run in range(1 + runs):
        times = []
        listener = listen(partial(stream, method, text=language_model(pieces, times), **arguments))
        if run > 0:  # the first one warms up
            text_came_ms = (times[needed - 1] - listener.asked) * 1e3
            first_audio.append(listener.first_audio_ms - text_came_ms)
            underruns += listener.underruns
    return dict(
        first_audio_ms=statistics.median(first_audio),
        first_audio_max_ms=max(first_audio),
        underruns=underruns,
        pieces_to_begin=needed,
        tokens_per_second=TOKENS_PER_SECOND,
        runs=runs,
    )
