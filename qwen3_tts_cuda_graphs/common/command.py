"""What the project's scripts share: one-line errors, progress on a terminal, and a quick start.

Imports nothing that takes time, so that --help and mistakes are answered at once.
"""

import argparse
import atexit
import contextlib
import difflib
import gc
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

from qwen3_tts_cuda_graphs.common.skipped_imports import skipping_unused

CUDA_TIMEOUT = 60.0  # seconds to wait for CUDA's start

OTHER_NAMES = {  # option -> what other speech programs call it
    "--speaker": "voice voice-name voice-id speaker-id speaker-idx speaker-name spk v",
    "--output": "out-path out-file output-file output-path write-media save w o",
    "--format": "response-format output-format codec encoding",
    "--sample-rate": "samplerate sampling-rate output-sample-rate sr hz",
    "--text": "input gen-text sentence message t",
    "--text-file": "file input-file gen-file f i",
    "--speed": "rate tempo speaking-rate length-scale r",
    "--ref-audio": "audio input wav speaker-wav reference reference-audio prompt-audio voice-file clone sample",
    "--ref-text": "prompt-text reference-text transcript",
    "--instruct": "instructions instruction style emotion prompt description",
    "--list-speakers": "list-voices voices speakers list-speaker-idxs",
    "--list-languages": "languages list-langs",
    "--language": "lang-code language-code language-idx locale l",
    "--pause": "silence sentence-silence gap",
    "--max-seq-len": "max-new-tokens max-tokens max-length",
    "--model": "model-name model-path model-id checkpoint ckpt m",
    "--device": "gpu cuda use-cuda cpu d",
    "--dtype": "precision half fp16 bf16",
    "--host": "bind listen address ip",
    "--port": "p",
    "--api-key": "key token password auth",
    "--cors-origin": "cors allow-origin origins",
    "--voices": "voice-dir voices-dir",
    "--max-streams": "workers concurrency batch-size max-batch-size",
}


class Once(argparse.Action):
    """Takes one value. argparse's own takes the last of several, and drops the others silently."""

    given = None

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        if self.given not in (None, value):
            raise ValueError(f"{option_string} was given twice, {self.given} and {value}: give one")
        self.given = value
        setattr(namespace, self.dest, value)


def file_name(word: str) -> Path:
    if not word:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("its value is empty: give a name")
    return Path(word)


class Parser(argparse.ArgumentParser):
    """A mistake is a ValueError, and a mistyped option is answered with the one that it looks like."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register("action", None, Once)
        self.register("action", "store", Once)
        self.register("type", Path, file_name)

    def error(self, message: str):
        for word in sys.argv[1:]:
            option = self.option_like(word.partition("=")[0])
            if option:
                raise ValueError(f"there is no {word.partition('=')[0]}: did you mean {option}?")
        if message.endswith("expected one argument"):
            message += ", with = if it begins with -, as in --text=-5"
        raise ValueError(f"{message}: see --help")

    def option_like(self, word: str) -> str | None:
        """The option that an unknown one may stand for."""
        known = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
        is_cut_short = self.allow_abbrev and any(option.startswith(word) for option in self._option_string_actions)
        if not word.startswith("-") or word in self._option_string_actions or is_cut_short:
            return None
        plain = word.lstrip("-").replace("_", "-").lower()
        others = [option for option, names in OTHER_NAMES.items() if plain in names.split()]
        looks = difflib.get_close_matches(plain, known, 1, cutoff=0.7)
        return next((option for option in others if option in known.values()), known[looks[0]] if looks else None)


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
        with skipping_unused():
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
    if sys.stderr:  # else print would take stdout, where audio may go
        show_progress("")
        print(line, file=sys.stderr)


def with_option_names(message: str) -> str:
    """The library's messages name an argument of `load`."""
    return message.replace("raise max_seq_len", "raise --max-seq-len")


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Around a script's main: a user's mistake is one line and exit code 2, a warning is one line."""
    warnings.showwarning = show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files that the terminal cannot show
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when huggingface_hub is imported
    log = logging.getLogger("qwen3_tts_cuda_graphs")
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
    """What installs a package into the environment of this Python, which need not be the one of the shell's pip."""
    python = Path(sys.executable)
    pip = python.with_name("pip")
    command = f"{shown(pip)} install" if pip.exists() else f"uv pip install --python {shown(python)}"  # uv has no pip
    return f"{command} {shlex.quote(package)}"


def shown(path: Path) -> str:
    """A path as one types it in the current folder."""
    return os.path.relpath(path) if path.is_relative_to(os.getcwd()) else str(path)
