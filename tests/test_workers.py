"""Workers: messages; processes that die, hang or lose their server; slow listeners; several models in one server."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from serving_helpers import (
    FRAME,
    LIMIT,
    SHORT,
    LocalService,
    load_speech,
    never_end,
    wait_until,
    wait_until_free,
)

from qwen3_tts_cuda_graphs.prompts.script import Part
from qwen3_tts_cuda_graphs.serving import engine_host, memory, worker
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.engine_process import EngineProcess
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.messages import LENGTHS, Unpacker, pack
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions
from qwen3_tts_cuda_graphs.serving.server import Server
from qwen3_tts_cuda_graphs.serving.service import Service, read_speakers
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.worker_connection import Call, Timeouts, WorkerConnection
from qwen3_tts_cuda_graphs.speech.engine import Engine


@pytest.fixture(scope="module")
def speech(checkpoint, tmp_path_factory):
    """Two models: one that clones and never ends by itself, and one with preset speakers. A stream of the first pauses
    after four unread chunks."""
    folders = [checkpoint(), checkpoint("custom_voice")]
    speech = load_speech(folders, tmp_path_factory.mktemp("voices"), timeouts=Timeouts(chunks_per_receipt=2))
    speech.engine.max_unread = 4
    never_end(speech)
    yield speech
    speech.close()


# ---- Messages


def test_messages_arrive_as_they_were_sent():
    """However the received data is split."""
    messages = [({"id": 1, "text": "\ud83d Grüße"}, b""), ({}, bytes(range(256))), ({"id": 2}, b"x")]
    data = b"".join(pack(*message) for message in messages)
    for size in (1, 7, 1000):
        unpacker = Unpacker()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [message for piece in pieces for message in unpacker.feed(piece)] == messages
        assert not unpacker.data
    with pytest.raises(ValueError, match="a message of"):
        [*Unpacker().feed(LENGTHS.pack(2, 1 << 31))]


def test_nothing_is_lost_while_the_server_does_not_read():
    """The socket accepts a part at once, another thread writes the rest, and `close` waits for it."""
    ours, theirs = socket.socketpair()
    connection = worker.ServerConnection(theirs, on_close=lambda: None)
    received, senders = [], 3

    def send(sender):
        for number in range(200):
            (connection.add if number % 3 else connection.send)(bytes(1000), sender=sender, number=number)
        connection.flush()

    def read():
        unpacker = Unpacker()
        while data := ours.recv(1 << 16):
            received.extend(unpacker.feed(data))

    threads = [threading.Thread(target=send, args=[sender]) for sender in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert connection.backlog  # more than the socket accepts, sent without blocking
    reader = threading.Thread(target=read)
    reader.start()
    connection.send(type="stopped")
    connection.close()
    reader.join(LIMIT)
    assert received.pop() == ({"type": "stopped"}, b"")
    for sender in range(senders):
        of_sender = [(header["number"], payload) for header, payload in received if header["sender"] == sender]
        assert of_sender == [(number, bytes(1000)) for number in range(200)]


# ---- Processes that end


class FakeWorker:
    """Is ready at once, unless it is told to `hang`. Then it does what `then` does with its socket."""

    pid = None

    def __init__(self, theirs, then):
        self.socket = theirs.dup()
        ready = dict(type="ready", device="cpu", rows=1, rate=24000)
        for message in () if then is hang else (dict(type="loaded"), ready):
            self.socket.sendall(pack(message))
        self.was_killed = False
        threading.Thread(target=then, args=[self.socket], daemon=True).start()

    def wait(self, timeout=None):
        return -signal.SIGKILL if self.was_killed else 1

    def kill(self):
        self.was_killed = True
        self.socket.shutdown(socket.SHUT_RDWR)


def run_with_engine(check, *lives, spare=None, **timeouts):
    """`check` gets an engine whose workers do what `lives` say, one after the other. None: the process cannot be
    started."""
    lives = iter(lives)

    def spawn(theirs):
        life = next(lives)
        if life is None:
            raise OSError("too many open files")
        return FakeWorker(theirs, life)

    async def main():
        limits = Timeouts(**dict(restart_delay=0.02) | timeouts)
        engine = EngineProcess(dict(model="x", device="cpu"), 1, spawn, spare, limits)
        await engine.load()
        await engine.begin()
        await check(engine)
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def end(socket):
    socket.recv(10)
    socket.close()


def live(socket):
    while socket.recv(10_000):
        pass


def hang(socket):
    live(socket)


def beat(socket):
    with contextlib.suppress(OSError):
        while True:
            socket.sendall(pack(dict(type="beat", memory=1)))
            time.sleep(0.05)


async def wait_for_state(engine, state) -> None:
    while engine.state != state:
        await asyncio.sleep(0.01)


def test_after_three_deaths_it_gives_up_and_says_why(caplog):
    """The spare is woken only for a worker that replaces another, not after the last: it would occupy memory of the
    GPU."""
    spare = mock.Mock(take=lambda: None)

    async def check(engine):
        await wait_for_state(engine, "gave up")
        problem = r"stopped 3 times \(it exited with status 1\): restart the server"
        with pytest.raises(ApiError, match=problem) as refused:
            engine.check_ready()
        assert (refused.value.status, refused.value.code, engine.restarts) == (503, "stopped", 2)

    run_with_engine(check, end, end, end, live, spare=spare)
    assert "is not started again" in caplog.text and spare.wake.call_count == 2


@pytest.mark.parametrize(
    "lives, restarts, deaths, timeouts",
    [
        ([end, *[None] * 5, live], 6, 1, dict(exit=0.01)),
        ([end, end, end, live], 3, 1, dict(recovery=-1.0)),
        ([end, hang, live], 2, 2, dict(restart=0.2, check_interval=0.1)),
    ],
    ids=["no process can be started", "deaths long ago", "it hangs while it loads again"],
)
def test_it_is_started_again(lives, restarts, deaths, timeouts):
    """When many connections took all file descriptors for a while, the engine was given up for good. Deaths long ago do
    not count. A worker that hung while loading was waited for without a limit, with "try again in a moment"."""

    async def check(engine):
        await wait_for_state(engine, "restarting")
        while engine.restarts < restarts or not engine.is_ready:
            await asyncio.sleep(0.01)
        assert (engine.restarts, engine.deaths) == (restarts, deaths)

    run_with_engine(check, *lives, **timeouts)


def test_no_call_reaches_a_worker_that_is_not_ready():
    """The worker took a call for an error of the server, and ended."""

    async def check(engine):
        with engine.connection.call("voice"):
            pass
        engine.connection.is_ready = False  # its initial value
        with pytest.raises(ApiError) as refused, engine.connection.call("voice"):
            pass
        assert refused.value.code == "restarting"
        assert not WorkerConnection(print, engine.timeouts).is_ready

    run_with_engine(check, live)


def test_a_stopped_worker_is_replaced():
    """It was replaced only after 30 s, like one that may be busy, and /health answered 200."""
    process = subprocess.Popen(["sleep", "600"])

    async def check(engine):
        engine.process.pid = process.pid
        await asyncio.sleep(0.5)
        assert engine.is_ready and engine.restarts == 0  # it is only sleeping
        process.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(wait_for_state(engine, "restarting"), 5)
        await wait_for_state(engine, "ready")

    try:
        run_with_engine(check, live, live, check_interval=0.05, suspended=0.3)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("exits", [True, False])
def test_a_server_whose_engine_is_given_up_can_exit(checkpoint, tmp_path, exits):
    """It kept running, so systemd and Docker never started it again."""
    settings = Settings(max_streams=1, voices=tmp_path, exit_when_failed=exits)

    async def main():
        speech = Service(str(checkpoint()), "cpu", settings=settings, spawn=lambda theirs: FakeWorker(theirs, end))
        speech.models[0].engine.timeouts = Timeouts(restart_delay=0.02)
        await speech.start()
        server = Server(speech)
        serving = asyncio.create_task(server.serve(sockets=[socket.create_server(("127.0.0.1", 0))]))
        await asyncio.wait_for(wait_for_state(speech.models[0].engine, "gave up"), LIMIT)
        await asyncio.wait([serving], timeout=LIMIT if exits else 0.5)
        assert serving.done() == exits
        assert server.failure.code == 1 if exits else server.failure is None
        server.should_exit = True
        await serving
        await speech.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_a_worker_without_a_sign_of_life_is_replaced():
    async def check(engine):
        with pytest.raises(ApiError) as failed:
            await engine.connection.ask("count", text="Hello.")
        assert failed.value.status == 503
        await wait_for_state(engine, "ready")
        await asyncio.sleep(1)
        assert engine.is_ready and engine.restarts == 1  # the second one sends heartbeats

    run_with_engine(check, live, beat, check_interval=0.1, silence=0.5)


@pytest.mark.parametrize("op", ["count", "split", "voice"])
def test_a_question_has_a_deadline(op):
    """If the worker was alive but did not answer, its clients waited for --request-seconds or forever."""

    async def check(engine):
        with pytest.raises(ApiError, match=r"did not answer within 0.2 s: try again later") as failed:
            await engine.connection.ask(op, text="Hello.")
        assert (failed.value.status, failed.value.code) == (503, "timeout")
        assert engine.is_ready and not engine.connection.calls

    run_with_engine(check, live, answer=0.2)


def test_an_engine_that_stands_still_is_noticed():
    """A kernel that never ends blocks the engine's thread only."""
    intake = SimpleNamespace(waiting=[], preparing=0, prepared=0)
    engine = SimpleNamespace(active=[], passes=1, intake=intake, has_work=lambda: True, last_progress={})
    for active, passes, preparing, prepared, what in (
        *(([], 1, 0, 0, None), ([1], 1, 0, 0, "frame"), ([1], 2, 0, 0, None), ([1], 2, 0, 0, "frame")),
        *(([1], 3, 1, 0, "prompt"), ([1], 4, 1, 1, None), ([], 4, 2, 1, "prompt"), ([], 4, 0, 1, None)),
    ):
        engine.active, engine.passes, intake.preparing, intake.prepared = active, passes, preparing, prepared
        time.sleep(0.02)
        assert Engine.stands_still(engine, 0.01) == what
    assert Engine.stands_still(engine, 60) is None


