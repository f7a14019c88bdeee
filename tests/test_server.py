"""The HTTP server: what clients send, what they get, and what happens when they make mistakes or go away."""

import asyncio
import base64
import contextlib
import dataclasses
import errno
import fcntl
import gc
import http.client
import io
import json
import logging
import os
import random
import re
import shlex
import signal
import socket
import sys
import threading
import time
import warnings
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import av
import librosa
import numpy as np
import openai
import pytest
import soundfile
import torch
from helpers import ROOT, phone_recording
from serving_helpers import (
    FRAME,
    LIMIT,
    SHORT,
    LocalService,
    RunningServer,
    load_speech,
    never_end,
    wait_until,
    wait_until_free,
)
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from qwen3_tts_cuda_graphs.common.audio_files import to_int16
from qwen3_tts_cuda_graphs.serving import engine_host, process, recordings
from qwen3_tts_cuda_graphs.serving.audio_formats import COMPRESSED, CONTENT_TYPES, Encoder
from qwen3_tts_cuda_graphs.serving.encoders import Encoders
from qwen3_tts_cuda_graphs.serving.errors import as_api_error, engine_failed
from qwen3_tts_cuda_graphs.serving.model import OPENAI_VOICES, Model
from qwen3_tts_cuda_graphs.serving.requests import SpeechRequest, parse
from qwen3_tts_cuda_graphs.serving.server import SpeechResponse
from qwen3_tts_cuda_graphs.serving.server_options import make_settings, parse_arguments
from qwen3_tts_cuda_graphs.serving.service import Service
from qwen3_tts_cuda_graphs.serving.settings import Settings, check_host
from qwen3_tts_cuda_graphs.serving.voice_folder import VoiceFolder
from qwen3_tts_cuda_graphs.speech.runner import Runner


@pytest.fixture(scope="module")
def preset_server(checkpoint, tmp_path_factory):
    speech = load_speech(checkpoint("custom_voice"), tmp_path_factory.mktemp("voices"))
    with RunningServer(speech) as server:
        yield server
    speech.close()


@pytest.fixture(scope="module")
def wav(recording_at_another_rate):
    audio, rate = recording_at_another_rate
    file = io.BytesIO()
    soundfile.write(file, audio, rate, format="WAV")
    return file.getvalue()


def spoken_alone(speech, **arguments) -> np.ndarray:
    """What the engine says in this process."""
    method, voice = speech.tts.generate_voice_clone, {"voice_clone_prompt": speech.host.files["speaker"]}
    stream = speech.engine.stream(method, text="Hello there.", language="Auto", **SHORT, **voice, **arguments)
    chunks = []
    with pytest.raises(Warning):  # max_new_tokens
        for audio, _ in stream:
            chunks.append(audio)
    return np.concatenate(chunks)


# ---- What a request gets


def test_the_audio_is_the_engines(server, speech):
    """PCM and WAV, streamed and whole, have the same samples."""
    expected = to_int16(spoken_alone(speech)).tobytes()  # as the worker converts it
    assert len(expected) == 5 * FRAME
    answer = server.speak(response_format="pcm")
    assert answer.status == 200 and answer.body == expected
    assert answer.headers["Content-Type"] == "audio/pcm"
    assert answer.headers["X-Sample-Rate"] == "24000" and len(answer.headers["X-Request-Id"]) == 16
    streamed, whole = (server.speak(response_format="wav", **fields) for fields in ({}, {"stream": False}))
    assert streamed.headers["Content-Type"] == whole.headers["Content-Type"] == "audio/wav"
    assert streamed.headers["Transfer-Encoding"] == "chunked" and "Content-Length" not in streamed.headers
    assert streamed.body[:4] == b"RIFF" and streamed.body[44:] == expected
    assert int(whole.headers["Content-Length"]) == len(whole.body)
    with wave.open(io.BytesIO(whole.body)) as file:
        assert file.getnframes() == len(expected) // 2 and file.getframerate() == 24000
    assert server.speak(response_format="pcm", seed=2).body != expected


def decoded(audio: bytes) -> np.ndarray:
    """As samples at 24 kHz. Decoders know how many of the first are an encoder's, except in mp3 and aac files."""
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
    """Upper case and nothing as well, which is mp3 as with OpenAI: some programs rely on it."""
    answer = server.speak(response_format=name)
    kind = (name or "mp3").lower()
    assert answer.status == 200 and answer.headers["Content-Type"] == CONTENT_TYPES[kind]
    assert answer.headers["Transfer-Encoding"] == "chunked"
    expected = np.frombuffer(server.speak(response_format="pcm").body, "<i2")
    if kind == "pcm":
        return
    audio = decoded(answer.body)
    if kind in ("wav", "flac"):
        np.testing.assert_array_equal(audio, expected)
    else:
        assert 0 <= len(audio) - len(expected) < 0.1 * 24000
    whole = server.speak(response_format=name, stream=False)
    assert int(whole.headers["Content-Length"]) == len(whole.body)
    np.testing.assert_array_equal(decoded(whole.body), audio)


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("frames", [1, 8])
def test_compressed_formats_leave_at_once(name, frames):
    """mp3 and opus with the first 80 ms, aac and flac with the second; decoded, they sound like what went in."""
    time = np.arange(3 * 24000) / 24000
    tone = (12000 * np.sin(2 * np.pi * (200 + 150 * time) * time)).astype(np.int16)
    encoder = Encoder(name, 24000)
    pieces = [encoder.add(chunk) for chunk in np.split(tone, range(1920 * frames, len(tone), 1920 * frames))]
    at_once = 0 if name in ("mp3", "opus") or frames > 1 else 1
    assert len(b"".join(pieces[: at_once + 1])) > 150  # more than a header
    assert all(map(bytes.__add__, pieces[1:], pieces[2:]))  # no two without any
    audio = decoded(b"".join([*pieces, encoder.finish()]))
    if name == "flac":
        np.testing.assert_array_equal(audio, tone)
    else:
        assert 0 <= len(audio) - len(tone) < 0.1 * 24000 and likeness(audio, tone) > 0.98


@pytest.mark.parametrize("speed", [0.25, 0.8, 4])
def test_speed_changes_the_tempo_and_keeps_the_pitch(speed):
    """Without atempo the samples are those of the model, and a player that is faster also sounds higher."""
    tone = (6000 * np.sin(2 * np.pi * 440 * np.arange(4 * 24000) / 24000)).astype(np.int16)
    tone[-2400:] *= 4  # the end is loud, and must be heard: atempo alone leaves out some of it
    encoder = Encoder("pcm", 24000, speed)
    pieces = [encoder.add(chunk) for chunk in np.split(tone, range(1920, len(tone), 1920))]
    assert any(pieces[:4])  # it is streamed
    audio = np.frombuffer(b"".join([*pieces, encoder.finish()]), "<i2")
    assert len(audio) == round(len(tone) / speed)
    assert np.sum(np.abs(audio) > 9000) * speed == pytest.approx(np.sum(np.abs(tone) > 9000), rel=0.25)
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    assert spectrum.argmax() * 24000 / len(audio) == pytest.approx(440, abs=2)


def test_speed(server):
    """OpenAI's range. At 1 every sample stays as it is."""
    plain = server.speak(response_format="pcm").body
    assert server.speak(response_format="pcm", speed=1).body == plain
    slow, fast = (len(server.speak(response_format="pcm", speed=speed).body) for speed in (0.5, 2))
    assert slow / len(plain) == 2 and fast / len(plain) == 0.5
    for speed in (0.24, 4.1, 0, -1):
        error = server.speak(speed=speed).error
        assert "must be from 0.25 to 4" in error["message"] and error["param"] == "speed"


