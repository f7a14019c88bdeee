"""Scripts over HTTP: pauses, voices of several models, lexicons, times, mixes, and speech that does not end."""

import base64
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import frame_limits
from serving_helpers import (
    LIMIT,
    LocalService,
    RunningServer,
    events_of,
    load_speech,
    never_end,
    serving,
    wait_until,
    wait_until_free,
)

from qwen3_tts_cuda_graphs.common.samples import to_int16
from qwen3_tts_cuda_graphs.common.tempo import Tempo
from qwen3_tts_cuda_graphs.prompts.cut import PAUSE
from qwen3_tts_cuda_graphs.prompts.script import Cue, Part
from qwen3_tts_cuda_graphs.serving import engine_host
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions
from qwen3_tts_cuda_graphs.serving.service import read_speakers
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.speech.long_text import stream_script

RATE = 24000
PCM = {"response_format": "pcm", "seed": 5, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def speech(checkpoint, tmp_path_factory):
    """A model that clones, and one with preset speakers, which never ends."""
    folders = [checkpoint(), checkpoint("custom_voice")]
    folder = tmp_path_factory.mktemp("scripts")
    torch.save(50 * torch.load(folders[0] / "speaker.pt").flip(0), folder / "other.pt")
    (folder / "lexicon.txt").write_text("nginx\tengine x\nsql\tsequel\n")
    speakers = read_speakers([folders[0] / "speaker.pt", folder / "other.pt"])
    speech = load_speech(folders, folder / "voices", speakers=speakers, lexicon=folder / "lexicon.txt")
    never_end(speech, 1)
    yield speech
    speech.close()


def said(server, text, **fields) -> np.ndarray:
    return np.frombuffer(server.pcm(input=text, **PCM | fields), "<i2")


def zeros(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.int16)


SCRIPT = "[pause 1.5]One nginx.\n[voice vivian]Two. [pause 0.001][voice other] Three.[pause 0.25]"


def test_a_script_of_two_models_is_its_parts_and_silence(server, speech):
    """Exact to the sample, in one response; each part is spoken by the model that has its voice, with the seed of its
    number."""
    one = said(server, "One engine x.", voice="speaker")
    two, three = said(server, "Two.", voice="vivian", seed=6), said(server, "Three.", voice="other", seed=7)
    expected = np.concatenate([zeros(1.5), one, zeros(PAUSE), two, zeros(0.001), three, zeros(0.25)])
    np.testing.assert_array_equal(said(server, SCRIPT, voice="speaker"), expected)
    wait_until_free(speech)

    answer = server.speak(input=SCRIPT, voice="speaker", timestamps=True, **PCM)
    assert answer.headers["Content-Type"] == "application/json"
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    content = answer.json
    audio = np.frombuffer(base64.b64decode(content["audio"]), "<i2")
    np.testing.assert_array_equal(audio, expected)
    assert (content["format"], content["sample_rate"]) == ("pcm", RATE)
    assert content["duration_seconds"] == pytest.approx(len(audio) / RATE, abs=1e-6)
    parts = content["parts"]
    assert [(part["index"], part["text"], part["voice"]) for part in parts] == [
        (0, "One nginx.", "speaker"),
        (1, "Two.", "vivian"),
        (2, "Three.", "other"),
    ]
    for part, sound in zip(parts, (one, two, three)):
        start, end = (round(part[name] * RATE) for name in ("start_seconds", "end_seconds"))
        np.testing.assert_array_equal(audio[start:end], sound)

    *deltas, done = events_of(server.speak(input=SCRIPT, voice="speaker", stream_format="sse", **PCM).body)
    position = 0
    for event in deltas:
        assert event["type"] == "speech.audio.delta"
        if "part" in event:
            described = parts[event["part"]["index"]]
            assert event["part"] == {name: described[name] for name in described if name != "end_seconds"}
            assert round(described["start_seconds"] * RATE) == position
        position += len(base64.b64decode(event["audio"])) // 2
    assert position == len(expected) and sum("part" in event for event in deltas) == 3
    frames = sum(map(len, (one, two, three))) // 1920
    assert done["type"] == "speech.audio.done" and done["usage"]["output_tokens"] == frames
    names = "index", "start_seconds", "end_seconds"
    assert done["parts"] == [{name: part[name] for name in names} for part in parts]


@pytest.mark.parametrize(
    "fields", [{"speed": 2.0, "response_format": "pcm"}, {"speed": 0.5, "response_format": "mp3"}], ids=str
)
def test_times_are_those_of_what_is_heard(server, fields):
    """Each part has its own tempo, and pauses keep their length, as on the command line."""
    text = "[pause 0.5]One. [pause 1] Two."
    plain = server.speak(input=text, timestamps=True, **PCM).json
    content = server.speak(input=text, timestamps=True, **PCM | fields).json
    place, sound = 0.0, []
    spoken = np.frombuffer(base64.b64decode(plain["audio"]), "<i2")
    for part, other, pause in zip(content["parts"], plain["parts"], (0.5, 1.0), strict=True):
        start, end = (round(other[name] * RATE) for name in ("start_seconds", "end_seconds"))
        tempo = Tempo(RATE, fields["speed"])
        sound += [zeros(pause), tempo.add(spoken[start:end]), tempo.finish()]
        end = place + pause + (other["end_seconds"] - other["start_seconds"]) / fields["speed"]
        assert (part["start_seconds"], part["end_seconds"]) == pytest.approx((place + pause, end), abs=1e-4)
        place = part["end_seconds"]
    assert content["duration_seconds"] == pytest.approx(place, abs=1e-4)
    if fields["response_format"] == "pcm":
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(content["audio"]), "<i2"), np.concatenate(sound))


