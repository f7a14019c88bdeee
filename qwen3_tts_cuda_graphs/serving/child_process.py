"""Starts and ends the server's child processes, each connected by a socket: workers, a spare worker, helpers.

The imports of a worker take long and need nothing from the server, so the first worker is started before the server's
own imports. When its imports are done, a spare worker is started. It does the same imports, then waits for its first
message without using the GPU, and replaces the next worker that ends. It takes about 0.5 GiB of memory and, like all
workers, ends when its socket is closed. All models share one spare.

This module imports nothing that takes long.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qwen3_tts_cuda_graphs.common.quick_start import bytecode_environment
from qwen3_tts_cuda_graphs.serving.messages import pack

MIN_MEMORY = 4 * 2**30  # bytes that must be available to start a spare
SECONDS_TO_IMPORT = 120.0  # after which a spare is considered stuck


def with_socket(start: Callable, *arguments, **options) -> tuple:
    """Start a process with one end of a new socket. Returns the other end and the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        return ours, start(theirs, *arguments, **options)


def start_module(theirs: socket.socket, *arguments: str, module: str = "worker", **options) -> subprocess.Popen:
    """Run a module of this folder in a new interpreter, which inherits only this socket.

    arguments: for a worker, the device if it may be used at once; options: of Popen
    """
    folder = Path(__file__).parents[len(__package__.split("."))]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | bytecode_environment() | {"PYTHONPATH": path}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # starting its thread pool would take time
    options = dict(stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()]) | options
    command = [sys.executable, "-m", f"{__package__}.{module}", str(theirs.fileno()), *arguments]
    return subprocess.Popen(command, **options)


def end_process(process, seconds: float) -> int:
    """Wait for a process, and kill it if it does not end in time. Returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a driver: do not wait for it any longer
        return process.wait(seconds)
    return -signal.SIGKILL


def is_stopped(process) -> bool:
    """Whether a signal such as SIGSTOP has suspended it. False where /proc is missing."""
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def available_memory() -> int:
    """In bytes. Raises OSError where /proc is missing."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


class Spare:
    """At most one worker that waits to be used."""

    def __init__(self):
        self.ours = None  # the server's end of its socket
        self.process = None

    def prepare(self) -> None:
        """Start a spare if there is none. If that fails, the next worker just takes longer to start."""
        with contextlib.suppress(OSError):
            if self.process is None and available_memory() > MIN_MEMORY:
                self.start(module="spare_worker")

    def start(self, *arguments: str, **options) -> None:
        """arguments: the device, for a worker that loads its model right after its imports"""
        self.ours, self.process = with_socket(start_module, *arguments, **options)
        self.started_at = time.monotonic()

    def wake(self, device: str | None) -> None:
        """Let it initialize the device, while the worker that it replaces is ending."""
        if self.process:
            with contextlib.suppress(OSError):  # if it has ended, `take` notices
                self.ours.send(pack({"op": "wake", "device": device}), socket.MSG_DONTWAIT)

    def take(self) -> tuple[socket.socket, subprocess.Popen] | None:
        """Hand over the socket and the process to the caller. None if there is no usable spare."""
        if self.process is None:
            return None
        ours, process = self.ours, self.process
        if not self.can_be_used():
            self.close()
            return None
        self.ours = self.process = None
        return ours, process

    def can_be_used(self) -> bool:
        """Whether it runs, and has finished its imports or has had little time for them."""
        if self.process.poll() is not None or is_stopped(self.process):
            return False
        try:
            return bool(self.ours.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))  # the message `imported`
        except BlockingIOError:
            return time.monotonic() - self.started_at < SECONDS_TO_IMPORT
        except OSError:
            return False

    def close(self) -> None:
        if self.process:
            self.ours.close()
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            self.ours = self.process = None
