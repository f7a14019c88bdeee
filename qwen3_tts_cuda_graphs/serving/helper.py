"""Helpers: processes that encode and decode audio (encoders.py, recordings.py), since native code may take long or
crash. The server sends requests over a socket, and a helper answers them in order. It ends when the socket is closed,
even if the server was killed.
"""

import asyncio
import collections
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

from qwen3_tts_cuda_graphs.serving.child_process import start_module, with_socket
from qwen3_tts_cuda_graphs.serving.messages import Message, Unpacker, pack


class HelperEnded(Exception):
    """A request will not be answered."""


class Helper(asyncio.Protocol):
    """The server's end of the socket."""

    def __init__(self, popen, seconds: float):
        """seconds: time limit of a request, including the start of the process and the requests before it"""
        self.popen = popen
        self.seconds = seconds
        self.unpacker = Unpacker()
        self.awaited = collections.deque()  # futures of the answers, in order
        self.streams = 0  # how many streams it encodes
        self.is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for answer in self.unpacker.feed(data):
            future = self.awaited.popleft()
            if not future.done():
                future.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        self.popen.kill()
        asyncio.get_running_loop().run_in_executor(None, self.popen.wait)
        for future in self.awaited:
            if not future.done():
                future.set_exception(HelperEnded())

    def tell(self, header: dict, payload: bytes = b"") -> None:
        if not self.is_over:
            self.transport.write(pack(header, payload))

    async def ask(self, header: dict, payload: bytes = b"") -> Message:
        if self.is_over:
            raise HelperEnded
        future = asyncio.get_running_loop().create_future()
        self.awaited.append(future)
        self.tell(header, payload)
        try:
            async with asyncio.timeout(self.seconds):
                return await future
        except TimeoutError:  # the helper hangs
            self.close()
            raise HelperEnded from None

    def close(self) -> None:
        self.transport.abort()  # which ends the process


async def start_helper(module: str, seconds: float, **options) -> Helper:
    """options: of Popen"""
    ours, popen = with_socket(start_module, module=module, **options)
    _, helper = await asyncio.get_running_loop().create_connection(lambda: Helper(popen, seconds), sock=ours)
    return helper


def answer_questions(answers_to: Callable[[dict, bytes], Iterator[bytes]]) -> None:
    """The main loop of a helper, until the socket is closed. `answers_to` is a generator: the code after its `yield`
    runs when the answer has been sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    server = socket.socket(fileno=int(sys.argv[1]))
    unpacker = Unpacker()
    with contextlib.suppress(ConnectionError):  # the server is gone and has not read the last answer
        while data := server.recv(1 << 18):
            for header, payload in unpacker.feed(data):
                for answer in answers_to(header, payload):
                    server.sendall(answer)
