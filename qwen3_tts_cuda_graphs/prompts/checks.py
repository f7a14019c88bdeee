"""What can be wrong with what is asked, each with a message that says what to do."""

import math
from collections.abc import Callable
from functools import lru_cache
from numbers import Integral

import torch

from cudagraph_talker import Sampling
from qwen3_tts_cuda_graphs.prompts.clone_prompts import prompt_field
from qwen3_tts_cuda_graphs.prompts.script import check_encodable


def model_of(method: Callable):
    """The accelerated model whose method this is."""
    tts = getattr(method, "__self__", None)
    if tts is None:
        raise ValueError(f"{method} belongs to no model: give a method of a loaded one, as tts.generate_voice_clone")
    if not hasattr(tts, "prompts"):
        raise ValueError("this model is not accelerated: call accelerate(tts) first")
    return tts


def check_counts(**values) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} is {value}, it must be a whole number of at least 1")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that torch does not take."""
    if seed is not None and not (isinstance(seed, Integral) and -(2**63) <= seed < 2**64):
        raise ValueError(f"seed is {seed!r}, it must be a whole number from -2**63 to 2**64 - 1")


@lru_cache(maxsize=256, typed=True)
def check_sampling(do_sample, temperature, top_k, top_p) -> None:
    """Cached: most requests have the same settings, and this makes tensors."""
    if not isinstance(top_k, Integral | None):
        raise ValueError(f"top_k is {top_k}, it must be a whole number, or 0 or None for all")
    Sampling(vocab_size=1, row_count=1).set(do_sample, temperature, top_k, top_p)


# ---- The text


def check_text(text: str | list[str]) -> str:
    """The text, if it is one that can be spoken."""
    if isinstance(text, list | tuple):
        if len(text) != 1:
            raise ValueError(f"stream speaks one text at a time, not {len(text)}")
        (text,) = text
    if not isinstance(text, str):
        raise ValueError(f"the text is a {type(text).__name__}, it must be a string")
    if not text.strip():
        raise ValueError("the text is empty: give something to say")
    check_encodable(text)
    return text


def is_arriving(text) -> bool:
    """Whether it is an iterator of pieces. An async one raises an error."""
    if hasattr(text, "__aiter__"):
        raise ValueError("the text is an async iterator: use astream instead of stream")
    return hasattr(text, "__iter__") and not isinstance(text, str | bytes | list | tuple | dict | set)


def check_text_timeout(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"text_timeout is {seconds}, it must be above 0 and finite, in seconds")


# ---- The voice


def check_speaker_size(config, voice_clone_prompt) -> None:
    """Refuse an embedding of the other model size."""
    width = config.hidden_size
    for speaker in prompt_field(voice_clone_prompt, "ref_spk_embedding"):
        if torch.is_tensor(speaker) and speaker.numel() != width:
            raise ValueError(
                f"the speaker embedding has {speaker.numel()} numbers, this model takes {width}: extract it with this "
                "model"
            )


def check_reference(config, codes: torch.Tensor | None) -> None:
    """Codes beyond the codebooks would stop a GPU's kernels, and with them all other requests."""
    if codes is None:
        return
    groups, size = config.num_code_groups, config.code_predictor_config.vocab_size
    if codes.dim() != 2 or codes.shape[1] != groups or len(codes) == 0:
        raise ValueError(f"the reference's codes have the shape {tuple(codes.shape)}, it must be (frames, {groups})")
    low, high = torch.stack(codes.cpu().aminmax()).tolist()
    if low < 0 or high >= size:
        raise ValueError(
            f"the reference has codes from {low} to {high}, the codebooks have 0 to {size - 1}: encode the recording "
            "again"
        )


def check_finite(embeddings: torch.Tensor) -> None:
    if not embeddings.isfinite().all():
        raise ValueError("the prompt has NaN or infinite values: extract the speaker or the reference again")
