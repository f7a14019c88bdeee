"""uvicorn with the server's limits, and with those that it lacks: on a request's head, and on unread audio.

The number of connections is limited in guard.py: uvicorn's own limit answers in plain text, /health too.
"""

import logging
import math
import re
import socket
import struct

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from serving.errors import log
from serving.settings import Settings

SPARE_CONNECTIONS = 256  # beyond the limit, which get a 503 rather than nothing
MAX_HEAD_BYTES = 1 << 16
MAX_FRAGMENTS = 1 << 14  # of a WebSocket's message; each takes memory, however short it is
MAX_UNSENT = 1 << 20  # bytes to a WebSocket; audio waits for its client before
OTHER_UPGRADE = re.compile(rb"\r\nupgrade:(?![ \t]*websocket)[^\r\n]*(?=\r\n)", re.IGNORECASE)  # a whole line
NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n"
    b"this is not the handshake of a WebSocket, or its headers are too long or too many\n"
)
SECONDS_TO_CLOSE = 5  # for connections to close when the server ends


def uvicorn_config(app: Starlette, settings: Settings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=TimedHttpProtocol,
        ws=TimedWebSocketProtocol,
        ws_max_size=settings.max_body,
        ws_per_message_deflate=False,  # audio does not compress
        ws_ping_timeout=None,  # the answer to a ping waits behind unread audio, and that has a limit of its own
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # nothing here asks for the client's address
    )
    config.settings = settings
    logging.getLogger("uvicorn.error").addFilter(is_news)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of forms that cannot be parsed
    return config


def is_news(record: logging.LogRecord) -> bool:
    """uvicorn logs each WebSocket that is refused with an HTTP response, and each request that cannot be parsed: the
    client's mistakes."""
    return record.msg not in (
        "ASGI callable returned without completing handshake.",
        "Invalid HTTP request received.",
        "Invalid UTF-8 sequence received from client.",
        "Unsupported upgrade request.",
    )


class Unread:
    """Aborts a connection whose client does not read: asyncio's close() would wait for it without a limit.

    Writing is paused whenever something is unsent, so one timer, which runs only then, covers all of it.
    """

    unread_timer = None

    def connection_made(self, transport) -> None:
        transport.set_write_buffer_limits(0)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_timer = self.loop.call_later(self.config.settings.send_seconds, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_unread_timer()

    def connection_lost(self, error) -> None:
        self.stop_unread_timer()
        super().connection_lost(error)

    def stop_unread_timer(self) -> None:
        if self.unread_timer:
            self.unread_timer.cancel()
            self.unread_timer = None

    def abort(self) -> None:
        if self.transport.get_protocol() is self:  # it is another one after an upgrade to a WebSocket
            log.warning("a client has not read for %g s: its connection was closed", self.config.settings.send_seconds)
            self.transport.abort()


def without_upgrade(data: bytes) -> bytes:
    """A head without an offer of anything but a WebSocket, as Java's client makes with each request (h2c): the parser
    would take what follows, the body, for that protocol."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return OTHER_UPGRADE.sub(b"", head + end) + rest


class TimedWebSocketProtocol(Unread, WebSocketsSansIOProtocol):
    unfinished = 0  # bytes of a message whose end has not arrived

    def data_received(self, data: bytes) -> None:
        """Also gives a client up that sends pings and reads no answers, or messages without an end. The first data is
        the handshake: what is wrong with it, websockets leaves unsaid."""
        super().data_received(data)
        if not self.handshake_initiated:
            self.transport.write(NO_HANDSHAKE)
            self.transport.close()
        self.unfinished = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        if self.transport.get_write_buffer_size() > MAX_UNSENT or self.is_too_much():
            log.warning("a WebSocket sends more than the server holds: its connection was closed")
            self.transport.abort()

    def shutdown(self) -> None:
        """uvicorn's own fails if the client has begun to close the connection, and the server's shutdown with it."""
        try:
            super().shutdown()
        except InvalidState:
            self.transport.abort()  # it wants no more

    def handle_pong(self, event) -> None:
        """After an answer that came late, uvicorn would send pings without a pause."""
        super().handle_pong(event)
        self.last_ping_rtt = 0.0

    def is_too_much(self) -> bool:
        """Whether this message is large, and all of them together are more than the server holds."""
        if len(self.frames) > MAX_FRAGMENTS:
            return True
        if self.unfinished < MAX_HEAD_BYTES:
            return False
        total = sum(getattr(connection, "unfinished", 0) for connection in self.connections)
        return total > self.config.settings.max_held


class TimedHttpProtocol(Unread, HttpToolsProtocol):
    """Also closes a connection on which the head of a request does not arrive in time, or is too long, and one with
    trailers or chunk extensions without an end, which uvicorn and its parser would take.

    A request that comes before the answer to the last one (pipelining) is not read; the connection is closed after that
    answer. uvicorn would keep any number of them, and no longer notice that the client of the running one has left.
    """

    is_deaf = False
    timer = None
    bare_bytes = 0  # received since the last byte of a body: of a head, of trailers, of chunk extensions

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.app_state = self.app_state | {"connection": self}  # in the scope of each request
        if len(self.connections) > self.config.settings.max_connections + SPARE_CONNECTIONS:
            transport.abort()
            return
        self.watch()

    def has_body(self) -> bool:
        """Whether all of the present request has arrived."""
        return not self.cycle.more_body

    def send_plain(self, is_over: bool = False) -> None:
        """Send a response without a length as HTTP/1.0 has it, which knows no chunks: it ends with the connection.
        uvicorn would send chunks."""
        self.cycle.chunked_encoding = False
        self.cycle.expected_content_length = 0 if is_over else math.inf

    def break_off(self) -> None:
        """End a response before it is complete, so that the client notices: its last chunk is missing. HTTP/1.0 has no
        chunks, and only a reset tells a response that was broken off from one that has ended."""
        if self.scope["http_version"] == "1.0":
            reset = struct.pack("ii", 1, 0)  # linger for 0 s
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.transport.abort()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        is_head = self.is_waiting() and (self.cycle is None or self.has_body())  # not a body that nobody has read
        self.bare_bytes += len(data)
        super().data_received(without_upgrade(data) if is_head else data)
        if self.bare_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if is_head:
                self.send_400_response("The head of the request is too long.")
            else:
                self.transport.abort()
        self.watch()

    def on_message_begin(self) -> None:
        if self.cycle and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self.is_deaf = True
            raise ValueError("pipelined")  # ends the parser
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.bare_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.bare_bytes = 0
        super().on_message_complete()
        if self.cycle:
            self.cycle.more_body = False  # also of a body that nobody has read

    def send_400_response(self, message: str) -> None:
        if not self.is_deaf:
            super().send_400_response(message)

    def connection_lost(self, error) -> None:
        super().connection_lost(error)
        self.stop()

    def is_waiting(self) -> bool:
        """For a head, or for the rest of it."""
        is_open = self in self.connections  # not after an upgrade to a WebSocket
        return is_open and (self.cycle is None or self.cycle.response_complete)

    def watch(self) -> None:
        if not self.is_waiting():
            self.stop()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.config.settings.body_seconds, self.give_up)

    def stop(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None

    def give_up(self) -> None:
        self.timer = None
        if self.is_waiting():
            self.transport.close()
