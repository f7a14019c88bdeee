"""Two requests that `accelerate` makes, as the first one of a process is slow: it loads libraries and pins memory."""

import logging

import torch

from qwen3_tts_cuda_graphs.prompts.clone_prompts import speaker_prompt
from qwen3_tts_cuda_graphs.speech.streaming import stream

log = logging.getLogger("qwen3_tts_cuda_graphs")


def warm_up(tts) -> None:
    """Speak one frame twice: upstream builds the first prompt, and the second is made from it as a template."""
    device = tts.speech.device
    try:
        method, voice = some_voice(tts)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # keeps the state of a user's seed
            for _ in range(2):
                chunks = stream(method, text="a", max_new_tokens=2, **voice)
                next(chunks)
                chunks.close()
    except Exception as error:  # an unusual model; loading goes on, and the user's own request shows the error
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
