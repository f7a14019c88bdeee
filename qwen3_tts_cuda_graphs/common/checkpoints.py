"""The checkpoints that run here: their names and files, what config.json says; checks of numbers and speaker files.

Imports nothing that takes time.
"""

import contextlib
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import huggingface_hub

from qwen3_tts_cuda_graphs.common.command import show_progress
from qwen3_tts_cuda_graphs.common.published import MODELS, MODELS_OF_KIND, SPEAKERS, model_name, published_config
from qwen3_tts_cuda_graphs.prompts.cut import LANGUAGES

KINDS = {
    "base": "a Base model, which clones voices",
    "custom_voice": "a CustomVoice model, which has speakers of its own",
    "voice_design": "a VoiceDesign model, which makes voices from descriptions",
}
CLONING_MODEL, PRESET_MODEL = "0.6B", "0.6B-CustomVoice"  # the defaults, with and without a voice to clone
CHECKPOINT_FILES = (  # besides the weights and the vocabulary, which may be stored in two ways
    "config.json",
    "generation_config.json",
    "speech_tokenizer/config.json",
    "speech_tokenizer/preprocessor_config.json",
)
VOCABULARY = "vocab.json", "merges.txt"
OPTIONAL_FILES = (
    *("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
SAMPLING_DEFAULTS = {  # numbers in generation_config.json
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens"),
    *("subtalker_dosample", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
}
SMALL_FILES = ("*.json", "*.txt")  # all but the weights
HUB_TIMEOUT = 10.0  # seconds
TALKER_KEYS = {"hidden_size", "vocab_size", "max_position_embeddings", "spk_id", "codec_language_id"}
TORCH_FILES = b"PK\3\4", b"\x80\2"  # how files of torch.save begin: a zip, or a pickle in those of old versions
FRAME_RATE = 12.5  # frames per second, of the 12 Hz models
REFERENCE_SILENCE = 0.5  # seconds between an in-context reference and the speech


@functools.cache
def read_config(model: str) -> dict:
    """The config.json of a Qwen3-TTS 12 Hz checkpoint: a folder, a hub id or a short name."""
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


def base_config(model: str) -> dict:
    """The config of a model that clones voices."""
    config = published_config(model) or read_config(model)
    if config["tts_model_type"] != "base":
        raise ValueError(f"{model} has no speaker encoder to clone a voice with: give a Base model, 0.6B or 1.7B")
    return read_config(model)


def number_ranges(config: dict) -> dict[str, tuple[Callable, str]]:
    """Numbers that a user may set -> whether a value is good, and what it must be in words."""
    talker = config["talker_config"]
    vocab, positions = talker["vocab_size"], talker["max_position_embeddings"]
    return {
        "temperature": (lambda x: 0 < x <= 1e6, "above 0 and at most 1e6"),  # larger ones overflow float32
        "top_k": (lambda x: 1 <= x <= vocab, f"from 1 to {vocab}"),
        "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "repetition_penalty": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6, 1.0 for none"),
        "max_seq_len": (lambda x: 32 <= x <= positions, f"from 32 to {positions}"),
        "speed": (lambda x: 0.25 <= x <= 4, "from 0.25 to 4"),
        "pause": (lambda x: 0 <= x <= 60, "from 0 to 60"),
        "retry": (lambda x: 0 <= x <= 100, "from 0 to 100"),
        "seed": (lambda x: 0 <= x < 2**63, "from 0 to 2**63 - 1"),
    }


def check_number(config: dict, name: str, value: float | None) -> None:
    is_good, wanted = number_ranges(config)[name]
    if value is not None and not is_good(value):
        option = "--" + name.replace("_", "-")
        raise ValueError(f"{option} is {value}, it must be {wanted}")


def nearest(word: str | None, known: Iterable[str]) -> str:
    """The known words that look like this one; if there are none, all."""
    return ", ".join(difflib.get_close_matches(str(word).lower(), known) or sorted(known))


def check_speaker_file(path: str | Path) -> None:
    """What can be seen without torch."""
    if not os.path.isfile(path):
        if str(path).lower() in SPEAKERS:
            models = " or ".join(MODELS_OF_KIND["custom_voice"])
            raise ValueError(f"{path} is a voice of a CustomVoice model, not a speaker file: use --model {models}")
        raise ValueError(f"there is no speaker file {path}: make one with qwen3-tts clone")
    with open(path, "rb") as file:
        if not file.read(4).startswith(TORCH_FILES):
            remedy = f"make one with qwen3-tts clone --ref-audio {path}"
            raise ValueError(f"{path} is not a speaker file: if it is a recording, {remedy}")


def languages(config: dict) -> list[str]:
    return ["auto", *(name for name in config["talker_config"]["codec_language_id"] if "dialect" not in name)]


def language_name(code_or_name: str) -> str:
    """The models' name of a language that was given as a code: "en", "en-US" or "en_US" is english. All else stays as
    it is."""
    return LANGUAGES.get(code_or_name.lower().replace("_", "-").partition("-")[0], code_or_name)


def split_name(model: str) -> tuple[str | None, str]:
    """A model that was given as name=folder -> both. A path may have an = in it, too."""
    name, equals, folder = model.partition("=")
    is_named = equals and name.strip() and "/" not in name and not Path(model).exists()
    return (name.strip(), folder) if is_named else (None, model)


def display_name(model: str) -> str:
    """A model's name without its owner or its place. A snapshot in the hub's cache has the name of its repository."""
    if not Path(model).is_dir():
        return Path(model).name
    path = Path(os.path.abspath(model))
    is_snapshot = path.parent.name == "snapshots" and path.parents[1].name.startswith("models--")
    return path.parents[1].name.split("--")[-1] if is_snapshot else path.name


def hub_name(model: str) -> str:
    return model if Path(model).is_dir() else MODELS.get(model, model)


def local_folder(model: str, with_weights: bool = False) -> Path:
    """The model's folder, or the one in the hub's cache. What is not there is downloaded."""
    if Path(model).is_dir():
        return Path(model)
    name = MODELS.get(model, model)
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
        huggingface_hub.model_info(name, timeout=HUB_TIMEOUT)  # snapshot_download is content with half a cache
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=None if with_weights else SMALL_FILES))
    except hub_errors() as error:
        if isinstance(error, OSError) and error.filename:  # not of the network
            place = huggingface_hub.constants.HF_HUB_CACHE
            raise ValueError(f"{name} cannot be kept in {place}: let $HF_HOME name a writable folder") from None
        raise ValueError(
            f"{name} cannot be downloaded from the model hub: check the name and the network, or give a folder"
        ) from None
    finally:
        show_progress("")


