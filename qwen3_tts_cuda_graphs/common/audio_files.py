"""Recordings in, speech out: audio files of every kind that soundfile knows, and those of phones, which PyAV reads.

The only formats written by hand are those that soundfile cannot write: a WAV file, or plain samples, that can be
played while the file grows, and both on stdout.
"""

import contextlib
import functools
import io
import math
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile

from qwen3_tts_cuda_graphs.common.output_files import (
    format_of,
    is_special,
    open_stdout,
    replacement_for,
    write_errors,
)

Chunk = tuple[np.ndarray, int]  # float samples from -1 to 1, sample rate

WAV_HEADER_BYTES = 36  # those of the 44-byte header that the RIFF size field counts
CODES = {"PCM_16": (1, 2), "ALAW": (6, 1), "ULAW": (7, 1)}  # subtype -> code in a WAV's header, bytes per sample
MAX_WAV_BYTES = 0xFFFFFFFF - WAV_HEADER_BYTES  # samples that the header can count
UNKNOWN_LENGTH = MAX_WAV_BYTES  # in the header of a stream, which cannot be corrected later
MAX_SECONDS = 600.0  # longest recording that PyAV decodes
MIN_RATE, MAX_RATE = 4_000, 192_000  # Hz
CODECS = {"aac", "alac", "flac", "mp3", "opus", "pcm_s16le", "vorbis"}  # the only ones that PyAV decodes
RECORDINGS = "a WAV, FLAC, OGG, MP3, M4A, AAC or WebM file"  # what can be read
if find_spec("av") is None:
    RECORDINGS = "a WAV, FLAC, OGG or MP3 file, or run pip install av, which reads M4A, AAC and WebM"


def read_audio(path: Path) -> Chunk:
    """A recording as mono float32 samples, and its rate."""
    if not path.is_file():
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/|data:", str(path)):
            raise ValueError(f"{str(path)[:80]} is an address: download the recording, and give its file")
        raise ValueError(f"there is no file {path}: give a recording of the voice")
    try:
        with path.open("rb") as file:
            demuxer = demuxer_for(file.read(12))
            file.seek(0)
            if demuxer:
                audio, rate, _ = decode_with_ffmpeg(file, demuxer, MAX_SECONDS)
            else:
                audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, OSError, ValueError, TypeError, MemoryError):
        raise ValueError(f"{path} is not audio that can be read: give {RECORDINGS}") from None
    if demuxer and len(audio) > MAX_SECONDS * rate:
        raise ValueError(f"{path} is longer than {MAX_SECONDS:g} s: give a shorter recording")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"{path} has {rate} Hz: give a recording with {MIN_RATE} to {MAX_RATE}")
    audio = audio.mean(axis=1)
    seconds = check_recording(audio, rate, str(path))
    if not 3 <= seconds <= 30:
        warnings.warn(f"{path} has {seconds:.1f} s of audio: 3 to 30 s give a better voice", stacklevel=2)
    return audio, rate


