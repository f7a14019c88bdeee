"""What a model's config.json says: whether it runs here, what kind it is, which languages it speaks.

Imports nothing that takes time.
"""

import functools
from pathlib import Path

from qwen3_tts_cuda_graphs.common.checkpoint_files import check_files, missing_files, read_json
from qwen3_tts_cuda_graphs.common.hub import local_folder
from qwen3_tts_cuda_graphs.common.published import MODELS, published_config
from qwen3_tts_cuda_graphs.prompts.cut import LANGUAGES

KINDS = {
    "base": "a Base model, which clones voices",
    "custom_voice": "a CustomVoice model, which has speakers of its own",
    "voice_design": "a VoiceDesign model, which makes voices from descriptions",
}
TALKER_KEYS = {"hidden_size", "vocab_size", "max_position_embeddings", "spk_id", "codec_language_id"}


@functools.cache
def read_config(model: str) -> dict:
    """The config.json of a Qwen3-TTS 12 Hz checkpoint. model: a folder, a hub id or a short name"""
    if not model:
        raise ValueError("the name of the model is empty: give --model a folder, a hub id or a short name")
    if Path(model).is_file():
        raise ValueError(f"{model} is a file: give --model the folder that it is in")
    if Path(model).is_dir() and (missing := missing_files(Path(model))):
        raise ValueError(
            f"{model} is not a complete checkpoint, it has no {', '.join(missing)}: give another folder, or download "
            "it again"
        )
    folder = local_folder(model)
    check_files(folder)
    config = read_json(folder / "config.json")
    try:
        kind, tokenizer = config["tts_model_type"], config["tokenizer_type"]
        if TALKER_KEYS - set(config["talker_config"]):
            raise KeyError
    except (KeyError, TypeError):
        raise ValueError(f"the config.json of {model} does not describe a Qwen3-TTS model: give another one") from None
    if tokenizer != "qwen3_tts_tokenizer_12hz" or kind not in KINDS:
        raise ValueError(
            f"{model} is a {kind} model with the tokenizer {tokenizer}: only the 12 Hz models run here, "
            f"{', '.join(MODELS)}"
        )
    return config


def quick_config(model: str) -> dict:
    """The config, or as much of it as is known without a download if the model is a published one."""
    return published_config(model) or read_config(model)


def base_config(model: str) -> dict:
    """The config of a model that clones voices."""
    if quick_config(model)["tts_model_type"] != "base":
        raise ValueError(f"{model} has no speaker encoder to clone a voice with: give a Base model, 0.6B or 1.7B")
    return read_config(model)


def languages(config: dict) -> list[str]:
    return ["auto", *(name for name in config["talker_config"]["codec_language_id"] if "dialect" not in name)]


def language_name(code_or_name: str) -> str:
    """The name that models use for a language code: "en", "en-US" and "en_US" are "english". A name is returned
    unchanged."""
    return LANGUAGES.get(code_or_name.lower().replace("_", "-").partition("-")[0], code_or_name)
