"""Encodes speech in helper processes: compressed formats, other speeds and other sample rates.

Many listeners need several cores for this, and threads in the server would block its event loop by holding the
interpreter's lock. Run as a module, this is such a helper. Its requests, each with the `id` of a stream:

    add       samples of a part as int16, with the arguments of the Encoder, in case they are the first of the stream
    finish    return the rest of the stream
    drop      forget the stream; has no answer
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator
from functools import partial

import numpy as np

from qwen3_tts_cuda_graphs.serving.audio_formats import COMPRESSED, Encoder, av
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.helper import Helper, HelperEnded, answer_questions, start_helper
from qwen3_tts_cuda_graphs.serving.messages import pack

SECONDS_TO_ENCODE = 30.0
MAX_READY = 8  # unused encoders per helper: each takes megabytes, and every speed needs another one
WARM_UP = "flac", 24000, 1.0, 48000, None  # the kind of a stream that loads all libraries
SECONDS_TO_RETRY = 10.0  # after a helper could not be started


class Encoders:
    """The helpers. A new stream gets the helper with the fewest streams; without helpers, it is encoded in a thread."""

    def __init__(self, count: int | None = None):
        """count: number of processes, by default three for four cores, at most 16"""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = min(max(1, cores * 3 // 4), 16) if count is None else count
        self.helpers = []
        self.starting = 0
        self.start_after = 0.0  # time of the event loop

    def start(self) -> None:
        """Start missing helpers in the background. Call it in the event loop."""
        self.helpers = [helper for helper in self.helpers if not helper.is_over]
        is_allowed = av and asyncio.get_running_loop().time() >= self.start_after
        wanted = self.count if is_allowed else 0
        for _ in range(wanted - len(self.helpers) - self.starting):
            self.starting += 1
            task = asyncio.ensure_future(self.start_one())
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # ignore errors: it is retried

    async def start_one(self) -> None:
        try:
            helper = await start_helper("encoders", SECONDS_TO_ENCODE)
            stream = RemoteStream(helper, WARM_UP)
            await stream.add(np.empty(0, np.int16))
            stream.close()
            self.helpers.append(helper)
        except BaseException:
            self.start_after = asyncio.get_running_loop().time() + SECONDS_TO_RETRY
            raise
        finally:
            self.starting -= 1

    def open(
        self, name: str, rate: int, speed: float, sample_rate: int | None = None, bit_rate: int | None = None
    ) -> "LocalStream | RemoteStream":
        """A stream. The arguments are those of an Encoder."""
        kind = name, rate, speed, sample_rate or rate, bit_rate
        if name not in COMPRESSED and speed == 1 and kind[3] == rate:
            return LocalStream(kind, is_plain=True)
        self.start()
        if not self.helpers:
            return LocalStream(kind)
        return RemoteStream(min(self.helpers, key=lambda helper: helper.streams), kind)

    def close(self) -> None:
        for helper in self.helpers:
            helper.close()


class RemoteStream:
    """One stream, encoded in a helper."""

    ids = itertools.count()

    def __init__(self, helper: Helper, kind: tuple):
        self.helper = helper
        self.kind = kind
        self.id = next(self.ids)
        self.samples = 0  # encoded so far
        helper.streams += 1

    async def add(self, samples: np.ndarray, part: int | None = 0) -> bytes:
        return await self.ask(dict(op="add", kind=self.kind, part=part), samples.tobytes())

    async def finish(self) -> bytes:
        return await self.ask(dict(op="finish"))

    async def ask(self, header: dict, samples: bytes = b"") -> bytes:
        try:
            answer, data = await self.helper.ask(header | {"id": self.id}, samples)
        except HelperEnded:
            raise ApiError("an encoder has ended: ask again", 503, code="encoder_failed") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.samples = answer["samples"]
        return data

    def close(self) -> None:
        self.helper.streams -= 1
        self.helper.tell(dict(op="drop", id=self.id))


class LocalStream:
    """One stream, encoded in the server: plain samples immediately, everything else in a thread."""

    def __init__(self, kind: tuple, is_plain: bool = False):
        self.encoder = Encoder(*kind)
        self.is_plain = is_plain

    @property
    def samples(self) -> int:
        return self.encoder.samples

    async def add(self, samples: np.ndarray, part: int | None = 0) -> bytes:
        return await self.run(self.encoder.add, samples, part)

    async def finish(self) -> bytes:
        return await self.run(self.encoder.finish)

    async def run(self, function, *arguments) -> bytes:
        if self.is_plain:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)

    def close(self) -> None:
        self.encoder = None


# ---- The helper


def answers_to(encoders: dict, ready: dict, header: dict, payload: bytes) -> Iterator[bytes]:
    """encoders: id of a stream -> its Encoder
    ready: kind -> an unused Encoder for the next stream of that kind: creating one would delay the first audio
    """
    stream = header["id"]
    if header["op"] == "drop":
        encoders.pop(stream, None)
        return
    is_new = stream not in encoders
    try:
        if is_new:
            kind = tuple(header["kind"])
            encoders[stream] = ready.pop(kind, None) or Encoder(*kind)
        encoder = encoders[stream]
        is_end = header["op"] == "finish"
        data = encoder.finish() if is_end else encoder.add(np.frombuffer(payload, np.int16), header["part"])
        answer = dict(samples=encoder.samples), data
    except BaseException as error:  # a library in C may raise anything
        answer = dict(error=f"{type(error).__name__}: {error}"), b""
    yield pack(*answer)
    if is_new:
        with contextlib.suppress(Exception):
            ready[kind] = Encoder(*kind)
        if len(ready) > MAX_READY:
            del ready[next(iter(ready))]  # the oldest


if __name__ == "__main__":
    answer_questions(partial(answers_to, {}, {}))
