"""Start a server, and stream speech from it over HTTP. Standard library only."""

import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from functools import partial

from qwen3_tts_cuda_graphs.bench.listeners import TEXT, StartStream
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE

BYTES_PER_SECOND = 2 * 24000  # of pcm
TIMEOUT = 120.0  # seconds for an answer of the server, and for its end after SIGTERM
TIMEOUT_TO_SPEAK = 300.0  # seconds for its first audio after the start
SECONDS_BETWEEN_ATTEMPTS = 0.02  # until the first audio


def audio_from(
    url: str, api_key: str | None = None, bytes_per_second: float = BYTES_PER_SECOND, **request
) -> Iterator[tuple[bytes, float]]:
    """Yields the bytes of the answer as they come, each with `bytes_per_second`. Every failure is an OSError."""
    address = urllib.parse.urlsplit(url)
    if not address.hostname:
        raise OSError(f"{url} is no address: give one like http://127.0.0.1:8000")
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname, address.port, timeout=TIMEOUT)
    try:
        connection.request("POST", "/v1/audio/speech", json.dumps(request), headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise OSError(f"{response.status}: {json.load(response)['error']['message']}")
            while piece := response.read1(65536):
                yield piece, bytes_per_second
    except http.client.IncompleteRead:
        raise OSError("the connection was closed in the middle of the audio") from None
    except (http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise OSError(f"{url} does not answer as this project's server does: {error}") from None
    finally:
        connection.close()


def in_format(url: str, api_key: str | None, name: str, request: dict) -> StartStream:
    """Return a function that starts a stream in this format.

    How many bytes make a second is measured with one request, whose number of frames is known.
    """
    start = partial(audio_from, url, api_key, **request | dict(response_format=name))
    if name == "pcm":
        return start
    frames = request["max_new_tokens"] - 1
    return partial(start, bytes_per_second=sum(len(piece) for piece, _ in start()) * FRAME_RATE / frames)


@contextlib.contextmanager
def running_server(*options, environment: dict | None = None) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a server on a free port. Yields its process and its address, while it still loads its model."""
    with tempfile.TemporaryDirectory() as voices:
        program = ["-m", "qwen3_tts_cuda_graphs", "serve", "--port", "0", "--voices", voices, *map(str, options)]
        server = subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, text=True, env=environment)
        try:
            listening = re.match(r"listening on (\S+),", server.stdout.readline())
            if not listening:
                raise ValueError("the server did not start: it says why above")
            yield server, listening[1]
        finally:
            server.terminate()
            server.communicate(timeout=TIMEOUT)


def wait_for_first_audio(server: subprocess.Popen, url: str) -> None:
    """Repeat a request until its first audio comes."""
    deadline = time.monotonic() + TIMEOUT_TO_SPEAK
    while True:
        with contextlib.suppress(OSError):  # the server or its engine is starting
            next(audio_from(url, input=TEXT, response_format="pcm", max_new_tokens=40))
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise ValueError("the server has ended or does not speak: it says why above")
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)
