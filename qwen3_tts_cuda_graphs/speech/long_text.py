"""Long texts, and speech that does not end.

A long text is cut at paragraph and sentence ends into utterances that fit into the cache, and these are spoken one
after another with the same voice. sentencex finds the sentence ends; where it fails, a plain rule does.

The model sometimes misses its end and goes on with silence, noise or repetitions until the cache is full: in 0.3 to 0.5
percent of all runs, as users of several implementations report. So an utterance is stopped after a number of frames in
proportion to its text. Usual speech takes 3 to 5 frames per token; a limit of 6, and of 75 for short texts, has cut off
slow and emotional speech. Here it is twice that, and 15 seconds for short texts.
"""

import itertools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qwen3_tts_cuda_graphs.prompts.checks import check_seed, check_text, is_arriving, model_of, nth_seed
from qwen3_tts_cuda_graphs.prompts.clone_prompts import with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.speech.streaming import Chunk, stream
from qwen3_tts_cuda_graphs.speech.utterance import warn_each_time

FRAMES_PER_TOKEN = 12
MIN_FRAME_LIMIT = 192
PROMPT_POSITIONS = 16  # of a prompt without text, instruction and reference
PAUSE = 0.4  # seconds between two utterances
OTHER_SPACE = re.compile(r"(?![\x00-\x7f])\s")
SENTENCE_END = re.compile(r"""[.!?…]["')\]”’»]*\s|[。！？]["')\]”’」』]*|\n""")
PLAIN_SENTENCE = re.compile(rf"(?s).+?(?:(?:{SENTENCE_END.pattern})\s*|\Z)")
CLAUSE = re.compile(r"(?s).+?(?:[,;:.!?…，、；：。！？–—)\]}）】»”’/|·]+|\Z)")

log = logging.getLogger("qwen3_tts_cuda_graphs")

LANGUAGE_CODES = dict(
    chinese="zh",
    english="en",
    german="de",
    italian="it",
    portuguese="pt",
    spanish="es",
    japanese="ja",
    korean="ko",
    french="fr",
    russian="ru",
)


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

    pause: seconds of silence between two utterances
    retries: how often an utterance that does not end is spoken again, with another seed
    seed: each utterance has a seed of its own, derived from this one
    max_tokens: tokens of the text in one utterance. Default: what surely fits into the cache.
    kwargs: as for `stream`

    Mistakes raise an error here, before the first chunk.
    """
    text = check_text(text)
    check_seed(seed)
    if not 0 <= pause < math.inf:
        raise ValueError(f"pause is {pause}, it must be at least 0 and finite, in seconds")
    tts = model_of(method)
    kwargs = with_voice_clone_prompt(method, kwargs)  # once for all utterances
    if max_tokens is None:
        max_tokens = tokens_that_fit(tts.prompts.max_seq_len, kwargs)
    utterances = split_text(text.splitlines(), lambda part: len(tokenize(tts, part)) <= max_tokens, language)

    def utterance(number: int) -> Iterator[Chunk]:
        own = dict(text=utterances[number], seed=nth_seed(seed, number))
        return speak(method, language=language, retries=retries, **own, **kwargs)

    first = utterance(0)
    return with_pauses(itertools.chain([first], map(utterance, range(1, len(utterances)))), pause)


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


def tokens_that_fit(
    max_seq_len: int,
    request: dict,
    reference_positions: int = 0,
    frames_per_token: int = FRAMES_PER_TOKEN,
    count_tokens: Callable[[str], int] = lambda text: len(text.encode()),
) -> int:
    """Tokens of an utterance that ends before the cache is full, even if each of them takes so many frames.

    count_tokens: of other texts than the spoken one. By default the most that there can be, a token per byte.
    """
    prompt = request.get("voice_clone_prompt")
    if isinstance(prompt, list) and prompt[0].ref_code is not None:
        reference_positions = len(prompt[0].ref_code) + count_tokens(prompt[0].ref_text or "")
    used = PROMPT_POSITIONS + count_tokens(request.get("instruct") or "") + reference_positions
    tokens = (max_seq_len - used) // (frames_per_token + 1)  # each token may take a position of the prompt, too
    if tokens < 4:
        raise ValueError(
            f"the prompt takes {used} of {max_seq_len} positions, too little is left for speech: raise max_seq_len"
        )
    return tokens


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


# ---- Cutting a text


def split_text(paragraphs: Iterable[str], fits: Callable[[str], bool], language: str | None = None) -> list[str]:
    """Utterances: whole paragraphs, or as many of their sentences as fit."""
    utterances = []
    for paragraph in filter(None, map(str.strip, paragraphs)):
        if fits(paragraph):
            utterances.append(paragraph)
        else:
            utterances.extend(packed(sentences(paragraph, language), fits))
    return utterances


def first_part(text: str, fits: Callable[[str], bool], language: str | None = None) -> str:
    """How a text begins that does not fit: up to where `split_text` cuts it."""
    letters = len("".join(split_text([text], fits, language)[0].split()))
    places = [place for place, character in enumerate(text) if not character.isspace()]
    return text[: places[letters - 1] + 1]


def sentences(text: str, language: str | None) -> list[str]:
    """With the space after them, so that they join to the text."""
    try:
        from sentencex import segment
    except ImportError:
        raise ValueError("long texts need a package that finds sentence ends: pip install sentencex") from None
    language = LANGUAGE_CODES.get((language or "").lower(), "en")
    try:  # sentencex 1.0.32 panics at "vitamin C\u00a0. And", and prints that, too: it gets plain spaces
        ends = [0, *itertools.accumulate(map(len, segment(language, OTHER_SPACE.sub(" ", text))))]
        if ends[-1] == len(text):
            return [text[start:end] for start, end in itertools.pairwise(ends)]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # as a panic of Rust is
        log.info("sentencex has failed (%s): the text is cut at plain sentence ends", error)
    return PLAIN_SENTENCE.findall(text)


def packed(parts: Iterable[str], fits: Callable[[str], bool]) -> Iterator[str]:
    """Join parts while they fit. One that does not fit alone is cut into smaller ones."""
    utterance = ""
    for part in parts:
        if not part.strip():  # a gap, which may be wider than what fits
            utterance += " "
            continue
        if fits(utterance + part):
            utterance += part
            continue
        if utterance.strip():
            yield utterance.strip()
        utterance = ""
        if fits(part):
            utterance = part
        else:
            *complete, utterance = packed(smaller_parts(part), fits)
            yield from complete
            utterance += " " * part[-1].isspace()
    if utterance.strip():
        yield utterance.strip()


def smaller_parts(text: str) -> list[str]:
    """Words; of a single one what ends with a punctuation mark, else halves. They join to the text."""
    words = [f"{word} " for word in text.split()]
    parts = words if len(words) > 1 else CLAUSE.findall(text)
    if len(parts) > 1:
        return parts
    half = math.ceil(len(text) / 2)
    if half == len(text):
        raise ValueError("a single character does not fit into the cache: raise max_seq_len")
    is_mark = [unicodedata.category(character)[0] == "M" for character in text[half:]]
    half += is_mark.index(False) if False in is_mark else 0  # marks belong to the character before them
    return [text[:half], text[half:]]
