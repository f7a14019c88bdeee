"""Read the pieces of a text from an iterator, for whoever speaks it: a stream, an engine, or a worker of the server.

Each piece goes to a function, then END or the error of the iterator.
"""

import asyncio
import contextvars
import queue
import threading
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


class Pieces:
    """Between who reads a text, in any thread, and the thread that speaks it. The reader may be ahead."""

    def __init__(self):
        self.queue = queue.SimpleQueue()  # of pieces, each with a Future that is done when it is taken
        self.ahead = deque()  # the Futures
        self.is_closed = False

    def push(self, piece: str | BaseException | None) -> Future:
        """The Future is True when there is room for another one, False when no more is wanted."""
        taken = Future()
        taken.set_running_or_notify_cancel()  # whoever stops waiting for it must not cancel it
        self.ahead.append(taken)
        self.queue.put((piece, taken))
        return self.ahead.popleft() if len(self.ahead) > MAX_PIECES_AHEAD else done_future(not self.is_closed)

    def get(self, timeout: float | None = None) -> str | BaseException | None:
        piece, taken = self.queue.get(timeout=timeout)
        taken.set_result(not self.is_closed)
        return piece

    def close(self) -> None:
        self.is_closed = True
        while not self.queue.empty():
            self.get()
