"""Mixed voices, as they are written: a.pt:0.7,b.pt:0.3. Imports nothing that takes time."""

import contextlib
import math
from collections.abc import Iterable


def read_mix(text: str) -> list[tuple[str, float]]:
    """(name, weight) of each voice. Empty: it is no mix."""
    voices = []
    for piece in text.split(","):
        name, _, weight = piece.rpartition(":")
        with contextlib.suppress(ValueError):
            voices.append((name.strip(), float(weight)))
    is_mix = len(voices) == text.count(",") + 1 and all(name for name, _ in voices)
    return voices if is_mix else []


def normalized_weights(weights: Iterable[float] | None, voices: int) -> list[float]:
    """The weights, scaled to a sum of 1. None: equal ones"""
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
