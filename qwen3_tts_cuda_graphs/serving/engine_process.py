"""The worker of one model, as the server's event loop sees it: calls over a socket, and a process that heals.

    starting -> ready -> restarting -> ready ...        a worker that ends is replaced
                  |           \\-> gave up               it ended three times without a minute of service in between
                  \\-> draining -> restarting ...        it was sent SIGTERM, and speaks what it has begun

When a worker ends, its socket is closed by the system. All calls in flight get an error at that moment. A worker that
still runs at the time `kill_at` is killed; math.inf means never.
"""

import asyncio
import contextlib
import itertools
import math
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio

from qwen3_tts_cuda_graphs.serving.child_process import end_process, is_stopped, start_module, with_socket
from qwen3_tts_cuda_graphs.serving.errors import ApiError, engine_failed, log
from qwen3_tts_cuda_graphs.serving.messages import Message, Unpacker, pack
from qwen3_tts_cuda_graphs.serving.spare import Spare

MAX_DEATHS = 3
SIGNALS = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits for a worker, in seconds, and how often it tells the worker what was read."""

    check_interval: float = 1.0
    answer: float = 120.0  # to a question, also behind others; speech has --request-seconds
    silence: float = 30.0  # a worker without a heartbeat is replaced; not sooner: on busy cores it may just be slow
    silence_in_doubt: float = 10.0  # without a heartbeat: until it has one, requests get 503
    suspended: float = 5.0  # a worker that was stopped by SIGSTOP is replaced
    restart: float = 600.0  # a replacement that is not ready by then is replaced
    restart_delay: float = 0.2  # for each recent death: memory of a killed process is free after a moment
    recovery: float = 60.0  # a worker that has served for so long makes up for earlier deaths
    exit: float = 5.0  # of a worker whose socket is closed; also until a process is tried again that could not start
    drain: float = 60.0  # after a worker was sent SIGTERM
    receipt_interval: float = 1.0  # for listeners who are slow, and read all the same
    chunks_per_receipt: int = 8  # fewer messages; a stream pauses after many more chunks


class Call:
    """A question to the worker, and the messages that answer it."""

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
        """The next message of the answer, or its error."""
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
    """The server's end of the socket, for the life of one worker."""

    def __init__(self, on_event: Callable[[dict], None], timeouts: Timeouts):
        """on_event: takes each message that answers no call"""
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
                while not call.messages.empty():  # what is unread is not complete
                    call.messages.get_nowait()
                call.put(engine_failed())
        self.is_over.set()

    def send(self, payload: bytes = b"", **header) -> None:
        if not self.is_over.is_set():
            self.transport.write(pack(header, payload))

    @contextlib.contextmanager
    def call(self, op: str, payload: bytes = b"", **fields) -> Iterator[Call]:
        """Leaving the context before the last message of the answer cancels the call."""
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
        """A call with one answer."""
        try:
            with anyio.fail_after(self.timeouts.answer), self.call(op, payload, **fields) as call:
                return (await call.receive())[0]
        except TimeoutError:
            problem = f"the engine did not answer within {self.timeouts.answer:g} s: try again later"
            raise ApiError(problem, 503, code="timeout") from None


