"""A worker that is started in advance and waits for its model. Run as a module, this is that worker.

The imports of a worker take long and need nothing from the server, so the first worker is started before the server's
own imports. When its imports are done, a spare worker is started. It does the same imports, then waits for its first
message without using the GPU, and replaces the next worker that ends. It takes about 0.5 GiB of memory and, like all
workers, ends when its socket is closed. All models share one spare.

This module imports nothing that takes long.
"""

import contextlib
import socket
import subprocess
import time

from qwen3_tts_cuda_graphs.serving.child_process import is_stopped, start_module, with_socket
from qwen3_tts_cuda_graphs.serving.messages import pack

MIN_MEMORY = 4 * 2**30  # bytes that must be available to start a spare
SECONDS_TO_IMPORT = 120.0  # after which a spare is considered stuck


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
                self.start("spare_worker")

    def start(self, module: str, *arguments: str) -> None:
        """arguments: the device, for a worker that loads its model right after its imports"""
        self.ours, self.process = with_socket(start_module, *arguments, module=module)
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


if __name__ == "__main__":
    from qwen3_tts_cuda_graphs.serving.worker import main

    main()
