"""Chunks of samples, each with its rate: resampled, as 16-bit integers, joined."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

Chunk = tuple[np.ndarray, int]  # float samples from -1 to 1, sample rate


def resample(audio: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Resample as librosa.resample does, which upstream calls, to the same samples.

    librosa itself compiles code for half a minute at its first use after an installation, and the streams of a server
    would wait for it.
    """
    if rate == wanted:
        return audio
    import soxr  # what librosa uses

    length = math.ceil(len(audio) * (wanted / rate))
    audio = soxr.resample(audio, rate, wanted, quality="soxr_hq")[:length]
    return np.pad(audio, (0, length - len(audio)))


class Resampler:
    """Resamples one stream of 16-bit samples: call `add` as they come, then `finish`. The joined results are those of
    soxr for the whole at once. Up to 72 ms are held back at 8,000 Hz, at most 39 ms at other rates; of a first chunk of
    80 ms, 11 to 19 ms."""

    def __init__(self, rate: int, wanted: int):
        import soxr

        self.rate = wanted
        self.stream = soxr.ResampleStream(rate, wanted, 1, dtype="float32", quality="HQ")  # int16 would be dithered

    def add(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        resampled = self.stream.resample_chunk(samples.astype(np.float32), last)
        return np.rint(np.clip(resampled, -32767, 32767)).astype("<i2")

    def finish(self) -> np.ndarray:
        return self.add(np.empty(0, np.int16), last=True)


def at_rate(chunks: Iterable[Chunk], wanted: int) -> Iterator[Chunk]:
    """Resample chunks as they come."""
    return filtered(chunks, lambda rate: Resampler(rate, wanted))


def filtered(chunks: Iterable[Chunk], make: Callable) -> Iterator[Chunk]:
    """Send chunks through a Tempo or a Resampler. make: creates it for the rate of the chunks"""
    stream = None
    for audio, rate in chunks:
        stream = stream or make(rate)
        if len(samples := stream.add(to_int16(audio))):
            yield from_int16(samples), stream.rate
    if stream and len(samples := stream.finish()):
        yield from_int16(samples), stream.rate


def to_int16(audio: np.ndarray) -> np.ndarray:
    """Samples from -1 to 1 as 16-bit integers. Samples that are int16 already are returned unchanged."""
    if audio.dtype == np.int16:
        return audio
    return np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2")


def from_int16(samples: np.ndarray) -> np.ndarray:
    """The inverse of `to_int16`."""
    return samples / np.float32(32767)


def join(chunks: Iterable[Chunk]) -> Chunk:
    audio, rates = zip(*chunks)
    return np.concatenate(audio), rates[0]
