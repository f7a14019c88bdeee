"""The server as a process: starts the workers, says what it has, and drains when it is told to stop."""

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

from qwen3_tts_cuda_graphs.serving.child_process import Spare
from qwen3_tts_cuda_graphs.serving.connections import HttpConnection, WebSocketConnection
from qwen3_tts_cuda_graphs.serving.errors import log, log_to_stderr
from qwen3_tts_cuda_graphs.serving.routes import create_app
from qwen3_tts_cuda_graphs.serving.service import Service, read_speakers
from qwen3_tts_cuda_graphs.serving.settings import MAX_PENDING, Settings

# A full garbage collection takes 0.1 s with 1,000 WebSockets, so Python's own is off. `on_tick` runs one after this
# many collections of younger objects.
COLLECTIONS = 10
COLLECTIONS_WHILE_SPEAKING = 1000
NEVER = 2**30

ACCEPTS = 16  # connections that are taken at once
SECONDS_BETWEEN_WARNINGS = 60.0  # that there are no files left
SECONDS_TO_CLOSE = 5  # for connections to close when the server ends


def serve(args: argparse.Namespace, settings: Settings, listening: socket.socket, spare: Spare) -> None:
    """Serve until a signal comes. `args` are the options of serving/server_options.py."""
    log_to_stderr()
    service = Service(args.model, args.device, args.dtype, settings, read_speakers(args.speaker), spare=spare)
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # wildcards: print an address that a client can use
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"listening on {address}, loading {', '.join(args.model)}", flush=True)
    server = Server(service, address)
    server.run(sockets=[listening])
    if server.failure:
        raise server.failure


class Server(uvicorn.Server):
    """uvicorn with workers. SIGTERM first drains: new requests get 503 until the streams in flight have ended."""

    def __init__(self, service: Service, address: str | None = None):
        """address: for the greeting; without it, `service` has been started and is closed by others"""
        super().__init__(uvicorn_config(create_app(service), service.settings))
        self.service = service
        self.address = address
        self.starting = None  # a task
        self.failure = None  # why a model could not be loaded, or the exit status after an engine was given up
        self.drain_until = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        for listening in sockets or ():
            listening.listen(MAX_PENDING)  # asyncio has made it ACCEPTS
        if self.address:
            self.starting = asyncio.create_task(self.start())

    async def start(self) -> None:
        """Beside the server, so that /health can be asked meanwhile."""
        try:
            await self.service.start()
        except Exception as error:
            self.failure = error
            self.should_exit = True
        else:
            gc.freeze()  # all that is loaded stays
            gc.set_threshold(*gc.get_threshold()[:2], NEVER)  # on_tick does it
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
        with contextlib.suppress(OSError):  # in a signal's handler: it would be raised anywhere in the event loop
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
        ws_ping_timeout=None,  # the answer to a ping waits behind unread audio, and that has a limit of its own
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        log_level="warning",
        use_colors=False,  # else it asks stdout, which may be closed
        server_header=False,
        proxy_headers=False,  # nothing here asks for the client's address
    )
    config.settings = settings
    config.unfinished = 0  # bytes of messages whose end has not arrived, of all WebSockets
    logging.getLogger("uvicorn.error").addFilter(is_no_client_mistake)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of forms that cannot be parsed
    return config


def is_no_client_mistake(record: logging.LogRecord) -> bool:
    """uvicorn logs each WebSocket that is refused with an HTTP response, and each request that cannot be parsed."""
    return record.msg not in (
        "ASGI callable returned without completing handshake.",
        "Invalid HTTP request received.",
        "Invalid UTF-8 sequence received from client.",
        "Unsupported upgrade request.",
    )


class AcceptErrors:
    """The event loop's exception handler. Without files left, asyncio tries again every second, and logs each time."""

    warned = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - self.warned > SECONDS_BETWEEN_WARNINGS:
            self.warned = loop.time()
            log.warning("new connections wait: %s: raise ulimit -n, or lower --max-connections", context["exception"])


def greeting(service: Service, address: str) -> str:
    """What there is, and a line to try it with."""
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
