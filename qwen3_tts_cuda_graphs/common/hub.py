"""Find the folder of a model: one that the user names, or the hub's cache, into which it is downloaded.

`python -m qwen3_tts_cuda_graphs.common.hub MODEL` downloads one, for setup.sh.
"""

import contextlib
import difflib
import re
import sys
from pathlib import Path

import huggingface_hub

from qwen3_tts_cuda_graphs.common.checkpoint_files import missing_files
from qwen3_tts_cuda_graphs.common.command import show_progress
from qwen3_tts_cuda_graphs.common.model_names import hub_name, model_name
from qwen3_tts_cuda_graphs.common.published import MODELS

SMALL_FILES = ("*.json", "*.txt")  # everything but the weights
HUB_TIMEOUT = 10.0  # seconds


def local_folder(model: str, with_weights: bool = False) -> Path:
    """The model's folder, or the one in the hub's cache. Missing files are downloaded; weights only `with_weights`."""
    if Path(model).is_dir():
        return Path(model)
    name = hub_name(model)
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name):
        folders = [str(config.parent) for config in Path(model).parent.glob("*/config.json")]
        known = ", ".join(difflib.get_close_matches(model, [*MODELS, *folders]) or MODELS)
        raise ValueError(f"there is no folder {model}: give a folder, a hub id like owner/name, or one of {known}")
    with contextlib.suppress(OSError, ValueError):
        folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        if not missing_files(folder):
            return folder
    show_progress(f"fetching {name} from the model hub")
    try:
        huggingface_hub.model_info(name, timeout=HUB_TIMEOUT)  # offline, snapshot_download returns an incomplete cache
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=None if with_weights else SMALL_FILES))
    except hub_errors() as error:
        if isinstance(error, OSError) and error.filename:  # the disk's, not the network's
            place = huggingface_hub.constants.HF_HUB_CACHE
            raise ValueError(f"{name} cannot be kept in {place}: let $HF_HOME name a writable folder") from None
        raise ValueError(
            f"{name} cannot be downloaded from the model hub: check the name and the network, or give a folder"
        ) from None
    finally:
        show_progress("")


def download(model: str) -> None:
    """Download all files of a model, with the hub's own progress bars."""
    name = hub_name(model_name(model))
    try:
        huggingface_hub.snapshot_download(name)
    except hub_errors():
        sys.exit(f"error: {name} cannot be downloaded from the model hub: check the network")


def hub_errors() -> tuple[type[Exception], ...]:
    """What a download can raise. Not a constant, because the last one's import is slow."""
    return OSError, ValueError, huggingface_hub.errors.HfHubHTTPError


if __name__ == "__main__":
    download(sys.argv[1])
