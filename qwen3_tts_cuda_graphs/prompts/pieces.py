"""Read the pieces of a text from an iterator, for whoever speaks it: a stream, an engine, or a worker of the server.

Each piece goes to a function, then END or the error of the iterator.
"""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Future

END = None

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
