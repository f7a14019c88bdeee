"""From a .cu file to launches: what megakernel.py, overlapped_stack.py, batched.py and codec_kernels.py share.

A source is compiled for one GPU and one model: definitions of the sizes come before it, and after it static assertions
that its structs are those that Python writes. fast/kernel_cache.py compiles it, fast/nvrtc.py loads and launches it.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import kernel_cache, nvrtc
from qwen3_tts_cuda_graphs.fast.kernel_cache import warn_once

HEADERS = Path(__file__).parent
VECTOR = 8  # bfloat16 that a thread loads at once


class CudaSource:
    """A .cu file, to be compiled for a model on a GPU.

    A `subject` is what the file is compiled for, with its `device`: a stack of layers, a decoder.
    """

    def __init__(
        self,
        file: Path,
        kernels: Iterable[str],
        sizes_of: Callable[[Any], Any],
        needs_of: Callable[[Any], Mapping[str, bool]],
        structs_of: Callable[[Any], Mapping[str, Iterable[str]]],
        checks_of: Callable[[Any], str] = lambda sizes: "",
        architecture_suffix: str = "",
    ):
        """
        sizes_of: subject -> the constants that the file is compiled with, there in capitals
        needs_of: subject -> what the kernels need besides the GPU, as text for messages, and whether it is there
        structs_of: sizes -> the fields of the file's structs, which the compiler checks
        checks_of: sizes -> more for the compiler to check
        architecture_suffix: "a" for instructions of one compute capability only
        """
        self.file = file
        self.kernels = tuple(kernels)
        self.sizes_of = sizes_of
        self.needs_of = needs_of
        self.structs_of = structs_of
        self.checks_of = checks_of
        self.architecture_suffix = architecture_suffix

    def complete(self, sizes: Any, text: str | None = None) -> str:
        """The sizes as definitions, the file, or `text` in its place, and the checks."""
        defines = "".join(f"#define {name.upper()} {value}\n" for name, value in vars(sizes).items())
        text = include_headers(self.file.read_text() if text is None else text, self.file.name)
        python_file = self.file.with_suffix(".py").name
        structs = self.structs_of(sizes).items()
        checks = "".join(check_struct(struct, list(fields), python_file) for struct, fields in structs)
        return f'{defines}{text}#line 1 "{python_file}"\n{self.checks_of(sizes)}{checks}'

    def load(self, sizes: Any, device: torch.device, text: str | None = None) -> nvrtc.Kernels:
        """OSError: there is no NVRTC, or no CUDA driver. RuntimeError: the compiler or the driver refuses it."""
        source, shared_bytes = self.complete(sizes, text), getattr(sizes, "shared_bytes", 0)
        return load_kernels(source, self.kernels, device, shared_bytes, self.architecture_of(device))

    def architecture_of(self, device: torch.device) -> str:
        return nvrtc.architecture_of(device) + self.architecture_suffix

    def compile(self, subject: Any) -> tuple[Any, nvrtc.Kernels]:
        """The sizes, and the kernels compiled with them; the errors of `load`."""
        sizes = self.sizes_of(subject)
        return sizes, self.load(sizes, subject.device)

    def compile_ahead(self, *subjects: Any) -> None:
        """Start compiling in threads, which `compile` then waits for. The weights' values are not needed."""
        if not self.why_unsupported(*subjects):
            for subject in subjects:
                source = self.complete(self.sizes_of(subject))
                kernel_cache.start_compiling(source, self.architecture_of(subject.device))

    def why_not(self, *subjects: Any) -> str:
        """Why the kernels cannot run these subjects; empty if they can: then they are compiled."""
        if reason := self.why_unsupported(*subjects):
            return reason
        try:
            self.compile_ahead(*subjects)  # all at once
            for subject in subjects:
                self.compile(subject)
        except (OSError, RuntimeError) as error:
            reason = f"the kernels cannot be compiled: {one_line(error)}"
            warn_once("%s: %s", self.file.name, reason)
        return reason

    def unmet(self, subject: Any) -> str:
        """The first need that is not met, as a sentence; empty if all are."""
        return next((f"the kernels need {need}" for need, is_met in self.needs_of(subject).items() if not is_met), "")

    def why_unsupported(self, *subjects: Any) -> str:
        """The reasons of `why_not` that are known without compiling."""
        for subject in subjects:
            if subject.device.type != "cuda" or torch.version.hip:
                return "the model is not on an NVIDIA GPU"
            gpu = torch.cuda.get_device_properties(subject.device)
            if gpu.major < 8:
                return f"the kernels need compute capability 8.0, {gpu.name} has {gpu.major}.{gpu.minor}"
            try:
                if unmet := self.unmet(subject):
                    return unmet
            except (OSError, RuntimeError) as error:
                return f"the driver does not say what the GPU has: {error}"
        return ""


@functools.cache
def load_kernels(
    source: str, kernels: tuple[str, ...], device: torch.device, shared_bytes: int, architecture: str
) -> nvrtc.Kernels:
    """The kernels of a complete source, compiled and loaded once per process."""
    return nvrtc.Kernels(kernel_cache.compile_source(source, architecture), kernels, device, shared_bytes)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def include_headers(source: str, name: str) -> str:
    """The source of the file `name` with the headers in place of its #include lines. #line directives keep the files'
    names and lines in the compiler's messages."""
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


# ---- Arguments


def kernel_arguments(kernel: str, fields: Mapping[str, Any], values: Mapping[str, Tensor | int | None]) -> list[int]:
    """The struct of a kernel. `fields` are its fields in order: the dtype of a tensor, or int."""
    if values.keys() != fields.keys():
        raise ValueError(f"{kernel} takes {', '.join(fields)}; given are {', '.join(values)}")
    return [kernel_argument(name, values[name], kind, f"{name}_stride" in fields) for name, kind in fields.items()]


def kernel_argument(name: str, value: Any, kind: Any, has_stride: bool = False) -> int:
    """An int as it is, None as a null pointer; for a tensor its address, after checking dtype, layout and alignment.
    If the kernel knows the stride between its rows, only these must be contiguous."""
    if kind is int:
        return int(value)
    if value is None:
        return 0
    if value.dtype != kind:
        raise ValueError(f"the kernel reads {name} as {kind}, it is {value.dtype}")
    rows_only = has_stride and value.stride(-1) == 1
    if not (rows_only or value.is_contiguous()):
        raise ValueError(f"the kernel reads contiguous tensors, {name} has strides {value.stride()}")
    if kind == torch.bfloat16 and value.data_ptr() % (2 * VECTOR):
        raise ValueError(f"the kernel reads 16 bytes at once, {name} does not begin at a multiple of that")
    return value.data_ptr()
