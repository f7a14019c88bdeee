"""The WebSocket with scripts, times, interruptions, and several utterances at once, distinguished by their context."""

import asyncio

import numpy as np
import pytest
from serving_helpers import SHORT, never_end, pcm, serving, wait_until_free

from qwen3_tts_cuda_graphs.prompts.cut import PAUSE
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon
from qwen3_tts_cuda_graphs.prompts.script import read_script
from qwen3_tts_cuda_graphs.serving.arriving_script import ArrivingPart, ArrivingScript, Part
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions

CONFIG = {"response_format": "pcm", **SHORT}


@pytest.fixture(scope="module")
def presets(checkpoint, tmp_path_factory):
    """A CustomVoice model."""
    with serving(checkpoint("custom_voice"), tmp_path_factory.mktemp("presets") / "voices") as server:
        never_end(server.speech)
        yield server
        wait_until_free(server.speech)


def in_pieces(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def alone(server, text, **fields):
    """The same part over HTTP."""
    return server.pcm(input=text, non_streaming_mode=False, notation=False, **fields)


def silence(seconds):
    return bytes(2 * round(24000 * seconds))


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_script_that_arrives_is_its_parts_and_silence(presets, size):
    """Exact to the sample, wherever the text is split: within a tag, a name, or a word of the lexicon."""
    first, second = presets.ask("GET", "/v1/audio/voices").json["voices"][:2]
    text = f"[pause 0.25]One nginx. [pause:0.1s]... [voice {second['id']}]你好。[pause 0.5]"
    with presets.talk(CONFIG | dict(voice=first["id"], lexicon={"nginx": "engine x"})) as session:
        messages, audio = session.say(*in_pieces(text, size))
    speech = alone(presets, "One engine x.", voice=first["id"]), alone(presets, "你好。", voice=second["id"], seed=2)
    assert audio == silence(0.25) + speech[0] + silence(0.1) + speech[1] + silence(0.5)
    starts = [message for message in messages if message["type"] == "audio.start"]
    ends = [message for message in messages if message["type"] == "audio.done"]
    assert [message["start_seconds"] for message in starts] == pytest.approx([0.25, 0.75, 1.65])
    assert [message["end_seconds"] for message in ends] == pytest.approx([0.65, 1.15, 1.65])
    assert "engine" not in starts[0]["sentence_text"]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("play", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "Aiden: Hi\n...\nVivian: yes",
        "[voice aiden] ___ [pause 1] hello",
        "... [pause 1] hello",
        "...\n[pause 1] hello",
        "hello [pause 1]\n...",
        "Aiden: ...\nVivian: hello",
        "...",
    ],
)
def test_what_is_spoken_of_arriving_text_is_what_is_spoken_of_a_whole_one(text, play, size):
    """Punctuation without a word is spoken only if it is a whole line."""
    script = ArrivingScript(SpeechOptions(script=play), Lexicon({}))
    for piece in in_pieces(text, size):
        script.add(piece)
    script.finish()
    arrived = " ".join(part.said for part in script.parts if part.is_spoken())
    assert arrived.split() == " ".join(part.text for part in read_script(text, play)).split()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\u2028"])
def test_a_play_that_arrives(presets, end):
    first, second = (voice["id"] for voice in presets.ask("GET", "/v1/audio/voices").json["voices"][:2])
    with presets.talk(CONFIG | {"script": True}) as session:
        _, audio = session.say(*f"{first.title()}: One.{end}{second}: Two.{end}Three.")
    speech = [
        alone(presets, text, voice=voice, seed=seed)
        for seed, text, voice in ((1, "One.", first), (2, "Two.", second), (3, "Three.", second))
    ]
    assert audio == silence(PAUSE).join(speech)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("One. [laugh] Two.", "line 1: there is no tag [laugh]"),
        ("One.\n[voice nobody] Two.", "line 2: there is no voice 'nobody'"),
        ("One. [pause", "line 1: [pause ... does not end"),
    ],
)
def test_a_mistake_is_an_error_at_its_place(presets, text, problem):
    """The text before it is spoken, the text after it is not, and the connection stays usable."""
    with presets.talk(CONFIG) as session:
        messages, audio = session.say(*in_pieces(text, 3))
        assert audio == alone(presets, text[: text.index("[")].strip())
        (error,) = [message for message in messages if message["type"] == "error"]
        assert problem in error["message"] and messages[-1]["error"]
        assert session.say("Hello.")[1] == alone(presets, "Hello.")


def test_brackets_are_words(presets):
    with presets.talk(CONFIG | {"notation": False}) as session:
        assert session.say(*in_pieces("[laugh] it", 3))[1] == alone(presets, "[laugh] it")


