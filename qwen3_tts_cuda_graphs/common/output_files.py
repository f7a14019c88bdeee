"""Output files: checked before the work, and written whole or not at all.

Imports nothing that takes time: a mistake in --output is answered at once.
"""

import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FORMATS = {  # file name extension -> soundfile's format and subtype; none is WAV
    "": ("WAV", "PCM_16"),
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}


def check_writable(path: Path, *inputs: str | Path | None) -> None:
    """Raise an error now rather than after the work. None of the inputs is overwritten."""
    if str(path) == "-":
        return
    folder = os.path.dirname(os.path.realpath(path))  # a new file is written there, and then renamed
    if path.is_dir():
        problem = "it is a folder"
    elif any(given and os.path.isfile(given) and path.exists() and path.samefile(given) for given in inputs):
        problem = "it is what is read"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not is_special(path) and not os.access(folder, os.W_OK):
        problem = "permission denied in its folder"
    elif path.exists() and not os.access(path, os.W_OK):
        problem = "permission denied"
    else:
        return
    raise ValueError(f"cannot write {path}: {problem}: choose another --output")


def check_format(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        known = ", ".join(extension for extension in FORMATS if extension)
        raise ValueError(f"cannot write {path}: {path.suffix} is not an audio format: choose one of {known}")
    if is_special(path) and not is_wav(path):
        raise ValueError(f"cannot write {path}: a pipe or a device takes WAV only: choose another --output")


def is_wav(path: Path) -> bool:
    return FORMATS[path.suffix.lower()][0] == "WAV"


def is_special(path: Path) -> bool:
    """A device or a named pipe, which cannot be replaced by a file."""
    return path.exists() and not path.is_file()


@contextlib.contextmanager
def replacement_for(path: Path) -> Iterator[Path]:
    """A new file beside `path` that takes its place if all goes well, and is removed if not."""
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with write_errors(path):
        beside.touch(exist_ok=False)
    try:
        yield beside
        with write_errors(path):
            if target.exists():
                beside.chmod(stat.S_IMODE(target.stat().st_mode))
            beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a file or, for "-", to stdout."""
    if str(path) == "-":
        with write_errors(path), open_stdout() as file:
            file.write(content)
    elif is_special(path):
        with write_errors(path):
            path.write_bytes(content)
    else:
        with replacement_for(path) as beside, write_errors(path):
            beside.write_bytes(content)


def open_stdout() -> BinaryIO:
    """Always buffered: with PYTHONUNBUFFERED, sys.stdout.buffer may write less than it is given, without an error."""
    return open(sys.stdout.fileno(), "wb", closefd=False)


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Failed writes as one sentence. soundfile's are a RuntimeError or, on a full disk, an AssertionError."""
    try:
        yield
    except BrokenPipeError:  # not a mistake: the player was closed
        raise
    except (OSError, RuntimeError, AssertionError) as error:
        reason = getattr(error, "strerror", None) or "the file could not be written completely, is the disk full?"
        raise ValueError(f"cannot write {path}: {reason}: choose another --output") from None
