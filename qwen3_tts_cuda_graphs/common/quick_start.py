"""A quick start: CUDA starts while torch and what needs it are imported, what is not used is not imported, and nothing
is compiled twice.

Imports nothing that takes time by itself.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec

from qwen3_tts_cuda_graphs.common.command import raise_terminated
from qwen3_tts_cuda_graphs.common.skipped_imports import skipping_unused
from qwen3_tts_cuda_graphs.fast.cache_folder import open_folder

CUDA_TIMEOUT = 60.0  # seconds to wait for CUDA's start


@contextlib.contextmanager
def heavy_imports(device: str | None) -> Iterator[None]:
    """Around a script's imports of torch and of what needs it: CUDA starts in a thread, what is not used is not
    imported, and garbage is not collected.

    Where torch is imported already, this is not the script's own process, and nothing is changed in it.
    """
    if "torch" in sys.modules:
        yield
        return
    keep_bytecode()
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


def keep_bytecode() -> None:
    """Where nobody keeps what Python compiles, each process would compile torch again, in seconds: an image forbids it
    (PYTHONDONTWRITEBYTECODE), or its folders are read-only. Then keep it in the user's cache, beside the kernels.

    Processes that this one starts do the same if they get `bytecode_environment`.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None or sys.pycache_prefix or os.path.exists(cache_from_source(torch.origin)):
        return
    if not sys.dont_write_bytecode and os.access(os.path.dirname(torch.origin), os.W_OK):
        return  # Python keeps it there
    with contextlib.suppress(OSError, RuntimeError):  # as with kernels, a cache that cannot be used is no error
        folder = open_folder("bytecode")
        if folder and os.access(folder, os.W_OK):
            sys.pycache_prefix = str(folder)
            sys.dont_write_bytecode = False


def bytecode_environment() -> dict[str, str]:
    """Variables for processes that this one starts: they keep what Python compiles where this one does."""
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": "1" * sys.dont_write_bytecode}


def start_cuda(torch, device: str) -> None:
    """The first calls of CUDA and cuBLAS take long. The main thread meets their errors again and reports them."""
    with contextlib.suppress(Exception):
        torch.cuda.init()
        matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(matrix, matrix)
