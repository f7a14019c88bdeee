"""Compiled kernels are kept in a folder of the user's cache: NVRTC compiles them once per machine, not per process.

`compile_source` stands in front of the compiler; `compile_ahead` starts the same in a thread. A file is found by the
SHA-256 of everything its machine code depends on. It begins with that key and a checksum, so that a damaged or swapped
file is noticed and compiled again. What is found is run on the GPU, so folder and files must belong to this user and be
writable by no one else. A cache that cannot be used is not an error: kernels are compiled, and a log line says why.

$QWEN3_TTS_KERNEL_CACHE names another folder, or is "off".
"""

import functools
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from fast import nvrtc

log = logging.getLogger("qwen3_tts_cudagraphs")

VARIABLE = "QWEN3_TTS_KERNEL_CACHE"
FOLDER_NAME = "qwen3-tts-cuda-graphs"
MAGIC = b"qwen3-tts kernel 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_FILES = 64
MAX_TEMPORARY_AGE_S = 3600  # older ones were left behind by a process that was killed

compiling = ThreadPoolExecutor(max_workers=4, thread_name_prefix="compile")
started: dict[tuple[str, str], Future[bytes]] = {}  # (source, architecture) -> its machine code
started_lock = threading.Lock()


def compile_source(source: str, architecture: str) -> bytes:
    """As nvrtc.compile_source, with its errors. What `compile_ahead` has started is not compiled again."""
    return compile_ahead(source, architecture).result()


def compile_ahead(source: str, architecture: str) -> Future[bytes]:
    """Start compiling in a thread: NVRTC does not hold Python's lock. Errors are those of the future."""
    key = source, architecture
    with started_lock:
        future = started.get(key)
        has_failed = future and future.done() and future.exception()
        if future is None or has_failed:
            future = compiling.submit(load_or_compile, source, architecture)
            started[key] = future
    return future


def load_or_compile(source: str, architecture: str) -> bytes:
    key = cache_key(source, architecture)
    folder = open_folder()
    if folder and (code := load(folder, key)):
        return code

    begin = time.perf_counter()
    code = nvrtc.compile_source(source, architecture)
    log.info("compiled a kernel for %s in %.1f s", architecture, time.perf_counter() - begin)
    if folder:
        save(folder, key, code)
        remove_old_files(folder)
    return code


def cache_key(source: str, architecture: str) -> bytes:
    """nvrtcVersion has no patch level, so torch's version is in the key, too: its wheels pin NVRTC's."""
    parts = [source, architecture, nvrtc.compiler_options(architecture), nvrtc.version(), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def choose_folder() -> Path | None:
    """None: the user wants no cache. RuntimeError: the user has no home."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen).expanduser().absolute()

    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    parent = Path(os.environ.get(variable, ""))
    if not parent.is_absolute():  # the XDG specification: a relative path is to be ignored
        parent = Path.home() / default
    return parent / FOLDER_NAME / "kernels"


def open_folder() -> Path | None:
    """The folder of the cache, made if need be. None: there is none, or it cannot be trusted."""
    try:
        folder = choose_folder()
        if folder is None:
            return None
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = why_untrusted(folder.lstat(), stat.S_ISDIR)
    except (OSError, RuntimeError) as error:
        log_not_kept(str(error))
        return None
    if reason:
        log_not_kept(f"the folder {folder} {reason}")
        return None
    return folder


def why_untrusted(status: os.stat_result, is_right_kind: Callable[[int], bool]) -> str:
    """Whether another user can have written to a file or a folder. Empty: no.

    Windows has no such modes; there %LOCALAPPDATA% is the user's own.
    """
    if not is_right_kind(status.st_mode):
        return "is a link or of the wrong kind"
    if sys.platform == "win32":
        return ""
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to user {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}, chmod go-w)"
    return ""


def path_of(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.kernel"


def load(folder: Path, key: bytes) -> bytes | None:
    """The machine code with this key, if its file is there, is intact, and is this user's."""
    path = path_of(folder, key)
    try:
        reason, content = read_own_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason, content = f"cannot be read ({error.strerror})", b""

    code = content[len(MAGIC) + 2 * DIGEST_BYTES :]
    if not reason and content != with_header(key, code):
        reason = "is damaged"
    if reason:
        log.warning("the kernel is compiled again: %s %s", path, reason)
        return None
    mark_as_used(path)
    return code


def read_own_file(path: Path) -> tuple[str, bytes]:
    """Why the file cannot be trusted, or its content. The file that is looked at is the one that is read."""

    def open_no_link(name: str, flags: int) -> int:
        nonblocking = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer
        return os.open(name, flags | nonblocking | getattr(os, "O_NOFOLLOW", 0))

    with open(path, "rb", opener=open_no_link) as file:
        reason = why_untrusted(os.fstat(file.fileno()), stat.S_ISREG)
        return reason, b"" if reason else file.read()


def mark_as_used(path: Path) -> None:
    """The files that were used last are kept."""
    try:
        os.utime(path)
    except OSError:  # a read-only disk
        pass


def with_header(key: bytes, code: bytes) -> bytes:
    """What a file holds."""
    return MAGIC + key + hashlib.sha256(code).digest() + code


def save(folder: Path, key: bytes, code: bytes) -> None:
    """Under a name of its own first: no other process sees a half-written file, and two can write at once."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)  # for this user only
        with open(descriptor, "wb") as file:
            file.write(with_header(key, code))
        os.replace(temporary, path_of(folder, key))
    except OSError as error:
        log_not_kept(str(error))
        if temporary:
            remove(Path(temporary))


def remove_old_files(folder: Path) -> None:
    """Keep the MAX_FILES kernels that were used last, and the temporary files of processes that may still write."""
    try:
        ages = {path: time.time() - path.lstat().st_mtime for path in folder.iterdir()}
    except OSError:  # another process has removed a file just now, and does the rest as well
        return
    kernels = sorted((path for path in ages if path.suffix == ".kernel"), key=ages.__getitem__)
    left_behind = [path for path, age in ages.items() if path.suffix == ".tmp" and age > MAX_TEMPORARY_AGE_S]
    for path in kernels[MAX_FILES:] + left_behind:
        remove(path)


def remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # another process was faster, or, on Windows, is reading it
        pass


@functools.cache
def log_not_kept(reason: str) -> None:
    """Once per reason, not for each kernel."""
    log.warning("compiled kernels are not kept: %s; $%s can name another folder, or be off", reason, VARIABLE)
