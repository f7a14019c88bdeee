"""What to say: the lines of an option, of a file or of stdin, or the parts of a pipe that is still being written to."""

import codecs
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from qwen3_tts_cuda_graphs.prompts.script import WORD, Notation, Part, Tag

LINE_END = "\n"


def read_text_lines(text: str | None, file: Path | None, paragraphs: bool) -> list[tuple[int, str]]:
    """Lines that are not empty, or paragraphs of them, with their numbers. text: - for stdin"""
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
    try:
        text = sys.stdin.buffer.read().decode() if file == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise ValueError(f"cannot read {'stdin' if file == '-' else file}: {reason}: give a text") from None
    return checked_text(text, "stdin" if file == "-" else str(file))


def checked_text(text: str, source: str) -> str:
    """The text without byte order marks: files that were joined have several. Bytes that are not UTF-8 are refused."""
    try:
        text.encode()
    except UnicodeError:
        raise ValueError(f"cannot read {source}: it is not UTF-8: give a text") from None
    if "\0" in text:
        raise ValueError(f"cannot read {source}: it has NUL characters, as UTF-16 has: give a text in UTF-8")
    return text.replace("\ufeff", "")


class PipedText:
    """The text of one part, without whitespace around it: an iterator of its pieces as they come."""

    def __init__(self, pipe: "Pipe"):
        self.pipe = pipe
        self.has_ended = False
        self.spaces = ""  # spoken only if something follows them
        self.seen = ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self.pipe.lock:  # the reader of an utterance that has ended early may still be waiting for text
            while not self.has_ended:
                item = self.pipe.peek()
                if item in (None, LINE_END) or isinstance(item, Tag):
                    self.has_ended = True
                    break
                text = self.spaces + self.pipe.items.popleft()
                stripped = text.rstrip()
                self.spaces = text[len(stripped) :]
                if stripped:
                    self.seen += stripped
                    return stripped
        raise StopIteration

    def __str__(self) -> str:
        """What has come."""
        return self.seen


class Pipe:
    """The parts of a text that is still being written. A mistake in it ends it: `error` is to be raised when all before
    it was spoken."""

    def __init__(
        self,
        file: BinaryIO,
        play: bool = False,
        notation: bool = True,
        check_voice: Callable[[str], None] | None = None,
    ):
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.notation = Notation(play, check_voice=check_voice) if notation else None
        self.items = deque()  # read, but not yet given: words, tags, LINE_END
        self.at_end = False
        self.error = None
        self.lock = threading.Lock()

    def parts(self) -> Iterator[Part]:
        """Parts as `read_lines` makes them. Each comes with its first word, when the one before is read to its end."""
        following, words, has_tag = Part(""), "", False
        is_script = is_spoken = False
        while (item := self.next_item()) is not None:
            if isinstance(item, Tag):
                following, words, has_tag = following.after(item), "", True
                is_script = True
                continue
            words += item
            is_end = item == LINE_END
            if WORD.search(words) or (is_end and words.strip() and not has_tag):
                yield from self.part(following, words, is_end)
                following, words = replace(following, pause=None), ""
                is_spoken = True
            elif is_end:
                if following.pause is not None:
                    yield replace(following, text="")
                following, words, has_tag = replace(following, pause=None), "", False
        if is_script and not is_spoken:
            self.error = self.error or ValueError("the script has no words: give something to say")

    def part(self, part: Part, words: str, is_end: bool) -> Iterator[Part]:
        """This part with its text, of which these words have been read."""
        with self.lock:
            self.items.extendleft([LINE_END] * is_end)
            self.items.appendleft(words.strip() if is_end else words.lstrip())
        text = PipedText(self)
        yield replace(part, text=text)
        for _ in text:
            pass

    def next_item(self) -> str | Tag | None:
        with self.lock:
            item = self.peek()
            return None if item is None else self.items.popleft()

    def peek(self) -> str | Tag | None:
        """The next item, once it is there. None: there is none."""
        while not self.items and not self.at_end:
            self.read()
        return self.items[0] if self.items else None

    def read(self) -> None:
        """Wait for more."""
        try:
            data = os.read(self.file.fileno(), 1 << 16)
            self.at_end = not data
            text = checked_text(self.decode(data, final=self.at_end), "stdin")
            for item in self.notation.read(text, self.at_end) if self.notation else [text]:
                self.add(item)
        except UnicodeDecodeError:
            self.error = ValueError("cannot read stdin: it is not UTF-8: give a text")
        except OSError as error:
            self.error = ValueError(f"cannot read stdin: {error.strerror}: give a text")
        except ValueError as error:
            self.error = error
        self.at_end = self.at_end or self.error is not None
        if self.at_end:
            self.items.append(LINE_END)

    def add(self, item: str | Tag) -> None:
        if isinstance(item, Tag):
            self.items.append(item)
            return
        for line in item.splitlines(keepends=True):
            words = line.splitlines()[0]
            self.items.extend([words] * bool(words) + [LINE_END] * (line != words))
