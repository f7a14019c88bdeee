"""What is asked of the runner: a text in a voice, as embeddings. Made once, and not changed."""

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
    prefix_key: bytes | None  # its bytes, if requests with other texts may share it
    inputs: torch.Tensor  # the last position, the text of each frame, and what follows the text (1 + T + 1, H)
    settings: dict  # SETTINGS -> values that can be hashed
    max_new_tokens: int | None
    reference: torch.Tensor | None = None  # codes (T, 16) that precede the speech, for the codec
    frames_with_text: float = math.inf  # known by now; the others wait for a text that is still arriving

    @property
    def prompt_length(self) -> int:
        return len(self.prefix) + 1

    def max_frames(self, max_seq_len: int) -> int:
        """The most frames that it can have. Raises an error if it cannot have any."""
        used, max_new_tokens = self.prompt_length, self.max_new_tokens
        if used >= max_seq_len:
            raise ValueError(f"the prompt takes {used} of {max_seq_len} positions: raise max_seq_len")
        if max_new_tokens is None:  # transformers then makes 20, in version 4 less the prompt's length
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
        # Each frame takes one token of the text that the prompt has not. So text may be too long to be spoken.
        used, frames = self.prompt_length, len(self.inputs) - 2
        is_cut_by_the_caller = self.max_new_tokens is None or self.max_new_tokens - 1 <= max_seq_len - used
        if used + frames > max_seq_len and not is_cut_by_the_caller:
            raise ValueError(f"the text takes at least {used + frames} of {max_seq_len} positions: raise max_seq_len")


@torch.no_grad()
def request_of(arguments: dict, reference: torch.Tensor | None = None, on_gpu: bool = False) -> Request:
    """The request that these arguments of talker.generate make, for one text. on_gpu: whether it is spoken there"""
    settings = {name: arguments[name] for name in SETTINGS}
    settings["suppress_tokens"] = tuple(settings["suppress_tokens"])
    prompt, later, pad = (arguments[name][0] for name in EMBEDDINGS)
    prefix = prompt[:-1]
    # A prefix holds text if none is left for the frames (non_streaming_mode), or if there is a transcript. Prompts on a
    # GPU have a recording, or come from a direct call of talker.generate.
    is_shared = not (reference is not None or prompt.is_cuda or torch.equal(later, pad))
    key = prefix.contiguous().view(torch.uint8).numpy().tobytes() if is_shared else None
    inputs = prompt.new_empty(len(later) + 2, prompt.shape[1], pin_memory=on_gpu and not prompt.is_cuda)
    torch.cat([prompt[-1:], later, pad], out=inputs)
    return Request(prefix, key, inputs, settings, arguments["max_new_tokens"], reference)


@lru_cache(maxsize=256, typed=True)
def check_sampling(do_sample, temperature, top_k, top_p) -> None:
    """Cached: most requests have the same settings, and this makes tensors."""
    if not isinstance(top_k, Integral | None):
        raise ValueError(f"top_k is {top_k}, it must be a whole number, or 0 or None for all")
    Sampling(vocab_size=1, row_count=1).set(do_sample, temperature, top_k, top_p)


def check_finite(embeddings: torch.Tensor) -> None:
    if not embeddings.isfinite().all():
        raise ValueError("the prompt has NaN or infinite values: extract the speaker or the reference again")
