"""The .cu files of fast/ as libraries for the CPU: compiled by g++, after gpu_on_cpu.h."""

import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import batched, cache_folder, kernel_cache, kernels, nvrtc
from qwen3_tts_cuda_graphs.fast.megakernel import KERNEL_NAME

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
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
# More takes longer to compile than it saves. Kernels that are small and run only once or twice save nothing.
OPTIMIZED, PLAIN = "-O1", "-O0"
RUN = """
extern "C" [[gnu::visibility("default")]] int run(const void *arguments, int grid, int threads, int shared_bytes) {{
    return launch({0}, arguments, grid, threads, shared_bytes);
}}
"""
RUN_BATCHED = """
extern "C" [[gnu::visibility("default")]] int run_{0}(const void *arguments, int grid_x, int grid_y, int threads,
                                                           int shared_bytes) {{
    return launch_in_turn({0}, arguments, grid_x, grid_y, threads, shared_bytes);
}}
"""


def changed_source(module: Any, *changes: tuple[str, str]) -> str:
    """The .cu file of a module of fast/ with its headers, and another text in some places: (right, wrong)."""
    source = kernels.include_headers(module.SOURCE.file.read_text(), module.SOURCE.file.name)
    for right, wrong in changes:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    return source


Fault = tuple[str, str]  # text that is there once, and what it becomes


def faults_of(faults: dict[Callable, dict[str, Fault]]) -> list:
    """Parameters of a test: check, fault."""
    return [pytest.param(check, fault, id=name) for check, named in faults.items() for name, fault in named.items()]


def wrong_kernels(
    module: Any,
    faults: dict[Callable, dict[str, Fault]],
    independent: Sequence[Sequence[Callable]],
    compile: Callable[[str], "CpuKernels"],
) -> Callable[[Fault], "CpuKernels"]:
    """-> a function of a fault: kernels with that one, and with others that its check does not see.

    faults: the check that must fail -> name -> fault
    independent: checks that have no code in common: one library can have a fault for each of them
    """
    families = [[fault for check in checks for fault in faults.get(check, {}).values()] for checks in independent]

    @functools.cache
    def compile_library(number: int) -> CpuKernels:
        return compile(changed_source(module, *(family[number] for family in families if number < len(family))))

    return lambda fault: next(compile_library(family.index(fault)) for family in families if fault in family)


def assert_nearly_same(ours: Tensor, expected: Tensor, share: float = 0.01) -> None:
    """Equal but for this share of the values, which were rounded the other way: a sum had another order, a sine another
    last bit."""
    step = 2**-7 * expected.float().abs()  # between two bfloat16, or two of them
    difference = (ours.float() - expected.float()).abs()
    assert (difference <= step + 1e-6).all()
    assert (difference > 0).float().mean() < share


def assert_compiles_without_spills(source: str, kernels: int, architecture: str, folder: Path) -> None:
    file = folder / "kernels.cu"
    file.write_text(source)
    command = ["nvcc", f"-arch={architecture}", "-cubin", "-Xptxas=-v", "-o", folder / "kernels.cubin", file]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    spilled = re.findall(r"(\d+) bytes spill stores", result.stderr)
    assert len(spilled) >= kernels and {*spilled} == {"0"}


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


@contextmanager
def pretended_gpu(gpu: Any, compile_source: Callable[[str, str], bytes] | None = None) -> Iterator[None]:
    """torch tells of this GPU. `compile_source` stands in for NVRTC, and what it returns for the loaded kernels."""
    compiler = dict(compile_source=compile_source, version=lambda: (12, 8), Kernels=lambda cubin, *_: cubin)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
        mock.patch.object(kernel_cache, "started", {}),
        mock.patch.dict(os.environ, {cache_folder.VARIABLE: "off"}),
        mock.patch.multiple(nvrtc, **compiler) if compile_source else nullcontext(),
    ):
        kernels.load_kernels.cache_clear()
        yield
    kernels.load_kernels.cache_clear()


class CpuKernel:
    """Launches a kernel whose blocks wait for each other on fibers, in place of nvrtc.Kernels."""

    def __init__(self, source: str, sizes: Any, folder: Path) -> None:
        """`source` is SOURCE.complete(sizes) of the kernel's module. A RuntimeError has the compiler's messages."""
        self.sizes = sizes
        self.run: Any = compile_library(source + RUN.format(KERNEL_NAME), folder, OPTIMIZED).run
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]

    def launch(self, _: str, grid: tuple[int, int], block: int, fields: Sequence[int], is_cooperative: bool) -> None:
        struct = (ctypes.c_uint64 * len(fields))(*fields)
        error = self.run(struct, grid[0], block, self.sizes.shared_bytes)
        if error:
            raise RuntimeError("the kernel did not come to its end")


class CpuKernels:
    """Launches kernels whose blocks do not wait for each other on fibers, in place of nvrtc.Kernels."""

    def __init__(
        self, source: str, folder: Path, names: Iterable[str] = batched.KERNELS, optimization: str = PLAIN
    ) -> None:
        """`source` is SOURCE.complete(sizes) of the kernels' module. A RuntimeError has the compiler's messages."""
        entries = "".join(RUN_BATCHED.format(name) for name in names)
        self.library = compile_library(source + entries, folder, optimization)

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        block: int,
        fields: Sequence[int],
        overlaps: bool = False,
        shared_bytes: int = 48 << 10,
    ) -> None:
        struct = (ctypes.c_uint64 * len(fields))(*fields)
        error = self.library[f"run_{name}"](struct, *grid, block, shared_bytes)
        if error:
            raise RuntimeError(f"{name} did not come to its end")
