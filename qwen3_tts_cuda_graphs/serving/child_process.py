"""Starts and ends the server's child processes, each connected by a socket: workers and helpers.

This module imports nothing that takes long.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from qwen3_tts_cuda_graphs.common.quick_start import bytecode_environment


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
