"""The engine's port: one request, the text that is still coming for it, and where its audio goes.

    listener = Listener(engine, put)                  `put` takes its audio, then END, or an error; in any thread
    listener.ask(method, text, seed, arguments)       text: None if it is still to come; then
    listener.push(piece)                              its pieces, and END or an error
    listener.read(chunks)                             what was taken of its audio: with too much unread it pauses
    listener.cancel()                                 always, also after its end

`Engine.stream`, `astream`, `generate` and the server differ in what they do with the items, and in who pushes the text.
"""

import contextlib
import math
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from qwen3_tts_cuda_graphs.fast.codec import BATCH_CHUNK_SIZES
from qwen3_tts_cuda_graphs.prompts.arriving_text import StreamTimeout
from qwen3_tts_cuda_graphs.prompts.checks import TEXT_TIMEOUT
from qwen3_tts_cuda_graphs.prompts.pieces import END
from qwen3_tts_cuda_graphs.speech.schedule import RowStatus
from qwen3_tts_cuda_graphs.speech.streaming import Chunk
from qwen3_tts_cuda_graphs.speech.utterance import Utterance, growing_chunks


class QueueFull(RuntimeError):
    """Too many requests are waiting: try again later."""


class Listener(Utterance):
    def __init__(self, engine, put: Callable, text_timeout: float = TEXT_TIMEOUT, max_text_tokens: float = math.inf):
        """text_timeout: seconds without new text after which it ends with a StreamTimeout
        max_text_tokens: where a text that is still to come ends: what follows is not part of this utterance
        """
        super().__init__(growing_chunks())  # the same for every stream, so that a seed reproduces
        self.engine = engine
        self.put = put
        self.token_ids = None  # of its text, where it was tokenized together with others
        self.queued_at = None  # time; None while its prompt is being built or waits for text
        self.is_closed = False  # it has got an error or was cancelled: nothing more is delivered
        # a text that is still arriving
        self.arriving = None  # ArrivingText
        self.max_text_tokens = max_text_tokens
        self.text_timeout = text_timeout
        # its audio
        self.delivered = 0  # frames whose audio it has, or could have
        self.first_delivered_at = None  # time
        self.unread = 0  # chunks that it has not taken yet
        self.paused_at = None  # time since which it has left too much unread

    # ---- For whoever listens, in any thread

    def ask(self, method: Callable, text: str | None, seed: int | None, arguments: dict) -> Future:
        """Queue the request. The Future is done when its prompt is built, or raises why it cannot be, which `put` gets,
        too.

        text: None if it is still to come
        arguments: the method's other arguments
        """
        return self.engine.intake.submit(self, method, text, seed, arguments)

    def push(self, piece: str | BaseException | None) -> Future:
        """Take the next piece of its text, END, or the iterator's error. The Future says whether more is wanted."""
        return self.engine.intake.push(self, piece)

    def read(self, chunks: int = 1) -> None:
        """Say that so many chunks of its audio have been taken."""
        most = self.engine.max_unread
        with self.engine.changed:
            was_paused = self.unread >= most
            self.unread -= chunks
            if was_paused and self.unread < most:
                self.engine.changed.notify_all()

    def cancel(self) -> None:
        with self.engine.changed:
            self.close()
            self.engine.listeners.discard(self)
            with contextlib.suppress(ValueError):  # it does not wait for a row
                self.engine.intake.waiting.remove(self)
            self.engine.changed.notify_all()

    def receive(self, item):
        """An item that `put` got: audio, which counts as read from now on, or END. Raises it if it is an error."""
        if isinstance(item, BaseException):
            raise item
        if item is END:
            self.warn_if_cut_off(self.engine.cut_off_is_error)
        else:
            self.read()
        return item

    def characters_read(self) -> int | None:
        """How much of a text that came in pieces has been spoken, after its end. None: it came as a whole."""
        return self.arriving and self.arriving.characters_read(self.valid_frames)

    # ---- For the engine

    def close(self, error: BaseException | None = None) -> None:
        """Deliver nothing more but this error."""
        self.is_closed = True
        if error is not None:
            self.put(error)

    def next_chunk(self) -> int:
        """Frames of the chunk to decode next, in a size that the codec decodes for several streams at once."""
        available = 0 if self.is_closed else super().next_chunk()
        return next((size for size in BATCH_CHUNK_SIZES if size <= available), 0)

    def row_status(self, now: float, seconds_per_frame: float) -> RowStatus:
        """What the schedule reads."""
        played = 0.0 if self.first_delivered_at is None else now - self.first_delivered_at
        return RowStatus(
            lead=self.delivered * seconds_per_frame - played,
            may_advance=self.may_advance(),
            has_heard=self.first_delivered_at is not None,
            has_sound=self.decoded > 0,
            paused_for=None if self.paused_at is None else now - self.paused_at,
            lacks_text=self.lacks_text() and not self.finished,
        )

    def text_has_failed(self) -> bool:
        """Whether all there was before an error of the text has been spoken, and the error comes next."""
        return bool(self.arriving and self.arriving.error and self.lacks_text() and self.checked == self.launched)

    def last_item(self) -> BaseException | None:
        """What follows its audio: END, or the error of its text."""
        return (self.arriving and self.arriving.error) or END

    @property
    def awaits_text(self) -> bool:
        """Whether more of its text is to come, needed by now or not."""
        return bool(self.arriving and not (self.arriving.is_over or self.is_closed))

    def text_timed_out(self) -> StreamTimeout | None:
        """The error of a stream that needs text, and has waited for it for too long."""
        needs_text = self.queued_at is None or self.lacks_text()
        return self.arriving.timed_out() if self.awaits_text and needs_text else None


class ListenerChunks(Iterator):
    """What a listener hears. To close it, or to drop it, cancels the request.

    Not a generator: one that was never started runs no `finally`, and none can be closed while a thread waits in it.
    """

    def __init__(self, listener: Listener, items: queue.SimpleQueue):
        self.listener = listener
        self.items = items
        self.is_closed = False

    def __next__(self) -> Chunk:
        try:
            if not self.is_closed and (audio := self.listener.receive(self.items.get())) is not END:
                return audio, self.listener.engine.rate
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.listener.cancel()
            self.items.put(END)  # another thread may be waiting for an item

    __del__ = close
