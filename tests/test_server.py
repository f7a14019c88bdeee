"""The HTTP server: valid requests, invalid requests, and clients that disconnect."""

import asyncio
import base64
import contextlib
import errno
import fcntl
import gc
import http.client
import io
import json
import os
import random
import re
import shlex
import signal
import socket
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import openai
import pytest
import soundfile
import torch
from helpers import ROOT, phone_recording, wav_bytes
from serving_helpers import (
    FRAME,
    JSON,
    LIMIT,
    SHORT,
    LocalService,
    RunningServer,
    audio_of,
    events_of,
    load_speech,
    never_end,
    read_answer,
    read_to_the_end,
    request_bytes,
    serving,
    wait_until,
    wait_until_free,
)
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from qwen3_tts_cuda_graphs.common.formats import SUBTYPES
from qwen3_tts_cuda_graphs.common.samples import to_int16
from qwen3_tts_cuda_graphs.serving import engine_host, voice_folder
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.audio_formats import COMPRESSED, CONTAINERS, CONTENT_TYPES, Encoder
from qwen3_tts_cuda_graphs.serving.connections import SECONDS_TO_BEGIN
from qwen3_tts_cuda_graphs.serving.encoders import Encoders
from qwen3_tts_cuda_graphs.serving.engine_host import RECORDING_THREADS
from qwen3_tts_cuda_graphs.serving.model import OPENAI_VOICES
from qwen3_tts_cuda_graphs.serving.recordings import Decoders, start_decoder
from qwen3_tts_cuda_graphs.serving.requests import SpeechRequest, parse
from qwen3_tts_cuda_graphs.serving.routes import MAX_REGISTRATIONS
from qwen3_tts_cuda_graphs.serving.server_options import make_settings, parse_arguments
from qwen3_tts_cuda_graphs.serving.service import Service
from qwen3_tts_cuda_graphs.serving.settings import Settings, check_host
from qwen3_tts_cuda_graphs.serving.speech_response import SpeechResponse
from qwen3_tts_cuda_graphs.serving.voice_folder import VoiceFolder
from qwen3_tts_cuda_graphs.serving.worker_connection import Timeouts, WorkerConnection
from qwen3_tts_cuda_graphs.speech.runner import Runner


@pytest.fixture(scope="module")
def preset_server(checkpoint, tmp_path_factory):
    with serving(checkpoint("custom_voice"), tmp_path_factory.mktemp("voices")) as server:
        yield server


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def frames(monkeypatch):
    """Control of the model: `count` of its frames, and `may_go_on`, which lets utterances continue after their first
    frame."""
    frames = SimpleNamespace(count=0, may_go_on=threading.Event())
    frames.may_go_on.set()
    original = Runner.launch

    def launch(runner, utterances, hand_over):
        frames.count += 1
        assert utterances[0].launched != 1 or frames.may_go_on.wait(LIMIT)
        return original(runner, utterances, hand_over)

    monkeypatch.setattr(Runner, "launch", launch)
    return frames


@pytest.fixture
def made_voices(monkeypatch):
    """Control of making voices from recordings: their count, whether one has begun, whether it may continue, and one
    prompt to use instead of all."""
    voices = SimpleNamespace(count=0, begun=threading.Event(), may_go_on=threading.Event(), instead=None)
    voices.may_go_on.set()
    original = engine_host.clone_prompt

    def make(*arguments):
        voices.begun.set()
        assert voices.may_go_on.wait(LIMIT)
        voices.count += 1
        return voices.instead or original(*arguments)

    monkeypatch.setattr(engine_host, "clone_prompt", make)
    return voices


def requests_with(speech, outcome: str) -> float:
    return speech.metrics.registry.get_sample_value("qwen3_tts_requests_total", {"outcome": outcome}) or 0.0


def spoken_alone(speech, **arguments) -> np.ndarray:
    """The engine's speech without the server."""
    method, voice = speech.tts.generate_voice_clone, {"voice_clone_prompt": speech.host.file_voices["speaker"]}
    stream = speech.engine.stream(method, text="Hello there.", language="Auto", **SHORT, **voice, **arguments)
    chunks = []
    with pytest.raises(Warning):  # max_new_tokens
        for audio, _ in stream:
            chunks.append(audio)
    return np.concatenate(chunks)


# ---- Responses


def test_the_audio_is_the_engines(server, speech):
    """wav and pcm have the samples of the engine; the other formats are tested below."""
    expected = to_int16(spoken_alone(speech)).tobytes()  # the conversion of the worker
    assert len(expected) == 5 * FRAME
    answer = server.speak(response_format="pcm")
    assert answer.status == 200 and answer.body == expected
    assert answer.headers["X-Sample-Rate"] == "24000" and len(answer.headers["X-Request-Id"]) == 16
    assert server.pcm(seed=2) != expected


def decoded(audio: bytes) -> np.ndarray:
    """Samples at 24 kHz. Decoders skip an encoder's initial padding, except in mp3 and aac files."""
    to_24_khz = av.AudioResampler("s16", "mono", 24000)
    with av.open(io.BytesIO(audio)) as file:
        frames = [frame for packet in file.decode(audio=0) for frame in to_24_khz.resample(packet)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames + to_24_khz.resample(None)])


def likeness(audio: np.ndarray, expected: np.ndarray) -> float:
    """The correlation at the best delay."""
    size = len(audio) + len(expected)
    product = np.fft.irfft(np.fft.rfft(audio, size) * np.fft.rfft(expected, size).conj(), size)
    return product.max() / np.linalg.norm(audio.astype(float)) / np.linalg.norm(expected.astype(float))


@pytest.mark.parametrize("name", [*CONTENT_TYPES, "WAV", ""])
def test_every_format(server, name):
    """Streamed and whole. Upper case is accepted, and no format means mp3 as with OpenAI: some programs rely on it."""
    kind = (name or "mp3").lower()
    streamed, whole = (server.speak(response_format=name, **fields) for fields in ({}, {"stream": False}))
    assert streamed.status == whole.status == 200
    assert streamed.headers["Content-Type"] == whole.headers["Content-Type"] == CONTENT_TYPES[kind]
    assert streamed.headers["Transfer-Encoding"] == "chunked" and "Content-Length" not in streamed.headers
    assert int(whole.headers["Content-Length"]) == len(whole.body)
    if kind in SUBTYPES:  # without a header
        assert whole.body == streamed.body
        return
    audio, expected = decoded(streamed.body), np.frombuffer(server.pcm(), "<i2")
    np.testing.assert_array_equal(decoded(whole.body), audio)
    if kind in ("wav", "flac"):
        np.testing.assert_array_equal(audio, expected)
    else:
        assert 0 <= len(audio) - len(expected) < 0.1 * 24000


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("frames", [1, 8])
def test_compressed_formats_leave_at_once(name, frames):
    """mp3 and opus are sent with the first 80 ms, aac and flac with the second. Decoded, they resemble the input."""
    time = np.arange(3 * 24000) / 24000
    tone = (12000 * np.sin(2 * np.pi * (200 + 150 * time) * time)).astype(np.int16)
    encoder = Encoder(name, 24000)
    pieces = [encoder.add(chunk) for chunk in np.split(tone, range(1920 * frames, len(tone), 1920 * frames))]
    at_once = 0 if name in ("mp3", "opus") or frames > 1 else 1
    assert len(b"".join(pieces[: at_once + 1])) > 150  # more than a header
    assert all(map(bytes.__add__, pieces[1:], pieces[2:]))  # no two consecutive pieces are empty
    audio = decoded(b"".join([*pieces, encoder.finish()]))
    if name == "flac":
        np.testing.assert_array_equal(audio, tone)
    else:
        assert 0 <= len(audio) - len(tone) < 0.1 * 24000 and likeness(audio, tone) > 0.98