@pytest.mark.parametrize("seed", [5, 2**63 - 1])
def test_the_same_sound_as_in_the_library(server, speech, seed):
    host = speech.models[1].engine.process.worker.host
    text = "[pause 0.1]One nginx.\n[voice ryan][style: glad] Two SQL! [pause 0.2][voice] Three."
    options = dict(play=True, lexicon={"nginx": "engine x", "sql": "S Q L"}, language="English", max_new_tokens=4)
    chunks = stream_script(host.tts.generate_custom_voice, text=text, seed=seed, speaker="vivian", **options)
    audio = np.concatenate([to_int16(chunk[0]) for chunk in chunks if not isinstance(chunk, Cue)])
    fields = dict(voice="vivian", script=True, lexicon={"sql": "S Q L"}, language="English", seed=seed)
    np.testing.assert_array_equal(said(server, text, **fields), audio)


def test_long_parts_are_cut_as_in_the_library(server, speech):
    """A row has room for 38 tokens at 12 frames each: the tiny tokenizer has one token per byte."""
    host = speech.models[0].engine.process.worker.host
    long = " ".join(f"This sentence has the number {number}." for number in range(3))
    text = f"[voice]{long} [pause 0.5] End."
    lexicon = {"sentence": "part", "number": "other number"}
    options = dict(language="English", seed=3, lexicon=lexicon, voice_clone_prompt=host.file_voices["speaker"])
    items = [*stream_script(host.tts.generate_voice_clone, text=text, **options)]
    audio = np.concatenate([to_int16(item[0]) for item in items if not isinstance(item, Cue)])
    parts = [item.part.text for item in items if isinstance(item, Cue)]
    fields = dict(voice="speaker", language="English", seed=3, lexicon=lexicon, max_new_tokens=None, limit_speech=True)
    content = server.speak(input=text, timestamps=True, **PCM | fields).json
    assert [part["text"] for part in content["parts"]] == parts and len(parts) > 3
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(content["audio"]), "<i2"), audio)


