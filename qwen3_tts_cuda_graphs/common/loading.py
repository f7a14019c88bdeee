"""Load upstream's model and accelerate it. Chooses the device, and explains what loading and running can raise."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import torch
import transformers

from qwen3_tts_cuda_graphs.common.checkpoint_files import file_errors
from qwen3_tts_cuda_graphs.common.command import check_device_name
from qwen3_tts_cuda_graphs.common.hub import local_folder
from qwen3_tts_cuda_graphs.common.model_config import read_config
from qwen3_tts_cuda_graphs.prompts.incremental_tokenizer import use_qwens_pre_tokens
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.runner import KernelStopped
from qwen3_tts_cuda_graphs.upstream import Qwen3TTSModel

SIGNS_OF_A_GPU = Path("/proc/driver/nvidia/version"), Path("/etc/nv_tegra_release")  # of the driver; on a Jetson


def load(model: str, device=None, dtype: torch.dtype | None = None, **options):
    """Load and accelerate a model. Default: CUDA with bfloat16 or, where there is no CUDA, the CPU with float32"""
    return accelerate(load_upstream(model, device, dtype), **options)


def load_upstream(model: str, device=None, dtype: torch.dtype | None = None):
    """Upstream's model. `model` is a folder, a hub id or a short name from MODELS."""
    device = torch.device(device) if device else choose_device()
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    read_config(str(model))  # raises an error if it is no model that runs here
    folder = local_folder(str(model), with_weights=True)
    with file_errors(folder):
        tts = Qwen3TTSModel.from_pretrained(str(folder), device_map=device, dtype=dtype)
    use_qwens_pre_tokens(tts.processor.tokenizer)
    return tts


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name. Default: CUDA where there is CUDA, otherwise the CPU"""
    check_device_name(name)
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not name and device.type == "cpu" and has_unused_gpu():
        warnings.warn(
            f"torch {torch.__version__} cannot use this machine's GPU, so the CPU speaks, many times slower: install a "
            "CUDA build of torch that fits the driver (in a container: --gpus all), or choose the device cpu",
            stacklevel=2,
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"this torch finds {torch.cuda.device_count()} CUDA devices, not {name}: choose another device, for "
            "example cpu, or install a CUDA build of torch"
        )
    return device


def has_unused_gpu() -> bool:
    """Whether there seems to be an NVIDIA GPU that the user has not hidden with CUDA_VISIBLE_DEVICES."""
    is_there = shutil.which("nvidia-smi") or any(path.exists() for path in SIGNS_OF_A_GPU)
    return bool(is_there) and "CUDA_VISIBLE_DEVICES" not in os.environ


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Turn GPU errors into a ValueError that says what to do, for cli_errors around it, and silence the libraries."""
    for library in (transformers.utils, huggingface_hub.utils):
        library.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # transformers 5 has one for each part of the model
    huggingface_hub.utils.enable_progress_bars()  # for downloads, which take long
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError("the GPU's memory is full: use a smaller model or --max-seq-len, or free some") from None
    except KernelStopped as error:
        raise ValueError(str(error)) from None
