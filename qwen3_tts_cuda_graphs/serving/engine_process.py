"""The worker of one model, seen from the server's event loop. A worker that ends is replaced.

    starting -> ready -> restarting -> ready ...        a worker that ends is replaced
                  |           \\-> gave up               it ended three times without a minute of service in between
                  \\-> draining -> restarting ...        it was sent SIGTERM, and finishes its streams

`keep_running` starts one worker after another. `run_once` is the life of one: `on_event` handles its messages about
itself, and `watch` notices that it hangs. Calls to it go through its WorkerConnection.
"""

import asyncio
import contextlib
import math
import resource
import signal
import time
from collections.abc import Callable
from functools import partial

from qwen3_tts_cuda_graphs.serving.child_process import end_process, is_stopped, start_module, with_socket
from qwen3_tts_cuda_graphs.serving.errors import ApiError, engine_failed, log
from qwen3_tts_cuda_graphs.serving.spare_worker import Spare
from qwen3_tts_cuda_graphs.serving.worker_connection import Timeouts, WorkerConnection

MAX_DEATHS = 3
SIGNALS = {number.value: number.name for number in signal.Signals}


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
        """spec: the argument of EngineHost
        rows: None for as many as fit
        spawn: starts a worker with one end of a socket; returns an object with pid, wait and kill
        spare: may hold a worker that was started in advance; None: each is started when it is needed
        """
        self.spec = spec
        self.rows = rows
        self.spawn = spawn
        self.spare = spare
        self.timeouts = timeouts or Timeouts()
        self.state = "starting"
        self.loaded = asyncio.Event()  # set when the first worker has loaded the weights
        self.started = asyncio.Event()  # set when the first worker is ready
        self.deaths = 0  # without enough service in between
        self.restarts = 0
        self.in_flight = 0  # answers that have a place or wait for one
        self.is_server_draining = False  # then SIGTERM does not end the worker, and no other worker replaces it
        self.task = None  # runs `keep_running`

        # Of the current worker
        self.process = None
        self.connection = None
        self.device, self.rate = "", 24000  # as it reports them
        self.ready_at = None
        self.kill_at = math.inf  # when it is killed if it still runs
        self.why = ""  # why it has ended, or must end

    # ---- Lifetime

    async def load(self) -> None:
        """Start a worker and wait until it has loaded the weights. Raises ValueError if they cannot be loaded."""
        self.task = asyncio.create_task(self.keep_running())
        await self.until(self.loaded)

    async def begin(self, models: int = 1) -> None:
        """Have it capture its graphs, and wait until it can speak.

        models: how many models still have to share the free memory, including this one
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
            except OSError as error:  # not a failure of the worker: retried without a limit
                self.why = f"no process can be started: {error}"
                pause = self.timeouts.exit
            if self.started.is_set():  # else `until` raises
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
        self.ready_at, self.why = None, ""
        self.kill_at = time.monotonic() + self.timeouts.restart if self.started.is_set() else math.inf
        ours, self.process = self.spare and self.spare.take() or with_socket(self.spawn)
        new_connection = partial(WorkerConnection, self.on_event, self.timeouts)
        _, self.connection = await asyncio.get_running_loop().create_connection(new_connection, sock=ours)
        try:
            self.connection.send(op="load", **self.spec)
            await self.watch()
        finally:
            self.connection.transport.abort()  # ends a worker that is still running
            served = time.monotonic() - self.ready_at if self.ready_at else 0.0
            self.deaths = 1 if served > self.timeouts.recovery else self.deaths + 1
            if self.spare and self.is_replaced:
                self.spare.wake(self.spec["device"])
            self.leave_ready()
            status = await asyncio.shield(asyncio.to_thread(end_process, self.process, self.timeouts.exit))
        ended = f"killed by {SIGNALS.get(-status, -status)}" if status < 0 else f"it exited with status {status}"
        self.why = self.why or ended

    async def watch(self) -> None:
        """Returns when the worker has ended, or was killed."""
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
                self.process.kill()
                return

    def leave_ready(self) -> None:
        """The worker ends. The state stays `starting` until the first one is ready."""
        if self.started.is_set():
            self.state = "restarting"

    @property
    def is_replaced(self) -> bool:
        """Whether another worker is started after this one."""
        return self.started.is_set() and not self.is_server_draining and self.deaths < MAX_DEATHS

    def is_hanging(self) -> bool:
        """Whether the worker's process hangs; a hanging engine is noticed by the worker itself. Time is counted in
        checks rather than measured, since the server itself may have been suspended or slow."""
        self.connection.silent_for += self.timeouts.check_interval
        silent_for, timeouts = self.connection.silent_for, self.timeouts
        return silent_for > timeouts.silence or (silent_for > timeouts.suspended and is_stopped(self.process))

    def on_event(self, event: dict) -> None:
        """Handle a message of the worker about itself."""
        if event["type"] == "imported" and self.spare:  # earlier, the spare would compete for the cores
            self.spare.prepare()
        elif event["type"] == "loaded":
            if self.started.is_set():  # a replacement gets as many rows as the first worker
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
            self.leave_ready()
            self.why = event["message"]
            self.kill_at = time.monotonic() + self.timeouts.exit

    def speak_to_the_end(self) -> None:
        """Called when the server drains: a worker that also received SIGTERM keeps speaking."""
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
        """Resident memory of the worker in bytes, 0 where /proc is missing."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except (AttributeError, OSError):  # no worker yet, or no /proc
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
        """Count an answer that is spoken or waits for a row. The caller decrements `in_flight` at its end."""
        self.check_ready()
        if self.in_flight >= self.rows + max_waiting:
            raise ApiError(f"{self.in_flight} requests are in flight already: try again later", 429, code="queue_full")
        self.in_flight += 1

    async def close(self) -> None:
        if self.task:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
