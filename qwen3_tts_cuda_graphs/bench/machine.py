"""On what something was measured."""

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def machine_card(weights: str) -> dict[str, Any]:
    """What the figures depend on: machine, versions, weights."""
    if torch.cuda.is_available():
        driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine = dict(gpu=torch.cuda.get_device_name(), driver=driver, dtype="bfloat16")
    else:
        cpu = platform.processor() or platform.machine()
        machine = dict(gpu="none", cpu=cpu, threads=torch.get_num_threads(), dtype="float32")
    machine["python"] = platform.python_version()
    upstream, *_ = importlib.metadata.packages_distributions()["qwen_tts"]  # qwen-tts or qwen-tts-hf
    for package in ("torch", "transformers", upstream):
        machine[package] = importlib.metadata.version(package)
    return machine | dict(commit=project_version(), weights=weights)


def project_version() -> str:
    """The checkout's commit, or the version that is installed, which may lie in somebody else's repository."""
    if (Path(__file__).resolve().parents[2] / ".git").exists():
        return first_line("git", "describe", "--always", "--dirty")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("qwen3-tts-cuda-graphs")
    return "unknown"


def first_line(*command: str) -> str:
    """The first line that a program prints; unknown without the program."""
    try:
        lines = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        lines = []
    return lines[0] if lines else "unknown"
