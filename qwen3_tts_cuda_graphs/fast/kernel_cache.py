"""Compiled kernels are kept in a folder of the user's cache: NVRTC compiles them once per machine, not per process.

`compile_source` stands in front of the compiler; `start_compiling` starts the same in a thread. A file's name is the
SHA-256 of everything its machine code depends on. It is written under a temporary name and renamed, and begins with a
checksum: a file that is incomplete or belongs to another kernel is compiled again. The machine code is run on the GPU,
so folder and file must belong to this user and be writable by no one else. A cache that cannot be used is not an
error: kernels are compiled, and a log line says why.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from qwen3_tts_cuda_graphs.fast import nvrtc
from qwen3_tts_cuda_graphs.fast.cache_folder import VARIABLE, check_owner, open_folder

log = logging.getLogger("qwen3_tts_cuda_graphs")
warn_once = functools.cache(log.warning)  # for each reason, not for each kernel
NOT_KEPT = "compiled kernels are not kept: %s; $%s can name another folder, or be off"

compiling = ThreadPoolExecutor(max_workers=4, thread_name_prefix="compile")
started: dict[tuple[str, str], Future[bytes]] = {}  # (source, architecture) -> its machine code
started_lock = threading.Lock()


def compile_source(source: str, architecture: str) -> bytes:
    """Like nvrtc.compile_source, with its errors. What `start_compiling` has started is not compiled again."""
    return start_compiling(source, architecture).result()


def start_compiling(source: str, architecture: str) -> Future[bytes]:
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
    path = None
    try:
        folder = open_folder()
        path = folder and folder / f"{key.hex()}.kernel"
        if path and path.exists() and (code := read_code(path, key)):
            return code
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        warn_once(NOT_KEPT, str(error), VARIABLE)

    begin = time.perf_counter()
    code = nvrtc.compile_source(source, architecture)
    log.info("compiled a kernel for %s in %.1f s", architecture, time.perf_counter() - begin)
    try:
        if path:
            save(path, key, code)
    except OSError as error:
        warn_once(NOT_KEPT, str(error), VARIABLE)
    return code


def cache_key(source: str, architecture: str) -> bytes:
    """nvrtcVersion has no patch level, so torch's version is in the key, too: its wheels pin NVRTC's."""
    parts = [source, architecture, nvrtc.compiler_options(architecture), nvrtc.version(), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def read_code(path: Path, key: bytes) -> bytes | None:
    """The machine code of a file, if the file is complete."""
    with open(path, "rb") as file:
        check_owner(path, os.fstat(file.fileno()))
        digest = file.read(len(key))  # a SHA-256, as the key is
        code = file.read()
    if digest == checksum(key, code):
        return code
    log.warning("the kernel is compiled again: %s is damaged", path)
    return None


def save(path: Path, key: bytes, code: bytes) -> None:
    """Write a temporary file and rename it: other processes see the whole file or none."""
    descriptor, temporary = tempfile.mkstemp(suffix=".tmp", dir=path.parent)  # for this user only
    try:
        with open(descriptor, "wb") as file:
            file.write(checksum(key, code) + code)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def checksum(key: bytes, code: bytes) -> bytes:
    return hashlib.sha256(key + code).digest()
