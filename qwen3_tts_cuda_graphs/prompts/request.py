"""A request to the runner: a text in a voice, as embeddings. Immutable."""

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import torch
import transformers

from cudagraph_talker import Sampling

SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
CODE_SAMPLING = ("subtalker_dosample", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p")
SETTINGS = (*SAMPLING, *CODE_SAMPLING, "repetition_penalty", "eos_token_id", "min_new_tokens", "suppress_tokens")
EMBEDDINGS = ("inputs_embeds", "trailing_text_hidden", "tts_pad_embed")


@dataclass(frozen=True, eq=False)
class Request:
    prefix: torch.Tensor  # the prompt without its last position (L, H)
    prefix_key: bytes | None  # the bytes of the prefix, if requests with other texts may share it
    inputs: torch.Tensor  # (1 + T + 1, H): the prompt's last position, the text of each frame, the padding after it
    settings: dict  # SETTINGS -> hashable values
    max_new_tokens: int | None
    reference: torch.Tensor | None = None  # codes (T, 16) of the reference recording, for the codec
    frames_with_text: float = math.inf  # fewer if the text is still arriving

    @property
    def prompt_length(self) -> int:
        return len(self.prefix) + 1

    def max_frames(self, max_seq_len: int) -> int:
        """The most frames that the speech can have. Raises an error if it cannot have any."""
        used, max_new_tokens = self.prompt_length, self.max_new_tokens
        if used >= max_seq_len:
            raise ValueError(f"the prompt takes {used} of {max_seq_len} positions: raise max_seq_len")
        if max_new_tokens is None:  # as in transformers: 20, minus the prompt's length in version 4
            max_new_tokens = 20 - used * transformers.__version__.startswith("4.")
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 2: the last has no audio")
        penalty = self.settings["repetition_penalty"]
        if penalty is not None and not penalty > 0:
            raise ValueError(f"repetition_penalty is {penalty}, it must be above 0: 1.0 for none")
        return min(max_new_tokens - 1, max_seq_len - used)

    def check(self, end_token: int, max_seq_len: int) -> None:
        """Raise an error for settings and prompts that cannot be decoded."""
        for names in (SAMPLING, CODE_SAMPLING):
            check_sampling(*(self.settings[name] for name in names))
        if self.settings["eos_token_id"] != end_token:
            raise ValueError("stream decodes up to the model's own end token: another eos_token_id is for whole calls")
        if not isinstance(self.max_new_tokens, Integral | None):
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, it must be a whole number")
        self.max_frames(max_seq_len)
        # Each frame consumes one token of the text that is not in the prompt. So a text can be too long.
        used, frames = self.prompt_length, len(self.inputs) - 2
        is_cut_by_the_caller = self.max_new_tokens is None or self.max_new_tokens - 1 <= max_seq_len - used
        if used + frames > max_seq_len and not is_cut_by_the_caller:
            raise ValueError(f"the text takes at least {used + frames} of {max_seq_len} positions: raise max_seq_len")


@torch.no_grad()
def request_of(arguments: dict, reference: torch.Tensor | None = None, on_gpu: bool = False) -> Request:
    """A request with these arguments of talker.generate, for one text. on_gpu: whether it is spoken on a GPU"""
    settings = {name: arguments[name] for name in SETTINGS}
    settings["suppress_tokens"] = tuple(settings["suppress_tokens"])
    prompt, later, pad = (arguments[name][0] for name in EMBEDDINGS)
    prefix = prompt[:-1]
    # The prefix contains text if the frames have none (non_streaming_mode), or if there is a transcript. A prompt on a
    # GPU contains a recording, or comes from a direct call of talker.generate.
    is_shared = not (reference is not None or prompt.is_cuda or torch.equal(later, pad))
    key = prefix.contiguous().view(torch.uint8).numpy().tobytes() if is_shared else None
    inputs = prompt.new_empty(len(later) + 2, prompt.shape[1], pin_memory=on_gpu and not prompt.is_cuda)
    torch.cat([prompt[-1:], later, pad], out=inputs)
    return Request(prefix, key, inputs, settings, arguments["max_new_tokens"], reference)


@lru_cache(maxsize=256, typed=True)
def check_sampling(do_sample, temperature, top_k, top_p) -> None:
    """Cached, as most requests have the same settings, and this check creates tensors."""
    if not isinstance(top_k, Integral | None):
        raise ValueError(f"top_k is {top_k}, it must be a whole number, or 0 or None for all")
    Sampling(vocab_size=1, row_count=1).set(do_sample, temperature, top_k, top_p)


def check_finite(embeddings: torch.Tensor) -> None:
    if not embeddings.isfinite().all():
        raise ValueError("the prompt has NaN or infinite values: extract the speaker or the reference again")
