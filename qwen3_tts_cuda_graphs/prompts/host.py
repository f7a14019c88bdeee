"""Runs torch in a single thread, for small tensors on the host, and copies tensors to the GPU."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch uses this thread alone. On a busy or virtual machine, waking its OpenMP threads can take longer than the
    first audio does. `torch.set_num_threads` would change the whole process."""
    threads = torch.get_num_threads()  # before the change: the first call in a new thread sets the number
    set_omp_threads = find_omp_set_num_threads()
    set_omp_threads(1)
    try:
        yield
    finally:
        set_omp_threads(threads)


@cache
def find_omp_set_num_threads() -> Callable[[int], None]:
    """OpenMP's function for the calling thread, from the library that torch is linked with. Called with the GIL."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        return ctypes.PyDLL(str(library), os.RTLD_NOW | os.RTLD_NOLOAD).omp_set_num_threads
    except (OSError, AttributeError):  # another layout, or built without OpenMP
        return lambda threads: None


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from pinned memory, without waiting for the GPU."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
