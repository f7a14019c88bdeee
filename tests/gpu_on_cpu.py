"""megakernel.cu, batched.cu and codec_kernels.cu as libraries for the CPU: compiled by g++, after gpu_on_cpu.h."""

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from qwen3_tts_cuda_graphs.fast import batched, kernels
from qwen3_tts_cuda_graphs.fast.megakernel import KERNEL_NAME, Gpu, Sizes

HEADER = Path(__file__).with_suffix(".h")
OPTIONS = (
    *("-std=c++20", "-w", "-fPIC"),
    "-fno-strict-aliasing",  # the kernel reads bfloat16 as uint2, and so on
    "-ffp-contract=off",  # the same sums on every CPU
    "-U_FORTIFY_SOURCE",  # whose longjmp refuses to change stacks
    # A process loads several of these libraries, in which a name can mean different things. Without this, they would
    # share the static variables of templates and inline functions.
    "-fvisibility=hidden",
)
# More takes longer to compile than it saves. The kernels beside the megakernel are small and run only once or twice.
OF_MEGAKERNEL, OF_SMALL_KERNELS = "-O1", "-O0"
RUN = f"""
extern "C" [[gnu::visibility("default")]] int run(const void *arguments, int grid, int threads, int shared_bytes) {{
    return launch({KERNEL_NAME}, arguments, grid, threads, shared_bytes);
}}
"""
RUN_BATCHED = """
extern "C" [[gnu::visibility("default")]] int run_{0}(const void *arguments, int grid_x, int grid_y, int threads) {{
    return launch_in_turn({0}, arguments, grid_x, grid_y, threads, 48 << 10);
}}
"""


def whole_source(module: Any) -> str:
    """The .cu file of a module of fast/ with its headers, for tests to change a part of it."""
    return kernels.include_headers(module.SOURCE.file.read_text(), module.SOURCE.file.name)


libraries: dict[str, ctypes.CDLL] = {}  # what was compiled in this process, by its source


@functools.cache
def precompiled_header(optimization: str) -> Path:
    """The header, and compiled beside it: that takes as long as a kernel, and all workers share it."""
    header = Path(os.environ["QWEN3_TTS_TESTS"]) / f"{HEADER.stem}{optimization}.h"
    with FileLock(f"{header}.lock"):
        if not header.exists():
            options = *OPTIONS, optimization, "-x", "c++-header"
            subprocess.run(["g++", *options, "-o", f"{header}.gch", HEADER], check=True)
            shutil.copy(HEADER, header)
    return header


def compile_library(source: str, folder: Path, optimization: str) -> ctypes.CDLL:
    """A RuntimeError has the compiler's messages."""
    if source not in libraries:
        cpp = folder / f"kernel{len(libraries)}.cpp"
        library = cpp.with_suffix(".so")
        cpp.write_text(f'#include "{precompiled_header(optimization)}"\n{source}')
        options = *OPTIONS, optimization, "-shared"
        result = subprocess.run(["g++", *options, "-o", library, cpp], capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
        libraries[source] = ctypes.CDLL(str(library))
    return libraries[source]


class PretendedGpu(Gpu):
    """The sizes of an H200 to compile for, where there is none."""

    major = 9
    multi_processor_count = 132
    shared_memory_per_block_optin = 227 * 1024
    L2_cache_size = 50 << 20


class CpuKernel:
    """Launches the megakernel on fibers, in place of nvrtc.Kernels."""

    def __init__(self, source: str, sizes: Sizes, folder: Path) -> None:
        """`source` is SOURCE.complete(sizes) of megakernel.py. A RuntimeError has the compiler's messages."""
        self.sizes = sizes
        self.run: Any = compile_library(source + RUN, folder, OF_MEGAKERNEL).run
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]

    def launch(self, _: str, grid: tuple[int, int], block: int, fields: Sequence[int], is_cooperative: bool) -> None:
        struct = (ctypes.c_uint64 * len(fields))(*fields)
        error = self.run(struct, grid[0], block, self.sizes.shared_bytes)
        if error:
            raise RuntimeError("the kernel did not come to its end")


class CpuKernels:
    """Launches the kernels of batched.cu or codec_kernels.cu on fibers, in place of nvrtc.Kernels."""

    def __init__(self, source: str, folder: Path, names: Iterable[str] = batched.KERNELS) -> None:
        """`source` is SOURCE.complete(sizes) of either. A RuntimeError has the compiler's messages."""
        entries = "".join(RUN_BATCHED.format(name) for name in names)
        self.library = compile_library(source + entries, folder, OF_SMALL_KERNELS)

    def launch(self, name: str, grid: tuple[int, int], block: int, fields: Sequence[int]) -> None:
        struct = (ctypes.c_uint64 * len(fields))(*fields)
        error = self.library[f"run_{name}"](struct, *grid, block)
        if error:
            raise RuntimeError(f"{name} did not come to its end")
