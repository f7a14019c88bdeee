"""Templates: build a prompt that differs from an earlier one only in its text, without upstream's code.

Upstream's Python code takes a millisecond or two for a prompt, and longer on a GPU for one with a reference recording:
a large part of the time to the first audio, and most of it when many requests arrive together. The layout is simple:

    non_streaming_mode   prompt                                           added by the later frames
    False                prefix, first tokens + codes                     the other tokens, or pad
    True                 prefix, tokens + codec_pad, pad + codes          pad

The tokens are those of the reference's transcript, those of the text, and the end token. The codes are codec_bos and
the frames of the reference. Without a recording there is neither a transcript nor frames. If there are fewer tokens
than codes, pad tokens follow.

The prefix (role, language, speaker, style) depends only on the other arguments. It is taken from the first prompt that
upstream builds with them. It is used only if this layout reproduces that prompt exactly; otherwise upstream builds all
prompts with these arguments. The check is made for the second request, so that the first one does not wait for it.
"""

import collections
import ctypes
import functools
import logging
import threading
from dataclasses import replace

import numpy as np
import torch

from qwen3_tts_cuda_graphs.prompts.clone_prompts import is_in_context, prompt_field
from qwen3_tts_cuda_graphs.prompts.request import Request

log = logging.getLogger("qwen3_tts_cuda_graphs")

ROLE_TOKENS = 3  # before the text: <|im_start|>, assistant, newline
CLOSING_TOKENS = 5  # after the text: <|im_end|>, newline and the next role
TRANSCRIPT_CLOSING_TOKENS = 2  # after a reference's transcript: <|im_end|>, newline
MAX_BYTES = 256 << 20  # of all templates: 64 prompts of 2,048 positions with 1.7B, and thousands of short ones


class PromptTemplate:
    def __init__(self, prompts, request: Request, ids: list[int], voice_clone_prompt):
        """prompts: of the model; request: built by upstream for the text with the tokens `ids`"""
        self.nbytes = request.prefix.nbytes + len(request.prefix_key or b"") + request.inputs.nbytes
        if is_in_context(voice_clone_prompt):
            codes = voice_clone_prompt[0].ref_code
            self.nbytes += codes.nbytes + (1 + len(codes)) * request.inputs[0].nbytes  # with `self.codes`
        self.prompts = prompts
        self.request = request
        self.ids = ids
        self.voice_clone_prompt = voice_clone_prompt

    @functools.cached_property
    def layout(self) -> tuple[torch.Tensor, bool] | None:
        """The prefix, and whether it is the streaming layout; None if neither layout reproduces upstream's prompt. The
        first use determines it, and sets the attributes that `fill_layout` reads."""
        tts, talker = self.prompts.tts, self.prompts.host_talker
        config = tts.model.config
        self.request = replace(self.request, prefix=self.request.prefix.cpu(), inputs=self.request.inputs.cpu())
        self.table = talker.get_text_embeddings().table
        codec = talker.get_input_embeddings().weight
        self.codec_pad = codec[config.talker_config.codec_pad_id]
        self.codes = codec[config.talker_config.codec_bos_id][None]  # (C, H)
        self.transcript, self.end, self.pad = [], [config.tts_eos_token_id], [config.tts_pad_token_id]
        if is_in_context(self.voice_clone_prompt):
            (item,) = self.voice_clone_prompt
            self.codes = embed_reference(tts.model, item.ref_code)
            self.transcript = transcript_ids(tts, item)
        tokens = len(self.transcript) + len(self.ids) + len(self.end)
        for is_streaming, positions_after_prefix in ((True, len(self.codes)), (False, tokens + len(self.codes))):
            prefix = self.request.prefix[: max(0, self.request.prompt_length - positions_after_prefix)]
            (filled,) = self.fill_layout(prefix, is_streaming, [(self.ids, None)])
            if self.equals_upstreams(filled):
                return prefix, is_streaming
        log.info("upstream's prompts have another layout: upstream builds all of them")
        return None

    def fill(self, texts: list[tuple[list[int], torch.Tensor | None]]) -> list[Request]:
        """Build a request for each text, given its tokens and its reference. `layout` must not be None."""
        return self.fill_layout(*self.layout, texts)

    @torch.no_grad()
    def fill_layout(
        self, prefix: torch.Tensor, is_streaming: bool, texts: list[tuple[list[int], torch.Tensor | None]]
    ) -> list[Request]:
        """The same for a given layout. Few calls of torch build all of the prompts: each call releases the GIL, and
        getting it back from other threads can take milliseconds."""
        all_ids, sizes, cuts = [], [], []
        for ids, _ in texts:
            ids = self.transcript + ids + self.end
            first_code = 0 if is_streaming else len(ids)
            in_prompt = first_code + len(self.codes)
            # At least one token for a frame, and the one that all frames after the text add.
            ids += self.pad * (max(0, in_prompt + 1 - len(ids)) + 1)
            all_ids += ids
            sizes += [first_code, len(self.codes), len(ids) - in_prompt]
            cuts += [in_prompt - 1, len(ids) - in_prompt + 1]
        embeddings = self.table.new_empty(len(all_ids), self.table.shape[1], pin_memory=self.prompts.on_gpu)
        ids = torch.from_numpy(np.array(all_ids))  # numpy converts a long list faster than torch
        torch.index_select(self.table, 0, ids, out=embeddings)
        pieces = embeddings.split(sizes)  # of each prompt: tokens + codec_pad, tokens + codes, tokens
        if not is_streaming:
            torch._foreach_add_(pieces[0::3], [self.codec_pad] * len(texts))
        torch._foreach_add_(pieces[1::3], [self.codes] * len(texts))
        pieces = embeddings.split(cuts)
        return [
            replace(
                self.request,
                prefix=torch.cat([prefix, in_prefix]) if len(in_prefix) else prefix,
                inputs=inputs,
                reference=reference,
            )
            for in_prefix, inputs, (_, reference) in zip(pieces[0::2], pieces[1::2], texts)
        ]

    def equals_upstreams(self, filled: Request) -> bool:
        return all(torch.equal(getattr(filled, name), getattr(self.request, name)) for name in ("prefix", "inputs"))


