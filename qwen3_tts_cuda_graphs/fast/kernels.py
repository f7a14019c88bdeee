"""From a .cu file to launches: what megakernel.py, batched.py and codec_kernels.py share.

A source is compiled for one GPU and one model: definitions of the sizes come before it, and after it static assertions
that its structs are those that Python writes. fast/kernel_cache.py compiles it, fast/nvrtc.py loads and launches it.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import kernel_cache, nvrtc

HEADERS = Path(__file__).parent
VECTOR = 8  # bfloat16 that a thread loads at once
MAY_HAVE_ROW_STRIDE = ("noise",)


# ---- Source


def complete_source(
    file: Path, sizes: Any, structs: Mapping[str, Iterable[str]], checks: str = "", source: str | None = None
) -> str:
    """The sizes as definitions in capitals; the file, or `source` in its place; checks of its structs,
    which have these fields, and more checks."""
    defines = "".join(f"#define {name.upper()} {value}\n" for name, value in vars(sizes).items())
    text = include_headers(file.read_text() if source is None else source, file.name)
    python_file = file.with_suffix(".py").name
    for struct, fields in structs.items():
        checks += check_struct(struct, list(fields), python_file)
    return f'{defines}{text}#line 1 "{python_file}"\n{checks}'


def include_headers(source: str, name: str) -> str:
    """The source of the file `name` with the headers in place of its #include lines. The compiler's messages have the
    names and lines of the files."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(source.splitlines(), start=1):
        if include := re.fullmatch(r'#include "(.+)"', line):
            lines += [f'#line 1 "{include[1]}"', (HEADERS / include[1]).read_text(), f'#line {number + 1} "{name}"']
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def struct_of(kernel: str) -> str:
    """AddAndNorm for add_and_norm"""
    return kernel.title().replace("_", "")


def check_struct(struct: str, fields: Sequence[str], listed_in: str) -> str:
    """C++ that does not compile unless the struct has exactly these fields of 8 bytes, in this order.

    `listed_in` is the Python file that has the fields, for the message.
    """
    lines = []
    for i, field in enumerate(fields):
        message = f"{struct}.{field} is not field {i}, as {listed_in} has it"
        lines.append(f'static_assert(OFFSET_OF({struct}, {field}) == {8 * i}, "{message}");\n')
    message = f"{struct} does not have the {len(fields)} fields listed in {listed_in}"
    lines.append(f'static_assert(sizeof({struct}) == {8 * len(fields)}, "{message}");\n')
    return "".join(lines)


# ---- Compilation


@functools.cache
def load(source: str, kernels: tuple[str, ...], device: torch.device) -> nvrtc.Kernels:
    """The kernels of a complete source, compiled and loaded once per process.

    OSError: there is no NVRTC, or no CUDA driver. RuntimeError: the compiler or the driver refuses the source.
    """
    return nvrtc.Kernels(kernel_cache.compile_source(source, nvrtc.architecture_of(device)), kernels, device)


def compile_ahead(source: str, device: torch.device) -> None:
    """Start compiling in a thread, which `load` then waits for."""
    kernel_cache.compile_ahead(source, nvrtc.architecture_of(device))


def why_not_on(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, in words. None: they can."""
    if device.type != "cuda" or torch.version.hip:
        return f"the kernels need an NVIDIA GPU, the model is on {device.type}"
    gpu = torch.cuda.get_device_properties(device)
    if gpu.major < 8:
        return f"the kernels need compute capability 8.0, {gpu.name} has {gpu.major}.{gpu.minor}"
    return None


def first_unmet(needs: Mapping[str, bool]) -> str | None:
    """The first of the needs that is not met, as a sentence."""
    return next((f"the kernels need {need}" for need, is_met in needs.items() if not is_met), None)


# ---- Arguments


def kernel_arguments(kernel: str, fields: Mapping[str, Any], values: Mapping[str, Tensor | int | None]) -> list[int]:
    """The struct of a kernel. `fields` are its fields in order: the dtype of a tensor, or int."""
    if values.keys() != fields.keys():
        raise ValueError(f"{kernel} takes {', '.join(fields)}; given are {', '.join(values)}")
    return [kernel_argument(name, values[name], kind) for name, kind in fields.items()]


def kernel_argument(name: str, value: Any, kind: Any) -> int:
    """An int as it is, None as a null pointer; for a tensor its address, after checking dtype, layout and alignment."""
    if kind is int:
        return int(value)
    if value is None:
        return 0
    if value.dtype != kind:
        raise ValueError(f"the kernel reads {name} as {kind}, it is {value.dtype}")
    rows_only = name in MAY_HAVE_ROW_STRIDE and value.stride(-1) == 1
    if not (rows_only or value.is_contiguous()):
        raise ValueError(f"the kernel reads contiguous tensors, {name} has strides {value.stride()}")
    if kind == torch.bfloat16 and value.data_ptr() % (2 * VECTOR):
        raise ValueError(f"the kernel reads 16 bytes at once, {name} does not begin at a multiple of that")
    return value.data_ptr()
