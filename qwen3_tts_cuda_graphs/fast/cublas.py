"""cuBLAS's products on some of the multiprocessors: the others are free for what runs at the same time."""

import contextlib
import ctypes
import logging
import sys
from collections.abc import Iterator

import torch

log = logging.getLogger("qwen3_tts_cuda_graphs")


@contextlib.contextmanager
def products_on(share: float, device: torch.device) -> Iterator[None]:
    """Products that this thread launches or captures inside take no more than this share of the multiprocessors."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        cublas = ctypes.CDLL(f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}")
        set_target = cublas.cublasSetSmCountTarget
    except (OSError, AttributeError) as error:  # torch has loaded it, if it is a file of its own
        log.info("products take all multiprocessors: %s", error)
        yield
        return
    count = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    set_target(handle, round(share * count))
    try:
        yield
    finally:
        set_target(handle, 0)  # all of them
