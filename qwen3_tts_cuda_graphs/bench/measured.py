"""What is measured: the checkpoints, their voice, and the machine."""

import contextlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen3_tts_cuda_graphs.bench import ROOT
from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint
from qwen3_tts_cuda_graphs.common.model_config import base_config
from qwen3_tts_cuda_graphs.common.voices import load_speaker
from qwen3_tts_cuda_graphs.prompts.clone_prompts import prompt_field, speaker_prompt


@dataclass(frozen=True)
class Checkpoint:
    name: str
    model: str  # a Base model: a folder or a short name
    custom_voice: str | None  # a CustomVoice model of the same size, if that is measured, too
    speaker_file: Path

    @property
    def speaker(self) -> torch.Tensor:
        voice = load_speaker(self.speaker_file, hidden_size_of(self.model))
        (speaker,) = prompt_field(voice, "ref_spk_embedding")
        return speaker

    def voice(self, texts: int = 1) -> dict:
        """The argument of upstream's generate_voice_clone that says whose voice it is."""
        return dict(voice_clone_prompt=speaker_prompt(self.speaker, texts))


def find_checkpoints(
    names: list[str], are_random: bool, with_custom_voice: bool, speaker_file: Path | None, folder: Path, ends: bool
) -> Iterator[Checkpoint]:
    """The checkpoints of these sizes and folders. Random ones are written into `folder`, each when it is needed.

    ends: whether the speech of a random model ends by itself
    """
    for name in names:
        model, custom_voice = name, None
        if name == "tiny" or are_random and not Path(name).is_dir():
            model = str(folder / f"{name}-base")
            write_checkpoint(Path(model), name, "base", ends=ends)
            if with_custom_voice:
                custom_voice = str(folder / f"{name}-custom_voice")
                write_checkpoint(Path(custom_voice), name, "custom_voice", ends=False)
        elif with_custom_voice and not Path(name).is_dir():
            custom_voice = f"{name}-CustomVoice"
        yield Checkpoint(Path(name).name, model, custom_voice, speaker_file or write_speaker(model, folder))


def write_speaker(model: str, folder: Path) -> Path:
    """Write a random speaker embedding of the model's size."""
    path = folder / "speaker.pt"
    torch.save(torch.randn(hidden_size_of(model), generator=torch.Generator().manual_seed(0)), path)
    return path


def hidden_size_of(model: str) -> int:
    return base_config(model)["talker_config"]["hidden_size"]


# ---- The machine


def machine_card(weights: str) -> dict[str, Any]:
    """What the figures depend on: the machine, the versions of the software, and the weights."""
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
    """The commit of a checkout, or the version of the installed package."""
    if (ROOT / ".git").exists():  # git would also find another repository that the package was installed into
        return first_line("git", "describe", "--always", "--dirty")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("qwen3-tts-cuda-graphs")
    return "unknown"


def first_line(*command: str) -> str:
    """The first line that a program prints; "unknown" where there is no such program."""
    try:
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        lines = []
    return lines[0] if lines else "unknown"
