"""On a CPU in float32 the tokens are upstream's, element by element, whatever the voice and the settings."""

import pytest
import torch
from helpers import GREEDY, VOICES

import generate

FRAMES = dict(max_new_tokens=18)  # 17 frames: the last token has no audio, and the text ends before
SETTINGS = {
    "greedy": GREEDY,
    "published defaults": dict(),
    "cooler": dict(temperature=0.7, top_k=20, top_p=0.8),
    "no penalty": dict(repetition_penalty=1.0),
    "more penalty": dict(repetition_penalty=1.3),
    "predictor apart": dict(subtalker_temperature=0.6, subtalker_top_k=10, subtalker_top_p=0.7),
    "the other text mode": dict(non_streaming_mode=None),
    "short text": dict(text="Hi"),
    "long text": dict(text="Much more to say than there is time for. " * 5),
}
# All settings with one voice, two of them with every voice; the others are slow tests.
CASES = [
    pytest.param(
        voice,
        settings,
        marks=() if voice == "x-vector" or settings in ("greedy", "published defaults") else pytest.mark.slow,
    )
    for voice in VOICES
    for settings in SETTINGS
]
TEXTS = ["Hello there.", "Hi", "A sentence that is a good deal longer than the other two, and takes its time to end."]


@pytest.mark.parametrize("voice, settings", CASES)
def test_one_text(voices, voice, settings):
    """A setting that does not reach the sampler, or a wrong position or mask, changes the tokens."""
    request = dict(text="Hello there.") | FRAMES | SETTINGS[settings]
    if "non_streaming_mode" in request:  # upstream's default differs: cloning feeds its text frame by frame
        request["non_streaming_mode"] = voices(voice).method == "generate_voice_clone"
    (codes,) = voices(voice).end_comes_up(False).assert_same_tokens(**request)
    assert len(codes) == 17


@pytest.mark.parametrize(
    "settings",
    [
        dict(do_sample=False),
        dict(subtalker_dosample=False),
        dict(top_k=0, top_p=0.5),
        dict(top_p=0.0),
        dict(top_k=1),
        dict(top_k=5000),
    ],
    ids=str,
)
def test_odd_settings(voices, settings):
    """A greedy choice must not consume random numbers that the sampled ones need; top_k 0 and 5000 mean all."""
    voices("x-vector").end_comes_up(False).assert_same_tokens(text="Hello.", max_new_tokens=13, **settings)


@pytest.mark.parametrize(
    "voice, languages",
    [
        ("x-vector", ["English", "Chinese", "Auto"]),
        ("in-context", ["German"] * 3),
        pytest.param("preset", ["Auto", "Chinese", "Korean"], marks=pytest.mark.slow),
        pytest.param("designed", ["French", "Auto", "Russian"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("settings", ["greedy", "published defaults"])
def test_batch_whose_rows_end_apart(voices, voice, languages, settings):
    """Left padding that is attended to, or finished rows that draw no random numbers, change the other rows."""
    request = dict(text=TEXTS, language=languages, max_new_tokens=110, seed=1) | SETTINGS[settings]
    rows = voices(voice).end_comes_up(True).assert_same_tokens(**request)
    assert len({len(row) for row in rows}) > 1


@pytest.mark.parametrize("voice", VOICES)
def test_end_of_the_speech(voices, voice):
    """The end token's own frame, and the surplus frame that is decoded behind it, must be dropped."""
    for seed in {"x-vector": (0, 2), "in-context": (3,)}.get(voice, (0,)):
        (codes,) = voices(voice).end_comes_up(True).assert_same_tokens(text="Hello.", max_new_tokens=100, seed=seed)
        assert len(codes) < 99


@pytest.mark.parametrize("limit", [2, 3, 9])
def test_number_of_frames(voices, limit):
    """Off by one: max_new_tokens=N gives upstream N - 1 frames."""
    (codes,) = voices("x-vector").end_comes_up(False).assert_same_tokens(text="Hello.", max_new_tokens=limit)
    assert len(codes) == limit - 1


@pytest.mark.parametrize("loop", ["the reference", "the runner"])
def test_hidden_states(voices, loop):
    """The model's generate also returns each frame's hidden state; one frame late would be a shift by one."""
    voice, results = voices("x-vector").end_comes_up(True), []
    ours = voice.fast
    if loop == "the reference":
        ours = generate.load(str(voice.folder), "cpu", max_seq_len=256)
        ours.model.talker.load_state_dict(voice.upstream.model.talker.state_dict())
    for tts in (voice.upstream, ours):
        original = tts.model.generate
        tts.model.generate = lambda original=original, **kwargs: results.append(original(**kwargs)) or results[-1]
        torch.manual_seed(0)
        tts.generate_voice_clone(text=TEXTS, max_new_tokens=100, **voice.arguments)
        del tts.model.generate
    for expected, row in zip(*(result[0] for result in results), strict=True):
        assert torch.equal(row, expected)
    for expected, hidden in zip(*(result[1] for result in results), strict=True):
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
