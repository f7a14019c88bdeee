"""Build requests. Upstream builds the first prompt of a voice; on a GPU the next ones are built from a template of it.

`accelerate` stores a `Prompts` as `tts.prompts`, so that a method of the model is enough to build a request.
"""

import collections
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

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


class Asked(NamedTuple):
    """The arguments from which a request is built."""

    method: Callable
    text: str
    kwargs: dict  # the method's other arguments, with a voice_clone_prompt in place of a recording
    token_ids: list[int] | None = None  # of the text in upstream's prompt format; None: tokenize it

    @property
    def text_ids(self) -> list[int]:
        """The tokens of the text alone."""
        return self.token_ids[ROLE_TOKENS:-CLOSING_TOKENS]

    @property
    def voice_clone_prompt(self) -> dict | list | None:
        return self.kwargs.get("voice_clone_prompt")

    @property
    def reference(self) -> torch.Tensor | None:
        return reference_codes(self.voice_clone_prompt)


class Prompts:
    """Builds the requests of one model."""

    def __init__(self, tts, max_seq_len: int, host_talker=None):
        """host_talker: to build prompts on the host, for a model on a GPU; None on a CPU"""
        self.tts = tts
        self.talker = tts.model.talker
        self.on_gpu = self.talker.device.type == "cuda"
        self.max_seq_len = max_seq_len
        self.host_talker = host_talker
        self.templates = PromptTemplates()

    def check(self, request: Request) -> None:
        request.check(self.talker.config.codec_eos_token_id, self.max_seq_len)

    def build(self, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None = None) -> Request:
        """Build a request: by upstream's code, or on a GPU from the template of an earlier one. The arguments are those
        of Asked."""
        (built,) = self.build_together([Asked(method, text, kwargs, token_ids)])
        if isinstance(built[0], Exception):
            raise built[0]
        return built[0]

    def build_together(self, asked: Sequence[Asked]) -> Iterator[dict[int, Request | Exception]]:
        """Build several requests, faster than one by one. Yields them as soon as they are built, by their index. If one
        cannot be built, its error is in its place."""
        asked = self.tokenize(asked)
        # The number of each request that is not built yet, and the key of its template
        left = {i: self.host_talker and template_key(one.method.__name__, one.kwargs) for i, one in enumerate(asked)}
        while left:
            built = self.build_from_templates(asked, left)
            if not built:  # upstream builds one, and others may be like it
                i, key = next(iter(left.items()))
                built = {i: self.build_by_upstream(asked[i], key)}
            for i in built:
                del left[i]
            yield built

    @torch.no_grad()
    def build_from_templates(self, asked: Sequence[Asked], keys: dict) -> dict[int, Request]:
        """Build those for which there is a template."""
        if not self.host_talker:
            return {}
        indices_of = collections.defaultdict(list)  # PromptTemplate -> the requests that it builds
        built = {}
        with one_thread():
            for i, key in keys.items():
                template = key and self.templates.find(key)
                if template and template.layout:
                    indices_of[template].append(i)
            for template, indices in indices_of.items():
                built |= zip(indices, template.fill([(asked[i].text_ids, asked[i].reference) for i in indices]))
        return built

    def tokenize(self, asked: Sequence[Asked]) -> list[Asked]:
        """Add the token_ids that are missing. Several texts are tokenized on all cores, without the GIL."""
        missing = [one for one in asked if one.token_ids is None]
        texts = [self.tts._build_assistant_text(one.text) for one in missing]
        if len(texts) == 1:
            ids = [tokenize(self.tts, *texts)]
        else:  # the tokenizer may pad them to the same length
            encodings = self.tts.processor.tokenizer.backend_tokenizer.encode_batch_fast(texts)
            ids = [[*itertools.compress(one.ids, one.attention_mask)] for one in encodings]
        found = iter(ids)
        return [one._replace(token_ids=next(found)) if one.token_ids is None else one for one in asked]

    @torch.no_grad()
    def build_by_upstream(self, asked: Asked, key) -> Request | Exception:
        """Returns its error if it cannot be built. key: of the template that is made of it, unless it will be refused;
        None: make no template"""
        try:
            with one_thread() if self.host_talker else contextlib.nullcontext():
                check_speaker_size(self.talker.config, asked.voice_clone_prompt)
                check_reference(self.talker.config, asked.reference)
                arguments = talker_arguments(asked.method, text=asked.text, token_ids=asked.token_ids, **asked.kwargs)
                request = request_of(arguments, asked.reference, self.on_gpu)
        except Exception as error:
            return error
        with contextlib.suppress(ValueError):
            if key and not self.templates.find(key):
                self.check(request)
                self.templates.add(key, PromptTemplate(self, request, asked.text_ids, asked.voice_clone_prompt))
        return request

    @torch.no_grad()
    def embed_text(self, ids: list[int]) -> torch.Tensor:
        """What the frames add to their embeddings for these tokens. -> (T, H)"""
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
    can use the model meanwhile. On a GPU the copy's talker is on the host, except for prompts with a reference
    recording: upstream sums the embeddings of its codes.

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
    """The result of upstream's _tokenize_texts, without its layers of Python."""
    return [torch.tensor([tokenize(tts, text)], device="cpu") for text in texts]
