"""uvicorn's server with workers: starts them, prints a greeting, and drains before it stops."""

import argparse
import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette

from qwen3_tts_cuda_graphs.serving.connections import HttpConnection, WebSocketConnection
from qwen3_tts_cuda_graphs.serving.errors import log, log_to_stderr
from qwen3_tts_cuda_graphs.serving.routes import create_app
from qwen3_tts_cuda_graphs.serving.service import Service, read_speakers
from qwen3_tts_cuda_graphs.serving.settings import MAX_PENDING, Settings
from qwen3_tts_cuda_graphs.serving.spare_worker import Spare

# A full garbage collection takes 0.1 s with 1,000 WebSockets, so Python's automatic one is disabled. `on_tick` runs one
# after this many collections of the second generation.
COLLECTIONS = 10
COLLECTIONS_WHILE_SPEAKING = 1000
NEVER = 2**30

ACCEPTS = 16  # connections accepted in one turn of the event loop
SECONDS_BETWEEN_WARNINGS = 60.0  # about missing file descriptors
SECONDS_TO_CLOSE = 5  # for open connections when the server ends


def serve(args: argparse.Namespace, settings: Settings, listening: socket.socket, spare: Spare) -> None:
    """Serve until a signal arrives. args: the options of server_options.py"""
    log_to_stderr()
    service = Service(args.model, args.device, args.dtype, settings, read_speakers(args.speaker), spare=spare)
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # for a wildcard, an address that clients can use
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"listening on {address}, loading {', '.join(args.model)}", flush=True)
    server = Server(service, address)
    server.run(sockets=[listening])
    if server.failure:
        raise server.failure


class Server(uvicorn.Server):
    """SIGTERM drains first: new requests get 503 until the streams in flight have ended."""

    def __init__(self, service: Service, address: str | None = None):
        """address: for the greeting. Without it, the caller starts and closes the service."""
        super().__init__(uvicorn_config(create_app(service), service.settings))
        self.service = service
        self.address = address
        self.starting = None  # the task that starts the service
        self.failure = None  # to raise at the end: why a model could not be loaded, or an exit status
        self.drain_until = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        for listening in sockets or ():
            listening.listen(MAX_PENDING)  # asyncio has set it to ACCEPTS
        if self.address:
            self.starting = asyncio.create_task(self.start())

    async def start(self) -> None:
        """Start the service in a task, so that /health answers meanwhile."""
        try:
            await self.service.start()
        except Exception as error:
            self.failure = error
            self.should_exit = True
        else:
            gc.freeze()  # exclude all modules and other lasting objects from collections
            gc.set_threshold(*gc.get_threshold()[:2], NEVER)  # on_tick collects
            print(greeting(self.service, self.address), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.starting:
            self.starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.starting
            await self.service.close()

    def handle_exit(self, sig: int, frame) -> None:
        if self.service.is_draining or sig == signal.SIGINT:
            self.should_exit = True  # the second signal, or Ctrl-C
            return
        self.drain()

    def drain(self) -> None:
        self.service.is_draining = True
        self.drain_until = time.monotonic() + self.service.settings.drain_seconds
        for model in self.service.models:
            model.engine.speak_to_the_end()
        streams = self.service.in_flight
        until = f" when {streams} streams have ended" if streams else ""
        with contextlib.suppress(OSError):  # from a signal handler it would be raised anywhere in the event loop
            print(f"shutting down{until}", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self.service.settings.exit_when_failed and not self.drain_until and self.service.has_given_up:
            self.failure = SystemExit(1)  # the log says why
            self.drain()
        is_done = not self.service.in_flight and not self.service.responses
        if self.drain_until and (is_done or time.monotonic() > self.drain_until):
            self.should_exit = True
        if gc.get_count()[2] > (COLLECTIONS_WHILE_SPEAKING if self.service.in_flight else COLLECTIONS):
            gc.collect()
        return await super().on_tick(counter)


def uvicorn_config(app: Starlette, settings: Settings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws=WebSocketConnection,
        ws_max_size=settings.max_body,
        ws_per_message_deflate=False,  # audio does not compress
        backlog=ACCEPTS,
        timeout_keep_alive=settings.keep_alive_seconds,
        ws_ping_timeout=None,  # a pong may wait behind unread audio, for which there is another limit
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        log_level="warning",
        use_colors=False,  # by default it inspects stdout, which may be closed
        server_header=False,
        proxy_headers=False,  # the client's address is not used
    )
    config.settings = settings
    config.unfinished = 0  # bytes of unfinished messages of all WebSockets
    logging.getLogger("uvicorn.error").addFilter(is_no_client_mistake)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns about each form that it cannot parse
    return config


def is_no_client_mistake(record: logging.LogRecord) -> bool:
    """False for uvicorn's messages about WebSockets that were refused over HTTP, and requests that cannot be parsed."""
    return record.msg not in (
        "ASGI callable returned without completing handshake.",
        "Invalid HTTP request received.",
        "Invalid UTF-8 sequence received from client.",
        "Unsupported upgrade request.",
    )


class AcceptErrors:
    """The event loop's exception handler. When file descriptors run out, asyncio retries each second and logs each
    failure: here they are logged once a minute."""

    warned = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - self.warned > SECONDS_BETWEEN_WARNINGS:
            self.warned = loop.time()
            log.warning("new connections wait: %s: raise ulimit -n, or lower --max-connections", context["exception"])


def greeting(service: Service, address: str) -> str:
    """The models, the voices, and a command to try."""
    voices = service.voice_names()
    key = ' -H "Authorization: Bearer KEY"' if service.settings.api_key else ""
    instead = ", with your API key instead of KEY" if key else ""
    lines = [
        f"ready: {model.source} on {model.engine.device}, up to {model.engine.rows} listeners at once"
        for model in service.models
    ]
    if voices:
        lines.append(f"voices: {', '.join(voices)}")
        voice = voices[0]
    else:
        lines.append(f"voices: none yet. Register one from a recording{instead}:")
        lines.append(f"  curl{key} -F name=me -F audio_sample=@voice.wav {address}/v1/audio/voices")
        voice = "me"
    request = f'{{"input": "Hello!", "voice": "{voice}", "response_format": "wav"}}'
    header = '-H "Content-Type: application/json"'
    lines.append(f"try it{instead}:\n  curl{key} {header} -d '{request}' -o hello.wav {address}/v1/audio/speech")
    lines.append(f"or listen in a browser: {address}/")
    return "\n".join(lines)
