"""A text as a script: parts that are spoken one after another, each with its voice, style and the silence before it.

`Notation` splits a text into words and tags, and `PartReader` makes parts of them. Both also take arriving text, for
which `PartReader` waits; the server must not wait, and uses serving/arriving_script.py instead. A text without tags is
one part.

Imports quickly, as the command line and the server's front process read scripts.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from qwen3_tts_cuda_graphs.prompts.cut import PAUSE, WORD
from qwen3_tts_cuda_graphs.prompts.notation import Notation, Tag


def nth_seed(seed: int | None, number: int) -> int | None:
    """The seed of one of several texts or attempts. It does not depend on which were spoken before it."""
    return None if seed is None else (seed + number) % 2**64


def takes_instructions(kind: str, size: str | None) -> bool:
    """Whether a model follows instructions: 1.7B-CustomVoice and VoiceDesign do. kind, size: from its config"""
    return kind == "voice_design" or (kind == "custom_voice" and size != "0b6")


@dataclass(frozen=True)
class Part:
    text: str  # without tags; empty: only the silence; a PartText: it is still arriving
    voice: str | None = None  # None: that of the request
    style: str | None = None  # None: that of the request
    pause: float | None = None  # seconds of silence before it; None: the usual silence between two parts
    line: int = 1  # number of the line in which it begins

    def after(self, tag: Tag) -> "Part":
        """A copy that the tag has changed."""
        if tag.name == "pause":
            return replace(self, pause=(self.pause or 0.0) + tag.value)
        if tag.name == "style":
            return replace(self, style=tag.value)
        style = None if tag.ends_style else self.style
        return replace(self, voice=tag.value, style=style)


@dataclass
class Cue:
    """Where in the audio a part is heard, in samples."""

    part: Part
    start: int
    end: int | None = None  # None until all of its audio has been generated


class PartText:
    """The arriving text of one part: an iterator of its pieces, without whitespace around the text."""

    def __init__(self, words: str, items: Iterator[str | Tag]):
        self.items = itertools.chain([words.lstrip()], items)
        self.lock = threading.Lock()  # the reader of an utterance that has ended early may still wait for a piece
        self.has_ended = False
        self.tag = None  # the tag after it; None: it is the last of its line
        self.spaces = ""  # held back until text follows them
        self.seen = []  # the pieces so far

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self.lock:
            while not self.has_ended:
                item = next(self.items, None)
                if not isinstance(item, str):
                    self.has_ended, self.tag = True, item
                    break
                text = self.spaces + item
                stripped = text.rstrip()
                self.spaces = text[len(stripped) :]
                if stripped:
                    self.seen.append(stripped)
                    return stripped
        raise StopIteration

    def __str__(self) -> str:
        """The text so far."""
        return "".join(self.seen)


class PartReader:
    """Makes parts of the words and tags of one line after another. Voice and style last until they change."""

    def __init__(self):
        self.following = Part("")  # voice, style and pause of the next part

    def read(self, items: Iterable[str | Tag]) -> Iterator[Part]:
        """The parts of a line, or of a paragraph of several lines. A part is yielded at its first word, after the part
        before it has been read to its end. Punctuation without a word is spoken only if the line has nothing else."""
        items = iter(items)
        words, has_tag = "", False
        for item in items:
            if isinstance(item, str):
                words += item
                if not WORD.search(item):
                    continue
                text = PartText(words, items)
                yield from self.part_of(text)
                item = text.tag
            words, has_tag = "", True
            self.following = self.following.after(item) if item else self.following
        if words.strip() and not has_tag:
            yield from self.part_of(PartText(words, iter(())))
        if self.following.pause is not None:
            yield from self.part_of("")

    def part_of(self, text: str | PartText) -> Iterator[Part]:
        """Yield one part, then read its text to the end."""
        yield replace(self.following, text=text)
        for _ in text:
            pass
        self.following = replace(self.following, pause=None)


# ---- A complete text


def read_script(
    text: str, play: bool = False, notation: bool = True, check_voice: Callable[[str], None] | None = None
) -> list[Part]:
    """The parts of a text. In a play or a text with tags each line begins a new part. Any other text is one part."""
    if play and not notation:
        raise ValueError("play=True reads names at the beginning of lines: leave notation=True")
    if not notation or not play and all(isinstance(item, str) for item in Notation().read(text, is_end=True)):
        return [Part(text)]
    parts = [part for line in read_lines(enumerate(text.splitlines(), 1), play, check_voice) for part in line]
    if not any(part.text for part in parts):
        raise ValueError("the script has no words: give something to say")
    return parts


def read_lines(
    lines: Iterable[tuple[int, str]], play: bool = False, check_voice: Callable[[str], None] | None = None
) -> Iterator[list[Part]]:
    """The parts of each line. lines: (number of the line, its text), or of the first line of a paragraph"""
    reader = PartReader()
    for number, text in lines:
        notation = Notation(play, number, check_voice)
        parts = []
        for part in reader.read(notation.read(text, is_end=True)):
            line = notation.line  # of its first word: the rest of the text is read only below
            parts.append(replace(part, text="".join(part.text).replace("\n", " "), line=line))
        yield parts


def cut_parts(parts: Iterable[Part], cut: Callable[[Part], list[str]]) -> list[Part]:
    """Cut parts so that they fit into the cache. cut: returns the texts that a part is cut into"""
    smaller = []
    for part in parts:
        first, *others = cut(part) if part.text else [""]
        smaller += [replace(part, text=first), *(replace(part, text=text, pause=None) for text in others)]
    return smaller


def silence_before(part: Part, previous: Part | None, usual: float = PAUSE) -> float:
    """Seconds of silence before a part: as tags say, or the usual silence between two parts."""
    if part.pause is not None:
        return part.pause
    return usual if previous and previous.text and part.text else 0.0