def test_a_model_that_cannot_be_loaded_is_not_tried_again(checkpoint, tmp_path):
    """At the start it is an error of the user: the server ends with one line."""
    (tmp_path / "me.pt").write_bytes(b"PK\3\4 no speaker")
    settings = Settings(max_streams=1, voices=tmp_path)
    speech = LocalService(str(checkpoint()), "cpu", settings=settings, speakers=read_speakers([tmp_path / "me.pt"]))
    with pytest.raises(ValueError, match="me.pt is not a speaker file: make one"):
        speech.load()
    speech.close()


# ---- Answers


class Panic(BaseException):
    """Like pyo3_runtime.PanicException, which is not an Exception."""


@pytest.mark.parametrize(
    "function, status",
    [
        ("serving.engine_host.cut_by_estimate", 500),
        ("serving.engine_host.tokenize", 500),
        ("prompts.build.talker_arguments", 500),
        ("serving.engine_host.clone_prompt", 500),
        ("serving.engine_host.to_int16", 503),  # in the delivery thread: the worker is replaced
    ],
)
def test_a_panic_is_answered(server, speech, wav, monkeypatch, function, status):
    """`except Exception` does not catch panics of Rust libraries: the call was not answered, and its place never
    freed."""

    def panic(*_, **__):
        raise Panic("end byte index 10 is not a char boundary")

    worker = speech.models[1].engine.process
    with monkeypatch.context() as patch:
        patch.setattr(f"qwen3_tts_cuda_graphs.{function}", panic)
        if function.endswith("clone_prompt"):
            answer = server.register("me", wav)
        else:
            model = speech.models[status == 503].id
            answer = server.speak(model=model, input="One two. " * 50, max_new_tokens=6 if status == 503 else None)
        assert answer.status == status and "char boundary" not in answer.error["message"]
    if status == 503:  # its engine has ended, which the server learns a moment after the answer
        wait_until(lambda: speech.models[1].engine.process is not worker)
    wait_until(lambda: server.ask("GET", "/health").status == 200)
    wait_until_free(speech)
    speech.models[1].engine.deaths = 0  # others follow


