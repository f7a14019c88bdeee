"""Start a command quickly: initialize CUDA during the imports, skip unused imports, and keep Python's bytecode.

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

CUDA_TIMEOUT = 60.0  # seconds to wait until CUDA is initialized


@contextlib.contextmanager
def heavy_imports(device: str | None) -> Iterator[None]:
    """Wraps a script's imports of torch and everything that needs it. CUDA is initialized in a thread meanwhile, unused
    modules are skipped, and the garbage collector is off.

    If torch is imported already, the process belongs to another program, and nothing is changed.
    """
    if "torch" in sys.modules:
        yield
        return
    keep_bytecode()
    # Let signals end the process: some packages would take KeyboardInterrupt for a missing module.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: raise_terminated}
    handlers = {number: handler for number, handler in handlers.items() if signal.getsignal(number) is handler}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # imports create many objects and little garbage
    cuda = None
    try:
        with skipping_unused():
            import torch

            if not (device or "").startswith("cpu"):
                cuda = threading.Thread(target=start_cuda, args=[torch, device or "cuda"], daemon=True)
                cuda.start()
            yield
    finally:
        if cuda:  # a process that exits during CUDA's initialization may crash
            cuda.join(CUDA_TIMEOUT)
        gc.freeze()  # later collections skip the imported objects
        atexit.register(gc.unfreeze)  # frees them at exit; nanobind's modules would print what is not freed
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def keep_bytecode() -> None:
    """Keep bytecode in the user's cache, beside the kernels, if Python does not keep it beside torch.

    This happens where PYTHONDONTWRITEBYTECODE is set, as in container images, or where the packages are read-only.
    Each process would then compile torch again, which takes seconds. Child processes use the same folder if they get
    `bytecode_environment`.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None or sys.pycache_prefix or os.path.exists(cache_from_source(torch.origin)):
        return
    if not sys.dont_write_bytecode and os.access(os.path.dirname(torch.origin), os.W_OK):
        return  # Python keeps it beside torch
    with contextlib.suppress(OSError, RuntimeError):  # a cache that cannot be used is not an error
        folder = open_folder("bytecode")
        if folder and os.access(folder, os.W_OK):
            sys.pycache_prefix = str(folder)
            sys.dont_write_bytecode = False


def bytecode_environment() -> dict[str, str]:
    """Environment variables for child processes, so that they keep bytecode where this process does."""
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": "1" * sys.dont_write_bytecode}


def start_cuda(torch, device: str) -> None:
    """Make the first calls of CUDA and cuBLAS, which take long. The main thread will repeat and report any error."""
    with contextlib.suppress(Exception):
        torch.cuda.init()
        matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(matrix, matrix)