def test_contexts_are_told_apart(presets):
    """Their texts were merged: with two answers at the same time, one mixture of both was spoken."""
    texts = {"a": "First one.", "b": "Another. 2", None: "And a third."}
    with presets.talk(CONFIG) as session:
        for one, two in zip(texts["a"], texts["b"]):
            session.send("input.text", text=one, context_id="a")
            session.send("input.text", text=two, context_id="b")
        session.send("input.text", text=texts[None])
        for context in ({"context_id": "b"}, {"context_id": "a"}, {}):
            session.send("input.done", **context)
        messages, without_context = session.until("session.done", 3)
    for index, (context, text) in enumerate(texts.items()):
        own = [message for message in messages if message.get("context_id") == context]
        audio = b"".join(message.get("audio", b"") for message in own) if context else without_context
        # On a CPU a frame of two rows is rounded differently from one of a single row.
        np.testing.assert_allclose(pcm(audio), pcm(alone(presets, text)), atol=1e-3)
        assert {message["utterance_index"] for message in own if "utterance_index" in message} == {index}


def test_one_context_is_cancelled(presets):
    """Text that might become a tag was not spoken."""
    with presets.talk(CONFIG | {"max_new_tokens": 300}) as session:
        session.send("input.text", text="This will be interrupted. [voi", context_id="a")
        session.until("audio.delta")
        session.send("input.text", text="Hello.", context_id="b")
        session.send("input.cancel", context_id="a")
        (*_, done), _ = session.until("session.done")
        assert done.items() >= {"context_id": "a", "cancelled": True, "utterance_index": 0}.items()
        assert done["sent_seconds"] > 0 and done["sent_text"] == "This will be interrupted."
        session.send("input.cancel")  # all others
        (*_, done), _ = session.until("session.done")
        assert done.items() >= {"context_id": "b", "cancelled": True}.items()


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_what_is_known_only_at_an_early_end_is_not_spoken(reason):
    """The task that reads the text may run once more before it is cancelled itself."""
    script = ArrivingScript(SpeechOptions(), Lexicon({}))
    script.add("Interrupted. [voi")

    async def taken() -> list[str]:
        pieces = script.pieces(script.parts[0])
        first = await anext(pieces)
        script.stop(reason)
        script.finish()
        return [first, *[piece async for piece in pieces]]

    assert asyncio.run(taken()) == ["Interrupted."] and script.parts[0].said == "Interrupted. [voi"


@pytest.mark.parametrize("context", [5, "", "x" * 129, ["a"]])
def test_what_is_no_context(presets, context):
    with presets.talk(CONFIG) as session:
        session.send("input.text", text="Hello.", context_id=context)
        assert session.receive()["param"] == "context_id"


def test_what_was_heard(presets):
    """Audio is sent faster than it is played, so the server has long finished when the listener interrupts. heard_text
    is in the words of the client, not in those of the lexicon."""
    with presets.talk(CONFIG | {"max_new_tokens": 21, "lexicon": {"nginx": "engine x"}}) as session:
        session.say("An nginx. [pause 1] 你好世界")  # 1.6 s, from 0 and from 2.6 s
        times = (0, ""), (1.0, "An"), (1.6, "An nginx."), (2.5, "An nginx.")
        for played, heard in (*times, (3.5, "An nginx. 你好"), (9, "An nginx. 你好世界")):
            session.send("input.cancel", played_seconds=played)
            (done,), _ = session.until("session.done")
            assert done["heard_text"] == heard and done["utterance_index"] == 0
            assert done["sent_seconds"] == 4.2 and done["sent_text"] == "An nginx. 你好世界"
        session.send("input.cancel", played_seconds=-1)
        assert session.receive()["param"] == "played_seconds"


def test_what_was_written_for_what_is_said():
    part = ArrivingPart(Part(""), Lexicon({"nginx": "engine x"}))
    for letter in "An nginx, yes.":
        part.add(letter)
    part.add("", is_end=True)
    assert (part.said, part.written) == ("An engine x, yes.", "An nginx, yes.")
    for said, written in (("An", "An"), ("An en", "An nginx"), ("An engine x", "An nginx"), (part.said, part.written)):
        assert part.written[: part.written_until(len(said))] == written


def test_audio_formats_of_a_context(presets):
    with presets.talk(CONFIG | {"response_format": "wav"}) as session:
        session.write("Hello.", context_id="a")
        messages, _ = session.until("session.done")
    audio = b"".join(message.get("audio", b"") for message in messages)
    assert audio[:4] == b"RIFF" and len(np.frombuffer(audio[44:], "<i2")) == 5 * 1920
