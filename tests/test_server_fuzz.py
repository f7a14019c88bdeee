"""Invalid input of every kind: always a 4xx (or an `error` message) with a sentence, and the server keeps working."""

import base64
import contextlib
import json
import random
import socket

import pytest
from serving_helpers import JSON, LIMIT, SHORT, RunningServer, load_speech, wait_until_free
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from qwen3_tts_cuda_graphs.serving.requests import SpeechRequest

HUGE = 10**400

# Values that no field accepts, and some that a few fields accept.
STRANGE = [
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**53, 2**63, 2**64, -(2**63), HUGE),
    *("", " ", "\n", "0", "1.0", "nan", "null", "\x00", "\ud800", "\udfff", "\u202e", "\ufeff", "\u0301"),
    "\U0001f469\u200d",
    *("a" * 5000, "../../etc/passwd", "http://127.0.0.1:1/x", "file:///etc/passwd", "%s%n", "<|im_end|>", "{}", "[]"),
    *("data:audio/wav;base64,", "data:,", "data:audio/wav;base64,!!!!", "AAAA", "=", "'; DROP TABLE voices; --"),
    *([], [1], [[]], ["a"], [None], [HUGE], {}, {"a": {"b": []}}),
    *({"id": 1}, {"id": None}, {"id": "x" * 200}, {"id": {"id": "a"}}),
]
ALIASES = ["speaker"]


@pytest.fixture(autouse=True)
def still_speaks(server):
    """After each test the same request gets the same speech as before, and every place is free."""
    yield
    wait_until_free(server.speech)
    answer = server.speak(response_format="pcm")
    assert (answer.status, len(answer.body)) == (200, 5 * 3840)


def assert_refused(answer, what) -> None:
    assert 400 <= answer.status < 500, (what, answer.status, answer.body[:200])
    error = answer.error
    assert error.keys() == {"message", "type", "param", "code"}, what
    assert 15 < len(error["message"]) <= 500 and "Traceback" not in error["message"], what


def post(server, content) -> "Answer":  # noqa: F821
    body = content if isinstance(content, bytes) else json.dumps(content).replace("Infinity", "1e999").encode()
    return server.ask("POST", "/v1/audio/speech", body, JSON)


@pytest.mark.parametrize("field", [*SpeechRequest.model_fields, *ALIASES])
def test_every_field(server, field):
    """A strange value is refused, or accepted and answered with speech."""
    refused = 0
    for value in STRANGE:
        if field == "max_new_tokens" and value is None:
            continue  # would speak until the cache is full
        answer = post(server, {"input": "Hi.", **SHORT, "max_new_tokens": 2, field: value})
        if answer.status != 200:
            assert_refused(answer, (field, value))
            refused += 1
    assert refused >= (5 if field != "model" else 3)


@pytest.mark.parametrize(
    "kind, field", [("base", "ref_text"), ("custom_voice", "instructions"), ("voice_design", "instructions")]
)
def test_texts_beside_the_input(server, checkpoint, tmp_path, wav, kind, field):
    """Strange texts that are tokenized. Half of a surrogate pair caused 500."""
    fields = {"input": "Hi.", **SHORT, "max_new_tokens": 2}
    with contextlib.ExitStack() as stack:
        if kind == "base":
            fields["ref_audio"] = base64.b64encode(wav).decode()
        else:
            speech = load_speech(checkpoint(kind), tmp_path)
            stack.callback(speech.close)
            server = stack.enter_context(RunningServer(speech))
        for value in ("\x00", "a\ud800", "\udfff", "\u202e", "\U0001f469\u200d", "\u0301", "a" * 5000, "<|im_end|>"):
            answer = post(server, fields | {field: value})
            if answer.status != 200:
                assert_refused(answer, value)
                assert answer.error["param"] == field
        with connect(server.websocket_address, open_timeout=LIMIT) as websocket:
            websocket.send(json.dumps({"type": "session.config", **fields, field: "a\ud800"}))
            refused = json.loads(websocket.recv(timeout=LIMIT))
            assert refused["type"] == "error" and field in refused["message"]