def test_the_voices_in_use_take_a_limited_memory(server, speech, wav, monkeypatch):
    assert server.register("one", wav, ref_text="what it says").status == 200
    size = sum(map(engine_host.voice_bytes, speech.host.prompts.values()))
    monkeypatch.setattr(engine_host, "MAX_VOICE_BYTES", 3 * size // 2)
    refused = server.register("two", wav, ref_text="what it says")
    assert (refused.status, refused.error["code"]) == (503, "out_of_memory") and "remove some" in refused.body.decode()
    assert server.speak(voice="one").status == 200 and len(speech.host.prompts) == 1
    assert server.forget("one") == 200
    with server.registered("two", wav, ref_text="what it says"):
        pass


def test_a_silent_worker_is_doubted_first(server, speech):
    """It may just be slow: new requests get 503, and its listeners keep their streams."""
    workers, engine = [model.engine.process for model in speech.models], speech.models[1].engine
    timeouts, engine.timeouts = engine.timeouts, Timeouts(silence_in_doubt=-1.0)
    for answer in (server.ask("GET", "/health"), server.speak(model=speech.models[1].id)):
        assert (answer.status, answer.error["code"]) == (503, "silent") and "no sign of life" in answer.error["message"]
    assert server.ask("GET", "/livez").status == 200
    engine.timeouts = timeouts
    assert server.ask("GET", "/health").status == 200
    assert [model.engine.process for model in speech.models] == workers


# ---- Listeners


def test_a_slow_listener_does_not_stop_others(speech):
    """Only its own stream pauses. The audio that it reads later is complete."""

    async def main():
        slow = aiter(Answer(speech, SpeechOptions(max_new_tokens=49, seed=1), [Part("Hello there.")]))
        chunks = [await anext(slow)]
        while not any(stream.unread >= 4 for stream in speech.engine.active):
            await asyncio.sleep(0.01)
        (stream,) = speech.engine.active
        delivered = stream.delivered
        others = [chunk async for chunk in Answer(speech, SpeechOptions(**SHORT), [Part("Hello there.")])]
        assert sum(len(samples) for samples, _ in others) == 5 * FRAME // 2
        assert stream.delivered == delivered < 40  # it was paused meanwhile
        chunks += [chunk async for chunk in slow]
        assert {samples.dtype for samples, _ in chunks} == {np.dtype("<i2")}
        assert sum(len(samples) for samples, _ in chunks) == 48 * FRAME // 2

    speech.submit(main()).result(LIMIT)
    wait_until_free(speech)


@pytest.mark.parametrize("seconds, receipts", [(0.0, [1] * 16), (LIMIT, [8, 8])])
def test_a_listener_who_reads_slowly_is_heard_of(seconds, receipts):
    """Only every eighth chunk was acknowledged, at a quarter of the speed every 20 s: "nobody has read it for 10 s"."""
    told = []
    timeouts = Timeouts(receipt_interval=seconds)
    connection = SimpleNamespace(send=lambda payload, op, id, chunks: told.append(chunks), timeouts=timeouts)

    async def read():
        call = Call(connection, 0)
        for _ in range(16):
            call.put(({"type": "audio"}, b""))
            await call.receive()

    asyncio.run(read())
    assert told == receipts


def test_a_folder_of_voices_that_hangs_stops_nobody(server, speech, wav, monkeypatch):
    """A slow network disk blocked every listener. Known voices are found without it."""
    may_go_on = threading.Event()
    with server.registered("mine", wav), ThreadPoolExecutor(1) as thread, monkeypatch.context() as patch:
        patch.setattr(type(speech.cloned_voices.folder), "voices", property(lambda _: may_go_on.wait(LIMIT) and {}))
        waiting = thread.submit(server.speak, voice="somebody")
        for known in ("speaker", "Vivian", " MINE ", "alloy", None):
            assert server.speak(voice=known).status == 200
        assert server.ask("GET", "/health").status == 200 and not waiting.done()
        may_go_on.set()
        assert waiting.result(LIMIT).error["code"] == "unknown_voice"
        patch.undo()


# ---- Several models


def test_the_request_chooses_its_model(server, speech):
    base, custom = (model.id for model in speech.models)
    listed = server.ask("GET", "/v1/models").json["data"]
    assert [(model["id"], model["kind"]) for model in listed] == [(base, "base"), (custom, "custom_voice")]
    assert listed[0]["voices"] == ["speaker"] and "vivian" in listed[1]["voices"]
    assert server.ask("GET", f"/v1/models/{custom}").json == listed[1]

    speak = partial(server.pcm, max_new_tokens=3)
    cloned, preset = speak(model=base), speak(model=custom)
    assert cloned != preset
    assert speak() == speak(model="tts-1") == speak(voice="speaker") == cloned  # the first model that supports it
    assert speak(model=custom.upper()) == preset
    assert speak(voice="vivian") == speak(voice="vivian", model=custom)  # only the second has this voice
    assert speak(model="tts-1", instructions="whisper") == speak(model=custom, instructions="whisper")
    assert "there is no voice 'vivian'" in server.speak(model=base, voice="vivian").error["message"]
    with server.talk({"model": custom, "response_format": "pcm", "seed": 1, "max_new_tokens": 3}) as session:
        _, audio = session.say("Hello there.")
    assert audio == speak(model=custom, non_streaming_mode=False)  # as for arriving text
    assert server.speak(model="tts-1", voice="nobody").error["code"] == "unknown_voice"
    unknown = server.speak(model="tts-1", voice="vivia").error
    assert unknown["code"] == "unknown_voice" and "choose vivian" in unknown["message"]


@pytest.mark.parametrize("voice, order, chosen", [("speaker", -1, "base"), ("vivian", 1, "small"), ("nova", 1, "base")])
def test_instructions_that_no_model_with_the_voice_can_use(checkpoint, tmp_path, voice, order, chosen):
    """The voice was then looked up in the first model, which has others: 400."""
    small = shutil.copytree(checkpoint("custom_voice"), tmp_path / "small", copy_function=os.symlink)
    config = json.loads((small / "config.json").read_text()) | {"tts_model_size": "0b6"}  # it does not use instructions
    (small / "config.json").unlink()
    (small / "config.json").write_text(json.dumps(config))
    folders = [f"base={checkpoint()}", f"small={small}"][::order]
    speakers = read_speakers([checkpoint() / "speaker.pt"])
    speech = Service(folders, "cpu", settings=Settings(voices=tmp_path), speakers=speakers)
    options = SpeechOptions(voice=voice, instructions="Speak calmly.")
    asyncio.run(speech.check(options))
    assert speech.ignored(options) == ("instructions",)
    model = speech.model_for(options)
    assert model.id == chosen and model.resolve_voice(voice)


def test_a_registered_voice_is_the_one_that_is_heard(server, speech, wav):
    """A preset of another model had the same name, or was used for it."""
    assert "there is a voice vivian already" in server.register("vivian", wav).error["message"]
    speak = partial(server.pcm, max_new_tokens=3)
    with server.registered("alloy", wav), contextlib.ExitStack() as stack:
        stack.callback(speech.models.reverse)
        speech.models.reverse()  # the one with presets is the first
        clone, preset = (speak(voice="alloy", model=model.id) for model in speech.models[::-1])
        assert speak(voice="alloy") == speak() == clone != preset
        assert speak(voice="nova") == speak(voice="nova", model=speech.models[0].id) != clone


@pytest.mark.parametrize("reason", ["SIGTERM", "CUDA"])
def test_one_model_fails_and_the_others_speak(server, speech, reason):
    """After a CUDA error no later call in the process succeeds."""
    base, custom = (model.id for model in speech.models)
    engine = speech.models[1].engine

    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if reason == "SIGTERM":
        engine.process.worker.drain()
    else:
        engine.process.worker.host.engine.intake.submit = fail  # of this worker, which is then replaced
        assert server.speak(model=custom).error["code"] == "restarting"
    wait_until(lambda: not engine.is_ready)
    assert server.speak(model=base).status == 200
    refused = server.speak(model=custom)
    assert (refused.status, refused.error["code"]) == (503, "restarting")
    assert server.ask("GET", "/health").error["message"].startswith(f"{custom}: the engine has failed")
    wait_until(lambda: server.ask("GET", "/health").status == 200)
    assert server.speak(model=custom).status == 200


@pytest.mark.parametrize(
    "given, listed",
    [
        ("{0}/a/epoch-2 {0}/b/epoch-2", "a-epoch-2 b-epoch-2"),
        ("{0}/a/out/epoch-2 {0}/b/out/epoch-2", "a-out-epoch-2 b-out-epoch-2"),
        ("{0}/a/epoch-2 {0}/b/other", "epoch-2 other"),
        ("anna={0}/a/epoch-2 {0}/b/epoch-2", "anna epoch-2"),
        ("{0}/a/epoch-2 epoch-2={0}/b/epoch-2", "a-epoch-2 epoch-2"),
        ("{0}/lr=1/epoch-2 {0}/lr=2/epoch-2", "lr=1-epoch-2 lr=2-epoch-2"),
        ("x={0}/a/epoch-2 y={0}/a/epoch-2", "x y"),
        ("{0}/a/epoch-2 {0}/a/epoch-2", None),
        ("x={0}/a/epoch-2 x={0}/b/epoch-2", None),
    ],
)
def test_names_of_models(given, listed, checkpoint, tmp_path):
    """Upstream's finetuning gives its folders the same names, so they could not be served together."""
    given = given.format(tmp_path).split()
    for folder in {model.rpartition(f"={tmp_path}")[2].removeprefix(str(tmp_path)) for model in given}:
        (tmp_path / folder.strip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder.strip("/")).symlink_to(checkpoint())
    settings = Settings(voices=tmp_path)
    if listed is None:
        with pytest.raises(ValueError, match="two models would have the name .* --model another-name=folder"):
            Service(given, settings=settings)
        return
    speech = Service(given, settings=settings)
    names = [model.describe()["id"] for model in speech.models]
    assert names == listed.split()
    assert [speech.models_named(SpeechOptions(model=name))[0] for name in names] == speech.models


# ---- Memory


def test_how_many_rows_fit():
    """A row of 0.6B takes 0.2276 GiB on an H200, one of 1.7B 0.2316 (results/h200_streams.json)."""
    talker = dict(num_hidden_layers=28, num_key_value_heads=8, head_dim=128, hidden_size=1024, num_code_groups=16)
    keys_and_values = 28 * 2 * 8 * 128 * 2 * 2048
    per_row = memory.bytes_per_row(talker, 2048, 2)
    assert per_row == keys_and_values + 2048 * (2 * 1024 + 8 * 16) + memory.OTHER_BYTES_PER_ROW
    for hidden_size, measured in ((1024, 0.2276), (2048, 0.2316)):
        estimated = memory.bytes_per_row(talker | {"hidden_size": hidden_size}, 2048, 2) / memory.GIB
        assert measured < estimated < 1.03 * measured
    heads = dict(head_dim=None, num_attention_heads=8)
    assert memory.bytes_per_row(talker | heads, 2048, 2) == per_row
    assert memory.rows_that_fit(130 * memory.GIB, per_row) == 64
    assert 20 <= memory.rows_that_fit(8 * memory.GIB, per_row) <= 8 * memory.GIB // per_row
    assert memory.rows_that_fit(16 * memory.GIB, per_row, models=2) == memory.rows_that_fit(8 * memory.GIB, per_row)
    with pytest.raises(ValueError, match=r"the GPU has 1.0 GiB free with the weights loaded, 0.8 GiB too little"):
        memory.rows_that_fit(memory.GIB, per_row)
