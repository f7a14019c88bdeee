"""Output files: checked before the work, and written completely or not at all.

Imports nothing that takes time, so that a mistake in --output is answered at once.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def check_writable(path: Path, *inputs: str | Path | None, option: str = "--output") -> None:
    """Raise an error if the file cannot be written, or is one of the inputs. option: the one that names it"""
    if str(path) == "-":
        return
    folder = os.path.dirname(os.path.realpath(path))  # the new file is written there, and then renamed
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
    raise ValueError(f"cannot write {path}: {problem}: choose another {option}")


def is_special(path: Path) -> bool:
    """Whether it is a device or a named pipe, which a file must not replace."""
    return path.exists() and not path.is_file()


def is_stdout(path: Path) -> bool:
    """Whether it is stdout (`-` or /dev/stdout), so that the program must print its messages elsewhere."""
    if str(path) == "-":
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout may be closed, or none at all
        return is_special(path) and os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    return False


@contextlib.contextmanager
def replacement_for(path: Path, option: str = "--output") -> Iterator[Path]:
    """Yield the path of a new file beside `path`. It replaces `path` at the end, or is removed after an error."""
    target = Path(os.path.realpath(path))  # a symbolic link stays a link
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with write_errors(path, option):
        temporary.touch(exist_ok=False)
    try:
        yield temporary
        with write_errors(path, option):
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            try:
                temporary.replace(target)
            except OSError as error:  # a file that is mounted, or another user's in a folder like /tmp
                if error.errno not in (errno.EBUSY, errno.EPERM) or not target.exists():
                    raise
                with open(temporary, "rb") as source, open(target, "r+b") as file:
                    shutil.copyfileobj(source, file)
                    file.truncate()
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, option: str = "--output") -> None:
    """Write to a file or, for "-", to stdout."""
    if str(path) == "-":
        with write_errors(path, option), open_stdout() as file:
            file.write(content)
    elif is_special(path):
        with write_errors(path, option):
            path.write_bytes(content)
    else:
        with replacement_for(path, option) as temporary, write_errors(path, option):
            temporary.write_bytes(content)


def open_stdout() -> BinaryIO:
    """A buffered stdout: with PYTHONUNBUFFERED, sys.stdout.buffer may silently write less than it is given."""
    return open(sys.stdout.fileno(), "wb", closefd=False)


@contextlib.contextmanager
def write_errors(path: Path, option: str = "--output") -> Iterator[None]:
    """Turn failed writes into one sentence. soundfile raises RuntimeError or, on a full disk, AssertionError."""
    try:
        yield
    except BrokenPipeError:  # not an error: the player was closed
        raise
    except (OSError, RuntimeError, AssertionError) as error:
        reason = getattr(error, "strerror", None) or "the file could not be written completely, is the disk full?"
        raise ValueError(f"cannot write {path}: {reason}: choose another {option}") from None
