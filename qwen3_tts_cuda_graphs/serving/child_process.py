"""Processes of the server, each with a socket to it: workers, and the helpers that encode and decode.

This module itself imports nothing that takes long: the first worker is started before the server's own imports.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


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
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}  # its pool would take time to start
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
