"""Read recordings: with soundfile, or with PyAV for the formats of phones and browsers."""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile

from qwen3_tts_cuda_graphs.common.samples import Chunk

MAX_SECONDS = 600.0  # longest recording that PyAV decodes
MIN_RATE, MAX_RATE = 4_000, 192_000  # Hz
CODECS = {"aac", "alac", "flac", "mp3", "opus", "pcm_s16le", "vorbis"}  # PyAV may decode no others
RECORDINGS = "a WAV, FLAC, OGG, MP3, M4A, AAC or WebM file"  # for error messages
if find_spec("av") is None:
    RECORDINGS = "a WAV, FLAC, OGG or MP3 file, or run pip install av, which reads M4A, AAC and WebM"


def read_audio(path: Path) -> Chunk:
    """Read a recording as mono float32 samples, and their rate."""
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
    """FFmpeg's demuxer for a file that begins with these 12 bytes, or None if soundfile reads it."""
    if start[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if start[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"  # WebM, too
    has_aac_header = len(start) > 1 and start[0] == 0xFF and start[1] & 0xF6 == 0xF0  # MP3 has other layer bits
    return "aac" if has_aac_header else None


def decode_with_ffmpeg(file: BinaryIO, demuxer: str, seconds: float) -> tuple[np.ndarray, int, int]:
    """Decode at most `seconds` and one more sample. Returns samples (N, 1), their rate, and the file's number of
    channels. Raises RuntimeError."""
    try:
        import av
    except ImportError:
        raise RuntimeError("PyAV is not installed") from None
    av.logging.set_level(None)
    resampler, pieces = None, []
    left = 1  # samples to decode; set when the rate is known
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
    """Raise an error if no voice can be made from these mono samples. Returns their length in seconds."""
    seconds = len(audio) / rate
    if not np.isfinite(audio).all() or np.abs(audio).max(initial=0) < 1e-4:
        raise ValueError(f"{name} is silent or broken: give a recording of the voice")
    if seconds < 1:
        raise ValueError(f"{name} has {seconds:.2f} s of audio: give at least 1 s, better 3 to 30 s")
    return seconds
