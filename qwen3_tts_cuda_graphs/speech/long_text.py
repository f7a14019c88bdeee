"""Scripts, long texts, and speech that does not end.

A script has parts that are spoken one after another. A part that is too long for the cache is cut into several.

The model sometimes misses the end of its text and continues with silence, noise or repetitions until the cache is full:
in 0.3 to 0.5 percent of all runs, as users of several implementations report. So an utterance is stopped after a number
of frames in proportion to its text.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qwen3_tts_cuda_graphs.prompts.checks import check_seed, check_text, is_arriving, model_of
from qwen3_tts_cuda_graphs.prompts.clone_prompts import with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.cut import FRAMES_PER_TOKEN, MIN_FRAME_LIMIT, PAUSE, cut, tokens_that_fit
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon
from qwen3_tts_cuda_graphs.prompts.script import (
    Cue,
    Part,
    cut_parts,
    nth_seed,
    read_script,
    silence_before,
    takes_instructions,
)
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.speech.streaming import Chunk, stream
from qwen3_tts_cuda_graphs.speech.utterance import warn_each_time

REFERENCE = "voice_clone_prompt", "ref_audio", "ref_text", "x_vector_only_mode"  # arguments that define a cloned voice


def stream_long(method: Callable, *, text: str, **kwargs) -> Iterator[Chunk]:
    """`stream_script` for a text without tags: yields its chunks only. Each line is a paragraph.

    Mistakes raise an error here, before the first chunk.
    """
    items = stream_script(method, text=text, notation=False, **kwargs)
    return (item for item in items if not isinstance(item, Cue))


def stream_script(
    method: Callable,
    *,
    text: str,
    voices: dict[str, dict] | None = None,
    play: bool = False,
    notation: bool = True,
    lexicon: Lexicon | dict[str, str] | None = None,
    language: str | None = None,
    pause: float = PAUSE,
    retries: int = 0,
    seed: int | None = None,
    max_tokens: int | None = None,
    **kwargs,
) -> Iterator[Chunk | Cue]:
    """Speak a script of any length. Before the chunks of a part it yields a Cue, which says where in the audio the part
    is heard.

    text: may have tags, see prompts/notation.py
    voices: name -> arguments of `method` for this voice, such as {"voice_clone_prompt": ...}. The speakers of a
        CustomVoice model need none.
    play: lines may begin with a voice's name and a colon
    notation: False: brackets are spoken, and there are no tags
    lexicon: word -> how to say it
    pause: seconds of silence between two parts, unless a tag gives others
    retries: how often a part that does not end is spoken again, with another seed
    seed: each part has a seed of its own, derived from this one
    max_tokens: the most tokens of one part. Default: what surely fits into the cache.
    kwargs: as for `stream`; also the voice and style of parts that have none of their own

    Mistakes raise an error here, before the first chunk.
    """
    text = check_text(text)
    check_seed(seed)
    if not 0 <= pause < math.inf:
        raise ValueError(f"pause is {pause}, it must be at least 0 and finite, in seconds")
    tts = model_of(method)
    lexicon = lexicon if isinstance(lexicon, Lexicon) else Lexicon(lexicon or {})
    voices = {name.lower(): voice for name, voice in (voices or {}).items()}
    arguments = functools.cache(lambda voice, style: part_arguments(method, kwargs, voices, voice, style))

    def cut_part(part: Part) -> list[str]:
        voice = arguments(part.voice, part.style)
        limit = max_tokens or tokens_that_fit(tts.prompts.max_seq_len, voice)
        paragraphs = part.text.splitlines()
        return cut(paragraphs, limit, lambda text: len(tokenize(tts, text)), language, lexicon.replace)

    parts = read_script(text, play, notation, functools.partial(check_voice, method, voices))
    styles = [part.style for part in parts if part.style]
    if styles and not takes_style(method):
        warn_each_time(style_warning(styles[0]))
    parts = cut_parts(parts, cut_part)
    numbers = itertools.count()

    def utterance(part: Part) -> Iterator[Chunk]:
        own = dict(text=lexicon.replace(part.text), seed=nth_seed(seed, next(numbers)))
        return speak(method, language=language, retries=retries, **own, **arguments(part.voice, part.style))

    utterances = (utterance(part) for part in parts if part.text)
    first = next(utterances)  # mistakes raise here
    return with_cues(parts, itertools.chain([first], utterances), tts.speech.rate, pause)


def part_arguments(method: Callable, kwargs: dict, voices: dict, voice: str | None, style: str | None) -> dict:
    """The arguments of upstream's method for a part, except the text. A style is ignored if the model takes none.

    kwargs: those of the whole script, whose voice and style are used where `voice` or `style` is None
    """
    if voice is not None:
        kwargs = {name: value for name, value in kwargs.items() if name not in REFERENCE}
        kwargs |= voices.get(voice.lower()) or {"speaker": voice}
    if style is not None and takes_style(method):
        kwargs = kwargs | {"instruct": style}
    return with_voice_clone_prompt(method, kwargs)


def check_voice(method: Callable, voices: dict, name: str) -> None:
    known = [*voices, *(method.__self__.get_supported_speakers() or [])]
    if name.lower() not in map(str.lower, known):
        remedy = f"there are {', '.join(known)}" if known else "give it as voices={name: arguments}"
        raise ValueError(f"there is no voice {name!r}: {remedy}")


def takes_style(method: Callable) -> bool:
    model = method.__self__.model
    return takes_instructions(model.tts_model_type, model.tts_model_size)


def style_warning(style: str) -> str:
    return f"the style {style!r} is ignored: this model takes no instructions"


def with_cues(
    parts: Iterable[Part], utterances: Iterator[Iterable[Chunk]], rate: int, pause: float
) -> Iterator[Chunk | Cue]:
    """The audio of all parts with their cues. For each part: the silence before it, its cue, and its chunks.

    utterances: the chunks of each part that has text
    """
    samples, previous = 0, None
    for part in parts:
        silence = np.zeros(round(silence_before(part, previous, pause) * rate), dtype=np.float32)
        previous = part
        samples += len(silence)
        if len(silence):
            yield silence, rate
        if not part.text:
            continue
        cue = Cue(part, samples)
        yield cue
        for audio, _ in next(utterances):
            samples += len(audio)
            yield audio, rate
        cue.end = samples


def speak(
    method: Callable, *, text: str | Iterable[str], retries: int = 0, seed: int | None = None, **kwargs
) -> Iterator[Chunk]:
    """`stream` for one utterance, which is stopped with a warning if it does not end.

    retries: how often to speak it again, with another seed, if it is stopped or fills the cache. With retries, audio is
        yielded only when the utterance is complete.

    Mistakes raise an error here, before the first chunk.
    """
    check_seed(seed)
    seen = []  # the pieces of the text so far
    if not is_arriving(text):
        seen.append(check_text(text))
    elif retries:
        raise ValueError("text that is still arriving cannot be spoken again: leave out retries")
    else:
        text = recorded(text, seen)

    def attempt(number: int) -> Iterator[Chunk]:
        return stream(method, text=text, seed=nth_seed(seed, number << 32), warn=number == retries, **kwargs)

    attempts = map(attempt, range(retries + 1))
    first = next(attempts)  # mistakes raise here
    return speak_until_it_ends(method.__self__, seen, itertools.chain([first], attempts), bool(retries))


def recorded(pieces: Iterable[str], seen: list[str]) -> Iterator[str]:
    for piece in pieces:
        seen.append(piece)
        yield piece


def speak_until_it_ends(
    tts, seen: list[str], attempts: Iterable[Iterator[Chunk]], is_kept_back: bool
) -> Iterator[Chunk]:
    """The chunks of the first attempt that ends by itself, or else of the last attempt.

    seen: the pieces of the text so far
    is_kept_back: whether to yield audio only when its attempt is over
    """
    samples_per_frame = tts.speech.samples_per_frame
    for chunks in attempts:
        kept = []
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
                limit = frame_limit(len(tokenize(tts, "".join(seen)))) * samples_per_frame
            was_stopped = samples + len(audio) > limit
            if samples == limit:
                break  # the chunk would be empty
            chunk = audio[: limit - samples], rate
            samples += len(chunk[0])
            if is_kept_back:
                kept.append(chunk)
            else:
                yield chunk
        chunks.close()
        if has_ended:
            break
    yield from kept
    if was_stopped:
        warn_each_time(f"the speech of {''.join(seen)[:30]!r} did not end: stopped after {samples / rate:.0f} s")


def frame_limit(tokens: int) -> int:
    """Frames after which an utterance is stopped, as one that does not end."""
    return max(MIN_FRAME_LIMIT, FRAMES_PER_TOKEN * tokens)
