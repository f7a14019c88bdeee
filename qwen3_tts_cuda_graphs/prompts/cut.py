"""Cuts long text into parts, each spoken as one utterance that fits into the cache.

Parts end at paragraph and sentence ends. sentencex finds the sentence ends; if it fails, a regular expression does.
Text that is still arriving is always cut by the regular expression, as it finds an end before the next sentence is
there.

Imports quickly, as the command line and the server's front process need these limits, too.
"""

import itertools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator

# Usual speech takes 3 to 5 frames per token. A limit of 6, and of 75 frames for short texts, has cut off slow and
# emotional speech. So the library and the command line stop an utterance after 12 frames per token, and their parts are
# short enough for that. The server stops no utterance by default. Its parts are as long as usual speech allows, because
# one long utterance sounds best.
FRAMES_PER_TOKEN = 12
USUAL_FRAMES_PER_TOKEN = 6
MIN_FRAME_LIMIT = 192  # for short texts, 15 seconds
PAUSE = 0.4  # seconds of silence between two parts
MAX_SEQ_LEN = 2048  # default of `max_seq_len`: positions of the cache, for prompt and speech together

PROMPT_POSITIONS = 16  # of a prompt without text, instruction and reference
POSITIONS_PER_BYTE = 8  # more than any text takes, even digits
USUAL_POSITIONS_PER_BYTE = 3  # more than usual speech takes; leaves room for the voice and for slow speech

# ISO 639-1 code -> the models' name
LANGUAGES = dict(zh="chinese", en="english", de="german", it="italian", pt="portuguese")
LANGUAGES |= dict(es="spanish", ja="japanese", ko="korean", fr="french", ru="russian")
LANGUAGE_CODES = {name: code for code, name in LANGUAGES.items()}

WORD = re.compile(r"\w")
OTHER_SPACE = re.compile(r"(?![\x00-\x7f])\s")
SENTENCE_END = re.compile(r"""[.!?…]["')\]”’»]*\s|[。！？]["')\]”’」』]*|\n""")
ANY_END = re.compile(r"[\s。！？，、]")
PLAIN_SENTENCE = re.compile(rf"(?s).+?(?:(?:{SENTENCE_END.pattern})\s*|\Z)")
CLAUSE = re.compile(r"(?s).+?(?:[,;:.!?…，、；：。！？–—)\]}）】»”’/|·]+|\Z)")

TokenCount = Callable[[str], int]

log = logging.getLogger("qwen3_tts_cuda_graphs")


# ---- How much fits


def count_bytes(text: str) -> int:
    """An upper bound for the tokens of a text, as each stands for at least one byte."""
    return len(text.encode())


def tokens_that_fit(
    max_seq_len: int,
    voice: dict,
    frames_per_token: int = FRAMES_PER_TOKEN,
    count_tokens: TokenCount = count_bytes,
    reference: int = 0,
) -> int:
    """The most tokens that a part can have so that its speech fits into the cache at `frames_per_token`.

    voice: arguments of upstream's methods
    count_tokens: counts those of the other texts in the prompt
    reference: positions of a recording and its transcript, if they are not in `voice` yet
    """
    prompt = voice.get("voice_clone_prompt")
    if isinstance(prompt, list) and prompt[0].ref_code is not None:
        reference = len(prompt[0].ref_code) + count_tokens(prompt[0].ref_text or "")
    used = PROMPT_POSITIONS + count_tokens(voice.get("instruct") or "") + reference
    tokens = (max_seq_len - used) // (frames_per_token + 1)  # each token may take a position of the prompt, too
    if tokens < 4:
        raise ValueError(
            f"the prompt takes {used} of {max_seq_len} positions, too little is left for speech: raise max_seq_len"
        )
    return tokens


def surely_fits(text: str, max_seq_len: int) -> bool:
    """Whether a text surely needs no cut, estimated without its tokens."""
    return POSITIONS_PER_BYTE * count_bytes(text) <= max_seq_len


# ---- A complete text


def cut(
    paragraphs: Iterable[str],
    max_tokens: int,
    count_tokens: TokenCount,
    language: str | None = None,
    say: Callable[[str], str] = str,
) -> list[str]:
    """Cut paragraphs into parts of at most `max_tokens`: whole paragraphs, or as many of their sentences as fit.

    say: a written text -> the text that is spoken, whose tokens count
    """

    def fits(part: str) -> bool:
        said = say(part)
        return count_bytes(said) <= max_tokens or count_tokens(said) <= max_tokens

    return split_text(paragraphs, fits, language)


