"""What the project's scripts share: one-line errors, progress on a terminal, and a quick start.

Imports nothing that takes time, so that --help and mistakes are answered at once.
"""

import argparse
import atexit
import contextlib
import difflib
import gc
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

from common.installed import is_installed, with_installed_names

CUDA_TIMEOUT = 60.0  # seconds to wait for CUDA's start

FOLDERS = "fast", "speech", "common", "cli", "serving", "tools", "benchmarks"  # of the project

# Packages that take long to import where they are installed, for parts of transformers that nobody calls here.
UNUSED = ("jax", "sklearn", "tensorflow")


class Parser(argparse.ArgumentParser):
    """A mistake is a ValueError, and a mistyped option is answered with the one that it looks like."""

    def __init__(self, prog: str | None = None, **options):
        super().__init__(prog=sys.argv[0] if is_installed() else prog, **options)

    def format_help(self) -> str:
        return with_installed_names(super().format_help())

    def error(self, message: str):
        known = self._option_string_actions
        given = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
        for word in given:
            nearest = difflib.get_close_matches(word, known, 1)
            if nearest and not any(option.startswith(word) for option in known):  # it may be cut short
                raise ValueError(f"there is no {word}: did you mean {nearest[0]}?")
        raise ValueError(f"{message}: see --help")


class Terminated(KeyboardInterrupt):
    """SIGTERM: as Ctrl-C, all that is unfinished is removed."""


def check_device_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"cuda(:(0|[1-9]\d?))?|cpu(:0)?", name):
        raise ValueError(f"there is no device {name!r} here: choose cuda, cuda:1 and so on, or cpu")


@contextlib.contextmanager
def heavy_imports(device: str | None) -> Iterator[None]:
    """Around a script's imports of torch and of what needs it: CUDA starts in a thread, what is not used is not
    imported, and garbage is not collected.

    Where torch is imported already, this is not the script's own process, and nothing is changed in it.
    """
    if "torch" in sys.modules:
        yield
        return
    # A signal ends the process: packages take an exception for a missing module.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: raise_terminated}
    handlers = {number: handler for number, handler in handlers.items() if signal.getsignal(number) is handler}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # imports make many objects and little garbage
    cuda = None
    try:
        with not_installed(*UNUSED):
            import torch

            if not (device or "").startswith("cpu"):
                cuda = threading.Thread(target=start_cuda, args=[torch, device or "cuda"], daemon=True)
                cuda.start()
            yield
    finally:
        if cuda:  # a process that ends while CUDA starts may crash
            cuda.join(CUDA_TIMEOUT)
        gc.freeze()  # what is imported stays: later collections skip it
        atexit.register(gc.unfreeze)  # the last collection frees it; nanobind's modules would print what is left
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def not_installed(*names: str) -> Iterator[None]:
    """To imports inside, these packages seem not to be installed."""
    names = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def start_cuda(torch, device: str) -> None:
    """The first calls of CUDA and cuBLAS take long. The main thread meets their errors again and reports them."""
    with contextlib.suppress(Exception):
        torch.cuda.init()
        matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(matrix, matrix)


def show_progress(line: str) -> None:
    """Replace the last line of a terminal. A pipe gets nothing."""
    if sys.stderr and sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_) -> None:
    show_note(f"warning: {with_option_names(str(message).splitlines()[0])}")


def show_note(line: str) -> None:
    show_progress("")
    print(line, file=sys.stderr)


def with_option_names(message: str) -> str:
    """The library's messages name an argument of `load`, and scripts of a checkout."""
    return with_installed_names(message.replace("raise max_seq_len", "raise --max-seq-len"))


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Around a script's main: a user's mistake is one line and exit code 2, a warning is one line."""
    warnings.showwarning = show_warning
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when huggingface_hub is imported
    log = logging.getLogger("qwen3_tts_cudagraphs")
    log.setLevel(logging.INFO)
    log.handlers = [logging.Handler()]  # shows what the library logs while it loads
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
        if name in FOLDERS:
            end(2, f"error: the folder {name} is missing: copy it, too")
        remedy = with_installed_names("run ./setup.sh none, and use .venv/bin/python")
        end(2, f"error: {name} is not installed in this Python: {remedy}")
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
