"""Texts of any length, and speech that does not end."""

import re
import sys
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import GREEDY, frame_limits, joined, watched

from qwen3_tts_cuda_graphs.prompts.cut import cut_by_estimate, sentences, split_text
from qwen3_tts_cuda_graphs.speech import long_text
from qwen3_tts_cuda_graphs.speech.long_text import frame_limit, speak, stream_long
from qwen3_tts_cuda_graphs.speech.streaming import stream

SENTENCES = "Dr. Smith paid $3.50 to J. R. Jones. Really? Yes! ", "今天天气真好。我们去公园吧！", "Это тест. Да, так. "


def no_longer_than(limit):
    return lambda text: len(text) <= limit


def test_texts_are_cut_at_sentence_ends():
    """A text is not cut after "Dr.", within a number, or in the middle of a sentence that fits."""
    cut = split_text([SENTENCES[0] * 2], no_longer_than(50), "English")
    assert cut == ["Dr. Smith paid $3.50 to J. R. Jones. Really? Yes!"] * 2
    assert split_text([SENTENCES[1]], no_longer_than(8), "Chinese") == ["今天天气真好。", "我们去公园吧！"]
    assert split_text(["One. Two.", "", " Three. "], no_longer_than(20)) == ["One. Two.", "Three."]


class Panic(BaseException):
    """Not an Exception, like pyo3_runtime.PanicException."""


def panic(language, text):
    raise Panic("end byte index 10 is not a char boundary")


def sentencex_with(splitter):
    return mock.patch.dict(sys.modules, sentencex=SimpleNamespace(segment=splitter)) if splitter else nullcontext()


@pytest.mark.parametrize("splitter", [None, panic, lambda language, text: [text[3:]]], ids=["real", "panics", "loses"])
@pytest.mark.parametrize("limit", [1, 7, 30, 400])
def test_nothing_is_lost_and_everything_fits(limit, splitter):
    """Sentences and words that are too long are cut, too: no text is dropped, repeated or too long."""
    gap = "\u2009" * 200  # "not enough values to unpack"
    paragraphs = ["".join(SENTENCES) * 3, "a" * 100, "word " * 50, "x", f"One.{gap}Two{gap}three. {gap}Four."]
    paragraphs += ["e" + "\u0301" * 5000, "；".join("今天天气真好") * 30, "สวัสดี" * 100, "0123456789abcdef" * 200]
    with sentencex_with(splitter):
        parts = split_text(paragraphs, no_longer_than(limit))
    assert max(map(len, parts)) <= limit
    assert re.sub(r"\s", "", "".join(parts)) == re.sub(r"\s", "", "".join(paragraphs))


@pytest.mark.parametrize("space", "\u00a0\u2003\u202f\u3000\u1680\u205f\x85\u2028", ids=ascii)
@pytest.mark.parametrize("language", [None, "German", "Chinese", "Russian"])
def test_a_text_that_sentencex_panics_at(space, language, capfd):
    """sentencex panics at a capital, a space that is not ASCII and a full stop. The panic is not an Exception, and a
    trace is printed."""
    text = f"Take vitamin C{space}. And{space}more of it. Or Ж{space}. Yes."
    parts = split_text([text], no_longer_than(30), language)
    assert re.sub(r"\s", "", "".join(parts)) == re.sub(r"\s", "", text) and max(map(len, parts)) <= 30
    assert len(parts) == 2 and capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["1 " * 2000, "One sentence. " * 100 + "a " * 500, "x" * 1000, "Short."])
def test_few_counts_are_enough_for_an_estimate(text):
    """Each count delays the engine. There was one for each word, and so half a second for every text of a client."""
    counted = []
    parts = cut_by_estimate(text, 100, lambda part: counted.append(part) or len(part.replace(" ", "")))
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert all(len(part.replace(" ", "")) <= 100 for part in parts)
    assert len(counted) <= 1 + 2 * len(parts)


def test_a_splitter_that_fails_is_replaced():
    parts = ["It is 3.5 m. ", "“Really?” ", "Yes!  ", "今天天气真好。", "我们去公园吧！ ", "One\n", "the rest"]
    with sentencex_with(panic):
        assert sentences("".join(parts), None) == parts


@pytest.mark.parametrize(
    "text, limit, parts",
    [
        ("一二三四；五六：七八九，十", 6, ["一二三四；", "五六：", "七八九，十"]),
        ("xe\u0301\u0302xx", 4, ["xe\u0301\u0302", "xx"]),
    ],
)
def test_where_a_text_without_spaces_is_cut(text, limit, parts):
    """It is cut after a punctuation mark, and not between a letter and its accents."""
    assert split_text([text], no_longer_than(limit)) == parts


def test_the_largest_seed(voice):
    """The second utterance or attempt had a seed that torch does not take, so the call failed midway."""
    request = dict(text="One.\nTwo.", seed=2**64 - 1, max_new_tokens=4, **voice.arguments)
    for retries in (0, 1):
        assert len(joined(stream_long(voice.fast_method, retries=retries, **request))) > 0


