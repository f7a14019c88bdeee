"""Build requests. Upstream makes the first prompt of a voice; on a GPU those after it are made like it.

`accelerate` stores a `Prompts` as `tts.prompts`, so a method of the model is all that a request needs to be built.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial

import torch

from qwen3_tts_cuda_graphs.prompts.checks import check_text, model_of
from qwen3_tts_cuda_graphs.prompts.clone_prompts import (
    check_reference,
    check_speaker_size,
    reference_codes,
    with_voice_clone_prompt,
)
from qwen3_tts_cuda_graphs.prompts.host import one_thread, to_device
from qwen3_tts_cuda_graphs.prompts.request import Request, check_finite, request_of
from qwen3_tts_cuda_graphs.prompts.templates import (
    CLOSING_TOKENS,
    ROLE_TOKENS,
    PromptTemplate,
    PromptTemplates,
    template_key,
    tokenize,
)


def prepare_request(method: Callable, text: str | list[str], **kwargs) -> Request:
    """Build and check a request."""
    tts = model_of(method)
    request = tts.prompts.build(method, check_text(text), with_voice_clone_prompt(method, kwargs))
    tts.prompts.check(request)
    return request


class Prompts:
    """What the requests of one model are built with."""

    def __init__(self, tts, max_seq_len: int, host_talker=None):
        """host_talker: builds prompts on the host of a GPU, or None"""
        self.tts = tts
        self.talker = tts.model.talker
        self.on_gpu = self.talker.device.type == "cuda"
        self.max_seq_len = max_seq_len
        self.host_talker = host_talker
        self.templates = PromptTemplates()

    def check(self, request: Request) -> None:
        request.check(self.talker.config.codec_eos_token_id, self.max_seq_len)

    def build(self, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None = None) -> Request:
        """Have upstream build a request, or make it like an earlier one, on a GPU.

        kwargs: the method's other arguments, with a voice_clone_prompt in place of a recording
        token_ids: use these instead of tokenizing the text
        """
        if not self.host_talker:
            return self.build_by_upstream(method, text, kwargs, token_ids)
        with one_thread(), torch.no_grad():
            return self.build_like_earlier(method, text, kwargs, token_ids)

    def tokenize_together(self, texts: Iterable[str]) -> list[list[int]]:
        """`token_ids` of each text, on all cores, while other threads have the interpreter."""
        templated = [*map(self.tts._build_assistant_text, texts)]
        encodings = self.tts.processor.tokenizer.backend_tokenizer.encode_batch_fast(templated)
        return [[*itertools.compress(one.ids, one.attention_mask)] for one in encodings]  # the others are padding

    def build_like_earlier(self, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None) -> Request:
        key = template_key(method.__name__, kwargs)
        if key is None:
            return self.build_by_upstream(method, text, kwargs, token_ids)
        if token_ids is None:
            token_ids = tokenize(self.tts, self.tts._build_assistant_text(text))
        ids = token_ids[ROLE_TOKENS:-CLOSING_TOKENS]
        prompt = kwargs.get("voice_clone_prompt")
        template = self.templates.find(key)
        if template and (request := template.fill(ids, reference_codes(prompt))):
            return request
        request = self.build_by_upstream(method, text, kwargs, token_ids)
        if not template:
            with contextlib.suppress(ValueError):  # what will be refused is not kept
                self.check(request)
                self.templates.add(key, PromptTemplate(self, request, ids, prompt))
        return request

    def build_by_upstream(self, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None) -> Request:
        prompt = kwargs.get("voice_clone_prompt")
        reference = reference_codes(prompt)
        check_speaker_size(self.talker.config, prompt)
        check_reference(self.talker.config, reference)
        arguments = talker_arguments(method, text=text, token_ids=token_ids, **kwargs)
        return request_of(arguments, reference, self.on_gpu)

    @torch.no_grad()
    def embed_text(self, ids: list[int]) -> torch.Tensor:
        """What frames add for these tokens. -> (T, H)"""
        talker = self.host_talker or self.talker
        embeddings = talker.text_projection(
            talker.get_text_embeddings()(torch.tensor(ids, dtype=torch.long, device=talker.device))
        )
        return to_device(embeddings, self.talker.device)


# ---- Upstream's prompt code


class PromptBuilt(Exception):
    """Carries the arguments of talker.generate out of upstream's prompt code."""


def raise_arguments(**arguments):
    check_finite(arguments["inputs_embeds"])
    raise PromptBuilt(arguments)


def talker_arguments(method: Callable, *, text: str, token_ids: list[int] | None = None, **kwargs) -> dict:
    """Let upstream build a prompt. Returns the arguments that it would pass to talker.generate.

    The method runs on a shallow copy of the model whose talker.generate raises its arguments, so that other threads
    can use the model meanwhile. On a GPU the copy's talker is on the host, but for prompts with a reference recording,
    whose codes have embeddings that are summed.

    token_ids: use these instead of tokenizing the text
    """
    tts = copy.copy(method.__self__)
    host_talker = tts.prompts.host_talker
    tts.model = copy.copy(tts.model)
    tts.model._modules = dict(tts.model._modules)
    if host_talker is None or reference_codes(kwargs.get("voice_clone_prompt")) is not None:
        tts.model.talker = copy.copy(tts.model.talker)
    else:
        tts.model.talker = copy.copy(host_talker)
        tts.device = host_talker.device
        tts._tokenize_texts = partial(tokenize_texts, tts)
    tts.model.talker.generate = raise_arguments
    if token_ids is not None:
        templated = tts._build_assistant_text(text)
        tokenize_others = tts._tokenize_texts
        ids = torch.tensor([token_ids], device=tts.device)
        tts._tokenize_texts = lambda texts: [ids] if texts == [templated] else tokenize_others(texts)
    try:
        getattr(type(tts), method.__name__)(tts, text=text, **kwargs)
    except PromptBuilt as built:
        (arguments,) = built.args
        return arguments
    raise ValueError(f"{method.__name__} does not generate speech")


def tokenize_texts(tts, texts: list[str]) -> list[torch.Tensor]:
    """What upstream's _tokenize_texts returns, without the layers in between, which take a third of a prompt's time."""
    return [torch.tensor([tokenize(tts, text)], device="cpu") for text in texts]
