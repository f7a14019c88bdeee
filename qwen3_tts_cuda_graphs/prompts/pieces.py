"""Reads the pieces of an arriving text from an iterator.

Each piece is passed to a function, then END or the error of the iterator. For an engine that is `Listener.push`. A
stream without an engine has a `TextReader`, which hands the pieces to the thread that speaks the text.
"""

import asyncio
import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Future

END = None
MAX_PIECES_AHEAD = 256  # pieces that may have been read from the iterator and not taken by the stream

Push = Callable[[str | BaseException | None], Future]  # a piece, END or an error -> whether another one is wanted


def start_reader(pieces: Iterable[str], push: Push) -> None:
    """Read an iterator in a thread of its own. If it never returns, the thread is abandoned."""
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(read_pieces, pieces, push), name="text reader", daemon=True).start()


def read_pieces(pieces: Iterable[str], push: Push) -> None:
    """Push each piece, then END or the error of the iterator."""
    last = END
    try:
        for piece in pieces:
            if not push(piece).result():
                return
    except BaseException as error:  # raised again where the speech is read
        last = error
    push(last)


async def aread_pieces(pieces: AsyncIterable[str], push: Push) -> None:
    """`read_pieces` for an async iterator, on the event loop."""
    last = END
    try:
        async for piece in pieces:
            if not await asyncio.wrap_future(push(piece)):
                return
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        last = error
    push(last)


def done_future(result: bool) -> Future:
    future = Future()
    future.set_result(result)
    return future


class TextReader:
    """Hands the pieces of a text over from any thread to the thread that speaks it."""

    def __init__(self, iterator: Iterable[str] | None = None):
        """iterator: yields the pieces. None: the caller pushes them"""
        self.iterator = iterator
        self.arriving = None  # ArrivingText
        self.pieces = queue.SimpleQueue()  # (piece, Future that is done when the piece is taken)
        self.ahead = deque()  # the Futures
        self.is_closed = False

    # ---- For the thread that has the pieces

    def push(self, piece: str | BaseException | None) -> Future:
        """The Future is True when there is room for another piece, and False if no more is wanted."""
        taken = Future()
        taken.set_running_or_notify_cancel()  # so that a task that stops waiting for it cannot cancel it
        self.ahead.append(taken)
        self.pieces.put((piece, taken))
        return self.ahead.popleft() if len(self.ahead) > MAX_PIECES_AHEAD else done_future(not self.is_closed)

    # ---- For the thread that speaks the text

    def start(self) -> None:
        if self.iterator is not None:
            start_reader(self.iterator, self.push)

    def take_until(self, condition: Callable[[], bool]) -> None:
        """Take pieces that have come, until the condition holds or none is left."""
        while not condition() and not self.arriving.error and not self.pieces.empty():
            self.take()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Take pieces until the condition holds, and wait for them. Raises the error of the iterator or of a piece."""
        self.arriving.came_at = time.monotonic()  # the timeout begins now, however long ago the last piece came
        while not condition():
            if self.arriving.error:
                raise self.arriving.error
            try:
                self.take(timeout=self.arriving.seconds_left())
            except queue.Empty:
                self.arriving.error = self.arriving.timed_out()

    def take(self, timeout: float | None = None) -> None:
        piece, taken = self.pieces.get(timeout=timeout)
        taken.set_result(not self.is_closed)
        try:
            self.arriving.add(piece)
        except BaseException as error:
            self.arriving.error = error

    def close(self) -> None:
        """Take no more pieces."""
        self.is_closed = True
        while not self.pieces.empty():
            self.pieces.get()[1].set_result(False)
