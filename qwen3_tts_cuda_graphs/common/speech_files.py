"""Write speech to audio files, in every format that soundfile writes.

Written by hand is only what soundfile cannot write: a WAV or plain samples (without a header) that can be played while
the file grows, and both on stdout.
"""

import contextlib
import functools
import io
import os
import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile

from qwen3_tts_cuda_graphs.common.formats import format_of
from qwen3_tts_cuda_graphs.common.output_files import is_special, open_stdout, replacement_for, write_errors
from qwen3_tts_cuda_graphs.common.samples import Chunk, join, to_int16

WAV_HEADER_BYTES = 36  # the part of the 44-byte header that the RIFF size includes
CODES = {"PCM_16": (1, 2), "ALAW": (6, 1), "ULAW": (7, 1)}  # subtype -> code in a WAV's header, bytes per sample
MAX_WAV_BYTES = 0xFFFFFFFF - WAV_HEADER_BYTES  # the largest size of the samples that a header can hold
UNKNOWN_LENGTH = MAX_WAV_BYTES  # the size in the header of a stream, which cannot be corrected later


def write_audio(
    path: Path, chunks: Iterable[Chunk], playable: bool = False, samples: int = 0, name: str | None = None
) -> float:
    """Write chunks to a file or, for "-", to stdout. Returns the seconds of audio.

    playable: a WAV or plain samples can be played while they grow, and stay if the chunks end with an error. Otherwise
    the file appears under its name only when it is complete.
    samples: an upper bound of their number, if they may be more than fit into a WAV
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
    """Write a complete file with soundfile, beside `path`, and rename it."""
    if container == "WAV" and CODES[subtype][1] * samples > MAX_WAV_BYTES:
        container = "RF64"  # a WAV with 64-bit sizes
    frames = 0
    with replacement_for(path) as temporary, contextlib.ExitStack() as files:
        for audio, rate in chunks:
            with write_errors(path):
                if frames == 0:
                    name = for_soundfile(temporary)
                    file = files.enter_context(soundfile.SoundFile(name, "w", rate, 1, subtype, format=container))
                file.write(to_int16(audio))
            frames += len(audio)
        with write_errors(path):
            files.close()
            if frames_in(temporary, container, subtype) < frames:
                raise OSError("incomplete")
    return frames / rate


def for_soundfile(path: Path) -> str | bytes:
    """A file's name as soundfile takes it: bytes, because it may not be UTF-8, but on Windows a str."""
    return str(path) if os.name == "nt" else os.fsencode(path)


def frames_in(path: Path, container: str, subtype: str) -> int:
    if container == "RAW":  # no header has their number
        return path.stat().st_size // CODES[subtype][1]
    return soundfile.info(for_soundfile(path)).frames


def write_growing(
    path: Path, chunks: Iterable[Chunk], container: str, subtype: str, length_is_known: bool = False
) -> float:
    """Write plain samples, or a WAV whose header is corrected after every chunk if the file is seekable.

    The file is opened when the first chunk is there. length_is_known: there is one chunk
    """
    header = wav_header if container == "WAV" else lambda *_: b""
    size = 0
    with contextlib.ExitStack() as files:
        for audio, rate in chunks:
            samples = to_bytes(to_int16(audio), subtype)
            with write_errors(path):
                if size == 0:
                    to_stdout = str(path) == "-"  # never corrected: stdout may be a file with something else in front
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
    """Close a file after every write was flushed, so that nothing is left to fail."""
    with contextlib.suppress(OSError):
        file.close()


def wav_header(rate: int, size: int, subtype: str = "PCM_16") -> bytes:
    """The header of a mono WAV with `size` bytes of samples, or the largest size that it can hold."""
    size = min(size, MAX_WAV_BYTES)
    code, width = CODES[subtype]
    channels = 1
    fmt = struct.pack("<HHIIHH", code, channels, rate, rate * width, width, 8 * width)
    riff = struct.pack("<4sI4s", b"RIFF", WAV_HEADER_BYTES + size, b"WAVE")
    return riff + struct.pack("<4sI", b"fmt ", len(fmt)) + fmt + struct.pack("<4sI", b"data", size)


def to_bytes(samples: np.ndarray, subtype: str) -> bytes:
    """The bytes of 16-bit samples, or of their 8-bit G.711 codes."""
    if subtype != "PCM_16":
        samples = g711_bytes(subtype)[samples.view(np.uint16)]
    return samples.tobytes()


@functools.cache
def g711_bytes(subtype: str) -> np.ndarray:
    """A table of the byte that libsndfile writes for every 16-bit sample, (65536,)."""
    file = io.BytesIO()
    soundfile.write(file, np.arange(1 << 16, dtype=np.uint16).view(np.int16), 8000, subtype, format="RAW")
    return np.frombuffer(file.getvalue(), np.uint8)
