"""Texts of any length, and speech that does not end."""

import re
import sys
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from helpers import GREEDY, joined

from qwen3_tts_cuda_graphs.cli import __main__ as cli
from qwen3_tts_cuda_graphs.cli import speaking
from qwen3_tts_cuda_graphs.prompts.cut import cut_by_estimate, sentences, split_text
from qwen3_tts_cuda_graphs.speech.accelerated import Accelerated
from qwen3_tts_cuda_graphs.speech.long_text import frame_limit, speak, stream_long
from qwen3_tts_cuda_graphs.speech.streaming import stream

SENTENCES = "Dr. Smith paid $3.50 to J. R. Jones. Really? Yes! ", "今天天气真好。我们去公园吧！", "Это тест. Да, так. "


@pytest.fixture
def voice(voices):
    return voices("x-vector").end_comes_up(True)


def no_longer_than(limit):
    return lambda text: len(text) <= limit


def test_texts_are_cut_at_sentence_ends():
    """Not after "Dr.", not within a number, and never in the middle of a sentence that fits."""
    cut = split_text([SENTENCES[0] * 2], no_longer_than(50), "English")
    assert cut == ["Dr. Smith paid $3.50 to J. R. Jones. Really? Yes!"] * 2
    assert split_text([SENTENCES[1]], no_longer_than(8), "Chinese") == ["今天天气真好。", "我们去公园吧！"]
    assert split_text(["One. Two.", "", " Three. "], no_longer_than(20)) == ["One. Two.", "Three."]


class Panic(BaseException):
    """As pyo3_runtime.PanicException: not an Exception."""


def panic(language, text):
    raise Panic("end byte index 10 is not a char boundary")


@pytest.mark.parametrize("splitter", [None, panic, lambda language, text: [text[3:]]], ids=["real", "panics", "loses"])
@pytest.mark.parametrize("limit", [1, 7, 30, 400])
def test_nothing_is_lost_and_everything_fits(limit, splitter, monkeypatch):
    """Sentences and words that are too long are cut, too: no text is dropped, repeated or too long."""
    if splitter:
        monkeypatch.setitem(sys.modules, "sentencex", SimpleNamespace(segment=splitter))
    gap = "\u2009" * 200  # "not enough values to unpack"
    paragraphs = ["".join(SENTENCES) * 3, "a" * 100, "word " * 50, "x", f"One.{gap}Two{gap}three. {gap}Four."]
    paragraphs += ["e" + "\u0301" * 5000, "；".join("今天天气真好") * 30, "สวัสดี" * 100, "0123456789abcdef" * 200]
    parts = split_text(paragraphs, no_longer_than(limit))
    assert max(map(len, parts)) <= limit
    assert re.sub(r"\s", "", "".join(parts)) == re.sub(r"\s", "", "".join(paragraphs))


@pytest.mark.parametrize("space", "\u00a0\u2003\u202f\u3000\u1680\u205f\x85\u2028", ids=ascii)
@pytest.mark.parametrize("language", [None, "German", "Chinese", "Russian"])
def test_a_text_that_sentencex_panics_at(space, language, capfd):
    """A capital, a space that is not ASCII and a full stop; its panic is no Exception, and is printed, too."""
    text = f"Take vitamin C{space}. And{space}more of it. Or Ж{space}. Yes."
    parts = split_text([text], no_longer_than(30), language)
    assert re.sub(r"\s", "", "".join(parts)) == re.sub(r"\s", "", text) and max(map(len, parts)) <= 30
    assert len(parts) == 2 and capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["1 " * 2000, "One sentence. " * 100 + "a " * 500, "x" * 1000, "Short."])
def test_few_counts_are_enough_for_an_estimate(text):
    """Each count stops the engine: a client stopped it for half a second with every text, once for each word."""
    counted = []
    parts = cut_by_estimate(text, 100, lambda part: counted.append(part) or len(part.replace(" ", "")))
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert all(len(part.replace(" ", "")) <= 100 for part in parts)
    assert len(counted) <= 1 + 2 * len(parts)


def test_a_splitter_that_fails_is_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", SimpleNamespace(segment=panic))
    parts = ["It is 3.5 m. ", "“Really?” ", "Yes!  ", "今天天气真好。", "我们去公园吧！ ", "One\n", "the rest"]
    assert sentences("".join(parts), None) == parts


@pytest.mark.parametrize(
    "text, limit, parts",
    [
        ("一二三四；五六：七八九，十", 6, ["一二三四；", "五六：", "七八九，十"]),
        ("xe\u0301\u0302xx", 4, ["xe\u0301\u0302", "xx"]),
    ],
)
def test_where_a_text_without_spaces_is_cut(text, limit, parts):
    """After a punctuation mark, and not between a letter and its accents."""
    assert split_text([text], no_longer_than(limit)) == parts


