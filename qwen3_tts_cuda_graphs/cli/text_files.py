"""The text to speak: lines of an option, a file or stdin, or the parts of a pipe that is still being written to."""

import codecs
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from qwen3_tts_cuda_graphs.prompts.notation import ENDS, Notation, Tag
from qwen3_tts_cuda_graphs.prompts.script import Part, PartReader

END_OF_LINE = "\n"


def read_text_lines(text: str | None, file: Path | None, paragraphs: bool) -> list[tuple[int, str]]:
    """The lines that are not empty, or the paragraphs, with their line numbers. text: - for stdin"""
    text = read_text(file or text) if file or text == "-" else checked_text(text, "--text")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    if paragraphs:
        blocks = [[*block] for is_text, block in itertools.groupby(lines, key=lambda line: bool(line[1])) if is_text]
        lines = [(block[0][0], "\n".join(line for _, line in block)) for block in blocks]
    numbered = [(number, line) for number, line in lines if line]
    if not numbered:
        raise ValueError("the text is empty: give something to say")
    return numbered


def read_text(file: Path | str) -> str:
    """The text of a file or, for -, of stdin."""
    source = "stdin" if file == "-" else str(file)
    try:
        text = sys.stdin.buffer.read().decode() if file == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise cannot_read(source, error) from None
    return checked_text(text, source)


def checked_text(text: str, source: str) -> str:
    """The text without byte order marks, of which joined files have several. Raises an error if it was not UTF-8."""
    try:
        text.encode()
    except UnicodeError as error:
        raise cannot_read(source, error) from None
    if "\0" in text:
        raise ValueError(f"cannot read {source}: it has NUL characters, as UTF-16 has: give a text in UTF-8")
    return text.replace("\ufeff", "")


def cannot_read(source: str, error: OSError | UnicodeError) -> ValueError:
    reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
    return ValueError(f"cannot read {source}: {reason}: give a text")


class Pipe:
    """The parts of a text that is still being written. A mistake ends the text, and is kept in `error`, to be raised
    when everything before it was spoken."""

    def __init__(self, file: BinaryIO, play: bool, notation: bool, check_voice: Callable[[str], None]):
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.notation = Notation(play, check_voice=check_voice) if notation else None
        self.has_tags = False
        self.error = None

    def parts(self) -> Iterator[Part]:
        """The parts of all lines, each as soon as it begins."""
        reader = PartReader()
        items = self.items()
        has_words = False
        for first in items:
            line = itertools.takewhile(lambda item: item != END_OF_LINE, itertools.chain([first], items))
            for part in reader.read(line):
                has_words = has_words or bool(part.text)
                yield part
        if self.has_tags and not has_words:
            self.error = self.error or ValueError("the script has no words: give something to say")

    def items(self) -> Iterator[str | Tag]:
        """Words, tags and END_OF_LINE, each as soon as it is read."""
        for item in self.read():
            if isinstance(item, Tag):
                self.has_tags = True
                yield item
                continue
            if words := item.rstrip(ENDS):
                yield words
            if words != item:
                yield END_OF_LINE

    def read(self) -> Iterator[str | Tag]:
        """Tags, and words of at most one line."""
        is_end = False
        try:
            while not is_end:
                data = os.read(self.file.fileno(), 1 << 16)
                is_end = not data
                text = checked_text(self.decode(data, final=is_end), "stdin")
                yield from self.notation.read(text, is_end) if self.notation else text.splitlines(keepends=True)
        except (OSError, UnicodeError) as error:
            self.error = cannot_read("stdin", error)
        except ValueError as error:
            self.error = error
