"""cuBLAS's products on some of the multiprocessors: the others are free for what runs at the same time."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator

import torch

log = logging.getLogger("qwen3_tts_cuda_graphs")


@contextlib.contextmanager
def products_on(share: float, device: torch.device) -> Iterator[None]:
    """cuBLAS plans products that this thread launches or captures inside for this share of the multiprocessors."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
    try:  # only the one that torch has loaded: the handle is of that
        cublas = ctypes.CDLL(name, mode=ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0))
        set_target = cublas.cublasSetSmCountTarget
    except (OSError, AttributeError) as error:
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