def test_the_largest_seed(voice):
    """The second utterance, or the second attempt, had a seed that torch does not take: it failed midway."""
    for retries in (0, 1):
        chunks = stream_long(
            voice.fast.generate_voice_clone,
            text="One.\nTwo.",
            seed=2**64 - 1,
            retries=retries,
            max_new_tokens=4,
            **voice.arguments,
        )
        assert len(joined(chunks)) > 0


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_a_recording_is_encoded_once(voice, recording, monkeypatch):
    """It was encoded for each paragraph, and the tokens that fit did not count its codes."""
    encode = voice.fast.create_voice_clone_prompt
    encoded = []

    def encode_and_count(*recording):
        encoded.append(encode(*recording))
        return encoded[-1]

    monkeypatch.setattr(voice.fast, "create_voice_clone_prompt", encode_and_count)
    method = voice.fast.generate_voice_clone
    chunks = stream_long(method, text=["One.\nTwo."], ref_audio=recording, ref_text="what it says", max_new_tokens=3)
    assert len(joined(chunks)) > 0 and len(encoded) == 1


@pytest.mark.slow
def test_200_000_characters(voice, monkeypatch):
    """A book: every utterance once and in order, and memory that does not grow with the text."""
    text = "\n".join(f"{number} {SENTENCES[number % 3] * 60}" for number in range(125))
    assert len(text) > 200_000
    spoken = []

    def recorded_stream(method, *, text, **kwargs):
        spoken.append(text)
        return stream(method, text=text, **kwargs)

    monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.stream", recorded_stream)
    chunks = stream_long(
        voice.fast.generate_voice_clone, text=text, max_tokens=2000, max_new_tokens=2, **voice.arguments, **GREEDY
    )
    seconds = 0.0
    chunks_heard = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the speech was cut off after 1 frames")
        for audio, rate in chunks:
            chunks_heard.append(weakref.ref(audio))
            assert sum(chunk() is not None for chunk in chunks_heard) <= 3
            seconds += len(audio) / rate
    assert "".join("".join(spoken).split()) == "".join(text.split())
    assert round(seconds, 2) == round(len(spoken) * 0.08 + (len(spoken) - 1) * 0.4, 2)


@pytest.fixture
def low_limits(monkeypatch):
    """So that the tests need not wait: 12 frames for "Hi"."""
    assert frame_limit(16) == 192 and frame_limit(100) == 1200
    monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.MIN_FRAME_LIMIT", 10)
    monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.FRAMES_PER_TOKEN", 6)


@pytest.mark.parametrize("make_text", [str, iter], ids=["whole", "arriving"])
def test_speech_that_does_not_end_is_stopped(voices, low_limits, make_text):
    """One run in 200 to 300 goes on until the cache is full: minutes of noise after a short sentence."""
    voice = voices("x-vector").end_comes_up(False)
    with pytest.warns(UserWarning, match="the speech of 'Hi' did not end: stopped after 1 s"):
        audio = joined(speak(voice.fast.generate_voice_clone, text=make_text("Hi"), **voice.arguments, **GREEDY))
    assert len(audio) == 12 * 1920


def test_speech_that_ends_is_not_touched(voice):
    """Neither the limit nor a retry may change speech that ends by itself."""
    torch.manual_seed(5)
    arguments = voice.arguments
    (expected,), _ = voice.fast.generate_voice_clone(text="Hi", **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for retries in (0, 2):
            audio = joined(speak(voice.fast.generate_voice_clone, text="Hi", seed=5, retries=retries, **arguments))
            np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)


def test_a_retry_speaks_with_another_seed(voice, monkeypatch):
    """The first attempt does not end and must not be heard; the second must not repeat its random numbers."""
    seeds = []
    original = Accelerated.seeded_generator
    monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.MIN_FRAME_LIMIT", 1)
    monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.FRAMES_PER_TOKEN", 0)

    def seeded_generator(speech, seed):
        seeds.append(seed)
        if len(seeds) == 2:
            monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.MIN_FRAME_LIMIT", 192)
        return original(speech, seed)

    monkeypatch.setattr(Accelerated, "seeded_generator", seeded_generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audio = joined(speak(voice.fast.generate_voice_clone, text="Hi", seed=5, retries=3, **voice.arguments))
    assert len(seeds) == 2 and seeds[0] == 5 and seeds[1] != 5
    assert len(audio) > 1920


def test_a_retry_after_a_full_cache(voices, monkeypatch):
    """Speech that fills the cache before it reaches its frame limit has not ended either. The warning is about what is
    heard: an attempt that is dropped gave one, too."""
    voice = voices("x-vector").end_comes_up(False)
    seeds = []
    original = Accelerated.seeded_generator
    monkeypatch.setattr(
        Accelerated, "seeded_generator", lambda speech, seed: seeds.append(seed) or original(speech, seed)
    )
    with pytest.warns(UserWarning, match="cut off after 4 frames") as caught:
        request = dict(text="Hi", max_new_tokens=5, **voice.arguments, **GREEDY)
        audio = joined(speak(voice.fast.generate_voice_clone, seed=5, retries=2, **request))
    assert len(set(seeds)) == 3 and len(audio) == 4 * 1920 and len(caught) == 1


@pytest.mark.parametrize("mistake", [dict(text=" "), dict(language="Klingon"), dict(temperature=-1.0), dict(seed="a")])
@pytest.mark.parametrize("function", [speak, stream_long])
def test_mistakes_raise_at_the_call(voice, function, mistake):
    """As those of `stream`: they were raised at the first chunk."""
    with pytest.raises(ValueError):
        function(voice.fast.generate_voice_clone, **dict(text="Hi") | voice.arguments | mistake)


@pytest.mark.parametrize("pause", [-1.0, float("inf"), float("nan")])
def test_a_pause_that_cannot_be(voice, pause):
    """It failed after the first utterance."""
    with pytest.raises(ValueError, match="pause"):
        stream_long(voice.fast.generate_voice_clone, text="Hi", pause=pause, **voice.arguments)


def test_a_stream_takes_a_seed(voice):
    """It went to upstream, which ignores what it does not know."""
    torch.manual_seed(5)
    (expected,), _ = voice.fast.generate_voice_clone(text="Hi", **voice.arguments)
    state = torch.get_rng_state()
    for text in ("Hi", iter(["Hi"])):
        audio = joined(stream(voice.fast.generate_voice_clone, text=text, seed=5, **voice.arguments))
        np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="seed"):
        stream(voice.fast.generate_voice_clone, text="Hi", seed=2**64, **voice.arguments)


