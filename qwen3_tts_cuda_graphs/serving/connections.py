"""uvicorn's protocols, with limits that uvicorn lacks.

    LimitedConnection    reads in small pieces; aborts a connection whose client does not read
    HttpConnection       limits size and time of a request's head; closes idle connections to make room for new ones
    WebSocketConnection  limits frames per second, fragments per message, memory of unfinished messages

They override methods that asyncio and uvicorn call. The number of connections is limited in guard.py: uvicorn's own
limit answers in plain text, and applies to /health, too.
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
SECONDS_TO_BEGIN = 1.0  # a connection that has been idle for longer may be closed to make room for a new one
HEAD_BYTES, BODY_BYTES, FRAME_BYTES = 1 << 17, 1 << 12, 1 << 11  # per read; FRAME_BYTES are at most 341 frames
FRAMES_PER_SECOND = 1000  # of a WebSocket; further ones wait in the client's socket
BURST = 5000  # frames that are read without a limit: a whole reply of a language model, token by token
MAX_FRAGMENTS = 1 << 13  # of a message of a WebSocket; each takes memory, however short it is
MAX_UNSENT = 1 << 20  # bytes of small messages to a WebSocket, such as pongs; audio is paused long before
OTHER_UPGRADE = re.compile(rb"\r\nupgrade:(?![ \t]*websocket)[^\r\n]*(?=\r\n)", re.IGNORECASE)  # a whole line
NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n"
    b"this is not the handshake of a WebSocket, or its headers are too long or too many\n"
)


class LimitedConnection(asyncio.BufferedProtocol):
    """Reads in small pieces: the parsers process all of a piece at once, and other connections get their turn after it.

    Aborts a connection whose client does not read: asyncio's close() would wait for it without a limit. Writing is
    paused whenever data is unsent, so a timer that runs during a pause is enough. With a slow client the pause may
    outlast the timer, so the timer checks whether any data was received meanwhile.
    """

    buffer = None  # of the read in progress
    unread_timer = None

    def connection_made(self, transport) -> None:
        self.app_state = self.app_state | {"connection": self}  # becomes scope["state"] of each request
        transport.set_write_buffer_limits(0)
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        self.buffer = bytearray(self.read_size())
        return self.buffer

    def buffer_updated(self, size: int) -> None:
        data, self.buffer = bytes(self.buffer[:size]), None  # idle connections hold no buffer
        self.data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.wait_for_client()

    def wait_for_client(self) -> None:
        unread = self.unread()
        self.unread_timer = self.loop.call_later(self.config.settings.send_seconds, self.check_client, unread)

    def check_client(self, before: int) -> None:
        if self.transport.get_protocol() is not self:  # it was upgraded to a WebSocket
            return
        if self.unread() < before:
            self.wait_for_client()
        else:
            log.warning("a client has not read for %g s: its connection was closed", self.config.settings.send_seconds)
            self.transport.abort()

    def unread(self) -> int:
        """Bytes that the client's system has not acknowledged."""
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
    """A request's head without Upgrade headers other than for a WebSocket. Java's client offers h2c with each request,
    and the parser would then read the body as that protocol."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return OTHER_UPGRADE.sub(b"", head + end) + rest


class WebSocketConnection(LimitedConnection, WebSocketsSansIOProtocol):
    """Also throttles a client that sends many frames, and closes the connection of one that sends endless messages, or
    pings without reading the pongs."""

    unfinished = 0  # bytes of a message whose end has not arrived
    paid_until = -math.inf  # when the last frame would have arrived at FRAMES_PER_SECOND, as in a leaky bucket
    is_slowed = False
    heartbeat = -math.inf  # when the client last sent a ping or an unsolicited pong

    def read_size(self) -> int:
        return FRAME_BYTES

    def data_received(self, data: bytes) -> None:
        """The first data is the handshake. If it is invalid, websockets sends no response."""
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
        """Whether its unfinished message has too many fragments, or is large while those of all connections together
        exceed max_held."""
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
        """As uvicorn's, but other tasks get their turn before each message."""
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
        """uvicorn's own raises if the client has begun to close the connection, which would end the server's."""
        try:
            super().shutdown()
        except InvalidState:
            self.transport.abort()

    def handle_ping(self) -> None:
        self.heartbeat = self.loop.time()
        super().handle_ping()

    def handle_pong(self, event) -> None:
        """uvicorn reduces the ping interval by the round-trip time: after a late pong it would ping without pause."""
        if bytes(event.data) != self.pending_ping_payload:
            self.heartbeat = self.loop.time()
        super().handle_pong(event)
        self.last_ping_rtt = 0.0


class HttpConnection(LimitedConnection, HttpToolsProtocol):
    """Also closes a connection on which the head of a request is too long or does not arrive in time, or whose trailers
    or chunk extensions do not end; uvicorn and its parser accept all of these.

    A request that arrives before the previous one was answered (pipelining) is not read, and the connection is closed
    after that answer. uvicorn would queue any number of them, and not notice when the client disconnects.
    """

    ignores_input = False
    head_timer = None
    bare_bytes = 0  # received since the last byte of a body: a head, trailers, chunk extensions

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.active_at = self.loop.time()
        if not self.make_room():
            transport.abort()
            return
        self.update_head_timer()

    def make_room(self) -> bool:
        """Close the connections that have been idle the longest. Returns whether there is room for this one."""
        most = self.config.settings.max_connections
        if len(self.connections) <= most:
            return True
        open_ones = [other for other in self.connections if not other.transport.is_closing()]
        idle = [other for other in open_ones if isinstance(other, HttpConnection) and other.is_idle()]
        idle.sort(key=lambda other: other.active_at)
        closed = idle[: len(open_ones) - most]
        for other in closed:
            other.transport.close()
        refused = max(most // 4, 1)  # this many more are accepted and get a 503
        return len(open_ones) - len(closed) <= most + refused

    def is_idle(self) -> bool:
        return self.is_waiting() and self.loop.time() - self.active_at > SECONDS_TO_BEGIN

    def read_size(self) -> int:
        """Little of a body: its chunks may have one byte each. As much as possible of a head: a connection that is
        closed with unread data is reset, and the client would lose its answer."""
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
            raise ValueError("pipelined")  # stops the parser
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
            self.cycle.more_body = False  # even if the body was not read

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
        """Whether it waits for the head of a request, or for the rest of a head."""
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

    # ---- Called by the handlers of a request

    def has_whole_request(self) -> bool:
        """Whether the whole body of the current request has arrived."""
        return not self.cycle.more_body

    def send_unchunked(self, is_over: bool = False) -> None:
        """Send a response of unknown length over HTTP/1.0, which has no chunks: it ends when the connection is closed.
        uvicorn would send chunks. is_over: before the end of the body"""
        self.cycle.chunked_encoding = False
        self.cycle.expected_content_length = 0 if is_over else math.inf

    def break_off(self) -> None:
        """Close the connection in the middle of a response, so that the client notices: the last chunk is missing.
        HTTP/1.0 has no chunks, and only a reset distinguishes an incomplete response from a complete one."""
        if self.scope["http_version"] == "1.0":
            reset = struct.pack("ii", 1, 0)  # linger for 0 s
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.transport.abort()
        self.transport.close()
