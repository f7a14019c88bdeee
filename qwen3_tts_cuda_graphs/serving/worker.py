"""The process of one model, run with the descriptor of a socket. The server starts it, and again when it has ended.

    reader          what the server asks for             -> the engine
    engine's own    prompts, frames, delivery            -> the socket
    writer          what the socket does not take at once
    main            loads; then every BEAT seconds: is the engine alive; a sign of life

It ends when the socket is closed, also while it loads: the server is gone. It ends itself when the engine has stopped,
or after an error that leaves CUDA unusable, and the server starts another one. SIGTERM drains it, unless the server
was sent SIGTERM, too, as systemd does: then the server drains, and the worker stays as long as it is needed.
"""

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable

from qwen3_tts_cuda_graphs.common.scripts import cli_errors, heavy_imports
from qwen3_tts_cuda_graphs.serving.errors import log, log_to_stderr
from qwen3_tts_cuda_graphs.serving.messages import Unpacker, pack

BEAT = 0.25  # seconds
BEATS_PER_SIGN = 4
SECONDS_TO_SAY_WHY = 2.0


class ServerConnection:
    """The socket, with a thread that reads, and one that writes what it does not take at once."""

    def __init__(self, socket: socket.socket, on_close: Callable[[], None]):
        self.socket = socket
        self.on_close = on_close
        self.inbox = queue.SimpleQueue()
        self.take = lambda *message: self.inbox.put(message)  # until the model is loaded
        self.outbox = []  # packed messages
        self.backlog = bytearray()  # what the socket has not taken
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
                    self.take(*message)
        except OSError:
            pass
        except BaseException:
            log.exception("the server's message cannot be read")
        self.on_close()

    def send(self, payload: bytes = b"", **header) -> None:
        self.add(payload, **header)
        self.flush()

    def add(self, payload: bytes = b"", **header) -> None:
        """Keep it for the next `flush`: the audio of all streams that one pass has made goes into one write."""
        message = pack(header, payload)
        with self.changed:
            self.outbox.append(message)

    def flush(self) -> None:
        """Never blocks. Mostly this thread writes: to wake another one takes long where the cores are busy."""
        with self.changed:
            data = b"".join(self.outbox)
            self.outbox.clear()
            if data and not self.backlog:
                try:
                    data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the reader notices, too
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
        """Close the socket when all has been written."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()
        self.writer.join(SECONDS_TO_SAY_WHY)
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()


class Worker:
    def __init__(self, socket: socket.socket, on_close: Callable[[], None] | None = None):
        """on_close: called when the server has gone; without it, `run` returns"""
        self.host = None
        self.over = threading.Event()
        self.why = ""  # the reason why it has stopped
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
        spec, _ = self.next_message("load")
        with heavy_imports(spec["device"]):
            from qwen3_tts_cuda_graphs.common.loading import model_errors
            from qwen3_tts_cuda_graphs.serving.engine_host import EngineHost
        with model_errors():
            host = EngineHost(spec, self.connection, self.stop)
            self.connection.send(type="loaded")
            begin, _ = self.next_message("begin")
            host.begin(begin["rows"], begin["models"])
        self.host = host
        self.beats = 0
        self.connection.take = host.take
        self.connection.send(type="ready", **host.card())

    def next_message(self, op: str) -> tuple[dict, bytes]:
        """While nothing is loaded, the server sends messages in a known order."""
        while not self.over.is_set():
            try:
                message = self.connection.inbox.get(timeout=1)
            except queue.Empty:
                continue
            if message[0]["op"] != op:
                raise ValueError(f"{op} should have come, not {message[0]['op']}")
            return message
        raise OSError("the server has gone")

    def stop(self, why: str) -> None:
        """End soon, so that the server starts another worker. May be called in any thread."""
        self.why = self.why or why
        self.over.set()

    def beat(self) -> None:
        self.host.look_after_engine()
        if self.is_draining and not self.host.stays:
            if not self.host.is_draining:
                self.host.is_draining = True
                self.connection.send(type="draining")
            elif not (self.host.listeners or self.host.unfinished):
                self.over.set()
        if self.beats % BEATS_PER_SIGN == 0:
            self.connection.send(type="beat", memory=resident_bytes())
        self.beats += 1

    def drain(self, *_) -> None:
        self.is_draining = True


def resident_bytes() -> int:
    """Memory of this process, 0 where /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, too, which then closes the socket
    inherited = socket.socket(fileno=int(sys.argv[1]))
    inherited.set_inheritable(False)  # not to a compiler: it must not stay open
    with cli_errors():
        log_to_stderr()
        worker = Worker(inherited, on_close=lambda: os._exit(0))
        signal.signal(signal.SIGTERM, worker.drain)
        worker.run()
    sys.stderr.flush()
    os._exit(1 if worker.why else 0)  # torch need not tidy up


if __name__ == "__main__":
    main()
