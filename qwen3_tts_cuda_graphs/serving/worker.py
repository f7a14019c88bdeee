"""The process of one model. It communicates with the server through a socket, whose descriptor is its argument.

Threads:
    reader          passes the server's messages to the engine
    engine's own    prompts, frames, and writing the audio to the socket
    writer          writes what the socket did not accept at once
    main            imports and loads; then checks the engine and sends a heartbeat every BEAT seconds

It ends when the socket is closed, even while loading, since the server is gone then. When the engine has stopped, or
after an error that makes CUDA unusable, it ends by itself and the server starts another worker. When it is sent
SIGTERM, it tells the server, which closes the socket once all streams of the worker have ended.
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable

from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports, start_cuda
from qwen3_tts_cuda_graphs.serving.errors import log, log_to_stderr
from qwen3_tts_cuda_graphs.serving.messages import Unpacker, pack

BEAT = 0.25  # seconds
SECONDS_TO_SAY_WHY = 2.0


class ServerConnection:
    """The socket, with a thread that reads, and one that writes what the socket did not accept at once."""

    def __init__(self, socket: socket.socket, on_close: Callable[[], None]):
        self.socket = socket
        self.on_close = on_close
        self.inbox = queue.SimpleQueue()
        self.on_message = lambda *message: self.inbox.put(message)  # until the model is loaded
        self.outbox = []  # packed messages for the next `flush`
        self.backlog = bytearray()  # data that the socket has not accepted
        self.changed = threading.Condition()
        self.is_closing = False
        self.reader = threading.Thread(target=self.read, name="worker reads", daemon=True)
        self.writer = threading.Thread(target=self.write_backlog, name="worker writes", daemon=True)
        self.reader.start()
        self.writer.start()

    def read(self) -> None:
        unpacker = Unpacker()
        try:
            while data := self.socket.recv(1 << 16):
                for message in unpacker.feed(data):
                    self.on_message(*message)
        except OSError:
            pass
        except BaseException:
            log.exception("the server's message cannot be read")
        self.on_close()

    def send(self, payload: bytes = b"", **header) -> None:
        self.add(payload, **header)
        self.flush()

    def add(self, payload: bytes = b"", **header) -> None:
        """Add a message to the next `flush`: the audio of all streams from one pass is sent with one write."""
        message = pack(header, payload)
        with self.changed:
            self.outbox.append(message)

    def flush(self) -> None:
        """Send all added messages without blocking. Usually the calling thread writes them: waking the writer takes
        long when the cores are busy."""
        with self.changed:
            data = b"".join(self.outbox)
            self.outbox.clear()
            if data and not self.backlog:
                try:
                    data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the reader handles the end of the connection
                    return
            if data:
                self.backlog += data
                self.changed.notify()

    def write_backlog(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.backlog or self.is_closing)
                data = bytes(self.backlog)
            if not data:
                return
            try:
                sent = self.socket.send(data)
            except OSError:
                return
            with self.changed:
                del self.backlog[:sent]

    def close(self) -> None:
        """Close the socket after writing the backlog."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()
        self.writer.join(SECONDS_TO_SAY_WHY)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Worker:
    def __init__(self, socket: socket.socket, on_close: Callable[[], None] | None = None, device: str = "cpu"):
        """on_close: called when the server is gone; None: `run` returns then
        device: CUDA may be initialized on it while torch is imported; "cpu" for a spare, which does not use the GPU
        """
        self.device = device
        self.host = None
        self.over = threading.Event()
        self.why = ""  # why it stopped
        self.is_draining = False
        self.connection = ServerConnection(socket, on_close or self.over.set)

    def run(self) -> None:
        try:
            self.load()
            while not self.over.wait(BEAT):
                self.beat()
        except BaseException as error:
            if not isinstance(error, (ValueError, OSError, ImportError)):
                log.exception("the worker has failed")
            self.stop(" ".join(f"{error}".split()) or type(error).__name__)
        finally:
            if self.why:
                self.connection.send(type="stopped", message=self.why)
            self.connection.close()

    def load(self) -> None:
        with heavy_imports(self.device):
            from qwen3_tts_cuda_graphs.common.loading import model_errors
            from qwen3_tts_cuda_graphs.serving.engine_host import EngineHost
        self.connection.send(type="imported")
        spec = self.next_message("load")
        self.is_draining = False  # a SIGTERM to a spare is ignored: it has no streams to finish
        show_as_worker()
        with model_errors():
            host = EngineHost(spec, self.connection, self.stop)
            self.connection.send(type="loaded")
            begin = self.next_message("begin")
            ready = host.begin(begin["rows"], begin["models"])
        self.host = host
        self.connection.on_message = host.handle
        self.connection.send(type="ready", **ready)

    def start_device(self, name: str | None) -> None:
        """Initialize CUDA in advance, while the previous worker is ending."""
        import torch

        if not (name or "").startswith("cpu"):
            threading.Thread(target=start_cuda, args=[torch, name or "cuda"], daemon=True).start()

    def next_message(self, op: str) -> dict:
        """Until the model is loaded, the server sends messages in a known order; a spare may receive `wake` first."""
        while not self.over.is_set():
            with contextlib.suppress(queue.Empty):
                header, _ = self.connection.inbox.get(timeout=1)
                if header["op"] == op:
                    return header
                self.start_device(header["device"])
        raise OSError("the server has gone")

    def stop(self, why: str) -> None:
        """End soon, so that the server starts another worker. Thread-safe."""
        self.why = self.why or why
        self.over.set()

    def beat(self) -> None:
        self.host.look_after_engine()
        self.connection.send(type="beat")
        if self.is_draining:
            self.connection.send(type="draining")

    def drain(self, *_) -> None:
        """Signal handler. The message is sent with the next heartbeat, as sending takes a lock."""
        self.is_draining = True


def show_as_worker() -> None:
    """Let `ps` show a spare under the name of a worker, by overwriting the arguments in this process's memory."""
    try:
        with open("/proc/self/stat") as file:
            begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    except (OSError, ValueError):
        return
    before = ctypes.string_at(begin, end - begin)
    after = before.replace(b".spare_worker\0", b".worker\0").ljust(len(before), b"\0")
    ctypes.memmove(begin, after, len(before))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the socket
    inherited = socket.socket(fileno=int(sys.argv[1]))
    inherited.set_inheritable(False)  # a compiler started from here must not keep it open
    with cli_errors():
        log_to_stderr()
        worker = Worker(inherited, lambda: os._exit(0), *sys.argv[2:])
        signal.signal(signal.SIGTERM, worker.drain)
        worker.run()
    sys.stderr.flush()
    os._exit(1 if worker.why else 0)  # without the cleanup of torch


if __name__ == "__main__":
    main()
