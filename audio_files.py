"""A WAV file that can be played at every moment while it is written."""
import contextlib
import struct
import sys
from pathlib import Path

import numpy as np

UNKNOWN = 0xFFFFFFFF - 36                                         # a length that nobody will correct


def header(rate, size):
    """16-bit mono, with `size` bytes of samples."""
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16,
                       b"data", size)


def to_bytes(audio):
    return np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes()


def write_wav(path, chunks):
    """Writes chunks of (float samples, rate), to a file or, with "-", to stdout: a list whole or not at all, others as
    they come. Returns the seconds."""
    if isinstance(chunks, list):
        rate, samples = chunks[0][1], b"".join(to_bytes(audio) for audio, _ in chunks)
        write_whole(path, header(rate, len(samples)) + samples)
        return len(samples) / 2 / rate
    file, size, to_stdout = None, 0, str(path) == "-"
    try:
        for audio, rate in chunks:
            if file is None:                                      # not before there is something to write
                file = sys.stdout.buffer if to_stdout else open(path, "wb")
                can_correct = file.seekable() and not to_stdout   # stdout may be a file that has other things in it
                file.write(header(rate, 0 if can_correct else UNKNOWN))
            samples = to_bytes(audio)
            file.write(samples)
            size += len(samples)
            if can_correct:
                file.seek(0)
                file.write(header(rate, size))
                file.seek(0, 2)
            file.flush()
    except OSError as error:
        raise in_words(path, error) from None
    finally:
        if file is not None and not to_stdout:
            with contextlib.suppress(OSError):                    # said already: every chunk was flushed
                file.close()
    return size / 2 / rate if size else 0.0


def write_whole(path, content):
    """Bytes to a file or, with "-", to stdout. Of a file for which there is no room nothing stays."""
    try:
        if str(path) == "-":
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            Path(path).write_bytes(content)
    except OSError as error:
        if Path(path).is_file():
            Path(path).unlink()
        raise in_words(path, error) from None


def in_words(path, error):
    if isinstance(error, BrokenPipeError):                        # no mistake: whoever listened has gone
        return error
    return ValueError(f"cannot write {path}: {error.strerror}: choose another --output")
