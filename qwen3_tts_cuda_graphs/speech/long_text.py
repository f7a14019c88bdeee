"""Long texts, and speech that does not end.

A long text is cut into parts that are spoken one after another with the same voice.

The model sometimes misses its end and goes on with silence, noise or repetitions until the cache is full: in 0.3 to 0.5
percent of all runs, as users of several implementations report. So an utterance is stopped after a number of frames in
proportion to its text.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qwen3_tts_cuda_graphs.prompts.checks import check_seed, check_text, is_arriving, model_of, nth_seed
from qwen3_tts_cuda_graphs.prompts.clone_prompts import with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.cut import FRAMES_PER_TOKEN, MIN_FRAME_LIMIT, PAUSE, cut, tokens_that_fit
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.speech.streaming import Chunk, stream
from qwen3_tts_cuda_graphs.speech.utterance import warn_each_time


def stream_long(
    method: Callable,
    *,
    text: str,
    language: str | None = None,
    pause: float = PAUSE,
    retries: int = 0,
    seed: int | None = None,
    max_tokens: int | None = None,
    **kwargs,
) -> Iterator[Chunk]:
    """`stream` for a text of any length. Paragraphs end at line ends.

    pause: seconds of silence between two parts
    retries: how often a part that does not end is spoken again, with another seed
    seed: each part has a seed of its own, derived from this one
    max_tokens: tokens of one part. Default: what surely fits into the cache.
    kwargs: as for `stream`

    Mistakes raise an error here, before the first chunk.
    """
    text = check_text(text)
    check_seed(seed)
    if not 0 <= pause < math.inf:
        raise ValueError(f"pause is {pause}, it must be at least 0 and finite, in seconds")
    tts = model_of(method)
    kwargs = with_voice_clone_prompt(method, kwargs)  # once for all parts
    if max_tokens is None:
        max_tokens = tokens_that_fit(tts.prompts.max_seq_len, kwargs)
    parts = cut(text.splitlines(), max_tokens, lambda part: len(tokenize(tts, part)), language)

    def utterance(number: int) -> Iterator[Chunk]:
        own = dict(text=parts[number], seed=nth_seed(seed, number))
        return speak(method, language=language, retries=retries, **own, **kwargs)

    first = utterance(0)
    return with_pauses(itertools.chain([first], map(utterance, range(1, len(parts)))), pause)


def speak(
    method: Callable, *, text: str | Iterable[str], retries: int = 0, seed: int | None = None, **kwargs
) -> Iterator[Chunk]:
    """`stream` for one utterance, stopped with a warning if it does not end. Mistakes raise an error here, too.

    retries: how often to speak it again, with another seed, if it does not end before this limit or that of the cache.
        Its audio then comes when it is complete.
    """
    check_seed(seed)
    seen = Recorded(text) if is_arriving(text) else text
    if retries and seen is not text:
        raise ValueError("text that is still arriving cannot be spoken again: leave out retries")

    def attempt(number: int) -> Iterator[Chunk]:
        return stream(method, text=seen, seed=nth_seed(seed, number << 32), warn=number == retries, **kwargs)

    first = attempt(0)
    attempts = itertools.chain([first], map(attempt, range(1, retries + 1)))
    return speak_until_it_ends(method.__self__, seen, attempts, bool(retries))


def speak_until_it_ends(
    tts, text: "str | Recorded", attempts: Iterable[Iterator[Chunk]], is_kept_back: bool
) -> Iterator[Chunk]:
    """The first attempt that ends by itself, or the last.

    is_kept_back: whether to yield audio only when its attempt is over
    """
    samples_per_frame = tts.model.speech_tokenizer.get_decode_upsample_rate()
    for chunks in attempts:
        heard = []
        samples = 0
        was_stopped = has_ended = False
        while not was_stopped:
            try:
                audio, rate = next(chunks)
            except StopIteration as end:
                has_ended = end.value
                break
            limit = MIN_FRAME_LIMIT * samples_per_frame
            if samples + len(audio) > limit:
                limit = frame_limit(len(tokenize(tts, str(text)))) * samples_per_frame
            was_stopped = samples + len(audio) > limit
            chunk = audio[: limit - samples], rate
            samples += len(chunk[0])
            if is_kept_back:
                heard.append(chunk)
            else:
                yield chunk
        chunks.close()
        if has_ended:
            break
    yield from heard
    if was_stopped:
        warn_each_time(f"the speech of {str(text)[:30]!r} did not end: stopped after {samples / rate:.0f} s")


def frame_limit(tokens: int) -> int:
    """Frames after which an utterance is taken for one that does not end."""
    return max(MIN_FRAME_LIMIT, FRAMES_PER_TOKEN * tokens)


class Recorded:
    """An iterator of strings that remembers what it gave."""

    def __init__(self, pieces: Iterable[str]):
        self.pieces = iter(pieces)
        self.seen = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = next(self.pieces)
        self.seen.append(piece)
        return piece

    def __str__(self) -> str:
        return "".join(self.seen)


def with_pauses(utterances: Iterable[Iterable[Chunk]], pause: float) -> Iterator[Chunk]:
    """The utterances one after another, with silence between them."""
    rate = None
    for utterance in utterances:
        if rate and pause:
            yield np.zeros(round(pause * rate), dtype=np.float32), rate
        for audio, rate in utterance:
            yield audio, rate
