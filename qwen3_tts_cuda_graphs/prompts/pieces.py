"""Read the pieces of a text from an iterator, for whoever speaks it: a stream, an engine, or a worker of the server.

Each piece goes to a function, then END or the error of the iterator. `TextReader` hands them to a stream's own thread.
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
MAX_PIECES_AHEAD = 256  # how many an iterator may have given that the stream has not taken

Push = Callable[[str | BaseException | None], Future]  # a piece, END or an error -> whether another one is wanted


def start_reader(pieces: Iterable[str], push: Push) -> None:
    """A thread of its own: the iterator may take its time, and is given up if it never returns."""
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
    """The same on an event loop, without a thread for each text."""
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
        """iterator: of the pieces. None: they are pushed by whoever has them"""
        self.iterator = iterator
        self.arriving = None  # ArrivingText
        self.pieces = queue.SimpleQueue()  # each with a Future that is done when it is taken
        self.ahead = deque()  # the Futures
        self.is_closed = False

    # ---- For whoever has the pieces

    def push(self, piece: str | BaseException | None) -> Future:
        """The Future is True when there is room for another one, False when no more is wanted."""
        taken = Future()
        taken.set_running_or_notify_cancel()  # whoever stops waiting for it must not cancel it
        self.ahead.append(taken)
        self.pieces.put((piece, taken))
        return self.ahead.popleft() if len(self.ahead) > MAX_PIECES_AHEAD else done_future(not self.is_closed)

    # ---- For the thread that speaks the text

    def start(self) -> None:
        if self.iterator is not None:
            start_reader(self.iterator, self.push)

    def take_until(self, condition: Callable[[], bool]) -> None:
        """Take what has come until the condition holds."""
        while not condition() and not self.arriving.error and not self.pieces.empty():
            self.take()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for text. Raises the error of the iterator, or of its text, once all text before it is used up."""
        self.arriving.came_at = time.monotonic()  # it may have come long ago, with enough to say
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
        """No more is wanted."""
        self.is_closed = True
        while not self.pieces.empty():
            self.pieces.get()[1].set_result(False)
