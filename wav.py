"""A WAV file that can be played at every moment while it is written."""
import struct
import sys

import numpy as np

UNKNOWN = 0xFFFFFFFF - 36                                         # a length that nobody will correct


def header(rate, size):
    """16-bit mono, with `size` bytes of samples."""
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16,
                       b"data", size)


def write_wav(path, chunks):
    """Writes chunks of (float samples, rate) as they come, to a file or, with "-", to stdout. Returns the seconds."""
    file, size, to_stdout = None, 0, str(path) == "-"
    try:
        for audio, rate in chunks:
            if file is None:                                      # not before there is something to write
                file = sys.stdout.buffer if to_stdout else open(path, "wb")
                can_correct = file.seekable() and not to_stdout   # stdout may be a file that has other things in it
                file.write(header(rate, 0 if can_correct else UNKNOWN))
            samples = np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes()
            file.write(samples)
            size += len(samples)
            if can_correct:
                file.seek(0)
                file.write(header(rate, size))
                file.seek(0, 2)
            file.flush()
    finally:
        if file is not None and not to_stdout:
            file.close()
    return size / 2 / rate if size else 0.0
