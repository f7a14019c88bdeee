"""The checkpoints that run here: their names, and what their config.json says. Imports nothing that takes time."""

import functools
import json
import re
import sys
from pathlib import Path

import huggingface_hub

from cli.scripts import show_progress

MODELS = {  # short name -> hub id; generate.py, which runs without this file, has the same
    "0.6B": "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "1.7B": "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "0.6B-CustomVoice": "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "1.7B-CustomVoice": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "1.7B-VoiceDesign": "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
}
KINDS = {
    "base": "a Base model, which clones voices",
    "custom_voice": "a CustomVoice model, which has speakers of its own",
    "voice_design": "a VoiceDesign model, which makes voices from descriptions",
}
MODELS_OF_KIND = {"base": "0.6B or 1.7B", "custom_voice": "1.7B-CustomVoice", "voice_design": "1.7B-VoiceDesign"}
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "*.safetensors",
    "speech_tokenizer/config.json",
    "speech_tokenizer/preprocessor_config.json",
    "speech_tokenizer/*.safetensors",
)
TALKER_KEYS = {"hidden_size", "vocab_size", "max_position_embeddings", "spk_id", "codec_language_id"}
FRAME_RATE = 12.5  # of the 12 Hz models


@functools.cache
def read_config(model: str) -> dict:
    """The config.json of a Qwen3-TTS 12 Hz checkpoint: a folder, a hub id or a short name."""
    folder = Path(model)
    if not model:
        raise ValueError("the name of the model is empty: give --model a folder, a hub id or a short name")
    if folder.is_file():
        raise ValueError(f"{model} is a file: give --model the folder that it is in")
    if folder.is_dir():
        missing = [file for file in CHECKPOINT_FILES if not any(folder.glob(file))]
        if missing:
            missing = ", ".join(missing)
            raise ValueError(
                f"{folder} is not a complete checkpoint, it has no {missing}: give another folder, or download it again"
            )
    else:
        folder = download_config(model)
    try:
        config = json.loads((folder / "config.json").read_text())
        kind, tokenizer = config["tts_model_type"], config["tokenizer_type"]
        if TALKER_KEYS - set(config["talker_config"]):
            raise KeyError
    except (ValueError, KeyError, TypeError, OSError):
        raise ValueError(f"the config.json of {model} does not describe a Qwen3-TTS model: give another one") from None
    if tokenizer != "qwen3_tts_tokenizer_12hz" or kind not in KINDS:
        raise ValueError(
            f"{model} is a {kind} model with the tokenizer {tokenizer}: only the 12 Hz models run here, "
            f"{', '.join(MODELS)}"
        )
    return config


def base_config(model: str) -> dict:
    """The config of a model that clones voices."""
    config = read_config(model)
    if config["tts_model_type"] != "base":
        raise ValueError(f"{model} has no speaker encoder to clone a voice with: give a Base model, 0.6B or 1.7B")
    return config


def languages(config: dict) -> list[str]:
    return ["auto", *(name for name in config["talker_config"]["codec_language_id"] if "dialect" not in name)]


def hub_name(model: str) -> str:
    return model if Path(model).is_dir() else MODELS.get(model, model)


def download_config(model: str) -> Path:
    """Fetch config.json from the hub and return its folder."""
    name = MODELS.get(model, model)
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name):
        known = ", ".join(MODELS)
        raise ValueError(f"there is no folder {model}: give a folder, a hub id like owner/name, or one of {known}")
    show_progress(f"fetching {name} from the model hub")
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json")).parent
    except hub_errors():
        raise ValueError(
            f"{name} cannot be downloaded from the model hub: check the name and the network, or give --model a folder"
        ) from None
    finally:
        show_progress("")


def download(model: str) -> None:
    """For setup.sh: all files of a model, with the hub's own progress bars."""
    try:
        huggingface_hub.snapshot_download(MODELS[model])
    except hub_errors():
        sys.exit(f"error: {MODELS[model]} cannot be downloaded from the model hub: check the network")


def hub_errors() -> tuple[type[Exception], ...]:
    """What a download can raise. A function, because the last one imports much of huggingface_hub."""
    return OSError, ValueError, huggingface_hub.errors.HfHubHTTPError


if __name__ == "__main__":
    download(sys.argv[1])