def test_without_pyav(server, monkeypatch):
    """wav and pcm still work; the others say what to install."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.audio_formats.av", None)
    assert server.speak(response_format="wav").status == server.speak(response_format="pcm").status == 200
    for fields in ({}, {"response_format": "flac"}, {"response_format": "pcm", "speed": 2}):
        answer = server.speak(**fields)
        assert answer.status == 400 and "pip install av" in answer.error["message"]


def test_instructions_that_a_model_cannot_use(server, preset_server, speech):
    """openai-agents sends some with every request, and got 400 from every Base model."""
    plain, ignored = (server.speak(response_format="pcm", instructions=text) for text in ("", "whisper"))
    assert ignored.body == plain.body and ignored.headers["X-Ignored"] == "instructions"
    assert "X-Ignored" not in plain.headers
    used = preset_server.speak(voice="vivian", instructions="whisper", response_format="pcm")
    assert used.status == 200 and "X-Ignored" not in used.headers


@pytest.mark.parametrize(
    "fields, ignored",
    [
        ({"sample_rate": 16000, "user": None}, "sample_rate"),
        ({"instructions": "whisper", "Temprature": 0.5}, "instructions, Temprature (did you mean temperature?)"),
        ({"format": "wav", "type": "x"}, "format (did you mean response_format?), type"),
        ({"voice": "alloy", "speaker": "alloy"}, "speaker"),
        ({"a\r\nX-Evil: 1": 1, "\N{SNOWMAN}": 1, "x" * 5000: 1}, "a??X-Evil??1, ?, " + "x" * 40),
        ({f"field{number}": {} for number in range(23)}, None),
    ],
)
def test_fields_that_nobody_knows_are_named(server, fields, ignored):
    """They were ignored without a word. A field that is missing may be one of them."""
    answer = server.speak(response_format="pcm", **fields)
    assert answer.status == 200 and len(answer.body) == 5 * FRAME
    assert answer.headers["X-Ignored"] == ignored or not ignored and answer.headers["X-Ignored"].endswith(", 3 more")


def test_an_input_by_another_name(server):
    body = json.dumps({"text": "Hello.", "voice": "alloy"})
    error = server.ask("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"}).error
    assert error["param"] == "input" and "input is missing" in error["message"]
    assert "text (did you mean input?)" in error["message"]


@pytest.mark.parametrize("protocol", ["h2c", "TLS/1.2"])
def test_offers_of_other_protocols_are_ignored(server, protocol):
    """Java's HTTP client makes one with each request. The body was lost: 400."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    assert server.speak(headers=offer).status == 200