class PromptTemplates:
    """The templates of the last requests, in at most MAX_BYTES. Their keys are all arguments except the text."""

    def __init__(self):
        self.templates = collections.OrderedDict()
        self.lock = threading.Lock()

    def find(self, key) -> PromptTemplate | None:
        with self.lock:
            if key in self.templates:
                self.templates.move_to_end(key)
            return self.templates.get(key)

    def add(self, key, template: PromptTemplate) -> None:
        with self.lock:
            self.templates[key] = template
            while sum(template.nbytes for template in self.templates.values()) > MAX_BYTES:
                self.templates.popitem(last=False)

    def clear(self) -> None:
        with self.lock:
            self.templates.clear()


def tokenize(tts, text: str) -> list[int]:
    """The ids that upstream would use. `tokenizer(text)` itself is not thread-safe: it may change the padding."""
    return tts.processor.tokenizer.backend_tokenizer.encode(text).ids


def transcript_ids(tts, item) -> list[int]:
    """Tokens of what the recording of a VoiceClonePromptItem says."""
    return tokenize(tts, tts._build_ref_text(item.ref_text))[ROLE_TOKENS:-TRANSCRIPT_CLOSING_TOKENS]


@torch.no_grad()
def embed_reference(model, codes: torch.Tensor) -> torch.Tensor:
    """The embeddings of codec_bos and of a reference's frames, which upstream adds to those of the text, (1 + T, H)."""
    no_ids = torch.zeros(1, 0, dtype=torch.long, device=model.talker.device)
    zero = torch.zeros(1, 1, model.talker.config.hidden_size, dtype=model.talker.dtype, device=model.talker.device)
    embeds, _ = model.generate_icl_prompt(no_ids, no_ids, codes.to(zero.device), zero, zero, non_streaming_mode=False)
    return embeds[0].cpu()


def template_key(method_name: str, kwargs: dict):
    """A key for all arguments except the text; None if one of them cannot be compared."""
    values = []
    for name, value in sorted(kwargs.items()):
        if name == "voice_clone_prompt":
            value = voice_key(value)
            if value is None:
                return None
        elif not (value is None or isinstance(value, str | int | float | bool)):
            return None
        values.append((name, type(value), value))
    return method_name, *values


def voice_key(prompt: dict | list | None):
    """The content of a voice_clone_prompt for one text; None if it is for several texts, or cannot be compared."""
    is_dict = isinstance(prompt, dict)  # its further entries are for further texts
    first = [prompt_field(prompt, name)[:1] for name in ("ref_spk_embedding", "x_vector_only_mode", "icl_mode")]
    if not all(first) or not (is_dict or len(prompt) == 1):
        return None
    (speaker,), (x_vector_only,), (in_context,) = first
    if not torch.is_tensor(speaker) or (is_dict and in_context is not False):
        return None
    reference = (prompt[0].ref_text, *content_of(prompt[0].ref_code)) if in_context else ()
    return bool(x_vector_only), reference, *content_of(speaker)


def content_of(tensor: torch.Tensor) -> tuple:
    """Equal for equal tensors. Reads their memory directly, because most calls of torch release the GIL."""
    tensor = tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()
    return tensor.dtype, tensor.shape, ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
