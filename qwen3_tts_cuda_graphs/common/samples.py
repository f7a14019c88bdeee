"""Speech as chunks of samples, each with its rate: at another rate, as 16 bits, in one piece."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

Chunk = tuple[np.ndarray, int]  # float samples from -1 to 1, sample rate


def resample(audio: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The samples that librosa.resample gives, which upstream calls. That one compiles for half a minute at its first
    use after an installation, and a server's streams would wait for it."""
    if rate == wanted:
        return audio
    import soxr  # librosa's own

    length = math.ceil(len(audio) * (wanted / rate))
    audio = soxr.resample(audio, rate, wanted, quality="soxr_hq")[:length]
    return np.pad(audio, (0, length - len(audio)))


class Resampler:
    """One stream of 16-bit samples: `add` them as they come, then `finish`. Joined they are what soxr makes of the
    whole at once. Up to 72 ms are held back at 8,000 Hz, at most 39 ms at other rates; of a first chunk of 80 ms, 11 to
    19 ms."""

    def __init__(self, rate: int, wanted: int):
        import soxr

        self.stream = soxr.ResampleStream(rate, wanted, 1, dtype="float32", quality="HQ")  # int16 would be dithered

    def add(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        made = self.stream.resample_chunk(samples.astype(np.float32), last)
        return np.rint(np.clip(made, -32767, 32767)).astype("<i2")

    def finish(self) -> np.ndarray:
        return self.add(np.empty(0, np.int16), last=True)


def at_rate(chunks: Iterable[Chunk], wanted: int) -> Iterator[Chunk]:
    """Speech at another rate, as it is made."""
    for audio, _ in filtered(chunks, lambda rate: Resampler(rate, wanted)):
        yield audio, wanted


def filtered(chunks: Iterable[Chunk], make: Callable) -> Iterator[Chunk]:
    """Chunks as a Tempo or a Resampler gives them. make: makes one for a rate"""
    stream = None
    for audio, rate in chunks:
        stream = stream or make(rate)
        yield from as_chunk(stream.add(to_int16(audio)), rate)
    if stream:
        yield from as_chunk(stream.finish(), rate)


def as_chunk(samples: np.ndarray, rate: int) -> Iterator[Chunk]:
    if len(samples):
        yield from_int16(samples), rate


def to_int16(audio: np.ndarray) -> np.ndarray:
    """Samples from -1 to 1 as 16-bit integers. Samples that are int16 already are returned unchanged."""
    if audio.dtype == np.int16:
        return audio
    return np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2")


def from_int16(samples: np.ndarray) -> np.ndarray:
    """What `to_int16` turns into these samples."""
    return samples / np.float32(32767)


def join(chunks: Iterable[Chunk]) -> Chunk:
    audio, rates = zip(*chunks)
    return np.concatenate(audio), rates[0]