def test_a_body_is_no_head(server):
    """One that is refused unread, with what looks like an offer in it. The next request, with an offer, is answered."""
    body = b"x" * 10 + b"\r\nUpgrade: h2c\r\n\r\n"
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(head)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 415 and answer.read()
        speech = json.dumps({"input": "Hello.", **SHORT})
        head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        offer = f"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: {len(speech)}\r\n\r\n"
        connection.sendall(body)
        connection.sendall(f"{head}{offer}{speech}".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200


def test_an_upload_that_is_refused_early_gets_its_answer(speech):
    """The rest of it was taken for a head without an end, and the connection was reset."""
    with RunningServer(speech, api_key="secret") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
            head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n"
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 401")
            for _ in range(30):
                connection.sendall(b"x" * 100_000)
            while b"message" not in (rest := connection.recv(10_000)):
                assert rest
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_http_1_0_has_no_chunks(server):
    """Their sizes were in the middle of the audio, for clients that do not expect them."""
    expected = server.speak(response_format="pcm").body
    for fields in ({}, {"stream": False}, {"stream_format": "sse"}):
        body = json.dumps({"input": "Hello there.", "response_format": "pcm", **SHORT, **fields}).encode()
        head = "POST /v1/audio/speech HTTP/1.0\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
            connection.sendall(head.encode() + body)
            answer = b"".join(iter(lambda: connection.recv(100_000), b""))
        head, _, audio = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head.lower()
        if "stream_format" in fields:
            assert events_of(audio)[-1]["type"] == "speech.audio.done"
        else:
            assert audio == expected


def test_a_slash_too_many(server):
    """At the end it was answered with a redirect, to http behind a proxy with https; within, with 404."""
    body = json.dumps({"input": "Hello.", **SHORT})
    for path in ("/v1/audio/speech/", "/v1/audio/speech//", "/v1//audio/speech", "//v1/audio/speech"):
        assert server.ask("POST", path, body, {"Content-Type": "application/json"}).status == 200
    assert server.ask("GET", "/v1/models/").status == server.ask("GET", "/").status == 200


def test_an_encoded_body_is_refused_in_words(server):
    answer = server.speak(headers={"Content-Encoding": "gzip"})
    assert answer.status == 415 and "content encoding is 'gzip'" in answer.error["message"]


def test_a_default_voice(server, preset_server):
    """Programs send this name to servers that are not OpenAI's."""
    for voice in ("default", "Default"):
        assert server.speak(voice=voice).status == preset_server.speak(voice=voice).status == 200


def test_language_codes(server):
    named, code = (server.speak(response_format="pcm", language=name) for name in ("German", "de-DE"))
    assert named.status == 200 and code.body == named.body
    assert server.speak(language="xx").status == 400


def events_of(body: bytes) -> list[dict]:
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("name", ["pcm", "mp3"])
def test_server_sent_events(server, name):
    answer = server.speak(response_format=name, stream_format="sse")
    assert answer.headers["Content-Type"] == "text/event-stream"
    *deltas, done = events_of(answer.body)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert audio == server.speak(response_format=name).body
    assert len(deltas) == (5 if name == "mp3" else 4)  # chunks of 1, 1, 2 and the rest, and what the encoder still has
    assert done == {"type": "speech.audio.done", "usage": {"input_tokens": 12, "output_tokens": 5, "total_tokens": 17}}


def test_bytes_leave_when_the_first_chunk_exists(server, speech, monkeypatch):
    """The first frame must be with the client while the second is not made yet."""
    may_go_on = threading.Event()
    original = Runner.launch

    def launch(runner, utterances, hand_over):
        if utterances[0].launched == 1:
            assert may_go_on.wait(LIMIT)
        return original(runner, utterances, hand_over)

    monkeypatch.setattr(Runner, "launch", launch)
    connection = server.connect()
    body = json.dumps({"input": "Hello there.", "response_format": "pcm", **SHORT})
    connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.read1(10 * FRAME)
    assert len(first) == FRAME
    may_go_on.set()
    assert len(first + response.read()) == 5 * FRAME
    connection.close()


def test_audio_passes_no_middleware(server, monkeypatch):
    """Each has a `send` of its own, five in all, which took a fifth of the time per chunk."""
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
    expected = server.speak(voice="speaker", response_format="pcm").body
    for fields in (
        {"speaker": "speaker"},
        {"voice": {"id": "Speaker"}},
        {"voice": None, "speaker": "Speaker"},
        {"voice": "", "speaker": {"id": "speaker"}},
        {"voice": "alloy", "model": "gpt-4o-mini-tts"},
        {"model": None, "voice": None, "speed": 1, "language": " Auto ", "stream": True, "instructions": None},
        {"stream_format": "audio", "unknown_field": {"x": [1]}, "task_type": "Base"},
    ):
        answer = server.speak(response_format="pcm", **fields)
        assert (answer.status, answer.body) == (200, expected), fields
    assert server.speak(response_format="pcm", temperature=0.1, top_k=1, language="German").body != expected
    assert server.speak(response_format="pcm", non_streaming_mode=True).status == 200


def names_of_voices(server) -> list[str]:
    voices = server.ask("GET", "/v1/audio/voices").json["voices"]
    assert all(voice["id"] == voice["name"] for voice in voices)  # as Open WebUI reads them
    return [voice["id"] for voice in voices]


def test_preset_voices(preset_server):
    names = names_of_voices(preset_server)
    assert "vivian" in names and names == sorted(names)
    (model,) = preset_server.speech.models
    assert {model.resolve_voice(name, ()) for name in OPENAI_VOICES} == set(names)  # 13 names for 9 voices
    named, mapped = (preset_server.speak(voice=name, response_format="pcm") for name in ("aiden", "alloy"))
    assert named.status == 200 and named.body == mapped.body
    assert preset_server.speak(voice="vivian", response_format="pcm").body != named.body
    error = preset_server.speak(voice="vivien").error
    assert "vivian" in error["message"] and error["param"] == "voice"
    assert "ref_audio is not for" in preset_server.speak(ref_audio="AAAA").error["message"]
    error = preset_server.register("me", b"").error
    assert "not for a CustomVoice" in error["message"] and error["param"] == "audio_sample"


def test_a_designed_voice(checkpoint, tmp_path):
    """A VoiceDesign model has no names, but clients send some."""
    speech = load_speech(checkpoint("voice_design"), tmp_path)
    with RunningServer(speech) as server:
        named, unnamed = (server.speak(response_format="pcm", **fields) for fields in ({"voice": "nova"}, {}))
        assert named.status == 200 and named.body == unnamed.body
        described = server.speak(response_format="pcm", instructions="an old sailor")
        assert described.status == 200 and described.body != named.body
    speech.close()


# ---- Voices that clients bring


def test_cloning_within_the_request(server, speech, wav):
    text = base64.b64encode(wav).decode()
    plain = server.speak(response_format="pcm", ref_audio=text)
    for same in ("data:audio/wav;base64," + text, "DATA:audio/wav;BASE64," + base64.encodebytes(wav).decode()):
        answer = server.speak(response_format="pcm", ref_audio=same)
        assert plain.status == 200 and answer.body == plain.body
    in_context = server.speak(response_format="pcm", ref_audio=text, ref_text="what it says")
    assert in_context.status == 200 and in_context.body != plain.body
    again = server.speak(response_format="pcm", ref_audio=text, ref_text="what it says", x_vector_only_mode=True)
    assert again.body == plain.body
    for alone in ({"ref_text": "what it says"}, {"x_vector_only_mode": True}):
        error = server.speak(**alone).error
        assert "send ref_audio, or leave" in error["message"] and error["param"] in alone
    assert server.speak(ref_text="", x_vector_only_mode=False).status == 200  # clients that send every field
    embedding = speech.host.files["speaker"]["ref_spk_embedding"][0].float().tolist()
    assert (
        server.speak(response_format="pcm", speaker_embedding=embedding).body
        == server.speak(response_format="pcm").body
    )


def test_a_voice_that_nobody_waits_for_is_not_kept(server, speech, wav, monkeypatch):
    """The client leaves while its voice is made."""
    begun, gone = threading.Event(), threading.Event()

    def slow_prompt(*arguments):
        begun.set()
        assert gone.wait(LIMIT)
        return clone_prompt(*arguments)

    clone_prompt = engine_host.clone_prompt
    monkeypatch.setattr(engine_host, "clone_prompt", slow_prompt)
    before, host = set(speech.host.kept), speech.host
    with contextlib.closing(server.connect()) as connection:
        body = json.dumps({"input": "Hello there.", "ref_audio": base64.b64encode(wav).decode(), **SHORT})
        connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
        assert begun.wait(LIMIT)
    wait_until(lambda: not host.wanted)
    gone.set()
    host.recordings.submit(lambda: None).result(LIMIT)
    wait_until_free(speech)
    monkeypatch.undo()
    assert server.speak(ref_audio=base64.b64encode(wav).decode()).status == 200  # after what was queued
    wait_until(lambda: set(host.kept) == before)


def test_a_registered_voice_is_kept(server, speech, wav, checkpoint):
    answer = server.register("My-Voice", wav, ref_text="what it says")
    assert answer.status == 200 and answer.json["name"] == "my-voice" and answer.json["seconds"] == 2.0
    assert names_of_voices(server) == ["speaker", "my-voice"]
    spoken = server.speak(voice="my-voice", response_format="pcm")
    assert spoken.status == 200 and spoken.body != server.speak(response_format="pcm").body
    for name, problem in {"my-voice": "already", "speaker": "already", "my voice": "cannot be used"}.items():
        error = server.register(name, wav).error
        assert problem in error["message"] and error["param"] == "name"

    again = Service(str(checkpoint()), "cpu", settings=speech.settings)  # after a restart
    assert again.voice_names() == ["my-voice"]
    assert again.voices()[0]["ref_text"] == "what it says"
    speech.models[0].engine.connection.kept.clear()  # made again from the file
    assert server.speak(voice="my-voice", response_format="pcm").body == spoken.body

    with ThreadPoolExecutor() as threads:  # two at once: the second was a 500
        both = threads.map(server.ask, ["DELETE"] * 2, ["/v1/audio/voices/My-Voice", "/v1/audio/voices/my-voice"])
        assert sorted(answer.status for answer in both) == [200, 404]
    assert server.speak(voice="my-voice").status == 400
    assert not list(speech.settings.voices.iterdir())


def test_a_registered_voice_is_made_once(server, speech, wav, monkeypatch):
    """All who asked for it first, after a restart, had it made, and the worker kept it as often. One of them leaves."""
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slow_prompt(*arguments):
        begun.set()
        assert go_on.wait(LIMIT)
        made.append(arguments)
        return clone_prompt(*arguments)

    clone_prompt = engine_host.clone_prompt
    before, host, connection = set(speech.host.kept), speech.host, speech.models[0].engine.connection
    assert server.register("me", wav).status == 200
    connection.send(op="forget", keys=[connection.kept.popitem()[1].result()])
    monkeypatch.setattr(engine_host, "clone_prompt", slow_prompt)
    with ThreadPoolExecutor() as threads:
        with contextlib.closing(server.connect()) as first:
            body = json.dumps({"input": "Hello there.", "voice": "me", **SHORT})
            first.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
            assert begun.wait(LIMIT)
            others = [threads.submit(server.speak, voice="me") for _ in range(3)]
            wait_until(lambda: speech.in_flight == 4)
        wait_until(lambda: speech.in_flight == 3)
        go_on.set()
        assert [other.result(LIMIT).status for other in others] == [200] * 3
    assert len(made) == 1
    assert server.ask("DELETE", "/v1/audio/voices/me").status == 200
    wait_until(lambda: set(host.kept) == before)


@pytest.mark.parametrize("speed", [1, 0.5])
def test_a_whole_file_knows_its_length(server, speed):
    """soundfile could not read a FLAC without it, and what was converted to a WAV was said to have 4 GiB."""
    wav, flac = (server.speak(response_format=name, stream=False, speed=speed).body for name in ("wav", "flac"))
    (expected, _), (samples, _) = (soundfile.read(io.BytesIO(file), dtype="int16") for file in (wav, flac))
    assert len(expected) == (len(wav) - 44) // 2 > 0 and (samples == expected).all()
    for name, file in (("wav", wav), ("flac", flac)):
        assert server.ask("POST", f"/v1/audio/convert?response_format={name}", wav).body == file


@pytest.mark.parametrize("name", ["wav", "mp3", "flac"])
def test_malformed_files_are_not_converted(server, wav, name):
    """Where a chunk is cut or has an impossible length, wave raises errors of several kinds: some were a 500."""
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


def test_nothing_is_not_converted(server):
    nothing = io.BytesIO()
    soundfile.write(nothing, np.zeros(0, np.int16), 24000, format="WAV")
    answer = server.ask("POST", "/v1/audio/convert?response_format=mp3", nothing.getvalue())
    assert answer.status == 400 and "no samples" in answer.error["message"]


def test_a_rate_that_a_format_cannot_have(server):
    """The answer was FFmpeg's own text."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4410, np.int16), 44100, format="WAV")
    answer = server.ask("POST", "/v1/audio/convert?response_format=opus", file.getvalue())
    assert answer.status == 400 and answer.error["message"].startswith("opus cannot have 44100 Hz: send")


def test_converted_files_share_the_limit_of_memory(speech):
    wav = io.BytesIO()
    soundfile.write(wav, np.zeros(30_000, np.int16), 24000, format="WAV")
    with RunningServer(speech, max_held=100_000) as server:
        answer = server.ask("POST", "/v1/audio/convert?response_format=wav", wav.getvalue())
        assert answer.status == 503 and answer.error["code"] == "too_many"


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("name", COMPRESSED)
def test_an_encoder_is_freed_at_once(name, is_finished):
    """It has megabytes in FFmpeg, and was in a reference cycle: full garbage collections are rare."""

    def containers() -> int:
        return sum(type(item) is av.container.OutputContainer for item in gc.get_objects())

    gc.disable()
    try:
        before = containers()
        encoder = Encoder(name, 24000)
        encoder.add(np.zeros(24000, np.int16))
        assert containers() == before + 1
        if is_finished:
            encoder.finish()
        del encoder
        assert containers() == before
    finally:
        gc.enable()


def test_trailers_without_an_end(server):
    """Of a chunked body, without a key: uvicorn kept all of them, 900 MB in 5 s."""
    head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n")
        with pytest.raises(OSError):  # a reset
            for _ in range(1000):
                connection.sendall(b"a:b\r\n" * 10_000)


def test_a_body_that_was_announced_and_refused(server):
    """What came next on the connection was read as that body."""
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.startswith(b"HTTP/1.1 415 ") and b"\r\nconnection: close\r\n" in received.lower()


def test_a_worker_that_ends_while_a_voice_is_registered(server, speech, wav, monkeypatch):
    """The call went to the next worker, which was still loading and ended because of it."""
    (model,) = speech.models
    first, asked = model.engine.connection, []

    async def keep_voice(connection, *_):
        asked.append(connection)
        raise engine_failed()

    def next_worker(name):
        monkeypatch.setattr(model.engine, "connection", SimpleNamespace())

    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.service.keep_voice", keep_voice)
    monkeypatch.setattr(speech.folder, "check_new", next_worker)
    assert server.register("me", wav).status == 503 and asked == [first]


def test_requests_that_find_no_engine_are_counted_as_failed(server, speech, monkeypatch):
    def failed() -> float:
        return speech.metrics.registry.get_sample_value("qwen3_tts_requests_total", {"outcome": "failed"}) or 0.0

    def fail():
        raise engine_failed()

    before = failed()
    monkeypatch.setattr(speech, "check_ready", fail)
    assert server.speak().status == 503 and failed() == before + 1


def test_a_form_in_another_charset_is_refused(server):
    """Punycode takes a time that grows with the square of the length: 840 KB stopped every listener for a minute."""
    field = b"a" * 50_000 + b"-" + b"a" * 50_000
    body = b"--B\r\nContent-Disposition: form-data; name=x-\r\n\r\n" + field + b"\r\n--B--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=B; Charset=punycode"}
    answer = server.ask("POST", "/v1/audio/voices", body, headers)
    assert answer.status == 415 and "utf-8" in answer.error["message"]


def test_a_clients_mistakes_are_not_in_the_log(server, caplog):
    """python_multipart and numpy wrote a line for each."""
    form = {"Content-Type": "multipart/form-data; boundary=CC"}
    assert server.ask("POST", "/v1/audio/voices", b"--BB\r\n", form).status == 400
    file = io.BytesIO()
    soundfile.write(file, np.full((24000, 2), 3e38, np.float32), 24000, format="WAV", subtype="FLOAT")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = server.speak(ref_audio=base64.b64encode(file.getvalue()).decode())
    assert answer.status == 400 and not caplog.messages


def test_what_is_not_a_file_is_no_voice(server, speech):
    """To open a pipe takes until somebody writes to it. All of the server waited for that."""
    speech.settings.voices.mkdir(exist_ok=True)
    os.mkfifo(speech.settings.voices / "pipe.safetensors")
    try:
        assert "pipe" not in names_of_voices(server)
    finally:
        (speech.settings.voices / "pipe.safetensors").unlink()


def test_a_voice_that_is_removed_before_it_is_used(server, speech, wav):
    """A 404, not a failure of the server."""
    assert server.register("me", wav).status == 200
    speech.host.kept.clear()
    answer = server.speak(voice="me")
    assert answer.status == 404 and answer.error["code"] == "unknown_voice"
    assert server.ask("DELETE", "/v1/audio/voices/me").status == 200


def test_what_nobody_waits_for_is_not_made(speech):
    """Others would wait for a voice, or for the parts of a text. Its client has left while it was queued."""
    speech.host.answer(-1, pytest.fail)


def test_a_second_request_before_the_first_is_answered(server, speech):
    """It hid that the client of the first had left. Now it is not read: the connection ends after the first answer."""

    def cancelled() -> float:
        return speech.metrics.registry.get_sample_value("qwen3_tts_requests_total", {"outcome": "cancelled"}) or 0.0

    body = json.dumps({"input": "Hello.", "max_new_tokens": 450, "response_format": "pcm", "stream": False}).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    others = b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(request)
        wait_until(lambda: speech.in_flight)
        connection.sendall(others)
        time.sleep(0.1)
        before = cancelled()
    wait_until_free(speech)
    assert cancelled() == before + 1
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + others)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200") == 1


def failing(code: int):
    """A function of a system whose disk is full, say."""

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("part", ["open", "chmod", "touch", "replace", "mkdir"])
def test_a_voice_that_cannot_be_stored_is_not_kept(server, speech, wav, monkeypatch, code, part, caplog):
    """A full disk was a 500 with a traceback."""
    full = failing(code)
    before, host = set(speech.host.kept), speech.host
    if part == "open":
        monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.voice_folder.open", full, raising=False)
    else:
        monkeypatch.setattr(Path, part, full)
    answer = server.register("me", wav)
    monkeypatch.undo()
    error = answer.error
    assert (answer.status, error["type"], error["code"]) == (507, "server_error", "disk")
    assert os.strerror(code) in error["message"] and "--voices" in error["message"] and "tmp" not in error["message"]
    assert "Traceback" not in caplog.text and caplog.text.count("\n") == 1
    wait_until(lambda: set(host.kept) == before)
    assert not [*speech.settings.voices.glob(".*")] and names_of_voices(server) == ["speaker"]


def test_a_voice_that_cannot_be_removed(server, speech, wav, monkeypatch):
    assert server.register("me", wav).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing(errno.EROFS))
        assert server.ask("DELETE", "/v1/audio/voices/me").status == 507
    assert server.ask("DELETE", "/v1/audio/voices/me").status == 200


def test_an_upload_needs_no_temporary_files(server, recording, monkeypatch):
    """$TMPDIR may be full. It was a 500."""
    monkeypatch.setattr("tempfile.TemporaryFile", failing(errno.ENOSPC))
    file = io.BytesIO()
    soundfile.write(file, np.tile(recording[0], 15), recording[1], format="WAV")
    assert len(file.getvalue()) > 1_400_000 and server.register("me", file.getvalue()).status == 200
    assert server.ask("DELETE", "/v1/audio/voices/me").status == 200


def test_voices_are_for_this_user_only(tmp_path):
    """Recordings and transcripts were readable for every user of the machine."""
    folder = tmp_path / "new" / "voices"
    before = os.umask(0)
    try:
        VoiceFolder(Settings(voices=folder)).add("me", (np.ones(24000, np.float32), 24000), "what it says")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_what_a_killed_registration_has_left_is_removed(tmp_path):
    """Not what another server is writing: that is locked, or has just been made."""
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


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_decoder_that_crashes_harms_nobody(server, speech, wav, monkeypatch, signal_number):
    """Recordings were decoded in the server's own process."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.recordings.SECONDS", 1)
    start = recordings.start_decoder

    def start_and_kill():
        process = start()
        process.send_signal(signal_number)
        return process

    speech.decoders.close()
    monkeypatch.setattr(recordings, "start_decoder", start_and_kill)
    for answer in (server.register("x", wav), server.speak(ref_audio=base64.b64encode(wav).decode())):
        assert answer.status == 400 and "cannot be decoded" in answer.error["message"]
    monkeypatch.undo()
    speech.decoders.is_closed = False
    for _ in range(2):
        assert server.speak(ref_audio=base64.b64encode(wav).decode()).status == 200
        (idle,) = speech.decoders.idle
        idle.kill()  # while it is idle
        idle.wait()


def test_broken_uploads_are_not_in_the_log(server, wav, capfd):
    """libmpg123 writes to stderr itself."""
    samples, rate = soundfile.read(io.BytesIO(wav))
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="MP3")
    dice = random.Random(0)
    for _ in range(20):
        data = bytearray(file.getvalue())
        for _ in range(200):
            data[dice.randrange(len(data))] = dice.randrange(256)
        assert server.speak(ref_audio=base64.b64encode(data).decode()).status in (200, 400)
    assert "mpg123" not in capfd.readouterr().err


