"""Text from a pipe: one utterance per line, each readable while its line is still being written."""

import codecs
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO


class Line:
    """One line, without whitespace around it: an iterator of its pieces as they come."""

    def __init__(self, pipe: "Pipe"):
        self.pipe = pipe
        self.has_ended = False
        self.spaces = ""  # spoken only if something follows them on the line

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self.pipe.lock:  # the reader of an utterance that has ended early may still be waiting for text
            while not self.has_ended:
                piece, self.has_ended = self.pipe.read_piece()
                text = self.spaces + piece
                stripped = text.rstrip()
                self.spaces = text[len(stripped) :]
                if stripped:
                    return stripped
        raise StopIteration


class Pipe:
    """The lines of a pipe. Empty ones are skipped."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.text = ""  # read, but not yet given to a line
        self.at_end = False
        self.lock = threading.Lock()

    def lines(self) -> Iterator[Line]:
        """Each line is there when its first word is. The one before is read to its end first."""
        while self.skip_space():
            line = Line(self)
            yield line
            for _ in line:
                pass

    def skip_space(self) -> bool:
        """Read up to the next word. Returns whether there is one."""
        with self.lock:
            while not self.text.strip() and not self.at_end:
                self.read()
            self.text = self.text.lstrip()
            return bool(self.text)

    def read_piece(self) -> tuple[str, bool]:
        """Text of the current line, and whether the line ends after it."""
        if not self.text and not self.at_end:
            self.read()
        if not self.text:
            return "", self.at_end
        first, *rest = self.text.splitlines(keepends=True)
        self.text = "".join(rest)
        line = first.splitlines()[0]
        return line, line != first

    def read(self) -> None:
        """Wait for more."""
        try:
            data = os.read(self.file.fileno(), 1 << 16)
            self.at_end = not data
            self.text += self.decode(data, final=self.at_end)
        except UnicodeDecodeError:
            raise ValueError("cannot read stdin: it is not UTF-8: give a text") from None
        except OSError as error:
            raise ValueError(f"cannot read stdin: {error.strerror}: give a text") from None