def generate(folder, *arguments):
    command = ["--model", folder, "--speaker", folder / "speaker.pt", "--device", "cpu", "--max-seq-len", 300]
    return [str(word) for word in [*command, *arguments]]


@pytest.mark.parametrize("join", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["joined", "numbered"])
def test_resume(checkpoint, tmp_path, monkeypatch, capsys, join):
    """What an interrupted run has spoken is not spoken again, and the result is that of an uninterrupted run."""
    (tmp_path / "book.txt").write_text("One.\nTwo.\nThree. Four is longer. Five as well.\n")
    arguments = generate(
        checkpoint(), "--text-file", tmp_path / "book.txt", "--seed", 3, *["--join", "--pause", 0.1] * join
    )

    def speak_to(name, *more):
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments, "--output", str(tmp_path / name), *more])
        with warnings.catch_warnings():
            cli.main()
        return {path.name: path.read_bytes() for path in sorted(tmp_path.glob(f"{name.split('.')[0]}*.wav"))}

    whole = speak_to("whole.wav")
    spoken = []
    original = speaking.speak

    def interrupted_speak(*args, text, **kwargs):
        spoken.append(text)
        if len(spoken) == 3:
            raise KeyboardInterrupt
        return original(*args, text=text, **kwargs)

    monkeypatch.setattr(speaking, "speak", interrupted_speak)
    with pytest.raises(SystemExit):
        speak_to("again.wav")
    assert (tmp_path / "again.wav.parts").is_dir() and not (tmp_path / "again.wav").exists()
    kept = f"2 of 5 utterances are kept; the same command with --output {tmp_path / 'again.wav'} --resume continues"
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped: {kept}"
    (tmp_path / "again.wav.parts/.000002.wav.0123abcd").touch()  # a killed process leaves it
    if not join:  # a finished file that is gone is spoken again
        (tmp_path / "again-001.wav").unlink()
    resumed = speak_to("again.wav", "--resume")
    if join:  # the speed is that of what was spoken now
        line = capsys.readouterr().out
        found = re.search(r"([\d.]+) s of audio, ([\d.]+) s of it now in ([\d.]+) s, ([\d.]+) x real time", line)
        whole_seconds, now, wall, speed = map(float, found.groups())
        assert 0 < now < whole_seconds - 0.2 and speed == pytest.approx(now / wall, rel=0.1)
    rest = spoken[3:] if join else spoken[4:]
    assert spoken[:2] == ["One.", "Two."] and spoken[2] == rest[0] and not {*rest} & {"One.", "Two."}
    assert len({*rest}) == len(rest) and (join or spoken[3] == "One.")
    assert [*resumed.values()] == [*whole.values()]
    assert not (tmp_path / "again.wav.parts").exists()

    spoken.clear()
    with pytest.raises(SystemExit):
        speak_to("again.wav")
    (tmp_path / "book.txt").write_text("Another.\nText.\n")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        speak_to("again.wav", "--resume")
    assert "from another text or other options" in capsys.readouterr().err


def test_paragraphs_and_pauses(checkpoint, tmp_path, monkeypatch, capsys):
    """Wrapped lines of a book are one utterance; joined ones have silence between them."""
    (tmp_path / "book.txt").write_text("One\ntwo.\n\n\nThree.\n")
    out = tmp_path / "out.wav"
    words = generate(checkpoint(), "--text-file", tmp_path / "book.txt", "--output", out, "--paragraphs", "--join")
    texts = []
    original = speaking.speak
    monkeypatch.setattr(
        speaking, "speak", lambda *args, text, **kwargs: texts.append(text) or original(*args, text=text, **kwargs)
    )
    monkeypatch.setattr(sys, "argv", ["generate.py", *words, "--pause", "1"])
    with warnings.catch_warnings():
        cli.main()
    assert texts == ["One two.", "Three."]
    audio, rate = soundfile.read(out)
    zeros = np.cumsum(audio == 0)
    assert (zeros[rate:] - zeros[:-rate]).max() == rate  # a second of silence