@pytest.mark.parametrize("gain", [3.0, 1e30])
def test_a_recording_beyond_full_scale(server, speech, recording, gain):
    """The voice changed with a restart, as the file was clipped; one at 1e30 was registered and could not be used."""
    file = io.BytesIO()
    soundfile.write(file, gain * recording[0], recording[1], format="WAV", subtype="FLOAT")
    answer = server.register("loud", file.getvalue())
    assert answer.status == 200, answer.body
    (before,) = [*speech.host.kept.values()][-1]
    speech.models[0].engine.connection.kept.clear()
    assert server.speak(voice="loud").status == 200
    (after,) = [*speech.host.kept.values()][-1]
    assert before is not after and torch.equal(before.ref_spk_embedding, after.ref_spk_embedding)
    assert server.ask("DELETE", "/v1/audio/voices/loud").status == 200


def test_an_embedding_that_is_not_finite(server, speech, wav, monkeypatch):
    """It is refused when the voice is registered, not when somebody wants to hear it."""
    width = speech.models[0].config["talker_config"]["hidden_size"]
    item = SimpleNamespace(ref_spk_embedding=torch.full([width], torch.nan))
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.engine_host.clone_prompt", lambda *_: [item])
    for name, answer in (
        ("audio_sample", server.register("x", wav)),
        ("ref_audio", server.speak(ref_audio=base64.b64encode(wav).decode())),
        ("speaker_embedding", server.speak(speaker_embedding=[1e300] * width)),
    ):
        assert answer.status == 400 and answer.error["param"] == name and "NaN or infinite" in answer.error["message"]
    assert names_of_voices(server) == ["speaker"]


