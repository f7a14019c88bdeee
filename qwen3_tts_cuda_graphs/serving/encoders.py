"""Compressed formats and other tempos are encoded in processes of their own: for many listeners that takes several
cores, and in threads of the server it would keep the interpreter from its event loop. Run as a module with the
descriptor of a socket, this is such a process. Each message of the server is answered with bytes:

    open      the format, rate and speed of a new stream; with its first samples
    add       further samples, as int16
    finish    the rest of the stream is wanted
    drop      nobody listens any more; without an answer
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Iterator

import numpy as np

from qwen3_tts_cuda_graphs.serving.audio_formats import COMPRESSED, Encoder, av, with_length
from qwen3_tts_cuda_graphs.serving.engine_process import start_python
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.messages import Unpacker, pack

SECONDS_TO_ENCODE = 30.0  # a chunk, also behind those of others; and for the start of a process
SECONDS_TO_RETRY = 10.0  # after a process that could not be started


class Encoders:
    """The processes. A new stream goes to the one with the fewest; without any, it is encoded in a thread."""

    def __init__(self, count: int | None = None):
        """count: of processes. Default: three for four cores, at most 16."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = min(max(1, cores * 3 // 4), 16) if count is None else count
        self.processes = []
        self.starting = 0
        self.start_after = 0.0  # time of the event loop
        self.is_closed = False

    def start(self) -> None:
        """In the event loop. They are ready after a moment, which nobody waits for."""
        self.processes = [process for process in self.processes if not process.is_over]
        is_allowed = av and not self.is_closed and asyncio.get_running_loop().time() >= self.start_after
        wanted = self.count if is_allowed else 0
        for _ in range(wanted - len(self.processes) - self.starting):
            self.starting += 1
            task = asyncio.ensure_future(self.start_one())
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is tried again

    async def start_one(self) -> None:
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                popen = start_python(f"{__package__}.encoders", str(theirs.fileno()), pass_fds=[theirs.fileno()])
            _, process = await asyncio.get_running_loop().create_connection(lambda: EncoderProcess(popen), sock=ours)
            await process.encode(dict(op="open", id=next(process.numbers), kind=("flac", 24000, 1.0)), b"")  # warm up
            self.processes.append(process)
        except BaseException:
            self.start_after = asyncio.get_running_loop().time() + SECONDS_TO_RETRY
            raise
        finally:
            self.starting -= 1
        if self.is_closed:
            self.close()

    def open(self, name: str, rate: int, speed: float) -> "LocalStream | RemoteStream":
        if name not in COMPRESSED and speed == 1:
            return LocalStream(name, rate, speed)
        self.start()
        if not self.processes:
            return LocalStream(name, rate, speed)
        return RemoteStream(min(self.processes, key=lambda process: process.streams), name, rate, speed)

    def close(self) -> None:
        self.is_closed = True
        for process in self.processes:
            process.transport.abort()  # it ends by that
        self.processes = []


class EncoderProcess(asyncio.Protocol):
    """The server's end of the socket."""

    def __init__(self, popen):
        self.popen = popen
        self.unpacker = Unpacker()
        self.numbers = itertools.count()
        self.streams = 0
        self.answers = {}  # number of a stream -> future
        self.is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for header, payload in self.unpacker.feed(data):
            answer = self.answers.pop(header["id"], None)
            if answer and not answer.done():
                answer.set_result((header, payload))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        self.popen.kill()
        asyncio.get_running_loop().run_in_executor(None, self.popen.wait)
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(encoder_failed())

    async def encode(self, header: dict, samples: bytes) -> tuple[dict, bytes]:
        if self.is_over:
            raise encoder_failed()
        answer = self.answers[header["id"]] = asyncio.get_running_loop().create_future()
        self.transport.write(pack(header, samples))
        try:
            async with asyncio.timeout(SECONDS_TO_ENCODE):
                header, data = await answer
        except TimeoutError:  # it stands still
            self.transport.abort()
            raise encoder_failed() from None
        if "error" in header:
            raise RuntimeError(header["error"])
        return header, data


def encoder_failed() -> ApiError:
    return ApiError("an encoder has ended: ask again", 503, code="encoder_failed")


class RemoteStream:
    """One stream, encoded in a process."""

    def __init__(self, process: EncoderProcess, name: str, rate: int, speed: float):
        self.process = process
        self.kind = name, rate, speed
        self.number = next(process.numbers)
        self.is_open = False  # the process knows it
        self.samples = 0
        process.streams += 1

    async def add(self, samples: np.ndarray) -> bytes:
        header = dict(op="add", id=self.number) if self.is_open else dict(op="open", id=self.number, kind=self.kind)
        self.is_open = True
        return (await self.process.encode(header, samples.tobytes()))[1]

    async def finish(self) -> bytes:
        header, data = await self.process.encode(dict(op="finish", id=self.number), b"")
        self.samples = header["samples"]
        return data

    def whole(self, data: bytes) -> bytes:
        return with_length(self.kind[0], self.kind[1], self.samples, data)

    def close(self) -> None:
        self.process.streams -= 1
        if not self.process.is_over:
            self.process.transport.write(pack(dict(op="drop", id=self.number)))


class LocalStream:
    """One stream, encoded in the server: plain samples at once, everything else in a thread."""

    def __init__(self, name: str, rate: int, speed: float):
        self.encoder = Encoder(name, rate, speed)
        self.is_plain = name not in COMPRESSED and speed == 1

    async def run(self, function, *arguments) -> bytes:
        if self.is_plain:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)

    async def add(self, samples: np.ndarray) -> bytes:
        return await self.run(self.encoder.add, samples)

    async def finish(self) -> bytes:
        return await self.run(self.encoder.finish)

    def whole(self, data: bytes) -> bytes:
        return with_length(self.encoder.name, self.encoder.rate, self.encoder.samples, data)

    def close(self) -> None:
        self.encoder = None


# ---- The process


def main(server: socket.socket) -> None:
    """Until the server has closed the socket, or is gone."""
    unpacker, encoders = Unpacker(), {}
    spares = {}  # an encoder of each kind that was asked for: to make one takes longer than the first 80 ms
    while data := server.recv(1 << 18):
        for header, payload in unpacker.feed(data):
            for answer in answers(encoders, spares, header, payload):
                server.sendall(answer)


def answers(encoders: dict, spares: dict, header: dict, payload: bytes) -> Iterator[bytes]:
    number, kind = header["id"], tuple(header.get("kind", ()))
    if header["op"] == "drop":
        encoders.pop(number, None)
        return
    try:
        if kind:
            encoders[number] = spares.pop(kind, None) or Encoder(*kind)
        encoder = encoders[number]
        data = encoder.finish() if header["op"] == "finish" else encoder.add(np.frombuffer(payload, np.int16))
        yield pack(dict(id=number, samples=encoder.samples), data)
    except BaseException as error:  # a library in C may raise anything
        yield pack(dict(id=number, error=f"{type(error).__name__}: {error}"))
    if kind:
        with contextlib.suppress(Exception):
            spares[kind] = Encoder(*kind)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the socket
    main(socket.socket(fileno=int(sys.argv[1])))
