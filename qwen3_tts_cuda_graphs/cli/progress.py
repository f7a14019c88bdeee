"""Show on a terminal how much is spoken, and how long the rest will take."""

import datetime
import time
from collections.abc import Iterable, Iterator

from qwen3_tts_cuda_graphs.common.command import show_progress, show_warning
from qwen3_tts_cuda_graphs.common.samples import Chunk
from qwen3_tts_cuda_graphs.prompts.script import PartText


class Progress:
    def __init__(self, texts: list[str]):
        self.texts = texts  # of all utterances; empty if they are not known yet
        self.seconds = 0.0  # of audio so far
        self.spoken = 0  # characters that were spoken
        self.skipped = 0  # characters that an interrupted run has spoken
        self.finished = 0  # utterances

    def begin(self) -> None:
        """Start the clock, after the model is loaded."""
        self.start = time.perf_counter()

    def skip(self, text: str) -> None:
        self.skipped += len(text)
        self.finished += 1

    def follow(self, chunks: Iterable[Chunk], text: str | PartText) -> Iterator[Chunk]:
        for audio, rate in chunks:
            self.seconds += len(audio) / rate
            show_progress(self.line())
            yield audio, rate
        if self.texts:
            self.spoken += len(text)
        self.finished += 1

    def show_warning(self, message: Warning, *_) -> None:
        """Replaces warnings.showwarning, to name the utterance that is being spoken."""
        show_warning(message if len(self.texts) == 1 else f"utterance {self.finished + 1}: {message}")

    def line(self) -> str:
        elapsed = time.perf_counter() - self.start
        line = f"{self.seconds:.1f} s of audio, {self.seconds / elapsed:.2f} x real time"
        if len(self.texts) > 1:
            line = f"utterance {self.finished + 1} of {len(self.texts)}, {line}"
        if self.spoken:
            rest = sum(map(len, self.texts)) - self.skipped - self.spoken
            line += f", {datetime.timedelta(seconds=round(elapsed * rest / self.spoken))} left"
        return line
