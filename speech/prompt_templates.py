"""Prompts that differ from an earlier one in their text only, put together without upstream's code.

Upstream takes a millisecond or two of Python for a prompt, which is a large part of the time to the first audio, and
most of it when many requests come at once. For requests without a reference recording the layout is simple:

    non_streaming_mode   prompt                                                         one row for each later frame
    False                prefix, first token + codec_bos                                the other tokens, end
    True                 prefix, tokens + codec_pad, end + codec_pad, pad + codec_bos   pad

The prefix (role, language, speaker, style) depends on the other arguments alone. It is taken from the first prompt that
upstream builds with them, and only if this layout then gives exactly what upstream gave. If it does not, upstream goes
on building these prompts. The second request finds this out: the first is not kept waiting for it.
"""

import collections
import functools
import logging
import threading

import numpy as np
import torch

log = logging.getLogger("qwen3_tts_cudagraphs")

ROLE_TOKENS = 3  # before the text: <|im_start|>, assistant, newline
CLOSING_TOKENS = 5  # after it: <|im_end|>, newline and the next role
MAX_TEMPLATES = 256


class PromptTemplate:
    def __init__(self, tts, talker, request: dict, ids: list[int]):
        """`request` is what upstream has built for the text with these tokens. `talker` is on the host."""
        config = tts.model.config
        codec = talker.get_input_embeddings().weight
        self.table = talker.get_text_embeddings().table
        self.request = request
        self.ids = ids
        self.end_id = config.tts_eos_token_id
        self.pad = self.table[config.tts_pad_token_id]
        self.codec_pad = codec[config.talker_config.codec_pad_id]
        self.codec_bos = codec[config.talker_config.codec_bos_id]

    @functools.cached_property
    def layout(self) -> tuple[torch.Tensor, bool] | None:
        """The prefix, and whether it is the streaming layout. None: neither gives what upstream has built."""
        for is_streaming, rows_after_prefix in ((True, 1), (False, len(self.ids) + 2)):
            prefix = self.request["inputs_embeds"][0, :-rows_after_prefix]
            if self.is_upstreams(self.fill_layout(prefix, is_streaming, self.ids)):
                return prefix, is_streaming
        log.info("upstream's prompts have another layout: upstream builds all of them")
        return None

    def fill(self, ids: list[int]) -> dict | None:
        """The request with a text of these tokens. None: only upstream can build it."""
        return self.fill_layout(*self.layout, ids) if self.layout else None

    def fill_layout(self, prefix: torch.Tensor, is_streaming: bool, ids: list[int]) -> dict:
        ids = torch.from_numpy(np.array([*ids, self.end_id]))  # numpy converts a long list fast
        text = self.table.index_select(0, ids)  # (T + 1, H): with the end
        if is_streaming:
            prompt = torch.cat([prefix, text[:1] + self.codec_bos])
            later = text[1:]
        else:
            prompt = torch.cat([prefix, text + self.codec_pad, (self.pad + self.codec_bos)[None]])
            later = self.pad[None]
        mask = torch.ones(1, len(prompt), dtype=torch.long, device="cpu")
        return self.request | dict(inputs_embeds=prompt[None], attention_mask=mask, trailing_text_hidden=later[None])

    def is_upstreams(self, filled: dict) -> bool:
        names = ("inputs_embeds", "attention_mask", "trailing_text_hidden")
        return all(torch.equal(filled[name], self.request[name]) for name in names)


class PromptTemplates:
    """The templates of the last requests, by everything that was asked for but the text."""

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
            if len(self.templates) > MAX_TEMPLATES:
                self.templates.popitem(last=False)

    def clear(self) -> None:
        with self.lock:
            self.templates.clear()


def template_key(method_name: str, kwargs: dict):
    """A key for all arguments but the text. None: there is something among them that cannot be compared."""
    values = []
    for name, value in sorted(kwargs.items()):
        if name == "voice_clone_prompt":
            value = speaker_key(value)
            if value is None:
                return None
        elif not (value is None or isinstance(value, str | int | float | bool)):
            return None
        values.append((name, type(value), value))
    return method_name, *values


def speaker_key(prompt):
    """The bytes of the speaker embedding of a prompt without a reference recording."""
    names = ("ref_spk_embedding", "x_vector_only_mode", "icl_mode")
    if isinstance(prompt, dict):
        columns = [prompt.get(name) for name in names]
        if not all(isinstance(column, list) and column for column in columns):
            return None
        speaker, x_vector_only, in_context = (column[0] for column in columns)  # the others are for further texts
    elif isinstance(prompt, list) and len(prompt) == 1:
        speaker, x_vector_only, in_context = (getattr(prompt[0], name, None) for name in names)
    else:
        return None
    if in_context is not False or not torch.is_tensor(speaker):
        return None
    content = speaker.contiguous().view(torch.uint8).numpy(force=True).tobytes()
    return str(speaker.dtype), tuple(speaker.shape), bool(x_vector_only), content
