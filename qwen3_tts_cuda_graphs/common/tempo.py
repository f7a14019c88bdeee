"""Speech faster or slower, with the same pitch. PyAV brings FFmpeg's filters."""

import contextlib
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av
import numpy as np

from qwen3_tts_cuda_graphs.common.audio_files import Chunk, to_int16

SLOWEST_STEP = 0.5  # the slowest tempo of FFmpeg's atempo: a slower one takes two of them


class Tempo:
    """One stream of 16-bit samples: `add` them as they come, then `finish`."""

    def __init__(self, rate: int, speed: float):
        self.rate = rate
        self.speed = speed
        self.samples = 0
        self.taken = 0
        self.graph = av.filter.Graph()
        steps = [SLOWEST_STEP, speed / SLOWEST_STEP] if speed < SLOWEST_STEP else [speed]
        self.graph.link_nodes(
            self.graph.add_abuffer(sample_rate=rate, format="s16", layout="mono", time_base=Fraction(1, rate)),
            *(self.graph.add("atempo", repr(float(step))) for step in steps),
            self.graph.add("abuffersink"),
        ).configure()

    def add(self, samples: np.ndarray) -> np.ndarray:
        self.graph.push(audio_frame(samples, self.rate, self.samples))
        self.samples += len(samples)
        return self.take()

    def finish(self) -> np.ndarray:
        """atempo keeps the last milliseconds to itself, so some silence follows them, and is cut off again."""
        missing = round(self.samples / self.speed) - self.taken
        rest = self.add(np.zeros(self.rate // 10, np.int16))
        self.graph.push(None)
        return np.concatenate([rest, self.take()])[: max(missing, 0)]

    def take(self) -> np.ndarray:
        pieces = [np.empty(0, np.int16)]
        with contextlib.suppress(av.BlockingIOError, av.EOFError):
            while True:
                pieces.append(self.graph.pull().to_ndarray()[0])
        samples = np.concatenate(pieces)
        self.taken += len(samples)
        return samples


def audio_frame(samples: np.ndarray, rate: int, position: int):
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate = rate
    frame.time_base = Fraction(1, rate)
    frame.pts = position
    return frame


def at_speed(chunks: Iterable[Chunk], speed: float) -> Iterator[Chunk]:
    """An utterance in another tempo, as it is made."""
    tempo = None
    for audio, rate in chunks:
        tempo = tempo or Tempo(rate, speed)
        yield from as_chunk(tempo.add(to_int16(audio)), rate)
    if tempo:
        yield from as_chunk(tempo.finish(), rate)


def as_chunk(samples: np.ndarray, rate: int) -> Iterator[Chunk]:
    if len(samples):
        yield samples / np.float32(32767), rate