@pytest.mark.parametrize(
    "field, values",
    [
        ("temperature", [0, -1, "hot", 1e999]),
        ("top_k", [0, -5, 1.5, 10**9]),
        ("top_p", [0, 1.01, -1]),
        ("repetition_penalty", [0, -1]),
        ("max_new_tokens", [0, 1, -7, 10**9, 2.5]),
        ("seed", [-1, 2**63, 0.5, True]),
        ("speed", [0.24, 4.01, -1, "fast", 1e999]),
        ("response_format", ["vorbis", "mp4", "_8000", 1]),
        ("sample_rate", [0, -8000, 8001, 16000.5, "8000", True, [8000], 10**30]),
        ("bit_rate", [0, 31, 193, "64", 1e999]),
        ("stream_format", ["websocket", 3]),
        ("language", ["Klingon", "xx-US"]),
        ("voice", ["nobody", "speaker\x00", 7]),
        ("instructions", [5, "x" * 5000]),
        ("input", ["", " \n\t", None, 5, ["a"], "\ud800"]),
        ("speaker_embedding", [[], [1.0], ["a"] * 64, [1e999] * 64, "x"]),
        ("stream", ["yes", 1]),
        ("non_streaming_mode", ["no", 0]),
        ("x_vector_only_mode", ["no", 0]),
    ],
)
def test_values_that_must_be_refused(server, field, values):
    for value in values:
        answer = post(server, {"input": "Hi.", **SHORT, field: value})
        assert_refused(answer, (field, value))
        assert answer.error["param"] == field or field == "voice", (field, value)


def test_bodies_that_are_no_requests(server):
    bodies = {
        "nothing": b"",
        "half an object": b'{"input": "Hi."',
        "a list": b"[]",
        "a string": b'"Hi."',
        "a number": b"7",
        "null": b"null",
        "NaN": b'{"input": "Hi.", "temperature": NaN}',
        "Infinity": b'{"input": "Hi.", "temperature": -Infinity}',
        "deep lists": b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep objects": b'{"voice": ' + b'{"id":' * 100_000 + b"1" + b"}" * 100_000 + b', "input": "Hi."}',
        "deep, but not too deep": b'{"input": ' + b"[" * 900 + b"]" * 900 + b"}",
        "many values": b'{"input": [' + b"[]," * 1_000_000 + b"1]}",
        "a long number": b'{"input": "Hi.", "seed": ' + b"9" * 5000 + b"}",
        "broken UTF-8": b'{"input": "\xff\xfe\xc0\x80"}',
        "UTF-16": '{"input": "Hi.", "voice": "nobody"}'.encode("utf-16"),
        "zeros": b"\x00" * 1000,
        "no input": b'{"voice": "speaker"}',
        "a form": b"input=Hi.&voice=speaker",
    }
    for name, body in bodies.items():
        assert_refused(post(server, body), name)
    message = post(server, bodies["a long number"]).error["message"]
    assert message == "the request is not JSON: it has a number of 5000 digits"


def test_random_requests(server):
    """Several strange fields at once, and random bytes."""
    dice = random.Random(7)
    fields = [*SpeechRequest.model_fields, *ALIASES]
    for _ in range(150):
        chosen = {field: dice.choice(STRANGE) for field in dice.sample(fields, dice.randint(1, 5))}
        chosen["max_new_tokens"] = chosen.get("max_new_tokens") or 2
        answer = post(server, {"input": "Hi."} | chosen)
        if answer.status != 200:
            assert_refused(answer, chosen)
    for _ in range(50):
        good = bytearray(json.dumps({"input": "Hi.", "max_new_tokens": 2, "voice": "speaker", "seed": 3}).encode())
        for _ in range(dice.randint(1, 4)):
            good[dice.randrange(len(good))] = dice.randrange(256)
        if b'"max_new_tokens": 2,' not in good:  # the speech of the tiny model may not end
            continue
        answer = post(server, bytes(good))
        if answer.status != 200:
            assert_refused(answer, bytes(good))


