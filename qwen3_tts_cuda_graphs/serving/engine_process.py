"""The worker of one model, as the server's event loop sees it: calls over a socket, and a process that heals.

    starting -> ready -> restarting -> ready ...        a worker that ends is replaced
                              \\-> gave up               it ended three times without a minute of service in between

When a worker ends, its socket is closed by the system. All calls in flight get an error at that moment.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio

from qwen3_tts_cuda_graphs.serving.errors import ApiError, engine_failed, log
from qwen3_tts_cuda_graphs.serving.messages import Message, Unpacker, pack

MAX_DEATHS = 3
SECONDS_OF_SERVICE = 60.0  # after which earlier deaths no longer count
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_STOPPED = 5.0  # by SIGSTOP, after which a worker is replaced
SECONDS_IN_DOUBT = 10.0  # without a sign of life, after which requests get 503
SECONDS_WITHOUT_SIGN = 30.0  # after which a worker is replaced: on busy cores it may just be slow
SECONDS_TO_ANSWER = 120.0  # a question, also behind others; speech has --request-seconds
SECONDS_TO_LOAD = 600.0  # again, after which a worker is replaced
SECONDS_TO_END = 5.0
SECONDS_TO_DRAIN = 60.0  # of a worker that was sent SIGTERM
SIGNALS = {number.value: number.name for number in signal.Signals}
CHUNKS_PER_RECEIPT = 8  # fewer messages; a stream pauses after many more chunks
SECONDS_PER_RECEIPT = 1.0  # for listeners who are slow, and read all the same


def start_worker(theirs: socket.socket) -> subprocess.Popen:
    return start_python(f"{__package__}.worker", str(theirs.fileno()), pass_fds=[theirs.fileno()])


def start_python(module: str, *arguments: str, **options) -> subprocess.Popen:
    """A module in a fresh interpreter, whose only ties to this one are those in the options of Popen."""
    folder = Path(__file__).parents[len(__package__.split("."))]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}  # its pool would take time to start
    options = dict(stdin=subprocess.DEVNULL, stdout=2, env=environment) | options
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **options)


class Call:
    """A question to the worker, and its answers."""

    def __init__(self, connection: "WorkerConnection", number: int):
        self.connection = connection
        self.number = number
        self.answers = asyncio.Queue()
        self.is_open = True
        self.chunks_read = 0  # since the last receipt
        self.receipt_at = time.monotonic()

    def send(self, op: str, payload: bytes = b"", **fields) -> None:
        self.connection.send(payload, op=op, id=self.number, **fields)

    async def answer(self) -> Message:
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        header, payload = answer
        if header["type"] == "audio":
            self.chunks_read += 1
            now = time.monotonic()
            if self.chunks_read == CHUNKS_PER_RECEIPT or now - self.receipt_at > SECONDS_PER_RECEIPT:
                self.send("read", chunks=self.chunks_read)
                self.chunks_read = 0
                self.receipt_at = now
        return header, payload

    def put(self, answer: Message | Exception) -> None:
        self.is_open = isinstance(answer, tuple) and answer[0]["type"] == "audio"
        self.answers.put_nowait(answer)


class WorkerConnection(asyncio.Protocol):
    """The server's end of the socket, for the life of one worker."""

    def __init__(self, on_event: Callable[[dict], None]):
        """on_event: takes what is not the answer to a call"""
        self.on_event = on_event
        self.unpacker = Unpacker()
        self.numbers = itertools.count()
        self.calls = {}
        self.kept = {}  # RegisteredVoice -> future of its key in the worker
        self.is_ready = False  # the worker knows no call before
        self.is_over = asyncio.Event()
        self.silence = 0.0  # seconds without a sign of life

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.silence = 0.0
        for header, payload in self.unpacker.feed(data):
            if "id" not in header:
                self.on_event(header)
            elif call := self.calls.get(header["id"]):
                is_error = header["type"] == "error"
                call.put(ApiError(**header["error"]) if is_error else (header, payload))

    def connection_lost(self, error: Exception | None) -> None:
        for call in self.calls.values():
            if call.is_open:
                while not call.answers.empty():  # what is unread is not complete
                    call.answers.get_nowait()
                call.put(engine_failed())
        self.is_over.set()

    def send(self, payload: bytes = b"", **header) -> None:
        if not self.is_over.is_set():
            self.transport.write(pack(header, payload))

    @contextlib.contextmanager
    def call(self, op: str, payload: bytes = b"", **fields) -> Iterator[Call]:
        """Leaving it before its end cancels it."""
        if self.is_over.is_set() or not self.is_ready:
            raise engine_failed()
        call = Call(self, next(self.numbers))
        self.calls[call.number] = call
        call.send(op, payload, **fields)
        try:
            yield call
        finally:
            del self.calls[call.number]
            if call.is_open:
                call.send("cancel")

    async def ask(self, op: str, payload: bytes = b"", **fields) -> dict:
        """A call with one answer."""
        try:
            with anyio.fail_after(SECONDS_TO_ANSWER), self.call(op, payload, **fields) as call:
                return (await call.answer())[0]
        except TimeoutError:
            problem = f"the engine did not answer within {SECONDS_TO_ANSWER:g} s: try again later"
            raise ApiError(problem, 503, code="timeout") from None


