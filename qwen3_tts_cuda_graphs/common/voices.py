"""Voices as arguments of upstream's methods: from speaker files, mixes of them, and recordings."""

import contextlib
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from qwen3_tts_cuda_graphs.common.samples import resample
from qwen3_tts_cuda_graphs.common.voice_files import REFERENCE_SILENCE, check_speaker_file, normalized_weights
from qwen3_tts_cuda_graphs.prompts.clone_prompts import prompt_field, speaker_prompt
from qwen3_tts_cuda_graphs.upstream import VoiceClonePromptItem


def load_speaker(file: str | Path | BinaryIO, hidden_size: int, path: str | Path | None = None) -> dict | list:
    """Load a speaker.pt, or a voice saved by upstream's demo, as a voice_clone_prompt. No code in it is executed.

    path: names the file in messages, if `file` is not a path
    """
    if path is None:
        path = file
        check_speaker_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # if something is wrong, an error follows
            speaker = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        raise ValueError(f"{path} is not a speaker file: make one with qwen3-tts clone") from None
    item = saved_item(speaker, path)
    if item:
        speaker = item["ref_spk_embedding"]
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float64
    is_vector = isinstance(speaker, torch.Tensor) and speaker.dtype in dtypes and speaker.dim() == 1
    if not is_vector or speaker.is_sparse or speaker.is_meta:
        raise ValueError(f"{path} does not hold a speaker embedding: make one with qwen3-tts clone")
    if len(speaker) != hidden_size:
        raise ValueError(
            f"{path} holds {len(speaker)} numbers, this model takes {hidden_size}: extract it again with the --model "
            "you speak with"
        )
    if not speaker.float().isfinite().all():
        raise ValueError(f"{path} has NaN or infinite values: make it again with qwen3-tts clone")
    return [in_context_item(item, path)] if item and item["icl_mode"] else speaker_prompt(speaker)


def load_speakers(files: Iterable[str | Path], weights: Iterable[float], hidden_size: int) -> dict | list:
    """Load a file, or mix several."""
    prompts = [load_speaker(file, hidden_size) for file in files]
    return prompts[0] if len(prompts) == 1 else mix_embeddings(prompts, weights)


def saved_item(content, path: str | Path) -> dict | None:
    """The fields of the voice in a file of upstream's demo, which holds {"items": [fields]}. None for other files."""
    if not isinstance(content, dict):
        return None
    items = content.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{path} does not hold a speaker embedding: make one with qwen3-tts clone")
    if len(items) != 1:
        raise ValueError(f"{path} holds {len(items)} voices: save one alone")
    item = dict.fromkeys(("ref_code", "ref_spk_embedding", "ref_text")) | items[0]
    for name in ("ref_code", "ref_spk_embedding"):
        if isinstance(item[name], list):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):  # what is no tensor is refused later
                item[name] = torch.tensor(item[name])
    item["icl_mode"] = bool(item.get("icl_mode", not item.get("x_vector_only_mode", False)))
    return item


def in_context_item(item: dict, path: str | Path):
    """The item of an in-context voice_clone_prompt."""
    codes, transcript = item["ref_code"], item["ref_text"]
    has_codes = torch.is_tensor(codes) and codes.dim() == 2 and not (codes.is_floating_point() or codes.is_complex())
    if not has_codes or not len(codes) or not isinstance(transcript, str) or not transcript.strip():
        raise ValueError(
            f"{path} has no recording or no transcript: save the voice again, or make one with qwen3-tts clone"
        )
    return VoiceClonePromptItem(codes.long(), item["ref_spk_embedding"], False, True, transcript)


def mix_embeddings(prompts: list[dict | list], weights: Iterable[float] | None = None) -> dict:
    """Mix voices: the weighted mean of their speaker embeddings, without any transcripts.

    prompts: voice_clone_prompts, of which the first embedding is taken
    weights: with any sum above 0; default: equal
    """
    speakers = [prompt_field(prompt, "ref_spk_embedding")[0].detach().cpu().float() for prompt in prompts]
    sizes = sorted({len(speaker) for speaker in speakers})
    if len(sizes) > 1:
        raise ValueError(f"voices of {sizes[0]} and {sizes[1]} numbers cannot be mixed: extract them with one model")
    shares = torch.tensor(normalized_weights(weights, len(speakers)))
    return speaker_prompt((shares[:, None] * torch.stack(speakers)).sum(0))


def clone_prompt(tts, audio: np.ndarray, rate: int, ref_text: str | None, silence: float = REFERENCE_SILENCE) -> list:
    """Upstream's voice_clone_prompt for a recording: in-context with a transcript, else its speaker embedding alone."""
    if ref_text:  # without silence the speech may begin with the recording's last phoneme
        audio = np.append(audio, np.zeros(int(silence * rate), dtype=audio.dtype))
    keep_stdout_clean(tts.model)
    wanted = tts.model.speaker_encoder_sample_rate  # it is also the codec's
    audio = resample(audio, rate, wanted)
    return tts.create_voice_clone_prompt((audio, wanted), ref_text, x_vector_only_mode=not ref_text)


def keep_stdout_clean(model) -> None:
    """Let upstream's model print its warnings about recordings to stderr, because stdout may be the audio. Only its
    module's `print` is replaced: sys.stdout is shared by all threads."""
    sys.modules[type(model).__module__].print = partial(print, file=sys.stderr)