class EngineProcess:
    """Keeps a worker running: `await load()`, then `await begin()`; a worker that ends is replaced until `close`."""

    def __init__(
        self,
        spec: dict,
        rows: int | None,
        spawn: Callable = start_module,
        spare: Spare | None = None,
        timeouts: Timeouts | None = None,
    ):
        """spec: what EngineHost takes
        rows: None for as many as fit
        spawn: starts a worker with the other end of a socket; returns what has pid, wait and kill
        spare: where a worker may wait that was started before; None: each is started when it is needed
        """
        self.spec = spec
        self.rows = rows
        self.spawn = spawn
        self.spare = spare
        self.timeouts = timeouts or Timeouts()
        self.state = "starting"
        self.why = ""  # why the last worker has ended
        self.deaths = 0  # without enough service in between
        self.restarts = 0
        self.in_flight = 0  # answers that have a place or wait for one
        self.device, self.rate = "", 24000  # the worker says
        self.connection = None
        self.process = None
        self.task = None
        self.is_server_draining = False  # SIGTERM then does not end the worker, and none replaces it

    # ---- Lifetime

    async def load(self) -> None:
        """Start a worker and wait until it has loaded the weights. Raises ValueError if they cannot be loaded."""
        self.loaded, self.started = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self.keep_running())
        await self.until(self.loaded)

    async def begin(self, models: int = 1) -> None:
        """Have it capture its graphs, and wait until it can speak.

        models: how many still have to share the GPU's memory, with this one
        """
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
                pause = self.timeouts.exit
            if self.started.is_set():  # else it is a mistake of the user, or of the machine: they are told
                log.warning("the engine of %s has ended: %s", self.spec["model"], self.why)
            if self.deaths >= MAX_DEATHS:
                log.error("the engine of %s is not started again: restart the server", self.spec["model"])
            if not self.is_replaced:
                break
            self.restarts += 1
            await asyncio.sleep(pause or self.timeouts.restart_delay * self.deaths)
        self.state = "gave up"
        self.loaded.set()
        self.started.set()

    async def run_once(self) -> None:
        """One worker, from its start to its end."""
        self.ready_at = None
        self.kill_at = time.monotonic() + self.timeouts.restart if self.started.is_set() else math.inf
        self.why = ""
        ours, process = self.spare and self.spare.take() or with_socket(self.spawn)
        self.process = process
        loop = asyncio.get_running_loop()
        _, self.connection = await loop.create_connection(
            lambda: WorkerConnection(self.on_event, self.timeouts), sock=ours
        )
        try:
            self.connection.send(op="load", **self.spec)
            while not self.connection.is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.connection.is_over.wait(), self.timeouts.check_interval)
                if self.state == "ready" and self.is_hanging():
                    self.why = f"it gave no sign of life for {self.connection.silent_for:g} s"
                    self.kill_at = -math.inf
                if self.state == "draining" and not self.in_flight:
                    self.kill_at = -math.inf
                if time.monotonic() > self.kill_at:
                    self.why = self.why or f"it was not ready after {self.timeouts.restart:g} s"
                    process.kill()
                    break
        finally:
            self.connection.transport.abort()  # a worker that still lives ends by that
            served = time.monotonic() - self.ready_at if self.ready_at else 0.0
            self.deaths = 1 if served > self.timeouts.recovery else self.deaths + 1
            if self.spare and self.is_replaced:
                self.spare.wake(self.spec["device"])
            self.state = "restarting" if self.started.is_set() else self.state
            status = await asyncio.shield(asyncio.to_thread(end_process, process, self.timeouts.exit))
        ended = f"killed by {SIGNALS.get(-status, -status)}" if status < 0 else f"it exited with status {status}"
        self.why = self.why or ended

    @property
    def is_replaced(self) -> bool:
        """Whether another worker follows this one when it has ended."""
        return self.started.is_set() and not self.is_server_draining and self.deaths < MAX_DEATHS

    def is_hanging(self) -> bool:
        """Whether the worker's process hangs; an engine that hangs is noticed by the worker itself. Time is counted in
        checks, not read from a clock: the server may have been suspended, too, or be slow."""
        self.connection.silent_for += self.timeouts.check_interval
        silent_for, timeouts = self.connection.silent_for, self.timeouts
        return silent_for > timeouts.silence or (silent_for > timeouts.suspended and is_stopped(self.process))

    def on_event(self, event: dict) -> None:
        """What the worker says about itself."""
        if event["type"] == "imported" and self.spare:  # not before: it would compete for the cores
            self.spare.prepare()
        elif event["type"] == "loaded":
            if self.started.is_set():  # before: as many rows as it had
                self.connection.send(op="begin", rows=self.rows, models=1)
            self.loaded.set()
        elif event["type"] == "ready":
            self.device, self.rows, self.rate = event["device"], event["rows"], event["rate"]
            self.ready_at, self.kill_at = time.monotonic(), math.inf
            self.connection.is_ready = True
            self.state = "ready"
            self.started.set()
        elif event["type"] == "draining" and self.state == "ready" and not self.is_server_draining:
            self.state = "draining"
            self.why = "it received SIGTERM"
            self.kill_at = time.monotonic() + self.timeouts.drain
        elif event["type"] == "stopped":
            self.state = "restarting" if self.started.is_set() else self.state
            self.why = event["message"]
            self.kill_at = time.monotonic() + self.timeouts.exit

    def speak_to_the_end(self) -> None:
        """For a server that drains. It may have received SIGTERM together with its workers: they speak all the same."""
        self.is_server_draining = True
        if self.state == "draining":
            self.state, self.why, self.kill_at = "ready", "", math.inf

    @property
    def active(self) -> int:
        return min(self.in_flight, self.rows or 0)

    @property
    def waiting(self) -> int:
        return self.in_flight - self.active

    @property
    def memory(self) -> int:
        """Bytes of the worker, 0 where /proc is missing."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except (AttributeError, OSError):  # there is none yet, or no /proc
            return 0

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self.connection.silent_for <= self.timeouts.silence_in_doubt

    def check_ready(self) -> None:
        if self.state == "starting":
            raise ApiError("the server is starting: try again in a moment", 503, code="starting")
        if self.state in ("draining", "restarting"):
            raise engine_failed()
        if self.state == "gave up":
            problem = f"the engine has stopped {MAX_DEATHS} times ({self.why}): restart the server, its log says more"
            raise ApiError(problem, 503, code="stopped")
        if not self.is_ready:
            problem = (
                f"the engine has given no sign of life for {self.connection.silent_for:g} s: try again in a moment"
            )
            raise ApiError(problem, 503, code="silent")

    def take_place(self, max_waiting: int) -> None:
        """Count an answer among those that are spoken or wait for a row. Whoever takes it counts it off at its end."""
        self.check_ready()
        if self.in_flight >= self.rows + max_waiting:
            raise ApiError(f"{self.in_flight} requests are in flight already: try again later", 429, code="queue_full")
        self.in_flight += 1

    async def close(self) -> None:
        if self.task:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
