"""The server as a process: loads the model in a thread, says what it has, and drains when it is told to stop."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time

import torch
import uvicorn

from common.loading import model_errors
from serving.connections import uvicorn_config
from serving.server import create_app
from serving.settings import Settings
from serving.speech import Speech, load_speakers


def serve(args: argparse.Namespace, settings: Settings, listening: socket.socket) -> None:
    """Serve until a signal comes. `args` are the options of serving/__main__.py."""
    with model_errors():
        log_to_stderr()
        dtype = args.dtype and getattr(torch, args.dtype)
        speakers = load_speakers(args.speaker, args.model)
        speech = Speech(args.model, args.device, dtype, settings, speakers)
        host, port = listening.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # those cannot be asked
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"listening on {address}, loading {args.model}", flush=True)

        server = Server(speech)
        loading = threading.Thread(target=server.load, args=[address], name="load", daemon=True)
        loading.start()
        try:
            server.run(sockets=[listening])
        finally:
            speech.close()
        if server.failure:
            raise server.failure
        if loading.is_alive():  # stopped while loading: the thread is in torch, and Python cannot end it
            os._exit(0)


def log_to_stderr() -> None:
    """Warnings and errors with their tracebacks, beside the progress that cli_errors shows."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("qwen3_tts_cudagraphs").addHandler(handler)


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM first drains: new requests get 503 until the streams in flight have ended."""

    def __init__(self, speech: Speech):
        super().__init__(uvicorn_config(create_app(speech), speech.settings))
        self.speech = speech
        self.failure = None  # why the model could not be loaded
        self.drain_until = None

    def load(self, address: str) -> None:
        """In a thread, so that /health can be asked meanwhile."""
        try:
            self.speech.load()
        except BaseException as error:
            self.failure = error
            self.should_exit = True
        else:
            gc.freeze()  # all that is loaded stays; looking through it would stop the speech for a tenth of a second
            print(greeting(self.speech, address), flush=True)

    def handle_exit(self, sig: int, frame) -> None:
        if self.speech.is_draining or sig == signal.SIGINT:
            self.should_exit = True  # the second signal, or Ctrl-C
            return
        self.speech.is_draining = True
        self.drain_until = time.monotonic() + self.speech.settings.drain_seconds
        print(f"shutting down when {self.speech.in_flight} streams have ended", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self.drain_until and (not self.speech.in_flight or time.monotonic() > self.drain_until):
            self.should_exit = True
        return await super().on_tick(counter)


def greeting(speech: Speech, address: str) -> str:
    """What there is, and a line to try it with."""
    voices = speech.voice_names()
    key = ' -H "Authorization: Bearer KEY"' if speech.settings.api_key else ""
    instead = ", with your API key instead of KEY" if key else ""
    lines = [f"ready: {speech.model} on {speech.device}, up to {speech.settings.max_streams} listeners at once"]
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
    return "\n".join(lines)
