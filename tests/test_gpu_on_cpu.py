"""Kernels as libraries for the CPU, tests/gpu_on_cpu.py: what the tests of the kernels rely on."""

import ctypes
import shutil
from pathlib import Path

import pytest
from gpu_on_cpu import CpuKernels

SOURCE = """
struct Arguments {
    int *result;
};

inline int launches;

extern "C" void count(Arguments arguments) {
    *arguments.result = ++launches;
}
"""


def launches_of_a_new_library(folder: Path) -> int:
    folder.mkdir()
    result = ctypes.c_int()
    source = f"{SOURCE}// {folder.name}"  # the same source would be the same library
    CpuKernels(source, folder, ["count"]).launch("count", (1, 1), 1, [ctypes.addressof(result)])
    return result.value


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_libraries_share_no_variables(tmp_path):
    """batched.cu and codec_kernels.cu have an AddAndNorm each, of different sizes. In a process that had loaded both,
    the larger was written to the memory of the smaller, and the launch crashed."""
    assert launches_of_a_new_library(tmp_path / "first") == 1
    assert launches_of_a_new_library(tmp_path / "second") == 1
