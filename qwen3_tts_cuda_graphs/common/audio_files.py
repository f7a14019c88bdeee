"""Recordings in, speech out: audio files of every kind that soundfile knows, and those of phones, which PyAV reads.

The only formats written by hand are those that soundfile cannot write: a WAV file that can be played while it grows,
and a WAV on stdout.
"""

import contextlib
import math
import os
import re
import struct
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile

from qwen3_tts_cuda_graphs.common.output_files import (
    FORMATS,
    is_special,
    is_wav,
    open_stdout,
    replacement_for,
    write_errors,
)

Chunk = tuple[np.ndarray, int]  # float samples from -1 to 1, sample rate

WAV_HEADER_BYTES = 36  # those of the 44-byte header that the RIFF size field counts
MAX_WAV_BYTES = 0xFFFFFFFF - WAV_HEADER_BYTES  # samples that the header can count
UNKNOWN_LENGTH = MAX_WAV_BYTES  # in the header of a stream, which cannot be corrected later
MAX_SECONDS = 600.0  # longest recording that PyAV decodes
MAX_RATE = 192_000  # Hz
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


def write_audio(path: Path, chunks: Iterable[Chunk], playable: bool = False, samples: int = 0) -> float:
    """Write chunks as they come, to a file or, for "-", to stdout. Returns the seconds of audio.

    playable: a WAV can be played while it grows, and stays as far as it got if the chunks end with an error. Without
    it, or in another format, the file appears under its name only when it is complete.
    samples: how many there will be, if they may be more than fit into a WAV
    """
    if str(path) == "-":
        return write_wav(path, chunks if playable else [join(chunks)], length_is_known=not playable)
    if is_wav(path) and (playable or is_special(path)):
        return write_wav(path, chunks)
    return write_file(path, chunks, samples)


def write_file(path: Path, chunks: Iterable[Chunk], samples: int) -> float:
    """A complete file in one of soundfile's formats, written beside `path` and renamed."""
    sound_format, subtype = FORMATS[path.suffix.lower()]
    if sound_format == "WAV" and 2 * samples > MAX_WAV_BYTES:
        sound_format = "RF64"  # a WAV with 64-bit sizes
    frames = 0
    with replacement_for(path) as beside, contextlib.ExitStack() as files:
        for audio, rate in chunks:
            with write_errors(path):
                if frames == 0:
                    file = files.enter_context(soundfile.SoundFile(beside, "w", rate, 1, subtype, format=sound_format))
                file.write(to_int16(audio))
            frames += len(audio)
        with write_errors(path):
            files.close()
            if soundfile.info(beside).frames < frames:
                raise OSError("incomplete")
    return frames / rate


def write_wav(path: Path, chunks: Iterable[Chunk], length_is_known: bool = False) -> float:
    """A 16-bit mono WAV whose header is corrected after every chunk, where that is possible.

    The file is opened when there is something to write. With a known length there is one chunk.
    """
    size = 0
    with contextlib.ExitStack() as files:
        for audio, rate in chunks:
            samples = to_int16(audio).tobytes()
            with write_errors(path):
                if size == 0:
                    to_stdout = str(path) == "-"  # stdout may be a file with something else in front
                    file = open_stdout() if to_stdout else open(path, "wb")
                    files.callback(close_quietly, file)
                    can_correct = file.seekable() and not to_stdout
                    file.write(wav_header(rate, len(samples) if length_is_known else UNKNOWN_LENGTH))
                file.write(samples)
                if size <= MAX_WAV_BYTES < size + len(samples):
                    warnings.warn(
                        f"{path} is larger than a WAV's header can say: some players stop at 4 GiB", stacklevel=2
                    )
                size += len(samples)
                if can_correct:
                    file.seek(0)
                    file.write(wav_header(rate, size))
                    file.seek(0, os.SEEK_END)
                file.flush()
    return size / 2 / rate


def close_quietly(file: BinaryIO) -> None:
    """Every chunk was flushed: what close could report has been reported."""
    with contextlib.suppress(OSError):
        file.close()


def wav_header(rate: int, size: int) -> bytes:
    """16-bit mono PCM with `size` bytes of samples, or more than the header can say."""
    size = min(size, MAX_WAV_BYTES)
    channels, bytes_per_sample, pcm = 1, 2, 1
    fmt = struct.pack("<HHIIHH", pcm, channels, rate, rate * bytes_per_sample, bytes_per_sample, 8 * bytes_per_sample)
    riff = struct.pack("<4sI4s", b"RIFF", WAV_HEADER_BYTES + size, b"WAVE")
    return riff + struct.pack("<4sI", b"fmt ", len(fmt)) + fmt + struct.pack("<4sI", b"data", size)


def to_int16(audio: np.ndarray) -> np.ndarray:
    """Samples from -1 to 1 as 16-bit integers. Samples that are int16 already are returned unchanged."""
    if audio.dtype == np.int16:
        return audio
    return np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2")


def join(chunks: Iterable[Chunk]) -> Chunk:
    audio, rates = zip(*chunks)
    return np.concatenate(audio), rates[0]
