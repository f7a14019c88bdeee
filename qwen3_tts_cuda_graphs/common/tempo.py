"""Speech faster or slower, with the same pitch, by FFmpeg's filter atempo, which PyAV contains."""

import contextlib
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av
import numpy as np

from qwen3_tts_cuda_graphs.common.samples import Chunk, filtered

SLOWEST_STEP = 0.5  # the slowest tempo of atempo; for slower speech two of them are chained


class Tempo:
    """Changes the tempo of one stream of 16-bit samples: call `add` as they come, then `finish`."""

    def __init__(self, rate: int, speed: float):
        self.rate = rate
        self.speed = speed
        self.samples = 0  # that were added
        self.taken = 0  # samples that were returned
        self.ready = np.empty(0, np.int16)
        self.graph = av.filter.Graph()
        steps = [SLOWEST_STEP, speed / SLOWEST_STEP] if speed < SLOWEST_STEP else [speed]
        self.graph.link_nodes(
            self.graph.add_abuffer(sample_rate=rate, format="s16", layout="mono", time_base=Fraction(1, rate)),
            *(self.graph.add("atempo", repr(float(step))) for step in steps),
            self.graph.add("abuffersink"),
        ).configure()

    def add(self, samples: np.ndarray) -> np.ndarray:
        self.push(samples)
        self.samples += len(samples)
        return self.take()

    def finish(self) -> np.ndarray:
        """Return the rest. atempo holds back the last milliseconds, so silence is added to push them out."""
        self.push(np.zeros(self.rate // 5, np.int16))
        self.graph.push(None)
        return self.take()

    def push(self, samples: np.ndarray) -> None:
        self.graph.push(audio_frame(samples, self.rate, self.samples))

    def take(self) -> np.ndarray:
        """The samples that are ready, but no more in total than the added ones take at this speed."""
        pieces = [self.ready]
        with contextlib.suppress(av.BlockingIOError, av.EOFError):
            while True:
                pieces.append(self.graph.pull().to_ndarray()[0])
        ready = np.concatenate(pieces)
        due = round(self.samples / self.speed) - self.taken
        samples, self.ready = ready[:due], ready[due:]
        self.taken += len(samples)
        return samples


def audio_frame(samples: np.ndarray, rate: int, position: int):
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate = rate
    frame.time_base = Fraction(1, rate)
    frame.pts = position
    return frame


def at_speed(chunks: Iterable[Chunk], speed: float) -> Iterator[Chunk]:
    """Change the tempo of an utterance, chunk by chunk."""
    return filtered(chunks, lambda rate: Tempo(rate, speed))
