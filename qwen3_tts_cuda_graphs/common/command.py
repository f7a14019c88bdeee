"""What the project's commands share: mistakes and warnings as one line, progress on a terminal.

Imports nothing that takes time, so that --help and mistakes are answered at once.
"""

import contextlib
import io
import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, so that unfinished files are removed as after Ctrl-C."""


def check_device_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"cuda(:(0|[1-9]\d?))?|cpu(:0)?", name):
        raise ValueError(f"there is no device {name!r} here: choose cuda, cuda:1 and so on, or cpu")


def show_progress(line: str) -> None:
    """Replace the last line of a terminal. Does nothing if stderr is no terminal."""
    if sys.stderr and sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_) -> None:
    show_note(f"warning: {with_option_names(str(message).splitlines()[0])}")


def show_note(line: str) -> None:
    if sys.stderr:  # without one, print would write to stdout, which may be the audio
        show_progress("")
        print(line, file=sys.stderr)


def with_option_names(message: str) -> str:
    """The library's messages, which name an argument of `load`, with the option of the command line."""
    return message.replace("raise max_seq_len", "raise --max-seq-len")


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Wraps a script's main: a user's mistake ends it with one line and exit code 2, a warning is one line."""
    warnings.showwarning = show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that the terminal cannot show
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # huggingface_hub reads it when it is imported
    log = logging.getLogger("qwen3_tts_cuda_graphs")
    log.setLevel(logging.INFO)
    log.handlers = [logging.Handler()]  # shows the library's log messages as progress
    log.handlers[0].emit = lambda record: show_progress(record.getMessage())
    terminate = signal.getsignal(signal.SIGTERM)
    if terminate is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    except KeyboardInterrupt as stop:
        end(128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT), str(stop) or "stopped")
    except BrokenPipeError:  # the player was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        sys.exit(141)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        remedy = "in a checkout run ./setup.sh none and use .venv/bin/python, else install the package again"
        end(2, f"error: {name} is not installed in this Python: {remedy}")
    except MemoryError:
        end(2, "error: the memory is full: free some, or give less at once")
    except (ValueError, OSError, ImportError) as error:
        end(2, f"error: {with_option_names(' '.join(str(error).split()))}")
    finally:
        if signal.getsignal(signal.SIGTERM) is raise_terminated:
            signal.signal(signal.SIGTERM, terminate)


def raise_terminated(*_) -> None:
    raise Terminated


def end(code: int, message: str) -> None:
    show_note(message)
    sys.exit(code)


def install_command(package: str) -> str:
    """The command that installs a package into this Python's environment, which may not be that of the shell's pip."""
    python = Path(sys.executable)
    pip = python.with_name("pip")  # environments made by uv have none
    command = f"{shown(pip)} install" if pip.exists() else f"uv pip install --python {shown(python)}"
    return f"{command} {shlex.quote(package)}"


def shown(path: Path) -> str:
    """A path, relative to the current folder if it is in it."""
    return os.path.relpath(path) if path.is_relative_to(os.getcwd()) else str(path)
