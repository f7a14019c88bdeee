"""A real server in this process, and plain clients for HTTP and for the WebSocket."""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import http.client
import json
import secrets
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from websockets.sync.client import connect

from qwen3_tts_cuda_graphs.serving.routes import create_app
from qwen3_tts_cuda_graphs.serving.server import Server, uvicorn_config
from qwen3_tts_cuda_graphs.serving.service import Service, read_speakers
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.worker import Worker
from qwen3_tts_cuda_graphs.serving.worker_connection import Timeouts

JSON = {"Content-Type": "application/json"}
LIMIT = 120  # seconds that any wait may take
SHORT = {"max_new_tokens": 6, "seed": 1}  # five frames
FRAME = 1920 * 2  # bytes of PCM


class ThreadWorker:
    """A worker in a thread of this process, over the same socket. For EngineProcess it looks like a process."""

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
    """A Service whose workers are threads of this process, and whose event loop runs in another thread."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options, spawn=ThreadWorker)
        self.own_settings = self.settings
        self.encoders.count = 0  # most tests need no helper processes: threads encode

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
    def hosts(self) -> list:
        """The EngineHost of each model."""
        return [model.engine.process.worker.host for model in self.models]

    @property
    def host(self):
        return self.hosts[0]

    @property
    def engine(self):
        return self.host.engine

    @property
    def tts(self):
        return self.host.tts


class Client:
    """A client of a server on a port of this machine."""

    def __init__(self, port: int):
        self.port = port

    def open(self, small_buffers: bool = False) -> socket.socket:
        """A connection, to send what no client library sends.

        small_buffers: the kernel buffers little, so that unread data stays in the server
        """
        connection = socket.socket()
        connection.settimeout(LIMIT)
        if small_buffers:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted connections have the same
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    @contextlib.contextmanager
    def asking(self, **fields):
        """A connection on which speech was requested and nothing was read yet."""
        with contextlib.closing(self.connect()) as connection:
            body = json.dumps({"input": "Hello there.", "response_format": "pcm", **SHORT, **fields})
            connection.request("POST", "/v1/audio/speech", body, JSON)
            yield connection

    def unread(self, **fields) -> socket.socket:
        """A client that requests speech and never reads it."""
        connection = self.open(small_buffers=True)
        connection.sendall(request_bytes(fields))
        return connection

    def ask(self, method: str, path: str, body=None, headers=()) -> "Answer":
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, dict(headers))
            return Answer(connection.getresponse())

    def speak(self, headers=(), **fields) -> "Answer":
        body = json.dumps({"input": "Hello there.", **SHORT, **fields})
        return self.ask("POST", "/v1/audio/speech", body, JSON | dict(headers))

    def pcm(self, **fields) -> bytes:
        """The spoken samples."""
        answer = self.speak(**{"response_format": "pcm"} | fields)
        assert answer.status == 200, (fields, answer.body)
        return answer.body

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

    def forget(self, name: str) -> int:
        """Remove a registered voice. Returns the status."""
        return self.ask("DELETE", f"/v1/audio/voices/{name}").status

    @contextlib.contextmanager
    def registered(self, name: str, audio: bytes, **fields):
        """A registered voice within this context."""
        answer = self.register(name, audio, **fields)
        assert answer.status == 200, answer.body
        yield answer
        assert self.forget(name) == 200

    @property
    def websocket_address(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/audio/speech/stream"

    @contextlib.contextmanager
    def talk(self, config: dict | None = None, **options):
        """A session of the WebSocket with this configuration; options: those of `connect`"""
        with connect(self.websocket_address, open_timeout=LIMIT, **options) as websocket:
            session = Talk(websocket)
            if config is not None:
                session.configure(**config)
            yield session


class Talk:
    """A session of the WebSocket."""

    def __init__(self, websocket):
        self.websocket = websocket

    def send(self, kind: str, **fields) -> None:
        self.websocket.send(json.dumps({"type": kind, **fields}))

    def configure(self, **config) -> None:
        self.send("session.config", **config)

    def receive(self) -> dict | bytes:
        """A message as a dict, or audio as bytes. In a message of a context, the audio is decoded."""
        received = self.websocket.recv(timeout=LIMIT)
        if isinstance(received, bytes):
            return received
        message = json.loads(received)
        if message["type"] == "audio.delta":
            message["audio"] = base64.b64decode(message["audio"])
        return message

    def until(self, kind: str, count: int = 1) -> tuple[list[dict], bytes]:
        """All messages until this many of this type have arrived, and the audio between them."""
        messages, audio = [], b""
        while sum(message["type"] == kind for message in messages) < count:
            received = self.receive()
            if isinstance(received, bytes):
                audio += received
            else:
                messages.append(received)
        return messages, audio

    def write(self, *pieces: str, **context) -> None:
        """A whole utterance."""
        for piece in pieces:
            self.send("input.text", text=piece, **context)
        self.send("input.done", **context)

    def say(self, *pieces: str) -> tuple[list[dict], bytes]:
        self.write(*pieces)
        return self.until("session.done")


class RunningServer(Client):
    """`with RunningServer(speech) as server`: serves on a free port of this machine, in the event loop of `speech`."""

    def __init__(self, speech: Service, below: str = "", drains: bool = False, **settings):
        """below: the path below which a proxy serves the application
        drains: on SIGTERM, as the server's process does
        """
        self.speech = speech
        self.below = below
        self.drains = drains
        self.settings = dataclasses.replace(speech.own_settings, **settings)

    def __enter__(self) -> "RunningServer":
        self.speech.settings = self.speech.cloned_voices.settings = self.settings
        self.app = create_app(self.speech)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        app = strip_path(self.app, self.below) if self.below else self.app
        server = uvicorn.Server(uvicorn_config(app, self.settings))
        self.server = Server(self.speech) if self.drains else server
        self.serving = self.speech.submit(self.server.serve(sockets=[self.socket]))
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *error) -> None:
        self.server.should_exit = True
        self.serving.result(LIMIT)
        self.speech.settings = self.speech.cloned_voices.settings = self.speech.own_settings
        self.speech.is_draining = False

    def terminate(self) -> None:
        """Send SIGTERM to a server that drains."""
        self.server.handle_exit(signal.SIGTERM, None)


def strip_path(app, below: str):
    """The application behind a proxy that serves it below a path."""

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


def request_bytes(body=b"", method="POST", path="/v1/audio/speech", version="1.1", length=None, **headers) -> bytes:
    """A request as it is sent. body: bytes, or the fields of a request; headers: with _ for -"""
    if isinstance(body, dict):
        body = json.dumps({"input": "Hello there.", "response_format": "pcm", **SHORT, **body}).encode()
        headers = {"Content-Type": "application/json"} | headers
    headers |= {"Host": "localhost", "Content-Length": len(body) if length is None else length}
    lines = [f"{method} {path} HTTP/{version}", *(f"{name.replace('_', '-')}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def read_answer(connection: socket.socket) -> Answer:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return Answer(response)


def events_of(body: bytes) -> list[dict]:
    """The server-sent events in a body."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def audio_of(events: list[dict]) -> bytes:
    return b"".join(base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta")


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def wait_until(condition) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Zombies that have not been reaped yet do not count."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_free(speech: Service) -> None:
    """Wait until no place is in use."""
    wait_until(lambda: speech.in_flight == 0 and not any(host.listeners for host in speech.hosts))
    wait_until(lambda: speech.engine.counts() == (0, 0))


def load_speech(
    folder: Path | list[Path], voices: Path, speakers: dict | None = None, timeouts: Timeouts | None = None, **settings
) -> LocalService:
    """A loaded tiny model, or several. If the first is a Base model, it has the voice "speaker", or those of
    `speakers`.

    timeouts: those of the first model's engine
    """
    folders = [folder] if isinstance(folder, Path) else folder
    if speakers is None:
        is_base = json.loads((folders[0] / "config.json").read_text())["tts_model_type"] == "base"
        speakers = read_speakers([folders[0] / "speaker.pt"] if is_base else [])
    limits = dict(max_streams=2, max_waiting=2, max_seq_len=512, voices=voices) | settings
    speech = LocalService([*map(str, folders)], "cpu", settings=Settings(**limits), speakers=speakers)
    speech.models[0].engine.timeouts = timeouts or Timeouts()
    speech.load()
    return speech


@contextlib.contextmanager
def serving(folder: Path | list[Path], voices: Path, **options):
    """A separate server with such models; options: those of `load_speech`"""
    with contextlib.closing(load_speech(folder, voices, **options)) as speech, RunningServer(speech) as server:
        yield server


def never_end(speech: Service, model: int = 0) -> None:
    """Make speech endless: the tiny models would choose their end token after a while."""
    talker = speech.hosts[model].tts.model.talker
    talker.codec_head.weight.data[talker.config.codec_eos_token_id] = 0


def pcm(audio: bytes) -> np.ndarray:
    return np.frombuffer(audio, "<i2").astype(np.float32) / 32767


def worker_of(pid: int) -> int:
    """The worker of a server process, not its encoders."""
    found = subprocess.run(["ps", "-wwo", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    (worker,) = [int(line.split()[0]) for line in found.splitlines() if ".serving.worker" in line]
    return worker
