"""Around the loading of a model in a script: the device, and what loading and running it can raise, as one sentence."""

import contextlib
from collections.abc import Iterator

import huggingface_hub
import torch
import transformers

from common.scripts import check_device_name
from fast.paths import MegakernelStopped


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name; without one, CUDA where there is CUDA, else the CPU."""
    check_device_name(name)
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"this torch finds {torch.cuda.device_count()} CUDA devices, not {name}: choose another device, for "
            "example cpu, or install a CUDA build of torch"
        )
    return device


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Inside of cli_errors: what is not a ValueError yet becomes one, with what to do. The libraries are quiet."""
    for library in (transformers.utils, huggingface_hub.utils):
        library.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # of transformers 5, one for each part of the model
    huggingface_hub.utils.enable_progress_bars()  # of downloads
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError("the GPU's memory is full: use a smaller model or --max-seq-len, or free some") from None
    except MegakernelStopped as error:
        raise ValueError(str(error)) from None
