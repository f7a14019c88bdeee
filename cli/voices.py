"""Voices as upstream's methods take them: speaker embeddings, recordings, names of speakers, descriptions."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cli.options import REFERENCE_SILENCE, check_speaker_file
from cli.text_files import Pipe
from fast.prompts import speaker_prompt

PIPE_TIMEOUT = 600.0  # seconds that a line on stdin may stay unfinished


def load_speaker(path: str | Path, hidden_size: int) -> dict:
    """A speaker.pt as a voice_clone_prompt. Nothing in the file is executed."""
    check_speaker_file(path)
    try:
        speaker = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise ValueError(f"{path} is not a speaker file: make one with extract_speaker.py") from None
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float64
    is_vector = isinstance(speaker, torch.Tensor) and speaker.dtype in dtypes and speaker.dim() == 1
    if not is_vector or speaker.is_sparse:
        raise ValueError(f"{path} does not hold a speaker embedding: make one with extract_speaker.py")
    if len(speaker) != hidden_size:
        raise ValueError(
            f"{path} holds {len(speaker)} numbers, this model takes {hidden_size}: extract it again with the --model "
            "you speak with"
        )
    if not speaker.isfinite().all():
        raise ValueError(f"{path} has NaN or infinite values: make it again with extract_speaker.py")
    return speaker_prompt(speaker)


def clone_prompt(tts, audio: np.ndarray, rate: int, ref_text: str | None, silence: float = REFERENCE_SILENCE) -> list:
    """Upstream's voice_clone_prompt for a recording: in-context with a transcript, else its speaker embedding alone."""
    if ref_text:  # silence keeps the last phoneme of the recording out of the speech
        audio = np.append(audio, np.zeros(int(silence * rate), dtype=audio.dtype))
    with contextlib.redirect_stdout(sys.stderr):  # upstream prints warnings, and stdout may be the audio
        return tts.create_voice_clone_prompt((audio, rate), ref_text, x_vector_only_mode=not ref_text)


def voice_request(args: argparse.Namespace, tts) -> tuple[Callable, dict]:
    """Upstream's method for this voice, and its arguments except the text."""
    kind = args.config["tts_model_type"]
    request = {
        "language": args.language,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "repetition_penalty": args.repetition_penalty,
    }
    if args.non_streaming_mode is not None:
        request["non_streaming_mode"] = args.non_streaming_mode
    if isinstance(args.texts, Pipe):
        request["text_timeout"] = PIPE_TIMEOUT
    if kind == "custom_voice":
        return tts.generate_custom_voice, request | {"speaker": args.speaker, "instruct": args.instruct}
    if kind == "voice_design":
        return tts.generate_voice_design, request | {"instruct": args.instruct}

    prompt = args.voice
    if args.ref_audio:
        prompt = clone_prompt(
            tts, *args.voice, args.ref_text, silence=0 if args.no_append_silence else REFERENCE_SILENCE
        )
    return tts.generate_voice_clone, request | {"voice_clone_prompt": prompt}
