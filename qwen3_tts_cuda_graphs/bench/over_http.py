"""A server, and a listener of it over HTTP. Needs Python alone."""

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

BYTES_PER_SECOND = 2 * 24000  # of audio as pcm
LIMIT = 120.0  # seconds to wait for an answer of a server, or for its end
LIMIT_TO_SPEAK = 300.0  # seconds until a server speaks
SECONDS_BETWEEN_REQUESTS = 0.02  # while it does not


def audio_from(
    url: str, api_key: str | None = None, bytes_per_second: float = BYTES_PER_SECOND, **request
) -> Iterator[tuple[bytes, float]]:
    """Audio as a server sends it, and how many bytes make a second. Raises OSError for all that can go wrong."""
    address = urllib.parse.urlsplit(url)
    if not address.hostname:
        raise OSError(f"{url} is no address: give one like http://127.0.0.1:8000")
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname, address.port, timeout=LIMIT)
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
    """Listeners who ask for this format. One answer, whose length is known, tells how many bytes make a second."""
    start = partial(audio_from, url, api_key, **request | dict(response_format=name))
    if name == "pcm":
        return start
    frames = request["max_new_tokens"] - 1
    return partial(start, bytes_per_second=sum(len(piece) for piece, _ in start()) * FRAME_RATE / frames)


@contextlib.contextmanager
def running_server(*options, environment: dict | None = None) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server on a free port, and its address. It is still loading its model."""
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
            server.communicate(timeout=LIMIT)


def until_it_speaks(server: subprocess.Popen, url: str) -> None:
    """Ask again and again, until the first audio comes."""
    deadline = time.monotonic() + LIMIT_TO_SPEAK
    while True:
        with contextlib.suppress(OSError):  # it is starting, or its engine is
            next(audio_from(url, input=TEXT, response_format="pcm", max_new_tokens=40))
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise ValueError("the server has ended or does not speak: it says why above")
        time.sleep(SECONDS_BETWEEN_REQUESTS)
