"""Processes of the server, each with a socket to it: workers, a spare worker, and the helpers that encode and decode.

A worker's imports take long and need nothing from the server, so the first one is started before the server's own
imports. When it has imported what it needs, a spare is started: it imports the same, waits for its first message and
does not touch the GPU. It replaces the next worker that ends. It takes about 0.5 GiB of memory, and ends when its
socket is closed, as all workers do. All models share one spare.

This module itself imports nothing that takes long.
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

MIN_MEMORY = 4 * 2**30  # bytes that must be available for a spare
SECONDS_TO_IMPORT = 120.0  # after which a spare is taken for stuck


def with_socket(start: Callable, *arguments, **options) -> tuple:
    """Start a process with one end of a socket. Returns the other end, and the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        return ours, start(theirs, *arguments, **options)


def start_module(theirs: socket.socket, *arguments: str, module: str = "worker", **options) -> subprocess.Popen:
    """A module of this folder in a fresh interpreter, whose only ties to this one are those in the options of Popen.

    arguments: of a worker: the device, if it may use it at once
    """
    folder = Path(__file__).parents[len(__package__.split("."))]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | bytecode_environment() | {"PYTHONPATH": path}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # its pool would take time to start
    options = dict(stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()]) | options
    command = [sys.executable, "-m", f"{__package__}.{module}", str(theirs.fileno()), *arguments]
    return subprocess.Popen(command, **options)


def end_process(process, seconds: float) -> int:
    """Reap a process, and kill it if it does not end by itself in time. Returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it: another one is started all the same
        return process.wait(seconds)
    return -signal.SIGKILL


def is_stopped(process) -> bool:
    """Whether SIGSTOP or the like has suspended it. False where /proc is missing."""
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def available_memory() -> int:
    """In bytes. OSError where /proc is missing."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


class Spare:
    """At most one worker that waits to be used."""

    def __init__(self):
        self.ours = self.process = None  # our end of its socket

    def prepare(self) -> None:
        """Start a spare if there is none. If it cannot be started, the next worker just takes longer."""
        with contextlib.suppress(OSError):
            if self.process is None and available_memory() > MIN_MEMORY:
                self.start(module="spare_worker")

    def start(self, *arguments: str, **options) -> None:
        """arguments: the device, if the worker may use it at once, as its model is loaded next"""
        self.ours, self.process = with_socket(start_module, *arguments, **options)
        self.started_at = time.monotonic()

    def wake(self, device: str | None) -> None:
        """Let it start to use the device: the worker that it replaces is ending."""
        if self.process:
            with contextlib.suppress(OSError):  # it has ended, `take` notices
                self.ours.send(pack({"op": "wake", "device": device}), socket.MSG_DONTWAIT)

    def take(self) -> tuple[socket.socket, subprocess.Popen] | None:
        """Hand its socket and its process over to the caller. None: no spare can be used."""
        if self.process is None:
            return None
        ours, process = self.ours, self.process
        if not self.can_be_used():
            self.close()
            return None
        self.ours = self.process = None
        return ours, process

    def can_be_used(self) -> bool:
        """Whether it lives, and has imported what it needs or may still be about to."""
        if self.process.poll() is not None or is_stopped(self.process):
            return False
        try:
            return bool(self.ours.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))  # it says when it has
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
