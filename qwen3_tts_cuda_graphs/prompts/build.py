"""Requests: upstream builds the prompt, and everything that could fail in a frame is checked before the first."""

import contextlib
import copy
import ctypes
import math
import os
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from numbers import Integral
from pathlib import Path

import torch

from cudagraph_talker import Sampling
from qwen3_tts_cuda_graphs.prompts.templates import CLOSING_TOKENS, ROLE_TOKENS, PromptTemplate, template_key, tokenize

EMBEDDINGS = ("inputs_embeds", "trailing_text_hidden", "tts_pad_embed")  # of a request


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors on the host: torch stays in this thread. Waking its OpenMP threads can take longer than the first
    audio does, on a busy or virtual machine. `torch.set_num_threads` would change the whole process."""
    threads = torch.get_num_threads()  # first: in a new thread, torch's first look sets the number
    set_omp_threads = find_omp_set_num_threads()
    set_omp_threads(1)
    try:
        yield
    finally:
        set_omp_threads(threads)


@cache
def find_omp_set_num_threads() -> Callable[[int], None]:
    """OpenMP's function for the calling thread, from the library that torch is linked with. It keeps the GIL."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        return ctypes.PyDLL(str(library), os.RTLD_NOW | os.RTLD_NOLOAD).omp_set_num_threads
    except (OSError, AttributeError):  # another layout, or built without OpenMP
        return lambda threads: None


def prepare_request(speech, method: Callable, text, **kwargs) -> tuple[dict, torch.Tensor | None]:
    """Build and check a request: what `request_for` returns, and the codes that precede the speech."""
    speech.turns.check_process()
    text = check_text(text)
    kwargs = with_voice_clone_prompt(method, kwargs)
    request = request_for(speech, method, text, kwargs)
    check_request(speech, request)
    return request, reference_codes(kwargs.get("voice_clone_prompt"))


def with_voice_clone_prompt(method: Callable, kwargs: dict) -> dict:
    """Encode a reference recording here, so that its codes are known."""
    if kwargs.get("voice_clone_prompt") is not None or kwargs.get("ref_audio") is None:
        return kwargs
    kwargs = dict(kwargs)
    recording = kwargs.pop("ref_audio"), kwargs.pop("ref_text", None), kwargs.pop("x_vector_only_mode", False)
    return kwargs | {"voice_clone_prompt": method.__self__.create_voice_clone_prompt(*recording)}


def check_speaker_size(config, voice_clone_prompt) -> None:
    """Refuse an embedding of the other model size."""
    width = config.hidden_size
    for speaker in prompt_field(voice_clone_prompt, "ref_spk_embedding"):
        if torch.is_tensor(speaker) and speaker.numel() != width:
            raise ValueError(
                f"the speaker embedding has {speaker.numel()} numbers, this model takes {width}: extract it with this "
                "model"
            )


def speech_of(method: Callable):
    """The Speech of the model whose method this is."""
    tts = getattr(method, "__self__", None)
    if tts is None:
        raise ValueError(f"{method} belongs to no model: give a method of a loaded one, as tts.generate_voice_clone")
    if not hasattr(tts, "speech"):
        raise ValueError("this model is not accelerated: call accelerate(tts) first")
    return tts.speech


def check_text(text: str | list[str]) -> str:
    """One text that can be spoken."""
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


def check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a character that UTF-8 cannot encode: {text[error.start]!r}") from None


def check_counts(**values) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} is {value}, it must be a whole number of at least 1")


def check_text_timeout(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"text_timeout is {seconds}, it must be above 0 and finite, in seconds")


