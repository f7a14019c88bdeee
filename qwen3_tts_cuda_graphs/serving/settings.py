"""The server's limits and their defaults. All but `only_this_machine` are options of `qwen3-tts serve`."""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from qwen3_tts_cuda_graphs.prompts.cut import MAX_SEQ_LEN

API_KEY_VARIABLE = "QWEN3_TTS_API_KEY"
MB = 1_000_000
MAX_PENDING = 2048  # connections in the kernel's queue that the server has not accepted yet
MAX_REFERENCE_SECONDS = 600  # at 96 kHz such a recording still fits into a message to the worker


def limit(default, help_text: str):
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Settings:
    # Access
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()  # origins of web pages on other hosts that may call this server
    only_this_machine: bool = False  # refuse requests whose Host header names another machine
    hosts: tuple[str, ...] = ()  # if not empty, only these Host headers and localhost are allowed; in lower case
    open_lists: bool = False  # the lists of voices and models need no key

    voices: Path = Path("voices")  # folder of the registered voices
    lexicon: Path | None = None  # file with pronunciations
    exit_when_failed: bool = False  # end the server when an engine has been given up

    # At the same time
    max_streams: int | None = limit(None, "listeners of a model at the same time, at most 64 by default")
    max_waiting: int = limit(256, "requests that may wait for a place; more get 429")
    max_connections: int = limit(1024, "connections at the same time; more get 503")
    encoders: int | None = limit(None, "processes that encode mp3, opus, aac and flac, by default 3 for 4 cores")
    max_seq_len: int = limit(MAX_SEQ_LEN, "positions for prompt and speech of one request, 12.5 per second")

    # Per request
    max_text: int = limit(4096, "characters of a text, a transcript or an instruction")
    max_body: int = limit(16 * MB, "bytes of a request")
    max_held: int = limit(256 * MB, "bytes of all requests in progress, and of whole files on their way; more get 503")
    max_upload: int = limit(10 * MB, "bytes of a recording")
    max_reference_seconds: float = limit(60.0, "seconds of a recording")
    max_voices: int = limit(256, "registered voices")

    # Times
    body_seconds: float = limit(30.0, "seconds to receive a request")
    request_seconds: float = limit(600.0, "seconds to answer a request, including the time in the queue")
    keep_alive_seconds: float = limit(120.0, "seconds that a connection stays open between two requests")
    send_seconds: float = limit(60.0, "seconds that a client may leave its audio unread")
    config_seconds: float = limit(10.0, "seconds to the first message of a WebSocket")
    idle_seconds: float = limit(30.0, "seconds that a WebSocket may stay without a message")
    drain_seconds: float = limit(60.0, "seconds for streams in flight to end after SIGTERM")

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if "help" in item.metadata and value is not None and not 0 < value < math.inf:
                option = "--" + item.name.replace("_", "-")
                raise ValueError(f"{option} is {value}, it must be above 0")
        if self.max_reference_seconds > MAX_REFERENCE_SECONDS:
            raise ValueError(f"--max-reference-seconds is above {MAX_REFERENCE_SECONDS}: give less")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError(f"--api-key or ${API_KEY_VARIABLE} is empty: give a key, or leave it out")


LIMITS = [item for item in fields(Settings) if "help" in item.metadata]


def check_origin(origin: str) -> str:
    """The origin as browsers send it, or *."""
    wanted = origin.strip().lower().removesuffix("/")
    if wanted != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", wanted):
        raise ValueError(
            f"--cors-origin is {origin!r}, it must be like https://example.com or http://localhost:3000, or *"
        )
    return wanted


def check_host(name: str) -> str:
    """The name of a host, without a port, as in a Host header."""
    wanted = name.strip().lower()
    if not re.fullmatch(r"[a-z0-9._-]+", wanted):
        raise ValueError(f"--allow-host is {name!r}, it must be a name like host.docker.internal, without a port")
    return wanted