def cut_by_estimate(text: str, max_tokens: int, count_tokens: TokenCount, language: str | None = None) -> list[str]:
    """`cut` with few calls of `count_tokens`, as they delay the server's engine. Estimates the tokens of a part by the
    average of the text, with a tenth to spare, and counts only to see whether a part must be cut again."""
    tokens = count_tokens(text)
    if tokens <= max_tokens:
        return [text]
    bytes_that_fit = 0.9 * max_tokens * count_bytes(text) / tokens
    parts = split_text([text], lambda part: count_bytes(part) <= bytes_that_fit, language)
    return [smaller for part in parts for smaller in cut_by_estimate(part, max_tokens, count_tokens, language)]


def split_text(paragraphs: Iterable[str], fits: Callable[[str], bool], language: str | None = None) -> list[str]:
    parts = []
    for paragraph in filter(None, map(str.strip, paragraphs)):
        if fits(paragraph):
            parts.append(paragraph)
        else:
            parts.extend(packed(sentences(paragraph, language), fits))
    return parts


def sentences(text: str, language: str | None) -> list[str]:
    """The sentences, with the space after each: joined they are the text."""
    try:
        from sentencex import segment
    except ImportError:
        raise ValueError("long texts need a package that finds sentence ends: pip install sentencex") from None
    language = LANGUAGE_CODES.get((language or "").lower(), "en")
    try:  # sentencex 1.0.32 panics at "vitamin C\u00a0. And" and prints a trace, so all spaces are made plain ones
        ends = [0, *itertools.accumulate(map(len, segment(language, OTHER_SPACE.sub(" ", text))))]
        if ends[-1] == len(text):
            return [text[start:end] for start, end in itertools.pairwise(ends)]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        log.info("sentencex has failed (%s): the text is cut at plain sentence ends", error)
    return PLAIN_SENTENCE.findall(text)


def packed(pieces: Iterable[str], fits: Callable[[str], bool]) -> Iterator[str]:
    """Join pieces to parts while they fit. A piece that does not fit alone is cut into smaller ones."""
    part = ""
    for piece in pieces:
        if not piece.strip():  # whitespace alone, which may be too long to fit
            part += " "
            continue
        if fits(part + piece):
            part += piece
            continue
        if part.strip():
            yield part.strip()
        part = ""
        if fits(piece):
            part = piece
        else:
            *complete, part = packed(smaller_pieces(piece), fits)
            yield from complete
            part += " " * piece[-1].isspace()
    if part.strip():
        yield part.strip()


def smaller_pieces(text: str) -> list[str]:
    """The words of a text, or, of a single word, its pieces between punctuation marks, or else its halves."""
    words = [f"{word} " for word in text.split()]
    pieces = words if len(words) > 1 else CLAUSE.findall(text)
    if len(pieces) > 1:
        return pieces
    half = math.ceil(len(text) / 2)
    if half == len(text):
        raise ValueError("a single character does not fit into the cache: raise max_seq_len")
    is_mark = [unicodedata.category(character)[0] == "M" for character in text[half:]]
    half += is_mark.index(False) if False in is_mark else 0  # combining marks stay with the character before them
    return [text[:half], text[half:]]


# ---- A text that is still arriving


def arriving_bytes(max_seq_len: int) -> int:
    """Bytes of arriving text after which a part ends at the next sentence end."""
    return max_seq_len // USUAL_POSITIONS_PER_BYTE


def end_after_bytes(text: str, start: int, size: int) -> int | None:
    """Where the part that begins at `start` ends: at the first sentence end that is `size` bytes or more behind its
    first word. If there is none within another half of `size`, at the next space or comma. None: not yet."""
    word = WORD.search(text, start)
    if word is None:
        return None
    enough = index_after(text, word.start(), size)
    too_much = index_after(text, enough, size // 2)
    end = SENTENCE_END.search(text, enough, too_much) or ANY_END.search(text, too_much)
    return end and end.end()


def index_after(text: str, start: int, size: int) -> int:
    """The index of the first character after `size` bytes of UTF-8."""
    return start + len(text[start : start + size].encode()[:size].decode(errors="ignore"))