def check_request(speech, request: dict) -> None:
    """Raise an error for settings and prompts that cannot be decoded."""
    for names in (
        ("do_sample", "temperature", "top_k", "top_p"),
        ("subtalker_dosample", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
    ):
        check_sampling(*(request[name] for name in names))
    if request["eos_token_id"] != speech.talker.config.codec_eos_token_id:
        raise ValueError("stream decodes up to the model's own end token: another eos_token_id is for whole calls")
    if not isinstance(request["max_new_tokens"], Integral | None):
        raise ValueError(f"max_new_tokens is {request['max_new_tokens']}, it must be a whole number")
    frame_limit(speech.max_seq_len, **request)  # raises an error if there is no room for a frame
    check_text_fits(speech.max_seq_len, **request)


def frame_limit(max_seq_len: int, attention_mask, max_new_tokens, repetition_penalty, **_) -> int:
    """The most frames that a request can have. Raises an error if it cannot have any."""
    used = attention_mask.shape[1]
    if used >= max_seq_len:
        raise ValueError(f"the prompt takes {used} of {max_seq_len} positions: raise max_seq_len")
    max_new_tokens = 20 - used if max_new_tokens is None else max_new_tokens  # as transformers: its max_length
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 2: the last has no audio")
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty is {repetition_penalty}, it must be above 0: 1.0 for none")
    return min(max_new_tokens - 1, max_seq_len - used)


def check_text_fits(max_seq_len: int, attention_mask, inputs, max_new_tokens, **_) -> None:
    """Each frame takes one token of the text that the prompt has not. So text may be too long for any speech."""
    used, frames = attention_mask.shape[1], inputs.shape[0] - 2
    is_cut_by_the_caller = max_new_tokens is None or max_new_tokens - 1 <= max_seq_len - used
    if used + frames > max_seq_len and not is_cut_by_the_caller:
        raise ValueError(f"the text takes at least {used + frames} of {max_seq_len} positions: raise max_seq_len")


@lru_cache(maxsize=256, typed=True)
def check_sampling(do_sample, temperature, top_k, top_p) -> None:
    """Cached: most requests have the same settings, and this makes tensors."""
    if not isinstance(top_k, Integral | None):
        raise ValueError(f"top_k is {top_k}, it must be a whole number, or 0 or None for all")
    Sampling(vocab_size=1, rows=1).set(do_sample, temperature, top_k, top_p)


def request_for(speech, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None = None) -> dict:
    """What upstream would pass to talker.generate, `in_parts`: built by upstream, or like an earlier request on a GPU.

    token_ids: use these instead of tokenizing the text
    """
    if not speech.host_talker:
        return build_in_parts(speech, method, text, kwargs, token_ids)
    with one_thread(), torch.no_grad():
        return request_like_earlier(speech, method, text, kwargs, token_ids)


def request_like_earlier(speech, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None) -> dict:
    key = template_key(method.__name__, kwargs)
    if key is None:
        return build_in_parts(speech, method, text, kwargs, token_ids)
    tts = method.__self__
    if token_ids is None:
        token_ids = tokenize(tts, tts._build_assistant_text(text))
    ids = token_ids[ROLE_TOKENS:-CLOSING_TOKENS]
    template = speech.prompt_templates.find(key)
    if template and (request := template.fill(ids)):
        return request
    request = build_in_parts(speech, method, text, kwargs, token_ids)
    if not template:
        frame_limit(speech.max_seq_len, **request)  # what does not fit is refused, and not kept
        template = PromptTemplate(speech, request, ids, kwargs.get("voice_clone_prompt"))
        speech.prompt_templates.add(key, template)
    return request


def build_in_parts(speech, method: Callable, text: str, kwargs: dict, token_ids: list[int] | None) -> dict:
    prompt = kwargs.get("voice_clone_prompt")
    reference = reference_codes(prompt)
    check_speaker_size(speech.talker.config, prompt)
    check_reference(speech.talker.config, reference)
    request = build_request(method, text=text, token_ids=token_ids, **kwargs)
    return in_parts(request, speech.on_gpu, has_reference=reference is not None)


@torch.no_grad()
def in_parts(request: dict, on_gpu: bool, has_reference: bool = False) -> dict:
    """The request of one text with its embeddings as the runner reads them:

    prefix: of the prompt but for its last position (L, H)
    prefix_key: the same as bytes, if requests with other texts have it, too
    inputs: the last position, the text of each frame, and what follows the text (1 + T + 1, H)
    """
    request = request | dict(suppress_tokens=tuple(request["suppress_tokens"]))  # which `HostSettings` looks up
    prompt, later, pad = (request.pop(name)[0] for name in EMBEDDINGS)
    prefix = prompt[:-1]
    # A prefix holds text if none is left for the frames (non_streaming_mode), or if there is a transcript. Prompts on a
    # GPU have a recording, or come from a direct call of talker.generate.
    is_shared = not (has_reference or prompt.is_cuda or torch.equal(later, pad))
    key = prefix.contiguous().view(torch.uint8).numpy().tobytes() if is_shared else None
    inputs = prompt.new_empty(len(later) + 2, prompt.shape[1], pin_memory=on_gpu and not prompt.is_cuda)
    torch.cat([prompt[-1:], later, pad], out=inputs)
    return request | dict(prefix=prefix, prefix_key=key, inputs=inputs)


class RequestBuilt(Exception):
    """Carries the arguments of talker.generate out of upstream's prompt code."""


def raise_request(**request):
    check_finite(request)
    raise RequestBuilt(request)


def check_finite(request: dict) -> None:
    if not request["inputs_embeds"].isfinite().all():
        raise ValueError("the prompt has NaN or infinite values: extract the speaker or the reference again")


def build_request(method: Callable, *, text: str, token_ids: list[int] | None = None, **kwargs) -> dict:
    """Let upstream build a prompt and return what it would pass to talker.generate.

    The method runs on a shallow copy of the model whose talker.generate raises its arguments, so that other threads
    can use the model meanwhile. On a GPU the copy's talker is on the host, but for prompts with a reference recording,
    whose codes have embeddings that are summed.

    token_ids: use these instead of tokenizing the text
    """
    tts = copy.copy(method.__self__)
    host_talker = tts.speech.host_talker
    tts.model = copy.copy(tts.model)
    tts.model._modules = dict(tts.model._modules)
    if host_talker is None or reference_codes(kwargs.get("voice_clone_prompt")) is not None:
        tts.model.talker = copy.copy(tts.model.talker)
    else:
        tts.model.talker = copy.copy(host_talker)
        tts.device = host_talker.device
        tts._tokenize_texts = partial(tokenize_texts, tts)
    tts.model.talker.generate = raise_request
    if token_ids is not None:
        templated = tts._build_assistant_text(text)
        tokenize_others = tts._tokenize_texts
        ids = torch.tensor([token_ids], device=tts.device)
        tts._tokenize_texts = lambda texts: [ids] if texts == [templated] else tokenize_others(texts)
    try:
        with one_thread() if host_talker else contextlib.nullcontext():
            getattr(type(tts), method.__name__)(tts, text=text, **kwargs)
    except RequestBuilt as built:
        (request,) = built.args
        return request
    raise ValueError(f"{method.__name__} does not generate speech")


def tokenize_texts(tts, texts: list[str]) -> list[torch.Tensor]:
    """What upstream's _tokenize_texts returns, without the layers in between, which take a third of a prompt's time."""
    return [torch.tensor([tokenize(tts, text)], device="cpu") for text in texts]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for the GPU: from pinned memory."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def speaker_prompt(speaker: torch.Tensor, rows: int = 1) -> dict:
    """Upstream's voice_clone_prompt for `rows` texts with one speaker embedding."""
    return {
        "ref_code": None,
        "ref_spk_embedding": [speaker] * rows,
        "x_vector_only_mode": [True] * rows,
        "icl_mode": [False] * rows,
    }


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


def reference_codes(voice_clone_prompt) -> torch.Tensor | None:
    """The codes (T, 16) that precede the speech in in-context cloning."""
    codes = prompt_field(voice_clone_prompt, "ref_code")
    return codes[0] if codes else None


def is_on_gpu(voice_clone_prompt) -> bool:
    names = ("ref_spk_embedding", "ref_code")
    tensors = (tensor for name in names for tensor in prompt_field(voice_clone_prompt, name))
    return any(torch.is_tensor(tensor) and tensor.is_cuda for tensor in tensors)


def prompt_field(voice_clone_prompt: dict | list | None, name: str) -> list:
    """A field of a voice_clone_prompt in either of upstream's forms, one entry for each text."""
    if isinstance(voice_clone_prompt, dict):
        return voice_clone_prompt.get(name) or []
    return [getattr(item, name) for item in voice_clone_prompt or []]
