"""Compile and launch CUDA source with the NVRTC that torch brings and the CUDA driver, both through ctypes.

No CUDA toolkit, no headers and no host compiler are needed. `compile_source` needs no GPU, either.
"""

import ctypes
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_..., in percent
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
TORCH_PROPERTIES = ("name", "major", "minor", "multi_processor_count")
DEVICE_ATTRIBUTES = {  # torch's name -> CU_DEVICE_ATTRIBUTE_...
    "shared_memory_per_block_optin": 97,  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    "L2_cache_size": 38,  # L2_CACHE_SIZE
}


@functools.cache
def load_nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version: from the library path, else from the folders of torch's wheels."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    torch_folder = Path(torch.__file__).parent
    candidates = [name]
    for pattern in (f"torch/lib/{name}", f"nvidia/*/lib/{name}", f"nvidia/*/bin/**/{name}"):
        candidates += [str(path) for path in sorted(torch_folder.parent.glob(pattern))]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} is neither in the library path nor next to torch: pip install nvidia-cuda-nvrtc")


def version() -> tuple[int, int]:
    """NVRTC's version: (12, 8) for CUDA 12.8."""
    major = ctypes.c_int()
    minor = ctypes.c_int()
    result = load_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if result != 0:
        raise RuntimeError(f"nvrtcVersion failed: error {result}")
    return major.value, minor.value


@functools.cache
def load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def call_driver(function: str, *arguments: Any) -> None:
    driver = load_driver()
    result = getattr(driver, function)(*arguments)
    if result != 0:
        message = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(message))
        text = message.value.decode() if message.value else "unknown error"
        raise RuntimeError(f"{function} failed: CUDA error {result}, {text}")


def driver_version() -> tuple[int, int]:
    """The newest version of CUDA that the driver supports: (12, 8)"""
    version = ctypes.c_int()
    call_driver("cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def gpu_properties(device: torch.device) -> Any:
    """torch.cuda.get_device_properties. What torch before 2.7 lacks there comes from the driver."""
    gpu = torch.cuda.get_device_properties(device)
    if all(hasattr(gpu, name) for name in DEVICE_ATTRIBUTES):
        return gpu
    number = torch.cuda.current_device() if device.index is None else device.index
    handle = ctypes.c_int()
    call_driver("cuInit", 0)
    call_driver("cuDeviceGet", ctypes.byref(handle), number)
    properties = {name: getattr(gpu, name) for name in TORCH_PROPERTIES}
    for name, attribute in DEVICE_ATTRIBUTES.items():
        value = ctypes.c_int()
        call_driver("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        properties[name] = value.value
    return SimpleNamespace(**properties)


def architecture_of(device: torch.device) -> str:
    """sm_90 for an H200"""
    gpu = torch.cuda.get_device_properties(device)
    return f"sm_{gpu.major}{gpu.minor}"


def compiler_options(architecture: str) -> list[str]:
    """Lambdas and functions without an annotation are compiled for the device, too."""
    return [f"--gpu-architecture={architecture}", "--device-as-default-execution-space"]


def compile_source(source: str, architecture: str) -> bytes:
    """Machine code for "sm_90" and the like; PTX, which the driver compiles when it loads it, for "compute_80".

    A RuntimeError has the compiler's messages.
    """
    output = "CUBIN" if architecture.startswith("sm_") else "PTX"
    nvrtc = load_nvrtc()
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(result: int, function: str) -> None:
        if result != 0:
            raise RuntimeError(f"{function} failed: {nvrtc.nvrtcGetErrorString(result).decode()}")

    program = ctypes.c_void_p()
    code = source.encode()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"", 0, None, None), "nvrtcCreateProgram")
    try:
        options = [option.encode() for option in compiler_options(architecture)]
        compiled = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))

        size = ctypes.c_size_t()
        if compiled != 0:
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            messages = log.value.decode(errors="replace").strip()
            raise RuntimeError(messages or nvrtc.nvrtcGetErrorString(compiled).decode())

        check(nvrtc[f"nvrtcGet{output}Size"](program, ctypes.byref(size)), f"nvrtcGet{output}Size")
        compiled_source = ctypes.create_string_buffer(size.value)
        check(nvrtc[f"nvrtcGet{output}"](program, compiled_source), f"nvrtcGet{output}")
        return compiled_source.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Kernels:
    """The kernels of a cubin, loaded on one GPU. The only argument of each is a struct of 8-byte fields, by value."""

    def __init__(self, cubin: bytes, names: Iterable[str], device: torch.device, shared_bytes: int = 0) -> None:
        """shared_bytes: dynamic shared memory per block, the most that any of the kernels uses"""
        self.device = device
        self.shared_bytes = shared_bytes
        self.functions: dict[str, ctypes.c_void_p] = {}
        module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # creates the context that the driver calls below work in
            call_driver("cuModuleLoadData", ctypes.byref(module), cubin)
            for name in names:
                function = ctypes.c_void_p()
                call_driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                if shared_bytes:
                    call_driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
                    # The same for all: a multiprocessor runs kernels with different ones one after the other.
                    call_driver("cuFuncSetAttribute", function, PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
                self.functions[name] = function

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        block: int,
        fields: Sequence[int],
        is_cooperative: bool = False,
        overlaps: bool = False,
        shared_bytes: int | None = None,
    ) -> None:
        """Launch `grid` blocks of `block` threads on torch's current stream. The driver copies the fields.

        is_cooperative: an error unless all blocks fit on the GPU at once
        overlaps: it may begin when all blocks of the previous kernel allow it, and waits for that kernel's end itself
        shared_bytes: per block, by default as many as the constructor was given
        """
        struct = (ctypes.c_uint64 * len(fields))(*fields)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        blocks = (*grid, 1)
        threads = (block, 1, 1)
        shared_bytes = self.shared_bytes if shared_bytes is None else shared_bytes
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            arguments = self.functions[name], *blocks, *threads, shared_bytes, stream, parameters
            if overlaps:
                attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
                config = LaunchConfig(blocks, threads, shared_bytes, stream, ctypes.pointer(attribute), 1)
                call_driver("cuLaunchKernelEx", ctypes.byref(config), self.functions[name], parameters, None)
            elif is_cooperative:
                call_driver("cuLaunchCooperativeKernel", *arguments)
            else:
                call_driver("cuLaunchKernel", *arguments, None)