def test_a_base_model_without_voices_says_what_to_do(checkpoint, tmp_path):
    speech = Service(str(checkpoint()), "cpu")
    with pytest.raises(Exception, match="none is registered: POST a recording"):
        speech.models[0].resolve_voice("alloy", ())


def test_a_known_voice_is_found_without_the_disk():
    """A look at the folder of voices in each request took longer than the first audio, and more on a slow disk."""
    speech = object.__new__(Service)
    speech.models = [object.__new__(Model)]
    vars(speech.models[0]).update(presets=["aiden"], speakers=["me"], clones=True)
    speech.registered = {"registered": None}
    looks = []
    speech.refresh = lambda: asyncio.sleep(0, looks.append(1))  # this one's alone: a server of other tests looks, too
    for name in ("aiden", " ME ", "registered", "alloy", None):
        asyncio.run(speech.look_for(name))
    assert not looks
    asyncio.run(speech.look_for("new"))  # another server may have registered it
    assert len(looks) == 1
    speech.registered, speech.models[0].presets, speech.models[0].speakers = {}, [], []
    asyncio.run(speech.look_for("alloy"))  # any voice will do, and there is none
    assert len(looks) == 2


@pytest.mark.parametrize(
    "name", ["../me", "me/../../x", ".hidden", "a" * 65, "", "two words", "nul\0", "mé", "-me", "a.b"]
)
def test_a_name_cannot_leave_its_folder(server, speech, wav, name):
    answer = server.register(name, wav)
    assert answer.status == 400 and answer.error["message"]
    assert not [path for path in speech.settings.voices.parent.rglob("*") if path.is_file()]


def test_a_broken_voice_file_is_left_out(checkpoint, tmp_path, caplog):
    """The folder may hold files of somebody else: none of them is executed, none stops the server."""
    (tmp_path / "broken.safetensors").write_bytes(b"\x80\x04not a voice")
    (tmp_path / "Bad Name.safetensors").write_bytes(b"")
    speech = Service(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path))
    assert speech.voice_names() == []
    assert "broken" in caplog.text and "Bad Name" in caplog.text


def bad_recordings(wav):
    def encoded(samples, rate, **options):
        file = io.BytesIO()
        soundfile.write(file, samples, rate, format="WAV", **options)
        return file.getvalue()

    noise = np.random.default_rng(0).normal(0, 0.1, (96000, 8))
    huge = bytearray(wav)
    huge[40:44] = b"\xff\xff\xff\x7f"  # a header that promises hours
    return {
        "nothing": b"",
        "text": b"hello",
        "a pickle": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94.",
        "cut in its header": wav[:30],
        "silence": encoded(np.zeros(48000), 24000),
        "empty": encoded(noise[:0, 0], 24000),
        "too short": encoded(noise[:1000, 0], 24000),
        "too long": encoded(np.tile(noise[:, 0], 6), 8000),
        "eight channels": encoded(noise, 24000),
        "a strange rate": encoded(noise[:, 0], 400000),
        "NaN": encoded(np.full(48000, np.nan, np.float32), 24000, subtype="FLOAT"),
        "a raw format": encoded_as(noise[:, 0], "AU"),
        "a phone's, too long": phone_recording(np.tile(noise[:, 0], 7), 8000, "ipod", "aac"),
        "a phone's, silent": phone_recording(np.zeros(48000), 24000, "webm", "libopus"),
        "a phone's, six channels": phone_recording(noise[:, 0], 48000, "mp4", "aac", "5.1"),
        "a phone's, cut": phone_recording(noise[:, 0], 48000, "mp4", "aac")[:5000],
    }, bytes(huge)


def encoded_as(samples, name):
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format=name, subtype="PCM_16")
    return file.getvalue()


@pytest.mark.parametrize(
    "container, codec, rate", [("ipod", "aac", 44100), ("adts", "aac", 16000), ("webm", "libopus", 48000)]
)
def test_a_phones_recording_is_a_voice(server, container, codec, rate):
    data = phone_recording(np.random.default_rng(0).normal(0, 0.1, 2 * rate), rate, container, codec)
    assert server.speak(ref_audio=base64.b64encode(data).decode()).status == 200
    assert server.register("phone", data).status == 200
    assert server.ask("DELETE", "/v1/audio/voices/phone").status == 200


def test_recordings_are_decoded_with_limits(server, wav):
    bad, promises_hours = bad_recordings(wav)
    for name, data in bad.items():
        registered = server.register("x", data)
        assert registered.error["param"] == "audio_sample", name
        for answer in (registered, server.speak(ref_audio=base64.b64encode(data).decode())):
            assert answer.status == 400 and len(answer.error["message"]) > 20, name
            assert answer.error["param"] in ("audio_sample", "ref_audio"), name
            if name in ("nothing", "empty"):
                assert "is empty" in answer.error["message"] or "no samples" in answer.error["message"]
    assert server.speak(ref_audio=base64.b64encode(promises_hours).decode()).status in (200, 400)
    assert names_of_voices(server) == ["speaker"]


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1/x.wav", "https://x", "file:///etc/passwd", "/etc/passwd", "ftp://x", "voice.wav", "abcd"],
)
def test_nothing_is_fetched_for_strangers(server, address, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("the server fetched something"))
    # `setattr` would look it up first, which compiles librosa.
    monkeypatch.setitem(vars(librosa), "load", lambda *_, **__: pytest.fail("the server read a file"))
    answer = server.speak(ref_audio=address)
    assert answer.status == 400 and answer.error["message"].startswith("ref_audio")
    assert answer.error["param"] == "ref_audio"


# ---- Other routes


def test_models_health_metrics(server, checkpoint):
    assert server.ask("GET", "/health").json == {"status": "ok"}
    (model,) = server.ask("GET", "/v1/models").json["data"]
    assert model["id"] == checkpoint().name and "/" not in model["id"]
    assert server.ask("GET", f"/v1/models/{model['id']}").json == model
    assert server.ask("GET", "/v1/audio/models").json["models"] == [model]  # Open WebUI
    assert server.ask("GET", "/v1/test").json == {"status": "ok"}  # wyoming-openai then lists the voices;
    assert server.ask("GET", "/v1/readyz").status == 404  # with this it would take the model for the only one
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
        ("PUT", "/v1/audio/speech", 405, "POST"),
        ("PUT", "/v1/audio/voices", 405, "GET, HEAD, POST"),
        ("GET", "/redoc", 404, None),
    ):
        answer = server.ask(method, path)
        assert answer.status == status and answer.error["message"]
        assert answer.headers["Allow"] == allowed
        assert ("/v1/audio/speech, /v1/audio/speech/stream" in answer.error["message"]) == (status == 404)
    assert server.ask("HEAD", "/health").status == 200


def test_every_response_has_an_id(server, speech, monkeypatch, caplog):
    """So that a client can say which request failed, and the log has the same id."""
    good = server.ask("GET", "/v1/models"), server.speak(), server.speak(stream_format="sse")
    bad = server.speak(temperature=-1), server.ask("GET", "/nothing"), server.speak(headers={"Origin": "http://x"})
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.service.sampling", lambda *_: 1 / 0)
    monkeypatch.setattr(Service, "voices", lambda *_: 1 / 0)
    failed = server.speak(), server.ask("GET", "/v1/audio/voices")
    assert [answer.status for answer in (*good, *bad, *failed)] == [200, 200, 200, 400, 404, 403, 500, 500]
    ids = [answer.headers["X-Request-Id"] for answer in (*good, *bad, *failed)]
    assert {len(name) for name in ids} == {16} and len(set(ids)) == len(ids)
    for answer in failed:
        assert f"request {answer.headers['X-Request-Id']} failed" in caplog.text


