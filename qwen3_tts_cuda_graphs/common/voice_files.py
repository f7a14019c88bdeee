"""Speaker files, and mixes such as a.pt:0.7,b.pt:0.3, checked without torch.

Imports nothing that takes time.
"""

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

from qwen3_tts_cuda_graphs.common.published import MODELS_OF_KIND, SPEAKERS

TORCH_FILES = b"PK\3\4", b"\x80\2"  # the first bytes of files by torch.save: a zip, or in old versions a pickle
REFERENCE_SILENCE = 0.5  # seconds between an in-context reference and the speech


def read_mix(text: str) -> list[tuple[str, float]]:
    """The (name, weight) of each voice of a mix. Empty if the text is not a mix."""
    voices = []
    for piece in text.split(","):
        name, _, weight = piece.rpartition(":")
        with contextlib.suppress(ValueError):
            voices.append((name.strip(), float(weight)))
    is_mix = len(voices) == text.count(",") + 1 and all(name for name, _ in voices)
    return voices if is_mix else []


def normalized_weights(weights: Iterable[float] | None, voices: int) -> list[float]:
    """The weights, scaled to a sum of 1. None: equal weights"""
    weights = [1.0] * voices if weights is None else [*weights]
    if len(weights) != voices:
        raise ValueError(f"there are {len(weights)} weights for {voices} voices: give each voice one")
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise ValueError(f"a weight is {weight:g}, it must be at least 0 and finite")
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError("all weights are 0: let one be above 0" if total == 0 else "the weights are too large")
    return [weight / total for weight in weights]


def check_speaker_file(path: str | Path) -> None:
    """Raise an error if the file is missing, or does not begin as a file by torch.save."""
    if not os.path.isfile(path):
        if str(path).lower() in SPEAKERS:
            models = " or ".join(MODELS_OF_KIND["custom_voice"])
            raise ValueError(f"{path} is a voice of a CustomVoice model, not a speaker file: use --model {models}")
        raise ValueError(f"there is no speaker file {path}: make one with qwen3-tts clone")
    with open(path, "rb") as file:
        if not file.read(4).startswith(TORCH_FILES):
            remedy = f"make one with qwen3-tts clone --ref-audio {path}"
            raise ValueError(f"{path} is not a speaker file: if it is a recording, {remedy}")