@pytest.mark.parametrize("text", ["See [1], a < b, x[0] [as he said], [link](http://a.b) and [", "two\nlines [他说]"])
def test_a_text_without_tags_is_one_utterance(server, text):
    np.testing.assert_array_equal(said(server, text), said(server, text, notation=False))
    assert len(server.speak(input=text, timestamps=True, **PCM).json["parts"]) == 1


def test_notation_may_be_off(server):
    parts = server.speak(input="[pause 1] [laugh] <speak>", notation=False, timestamps=True, **PCM).json["parts"]
    assert [part["text"] for part in parts] == ["[pause 1] [laugh] <speak>"]


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"input": "One.\n[laugh] Two."}, "line 2: there is no tag [laugh]"),
        ({"input": "One.\n[voice nobody] Two."}, "line 2: there is no voice 'nobody': choose"),
        ({"input": "One.\n\nNobody: Two.", "script": True}, "line 3: there is no voice 'Nobody'"),
        ({"input": "[voice vivian] One.", "model": "tiny-base"}, "line 1: there is no voice 'vivian'"),
        ({"input": "One [pause [voice vivian]]"}, "line 1: [pause ... does not end"),
        ({"input": "One [pause 61]"}, "line 1: [pause 61] is longer than 60 s"),
        ({"input": "[pause 1] ..."}, "no words"),
        (
            {"input": "One. [voice vivian:0.5,ryan:0.5] Two.", "model": "tiny-custom_voice"},
            "line 1: the voice 'vivian:",
        ),
        ({"input": "Vivian: Hi.", "script": True, "notation": False}, "script is true and notation false"),
        ({"input": "Hi.", "lexicon": {"a": ""}}, "a replacement is empty"),
        ({"input": "Hi.", "lexicon": {f"a{i}": "b" for i in range(1001)}}, "1001 entries, at most 1000"),
        ({"input": "Hi.", "lexicon": ["a"]}, "lexicon is a list"),
        ({"input": "Hi.", "lexicon": {"Hi": "\ud800"}}, "a replacement has a character that UTF-8 cannot encode"),
        ({"input": "Hi.", "lexicon": {"\ud800": "Hi"}}, "a word has a character that UTF-8 cannot encode"),
        (
            {"input": "Hi.", "voice": "vivian:0.7,ryan:0.3", "model": "tiny-custom_voice"},
            "is a mix of embeddings, not for a",
        ),
        ({"input": "Hi.", "voice": "speaker:0.7,nobody:0.3"}, "there is no voice 'nobody'"),
        ({"input": "Hi.", "voice": "speaker:0,other:0"}, "all weights are 0: let one be above 0"),
        ({"input": "Hi.", "voice": ",".join(["speaker:1"] * 9)}, "is a mix of 9: give at most 8"),
        ({"input": "Hi.", "voice": "speaker:0.7,other"}, "a mix is written as aiden:0.7,vivian:0.3"),
        ({"input": "Hi.", "voice": "speaker" + ":1" * 1000}, "there is no voice"),
    ],
)
def test_mistakes_are_named_before_any_work_starts(server, speech, fields, problem):
    answer = server.speak(**PCM | fields)
    assert answer.status == 400 and problem in answer.error["message"], answer.error
    expected = "lexicon" if "lexicon" in fields else "voice" if "voice" in fields else "input"
    assert answer.error["param"] == ("script" if "notation" in fields else expected)
    assert speech.in_flight == 0


def test_styles_are_followed_or_named(server):
    text = "One. [style: whispering] Two."
    answer = server.speak(input=text, voice="vivian", **PCM)
    assert "X-Ignored" not in answer.headers
    whispered = said(server, "Two.", voice="vivian", instructions="whispering", seed=6)
    np.testing.assert_array_equal(np.frombuffer(answer.body, "<i2")[-len(whispered) :], whispered)
    answer = server.speak(input="One. [voice speaker][style: whispering] Two.", voice="vivian", **PCM)
    assert answer.status == 200 and answer.headers["X-Ignored"] == "instructions"