# ---- Limits


def test_a_key_guards_every_route_but_health_and_docs(speech):
    key = "k\u00e4y-1"
    with RunningServer(speech, api_key=f" {key}\n") as server:  # as from a file; clients cannot send white space
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
    with RunningServer(speech, api_key=key, open_lists=True) as server:  # Open WebUI asks for these without it
        for path in ("/v1/models", "/v1/audio/models", "/v1/audio/voices", "/v1/test"):
            assert server.ask("GET", path).status == 200
            assert server.ask("POST", path).status == 401
        assert server.ask("GET", "/metrics").status == server.speak().status == 401


def test_web_pages_of_other_hosts_are_refused(server, speech):
    """A page that somebody looks at could otherwise speak to a server on their machine."""
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
        preflight |= {"Access-Control-Request-Private-Network": "true"}  # a public page that calls this machine
        assert open_server.ask("OPTIONS", "/v1/audio/speech", headers=preflight).status == 200


def test_a_name_that_is_made_to_lead_here_is_refused(speech):
    """DNS rebinding: the browser takes a foreign page for our own, as its host's name leads to this machine."""
    with RunningServer(speech, only_this_machine=True) as server:
        for host in ("localhost", f"LOCALHOST:{server.port}", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8000"):
            assert server.ask("GET", "/v1/models", headers={"Host": host}).status == 200, host
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "10.0.0.1", "[", ""):
            headers = {"Host": host, "Origin": f"http://{host}"}
            answer = server.ask("GET", "/v1/models", headers=headers)
            assert answer.status == 403 and "--allow-host or --api-key" in answer.error["message"], host
        assert server.ask("GET", "/health", headers={"Host": "evil.example"}).status == 200
        named = {"Host": "Host.docker.internal:8000"}
        assert server.ask("GET", "/v1/models", headers=named).status == 403
        with RunningServer(speech, only_this_machine=True, hosts=("host.docker.internal",)) as other:
            assert other.ask("GET", "/v1/models", headers=named).status == 200
            assert other.ask("GET", "/v1/models", headers={"Host": "evil.example"}).status == 403
        with pytest.raises(InvalidStatus), connect(server.websocket_address.replace("127.0.0.1", "0.0.0.0")):
            pass
        assert server.speak().status == 200


def compose_options() -> list[str]:
    """Of the server in compose.yaml, as a shell would split them."""
    command = re.search(r"command: >-\n((?:      .*\n)+)", (ROOT / "compose.yaml").read_text())[1]
    return shlex.split(command)


@pytest.mark.parametrize("key", [None, "secret"])
def test_hosts_are_checked_wherever_names_are_given(speech, key, monkeypatch):
    """Only a server on a loopback address did. That of compose.yaml listens on 0.0.0.0, behind a published port."""
    monkeypatch.setattr(sys, "argv", compose_options())
    settings = make_settings(parse_arguments())
    assert not settings.only_this_machine
    with RunningServer(speech, hosts=settings.hosts, api_key=key) as server:
        bearer = {"Authorization": f"Bearer {key}"}
        for host in ("localhost:8000", "127.0.0.1:8000", "speech:8000", "Host.docker.internal:8000"):
            headers = bearer | {"Host": host, "Origin": f"http://{host}"}
            assert server.ask("GET", "/v1/models", headers=headers).status == 200, host
        for host in (
            "evil.example:8000",
            "qwen3_tts_cuda_graphs.speech.evil.example",
            "localhost.evil.example",
            "10.0.0.1",
        ):
            headers = bearer | {"Host": host, "Origin": f"http://{host}"}
            error = server.ask("GET", "/v1/models", headers=headers).error
            assert error["code"] == "host" and "--allow-host" in error["message"], host


def test_a_host_is_a_name():
    assert check_host(" Host.docker.internal") == "host.docker.internal"
    for name in ("http://x", "x:8000", "", "a b"):
        with pytest.raises(ValueError, match="--allow-host is .* without a port"):
            check_host(name)


def test_limits_of_a_request(speech, wav):
    with RunningServer(speech, max_text=20, max_body=100_000, max_upload=50_000, max_reference_seconds=1.5) as server:
        message = server.speak(input="x" * 21).error["message"]
        assert "at most 20" in message and "--max-text" in message
        assert server.speak(input="x" * 100_000).status == 413
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        body = (b"%x\r\n%s\r\n" % (1000, b" " * 1000) for _ in range(200))
        try:
            assert server.ask("POST", "/v1/audio/speech", body, headers).status == 413
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may close before everything is sent
        answer = server.register("x", wav)
        assert answer.status == 413 and "50000" in answer.error["message"]
        answer = server.speak(ref_audio=base64.b64encode(wav).decode())
        assert answer.status == 413 and "50000" in answer.error["message"]
        answer = server.speak(ref_audio=base64.b64encode(wav[: 44 + 49_000]).decode())  # 1.53 s
        assert "longer than 1.5 s" in answer.error["message"]


def test_a_prompt_that_is_too_long(server):
    """The remedy must be one that a client has."""
    message = server.speak(input="word " * 500, non_streaming_mode=True).error["message"]
    assert "of 512 positions: shorten input, instructions or ref_text" in message


def test_a_request_that_never_arrives(speech):
    with RunningServer(speech, body_seconds=0.3) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/audio/speech")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b'{"input":')
        assert connection.getresponse().status == 408
        connection.close()


def test_a_head_that_never_ends(speech):
    """Neither the first head of a connection nor a later one may hold it forever."""
    with RunningServer(speech, body_seconds=0.3) as server:
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
                connection.sendall(before)
                if before:
                    assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
                connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nX-Slow: ")
                while connection.recv(10_000):
                    pass
        assert len(server.speak(response_format="pcm", max_new_tokens=60).body) == 59 * FRAME  # longer than 0.3 s


def test_draining_has_a_limit(speech, monkeypatch):
    """A listener who never reads must not keep the process alive."""
    monkeypatch.setattr(speech, "settings", dataclasses.replace(speech.settings, drain_seconds=0.3))
    server = process.Server(speech)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the audio does not fit into it
        serving = speech.submit(server.serve(sockets=[listening]))
        wait_until(lambda: server.started)
        connection = http.client.HTTPConnection(*listening.getsockname(), timeout=LIMIT)
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"input": "Hello.", "max_new_tokens": 450, "response_format": "pcm"})
        connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
        wait_until(lambda: speech.engine.counts() == (1, 0))
        try:
            server.handle_exit(signal.SIGTERM, None)
            serving.result(20)
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                connection.getresponse().read()
        finally:
            speech.is_draining = False
            connection.close()
    wait_until_free(speech)


def test_a_stopped_engine_is_started_again(checkpoint, tmp_path, wav):
    """It needed a person to restart the server."""
    speech = load_speech(checkpoint(), tmp_path)
    with RunningServer(speech) as server:
        assert server.register("me", wav).status == 200
        before = server.speak(voice="me", response_format="pcm").body
        speech.engine.close()
        wait_until(lambda: server.ask("GET", "/health").status == 503)
        for answer in (server.ask("GET", "/health"), server.speak()):
            assert (
                answer.status == 503 and answer.headers["Retry-After"] == "1" and answer.error["code"] == "restarting"
            )
        wait_until(lambda: server.ask("GET", "/health").status == 200)
        assert server.speak(voice="me", response_format="pcm").body == before
        assert b"qwen3_tts_worker_restarts 1.0" in server.ask("GET", "/metrics").body
    speech.close()


def test_errors_reach_the_log(capsys):
    log = logging.getLogger("qwen3_tts_cuda_graphs")
    handlers = log.handlers
    log.handlers = []
    try:
        process.log_to_stderr()
        as_api_error(RuntimeError("why"))
    finally:
        log.handlers = handlers
    assert "RuntimeError: why" in capsys.readouterr().err


