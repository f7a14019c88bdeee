"""The files of a checkpoint: which of them are missing, and whether they are complete.

Imports nothing that takes time: safetensors would import numpy.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

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


def missing_files(folder: Path) -> list[str]:
    """Files that a checkpoint needs and this folder does not have."""
    needed = [*CHECKPOINT_FILES]
    if not (folder / "tokenizer.json").is_file():
        needed += VOCABULARY
    for part in ("", "speech_tokenizer/"):
        needed += weight_files(folder / part, part)
    return [file for file in needed if not (folder / file).is_file()]


def weight_files(folder: Path, prefix: str) -> list[str]:
    """The files of the weights, in either of transformers' formats: one file, or the shards that an index names."""
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
    """Raise an error if a file is broken or incomplete, because the libraries' errors seldom name the file."""
    small = {file: read_json(folder / file) for file in CHECKPOINT_FILES}
    for file in OPTIONAL_FILES:
        if (folder / file).exists():
            read_json(folder / file)
    for name, value in small["generation_config.json"].items():
        if name in SAMPLING_DEFAULTS and not isinstance(value, int | float | None):
            raise ValueError(f"{folder / 'generation_config.json'} has {name} {value!r}: give a number, or null")
    for part in ("", "speech_tokenizer/"):
        for file in weight_files(folder / part, part):
            if (folder / file).is_file():  # weights from the hub are downloaded later
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
    """Raise an error if a safetensors file is shorter or longer than its header says, or if any other file is empty."""
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
    """What is wrong with the files of the tokenizer. Takes a second, so it is called when loading has failed."""
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
    """Turn an error while a checkpoint is read into one sentence, which names the broken file if it can be found."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if "CUDA" in reason or "memory" in reason or reason.startswith(str(folder)):  # raised by load_weights
            raise
        reason = f"{type(error).__name__}: {reason}"
        problem = f"the configs or weights in {folder} are broken, or do not belong together ({reason})"
        raise ValueError(f"{vocabulary_problem(folder) or problem}: download it again") from None