def missing_files(folder: Path) -> list[str]:
    """What a checkpoint needs and this folder has not."""
    needed = [*CHECKPOINT_FILES]
    if not (folder / "tokenizer.json").is_file():
        needed += VOCABULARY
    for part in ("", "speech_tokenizer/"):
        needed += weight_files(folder / part, part)
    return [file for file in needed if not (folder / file).is_file()]


def weight_files(folder: Path, prefix: str) -> list[str]:
    """One file, or an index and the shards that it names, in either of transformers' formats."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return [prefix + whole]
        if index.is_file():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ValueError(f"{index} does not say which weights are where: download it again")
            return [prefix + shard for shard in sorted(set(map(str, shards.values())))]
    is_sharded = any(folder.glob("*.safetensors"))
    return [prefix + ("model.safetensors.index.json" if is_sharded else "model.safetensors")]


def check_files(folder: Path) -> None:
    """Whether the small files can be read, and the weights are whole: what the libraries raise seldom names a file."""
    small = {file: read_json(folder / file) for file in CHECKPOINT_FILES}
    for file in OPTIONAL_FILES:
        if (folder / file).exists():
            read_json(folder / file)
    for name, value in small["generation_config.json"].items():
        if name in SAMPLING_DEFAULTS and not isinstance(value, int | float | None):
            raise ValueError(f"{folder / 'generation_config.json'} has {name} {value!r}: give a number, or null")
    for part in ("", "speech_tokenizer/"):
        for file in weight_files(folder / part, part):
            if (folder / file).is_file():  # those of the hub are downloaded later
                check_weights(folder / file)


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read as a JSON object: download it again")
    return content


def check_weights(path: Path) -> None:
    """Whether the file is as long as its header says. safetensors would say the same, but import numpy."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            is_whole = size > 0
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, size)))
                header.pop("__metadata__", None)
                is_whole = size == 8 + length + max(tensor["data_offsets"][1] for tensor in header.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} is broken or not complete: download it again")


def vocabulary_problem(folder: Path) -> str | None:
    """Takes a second, so it is for a tokenizer that could not be loaded."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        if (folder / "tokenizer.json").exists():
            return None if read_json(folder / "tokenizer.json") else f"{folder / 'tokenizer.json'} is empty"
        tokens = read_json(vocabulary)
        if not all(isinstance(number, int) and number >= 0 for number in tokens.values()):
            return f"{vocabulary} does not give tokens their numbers"
        lines = merges.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        return f"{merges} is not UTF-8" if isinstance(error, UnicodeError) else str(error).rpartition(": ")[0]
    for number, line in enumerate(lines, 1):
        pair = line.split()
        if pair and not line.startswith("#version") and not (len(pair) == 2 and "".join(pair) in tokens):
            return f"line {number} of {merges} is not two tokens of vocab.json"
    return None


@contextlib.contextmanager
def file_errors(folder: Path) -> Iterator[None]:
    """What libraries raise while they read a checkpoint, as one sentence that names the file if it can be found."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if "CUDA" in reason or "memory" in reason or reason.startswith(str(folder)):  # raised by load_weights
            raise
        reason = f"{type(error).__name__}: {reason}"
        problem = f"the configs or weights in {folder} are broken, or do not belong together ({reason})"
        raise ValueError(f"{vocabulary_problem(folder) or problem}: download it again") from None


@contextlib.contextmanager
def complete_folder(model: str) -> Iterator[str]:
    """For load_upstream: the model's folder with its weights, which are downloaded if need be."""
    model = str(model)
    read_config(model)
    folder = local_folder(model, with_weights=True)
    with file_errors(folder):
        yield str(folder)


def download(model: str) -> None:
    """For setup.sh: all files of a model, with the hub's own progress bars."""
    name = hub_name(model_name(model))
    try:
        huggingface_hub.snapshot_download(name)
    except hub_errors():
        sys.exit(f"error: {name} cannot be downloaded from the model hub: check the network")


def hub_errors() -> tuple[type[Exception], ...]:
    """What a download can raise. A function, because the last one imports much of huggingface_hub."""
    return OSError, ValueError, huggingface_hub.errors.HfHubHTTPError


if __name__ == "__main__":
    download(sys.argv[1])
