"""uvicorn's connections, with limits that uvicorn lacks on what one client may send at once, and leave unread.

    LimitedConnection    reads little at a time; aborts when what was sent is not read
    HttpConnection       the head of a request must arrive in time and be short; idle ones give way to new ones
    WebSocketConnection  frames in a second, fragments of a message, what all unfinished messages take

They override methods that asyncio and uvicorn's protocols call. The number of connections is limited in guard.py:
uvicorn's own limit answers in plain text, /health too.
"""

import asyncio
import fcntl
import math
import re
import socket
import struct
import sys
import termios

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from qwen3_tts_cuda_graphs.serving.errors import log

MAX_HEAD_BYTES = 1 << 16
SECONDS_TO_BEGIN = 1.0  # a connection that has waited longer for a request gives way to a new one
HEAD_BYTES, BODY_BYTES, FRAME_BYTES = 1 << 17, 1 << 12, 1 << 11  # in one read; those of a WebSocket are 341 frames
# Frames of a WebSocket beyond these wait in its client's socket. The burst is a whole reply, token by token.
FRAMES_PER_SECOND = 1000
BURST = 5000
MAX_FRAGMENTS = 1 << 13  # of a WebSocket's message; each takes memory, however short it is
MAX_UNSENT = 1 << 20  # bytes of small messages to a WebSocket; audio waits for its client long before
OTHER_UPGRADE = re.compile(rb"\r\nupgrade:(?![ \t]*websocket)[^\r\n]*(?=\r\n)", re.IGNORECASE)  # a whole line
NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n"
    b"this is not the handshake of a WebSocket, or its headers are too long or too many\n"
)


class LimitedConnection(asyncio.BufferedProtocol):
    """Reads little at a time, as the parsers handle all of it at once: others get their turn in between.

    Aborts a connection whose client does not read: asyncio's close() would wait for it without a limit. Writing is
    paused whenever something is unsent, so one timer, which runs only then, covers all of it. A slow client may read
    for longer than that before the system takes more.
    """

    buffer = None  # of a read
    unread_timer = None

    def connection_made(self, transport) -> None:
        self.app_state = self.app_state | {"connection": self}  # in the scope of each request
        transport.set_write_buffer_limits(0)
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        self.buffer = bytearray(self.read_size())
        return self.buffer

    def buffer_updated(self, size: int) -> None:
        data, self.buffer = bytes(self.buffer[:size]), None  # idle connections keep none
        self.data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.wait_for_client()

    def wait_for_client(self) -> None:
        unread = self.unread()
        self.unread_timer = self.loop.call_later(self.config.settings.send_seconds, self.check_client, unread)

    def check_client(self, before: int) -> None:
        if self.transport.get_protocol() is not self:  # it is another one after an upgrade to a WebSocket
            return
        if self.unread() < before:
            self.wait_for_client()
        else:
            log.warning("a client has not read for %g s: its connection was closed", self.config.settings.send_seconds)
            self.transport.abort()

    def unread(self) -> int:
        """Bytes that the client's system has not received."""
        in_socket = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_socket, sys.byteorder)

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


def without_upgrade(data: bytes) -> bytes:
    """A request's head without its Upgrade headers, except to a WebSocket. Java's client offers h2c with each request,
    and the parser would take the body that follows for that protocol."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return OTHER_UPGRADE.sub(b"", head + end) + rest


class WebSocketConnection(LimitedConnection, WebSocketsSansIOProtocol):
    """Also slows down a client that sends many frames, and closes the connection of one that sends messages without an
    end, or pings whose answers it does not read."""

    unfinished = 0  # bytes of a message whose end has not arrived
    paid_until = -math.inf  # when the last frame would have come at FRAMES_PER_SECOND, as in a leaky bucket
    is_slowed = False
    heartbeat = -math.inf  # when the client last sent a ping, or a pong that nobody asked for

    def read_size(self) -> int:
        return FRAME_BYTES

    def data_received(self, data: bytes) -> None:
        """The first data is the handshake. If it is wrong, websockets sends no response."""
        super().data_received(data)
        if not self.handshake_initiated:
            self.transport.write(NO_HANDSHAKE)
            self.transport.close()
        self.set_unfinished(len(self.conn.reader.buffer) + (self.conn.current_size or 0))
        if self.transport.get_write_buffer_size() > MAX_UNSENT or self.holds_too_much():
            log.warning("a WebSocket sends more than the server holds: its connection was closed")
            self.transport.abort()

    def set_unfinished(self, unfinished: int) -> None:
        self.config.unfinished += unfinished - self.unfinished
        self.unfinished = unfinished

    def holds_too_much(self) -> bool:
        """Whether its unfinished message has too many fragments, or is large while all of them fill the memory."""
        if len(self.frames) > MAX_FRAGMENTS:
            return True
        return self.unfinished >= MAX_HEAD_BYTES and self.config.unfinished > self.config.settings.max_held

    def connection_lost(self, error) -> None:
        self.set_unfinished(0)
        super().connection_lost(error)

    def handle_events(self) -> None:
        now = self.loop.time()
        frames = len(self.conn.events)
        self.paid_until = max(self.paid_until, now - BURST / FRAMES_PER_SECOND) + frames / FRAMES_PER_SECOND
        if self.paid_until > now and not self.is_slowed:
            self.is_slowed = True
            self.transport.pause_reading()
            self.loop.call_later(self.paid_until - now, self.end_slowing)
        super().handle_events()

    def end_slowing(self) -> None:
        self.is_slowed = False
        self.resume_reading()

    async def receive(self) -> dict:
        """As uvicorn's, but others get their turn before each message."""
        await asyncio.sleep(0)
        message = await self.queue.get()
        if self.queue.empty():
            self.read_paused = False
            self.resume_reading()
        return message

    def resume_reading(self) -> None:
        if not self.read_paused and not self.is_slowed:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """uvicorn's own fails if the client has begun to close the connection, and the server's shutdown with it."""
        try:
            super().shutdown()
        except InvalidState:
            self.transport.abort()  # it wants no more

    def handle_ping(self) -> None:
        self.heartbeat = self.loop.time()
        super().handle_ping()

    def handle_pong(self, event) -> None:
        """After an answer that came late, uvicorn would send pings without a pause."""
        if bytes(event.data) != self.pending_ping_payload:
            self.heartbeat = self.loop.time()
        super().handle_pong(event)
        self.last_ping_rtt = 0.0


