"""Programs written for qwen-tts, after its README, with one line added."""

import functools

import numpy as np
import pytest
import torch

from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.upstream import Qwen3TTSModel


@pytest.fixture(scope="module")
def pretrained(checkpoint):
    @functools.cache
    def pretrained(kind):
        model = Qwen3TTSModel.from_pretrained(str(checkpoint(kind)), device_map="cpu", dtype=torch.float32)
        model.generate_defaults["max_new_tokens"] = 12
        accelerate(model, max_seq_len=384)  # the added line
        return model

    return pretrained


def assert_audio(wavs, rate, count):
    assert rate == 24000 and len(wavs) == count
    for wav in wavs:
        assert wav.dtype == np.float32 and wav.ndim == 1 and len(wav) >= 1920 and 0 < np.abs(wav).max() <= 1


def test_custom_voice(pretrained):
    """One text and a list, each with its own speaker, language and instruction."""
    model = pretrained("custom_voice")
    assert "vivian" in model.get_supported_speakers() and "chinese" in model.get_supported_languages()
    text, angry = "其实我真的有发现。", "用特别愤怒的语气说"
    assert_audio(*model.generate_custom_voice(text=text, language="Chinese", speaker="Vivian", instruct=angry), 1)
    texts = [text, "She said she would be here by noon."]
    lists = dict(language=["Chinese", "English"], speaker=["Vivian", "Ryan"], instruct=["", "Very happy."])
    assert_audio(*model.generate_custom_voice(text=texts, **lists), 2)


def test_voice_design_then_clone(pretrained):
    """The audio of one model as the reference of another: as a prompt, and by its sound alone."""
    words = "H-hey! You dropped your... uh... calculus notebook?"
    wavs, rate = pretrained("voice_design").generate_voice_design(
        text=words, language="English", instruct="Male, 17 years old, tenor range"
    )
    assert_audio(wavs, rate, 1)
    reference = wavs[0], rate

    model = pretrained("base")
    prompt = model.create_voice_clone_prompt(ref_audio=reference, ref_text=words)
    sentences = ["No problem!", "What? No! I mean yes, but not like that."]
    for sentence in sentences:
        assert_audio(*model.generate_voice_clone(text=sentence, language="English", voice_clone_prompt=prompt), 1)
    assert_audio(*model.generate_voice_clone(text=sentences, language=["English"] * 2, voice_clone_prompt=prompt), 2)
    assert_audio(*model.generate_voice_clone(text="Alone.", ref_audio=reference, x_vector_only_mode=True), 1)


def test_tokenizer_there_and_back(pretrained, recording):
    """The speech tokenizer of an accelerated model still encodes, and decodes what it has encoded."""
    tokenizer = pretrained("base").model.speech_tokenizer
    wavs, rate = tokenizer.decode(tokenizer.encode(*recording))
    assert_audio(wavs, rate, 1)
    assert abs(len(wavs[0]) / rate - len(recording[0]) / recording[1]) < 0.1
