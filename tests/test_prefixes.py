"""Keys and values of a prompt's prefix are kept for requests with other texts, and the speech is the same."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import engine_of, joined, slow

from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast.rows import SharedRows
from qwen3_tts_cuda_graphs.speech.prefill import PrefixCache
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

STREAMING = dict(non_streaming_mode=False, max_new_tokens=6)


@pytest.fixture
def prepared(voices, monkeypatch):
    """prepared(name): a voice without kept prefixes, and a list that gets the rows of each prefill"""

    def prepare(name, end_comes_up=True):
        voice = voices(name).end_comes_up(end_comes_up)
        prefills, calls = voice.fast.speech.runner.prefills, []
        load = type(prefills).load
        kept_by(voice).clear()
        monkeypatch.setattr(
            prefills, "load", lambda rows, prefixes: calls.append(rows) or load(prefills, rows, prefixes)
        )
        return voice, calls

    return prepare


def kept_by(voice):
    return voice.fast.speech.runner.prefills.prefix_cache.prefixes


def speak(voice, text="Hello there.", seed=0, **arguments):
    torch.manual_seed(seed)
    return joined(stream(getattr(voice.fast, voice.method), text=text, **voice.arguments | STREAMING | arguments))


def upstreams(voice, text="Hello there.", seed=0, **arguments):
    torch.manual_seed(seed)
    method = getattr(voice.upstream, voice.method)
    (audio,), _ = method(text=[text], **voice.arguments | STREAMING | arguments)
    return audio


def assert_same(audio, expected):
    assert len(audio) == len(expected)
    np.testing.assert_allclose(audio, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["x-vector", *slow("preset", "designed")])
def test_another_text_reads_no_prefix(prepared, name):
    """With a kept prefix the tokens are upstream's, and the audio equals that without one to the bit."""
    texts = ["Hello there.", "Hi", "One, two, three, and so on."]
    voice, prefills = prepared(name)
    without = []
    for text in texts:
        kept_by(voice).clear()
        without.append(speak(voice, text))
    kept_by(voice).clear()
    prefills.clear()
    for text, expected in zip(texts * 2, without * 2):
        np.testing.assert_array_equal(speak(voice, text), expected)
    assert_same(expected, upstreams(voice, text))
    assert len(prefills) == len(kept_by(voice)) == 1


def test_each_voice_and_language_has_its_own(prepared):
    voice, prefills = prepared("x-vector", end_comes_up=False)
    speaker = torch.load(voice.folder / "speaker.pt", weights_only=True)
    variants = [
        dict(voice_clone_prompt=speaker_prompt(speaker * scale), language=language)
        for scale, language in ((1.0, "English"), (2.0, "English"), (2.0, "German"))
    ]
    for variant in variants:
        speak(voice, seed=1, **variant)
    for variant in variants:
        assert_same(speak(voice, **variant), upstreams(voice, **variant))
    assert len(prefills) == len(kept_by(voice)) == 3


def test_a_text_that_arrives_and_streams_together(prepared):
    """All later requests use the prefix that the first one has left."""
    voice, prefills = prepared("x-vector")
    expected = speak(voice)
    assert_same(speak(voice, iter(["Hel", "lo th", "ere."])), expected)
    method = voice.fast.generate_voice_clone
    with engine_of(voice.fast, 4) as engine:
        arguments = voice.arguments | STREAMING
        audios, _ = engine.generate(method, text=["Hello there."] * 4, seed=5, **arguments)
    for number, audio in enumerate(audios):
        assert_same(audio, speak(voice, seed=5 + number))
    assert len(prefills) == 1


@pytest.mark.parametrize("name", ["in-context", "x-vector"])
def test_text_or_recording_in_the_prompt_is_not_kept(prepared, name):
    """Such a prefix would not be used again."""
    voice, prefills = prepared(name)
    for _ in range(2):
        speak(voice, non_streaming_mode=name == "x-vector")
    assert len(prefills) == 2 and not kept_by(voice)


def test_those_used_last_are_kept(voices):
    """The kept prefixes together have at most as many positions as a row."""
    config = voices("x-vector").fast.model.talker.config
    rows = SharedRows(config, 2, 64, torch.float32, torch.device("cpu"))
    prefixes = PrefixCache(rows)

    def utterance(number, row=0):
        one = Utterance()
        one.row, one.request = row, SimpleNamespace(prefix=torch.zeros(20, 1), prefix_key=bytes([number]))
        return one

    for number in range(3):
        rows.whole_cache[0] = number
        prefixes.keep(utterance(number))
    assert prefixes.copy([utterance(0, row=1)]) == []
    assert (rows.keys[-1][1, :, :20] == 0).all()
    prefixes.keep(utterance(3))
    assert [*prefixes.prefixes] == [bytes([number]) for number in (2, 0, 3)]
    missing = utterance(1, row=1)
    assert prefixes.copy([missing, utterance(2, row=1)]) == [missing]
    assert (rows.values[0][1, :, :20] == 2).all() and (rows.values[0][1, :, 20:] == 0).all()