class HttpConnection(LimitedConnection, HttpToolsProtocol):
    """Also closes a connection on which the head of a request does not arrive in time, or is too long, and one with
    trailers or chunk extensions without an end, which uvicorn and its parser would take.

    A request that comes before the answer to the last one (pipelining) is not read; the connection is closed after that
    answer. uvicorn would keep any number of them, and no longer notice that the client of the running one has left.
    """

    ignores_input = False
    head_timer = None
    bare_bytes = 0  # received since the last byte of a body: of a head, of trailers, of chunk extensions

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.active_at = self.loop.time()
        if not self.make_room():
            transport.abort()
            return
        self.update_head_timer()

    def make_room(self) -> bool:
        """Close the connections that have been idle for longest. Returns whether there is room for this one."""
        most = self.config.settings.max_connections
        if len(self.connections) <= most:
            return True
        open_ones = [other for other in self.connections if not other.transport.is_closing()]
        idle = [other for other in open_ones if isinstance(other, HttpConnection) and other.is_idle()]
        idle.sort(key=lambda other: other.active_at)
        giving_way = idle[: len(open_ones) - most]
        for other in giving_way:
            other.transport.close()
        refused = max(most // 4, 1)  # so many more are accepted, to get a 503 rather than nothing
        return len(open_ones) - len(giving_way) <= most + refused

    def is_idle(self) -> bool:
        return self.is_waiting() and self.loop.time() - self.active_at > SECONDS_TO_BEGIN

    def read_size(self) -> int:
        """Little of a body, whose chunks may have a byte each. With a head, as much as possible: data that is unread
        when the connection is closed would reset it, and the client would lose its answer."""
        return HEAD_BYTES if self.ignores_input or self.is_waiting() else BODY_BYTES

    def data_received(self, data: bytes) -> None:
        if self.ignores_input:
            return
        is_unread_body = self.cycle is not None and not self.has_whole_request()
        is_head = self.is_waiting() and not is_unread_body
        self.active_at = self.loop.time()
        self.bare_bytes += len(data)
        super().data_received(without_upgrade(data) if is_head else data)
        if self.bare_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if is_head:
                self.send_400_response("The head of the request is too long.")
            else:
                self.transport.abort()
        self.update_head_timer()

    def on_message_begin(self) -> None:
        if self.cycle and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self.ignores_input = True
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

    def on_response_complete(self) -> None:
        self.active_at = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, message: str) -> None:
        if not self.ignores_input:
            super().send_400_response(message)

    def connection_lost(self, error) -> None:
        super().connection_lost(error)
        self.stop_head_timer()

    def is_waiting(self) -> bool:
        """Whether it waits for a request's head, or for the rest of one."""
        is_open = self in self.connections and not self.transport.is_closing()  # not after an upgrade to a WebSocket
        return is_open and (self.cycle is None or self.cycle.response_complete)

    def update_head_timer(self) -> None:
        if not self.is_waiting():
            self.stop_head_timer()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(self.config.settings.body_seconds, self.close_if_waiting)

    def stop_head_timer(self) -> None:
        if self.head_timer:
            self.head_timer.cancel()
            self.head_timer = None

    def close_if_waiting(self) -> None:
        self.head_timer = None
        if self.is_waiting():
            self.transport.close()

    # ---- What the handlers of a request ask for

    def has_whole_request(self) -> bool:
        """Whether the body of the present request has arrived to its end."""
        return not self.cycle.more_body

    def send_unchunked(self, is_over: bool = False) -> None:
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
