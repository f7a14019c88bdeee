"""Audio while it is generated: the frames of the decoder, in chunks, through the codec that keeps its state.

The codec decodes a chunk on its own CUDA stream while the decoder computes the next frame, so `stream` yields a chunk
one frame after its codes exist. The first chunk is yielded at once.
"""

import copy
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from cudagraph_talker import Sampling


def stream(
    method: Callable, *, text: str | list[str], chunk_frames: int | None = None, **kwargs
) -> Iterator[tuple[np.ndarray, int]]:
    """Speak one text and yield (float32 samples, sample rate) while it is generated.

    method: tts.generate_voice_clone, generate_custom_voice or generate_voice_design of an accelerated model
    kwargs: its other arguments
    chunk_frames: frames of 80 ms per chunk. Default: 1, 1, 2, 4, 8, 8, ..., for an early start and then fewer chunks.

    The chunks joined are the audio of the whole call. Mistakes raise an error here, before the first chunk.
    """
    if chunk_frames is not None and chunk_frames < 1:
        raise ValueError(f"chunk_frames is {chunk_frames}, it must be at least 1")
    tts = method.__self__
    decoder = decoder_of(tts)
    request, _, reference = prepare_request(decoder, method, text, **kwargs)
    return audio_chunks(tts, decoder, request, reference, chunk_frames)


def prepare_request(decoder, method: Callable, text, **kwargs) -> tuple[dict, int, torch.Tensor | None]:
    """Build and check a request: arguments of talker.generate, the most frames, the codes that precede the speech."""
    decoder.lock.check_process()
    text = check_text(text)
    if kwargs.get("voice_clone_prompt") is None and kwargs.get("ref_audio") is not None:
        kwargs["voice_clone_prompt"] = method.__self__.create_voice_clone_prompt(
            kwargs.pop("ref_audio"), kwargs.pop("ref_text", None), kwargs.pop("x_vector_only_mode", False)
        )
    request = build_request(method, text=text, **kwargs)
    limit = check_request(decoder, request)
    return request, limit, reference_codes(kwargs.get("voice_clone_prompt"))


def audio_chunks(
    tts, decoder, request: dict, reference: torch.Tensor | None, chunk_frames: int | None
) -> Iterator[tuple[np.ndarray, int]]:
    codec = tts.model.speech_tokenizer.decode.__self__
    rate = tts.model.speech_tokenizer.get_output_sample_rate()
    sizes = itertools.repeat(chunk_frames) if chunk_frames else growing_chunks()
    size = next(sizes)
    frames = []  # codes that wait for their chunk to be full
    wait_for_audio = None  # returns the samples of the chunk that the codec is decoding
    is_first = True

    with decoder.lock.take() as turn:
        codec.reset()
        if reference is not None:
            codec.feed(reference)  # prime the codec with the reference and discard that audio
        for codes, _ in decoder.frames(**request):
            if wait_for_audio is not None:  # the codec worked while this frame was computed
                with turn.paused():
                    yield wait_for_audio(), rate
                wait_for_audio = None
            frames.append(codes[0])
            if len(frames) == size:
                wait_for_audio = codec.feed(torch.stack(frames))
                frames = []
                size = next(sizes)
            if wait_for_audio is not None and is_first:
                is_first = False
                with turn.paused():
                    yield wait_for_audio(), rate
                wait_for_audio = None
        rest = [wait_for_audio, codec.feed(torch.stack(frames)) if frames else None]
    for wait_for_audio in filter(None, rest):
        yield wait_for_audio(), rate


def growing_chunks() -> Iterator[int]:
    """Frames per chunk: an early start, then fewer chunks."""
    return itertools.chain((1, 1, 2, 4), itertools.repeat(8))


def decoder_of(tts):
    """The Decoder that `accelerate` has put in the place of talker.generate."""
    decoder = getattr(tts.model.talker.generate, "__self__", None)
    if not hasattr(decoder, "frames"):
        raise ValueError("stream needs an accelerated model: call accelerate(tts) first")
    return decoder


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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a character that UTF-8 cannot encode: {text[error.start]!r}") from None
    return text


def check_request(decoder, request: dict) -> int:
    """Raise an error for settings and prompts that cannot be decoded. Returns the most frames there can be."""
    for names in (
        ("do_sample", "temperature", "top_k", "top_p"),
        ("subtalker_dosample", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
    ):
        Sampling(vocab_size=1).set(*(request[name] for name in names))
    if request["eos_token_id"] != decoder.talker.config.codec_eos_token_id:
        raise ValueError("stream decodes up to the model's own end token: another eos_token_id is for whole calls")
    return decoder.frame_limit(**request)


class RequestBuilt(Exception):
    """Carries the arguments of talker.generate out of upstream's prompt code."""


def raise_request(**request):
    raise RequestBuilt(request)


def build_request(method: Callable, **kwargs) -> dict:
    """Let upstream build a prompt and return what it would pass to talker.generate.

    The method runs on a shallow copy of the model whose talker.generate raises its arguments, so that other threads
    can use the model meanwhile.
    """
    tts = copy.copy(method.__self__)
    tts.model = copy.copy(tts.model)
    tts.model._modules = dict(tts.model._modules)
    tts.model.talker = copy.copy(tts.model.talker)
    tts.model.talker.generate = raise_request
    try:
        getattr(tts, method.__name__)(**kwargs)
    except RequestBuilt as built:
        (request,) = built.args
        return request
    raise ValueError(f"{method.__name__} does not generate speech")


def reference_codes(voice_clone_prompt) -> torch.Tensor | None:
    """The codes (T, 16) that precede the speech in in-context cloning."""
    if not voice_clone_prompt:
        return None
    if isinstance(voice_clone_prompt, dict):
        codes = voice_clone_prompt.get("ref_code")
    else:
        codes = [item.ref_code for item in voice_clone_prompt]
    return codes[0] if codes else None