@pytest.mark.parametrize("speed", [0.25, 0.8, 4])
def test_speed_changes_the_tempo_and_keeps_the_pitch(speed):
    """At speed 1 the samples are the model's. Playing faster without atempo would raise the pitch."""
    tone = (6000 * np.sin(2 * np.pi * 440 * np.arange(4 * 24000) / 24000)).astype(np.int16)
    tone[-2400:] *= 4  # the end is loud and must be complete: atempo alone drops some of it
    encoder = Encoder("pcm", 24000, speed)
    pieces = [encoder.add(chunk) for chunk in np.split(tone, range(1920, len(tone), 1920))]
    assert any(pieces[:4])  # it is streamed
    audio = np.frombuffer(b"".join([*pieces, encoder.finish()]), "<i2")
    assert len(audio) == round(len(tone) / speed)
    assert np.sum(np.abs(audio) > 9000) * speed == pytest.approx(np.sum(np.abs(tone) > 9000), rel=0.25)
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    assert spectrum.argmax() * 24000 / len(audio) == pytest.approx(440, abs=2)


@pytest.mark.parametrize(
    "package, without, others",
    [
        (
            "av",
            [{"response_format": "flac"}, {"response_format": "pcm", "speed": 2}, {"speed": 2}],
            ["wav", "pcm", "mp3"],
        ),
        ("lameenc", [{}, {"response_format": "mp3"}], ["wav", "pcm", "flac"]),
    ],
)
def test_without_a_library_for_encoding(server, monkeypatch, package, without, others):
    """Formats that do not need it still work; for the others the error says what to install."""
    monkeypatch.setattr(f"qwen3_tts_cuda_graphs.serving.audio_formats.{package}", None)
    for name in others:
        assert server.speak(response_format=name).status == 200
    for fields in without:
        answer = server.speak(**fields)
        assert answer.status == 400 and f"pip install {package} there" in answer.error["message"]


def test_a_rate_that_mp3_cannot_have(server, monkeypatch):
    """lameenc says so with an error of its own, also where PyAV is missing."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.audio_formats.av", None)
    answer = server.ask("POST", "/v1/audio/convert?response_format=mp3", wav_bytes(np.zeros(9600), 96000))
    assert answer.status == 400 and "mp3 cannot have 96000 Hz" in answer.error["message"]


@pytest.mark.parametrize(
    "fields, ignored",
    [
        ({"channels": 2, "user": None}, "channels"),
        ({"instructions": "whisper", "Temprature": 0.5}, "instructions, Temprature (did you mean temperature?)"),
        ({"format": "wav", "type": "x"}, "format (did you mean response_format?), type"),
        ({"voice": "alloy", "speaker": "alloy"}, "speaker"),
        ({"a\r\nX-Evil: 1": 1, "\N{SNOWMAN}": 1, "x" * 5000: 1}, "a??X-Evil??1, ?, " + "x" * 40),
        ({f"field{number}": {} for number in range(23)}, None),
    ],
)
def test_fields_that_nobody_knows_are_named(server, fields, ignored):
    """Unknown fields were ignored silently, although one of them may be meant as a missing field. Fields that the model
    does not use are reported in the same way: openai-agents sends instructions with every request, and got 400 from
    every Base model."""
    answer, plain = server.speak(response_format="pcm", **fields), server.speak(response_format="pcm")
    assert answer.status == 200 and answer.body == plain.body and "X-Ignored" not in plain.headers
    assert answer.headers["X-Ignored"] == ignored or not ignored and answer.headers["X-Ignored"].endswith(", 3 more")


NOT_JSON = "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x" * 5000, "\u00e9", ""
PUNYCODE = {"Content-Type": "multipart/form-data; boundary=B; Charset=punycode"}
SLOW_FORM = b"--B\r\nContent-Disposition: form-data; name=x-\r\n\r\n" + b"a" * 50_000 + b"-" + b"a" * 50_000


@pytest.mark.parametrize(
    "path, body, headers, status, words",
    [
        ("speech", b'{"text": "Hello."}', JSON, 400, "input is missing.*text \\(did you mean input\\?\\)"),
        ("speech", b"{}", JSON | {"Content-Encoding": "gzip"}, 415, "content encoding is 'gzip'"),
        # Browsers send these for any web page without a preflight request.
        *(("speech", b"{}", {"Content-Type": kind}, 415, "must be application/json") for kind in NOT_JSON),
        # The time to decode punycode is quadratic in its length: 840 KB blocked every listener for a minute.
        ("voices", SLOW_FORM + b"\r\n--B--\r\n", PUNYCODE, 415, "utf-8"),
        ("convert?response_format=mp3", wav_bytes(np.zeros(0, np.int16), 24000), {}, 400, "no samples"),
        # The message was FFmpeg's own.
        ("convert?response_format=opus", wav_bytes(np.zeros(4410), 44100), {}, 400, "^opus cannot have 44100 Hz: send"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused_in_words(server, path, body, headers, status, words):
    answer = server.ask("POST", f"/v1/audio/{path}", body, headers)
    assert answer.status == status and re.search(words, answer.error["message"]), answer.body
    assert answer.error["param"] == "input" or "input" not in words


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"speed": 4.1}, "speed", "must be from 0.25 to 4"),
        ({"language": "xx"}, "language", "no language 'xx'"),
        ({"ref_text": "what it says"}, "ref_text", "send ref_audio, or leave"),
        ({"x_vector_only_mode": True}, "x_vector_only_mode", "send ref_audio, or leave"),
        # The remedy must be possible for a client.
        (
            {"input": "word " * 500, "non_streaming_mode": True},
            None,
            "of 512 positions: shorten input, instructions or ref_text",
        ),
    ],
)
def test_fields_that_are_refused_in_words(server, fields, param, words):
    answer = server.speak(**fields)
    assert answer.status == 400 and words in answer.error["message"] and answer.error["param"] == param


@pytest.mark.parametrize("protocol", ["h2c", "TLS/1.2"])
def test_offers_of_other_protocols_are_ignored(server, protocol):
    """Java's HTTP client offers h2c with each request. Its body was lost, and the status was 400. A body that was
    refused unread and looks like such an offer must not be taken for a head."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    assert server.speak(headers=offer).status == 200
    body = f"xxxxxxxxxx\r\nUpgrade: {protocol}\r\n\r\n".encode()
    with server.open() as connection:
        connection.sendall(request_bytes(length=len(body)))
        assert read_answer(connection).status == 415
        connection.sendall(body)
        connection.sendall(request_bytes({}, Connection="Upgrade", Upgrade=protocol))
        assert read_answer(connection).status == 200