def test_a_mix_is_the_mean_of_its_embeddings(server, speech):
    files = speech.host.file_voices
    mean = sum(
        share * files[name]["ref_spk_embedding"][0].float() for name, share in (("speaker", 0.75), ("other", 0.25))
    )
    say = partial(said, server, max_new_tokens=12, seed=6)
    expected = say("Hi.", speaker_embedding=mean.tolist())
    np.testing.assert_array_equal(say("Hi.", voice="speaker:3, OTHER:1"), expected)
    np.testing.assert_array_equal(say("[voice speaker:0.75,other:0.25]Hi."), expected)
    assert not np.array_equal(say("Hi.", voice="speaker"), expected)


def test_registered_voices_and_openais_are_voices(server, wav):
    say = partial(server.pcm, **PCM)
    with server.registered("mine", wav, ref_text="what it says"):
        expected = say(input="Hi.", voice="vivian") + server.pcm(input="Ho.", voice="mine", **PCM | {"seed": 6})
        assert say(input="[voice vivian]Hi.[pause 0][voice Mine]Ho.") == expected
        assert say(input="[voice alloy]Hi.", voice="mine") == say(input="Hi.", voice="alloy")
        assert say(input="Hi.", voice="mine:1,speaker:1") != say(input="Hi.", voice="mine")  # which is in-context


def test_an_error_is_not_hidden_by_a_pause(server, speech):
    width = speech.models[0].config["talker_config"]["hidden_size"]
    answer = server.speak(input="[pause 10]One.", speaker_embedding=[1e39] * width, **PCM)
    assert answer.status == 400 and "NaN or infinite" in answer.error["message"]


