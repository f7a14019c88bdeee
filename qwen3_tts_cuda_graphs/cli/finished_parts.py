"""Finished utterances of a long text, kept on disk until all are spoken, so that --resume need not speak them again.

Beside `book.wav` there is a folder `book.wav.parts` while it is being spoken. For one joined file, it holds each
utterance when that is complete; for numbered files, a mark for each. A fingerprint of the text and of all options says
whether they belong to this run.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import soundfile

from qwen3_tts_cuda_graphs.common.audio_files import Chunk
from qwen3_tts_cuda_graphs.common.output_files import check_writable, replacement_for, write_errors

BLOCK = 1 << 16  # samples that are copied at a time


class Parts:
    def __init__(self, output: Path, fingerprint: str):
        self.folder = output.with_name(f"{output.name}.parts")
        self.fingerprint = fingerprint

    @property
    def label(self) -> Path:
        return self.folder / "fingerprint"

    def check(self, resume: bool) -> None:
        """Raise an error now if --resume cannot work."""
        check_writable(self.folder.with_suffix(""))
        if resume and self.label.is_file() and not self.are_own():
            raise ValueError(
                f"{self.folder} is from another text or other options: give the same again, or leave out --resume"
            )

    def are_own(self) -> bool:
        """Whether the files in the folder belong to this text and these options."""
        return self.label.is_file() and self.label.read_text() == self.fingerprint

    def open(self, resume: bool) -> None:
        """Make the folder. Without --resume, forget what an earlier run has left in it."""
        if not resume or not self.label.is_file():
            self.remove()
        with write_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        with replacement_for(self.label) as beside:
            beside.write_text(self.fingerprint)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.wav"

    def mark(self, number: int) -> Path:
        """A file that says that a numbered file is complete."""
        return self.path(number).with_suffix(".done")

    def read(self, number: int) -> Iterator[Chunk]:
        """Samples that `to_int16` turns into those of the file."""
        with soundfile.SoundFile(self.path(number)) as file:
            for block in file.blocks(BLOCK, dtype="int16"):
                yield block / 32767, file.samplerate

    def samples(self, pause: float) -> int:
        """An upper bound for all utterances with a pause after each."""
        parts = [soundfile.info(part) for part in self.folder.glob("[0-9]*.wav")]
        return sum(part.frames + math.ceil(pause * part.samplerate) for part in parts)

    def finished(self) -> int:
        """How many utterances are complete."""
        return len([*self.folder.glob("[0-9]*")]) if self.are_own() else 0

    def remove(self) -> None:
        """Only files that this class has made, those included that a killed process has left unfinished."""
        if not self.label.is_file():
            return
        for pattern in ("[0-9]*.wav", "[0-9]*.done", ".[0-9]*.wav.*", ".fingerprint.*"):
            for part in self.folder.glob(pattern):
                part.unlink()
        self.label.unlink()
        with contextlib.suppress(OSError):  # something else is in it
            self.folder.rmdir()
