"""Clients' recordings are decoded in processes of their own: a native decoder that crashes, hangs, or writes to stderr
over somebody's file harms nobody else. Run as a module, this is such a process; messages.py has its messages."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from qwen3_tts_cuda_graphs.common.audio_files import RECORDINGS, Chunk
from qwen3_tts_cuda_graphs.serving.audio_formats import decode_recording
from qwen3_tts_cuda_graphs.serving.engine_process import start_python
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error
from qwen3_tts_cuda_graphs.serving.messages import LENGTHS, Message, Unpacker, pack
from qwen3_tts_cuda_graphs.serving.settings import Settings

SECONDS = 30  # for a recording, and for the start of a process
MAX_MEMORY = 1 << 30  # bytes of address space; the libraries take a quarter, and a file may ask for any amount


class Decoders:
    """Processes that decode, for several threads. One that is idle is kept for the next recording."""

    def __init__(self):
        self.idle = []
        self.is_closed = False

    def decode(self, data: bytes, settings: Settings, name: str) -> Chunk:
        """A client's recording as mono samples. Blocks. name: the field that a mistake is in"""
        process = self.take()
        limits = dict(max_upload=settings.max_upload, max_reference_seconds=settings.max_reference_seconds)
        killer = threading.Timer(SECONDS, process.kill)
        killer.start()
        try:
            process.stdin.write(pack(dict(name=name, limits=limits), data))
            process.stdin.flush()
            header, samples = read_message(process.stdout.read)
        except (OSError, EOFError):
            end(process)
            problem = f"{name} cannot be decoded: give another recording, {RECORDINGS}"
            raise ApiError(problem, param=name) from None
        finally:
            killer.cancel()
        self.idle.append(process)
        if self.is_closed:
            self.close()
        if "error" in header:
            raise ApiError(header["error"], header["status"], name)
        return np.frombuffer(samples, np.float32), header["rate"]

    def take(self) -> subprocess.Popen:
        with contextlib.suppress(IndexError):
            while True:
                process = self.idle.pop()
                if process.poll() is None:
                    return process
                end(process)  # somebody has killed it
        try:
            return start_decoder()
        except OSError:  # without files or memory
            raise ApiError("no recording can be decoded now: try again later", 503, code="too_many") from None

    def close(self) -> None:
        self.is_closed = True
        while self.idle:
            end(self.idle.pop())


def start_decoder() -> subprocess.Popen:
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return start_python(f"{__package__}.recordings", **pipes)


def end(process: subprocess.Popen) -> None:
    process.kill()
    with contextlib.suppress(OSError), process:  # closes its pipes
        pass


def read_message(read: Callable[[int], bytes]) -> Message:
    unpacker = Unpacker()
    lengths = read(LENGTHS.size)
    if len(lengths) == LENGTHS.size:
        for message in unpacker.feed(lengths + read(sum(LENGTHS.unpack(lengths)))):
            return message
    raise EOFError


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until the server has closed the pipe, or is gone."""
    while True:
        try:
            header, data = read_message(requests.read)
        except EOFError:
            return
        signal.alarm(SECONDS)  # ends this process, whatever native code it is in
        try:
            samples, rate = decode_recording(data, Settings(**header["limits"]), header["name"])
            answer = pack(dict(rate=rate), samples.astype(np.float32).tobytes())
        except (ApiError, ValueError) as problem:  # any other ends this process
            error = as_api_error(problem)
            answer = pack(dict(error=error.message, status=error.status))
        signal.alarm(0)
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not an answer
    main(sys.stdin.buffer, answers)
