"""The WebSocket: text is received while it is written, and audio sent; interruptions, errors and time limits."""

import asyncio
import contextlib
import json
import socket
import time
from functools import partial

import pytest
from serving_helpers import (
    FRAME,
    LIMIT,
    SHORT,
    RunningServer,
    read_to_the_end,
    serving,
    wait_until,
    wait_until_free,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon
from qwen3_tts_cuda_graphs.serving import connections, engine_host
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.arriving_script import ArrivingScript
from qwen3_tts_cuda_graphs.serving.model import sampling
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions

CONFIG = {"voice": "speaker", "response_format": "pcm", **SHORT}
LONG = CONFIG | {"max_new_tokens": 450}
GET = "GET /v1/audio/speech/stream HTTP/1.1\r\n"
HANDSHAKE = (
    "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@contextlib.contextmanager
def raw_session(server, small_buffers=False):
    """A socket after the handshake, to send what no client library sends."""
    with server.open(small_buffers) as connection:
        connection.sendall((GET + HANDSHAKE).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 101")
        yield connection


def refusal(server, address=None, **options):
    """The response to a handshake that is refused."""
    with pytest.raises(InvalidStatus) as refused, connect(address or server.websocket_address, **options):
        pass
    return refused.value.response


def test_a_websocket_at_another_path(server):
    """It got 403 without a message, as with a wrong key."""
    answer = refusal(server, server.websocket_address.replace("/v1/audio/speech/stream", "/v1/realtime"))
    assert answer.status_code == 404 and b"use /v1/audio/speech/stream" in answer.body


def test_an_utterance_is_a_response_until_its_end(server, speech):
    """A draining server waits for it: the last audio is sent after the last frame is generated."""
    with server.talk(CONFIG) as session:
        session.send("input.text", text="Hello there.")
        assert session.receive()["type"] == "audio.start" and speech.responses == 1
        session.send("input.done")
        session.until("session.done")
        wait_until(lambda: speech.responses == 0)


def test_recordings_of_waiting_utterances_are_counted(speech):
    """Each utterance keeps its configuration. Only the largest message was counted, but a session could hold eight."""
    recording = "A" * 150_000
    with RunningServer(speech, max_held=500_000) as server, server.talk(LONG) as session:
        session.write("Hello there.")
        for _ in range(3):
            session.configure(**CONFIG, ref_audio=recording)
            session.write("Hello there.")
        session.configure(**CONFIG, ref_audio=recording)
        messages, _ = session.until("error")
        assert messages[-1]["code"] == "too_many"
        session.configure(**CONFIG, ref_audio="A\N{GRINNING FACE}")
        messages, _ = session.until("error")
        assert messages[-1]["param"] == "ref_audio" and "not base64" in messages[-1]["message"]
        session.send("input.cancel")
        for _ in range(4):
            session.until("session.done")
        session.configure(**CONFIG, ref_audio=recording)
        session.write()  # answered by a session.done, not by an error
        assert session.receive()["type"] == "session.done"
    wait_until_free(speech)


def test_several_utterances(server):
    """The audio is that of the same text over HTTP, however the text is split."""
    expected = server.pcm()
    with server.talk(CONFIG) as session:
        for index, pieces in enumerate((["Hello there."], ["Hel", "lo ", "there", "."])):
            messages, audio = session.say(*pieces)
            place = {"utterance_index": index, "sentence_index": 0}
            assert [message["type"] for message in messages] == ["audio.start", "audio.done", "session.done"]
            assert messages[0].items() >= {"format": "pcm", "sample_rate": 24000, **place}.items()
            times = {"start_seconds": 0, "end_seconds": len(expected) / 48000}
            about = {"total_bytes": len(expected), "sentence_text": messages[1]["sentence_text"]}
            assert messages[1] == {"type": "audio.done", **about, **place, **times}
            assert "Hello there.".startswith(messages[1]["sentence_text"]) and messages[1]["sentence_text"]
            done = {"type": "session.done", "utterance_index": index, "total_sentences": 1}
            assert messages[2].items() >= done.items()  # the last pieces may arrive after the last of the five frames
            assert audio == expected
        session.configure(**CONFIG | {"response_format": "wav", "seed": 2})  # another configuration between utterances
        _, audio = session.say("Hello there.")
        assert audio[:4] == b"RIFF" and audio[44:] == server.pcm(seed=2)
        session.write("Hello there.")
        session.send("input.text", text="This utterance is not complete.")
        session.send("session.close")  # complete utterances are spoken first; they were dropped
        session.send("input.done")  # too late
        messages, heard = session.until("session.done")
        assert heard == audio and messages[-1]["total_sentences"] == 1
        cancelled = {"type": "session.done", "utterance_index": 4, "total_sentences": 0, "cancelled": True}
        assert session.receive() == cancelled | {"sent_seconds": 0, "sent_text": ""}
        with pytest.raises(ConnectionClosed) as closed:
            session.receive()
        assert closed.value.rcvd.code == 1000


def test_the_next_utterance_may_be_written_while_one_is_spoken(server):
    expected = {text: server.pcm(input=text) for text in ("First.", "Second.", "Third.")}
    with server.talk(CONFIG) as session:
        for text in expected:
            session.write(text)
        for index, text in enumerate(expected):
            messages, audio = session.until("session.done")
            assert messages[-1]["utterance_index"] == index
            assert audio == expected[text]
        session.write(
            " \n"
        )  # LiveKit's plugin sends an empty input.done and waits 3 s; white space does not begin an utterance
        assert session.receive() == {"type": "session.done", "utterance_index": 3, "total_sentences": 0}


def test_text_that_comes_after_the_speech_has_ended(server, monkeypatch):
    """It was dropped silently, and so was text that the model had received but not read: it reads one token per frame.

    Here the model ends after five frames, and a character is a token.
    """
    sentences = ["Hello there.", "there.", " More of it.", "of it."]
    with monkeypatch.context() as patch, server.talk(CONFIG) as session:
        ending = "qwen3_tts_cuda_graphs.serving.answer.sampling"
        patch.setattr(ending, lambda style: sampling(style) | {"max_new_tokens": 6})
        patch.setattr(Answer, "hit_max_new_tokens", lambda _: False)
        expected = {text: server.pcm(input=text) for text in sentences}
        for index, text in enumerate(sentences[::2]):
            session.write(text)
            for number, sentence in enumerate(sentences[2 * index : 2 * index + 2]):
                messages, audio = session.until("audio.done")
                assert [message["sentence_index"] for message in messages] == [number, number]
                assert messages[0]["sentence_text"] == sentence and audio == expected[sentence]
            assert session.receive() == {"type": "session.done", "utterance_index": index, "total_sentences": 2}
        session.send("input.text", text=sentences[0])
        session.until("audio.done")
        messages, audio = session.say(sentences[2], ' "')  # after the first sentence, and without words
        assert messages[-1]["total_sentences"] == 4 and len(audio) == 3 * 5 * FRAME
    with server.talk(
        CONFIG
    ) as session:  # max_new_tokens of the client ends the speech, and the unspoken characters are counted
        session.send("input.text", text="Hello there.")
        session.until("audio.done")
        session.write(" More.")
        done = {"type": "session.done", "utterance_index": 0, "total_sentences": 1, "unspoken_characters": 12}
        assert session.receive() == done
        assert session.say("Hello there.")[1] == expected["Hello there."]


def test_a_surrogate_pair_may_be_cut_in_two(server):
    """JavaScript programs split texts between UTF-16 code units."""
    expected = server.pcm(input="Hi \U0001f600 you")
    with server.talk(CONFIG) as session:
        assert session.say("Hi \ud83d", "\ude00 you")[1] == expected
        for before in ("Hi ", ""):  # the second half never arrives
            messages, _ = session.say(before + "\ud83d")
            assert any(message["type"] == "error" and "UTF-8" in message["message"] for message in messages)
            assert messages[-1]["error"]


def test_formats_speed_and_instructions(server):
    """As over HTTP. The default stays wav, as in vLLM-Omni."""
    for fields in ({"response_format": "MP3"}, {"response_format": "pcm", "speed": 0.5}, {"response_format": None}):
        asked = {"instructions": "whisper", **SHORT, **fields}
        with server.talk(asked) as session:
            (start, *_), audio = session.say("Hello there.")
        name = (fields["response_format"] or "wav").lower()
        assert start["format"] == name and start["ignored"] == ["instructions"]
        assert audio == server.speak(**asked | {"response_format": name}).body


@pytest.mark.parametrize("frames", [300, 30], ids=["while it is spoken", "at its end"])
def test_a_client_that_does_not_read_is_given_up(speech, frames):
    """Its socket and the unsent audio were never freed."""
    with RunningServer(speech, send_seconds=0.3) as server, raw_session(server, small_buffers=True) as connection:
        connection.sendall(
            message("session.config", **CONFIG | {"max_new_tokens": frames}) + message("input.text", text="Hello.")
        )
        connection.sendall(message("input.done") + message("session.close"))
        wait_until(lambda: speech.in_flight)
        wait_until_free(speech)
        wait_until(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize("cut", ["Upgra", "Upgrade: ", "Upgrade: web", "Upgrade: websocket"])
def test_a_handshake_in_two_parts(server, cut):
    head = (GET + HANDSHAKE).encode()
    first = head.index(b"Upgrade: ") + len(cut)
    with server.open() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head[:first])
        time.sleep(0.1)
        connection.sendall(head[first:])
        assert connection.recv(100).startswith(b"HTTP/1.1 101")


@pytest.mark.parametrize(
    "head",
    ["POST /v1/audio/speech/stream HTTP/1.1\r\n", GET + f"Cookie: {'x' * 9000}\r\n", GET + "A: b\r\n" * 130],
    ids=["method", "cookie", "headers"],
)
def test_what_is_not_a_handshake_is_answered(server, head):
    """The connection stayed open without an answer or a time limit."""
    with server.open() as connection:
        connection.sendall((head + HANDSHAKE).encode())
        answer = read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 400") and b"handshake" in answer


@pytest.mark.parametrize(
    "start, more",
    [
        (b"\x81\xff" + (15_000_000).to_bytes(8, "big") + bytes(4), b"x" * 200_000),
        (b"\x01\x81" + bytes(4) + b"x", (b"\x00\x81" + bytes(4) + b"x") * 1000),  # the zeros are the mask
    ],
    ids=["one frame", "many frames"],
)
def test_messages_without_an_end_share_the_limit(speech, start, more):
    """Only complete messages were counted."""
    with RunningServer(speech, max_held=500_000) as server, raw_session(server) as connection:
        connection.sendall(start)
        with pytest.raises(OSError):
            for _ in range(400):  # after a burst, frames are read slowly
                connection.sendall(more)
                time.sleep(0.05)


def test_answers_to_pings_may_be_late(speech):
    """Pongs wait behind unread audio: a client that paused for 20 to 40 s was disconnected. After a late pong uvicorn
    sent pings without a pause."""
    with RunningServer(speech) as server:
        server.server.config.ws_ping_interval = 0.3
        with raw_session(server) as connection:
            begin, late, pings = time.monotonic(), 0.29, b""
            while time.monotonic() < begin + 1.8:
                pings += connection.recv(1000)  # two bytes each, and four of data
                time.sleep(late)
                connection.sendall(b"\x8a\x84" + bytes(4) + pings[-4:])
                late = 0.03
    assert server.server.config.ws_ping_timeout is None and pings[:1] == b"\x89" and 2 <= len(pings) / 6 <= 8


def frame(opcode: int, data: bytes = b"", is_last: bool = True) -> bytes:
    """As a client sends it, with a mask of zeros."""
    return bytes([opcode | is_last << 7, 0x80 | len(data)]) + bytes(4) + data


def message(type: str, **fields) -> bytes:
    data = json.dumps({"type": type, **fields}).encode()
    if len(data) < 126:
        return frame(1, data)
    return b"\x81\xfe" + len(data).to_bytes(2, "big") + bytes(4) + data


CONTINUED = frame(0, is_last=False)


@pytest.mark.parametrize(
    "frames",
    [
        *(frame(kind) * 43_000 for kind in (9, 2)),
        frame(1, is_last=False) + CONTINUED * 16_000,
        (frame(1, is_last=False) + CONTINUED * 100 + frame(0, b"{}")) * 400,
        message("input.text", text="x") * 6000,
        message("session.config", voice="speaker") * 6000,
        message("input.done") * 6000,
        None,
    ],
    ids="pings binary fragments fragmented texts configurations utterances chunks".split(),
)
def test_a_flood_of_tiny_frames_stalls_nobody(server, speech, frames):
    """Everything from one read, up to 43,000 frames or 7,000 messages, was processed before any other task."""

    async def longest_turn() -> float:
        """In seconds of the loop's own processor time, which excludes other programs."""
        longest = 0.0
        for _ in range(70):
            begin = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - begin)
        return longest

    with raw_session(server) if frames else server.open() as connection:
        if frames:
            connection.sendall(message("session.config", **SHORT))
        else:  # a body of HTTP
            head = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\n{head}".encode())
            frames = b"1\r\n \r\n" * 43_000
        connection.settimeout(0.1)
        waiting = speech.submit(longest_turn())
        while not waiting.done():
            with contextlib.suppress(OSError):  # it is throttled or closed
                connection.sendall(frames)
                connection.recv(1 << 20)
        assert waiting.result() < 0.3  # it was seconds; now 0.02


def test_a_whole_reply_in_tokens_is_not_slowed_down(server, monkeypatch):
    """A client with a complete text may send it at once, token by token. Here frames beyond the burst are never
    read."""
    monkeypatch.setattr(connections, "FRAMES_PER_SECOND", 0.01)
    with server.talk(CONFIG) as session:
        messages, audio = session.say(*"x" * 4000)
    assert len(audio) == 5 * FRAME and messages[-1]["unspoken_characters"] > 3900


def test_heartbeats_are_activity(speech):
    """Libraries send pings or pongs by themselves, but the socket was closed as idle. Here each kind alone would be too
    rare."""
    with RunningServer(speech, idle_seconds=1.0) as server, raw_session(server) as connection:
        connection.sendall(message("session.config"))
        for heartbeat in 2 * [frame(9, b"x"), frame(10)]:
            time.sleep(0.6)
            connection.sendall(heartbeat)
        connection.sendall(message("input.done"))
        begin, answers = time.monotonic(), b""
        while b"no message came within 1 s" not in answers:
            answers += connection.recv(1000)
        assert b"session.done" in answers and time.monotonic() - begin > 0.9


def test_no_message_is_above_32_kb(server):
    """Go's clients accept no more by default. At speed 0.25 messages had up to 123 KB, and so had events over HTTP."""
    with server.talk(CONFIG | {"max_new_tokens": 25, "speed": 0.25}) as session:
        session.write("\N{GRINNING FACE}" * 4000)
        received = [session.websocket.recv(timeout=LIMIT)]
        while isinstance(received[-1], bytes) or "session.done" not in received[-1]:
            received.append(session.websocket.recv(timeout=LIMIT))
    audio = [piece for piece in received if isinstance(piece, bytes)]
    events = server.speak(speed=0.25, max_new_tokens=25, response_format="pcm", stream_format="sse").body
    assert sum(map(len, audio)) == 4 * 24 * FRAME and all(len(piece) % 2 == 0 for piece in audio)
    assert max(map(len, [*received, *events.split(b"\n\n")])) <= 32_700


def test_pings_whose_answers_nobody_reads(speech):
    """The pongs were queued without a limit."""
    with RunningServer(speech) as server, raw_session(server, small_buffers=True) as connection:
        with pytest.raises(OSError):
            for _ in range(1000):  # 130 MB
                connection.sendall(frame(9, b"p" * 125) * 1000)


def test_the_server_ends_while_a_client_closes(speech):
    """uvicorn raised an error in the middle of its shutdown."""
    with contextlib.ExitStack() as stack:
        with RunningServer(speech) as server:
            connection = stack.enter_context(raw_session(server, small_buffers=True))
            connection.sendall(message("session.config", **LONG) + message("input.text", text="Hello there."))
            wait_until(lambda: speech.in_flight)
            time.sleep(0.3)  # unread audio waits in the server
            connection.sendall(frame(8))  # close
            time.sleep(0.3)
    wait_until_free(speech)


def test_cancel(server, speech):
    """The listener interrupts: no more audio follows, the place is freed, and the connection can be used again."""
    with server.talk(LONG) as session:
        session.write("A long speech.")
        session.send("input.text", text="It will never be heard.")
        session.until("audio.start")
        assert isinstance(session.receive(), bytes)
        session.send("input.cancel")
        messages, audio = session.until("session.done")
        assert [message["type"] for message in messages] == ["audio.done", "session.done"]
        assert all(message["cancelled"] for message in messages)
        assert len(audio) < 200 * FRAME
        cancelled = {"type": "session.done", "utterance_index": 1, "total_sentences": 0, "cancelled": True}
        assert session.receive() == cancelled | {"sent_seconds": 0, "sent_text": ""}
        wait_until_free(speech)
        session.send("input.cancel")  # there is nothing to cancel
        assert session.receive()["cancelled"]
        session.configure(**CONFIG)
        messages, audio = session.say("Hello there.")
        assert audio == server.pcm() and messages[-1]["utterance_index"] == 2


@pytest.mark.parametrize("text_is_complete", [True, False])
def test_a_client_that_goes_away_frees_its_place(server, speech, text_is_complete):
    with server.talk(LONG) as session:
        session.send("input.text", text="A long speech.")
        if text_is_complete:
            session.send("input.done")
            session.until("audio.start")
        else:
            wait_until(lambda: speech.in_flight == 1)
        session.websocket.socket.shutdown(socket.SHUT_RDWR)
        wait_until_free(speech)


def test_mistakes_are_answered_and_the_session_goes_on(server, speech):
    most = speech.settings.max_text
    mistakes = {
        "not JSON": "{",
        "a list": "[]",
        "binary": b"\x00\xff",
        "no type": "{}",
        "an unknown type": '{"type": "input.shout"}',
        "a type that is no string": '{"type": []}',
        "no text": '{"type": "input.text"}',
        "a number as text": '{"type": "input.text", "text": 5}',
        "half of a surrogate pair": '{"type": "input.text", "text": "\\udc00"}',
        "too much text": json.dumps({"type": "input.text", "text": "x" * (most + 1)}),
        "an unknown voice": '{"type": "session.config", "voice": "nobody"}',
        "a bad number": '{"type": "session.config", "temperature": -1}',
    }
    with server.talk(CONFIG) as session:
        for name, mistake in mistakes.items():
            session.websocket.send(mistake)
            answer = session.receive()
            assert answer["type"] == "error" and len(answer["message"]) > 15, name
            if name in ("half of a surrogate pair", "too much text"):  # the following text is the rest of it:
                session.write(" and the rest")  # a language model continues to write
                done = session.receive()
                assert done["type"] == "session.done" and done["total_sentences"] == 0
        session.send("input.text", text="Hello there.")
        session.configure(**CONFIG)
        assert "within an utterance" in session.until("error")[0][-1]["message"]
        session.send("input.done")
        messages, audio = session.until("session.done")
        assert audio == server.pcm() and messages[-1]["total_sentences"] == 1


@pytest.mark.parametrize("size", [1, 7, 1000])  # of the pieces of text
def test_a_long_utterance_is_spoken_in_sentences(size):
    """2,048 positions were full after 160 s, and the rest of the text caused an error."""
    parts = [
        'It is 3.5 metres, "really." ',
        "今天天气很好我们走吧。",
        "Yes! And then no more... ",
        "x" * 50 + " ",
        "the rest. So.",
    ]
    text = "".join(parts)

    async def spoken(room: int | None) -> list[str]:
        script, sentences = ArrivingScript(SpeechOptions(), Lexicon({})), []
        (part,) = script.parts

        async def write() -> None:
            for start in range(0, len(text), size):
                script.add(text[start : start + size])
                await asyncio.sleep(0)
            script.finish()

        writer = asyncio.create_task(write())
        while await script.has_more(part):
            sentences.append("".join([piece async for piece in script.pieces(part, room)]))
        await writer
        return sentences

    assert asyncio.run(spoken(20)) == parts
    assert asyncio.run(spoken(None)) == [text]
    parts[:] = [" " * 30 + "hello there, how is it?" + "\n", "\n" * 50 + "world"]  # no part without a word
    text = "".join(parts)
    assert asyncio.run(spoken(20)) == parts


@pytest.fixture(scope="module")
def ending(checkpoint, tmp_path_factory):
    """A server whose speech ends by itself."""
    with serving(checkpoint(), tmp_path_factory.mktemp("ending") / "voices", max_seq_len=128) as server:
        yield server


def test_a_text_without_sentence_ends_is_spoken(ending):
    """It has more tokens than there are positions, and no place to cut it, which caused an error."""
    with ending.talk(CONFIG | {"max_new_tokens": None, "seed": 3}) as session:
        messages, audio = session.say("qxzjkvw" * 10)
    assert [message for message in messages if message["type"] == "error"] == [] and audio
    assert messages[-1]["total_sentences"] > 1 and messages[-1].keys() == {
        "type",
        "utterance_index",
        "total_sentences",
    }  # nothing is unspoken


def test_an_utterance_that_reads_no_text_is_an_error(ending, monkeypatch):
    """If a transcript is much longer than its recording, the text was spoken again and again."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.prompts.arriving_text.ArrivingText.characters_read", lambda *_: 0)
    with ending.talk(CONFIG | {"max_new_tokens": None}) as session:
        messages, _ = session.say("Hi.")
    assert [message["param"] for message in messages if message["type"] == "error"] == ["ref_text"]
    assert messages[-1]["error"]


def test_text_that_grows_too_long_ends_its_utterance(server, speech):
    with server.talk(CONFIG) as session:
        messages, audio = session.say("x" * 4000, "x" * 4000)
        assert messages[0]["type"] == "error" and "4096" in messages[0]["message"] and not audio
        wait_until_free(speech)


@pytest.mark.parametrize(
    "first", ['{"type": "input.text", "text": "Hello."}', '{"type": "session.config", "speed": 5}', "garbage", b"\x00"]
)
def test_a_session_begins_with_a_configuration(server, first):
    with server.talk() as session:
        session.websocket.send(first)
        assert session.receive()["type"] == "error"
        with pytest.raises(ConnectionClosed):
            session.receive()


def test_silence_ends_a_session(speech):
    with RunningServer(speech, config_seconds=0.3, idle_seconds=0.3) as server:
        for config in (None, CONFIG):
            with server.talk() as session:
                if config:
                    session.configure(**config)
                    session.send("input.text", text="An utterance that never ends")
                started = time.monotonic()
                messages, _ = session.until("error")
                assert "within 0.3 s" in messages[-1]["message"] and time.monotonic() - started < 10
                with pytest.raises(ConnectionClosed):
                    session.until("never")
        wait_until_free(speech)
        with server.talk() as session:  # a listener need not send anything
            session.configure(**CONFIG | {"max_new_tokens": 80})
            assert len(session.say("A long speech.")[1]) == 79 * FRAME


def test_a_client_learns_that_its_text_does_not_come(server, monkeypatch):
    """The error is the engine's own, not that of a request that takes too long."""
    monkeypatch.setattr(engine_host, "Listener", partial(engine_host.Listener, text_timeout=0.3))
    with server.talk(CONFIG) as session:
        session.send("input.text", text="H")
        messages, _ = session.until("error")
        messages += session.say(" is the rest of a text that has failed")[0]
        assert messages[0]["message"] == "no text has come for 0.3 s, and it has not ended"
        assert messages[0]["code"] == "timeout" and messages[-1]["error"]


def test_keys_origins_and_the_number_of_connections(speech, capsys):
    good = {"Authorization": "Api-Key secret"}
    with RunningServer(speech, api_key="secret", max_connections=1) as server:
        assert refusal(server).status_code == 401
        assert refusal(server, additional_headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert refusal(server, additional_headers=good, origin="http://evil.example").status_code == 403
        with server.talk(CONFIG, additional_headers=good) as session:
            session.say()
            assert refusal(server, additional_headers=good).status_code == 503
            answer = server.speak(headers=good)
            assert (answer.status, answer.headers["Retry-After"], answer.error["code"]) == (503, "1", "too_many")
            assert server.ask("GET", "/health").status == 200
        wait_until(lambda: server.speak(headers=good).status == 200)
    assert "ERROR" not in capsys.readouterr().err  # uvicorn logged each refusal as an error of the server


def test_a_full_queue_and_shutting_down(server, speech):
    with server.talk(CONFIG) as session:
        (model,) = speech.models
        model.engine.in_flight += 4  # two places, and two that wait
        messages, _ = session.say("Hello.")
        model.engine.in_flight -= 4
        assert messages[0]["type"] == "error" and messages[0]["code"] == "queue_full"
        speech.is_draining = True
        try:
            session.send("input.text", text="Hello.")
            assert "shutting down" in session.receive()["message"]
        finally:
            speech.is_draining = False