def test_a_full_queue(speech):
    """Two places and two that wait: the fifth is told to come back later, at once."""
    with RunningServer(speech) as server:
        fields = {"input": "Hello.", "max_new_tokens": 400, "response_format": "pcm"}
        connections = []
        for _ in range(4):
            connection = server.connect()
            connection.request("POST", "/v1/audio/speech", json.dumps(fields), {"Content-Type": "application/json"})
            connections.append(connection)
        wait_until(lambda: speech.in_flight == 4)
        answer = server.speak()
        assert answer.status == 429 and answer.headers["Retry-After"] == "1"
        assert answer.error["type"] == "rate_limit_error" and "later" in answer.error["message"]
        for connection in connections:
            connection.close()
        wait_until_free(speech)
        assert server.speak().status == 200


@pytest.mark.parametrize(
    "when, name",
    [("before its first chunk", "pcm"), ("after its first chunk", "pcm"), ("after its first chunk", "mp3")],
)
def test_a_client_that_goes_away_frees_its_place(server, speech, when, name, monkeypatch):
    frames = 0
    original = Runner.launch

    def launch(*arguments):
        nonlocal frames
        frames += 1
        return original(*arguments)

    monkeypatch.setattr(Runner, "launch", launch)
    connection = server.connect()
    body = json.dumps({"input": "Hello.", "max_new_tokens": 450, "response_format": name})
    connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
    if when == "after its first chunk":
        assert connection.getresponse().read(100)
    else:
        wait_until(lambda: speech.in_flight == 1)
    before = frames
    connection.close()
    wait_until_free(speech)
    assert frames - before < 40  # of 450
    assert server.speak().status == 200


@pytest.mark.parametrize("response_format", ["wav", "pcm", "mp3"])
def test_text_that_can_never_fit(server, speech, response_format):
    """Every frame takes a token: 600 of them were spoken into 512 positions, and then the response broke off. With
    max_new_tokens the text is one utterance."""
    frames = speech.metrics.audio._value.get()
    fields = {"input": "a b " * 150, "non_streaming_mode": False, "response_format": response_format}
    answer = server.speak(**fields, max_new_tokens=1000)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert re.search(r"takes at least 6\d\d of 512 positions: shorten input", answer.error["message"])
    assert speech.metrics.audio._value.get() == frames
    assert server.speak(**fields).status == 200  # the client's own max_new_tokens ends it before


def test_speech_that_is_cut_off_is_not_a_short_file(server, caplog):
    """Speech may reach the end of the cache: the client must not take it for complete.

    uvicorn's own words for it, "ASGI callable returned without completing response", were an error in the log.
    """
    fields = {"input": "a" * 480, "max_new_tokens": 500, "non_streaming_mode": True, "response_format": "pcm"}
    with pytest.raises(http.client.IncompleteRead):
        server.speak(**fields)
    wait_until(lambda: caplog.messages)
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
    """OpenAI takes 4,096 characters. Here 500 ended with a broken connection, after minutes of speech."""
    sentences = [f"This is the sentence with the number {number}." for number in range(5)]
    fields = {"response_format": "pcm", "max_new_tokens": None}
    speech = load_speech(checkpoint(), tmp_path / "voices")
    with contextlib.closing(speech), RunningServer(speech) as server:
        alone = [server.speak(input=text, seed=7 + i, **fields).body for i, text in enumerate(sentences)]
        pause = bytes(2 * 24000 * 2 // 5)
        assert server.speak(input=" ".join(sentences), seed=7, **fields).body == pause.join(alone)
        answer = server.speak(input=" ".join(sentences), seed=7, stream_format="sse", **fields)
        *_, last = events_of(answer.body)
        assert last["type"] == "speech.audio.done" and last["usage"]["input_tokens"] == len(" ".join(sentences))
        in_context = {"ref_audio": base64.b64encode(wav).decode(), "ref_text": "x" * 450}
        answer = server.speak(input=" ".join(sentences), **in_context, **fields)
        assert answer.status == 400 and "too little is left for speech: shorten input" in answer.error["message"]


def test_a_worker_that_is_to_end_speaks_the_other_parts(checkpoint, tmp_path):
    """systemd sends SIGTERM to all processes of a service: the second part was refused."""
    text = " ".join(f"This is the sentence with the number {number}." for number in range(4))
    fields = {"input": text, "response_format": "pcm", "max_new_tokens": None, "seed": 7}
    speech = load_speech(checkpoint(), tmp_path / "voices")
    with contextlib.closing(speech), RunningServer(speech) as server:
        whole = server.speak(**fields).body
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(server.speak, **fields)
            wait_until(lambda: speech.host.listeners)
            speech.models[0].engine.process.worker.is_draining = True
            assert answer.result(LIMIT).body == whole
        wait_until(lambda: speech.models[0].engine.restarts == 1)


def unread_request(server, **fields) -> socket.socket:
    """A client that asks and never reads. Small buffers of the system, so that the server is left with the audio."""
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted connections have the same
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({"input": "Hello.", "response_format": "pcm", **SHORT, **fields}).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def open_connections(server) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.parametrize(
    "fields",
    [{"max_new_tokens": 300}, {"max_new_tokens": 300, "stream_format": "sse"}, {"max_new_tokens": 20, "stream": False}],
    ids=["while it is made", "events", "when it is complete"],
)
def test_a_listener_who_does_not_read_is_given_up(speech, fields):
    """A connection that was closed kept its socket and the audio for good, as closing waits for the client."""
    with RunningServer(speech, send_seconds=0.3) as server, unread_request(server, **fields):
        wait_until(lambda: speech.in_flight)
        wait_until_free(speech)
        wait_until(lambda: not open_connections(server))


def test_a_connection_is_kept_between_requests(speech):
    """For 5 s: a client that posts every 5 s lost some, and proxies gave 502. The limit for a head is another one."""
    assert Settings().keep_alive_seconds > 90  # Go's clients and some proxies keep theirs for as long
    with RunningServer(speech, keep_alive_seconds=1.5, body_seconds=0.3) as server:
        with contextlib.closing(server.connect()) as connection:
            for _ in range(2):
                connection.request("GET", "/health")
                assert connection.getresponse().read()
                used = connection.sock
                time.sleep(0.8)
            connection.request("GET", "/health")
            assert connection.getresponse().read() and connection.sock is used
            began = time.monotonic()
            assert used.recv(1) == b"" and 1 < time.monotonic() - began < LIMIT


def test_a_connection_that_waits_gives_way(speech, monkeypatch):
    """Idle ones, or those whose heads never end, shut everybody out. Those in use and WebSockets stay."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.connections.SECONDS_TO_BEGIN", 0.2)
    with RunningServer(speech, max_connections=4) as server, contextlib.ExitStack() as stack:
        websocket = stack.enter_context(connect(server.websocket_address, open_timeout=LIMIT))
        unread = stack.enter_context(unread_request(server, max_new_tokens=400))
        others = []
        for head in (b"", b"GET /health HTTP/1.1\r\nHost: x"):
            others.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT)))
            others[-1].sendall(head)
        wait_until(lambda: open_connections(server) == 4)
        assert server.ask("GET", "/v1/models").error["code"] == "too_many"
        time.sleep(0.3)
        for other in others:
            kept = stack.enter_context(contextlib.closing(server.connect()))
            kept.request("GET", "/v1/models")
            assert kept.getresponse().status == 200 and other.recv(1) == b""
        websocket.ping().wait(LIMIT)
        assert unread.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_that_do_nothing_are_counted(speech):
    """Only requests in progress were. Those beyond the limit get a 503, and a little further nothing."""
    with RunningServer(speech, max_connections=1) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT))]
        wait_until(lambda: open_connections(server) == 1)
        assert server.ask("GET", "/v1/models").error["code"] == "too_many"
        assert server.ask("GET", "/health").status == 200
        wait_until(lambda: open_connections(server) == 1)
        for _ in range(2):
            idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT)))
        try:
            assert idle[-1].recv(1) == b""
        except ConnectionResetError:
            pass
        wait_until(lambda: open_connections(server) == 2)


def test_large_requests_share_a_limit(speech, monkeypatch):
    """Each may have 16 MB, and there may be a thousand of them."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.server.MAX_REGISTRATIONS", 1)
    with RunningServer(speech, max_held=50_000) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as slow:
            kind = b"multipart/form-data; boundary=x"
            head = (
                b"POST /v1/audio/voices HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: 40000\r\n\r\n" % kind
            )
            slow.sendall(head + b"--x\r\nContent-Disposition: form-data; name=a; filename=b\r\n\r\n" + b"x" * 30_000)
            wait_until(lambda: server.speak(input="x" * 30_000).status == 503)
            answer = server.register("me", b"")  # one that is being received is one
            assert answer.status == 429 and "later" in answer.error["message"]
            with connect(server.websocket_address, open_timeout=LIMIT) as session:
                session.send(json.dumps({"type": "session.config", "ref_audio": "x" * 30_000}))
                assert "too many large requests" in session.recv(timeout=LIMIT)
        wait_until(lambda: server.speak(input="x" * 30_000).status == 400)  # too long for a text


