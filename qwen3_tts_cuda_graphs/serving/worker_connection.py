"""Calls to the worker of a model, over its socket. Each call is answered by one or more messages.

When a worker ends, the kernel closes its socket, and all calls in flight get an error.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio

from qwen3_tts_cuda_graphs.serving.errors import ApiError, engine_failed
from qwen3_tts_cuda_graphs.serving.messages import Message, Unpacker, pack


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits for a worker, in seconds, and how often it acknowledges audio."""

    check_interval: float = 1.0
    answer: float = 120.0  # for the answer of `ask`, including the queue; speech is limited by --request-seconds
    silence: float = 30.0  # without a heartbeat, after which a worker is replaced: on busy cores it may just be slow
    silence_in_doubt: float = 10.0  # without a heartbeat, after which requests get 503 until the next one
    suspended: float = 5.0  # until a worker stopped by SIGSTOP is replaced
    restart: float = 600.0  # for a replacement to get ready
    restart_delay: float = 0.2  # per recent death: the memory of a killed process is free after a moment
    recovery: float = 60.0  # of service, after which earlier deaths are forgotten
    exit: float = 5.0  # for a worker to end once its socket is closed; also before a failed start is retried
    drain: float = 60.0  # for the streams of a worker that was sent SIGTERM
    receipt_interval: float = 1.0  # between receipts of a slow listener
    chunks_per_receipt: int = 8  # a stream pauses only after many more unread chunks


class Call:
    """A call to the worker, and the messages that answer it."""

    def __init__(self, connection: "WorkerConnection", id: int):
        self.connection = connection
        self.id = id
        self.messages = asyncio.Queue()
        self.is_open = True
        self.chunks_read = 0  # since the last receipt
        self.receipt_at = time.monotonic()

    def send(self, op: str, payload: bytes = b"", **fields) -> None:
        self.connection.send(payload, op=op, id=self.id, **fields)

    async def receive(self) -> Message:
        """The next message of the answer. Raises its error."""
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        header, payload = message
        if header["type"] == "audio":
            self.chunks_read += 1
            now, timeouts = time.monotonic(), self.connection.timeouts
            if self.chunks_read == timeouts.chunks_per_receipt or now - self.receipt_at > timeouts.receipt_interval:
                self.send("read", chunks=self.chunks_read)
                self.chunks_read = 0
                self.receipt_at = now
        return header, payload

    def put(self, message: Message | Exception) -> None:
        self.is_open = isinstance(message, tuple) and message[0]["type"] == "audio"
        self.messages.put_nowait(message)


class WorkerConnection(asyncio.Protocol):
    """The server's end of the socket to one worker."""

    def __init__(self, on_event: Callable[[dict], None], timeouts: Timeouts):
        """on_event: handles each message that belongs to no call"""
        self.on_event = on_event
        self.timeouts = timeouts
        self.unpacker = Unpacker()
        self.call_ids = itertools.count()
        self.calls = {}  # id -> Call
        self.voice_keys = {}  # RegisteredVoice -> future of its key in the worker
        self.is_ready = False  # until then the worker takes no calls
        self.is_over = asyncio.Event()
        self.silent_for = 0.0  # seconds without a message from the worker

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.silent_for = 0.0
        for header, payload in self.unpacker.feed(data):
            if "id" not in header:
                self.on_event(header)
            elif call := self.calls.get(header["id"]):
                is_error = header["type"] == "error"
                call.put(ApiError(**header["error"]) if is_error else (header, payload))

    def connection_lost(self, error: Exception | None) -> None:
        for call in self.calls.values():
            if call.is_open:
                while not call.messages.empty():  # audio that is unread would be incomplete
                    call.messages.get_nowait()
                call.put(engine_failed())
        self.is_over.set()

    def send(self, payload: bytes = b"", **header) -> None:
        if not self.is_over.is_set():
            self.transport.write(pack(header, payload))

    @contextlib.contextmanager
    def call(self, op: str, payload: bytes = b"", **fields) -> Iterator[Call]:
        """Leaving the context before the last message has arrived cancels the call."""
        if self.is_over.is_set() or not self.is_ready:
            raise engine_failed()
        call = Call(self, next(self.call_ids))
        self.calls[call.id] = call
        call.send(op, payload, **fields)
        try:
            yield call
        finally:
            del self.calls[call.id]
            if call.is_open:
                call.send("cancel")

    async def ask(self, op: str, payload: bytes = b"", **fields) -> dict:
        """A call that one message answers: returns its header."""
        try:
            with anyio.fail_after(self.timeouts.answer), self.call(op, payload, **fields) as call:
                return (await call.receive())[0]
        except TimeoutError:
            problem = f"the engine did not answer within {self.timeouts.answer:g} s: try again later"
            raise ApiError(problem, 503, code="timeout") from None