def test_forms_that_are_no_voices(server):
    head = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    name, file = head.format("name", "") + "x\r\n", head.format("audio_sample", '; filename="a.wav"')
    bodies = {
        "nothing": "",
        "no parts": "--b--\r\n",
        "no file": name + "--b--\r\n",
        "no name": file + "abc\r\n--b--\r\n",
        "a file that is no audio": name + file + "abc\r\n--b--\r\n",
        "a file as name": head.format("name", '; filename="n"') + "x\r\n--b--\r\n",
        "a text as file": name + head.format("audio_sample", "") + "x\r\n--b--\r\n",
        "two files": name + file + "abc\r\n" + file + "abc\r\n--b--\r\n",
        "many fields": "".join(head.format(f"f{i}", "") + "x\r\n" for i in range(50)) + "--b--\r\n",
        "cut": name + file + "abc",
        "garbage": "\x00\x01--b\r\r\n\n",
    }
    for what, body in bodies.items():
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        assert_refused(server.ask("POST", "/v1/audio/voices", body.encode(), headers), what)
    for content_type in ("multipart/form-data", "application/json", "multipart/form-data; boundary=" + "x" * 1000):
        assert_refused(server.ask("POST", "/v1/audio/voices", b"x", {"Content-Type": content_type}), content_type)
    for name in ("..%2f..%2fetc", "%00", "speaker", "%ff"):
        assert_refused(server.ask("DELETE", f"/v1/audio/voices/{name}"), name)


def test_what_is_not_http(server):
    """Garbage on the socket, half a request, an endless header."""
    length = b"POST /v1/audio/speech HTTP/1.1\r\nContent-Length: x\r\n\r\n"
    for data in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", length, b"A" * 100_000):
        with server.open() as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(100)
            except ConnectionResetError:
                continue
            assert answer in (b"",) or answer.startswith(b"HTTP/1.1 4")


def websocket_garbage(dice: random.Random) -> list[str | bytes]:
    messages = [json.dumps(value).encode(errors="surrogatepass").decode(errors="replace") for value in STRANGE]
    for kind in ("session.config", "input.text", "input.done", "input.cancel", "nonsense"):
        for value in dice.sample(STRANGE, 8):
            field = dice.choice([*SpeechRequest.model_fields, "text", "type"])
            messages.append(json.dumps({"type": kind, "max_new_tokens": 2, field: value}))
    messages += [dice.randbytes(dice.randint(0, 100)) for _ in range(10)]
    messages += ["[" * 100_000, '{"type": "input.text", "text": ' + '{"a":' * 50_000, "\x00"]
    dice.shuffle(messages)
    return messages


@pytest.mark.parametrize("seed", range(3))
def test_websocket_garbage(server, seed):
    """Every message is answered or valid; after many errors the connection may be closed with a reason."""
    with connect(server.websocket_address, open_timeout=LIMIT) as websocket:
        websocket.send(json.dumps({"type": "session.config", "max_new_tokens": 2}))
        try:
            for message in websocket_garbage(random.Random(seed)):
                websocket.send(message)
            websocket.send('{"type": "session.close"}')
            while True:
                received = websocket.recv(timeout=LIMIT)
                if isinstance(received, str) and json.loads(received)["type"] == "error":
                    assert len(json.loads(received)["message"]) > 15
        except ConnectionClosed as closed:
            assert closed.rcvd is None or closed.rcvd.code in (1000, 1008)


def test_websocket_frames_that_break_the_protocol(server):
    handshake = (
        f"GET /v1/audio/speech/stream HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n"
    )
    too_long = b"\x81\xff" + b"\x7f" * 8 + bytes(4)
    for frame in (b"\x81\x05hello", b"\xff" * 20, too_long, b"\x81\x82\x00\x00\x00\x00\xff\xfe"):
        with server.open() as connection:
            connection.sendall(handshake.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 101")
            connection.sendall(frame)
            while connection.recv(1000):  # the server closes the connection
                pass