def test_whole_files_share_the_limit(speech):
    """They are in memory until they have been read."""
    with RunningServer(speech, max_held=100_000) as server:
        fields = dict(response_format="pcm", stream=False)
        assert server.speak(**fields, max_new_tokens=20).status == 200
        answer = server.speak(**fields, max_new_tokens=40)  # 150 kB
        assert answer.status == 503 and answer.error["code"] == "too_many"
        assert server.speak(**fields, max_new_tokens=20).status == 200
        assert server.speak(response_format="pcm", max_new_tokens=40).status == 200


def test_a_whole_file_that_is_too_much_ends_early(speech):
    """All of it was spoken and collected, and only then refused."""
    with RunningServer(speech, max_held=100_000) as server:
        before = speech.metrics.audio._value.get()
        answer = server.speak(response_format="pcm", stream=False, max_new_tokens=300)
        assert answer.status == 503 and answer.error["code"] == "too_many"
        assert speech.metrics.audio._value.get() - before < 60 * 0.08
    wait_until_free(speech)


def test_sigterm_to_all_processes(checkpoint, tmp_path, monkeypatch):
    """As systemd sends it: the worker ended after a minute, whatever --drain-seconds was, and was started again."""
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.engine_process.SECONDS_TO_DRAIN", 0.0)
    speech = load_speech(checkpoint(), tmp_path / "voices")
    never_end(speech)
    server = process.Server(speech)
    with contextlib.closing(speech), socket.create_server(("127.0.0.1", 0)) as listening:
        serving = speech.submit(server.serve(sockets=[listening]))
        wait_until(lambda: server.started)
        body = json.dumps({"input": "Hello.", "max_new_tokens": 450, "response_format": "pcm"})
        connection = http.client.HTTPConnection(*listening.getsockname(), timeout=LIMIT)
        connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            audio = answer.read(FRAME)
            speech.models[0].engine.process.worker.drain()
            server.handle_exit(signal.SIGTERM, None)
            audio += answer.read()
        assert len(audio) == 449 * FRAME
        serving.result(20)
        assert speech.models[0].engine.restarts == 0 and speech.models[0].engine.process.worker.is_draining
        connection.close()


def test_draining_waits_for_a_whole_file(speech):
    """Nothing was spoken any more, so the server ended while it was sent."""
    server = process.Server(speech)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = speech.submit(server.serve(sockets=[listening]))
        wait_until(lambda: server.started)
        where = SimpleNamespace(socket=listening, port=listening.getsockname()[1])
        with unread_request(where, stream=False, max_new_tokens=100) as connection:
            wait_until(lambda: speech.in_flight)
            wait_until_free(speech)
            try:
                server.handle_exit(signal.SIGTERM, None)
                time.sleep(0.5)
                assert not server.should_exit
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                assert len(answer.read()) == 99 * FRAME
                serving.result(20)
            finally:
                speech.is_draining = False


def test_speech_that_is_cut_off_over_http_1_0(server):
    """It has no chunks: a proxy took the end of the connection for the end of the speech and passed a short file on."""
    fields = {"input": "a" * 480, "max_new_tokens": 500, "non_streaming_mode": True, "response_format": "pcm"}
    body = json.dumps(fields).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        head = (
            f"POST /v1/audio/speech HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        with pytest.raises(ConnectionResetError):
            while connection.recv(100_000):
                pass


def test_an_error_inside_leaks_nothing(server, speech, monkeypatch, caplog):
    error = RuntimeError("/secret/path")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.service.sampling", fail)
    answer = server.speak()
    assert answer.status == 500 and b"secret" not in answer.body and "log" in answer.error["message"]
    assert "/secret/path" in caplog.text
    error = TimeoutError("/secret/path")  # not the engine's
    answer = server.speak()
    assert answer.status == 503 and b"secret" not in answer.body and "took too long" in answer.error["message"]
    error = RuntimeError("/secret/path")
    monkeypatch.undo()
    monkeypatch.setattr(speech, "check", fail)
    answer = server.speak()
    assert answer.status == 500 and b"secret" not in answer.body
    monkeypatch.undo()
    assert server.speak().status == 200


def test_while_starting_and_while_shutting_down(speech, checkpoint, tmp_path):
    starting = LocalService(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path))
    with RunningServer(starting) as server:
        for answer in (server.ask("GET", "/health"), server.speak()):
            assert answer.status == 503 and "starting" in answer.error["message"]
    starting.close()
    with RunningServer(speech) as server:
        speech.is_draining = True
        try:
            for answer in (server.ask("GET", "/health"), server.speak()):
                assert answer.status == 503 and "shutting down" in answer.error["message"]
        finally:
            speech.is_draining = False


# ---- OpenAI's own client


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def test_openai_whole(client, server):
    asked = dict(model="tts-1", voice="alloy", input="Hello there.", extra_body=SHORT)
    assert (
        client.audio.speech.create(**asked, response_format="pcm").content == server.speak(response_format="pcm").body
    )
    assert client.audio.speech.create(**asked).content == server.speak(response_format="mp3").body


def test_openai_voices(client, wav):
    voice = client.audio.voices.create(name="me", audio_sample=("me.wav", wav), consent="none")
    assert (voice.id, voice.name, voice.object, voice.type) == ("me", "me", "audio.voice", "audio_sample")
    assert voice.created_at > 1e9
    assert client.audio.speech.create(model="tts-1", voice={"id": voice.id}, input="Hello.", extra_body=SHORT).content
    deleted = client.audio.voices.delete(voice.id)
    assert (deleted.id, deleted.object, deleted.deleted) == ("me", "audio.voice.deleted", True)


def test_openai_streamed(client, server):
    asked = dict(model="gpt-4o-mini-tts", voice="nova", input="Hello there.", response_format="pcm", extra_body=SHORT)
    with client.audio.speech.with_streaming_response.create(**asked) as response:
        audio = b"".join(response.iter_bytes())
    assert audio == server.speak(response_format="pcm").body
    with client.audio.speech.with_streaming_response.create(**asked, stream_format="sse") as response:
        events = events_of(b"".join(response.iter_bytes()))
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == audio


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError, match="there is no voice 'nobody'") as caught:
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
    assert caught.value.param == "voice" and caught.value.code == "unknown_voice"
    assert [model.id for model in client.models.list()]


def test_servers_that_share_a_folder_share_its_voices(server, speech, checkpoint, wav):
    """A voice registered at one replica must not be unknown to the next, nor one that was removed live on there."""
    other = load_speech(checkpoint(), speech.settings.voices)
    never_end(other)
    with RunningServer(other) as second:
        assert server.register("me", wav).status == 200
        assert second.speak(voice="me").body == server.speak(voice="me").body
        assert second.register("me", wav).status == 400
        assert second.ask("DELETE", "/v1/audio/voices/me").status == 200
        assert second.speak(voice="me").status == 400
        deadline = time.monotonic() + LIMIT  # the first server looks every second
        while (status := server.speak(voice="me").status) == 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert status == 400
        assert server.register("me", wav, ref_text="what it says").status == 200
        assert second.speak(voice="me").body == server.speak(voice="me").body
        assert server.ask("DELETE", "/v1/audio/voices/me").status == 200
    other.close()


# ---- A response, whoever serves it


async def sent_by(receive, chunks):
    """What a SpeechResponse sends, of speech that `chunks` makes."""
    sent = []

    async def send(message):
        sent.append(message)

    class Spoken(SimpleNamespace):
        def __aiter__(self):
            return chunks()

    wanted = parse(SpeechRequest, {"input": "Hi.", "response_format": "pcm"})
    spoken = Spoken(rate=24000, service=SimpleNamespace(responses=0, encoders=Encoders(0)))
    response = SpeechResponse(spoken, wanted, Settings(request_seconds=LIMIT))
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
    """As that of Ray's proxy may: with an error before the first audio, and incomplete after it."""

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
