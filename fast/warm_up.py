"""The first request of a process is slow: libraries are loaded and memory is pinned. So `accelerate` makes one."""

import torch

from fast.prompt_templates import PromptTemplates
from fast.streaming import stream

LEAST_POSITIONS = 64  # room for any voice's prompt


def warm_up(tts, decoder) -> None:
    """Speak one frame twice: the first prompt is upstream's, the second one is made like it."""
    method, voice = some_voice(tts)
    if method is None or decoder.max_seq_len < LEAST_POSITIONS:
        return
    with torch.random.fork_rng([decoder.talker.device]):  # a user's seed stays what it was
        for _ in range(2):
            chunks = stream(method, text="a", max_new_tokens=4, **voice)
            next(chunks)
            chunks.close()
    decoder.prompt_templates = PromptTemplates()


def some_voice(tts) -> tuple:
    """A method that this kind of model has, and a voice for it. None: a kind that is not known."""
    config = tts.model.config.talker_config
    kind = tts.model.tts_model_type
    if kind == "base":
        speaker = torch.zeros(config.hidden_size)
        prompt = dict(ref_code=[None], ref_spk_embedding=[speaker], x_vector_only_mode=[True], icl_mode=[False])
        return tts.generate_voice_clone, dict(voice_clone_prompt=prompt)
    if kind == "custom_voice" and config.spk_id:
        return tts.generate_custom_voice, dict(speaker=next(iter(config.spk_id)))
    if kind == "voice_design":
        return tts.generate_voice_design, dict(instruct="")
    return None, {}
