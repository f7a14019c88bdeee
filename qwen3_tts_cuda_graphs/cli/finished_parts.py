"""Finished parts of a long text are kept on disk until all are spoken, so that --resume need not speak them again.

While `book.wav`, or `book-001.wav` and so on, is being spoken, the folder `book.wav.parts` holds the audio of each
part that is complete. A fingerprint of the text and of all options tells whether the parts belong to this run.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import soundfile

from qwen3_tts_cuda_graphs.common.output_files import replacement_for, write_errors
from qwen3_tts_cuda_graphs.common.samples import Chunk, from_int16
from qwen3_tts_cuda_graphs.common.speech_files import for_soundfile

BLOCK = 1 << 16  # samples to read at a time


class FinishedParts:
    def __init__(self, output: Path, fingerprint: str):
        self.folder = output.with_name(f"{output.name}.parts")
        self.fingerprint = fingerprint

    @property
    def label(self) -> Path:
        return self.folder / "fingerprint"

    def check(self, resume: bool) -> None:
        """Raise an error now if --resume cannot work."""
        if resume and self.label.is_file() and not self.belong_to_this_run():
            raise ValueError(
                f"{self.folder} is from another text or other options: give the same again, or leave out --resume"
            )

    def belong_to_this_run(self) -> bool:
        """Whether the files in the folder are from this text and these options."""
        return self.label.is_file() and self.label.read_bytes() == self.fingerprint.encode()

    def open(self, resume: bool) -> None:
        """Make the folder. Without --resume, remove what an earlier run has left in it."""
        if not resume:
            self.remove()
        with write_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        with replacement_for(self.label) as temporary:
            temporary.write_bytes(self.fingerprint.encode())

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.wav"

    def has(self, number: int) -> bool:
        """Whether this part is there and can be read. After a power failure, its file may be empty."""
        try:
            return soundfile.info(for_soundfile(self.path(number))).frames > 0
        except soundfile.LibsndfileError:
            return False

    def read(self, number: int) -> Iterator[Chunk]:
        with soundfile.SoundFile(for_soundfile(self.path(number))) as file:
            for block in file.blocks(BLOCK, dtype="int16"):
                yield from_int16(block), file.samplerate

    def samples(self, numbers: list[int], silence: float, rate: int | None) -> int:
        """An upper bound of the samples of some parts with this silence in seconds. rate: if they will be resampled"""
        parts = [soundfile.info(for_soundfile(self.path(number))) for number in numbers]
        rate = rate or parts[0].samplerate
        return sum(math.ceil(part.duration * rate) for part in parts) + math.ceil(silence * rate)

    def count(self) -> int:
        """How many parts of this run there are."""
        return len([*self.folder.glob("[0-9]*.wav")]) if self.belong_to_this_run() else 0

    def remove(self) -> None:
        """Remove the files that this class has made, also unfinished ones of a killed process, and no others."""
        if not self.label.is_file():
            return
        for pattern in ("[0-9]*.wav", ".[0-9]*.wav.*", ".fingerprint.*"):
            for part in self.folder.glob(pattern):
                part.unlink()
        self.label.unlink()
        with contextlib.suppress(OSError):  # it is not empty
            self.folder.rmdir()