def test_an_upload_that_is_refused_early_gets_its_answer(speech):
    """The rest of the body was taken for an endless head, and the connection was reset before the client could read the
    answer."""
    with RunningServer(speech, api_key="secret") as server, server.open() as connection:
        connection.sendall(request_bytes(length=3_000_000))
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
        while b"message" not in (rest := connection.recv(10_000)):
            assert rest
        connection.sendall(request_bytes(method="GET", path="/health"))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_http_1_0_has_no_chunks(server):
    """The sizes of chunks were sent in the middle of the audio, which HTTP/1.0 clients do not expect."""
    expected = server.pcm()
    for fields in ({}, {"stream": False}, {"stream_format": "sse"}):
        with server.open() as connection:
            connection.sendall(request_bytes(fields, version="1.0"))
            head, _, audio = read_to_the_end(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head.lower()
        if "stream_format" in fields:
            assert events_of(audio)[-1]["type"] == "speech.audio.done"
        else:
            assert audio == expected


def test_a_slash_too_many(server):
    """A trailing slash caused a redirect to http even behind an https proxy; a doubled one caused 404."""
    body = json.dumps({"input": "Hello.", **SHORT})
    for path in ("/v1/audio/speech/", "/v1/audio/speech//", "/v1//audio/speech", "//v1/audio/speech"):
        assert server.ask("POST", path, body, JSON).status == 200
    assert server.ask("GET", "/v1/models/").status == server.ask("GET", "/").status == 200


@pytest.mark.parametrize("name", ["pcm", "mp3"])
def test_server_sent_events(server, name):
    answer = server.speak(response_format=name, stream_format="sse")
    assert answer.headers["Content-Type"] == "text/event-stream"
    *deltas, done = events = events_of(answer.body)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert audio_of(events) == server.speak(response_format=name).body
    assert len(deltas) == (5 if name == "mp3" else 4)  # chunks of 1, 1, 2 and the rest, then the end of the encoder
    usage = {"input_tokens": 12, "output_tokens": 5, "total_tokens": 17}
    parts = [{"index": 0, "start_seconds": 0, "end_seconds": 0.4}]
    assert done == {"type": "speech.audio.done", "usage": usage, "parts": parts}


def test_bytes_leave_when_the_first_chunk_exists(server, frames):
    """The client receives the first frame before the second is generated."""
    frames.may_go_on.clear()
    with server.asking() as connection:
        response = connection.getresponse()
        first = response.read1(10 * FRAME)
        assert len(first) == FRAME
        frames.may_go_on.set()
        assert len(first + response.read()) == 5 * FRAME


def test_audio_passes_no_middleware(server, monkeypatch):
    """Each of five middlewares wraps `send`, which took a fifth of the time per chunk."""
    seen = []

    def watch(scope, send):
        async def send_and_note(message):
            seen.append(message["type"])
            await send(message)

        return send_and_note

    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.guard.with_request_id", watch)
    assert server.speak(response_format="pcm").status == 200
    assert seen == ["http.response.start"]


def test_fields_as_clients_send_them(server):
    expected = server.pcm(voice="speaker")
    for fields in (
        {"speaker": "speaker"},
        {"voice": {"id": "Speaker"}},
        {"voice": None, "speaker": "Speaker"},
        {"voice": "", "speaker": {"id": "speaker"}},
        {"voice": "alloy", "model": "gpt-4o-mini-tts"},
        {"model": None, "voice": None, "speed": 1, "language": " Auto ", "stream": True, "instructions": None},
        {"stream_format": "audio", "unknown_field": {"x": [1]}, "task_type": "Base"},
    ):
        assert server.pcm(**fields) == expected, fields
    assert server.pcm(temperature=0.1, top_k=1) != expected
    assert server.pcm(language="German") == server.pcm(language="de-DE") != expected
    assert server.pcm(non_streaming_mode=True)


def names_of_voices(server) -> list[str]:
    voices = server.ask("GET", "/v1/audio/voices").json["voices"]
    assert all(voice["id"] == voice["name"] for voice in voices)  # in the form for Open WebUI
    return [voice["id"] for voice in voices]


def test_preset_voices(server, preset_server):
    names = names_of_voices(preset_server)
    assert "vivian" in names and names == sorted(names)
    (model,) = preset_server.speech.models
    assert {model.resolve_voice(name) for name in OPENAI_VOICES} == set(names)  # 13 names for 9 voices
    assert preset_server.pcm(voice="alloy") == preset_server.pcm(voice="aiden") != preset_server.pcm(voice="vivian")
    error = preset_server.speak(voice="vivien").error
    assert "vivian" in error["message"] and error["param"] == "voice"
    assert "ref_audio is not for" in preset_server.speak(ref_audio="AAAA").error["message"]
    error = preset_server.register("me", b"").error
    assert "not for a CustomVoice" in error["message"] and error["param"] == "audio_sample"
    for voice in ("default", "Default"):  # some programs send this name to other servers than OpenAI's
        assert server.speak(voice=voice).status == preset_server.speak(voice=voice).status == 200


def test_a_designed_voice(checkpoint, tmp_path):
    """A VoiceDesign model has no voice names, but clients send some."""
    with serving(checkpoint("voice_design"), tmp_path) as server:
        assert server.pcm(voice="nova") == server.pcm() != server.pcm(instructions="an old sailor")


# ---- Voices of clients


def test_cloning_within_the_request(server, speech, wav):
    text = as_text(wav)
    plain = server.pcm(ref_audio=text)
    for same in ("data:audio/wav;base64," + text, "DATA:audio/wav;BASE64," + base64.encodebytes(wav).decode()):
        assert server.pcm(ref_audio=same) == plain
    assert server.pcm(ref_audio=text, ref_text="what it says") != plain
    assert server.pcm(ref_audio=text, ref_text="what it says", x_vector_only_mode=True) == plain
    server.pcm(ref_text="", x_vector_only_mode=False)  # some clients send every field
    embedding = speech.host.file_voices["speaker"]["ref_spk_embedding"][0].float().tolist()
    assert server.pcm(speaker_embedding=embedding) == server.pcm()


def test_a_voice_that_nobody_waits_for_is_not_kept(server, speech, wav, made_voices):
    """Clients may disconnect while their voice is made, or before, which must not delay the voices of others."""
    before, host = set(speech.host.prompts), speech.host
    made_voices.may_go_on.clear()
    with contextlib.ExitStack() as clients:
        for _ in range(RECORDING_THREADS + 1):
            clients.enter_context(server.asking(ref_audio=as_text(wav)))
        wait_until(lambda: len(host.pending) == RECORDING_THREADS + 1)
        assert made_voices.begun.wait(LIMIT)
    wait_until(lambda: not host.pending)
    made_voices.may_go_on.set()
    wait_until_free(speech)
    server.pcm(ref_audio=as_text(wav))  # after those in the queue
    assert made_voices.count == RECORDING_THREADS + 1
    wait_until(lambda: set(host.prompts) == before)


def test_a_registered_voice_is_kept(server, speech, wav, checkpoint):
    answer = server.register("My-Voice", wav, ref_text="what it says")
    assert answer.status == 200 and answer.json["name"] == "my-voice" and answer.json["seconds"] == 2.0
    assert names_of_voices(server) == ["speaker", "my-voice"]
    spoken = server.pcm(voice="my-voice")
    assert spoken != server.pcm()
    for name, problem in {"my-voice": "already", "speaker": "already", "my voice": "cannot be used"}.items():
        error = server.register(name, wav, ref_text="x" * 5000).error  # too long, but the name is checked first
        assert problem in error["message"] and error["param"] == "name"

    again = Service(str(checkpoint()), "cpu", settings=speech.settings)  # like after a restart
    assert again.voice_names() == ["my-voice"]
    assert again.voices()[0]["ref_text"] == "what it says"
    speech.models[0].engine.connection.voice_keys.clear()  # made again from its file
    assert server.pcm(voice="my-voice") == spoken

    with ThreadPoolExecutor() as threads:  # two at the same time: the second got 500
        assert sorted(threads.map(server.forget, ["My-Voice", "my-voice"])) == [200, 404]
    assert server.speak(voice="my-voice").status == 400
    assert not list(speech.settings.voices.iterdir())


def test_a_registered_voice_is_made_once(server, speech, wav, made_voices):
    """After a restart, each of the first requests for a voice had it made again, and the worker stored all copies. Here
    one of them is cancelled meanwhile."""
    before, host, worker = set(speech.host.prompts), speech.host, speech.models[0].engine.connection
    assert server.register("me", wav).status == 200 and made_voices.count == 1
    worker.send(op="forget", keys=[worker.voice_keys.popitem()[1].result()])
    made_voices.begun.clear()
    made_voices.may_go_on.clear()
    with ThreadPoolExecutor() as threads:
        with server.asking(voice="me"):
            assert made_voices.begun.wait(LIMIT)
            others = [threads.submit(server.speak, voice="me") for _ in range(3)]
            wait_until(lambda: speech.in_flight == 4)
        wait_until(lambda: speech.in_flight == 3)
        made_voices.may_go_on.set()
        assert [other.result(LIMIT).status for other in others] == [200] * 3
    assert made_voices.count == 2 and server.forget("me") == 200
    wait_until(lambda: set(host.prompts) == before)


@pytest.mark.parametrize("speed", [1, 0.5])
def test_a_whole_file_knows_its_length(server, speed):
    """Without it soundfile cannot read a FLAC, and a converted WAV had a header for 4 GiB."""
    names = "wav", "flac", "ulaw_8000"
    wav, flac, ulaw = (server.speak(response_format=name, stream=False, speed=speed).body for name in names)
    (expected, _), (samples, _) = (soundfile.read(io.BytesIO(file), dtype="int16") for file in (wav, flac))
    assert len(expected) == (len(wav) - 44) // 2 > 0 and (samples == expected).all()
    for name, file in zip(names, (wav, flac, ulaw)):
        assert server.ask("POST", f"/v1/audio/convert?response_format={name}", wav).body == file


@pytest.mark.parametrize("name", ["wav", "mp3", "flac"])
def test_malformed_files_are_not_converted(server, wav, name):
    """If a chunk is incomplete or has an impossible length, wave raises several types of errors, some of which caused
    500."""
    dice = random.Random(0)
    files = [wav[:length] for length in (0, 1, 3, 12, 20, 36, 40, 43, 44, 45, 47)]
    files += [wav[:4] + size + wav[8:] for size in (bytes(4), b"\xff" * 4)]
    for _ in range(150):
        data = bytearray(wav[:2000])
        for _ in range(dice.randint(1, 6)):
            data[dice.randrange(60)] = dice.choice([0, 1, 2, 127, 128, 255, dice.randrange(256)])
        files.append(bytes(data))
    for data in files:
        answer = server.ask("POST", f"/v1/audio/convert?response_format={name}", data)
        assert answer.status == 200 or answer.status == 400 and "WAV file" in answer.error["message"], data[:60]


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("name", CONTAINERS)
def test_an_encoder_is_freed_at_once(name, is_finished):
    """It holds megabytes of FFmpeg. It was part of a reference cycle, and full garbage collections are rare."""

    def containers() -> set[int]:  # others may be freed meanwhile: the server's
        return {id(item) for item in gc.get_objects() if type(item) is av.container.OutputContainer}

    gc.disable()
    try:
        before = containers()
        encoder = Encoder(name, 24000)
        encoder.add(np.zeros(24000, np.int16))
        (own,) = containers() - before
        if is_finished:
            encoder.finish()
        del encoder
        assert own not in containers()
    finally:
        gc.enable()


def test_trailers_without_an_end(server):
    """uvicorn stored all trailers of a chunked body, without a key: 900 MB in 5 s."""
    head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.open() as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n")
        with pytest.raises(OSError):  # a reset
            for _ in range(1000):
                connection.sendall(b"a:b\r\n" * 10_000)


def test_a_body_that_was_announced_and_refused(server):
    """The next request on the connection was read as the body."""
    with server.open() as connection:
        connection.sendall(request_bytes(length=10, Content_Type="text/plain", Expect="100-continue"))
        received = read_to_the_end(connection)
    assert received.startswith(b"HTTP/1.1 415 ") and b"\r\nconnection: close\r\n" in received.lower()


def test_a_worker_that_ends_while_a_voice_is_registered(server, speech, wav, monkeypatch):
    """The call was sent to the next worker, which was still loading and ended because of it."""
    first, engine = speech.models[0].engine.connection, speech.models[0].engine

    def next_worker(name):
        engine.connection = WorkerConnection(print, engine.timeouts)

    monkeypatch.setattr(speech.cloned_voices.folder, "check_new", next_worker)
    with server.registered("me", wav):
        assert [voice.name for voice in first.voice_keys] == ["me"]
        engine.connection = first


def test_a_clients_mistakes_are_not_in_the_log(server, caplog):
    """python_multipart and numpy logged a line for each."""
    form = {"Content-Type": "multipart/form-data; boundary=CC"}
    assert server.ask("POST", "/v1/audio/voices", b"--BB\r\n", form).status == 400
    loud = wav_bytes(np.full((24000, 2), 3e38, np.float32), 24000, subtype="FLOAT")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert server.speak(ref_audio=as_text(loud)).status == 400
    assert not caplog.messages


def test_what_is_not_a_file_is_no_voice(server, speech):
    """Opening a pipe in the folder blocks until a writer opens it, which blocked the whole server."""
    speech.settings.voices.mkdir(exist_ok=True)
    os.mkfifo(speech.settings.voices / "pipe.safetensors")
    try:
        assert "pipe" not in names_of_voices(server)
    finally:
        (speech.settings.voices / "pipe.safetensors").unlink()


def test_a_voice_that_is_removed_before_it_is_used(server, speech, wav):
    """The status is 404, not 500."""
    with server.registered("me", wav):
        speech.host.prompts.clear()
        answer = server.speak(voice="me")
        assert answer.status == 404 and answer.error["code"] == "unknown_voice"


def test_a_second_request_before_the_first_is_answered(server, speech):
    """It hid the disconnection of the first request's client. Now it is not read, and the connection is closed after
    the first answer."""
    others = request_bytes(method="GET", path="/docs") * 1000
    with server.open() as connection:
        connection.sendall(request_bytes({"max_new_tokens": 450, "stream": False}))
        wait_until(lambda: speech.in_flight)
        connection.sendall(others)
        time.sleep(0.1)
        before = requests_with(speech, "cancelled")
    wait_until_free(speech)
    assert requests_with(speech, "cancelled") == before + 1
    with server.open() as connection:
        connection.sendall(request_bytes(method="GET", path="/health") + others)
        received = read_to_the_end(connection)
    assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200") == 1


@pytest.fixture
def broken_disk(monkeypatch):
    """`with broken_disk("replace", errno.ENOSPC)`: a function of the system fails as with a full disk."""

    @contextlib.contextmanager
    def broken_disk(part, code):
        def fail(*_, **__):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            module = {"open": voice_folder, "TemporaryFile": tempfile}.get(part, Path)
            patch.setattr(module, part, fail, raising=part != "open")
            yield

    return broken_disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_voice_that_cannot_be_stored_is_not_kept(server, speech, wav, broken_disk, code, caplog):
    """A full disk caused 500 and a traceback."""
    before, host = set(speech.host.prompts), speech.host
    for part in ("open", "chmod", "touch", "replace", "mkdir"):
        caplog.clear()
        with broken_disk(part, code):
            answer = server.register("me", wav)
        error = answer.error
        assert (answer.status, error["type"], error["code"]) == (507, "server_error", "disk"), part
        words = os.strerror(code), "--voices"
        assert all(part in error["message"] for part in words) and "tmp" not in error["message"]
        assert "Traceback" not in caplog.text and caplog.text.count("\n") == 1
        wait_until(lambda: set(host.prompts) == before)
        assert not [*speech.settings.voices.glob(".*")] and names_of_voices(server) == ["speaker"]


def test_a_voice_that_cannot_be_removed(server, wav, broken_disk):
    with server.registered("me", wav), broken_disk("unlink", errno.EROFS):
        assert server.forget("me") == 507


def test_an_upload_needs_no_temporary_files(server, recording, broken_disk):
    """A full $TMPDIR caused 500."""
    file = wav_bytes(np.tile(recording[0], 15), recording[1])
    with broken_disk("TemporaryFile", errno.ENOSPC), server.registered("me", file):
        assert len(file) > 1_400_000


def test_voices_are_for_this_user_only(tmp_path):
    """Recordings and transcripts were readable for all users of the machine."""
    folder = tmp_path / "new" / "voices"
    before = os.umask(0)
    try:
        VoiceFolder(Settings(voices=folder)).add("me", (np.ones(24000, np.float32), 24000), "what it says")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_what_a_killed_registration_has_left_is_removed(tmp_path):
    """Files that another server is writing stay: they are locked, or new."""
    names = [f".{name}.safetensors.0123abcd" for name in ("killed", "locked", "new", "old")]
    killed, locked, new, old = files = [tmp_path / name for name in names]
    for path in files:
        path.write_bytes(b"" if path in (new, old) else b"half a voice")
    os.utime(old, (0, 0))
    (tmp_path / ".gitignore").write_text("*")
    with open(locked) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        VoiceFolder(Settings(voices=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {locked.name, new.name, ".gitignore"}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decoder_that_crashes_harms_nobody(server, speech, wav, signal_number):
    """Recordings were decoded in the server's own process."""

    async def start_and_kill():
        helper = await start_decoder(seconds=0.5)
        helper.popen.send_signal(signal_number)
        return helper

    whole, speech.cloned_voices.decoders = speech.cloned_voices.decoders, Decoders(start_and_kill)
    for answer in (server.register("x", wav), server.speak(ref_audio=as_text(wav))):
        assert answer.status == 400 and "cannot be decoded" in answer.error["message"]
    speech.cloned_voices.decoders = whole
    for _ in range(2):
        assert server.speak(ref_audio=as_text(wav)).status == 200
        whole.idle[-1].popen.kill()  # while it is idle
        wait_until(lambda: whole.idle[-1].is_over)


def test_broken_uploads_are_not_in_the_log(server, recording, capfd):
    """libmpg123 itself writes to stderr."""
    mp3 = wav_bytes(*recording, format="MP3")
    dice = random.Random(0)
    for _ in range(20):
        data = bytearray(mp3)
        for _ in range(200):
            data[dice.randrange(len(data))] = dice.randrange(256)
        assert server.speak(ref_audio=as_text(data)).status in (200, 400)
    assert "mpg123" not in capfd.readouterr().err


@pytest.mark.parametrize("gain", [3.0, 1e30])
def test_a_recording_beyond_full_scale(server, speech, recording, gain):
    """The stored file was clipped, so the voice changed after a restart; a recording with samples of 1e30 was
    registered but could not be used."""
    with server.registered("loud", wav_bytes(gain * recording[0], recording[1], subtype="FLOAT")):
        (before,) = [*speech.host.prompts.values()][-1]
        speech.models[0].engine.connection.voice_keys.clear()
        assert server.speak(voice="loud").status == 200
        (after,) = [*speech.host.prompts.values()][-1]
        assert before is not after and torch.equal(before.ref_spk_embedding, after.ref_spk_embedding)


def test_an_embedding_that_is_not_finite(server, speech, wav, made_voices):
    """It is refused when the voice is registered, not when it is first used."""
    width = speech.models[0].config["talker_config"]["hidden_size"]
    made_voices.instead = [SimpleNamespace(ref_spk_embedding=torch.full([width], torch.nan))]
    for name, answer in (
        ("audio_sample", server.register("x", wav)),
        ("ref_audio", server.speak(ref_audio=as_text(wav))),
        ("speaker_embedding", server.speak(speaker_embedding=[1e300] * width)),
    ):
        assert answer.status == 400 and answer.error["param"] == name and "NaN or infinite" in answer.error["message"]
    assert names_of_voices(server) == ["speaker"]


@pytest.mark.parametrize(
    "name", ["../me", "me/../../x", ".hidden", "a" * 65, "", "two words", "nul\0", "mé", "-me", "a.b"]
)
def test_a_name_cannot_leave_its_folder(server, speech, wav, name):
    answer = server.register(name, wav)
    assert answer.status == 400 and answer.error["message"]
    assert not [path for path in speech.settings.voices.parent.rglob("*") if path.is_file()]


def test_a_broken_voice_file_is_left_out(checkpoint, tmp_path, caplog):
    """Others may put files into the folder: none of them is executed, and none stops the server."""
    (tmp_path / "broken.safetensors").write_bytes(b"\x80\x04not a voice")
    (tmp_path / "Bad Name.safetensors").write_bytes(b"")
    speech = Service(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path))
    assert speech.voice_names() == []
    assert "broken" in caplog.text and "Bad Name" in caplog.text


def bad_recordings(wav):
    noise = np.random.default_rng(0).normal(0, 0.1, (96000, 8))
    huge = bytearray(wav)
    huge[40:44] = b"\xff\xff\xff\x7f"  # the header announces hours
    return {
        "nothing": b"",
        "text": b"hello",
        "a pickle": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94.",
        "cut in its header": wav[:30],
        "silence": wav_bytes(np.zeros(48000), 24000),
        "empty": wav_bytes(noise[:0, 0], 24000),
        "too short": wav_bytes(noise[:1000, 0], 24000),
        "too long": wav_bytes(np.tile(noise[:, 0], 6), 8000),
        "eight channels": wav_bytes(noise, 24000),
        "a strange rate": wav_bytes(noise[:, 0], 400000),
        "NaN": wav_bytes(np.full(48000, np.nan, np.float32), 24000, subtype="FLOAT"),
        "a raw format": wav_bytes(noise[:, 0], 24000, format="AU", subtype="PCM_16"),
        "a phone's, too long": phone_recording(np.tile(noise[:, 0], 7), 8000, "ipod", "aac"),
        "a phone's, silent": phone_recording(np.zeros(48000), 24000, "webm", "libopus"),
        "a phone's, six channels": phone_recording(noise[:, 0], 48000, "mp4", "aac", "5.1"),
        "a phone's, cut": phone_recording(noise[:, 0], 48000, "mp4", "aac")[:5000],
    }, bytes(huge)


def test_a_phones_recording_is_a_voice(server):
    """test_audio_files.py tests the other containers."""
    data = phone_recording(np.random.default_rng(0).normal(0, 0.1, 96_000), 48000, "webm", "libopus")
    assert server.speak(ref_audio=as_text(data)).status == 200
    with server.registered("phone", data):
        pass


def test_recordings_are_decoded_with_limits(server, wav):
    bad, promises_hours = bad_recordings(wav)
    for name, data in bad.items():
        registered = server.register("x", data)
        assert registered.error["param"] == "audio_sample", name
        for answer in (registered, server.speak(ref_audio=as_text(data))):
            assert answer.status == 400 and len(answer.error["message"]) > 20, name
            assert answer.error["param"] in ("audio_sample", "ref_audio"), name
            if name in ("nothing", "empty"):
                assert "is empty" in answer.error["message"] or "no samples" in answer.error["message"]
    assert server.speak(ref_audio=as_text(promises_hours)).status in (200, 400)
    assert names_of_voices(server) == ["speaker"]


def test_nothing_is_fetched_for_strangers(server, tmp_path, wav):
    """The URL and the path lead to an existing recording, which would be a valid voice."""
    (tmp_path / "voice.wav").write_bytes(wav)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, contextlib.chdir(tmp_path):
        elsewhere.setblocking(False)
        web = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/voice.wav"
        path = tmp_path / "voice.wav"
        for address in (web, web.replace("http", "ftp"), "https://x", f"file://{path}", str(path), "voice.wav", "abcd"):
            answer = server.speak(ref_audio=address)
            assert answer.status == 400 and answer.error["message"].startswith("ref_audio"), address
            assert answer.error["param"] == "ref_audio"
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


# ---- Other routes


def test_models_health_metrics(server, checkpoint):
    assert server.ask("GET", "/health").json == {"status": "ok"}
    (model,) = server.ask("GET", "/v1/models").json["data"]
    assert model["id"] == checkpoint().name and "/" not in model["id"]
    assert server.ask("GET", f"/v1/models/{model['id']}").json == model
    assert server.ask("GET", "/v1/audio/models").json["models"] == [model]  # Open WebUI
    assert server.ask("GET", "/v1/test").json == {"status": "ok"}  # wyoming-openai then lists the voices;
    assert server.ask("GET", "/v1/readyz").status == 404  # with this route it would take the model for the only voice
    other = server.ask("GET", "/v1/models/tts-1")
    assert other.status == 404 and model["id"] in other.error["message"]
    server.speak(), server.speak(temperature=-1)
    text = server.ask("GET", "/metrics").body.decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures['qwen3_tts_requests_total{outcome="complete"}']) >= 1
    assert float(figures['qwen3_tts_requests_total{outcome="invalid"}']) >= 1
    assert float(figures["qwen3_tts_audio_seconds_total"]) >= 0.4
    assert float(figures["qwen3_tts_first_audio_seconds_count"]) >= 1
    assert float(figures["qwen3_tts_frame_seconds_count"]) >= 1
    assert float(figures["qwen3_tts_streams_active"]) == float(figures["qwen3_tts_streams_waiting"]) == 0
    assert "qwen3_tts_underruns_total" in figures


def test_unknown_routes_and_methods(server):
    for method, path, status, allowed in (
        ("GET", "/v1/nothing", 404, None),
        ("PUT", "/v1/audio/speech", 405, "GET, HEAD, POST"),
        ("PUT", "/v1/audio/voices", 405, "GET, HEAD, POST"),
        ("GET", "/redoc", 404, None),
    ):
        answer = server.ask(method, path)
        assert answer.status == status and answer.error["message"]
        assert answer.headers["Allow"] == allowed
        assert ("/v1/audio/speech, /v1/audio/speech/stream" in answer.error["message"]) == (status == 404)
    assert server.ask("HEAD", "/health").status == 200


def test_every_response_has_an_id(server, monkeypatch, caplog):
    """A client can report which request failed, and the log has the same id. Internal errors reveal no details."""
    good = server.ask("GET", "/v1/models"), server.speak(), server.speak(stream_format="sse")
    bad = server.speak(temperature=-1), server.ask("GET", "/nothing"), server.speak(headers={"Origin": "http://x"})
    assert [answer.status for answer in (*good, *bad)] == [200, 200, 200, 400, 404, 403]
    failed = []
    for function, error, status, words in (
        ("answer.sampling", RuntimeError("/secret/path"), 500, "log"),
        ("answer.sampling", TimeoutError("/secret/path"), 503, "took too long"),  # not an error of the engine
        ("service.Service.check", RuntimeError("/secret/path"), 500, "log"),
        ("service.Service.voices", RuntimeError("/secret/path"), 500, "log"),
    ):

        def fail(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(f"qwen3_tts_cuda_graphs.serving.{function}", fail)
            is_list = function == "service.Service.voices"
            answer = server.ask("GET", "/v1/audio/voices") if is_list else server.speak()
        assert answer.status == status and b"secret" not in answer.body and words in answer.error["message"]
        failed.append(answer)
    ids = [answer.headers["X-Request-Id"] for answer in (*good, *bad, *failed)]
    assert {len(name) for name in ids} == {16} and len(set(ids)) == len(ids)
    for answer in failed:
        assert (f"request {answer.headers['X-Request-Id']} failed" in caplog.text) == (answer.status == 500)
    assert "/secret/path" in caplog.text
    assert server.speak().status == 200


# ---- Limits


def test_a_key_guards_every_route_but_health_and_docs(speech):
    key = "k\u00e4y-1"
    with RunningServer(
        speech, api_key=f" {key}\n"
    ) as server:  # may come from a file; HTTP clients cannot send surrounding white space
        open_routes = "/health", "/livez", "/docs", "/page.css", "/page.js"
        assert [server.ask("GET", path).status for path in open_routes] == [200] * 5
        open_routes += ("/v1/audio/speech/stream",)
        routes = [route.path for route in server.app.routes if route.path not in open_routes]
        assert len(routes) >= 7
        for path in routes:
            answer = server.ask("GET", path)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key", path
        basic = base64.b64encode(f"anyone:{key}".encode()).decode()
        for scheme in (b"Bearer " + key.encode(), b"Api-Key " + key.encode(), b"Basic " + basic.encode()):
            assert server.ask("GET", "/v1/models", headers={"Authorization": scheme}).status == 200, scheme
        for wrong in ("Bearer", "Bearer k", "Basic !", "Basic a2V5", b"Bearer \xff\xfe"):
            assert server.ask("GET", "/v1/models", headers={"Authorization": wrong}).status == 401
        assert server.ask("GET", "/").headers["WWW-Authenticate"] == "Bearer"
    with RunningServer(speech, api_key=key, open_lists=True) as server:  # Open WebUI requests these without the key
        for path in ("/v1/models", "/v1/audio/models", "/v1/audio/voices", "/v1/test"):
            assert server.ask("GET", path).status == 200
            assert server.ask("POST", path).status == 401
        assert server.ask("GET", "/metrics").status == server.speak().status == 401


def test_web_pages_of_other_hosts_are_refused(server, speech):
    """Any page open in a browser could otherwise use a server on the same machine."""
    foreign, own = {"Origin": "http://evil.example"}, {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.speak(headers=foreign).status == 403
    assert server.ask("POST", "/v1/audio/voices", headers=foreign).status == 403
    assert server.speak(headers=own).status == 200
    assert "Access-Control-Allow-Origin" not in server.speak(headers=own).headers
    with RunningServer(speech, cors_origins=("http://good.example",)) as open_server:
        good = {"Origin": "http://good.example"}
        assert open_server.speak(headers=good).headers["Access-Control-Allow-Origin"] == "http://good.example"
        assert open_server.speak(headers=foreign).status == 403
        preflight = good | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type, x-stainless-os",
        }
        preflight |= {"Access-Control-Request-Private-Network": "true"}  # a public page that calls a private address
        assert open_server.ask("OPTIONS", "/v1/audio/speech", headers=preflight).status == 200


@pytest.mark.parametrize(
    "settings, more_names",
    [
        (dict(only_this_machine=True), []),
        (dict(only_this_machine=True, hosts=("host.docker.internal",)), ["Host.docker.internal:8000"]),
        ("compose", ["speech:8000", "Host.docker.internal:8000"]),
        (dict(hosts=("speech",), api_key="secret"), ["speech"]),
    ],
    ids=["this machine", "and a name", "compose.yaml", "with a key"],
)
def test_a_name_that_is_made_to_lead_here_is_refused(speech, settings, more_names):
    """DNS rebinding: a page whose host name resolves to this machine has the server's origin. Only servers on a
    loopback address checked the Host header, but that of compose.yaml listens on 0.0.0.0, behind a published port."""
    if settings == "compose":
        settings = dict(hosts=make_settings(parse_arguments(compose_options()[1:])).hosts)
    with RunningServer(speech, **settings) as server:

        def ask(host):
            headers = {"Authorization": "Bearer secret", "Host": host, "Origin": f"http://{host}"}
            return server.ask("GET", "/v1/models", headers=headers)

        known = "localhost", f"LOCALHOST:{server.port}", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8000"
        for host in (*known, *more_names):
            assert ask(host).status == 200, host
        others = f"evil.example:{server.port}", "127.0.0.1.evil.example", "speech.evil.example", "10.0.0.1", "[", ""
        for host in ("evil.example", *others):
            error = ask(host).error
            assert error["code"] == "host" and "--allow-host" in error["message"], host
        assert server.ask("GET", "/health", headers={"Host": "evil.example"}).status == 200
        with pytest.raises(InvalidStatus), connect(server.websocket_address.replace("127.0.0.1", "0.0.0.0")):
            pass


def test_names_of_hosts():
    assert not make_settings(parse_arguments(compose_options()[1:])).only_this_machine
    assert check_host(" Host.docker.internal") == "host.docker.internal"
    for name in ("http://x", "x:8000", "", "a b"):
        with pytest.raises(ValueError, match="--allow-host is .* without a port"):
            check_host(name)


def compose_options() -> list[str]:
    """The options of the server in compose.yaml, split as by a shell."""
    command = re.search(r"command: >-\n((?:      .*\n)+)", (ROOT / "compose.yaml").read_text())[1]
    return shlex.split(command)


def test_limits_of_a_request(speech, wav):
    with RunningServer(speech, max_text=20, max_body=100_000, max_upload=50_000, max_reference_seconds=1.5) as server:
        message = server.speak(input="x" * 21).error["message"]
        assert "at most 20" in message and "--max-text" in message
        assert server.speak(input="x" * 100_000).status == 413
        body = (b"%x\r\n%s\r\n" % (1000, b" " * 1000) for _ in range(200))
        try:
            chunked = JSON | {"Transfer-Encoding": "chunked"}
            assert server.ask("POST", "/v1/audio/speech", body, chunked).status == 413
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may close the connection before everything is sent
        for answer in (server.register("x", wav), server.speak(ref_audio=as_text(wav))):
            assert answer.status == 413 and "50000" in answer.error["message"]
        answer = server.speak(ref_audio=as_text(wav[: 44 + 49_000]))  # 1.53 s
        assert "longer than 1.5 s" in answer.error["message"]


def test_a_request_that_never_ends(speech):
    """Neither a body nor the head of a first or later request may keep a connection open forever."""
    with RunningServer(speech, body_seconds=0.3) as server:
        with server.open() as connection:
            connection.sendall(request_bytes(b'{"input":', length=1000, Content_Type="application/json"))
            assert read_answer(connection).status == 408
        for before in (b"", request_bytes(method="GET", path="/health")):
            with server.open() as connection:
                connection.sendall(before)
                if before:
                    assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
                connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nX-Slow: ")
                read_to_the_end(connection)
        assert len(server.speak(response_format="pcm", max_new_tokens=60).body) == 59 * FRAME  # longer than 0.3 s


def test_draining_has_a_limit(speech):
    """A client that never reads must not keep the process alive."""
    with RunningServer(speech, drains=True, drain_seconds=0.3) as server:
        with server.unread(max_new_tokens=150) as connection:
            wait_until(lambda: speech.engine.counts() == (1, 0))
            server.terminate()
            server.serving.result(20)
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                read_answer(connection)
    wait_until_free(speech)


def test_draining_waits_for_a_whole_file(speech):
    """The server ended while the file was sent, since nothing was being spoken any more."""
    with RunningServer(speech, drains=True) as server:
        with server.unread(stream=False, max_new_tokens=100) as connection:
            wait_until(lambda: speech.in_flight)
            wait_until_free(speech)
            server.terminate()
            time.sleep(0.3)
            assert not server.server.should_exit
            assert len(read_answer(connection).body) == 99 * FRAME
            server.serving.result(20)


def test_a_stopped_engine_is_started_again(checkpoint, tmp_path, wav):
    """The server had to be restarted by hand."""
    with serving(checkpoint(), tmp_path) as server, server.registered("me", wav):
        before = server.pcm(voice="me")
        server.speech.engine.close()
        wait_until(lambda: server.ask("GET", "/health").status == 503)
        for answer in (server.ask("GET", "/health"), server.speak()):
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert answer.error["code"] == "restarting"
        wait_until(lambda: server.ask("GET", "/health").status == 200)
        assert server.pcm(voice="me") == before
        assert b"qwen3_tts_worker_restarts 1.0" in server.ask("GET", "/metrics").body


def test_a_full_queue(server, speech):
    """Two places and two that wait: the fifth request is refused at once with Retry-After."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.asking(max_new_tokens=400))
        wait_until(lambda: speech.in_flight == 4)
        answer = server.speak()
        assert answer.status == 429 and answer.headers["Retry-After"] == "1"
        assert answer.error["type"] == "rate_limit_error" and "later" in answer.error["message"]
    wait_until_free(speech)
    assert server.speak().status == 200


@pytest.mark.parametrize("has_begun, name", [(False, "pcm"), (True, "pcm"), (True, "mp3")])
def test_a_client_that_goes_away_frees_its_place(server, speech, frames, has_begun, name):
    """Before its first chunk, and after it."""
    with server.asking(max_new_tokens=450, response_format=name) as connection:
        if has_begun:
            assert connection.getresponse().read(100)
        else:
            wait_until(lambda: speech.in_flight == 1)
        before = frames.count
    wait_until_free(speech)
    assert frames.count - before < 40  # of 450
    assert server.speak().status == 200


def test_text_that_can_never_fit(server, speech):
    """Every frame takes a token of text: 600 of them were spoken into 512 positions, then the response was broken off.
    With max_new_tokens the text is one utterance."""
    frames = speech.metrics.audio._value.get()
    fields = {"input": "a b " * 150, "non_streaming_mode": False}
    answer = server.speak(**fields, max_new_tokens=1000)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert re.search(r"takes at least 6\d\d of 512 positions: shorten input", answer.error["message"])
    assert speech.metrics.audio._value.get() == frames
    assert server.speak(**fields).status == 200  # the client's own max_new_tokens ends it earlier


def test_speech_that_is_cut_off_is_not_a_short_file(server, caplog):
    """When speech reaches the end of the cache, the client must not take it for complete.

    uvicorn logged "ASGI callable returned without completing response" as an error.
    """
    fields = {"input": "a" * 480, "max_new_tokens": 500, "non_streaming_mode": True, "response_format": "pcm"}
    with pytest.raises(http.client.IncompleteRead):
        server.speak(**fields)
    # HTTP/1.0 has no chunks: a proxy took the closed connection for the end of the speech and sent a short file.
    with server.open() as connection, pytest.raises(ConnectionResetError):
        connection.sendall(request_bytes(fields, version="1.0"))
        read_to_the_end(connection)
    wait_until(lambda: len(caplog.messages) == 2)
    assert all("was broken off: the speech was cut off after" in message for message in caplog.messages)
    with pytest.raises(http.client.IncompleteRead) as broken_off:  # some clients ignore an event with an error
        server.speak(**fields, stream_format="sse")
    *_, last = events_of(broken_off.value.partial)
    assert last["type"] == "error" and "cut off" in last["error"]["message"]
    answer = server.speak(**fields | {"stream": False})
    assert answer.status == 400 and "cut off" in answer.error["message"]
    assert not [message for message in caplog.messages if "ASGI" in message]
    answer = server.speak(**fields | {"input": "a" * 600, "max_new_tokens": 1000})
    assert answer.status == 400 and "positions" in answer.error["message"]


def test_a_long_text_is_spoken_in_parts(checkpoint, wav, tmp_path):
    """OpenAI accepts 4,096 characters. Here 500 ended with a broken connection, after minutes of speech. A draining
    worker speaks the remaining parts, too: systemd sends SIGTERM to all processes of a service."""
    sentences = [f"This is the sentence with the number {number}." for number in range(4)]
    text = " ".join(sentences)
    fields = {"response_format": "pcm", "max_new_tokens": None}
    with serving(checkpoint(), tmp_path / "voices") as server, ThreadPoolExecutor() as threads:
        alone = [server.pcm(input=sentence, seed=7 + i, **fields) for i, sentence in enumerate(sentences)]
        whole = bytes(2 * 24000 * 2 // 5).join(alone)  # with pauses
        events = events_of(server.speak(input=text, seed=7, stream_format="sse", **fields).body)
        assert audio_of(events) == whole
        assert events[-1]["type"] == "speech.audio.done" and events[-1]["usage"]["input_tokens"] == len(text)
        in_context = {"ref_audio": as_text(wav), "ref_text": "x" * 450}
        answer = server.speak(input=text, **in_context, **fields)
        assert answer.status == 400 and "too little is left for speech: shorten input" in answer.error["message"]
        answer = threads.submit(server.pcm, input=text, seed=7, **fields)
        wait_until(lambda: server.speech.host.listeners)
        server.speech.models[0].engine.process.worker.drain()
        assert answer.result(LIMIT) == whole
        wait_until(lambda: server.speech.models[0].engine.restarts == 1)


def open_connections(server) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.parametrize(
    "fields",
    [{"max_new_tokens": 300}, {"max_new_tokens": 300, "stream_format": "sse"}, {"max_new_tokens": 20, "stream": False}],
    ids=["while it is made", "events", "when it is complete"],
)
def test_a_listener_who_does_not_read_is_given_up(speech, fields):
    """Closing waits for the client, so the socket and the audio of a closed connection were never freed."""
    with RunningServer(speech, send_seconds=0.3) as server, server.unread(**fields):
        wait_until(lambda: speech.in_flight)
        wait_until_free(speech)
        wait_until(lambda: not open_connections(server))


def test_a_listener_who_reads_slowly_is_served(speech):
    """The kernel accepts more data only when much of its buffer is free, which takes a slow client longer than the
    limit: a player of 32 kbit/s lost its connection."""
    with RunningServer(speech, send_seconds=1.0) as server, socket.socket() as connection:
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 1 << 19)  # as server.py does
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        connection.settimeout(LIMIT)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request_bytes({"input": "Hi. [pause 40]"}, version="1.0"))
        received = 0
        for _ in range(60):
            received += len(connection.recv(1 << 13))
            time.sleep(0.05)
        received += len(read_to_the_end(connection))
    assert received > 40 * 24000 * 2


def test_a_connection_is_kept_between_requests(speech):
    """It was kept for 5 s: a client that posts every 5 s lost some requests, and proxies answered 502. The time limit
    for a head is a different one."""
    assert Settings().keep_alive_seconds > 90  # Go's clients and some proxies keep theirs for this long
    with RunningServer(speech, keep_alive_seconds=1.0, body_seconds=0.2) as server:
        with contextlib.closing(server.connect()) as connection:
            for _ in range(2):
                connection.request("GET", "/health")
                assert connection.getresponse().read()
                used = connection.sock
                time.sleep(0.4)
            connection.request("GET", "/health")
            assert connection.getresponse().read() and connection.sock is used
            began = time.monotonic()
            assert used.recv(1) == b"" and 0.7 < time.monotonic() - began < LIMIT


def test_a_connection_that_waits_gives_way(speech):
    """Connections that are idle, or whose heads never end, blocked all new ones. Those in use and WebSockets stay
    open."""
    with RunningServer(speech, max_connections=4) as server, contextlib.ExitStack() as stack:
        websocket = stack.enter_context(server.talk()).websocket
        unread = stack.enter_context(server.unread(max_new_tokens=400))
        others = []
        for head in (b"", b"GET /health HTTP/1.1\r\nHost: x"):
            others.append(stack.enter_context(server.open()))
            others[-1].sendall(head)
        wait_until(lambda: open_connections(server) == 4)
        assert server.ask("GET", "/v1/models").error["code"] == "too_many"
        time.sleep(SECONDS_TO_BEGIN + 0.1)
        for other in others:
            kept = stack.enter_context(contextlib.closing(server.connect()))
            kept.request("GET", "/v1/models")
            assert kept.getresponse().status == 200 and other.recv(1) == b""
        websocket.ping().wait(LIMIT)
        assert unread.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_that_do_nothing_are_counted(speech):
    """Only requests in progress were counted. Connections beyond the limit get 503, and those far beyond it are
    closed."""
    with RunningServer(speech, max_connections=1) as server, contextlib.ExitStack() as stack:
        stack.enter_context(server.open())
        wait_until(lambda: open_connections(server) == 1)
        assert server.ask("GET", "/v1/models").error["code"] == "too_many"
        assert server.ask("GET", "/health").status == 200
        wait_until(lambda: open_connections(server) == 1)
        stack.enter_context(server.open())
        with contextlib.suppress(ConnectionResetError):
            assert stack.enter_context(server.open()).recv(1) == b""
        wait_until(lambda: open_connections(server) == 2)


def test_large_requests_share_a_limit(speech):
    """Each may have 16 MB, and there may be a thousand of them."""
    form = b"--x\r\nContent-Disposition: form-data; name=a; filename=b\r\n\r\n"

    def upload(server, size):
        connection = server.open()
        kind = "multipart/form-data; boundary=x"
        head = request_bytes(path="/v1/audio/voices", length=40_000, Content_Type=kind)
        connection.sendall(head + form + b"x" * size)
        return connection

    with RunningServer(speech, max_held=50_000) as server:
        with upload(server, 30_000):
            wait_until(lambda: server.speak(input="x" * 30_000).status == 503)
            with server.talk({"ref_audio": "x" * 30_000}) as session:
                assert "too many large requests" in session.receive()["message"]
        wait_until(lambda: server.speak(input="x" * 30_000).status == 400)  # too long for a text
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_REGISTRATIONS):  # a message that is being received counts
                stack.enter_context(upload(server, 10))
            wait_until(lambda: server.register("me", b"").status == 429)
            assert "later" in server.register("me", b"").error["message"]


def test_whole_files_share_the_limit(speech):
    """They are in memory until the client has read them. One that exceeded the limit was refused only after it was
    completely spoken."""
    with RunningServer(speech, max_held=100_000) as server:
        fields = dict(response_format="pcm", stream=False)
        before = speech.metrics.audio._value.get()
        answer = server.speak(**fields, max_new_tokens=300)  # 1.1 MB
        assert answer.status == 503 and answer.error["code"] == "too_many"
        assert speech.metrics.audio._value.get() - before < 60 * 0.08
        assert server.speak(**fields, max_new_tokens=20).status == 200
        assert server.speak(response_format="pcm", max_new_tokens=40).status == 200
        wav = wav_bytes(np.zeros(30_000, np.int16), 24000)
        answer = server.ask("POST", "/v1/audio/convert?response_format=wav", wav)
        assert answer.status == 503 and answer.error["code"] == "too_many"
    wait_until_free(speech)


def test_sigterm_to_all_processes(checkpoint, tmp_path):
    """As sent by systemd: the worker ended after a minute, whatever --drain-seconds was, and was started again."""
    timeouts = Timeouts(drain=0.0, check_interval=0.1, exit=0.3)
    with contextlib.closing(load_speech(checkpoint(), tmp_path / "voices", timeouts=timeouts)) as speech:
        engine = speech.models[0].engine
        never_end(speech)
        with RunningServer(speech, drains=True) as server, server.asking(max_new_tokens=100) as connection:
            with connection.getresponse() as answer:
                audio = answer.read(FRAME)
                engine.process.worker.drain()
                server.terminate()
                audio += answer.read()
            assert len(audio) == 99 * FRAME
            server.serving.result(20)
            assert engine.restarts == 0 and engine.process.worker.is_draining


def test_while_starting_and_while_shutting_down(speech, checkpoint, tmp_path):
    """Such requests are counted as failed."""
    starting = LocalService(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path))
    for service, words in ((starting, "starting"), (speech, "shutting down")):
        before = requests_with(service, "failed")
        with RunningServer(service) as server:
            service.is_draining = service is speech
            for answer in (server.ask("GET", "/health"), server.speak()):
                assert answer.status == 503 and words in answer.error["message"]
        assert requests_with(service, "failed") == before + 1
    starting.close()


# ---- OpenAI's own client


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def test_openai_voices(client, wav):
    voice = client.audio.voices.create(name="me", audio_sample=("me.wav", wav), consent="none")
    assert (voice.id, voice.name, voice.object, voice.type) == ("me", "me", "audio.voice", "audio_sample")
    assert voice.created_at > 1e9
    assert client.audio.speech.create(model="tts-1", voice={"id": voice.id}, input="Hello.", extra_body=SHORT).content
    deleted = client.audio.voices.delete(voice.id)
    assert (deleted.id, deleted.object, deleted.deleted) == ("me", "audio.voice.deleted", True)


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError, match="there is no voice 'nobody'") as caught:
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
    assert caught.value.param == "voice" and caught.value.code == "unknown_voice"
    assert [model.id for model in client.models.list()]


def test_servers_that_share_a_folder_share_its_voices(server, speech, checkpoint, wav):
    """A voice that one replica has registered or removed must also be known or unknown to the others. The second server
    has no voice of its own, so that any voice is chosen."""
    with serving(checkpoint(), speech.settings.voices, speakers={}) as second:
        never_end(second.speech)
        assert "none is registered: POST a recording" in second.speak(voice="alloy").error["message"]
        assert server.register("me", wav).status == 200
        assert second.pcm(voice="alloy") == second.pcm(voice="me") == server.pcm(voice="me")
        assert second.register("me", wav).status == 400 and second.forget("me") == 200
        assert second.speak(voice="me").status == 400
        wait_until(lambda: server.speak(voice="me").status == 400)  # it reads the folder every second
        with server.registered("me", wav, ref_text="what it says"):
            assert second.pcm(voice="me") == server.pcm(voice="me")


# ---- A response without our server


async def sent_by(receive, chunks):
    """What a SpeechResponse sends for speech that `chunks` generates."""
    sent = []

    async def send(message):
        sent.append(message)

    class Spoken(Answer):
        def __init__(self, **attributes):
            vars(self).update(attributes)

        def __aiter__(self):
            return chunks()

    wanted = parse(SpeechRequest, {"input": "Hi.", "response_format": "pcm"})
    service = SimpleNamespace(responses=0, encoders=Encoders(0), settings=Settings(request_seconds=LIMIT))
    model = SimpleNamespace(engine=SimpleNamespace(rate=24000))
    response = SpeechResponse(Spoken(model=model, options=wanted, service=service))
    await asyncio.wait_for(response({"type": "http", "request_id": "1"}, receive, send), LIMIT)
    return sent


async def a_chunk_and_silence():
    yield np.zeros(1920, np.int16), 24000
    await asyncio.Event().wait()


def test_a_client_who_leaves_ends_the_speech():
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def chunks():
        yield np.zeros(1920, np.int16), 24000
        gone.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass  # as asyncio.wait_for may do, before Python 3.12
        yield np.ones(1920, np.int16), 24000
        pytest.fail("it went on speaking")

    sent = asyncio.run(sent_by(receive, chunks))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_a_connection_that_fails_ends_the_speech():
    """As Ray's proxy may: with an error before the first audio, and an incomplete response after it."""

    def failing_after(seconds):
        async def receive():
            await asyncio.sleep(seconds)
            raise RuntimeError("the proxy is gone")

        return receive

    async def silence():
        await asyncio.Event().wait()
        yield

    start, _ = asyncio.run(sent_by(failing_after(0), silence))
    assert start["status"] == 500
    start, first = asyncio.run(sent_by(failing_after(0.1), a_chunk_and_silence))
    assert start["status"] == 200 and first["more_body"]
