"""Names of models: as a user writes them, on the hub, and as they are displayed. Imports nothing that takes time."""

import os
from pathlib import Path

from qwen3_tts_cuda_graphs.common.published import MODELS


def model_name(word: str) -> str:
    """The usual name of a published model that was written as 1.7b, 1.7B-Base or qwen3-tts-12hz-1.7b-base. Any other
    name is returned unchanged."""
    if os.path.exists(word):
        return word
    for name, hub_id in MODELS.items():
        variant = hub_id.removeprefix("Qwen/Qwen3-TTS-12Hz-")
        if word.lower() in (name.lower(), variant.lower()):
            return name
        if word.lower() in (hub_id.lower(), hub_id.removeprefix("Qwen/").lower()):
            return hub_id
    return word


def hub_name(model: str) -> str:
    """The name on the model hub. The path of a folder is returned unchanged."""
    return model if Path(model).is_dir() else MODELS.get(model, model)


def split_name(model: str) -> tuple[str | None, str]:
    """Split name=folder. The name is None if there is none: the = may be part of a path."""
    name, equals, folder = model.partition("=")
    is_named = equals and name.strip() and "/" not in name and not Path(model).exists()
    return (name.strip(), folder) if is_named else (None, model)


def display_name(model: str) -> str:
    """A model's name without its owner or folder. For a snapshot in the hub's cache, it is the repository's name."""
    if not Path(model).is_dir():
        return Path(model).name
    path = Path(os.path.abspath(model))
    is_snapshot = path.parent.name == "snapshots" and path.parents[1].name.startswith("models--")
    return path.parents[1].name.split("--")[-1] if is_snapshot else path.name
