"""uvicorn with the server's limits, and with a time limit on a request's head, which it lacks.

The number of connections in use is limited in guard.py: uvicorn's own limit answers in plain text, /health too.
"""

import logging

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.settings import Settings

SECONDS_TO_CLOSE = 5  # for connections to close when the server ends


def uvicorn_config(app: FastAPI, settings: Settings, **options) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=TimedH11Protocol,
        ws="websockets-sansio",
        ws_max_size=settings.max_body,
        ws_per_message_deflate=False,  # audio does not compress
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        log_level="warning",
        server_header=False,
        **options,
    )
    config.head_seconds = settings.body_seconds
    logging.getLogger("uvicorn.error").addFilter(is_news)
    return config


def is_news(record: logging.LogRecord) -> bool:
    """uvicorn logs an error for each WebSocket that is refused with an HTTP response, which is the client's mistake,
    and for each response that ends early, for which server.py logs the reason."""
    return record.msg not in (
        "ASGI callable returned without completing handshake.",
        "ASGI callable returned without completing response.",
    )


class TimedH11Protocol(H11Protocol):
    """Closes a connection on which the head of a request does not arrive in time."""

    timer = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

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
            self.timer = self.loop.call_later(self.config.head_seconds, self.give_up)

    def stop(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None

    def give_up(self) -> None:
        self.timer = None
        if self.is_waiting():
            self.transport.close()