class EngineProcess:
    """`await load()` and `await begin()`; from then on it is kept running until `close`."""

    def __init__(self, spec: dict, rows: int | None, spawn: Callable = start_worker):
        """spec: what EngineHost takes
        rows: None for as many as fit
        spawn: starts a worker with the other end of a socket; returns what has pid, wait and kill
        """
        self.spec = spec
        self.rows = rows
        self.spawn = spawn
        self.state = "starting"
        self.why = ""  # why the last worker has ended
        self.deaths = 0  # without enough service in between
        self.restarts = 0
        self.device, self.rate = "", 24000  # the worker says
        self.memory = 0  # bytes of the worker
        self.connection = None
        self.process = None
        self.task = None
        self.stays = False  # the server drains: the worker is neither ended nor replaced

    # ---- Lifetime

    async def load(self) -> None:
        """Until the weights are loaded. Raises ValueError if they cannot be."""
        self.loaded, self.started = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self.keep_running())
        await self.until(self.loaded)

    async def begin(self, models: int = 1) -> None:
        """Until it speaks. models: those that still have to share the GPU's memory, with this one"""
        self.connection.send(op="begin", rows=self.rows, models=models)
        await self.until(self.started)

    async def until(self, event: asyncio.Event) -> None:
        await event.wait()
        if self.state == "gave up":
            raise ValueError(f"{self.spec['model']}: {self.why}")

    async def keep_running(self) -> None:
        while True:
            pause = 0.0
            try:
                await self.run_once()
            except OSError as error:  # not the engine's fault: it is tried again and again
                self.why = f"no process can be started: {error}"
                pause = SECONDS_TO_END
            if not self.started.is_set():  # a mistake of the user, or of the machine: they are told
                break
            log.warning("the engine of %s has ended: %s", self.spec["model"], self.why)
            if self.stays:
                break
            if self.deaths >= MAX_DEATHS:
                log.error("the engine of %s is not started again: restart the server", self.spec["model"])
                break
            self.state = "restarting"
            self.restarts += 1
            await asyncio.sleep(pause or 0.5 * self.deaths)  # memory of a killed process is free after a moment
        self.state = "gave up"
        self.loaded.set()
        self.started.set()

    async def run_once(self) -> None:
        """One worker, from its start to its end."""
        self.ready_at = self.end_by = self.drain_by = None
        self.why = ""
        begin = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = process = self.spawn(theirs)
        loop = asyncio.get_running_loop()
        _, self.connection = await loop.create_connection(lambda: WorkerConnection(self.take), sock=ours)
        try:
            self.connection.send(op="load", **self.spec)
            while not self.connection.is_over.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.connection.is_over.wait(), SECONDS_BETWEEN_LOOKS)
                if self.state == "ready" and self.stands_still():
                    self.why = f"it gave no sign of life for {self.connection.silence:g} s"
                    self.end_by = 0.0
                is_again = self.started.is_set() and self.ready_at is None
                if is_again and time.monotonic() - begin > SECONDS_TO_LOAD:
                    self.why = f"it was not ready after {SECONDS_TO_LOAD:g} s"
                    self.end_by = 0.0
                if self.drain_by is not None and time.monotonic() > self.drain_by and not self.stays:
                    self.end_by = 0.0
                if self.end_by is not None and time.monotonic() > self.end_by:
                    process.kill()
                    break
        finally:
            self.connection.transport.abort()  # a worker that still lives ends by that
            self.state = "restarting" if self.state == "ready" else self.state
            status = await asyncio.shield(asyncio.to_thread(end_process, process))
        self.memory = 0
        ended = f"killed by {SIGNALS.get(-status, -status)}" if status < 0 else f"it exited with status {status}"
        self.why = self.why or ended
        served = time.monotonic() - self.ready_at if self.ready_at else 0.0
        self.deaths = 1 if served > SECONDS_OF_SERVICE else self.deaths + 1

    def stands_still(self) -> bool:
        """Whether the process does. An engine that does is noticed by the worker itself. Looks are counted, not a clock
        read: the server may have been stopped, too, or be slow."""
        self.connection.silence += SECONDS_BETWEEN_LOOKS
        silence = self.connection.silence
        return silence > SECONDS_WITHOUT_SIGN or (silence > SECONDS_STOPPED and is_stopped(self.process))

    def take(self, event: dict) -> None:
        """What the worker says about itself."""
        if event["type"] == "beat":
            self.memory = event["memory"]
        elif event["type"] == "loaded":
            if self.started.is_set():  # before: as many rows as it had
                self.connection.send(op="begin", rows=self.rows, models=1)
            self.loaded.set()
        elif event["type"] == "ready":
            self.device, self.rows, self.rate = event["device"], event["rows"], event["rate"]
            self.ready_at = time.monotonic()
            self.connection.is_ready = True
            self.state = "ready"
            self.started.set()
        elif event["type"] == "draining":
            self.state = "restarting"
            self.why = "it received SIGTERM"
            self.drain_by = time.monotonic() + SECONDS_TO_DRAIN
        elif event["type"] == "stopped":
            self.state = "restarting" if self.state == "ready" else self.state
            self.why = event["message"]
            self.end_by = time.monotonic() + SECONDS_TO_END

    def stay(self) -> None:
        """The server drains, and may have received SIGTERM together with its workers: they speak to the end."""
        if not self.stays and self.connection and self.connection.is_ready:
            self.connection.send(op="stay")
        self.stays = True

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self.connection.silence <= SECONDS_IN_DOUBT

    def check_ready(self) -> None:
        if self.state == "starting":
            raise ApiError("the server is starting: try again in a moment", 503, code="starting")
        if self.state == "restarting":
            raise engine_failed()
        if self.state == "gave up":
            problem = f"the engine has stopped {MAX_DEATHS} times ({self.why}): restart the server, its log says more"
            raise ApiError(problem, 503, code="stopped")
        if not self.is_ready:
            problem = f"the engine has given no sign of life for {self.connection.silence:g} s: try again in a moment"
            raise ApiError(problem, 503, code="silent")

    async def close(self) -> None:
        if self.task:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task


def is_stopped(process) -> bool:
    """By a signal, so that it cannot go on by itself. Not known where /proc is missing."""
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def end_process(process) -> int:
    """Wait for it, and reap it. Returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(SECONDS_TO_END)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it: another one is started all the same
        return process.wait(SECONDS_TO_END)
    return -signal.SIGKILL
