"""A real server in this process, and a plain client."""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import secrets
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import uvicorn

from qwen3_tts_cuda_graphs.serving.connections import uvicorn_config
from qwen3_tts_cuda_graphs.serving.server import create_app
from qwen3_tts_cuda_graphs.serving.service import Service, read_speakers
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.worker import Worker

LIMIT = 120  # seconds that any wait may take
SHORT = {"max_new_tokens": 6, "seed": 1}  # five frames
FRAME = 1920 * 2  # bytes of PCM


class ThreadWorker:
    """A worker in a thread of this process, over the same socket. EngineProcess takes it for a process."""

    pid = None

    def __init__(self, theirs: socket.socket):
        self.worker = Worker(theirs.dup())
        self.thread = threading.Thread(target=self.run, name="worker", daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.worker.run()
        if self.worker.host:
            self.worker.host.close()

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("worker", timeout)
        return int(bool(self.worker.why))

    def kill(self) -> None:
        self.worker.stop("killed")


class LocalService(Service):
    """Speech whose workers are threads of this process, and whose event loop runs in another one."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options, spawn=ThreadWorker)
        self.encoders.count = 0  # most tests need no processes for that: threads encode

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        self.loop_thread = threading.Thread(target=loop.run_forever, name="event loop", daemon=True)
        self.loop_thread.start()
        return loop

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def load(self) -> None:
        self.submit(self.start()).result(LIMIT)

    def close(self) -> None:
        self.submit(super().close()).result(LIMIT)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.loop_thread.join(LIMIT)
        self.loop.close()

    @property
    def host(self):
        """The engine's side of the first model."""
        return self.models[0].engine.process.worker.host

    @property
    def engine(self):
        return self.host.engine

    @property
    def tts(self):
        return self.host.tts


class RunningServer:
    """`with RunningServer(speech) as server`: serves on a free port of this machine, in the loop of the speech."""

    def __init__(self, speech: Service, below: str = "", **settings):
        """below: a path, as of a proxy that passes on what is asked for below it"""
        self.speech = speech
        self.below = below
        self.before = speech.settings
        self.settings = dataclasses.replace(speech.settings, **settings)

    def __enter__(self) -> "RunningServer":
        self.speech.settings = self.settings
        self.app = create_app(self.speech)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        app = strip_path(self.app, self.below) if self.below else self.app
        self.server = uvicorn.Server(uvicorn_config(app, self.settings))
        self.serving = self.speech.submit(self.server.serve(sockets=[self.socket]))
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *error) -> None:
        self.server.should_exit = True
        self.serving.result(LIMIT)
        self.speech.settings = self.before

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def ask(self, method: str, path: str, body=None, headers=()) -> "Answer":
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, dict(headers))
            return Answer(connection.getresponse())

    def speak(self, headers=(), **fields) -> "Answer":
        body = json.dumps({"input": "Hello there.", **SHORT, **fields})
        return self.ask("POST", "/v1/audio/speech", body, {"Content-Type": "application/json", **dict(headers)})

    def register(self, name: str, audio: bytes, **fields) -> "Answer":
        boundary = secrets.token_hex(8)
        parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="name"\r\n\r\n{name}\r\n'.encode()]
        for field, value in fields.items():
            parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode())
        disposition = 'form-data; name="audio_sample"; filename="voice.wav"'
        parts.append(f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + audio)
        body = b"".join(parts) + f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self.ask("POST", "/v1/audio/voices", body, headers)

    @property
    def websocket_address(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/audio/speech/stream"


def strip_path(app, below: str):
    """What a proxy that serves the application below a path lets through."""

    async def proxy(scope, receive, send):
        path, inner = scope.get("path"), dict(scope)
        if path is not None:
            is_ours = path == below or path.startswith(f"{below}/")
            inner["path"] = (path.removeprefix(below) or "/") if is_ours else "/not_ours"
            inner["raw_path"] = inner["path"].encode()
        await app(inner, receive, send)

    return proxy


class Answer:
    """A response, read to its end."""

    def __init__(self, response: http.client.HTTPResponse):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]


def wait_until(condition) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Zombies, whose new parent has not reaped them yet, are not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_free(speech: Service) -> None:
    """Every place must become free again."""
    wait_until(lambda: speech.in_flight == 0 and speech.engine.counts() == (0, 0))


def load_speech(folder: Path, voices: Path, speakers: dict | None = None, **settings) -> LocalService:
    """A loaded tiny model; a Base model has the voice "speaker", or those of `speakers`."""
    is_base = json.loads((folder / "config.json").read_text())["tts_model_type"] == "base"
    speakers = speakers or read_speakers([folder / "speaker.pt"] if is_base else [])
    limits = dict(max_streams=2, max_waiting=2, max_seq_len=512, voices=voices) | settings
    speech = LocalService(str(folder), "cpu", settings=Settings(**limits), speakers=speakers)
    speech.load()
    return speech


def never_end(speech: Service) -> None:
    """The tiny models choose their end token after a while. Long speech needs them not to."""
    talker = speech.tts.model.talker
    talker.codec_head.weight.data[talker.config.codec_eos_token_id] = 0


def pcm(audio: bytes) -> np.ndarray:
    return np.frombuffer(audio, "<i2").astype(np.float32) / 32767


def post(url: str, **fields) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/audio/speech", json.dumps({"input": "Hi.", **fields}).encode(), headers)


def status(request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def worker_of(pid: int) -> int:
    """The process of its model; others encode."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    (worker,) = [int(line.split()[0]) for line in found.splitlines() if ".serving.worker" in line]
    return worker