def test_a_recording_is_encoded_once(voice, recording):
    """The recording was encoded for each paragraph, and its codes were not counted for the tokens that fit."""
    encoded = []
    request = dict(text=["One.\nTwo."], ref_audio=recording, ref_text="what it says", max_new_tokens=3)
    with watched(voice.fast, "create_voice_clone_prompt", lambda *recording: encoded.append(recording)):
        assert len(joined(stream_long(voice.fast_method, **request))) > 0
    assert len(encoded) == 1


@pytest.mark.slow
def test_200_000_characters(voice):
    """Of a book, every utterance is spoken once and in order, and the memory does not grow with the text."""
    text = "\n".join(f"{number} {SENTENCES[number % 3] * 60}" for number in range(125))
    assert len(text) > 200_000
    spoken = []
    seconds = 0.0
    chunks_heard = []
    see = watched(long_text, "stream", lambda _, text, **__: spoken.append(text))
    with see, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the speech was cut off after 1 frames")
        request = dict(text=text, max_tokens=2000, max_new_tokens=2, **voice.arguments, **GREEDY)
        for audio, rate in stream_long(voice.fast_method, **request):
            chunks_heard.append(weakref.ref(audio))
            assert sum(chunk() is not None for chunk in chunks_heard) <= 3
            seconds += len(audio) / rate
    assert "".join("".join(spoken).split()) == "".join(text.split())
    assert round(seconds, 2) == round(len(spoken) * 0.08 + (len(spoken) - 1) * 0.4, 2)


@pytest.mark.parametrize("make_text", [str, iter], ids=["whole", "arriving"])
def test_speech_that_does_not_end_is_stopped(endless, make_text):
    """One run in 200 to 300 continues until the cache is full, with minutes of noise after a short sentence."""
    assert frame_limit(16) == 192 and frame_limit(100) == 1200
    stopped = pytest.warns(UserWarning, match="the speech of 'Hi' did not end: stopped after 1 s")
    with frame_limits(6, per_token=4), stopped:  # so that the test need not wait: 8 frames for "Hi", where a chunk ends
        chunks = [*speak(endless.fast_method, text=make_text("Hi"), **endless.arguments, **GREEDY)]
    assert len(joined(chunks)) == 8 * 1920
    assert all(len(audio) for audio, _ in chunks)  # FFmpeg had no memory for an empty one


def test_speech_that_ends_is_not_touched(voice):
    """Neither the limit nor a retry may change speech that ends by itself."""
    torch.manual_seed(5)
    arguments = voice.arguments
    (expected,), _ = voice.fast_method(text="Hi", **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for retries in (0, 2):
            audio = joined(speak(voice.fast_method, text="Hi", seed=5, retries=retries, **arguments))
            np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)


def test_a_retry_speaks_with_another_seed(voice):
    """The first attempt does not end, and its audio is not yielded. The second must have other random numbers."""
    seeds = []

    def see(seed):
        seeds.append(seed)
        long_text.MIN_FRAME_LIMIT = 192 if len(seeds) == 2 else 1

    with frame_limits(1, per_token=0), watched(voice.fast.speech, "seeded_generator", see), warnings.catch_warnings():
        warnings.simplefilter("error")
        audio = joined(speak(voice.fast_method, text="Hi", seed=5, retries=3, **voice.arguments))
    assert len(seeds) == 2 and seeds[0] == 5 and seeds[1] != 5
    assert len(audio) > 1920


def test_a_retry_after_a_full_cache(endless):
    """Speech that fills the cache before it reaches its frame limit has not ended either. Only the attempt that is
    yielded warns; a dropped one did, too."""
    seeds = set()
    request = dict(text="Hi", max_new_tokens=5, **endless.arguments, **GREEDY)
    cut_off = pytest.warns(UserWarning, match="cut off after 4 frames")
    with cut_off as caught, watched(endless.fast.speech, "seeded_generator", seeds.add):
        audio = joined(speak(endless.fast_method, seed=5, retries=2, **request))
    assert len(seeds) == 3 and len(audio) == 4 * 1920 and len(caught) == 1


@pytest.mark.parametrize("mistake", [dict(text=" "), dict(language="Klingon"), dict(temperature=-1.0), dict(seed="a")])
@pytest.mark.parametrize("function", [speak, stream_long])
def test_mistakes_raise_at_the_call(voice, function, mistake):
    """Mistakes raise at the call, as in `stream`. They were raised at the first chunk."""
    with pytest.raises(ValueError):
        function(voice.fast_method, **dict(text="Hi") | voice.arguments | mistake)


@pytest.mark.parametrize("pause", [-1.0, float("inf"), float("nan")])
def test_a_pause_that_cannot_be(voice, pause):
    """An invalid pause failed only after the first utterance."""
    with pytest.raises(ValueError, match="pause"):
        stream_long(voice.fast_method, text="Hi", pause=pause, **voice.arguments)


def test_a_stream_takes_a_seed(voice):
    """The seed was passed to upstream, which ignores unknown arguments."""
    torch.manual_seed(5)
    (expected,), _ = voice.fast_method(text="Hi", **voice.arguments)
    state = torch.get_rng_state()
    for text in ("Hi", iter(["Hi"])):
        audio = joined(stream(voice.fast_method, text=text, seed=5, **voice.arguments))
        np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="seed"):
        stream(voice.fast_method, text="Hi", seed=2**64, **voice.arguments)