@mock.patch.object(engine_host, "MIN_FRAME_LIMIT", 24)
@frame_limits(24, per_token=2)
def test_speech_that_does_not_end_is_stopped_where_it_is_wanted(server, speech, caplog):
    """After 24 frames, or 2 per token; and the response reports it."""
    model = "tiny-custom_voice"
    fields = dict(model=model, limit_speech=True, max_new_tokens=None, response_format="pcm", seed=1)
    (part,) = server.speak(input="[voice ryan]" + "a" * 20, timestamps=True, **fields).json["parts"]
    assert part["end_seconds"] - part["start_seconds"] == pytest.approx(20 * 2 * 0.08) and part["stopped"]
    done = events_of(server.speak(input="Hi.", stream_format="sse", **fields).body)[-1]
    assert done["parts"] == [{"index": 0, "start_seconds": 0, "end_seconds": 1.92, "stopped": True}]
    assert "did not end: stopped after 2 s" in caplog.text
    assert "qwen3_tts_stopped_total 2.0" in server.ask("GET", "/metrics").body.decode()
    wait_until_free(speech)

    async def pieces():
        for piece in ("Hel", "lo."):
            yield piece

    async def arriving():
        options = SpeechOptions(model=model, limit_speech=True, seed=1)
        answer = Answer(speech, options, [Part("", pause=0.5)], pieces())
        chunks = [samples async for samples, _ in answer]
        return answer, np.concatenate(chunks)

    answer, audio = speech.submit(arriving()).result(LIMIT)
    assert len(audio) == RATE // 2 + 24 * 1920 and not audio[: RATE // 2].any()
    assert answer.stopped == {0} and answer.characters_read == 6
    assert [(cue.start, cue.end) for cue in answer.cues] == [(RATE // 2, len(audio))]


def test_a_client_that_leaves_within_a_pause(server, speech):
    """With minutes of silence: it is not buffered, and both places are freed at once."""
    text = "One. [voice vivian]" + "[pause 60]" * 100 + "Two."
    with server.asking(input=text, voice="speaker", **PCM) as connection:
        response = connection.getresponse()
        assert response.status == 200 and response.read(RATE)
        assert [model.engine.in_flight for model in speech.models] == [1, 1]
    wait_until_free(speech)


@pytest.mark.parametrize("format", ["pcm", "wav", "flac"])
def test_a_whole_file_is_sent_in_pieces(server, speech, format):
    """Joining minutes of audio, or encoding it as base64 at once, would block the event loop for seconds."""

    async def pieces():
        answer = Answer(speech, SpeechOptions(response_format=format), [Part("", pause=60), Part("", pause=40)])
        return [piece async for piece in answer.encode_whole(lambda size: None)]

    whole = speech.submit(pieces()).result(LIMIT)
    assert max(map(len, whole)) < 3 * RATE
    fields = dict(input="[pause 30.5]Hi.", response_format=format, seed=5, max_new_tokens=4)
    answer = server.speak(timestamps=True, **fields)
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    assert base64.b64decode(answer.json["audio"]) == server.speak(stream=False, **fields).body


def test_a_large_lexicon_and_many_styles(server):
    """The lexicon is checked once rather than for each style, and other requests are answered meanwhile."""
    lexicon = {f"{number:0100}": "a" for number in range(1000)}
    text = "[voice nobody]a[voice]" + "".join(f"[style: {number}]a" for number in range(250))
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.speak, input=text, lexicon=lexicon, **PCM)
        waits = []
        while not asked.done():
            began = time.monotonic()
            server.ask("GET", "/livez")
            waits.append(time.monotonic() - began)
    assert asked.result().status == 400 and max(waits) < 1


@pytest.mark.parametrize(
    "limits, code",
    [({"max_held": 40_000_000}, "too_many"), ({"max_held": 10**10, "request_seconds": 0.3}, "timeout")],
    ids=["memory", "time"],
)
def test_hours_of_silence_as_a_whole(speech, limits, code):
    """They are refused at a limit, and the server answers other requests meanwhile."""
    with RunningServer(speech, **limits) as server, ThreadPoolExecutor() as threads:
        asked = threads.submit(server.speak, input="[pause 60]" * 400 + "One.", stream=False, **PCM)
        answers = itertools.takewhile(lambda _: not asked.done(), iter(lambda: server.ask("GET", "/livez").status, 0))
        assert all(status == 200 for status in answers)
        answer = asked.result(LIMIT)
        assert (answer.status, answer.error["code"]) == (503, code)
    wait_until_free(speech)


def test_no_part_finds_a_full_queue(server, speech):
    """All places are taken at the beginning: a script whose second model is full is refused as a whole."""
    speech.models[1].engine.in_flight += 4
    try:
        answer = server.speak(input=SCRIPT, voice="speaker", **PCM)
        assert (answer.status, answer.error["code"]) == (429, "queue_full") and speech.models[0].engine.in_flight == 0
    finally:
        speech.models[1].engine.in_flight -= 4


def test_a_worker_that_is_to_end_speaks_its_first_part(checkpoint, tmp_path):
    """The part begins when its worker is already draining."""
    with serving([checkpoint(), checkpoint("custom_voice")], tmp_path) as server, ThreadPoolExecutor() as threads:
        speech = server.speech
        never_end(speech)
        fields = PCM | {"input": "One. [voice vivian]Two.", "voice": "speaker", "max_new_tokens": 50}
        whole = server.pcm(**fields)
        answer = threads.submit(server.pcm, **fields)
        wait_until(lambda: speech.host.listeners)
        speech.models[1].engine.process.worker.drain()
        assert answer.result(LIMIT) == whole
        wait_until(lambda: speech.models[1].engine.restarts == 1)


def test_a_lexicon_that_cannot_be_read(checkpoint, tmp_path):
    (tmp_path / "bad").write_text("one word\n")
    for name, problem in (("bad", "line 1: there is no tab"), ("missing", "cannot read the lexicon"), (".", "lexicon")):
        with pytest.raises(ValueError, match=problem):
            LocalService(str(checkpoint("custom_voice")), settings=Settings(lexicon=tmp_path / name))
