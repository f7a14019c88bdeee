"""Upstream's voice_clone_prompt, in either of its forms: a dict of lists, or a list of VoiceClonePromptItem."""

from collections.abc import Callable

import torch


def speaker_prompt(speaker: torch.Tensor, texts: int = 1) -> dict:
    """The prompt of one speaker embedding, for this many texts."""
    return {
        "ref_code": None,
        "ref_spk_embedding": [speaker] * texts,
        "x_vector_only_mode": [True] * texts,
        "icl_mode": [False] * texts,
    }


def with_voice_clone_prompt(method: Callable, kwargs: dict) -> dict:
    """The method's arguments, with a voice_clone_prompt in place of a recording, which is encoded here."""
    if kwargs.get("voice_clone_prompt") is not None or kwargs.get("ref_audio") is None:
        return kwargs
    kwargs = dict(kwargs)
    recording = kwargs.pop("ref_audio"), kwargs.pop("ref_text", None), kwargs.pop("x_vector_only_mode", False)
    return kwargs | {"voice_clone_prompt": method.__self__.create_voice_clone_prompt(*recording)}


def prompt_field(voice_clone_prompt: dict | list | None, name: str) -> list:
    """The values of this field, one for each text."""
    if isinstance(voice_clone_prompt, dict):
        return voice_clone_prompt.get(name) or []
    return [getattr(item, name) for item in voice_clone_prompt or []]


def reference_codes(voice_clone_prompt) -> torch.Tensor | None:
    """The codes (T, 16) that precede the speech in in-context cloning."""
    codes = prompt_field(voice_clone_prompt, "ref_code")
    return codes[0] if codes else None


def is_in_context(voice_clone_prompt) -> bool:
    return isinstance(voice_clone_prompt, list) and voice_clone_prompt[0].icl_mode


def is_on_gpu(voice_clone_prompt) -> bool:
    names = ("ref_spk_embedding", "ref_code")
    tensors = (tensor for name in names for tensor in prompt_field(voice_clone_prompt, name))
    return any(torch.is_tensor(tensor) and tensor.is_cuda for tensor in tensors)


def check_speaker_size(config, voice_clone_prompt) -> None:
    """Refuse a speaker embedding of another model size."""
    width = config.hidden_size
    for speaker in prompt_field(voice_clone_prompt, "ref_spk_embedding"):
        if torch.is_tensor(speaker) and speaker.numel() != width:
            raise ValueError(
                f"the speaker embedding has {speaker.numel()} numbers, this model takes {width}: extract it with this "
                "model"
            )


def check_reference(config, codes: torch.Tensor | None) -> None:
    """Refuse codes beyond the codebooks: they would make a kernel fail, and with it all other requests."""
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
