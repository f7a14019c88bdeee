"""The command line of the server.

python -m serving --model 0.6B --port 8000
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import torch

from cli.checkpoints import MODELS
from cli.loading import model_errors
from cli.scripts import Parser, cli_errors
from serving.settings import API_KEY_VARIABLE, Settings

try:
    import uvicorn

    from serving.connections import uvicorn_config
    from serving.server import create_app
    from serving.speech import Speech, load_speakers
except ImportError as error:
    print(f"error: the server needs {error.name}, which is not installed: run ./setup.sh --server", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    with cli_errors(), model_errors():
        log_to_stderr()
        args = parse_arguments()
        settings = make_settings(args)
        dtype = args.dtype and getattr(torch, args.dtype)
        speakers = load_speakers(args.speaker, args.model)
        speech = Speech(args.model, args.device, dtype, settings, speakers)
        listening = listen(args.host, args.port)
        host, port = listening.getsockname()[:2]
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


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="python -m serving", description="Serve speech over HTTP and WebSocket.")
    parser.add_argument("--model", default="0.6B", help=", ".join(MODELS) + ", a hub id or a folder")
    parser.add_argument("--device", help="cuda, cuda:1, cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in: set --api-key, too")
    parser.add_argument("--port", default=8000, type=int, help="0 takes a free one")
    parser.add_argument("--api-key", help=f"guards every route but /health; default: ${API_KEY_VARIABLE}")
    parser.add_argument(
        "--cors-origin", action="append", default=[], help="web pages of this origin may call the server, or *"
    )
    parser.add_argument("--voices", type=Path, default=Settings.voices, help="folder of the registered voices")
    parser.add_argument(
        "--speaker", type=Path, action="append", default=[], help="a speaker.pt; its voice has the file's name"
    )
    limits = parser.add_argument_group("limits")
    for item in fields(Settings):
        if "help" in item.metadata:
            option = "--" + item.name.replace("_", "-")
            help_text = f"{item.metadata['help']} ({item.default:g})"
            limits.add_argument(option, type=type(item.default), default=item.default, help=help_text)
    args = parser.parse_args()
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port is {args.port}, it must be from 0 to 65535")
    return args


def make_settings(args: argparse.Namespace) -> Settings:
    limits = {item.name: getattr(args, item.name) for item in fields(Settings) if "help" in item.metadata}
    api_key = args.api_key or os.environ.get(API_KEY_VARIABLE) or None
    return Settings(api_key, tuple(args.cors_origin), args.voices, **limits)


def listen(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded. Connections wait until the server runs."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named: asyncio sets TCP_NODELAY only then. Else the first audio may wait 40 ms for an ACK.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}: choose another --host or --port") from None
    return listening


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
    key = ' -H "Authorization: Bearer $' + API_KEY_VARIABLE + '"' if speech.settings.api_key else ""
    lines = [f"ready: {speech.model} on {speech.device}, up to {speech.settings.max_streams} listeners at once"]
    if voices:
        lines.append(f"voices: {', '.join(voices)}")
        voice = voices[0]
    else:
        lines.append("voices: none yet. Register one from a recording:")
        lines.append(f"  curl{key} -F name=me -F audio_sample=@voice.wav {address}/v1/audio/voices")
        voice = "me"
    request = f'{{"input": "Hello!", "voice": "{voice}"}}'
    header = '-H "Content-Type: application/json"'
    lines.append(f"try it:\n  curl{key} {header} -d '{request}' -o hello.wav {address}/v1/audio/speech")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