def demuxer_for(start: bytes) -> str | None:
    """FFmpeg's name for a phone's or a browser's format, by the first 12 bytes of a file. None: soundfile's."""
    if start[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if start[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"  # WebM, too
    has_aac_header = len(start) > 1 and start[0] == 0xFF and start[1] & 0xF6 == 0xF0  # MP3 has a layer there
    return "aac" if has_aac_header else None


def decode_with_ffmpeg(file: BinaryIO, demuxer: str, seconds: float) -> tuple[np.ndarray, int, int]:
    """Samples (N, 1) of at most so many seconds and one more, rate, and channels of the file. Raises RuntimeError."""
    try:
        import av
    except ImportError:
        raise RuntimeError("PyAV is not installed") from None
    av.logging.set_level(None)
    resampler, pieces, left = None, [], 1  # samples that are wanted, once the rate is known
    try:
        with av.open(file, format=demuxer) as container:
            stream = container.streams.audio[0]
            if stream.codec_context.codec.canonical_name not in CODECS:
                raise RuntimeError("its codec is not read here")
            stream.thread_count = 1
            for frame in container.decode(stream):
                if resampler is None:
                    rate, channels = frame.sample_rate, frame.layout.nb_channels
                    if rate > MAX_RATE:
                        raise RuntimeError(f"it has {rate} Hz")
                    left = int(seconds * rate) + 1
                    resampler = av.AudioResampler("flt", "mono", rate)
                for mono in resampler.resample(frame):
                    pieces.append(mono.to_ndarray()[0, :left].copy())
                    left -= len(pieces[-1])
                if not left:
                    break
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise RuntimeError(f"it cannot be decoded: {error}") from None
    if not pieces:
        raise RuntimeError("it has no sound")
    return np.concatenate(pieces)[:, None], rate, channels


def check_recording(audio: np.ndarray, rate: int, name: str) -> float:
    """Whether a voice can be made from mono samples. Returns their length in seconds."""
    seconds = len(audio) / rate
    if not np.isfinite(audio).all() or np.abs(audio).max(initial=0) < 1e-4:
        raise ValueError(f"{name} is silent or broken: give a recording of the voice")
    if seconds < 1:
        raise ValueError(f"{name} has {seconds:.2f} s of audio: give at least 1 s, better 3 to 30 s")
    return seconds


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
        yield samples / np.float32(32767), rate


def write_audio(
    path: Path, chunks: Iterable[Chunk], playable: bool = False, samples: int = 0, name: str | None = None
) -> float:
    """Write chunks as they come, to a file or, for "-", to stdout. Returns the seconds of audio.

    playable: a WAV can be played while it grows, and stays as far as it got if the chunks end with an error. Without
    it, or in another format, the file appears under its name only when it is complete.
    samples: how many there will be, if they may be more than fit into a WAV
    name: of the format; default: by the file's extension
    """
    container, subtype = format_of(path, name)
    if str(path) == "-":
        return write_growing(
            path, chunks if playable else [join(chunks)], container, subtype, length_is_known=not playable
        )
    if container in ("WAV", "RAW") and (playable or is_special(path)):
        return write_growing(path, chunks, container, subtype)
    return write_file(path, chunks, container, subtype, samples)


def write_file(path: Path, chunks: Iterable[Chunk], container: str, subtype: str, samples: int) -> float:
    """A complete file in one of soundfile's formats, written beside `path` and renamed."""
    if container == "WAV" and CODES[subtype][1] * samples > MAX_WAV_BYTES:
        container = "RF64"  # a WAV with 64-bit sizes
    frames = 0
    with replacement_for(path) as beside, contextlib.ExitStack() as files:
        for audio, rate in chunks:
            with write_errors(path):
                if frames == 0:
                    name = for_soundfile(beside)
                    file = files.enter_context(soundfile.SoundFile(name, "w", rate, 1, subtype, format=container))
                file.write(to_int16(audio))
            frames += len(audio)
        with write_errors(path):
            files.close()
            if frames_in(beside, container, subtype) < frames:
                raise OSError("incomplete")
    return frames / rate


def for_soundfile(path: Path) -> str | bytes:
    """A file's name, which may be no UTF-8: soundfile refuses a str then. On Windows it wants one."""
    return str(path) if os.name == "nt" else os.fsencode(path)


def frames_in(path: Path, container: str, subtype: str) -> int:
    if container == "RAW":  # nothing in it says how many
        return path.stat().st_size // CODES[subtype][1]
    return soundfile.info(for_soundfile(path)).frames


def write_growing(
    path: Path, chunks: Iterable[Chunk], container: str, subtype: str, length_is_known: bool = False
) -> float:
    """Plain samples, in a WAV whose header is corrected after every chunk, where that is possible, or without a header.

    The file is opened when there is something to write. With a known length there is one chunk.
    """
    size, header = 0, wav_header if container == "WAV" else lambda *_: b""
    with contextlib.ExitStack() as files:
        for audio, rate in chunks:
            samples = to_bytes(to_int16(audio), subtype)
            with write_errors(path):
                if size == 0:
                    to_stdout = str(path) == "-"  # stdout may be a file with something else in front
                    file = open_stdout() if to_stdout else open(path, "wb")
                    files.callback(close_quietly, file)
                    can_correct = file.seekable() and not to_stdout
                    file.write(header(rate, len(samples) if length_is_known else UNKNOWN_LENGTH, subtype))
                file.write(samples)
                if container == "WAV" and size <= MAX_WAV_BYTES < size + len(samples):
                    warnings.warn(
                        f"{path} is larger than a WAV's header can say: some players stop at 4 GiB", stacklevel=2
                    )
                size += len(samples)
                if can_correct:
                    file.seek(0)
                    file.write(header(rate, size, subtype))
                    file.seek(0, os.SEEK_END)
                file.flush()
    return size / CODES[subtype][1] / rate


def close_quietly(file: BinaryIO) -> None:
    """Every chunk was flushed: what close could report has been reported."""
    with contextlib.suppress(OSError):
        file.close()


def wav_header(rate: int, size: int, subtype: str = "PCM_16") -> bytes:
    """Mono, with `size` bytes of samples, or more than the header can say."""
    size = min(size, MAX_WAV_BYTES)
    code, width = CODES[subtype]
    channels = 1
    fmt = struct.pack("<HHIIHH", code, channels, rate, rate * width, width, 8 * width)
    riff = struct.pack("<4sI4s", b"RIFF", WAV_HEADER_BYTES + size, b"WAVE")
    return riff + struct.pack("<4sI", b"fmt ", len(fmt)) + fmt + struct.pack("<4sI", b"data", size)


def to_bytes(samples: np.ndarray, subtype: str) -> bytes:
    """16-bit samples as they are, or in the 8 bits of G.711."""
    if subtype != "PCM_16":
        samples = g711_bytes(subtype)[samples.view(np.uint16)]
    return samples.tobytes()


@functools.cache
def g711_bytes(subtype: str) -> np.ndarray:
    """The byte of every 16-bit sample, (65536,), as libsndfile writes it."""
    file = io.BytesIO()
    soundfile.write(file, np.arange(1 << 16, dtype=np.uint16).view(np.int16), 8000, subtype, format="RAW")
    return np.frombuffer(file.getvalue(), np.uint8)


def to_int16(audio: np.ndarray) -> np.ndarray:
    """Samples from -1 to 1 as 16-bit integers. Samples that are int16 already are returned unchanged."""
    if audio.dtype == np.int16:
        return audio
    return np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2")


def join(chunks: Iterable[Chunk]) -> Chunk:
    audio, rates = zip(*chunks)
    return np.concatenate(audio), rates[0]
