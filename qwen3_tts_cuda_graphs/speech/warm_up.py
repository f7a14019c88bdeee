"""The first request of a process is slow: libraries are loaded and memory is pinned. So `accelerate` makes two."""

import logging

import torch

from qwen3_tts_cuda_graphs.prompts.clone_prompts import speaker_prompt
from qwen3_tts_cuda_graphs.speech.streaming import stream

log = logging.getLogger("qwen3_tts_cuda_graphs")


def warm_up(tts) -> None:
    """Speak one frame twice: the first prompt is upstream's, the second one is made like it."""
    device = tts.speech.device
    try:
        method, voice = some_voice(tts)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a user's seed stays what it was
            for _ in range(2):
                chunks = stream(method, text="a", max_new_tokens=2, **voice)
                next(chunks)
                chunks.close()
    except Exception as error:  # such a request fails for the user too, or this model is unusual: both can be loaded
        log.info("the first request will be slower than the others: %s", error)
    tts.prompts.templates.clear()


def some_voice(tts) -> tuple:
    """A method that this kind of model has, and a voice for it."""
    config = tts.model.config.talker_config
    if tts.model.tts_model_type == "base":
        speaker = torch.zeros(config.hidden_size, device="cpu")
        return tts.generate_voice_clone, dict(voice_clone_prompt=speaker_prompt(speaker))
    if tts.model.tts_model_type == "custom_voice":
        return tts.generate_custom_voice, dict(speaker=next(iter(config.spk_id)), language="English")
    return tts.generate_voice_design, dict(instruct="")
