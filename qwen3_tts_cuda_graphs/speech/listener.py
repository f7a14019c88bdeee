"""One request to the engine: its text, which may still be arriving, and a callback that takes its audio.

    listener = Listener(engine, put)               `put` is called with audio, then END or an error, from any thread
    listener.ask(method, text, seed, arguments)    text: None if it is still to come
    listener.push(piece)                           for such a text: its pieces, then END or an error
    listener.read(chunks)                          how much audio has been read: a stream with too much unread pauses
    listener.cancel()                              always, also after its end

`Engine.stream`, `astream`, `generate` and the server differ in what they do with the audio, and in who pushes the text.
"""

import math
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from qwen3_tts_cuda_graphs.fast.codec import BATCH_CHUNK_SIZES
from qwen3_tts_cuda_graphs.prompts.arriving_text import TEXT_TIMEOUT, StreamTimeout
from qwen3_tts_cuda_graphs.prompts.pieces import END
from qwen3_tts_cuda_graphs.speech.schedule import RowStatus
from qwen3_tts_cuda_graphs.speech.streaming import Chunk
from qwen3_tts_cuda_graphs.speech.utterance import Utterance, growing_chunks


class QueueFull(RuntimeError):
    """Too many requests are waiting: try again later."""


class Listener(Utterance):
    def __init__(self, engine, put: Callable, text_timeout: float = TEXT_TIMEOUT, max_text_tokens: float = math.inf):
        """text_timeout: seconds without new text after which the stream ends with a StreamTimeout
        max_text_tokens: where an arriving text ends: what follows is not part of this utterance
        """
        super().__init__(growing_chunks())  # the same for every stream, so that a seed reproduces
        self.engine = engine
        self.put = put
        self.queued_at = None  # time; None while its prompt is being built or waits for text
        self.is_closed = False  # cancelled, or ended by an error: nothing more is delivered
        # a text that is still arriving
        self.arriving = None  # ArrivingText
        self.max_text_tokens = max_text_tokens
        self.text_timeout = text_timeout
        # its audio
        self.delivered = 0  # frames whose audio was given to `put`, or dropped because the listener was closed
        self.first_delivered_at = None  # time
        self.unread = 0  # chunks that were delivered and not read yet
        self.paused_at = None  # time since which too many are unread

    # ---- For the caller, in any thread

    def ask(
        self,
        method: Callable,
        text: str | None,
        seed: int | None,
        arguments: dict,
        built: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue the request. If its prompt cannot be built, `put` gets the error.

        text: None if it is still to come
        arguments: the method's other arguments
        built: called when its prompt is built, before any audio; without a text, when pieces of it can be pushed
        """
        self.engine.intake.submit(self, method, text, seed, arguments, built)

    def push(self, piece: str | BaseException | None) -> Future:
        """Take the next piece of its text, END, or the iterator's error. The Future says whether more is wanted."""
        return self.engine.intake.push(self, piece)

    @property
    def has_too_much_unread(self) -> bool:
        return self.unread >= self.engine.max_unread

    def read(self, chunks: int = 1) -> None:
        """Note that so many chunks of its audio have been read."""
        with self.engine.changed:
            was_paused = self.has_too_much_unread
            self.unread -= chunks
            if was_paused and not self.has_too_much_unread:
                self.engine.changed.notify_all()

    def cancel(self) -> None:
        with self.engine.changed:
            self.close()
            self.engine.listeners.discard(self)
            self.engine.intake.cancel(self)
            self.engine.changed.notify_all()

    def receive(self, item):
        """Handle an item that `put` got: audio, which counts as read from now on, END, or an error, which is raised."""
        if isinstance(item, BaseException):
            raise item
        if item is END:
            self.warn_if_cut_off(self.engine.cut_off_is_error)
        else:
            self.read()
        return item

    def characters_read(self) -> int | None:
        """At the end of an arriving text: how much of it has been spoken. None: the text came as a whole."""
        return self.arriving and self.arriving.characters_read(self.valid_frames)

    # ---- For the engine

    def close(self, error: BaseException | None = None) -> None:
        """Deliver this error, and nothing after it."""
        self.is_closed = True
        if error is not None:
            self.put(error)

    def next_chunk(self) -> int:
        """Frames of the chunk to decode next: a size that the codec decodes for several streams at once."""
        available = 0 if self.is_closed else super().next_chunk()
        return next((size for size in BATCH_CHUNK_SIZES if size <= available), 0)

    def row_status(self, now: float, seconds_per_frame: float) -> RowStatus:
        """This stream as schedule.py sees it."""
        played = 0.0 if self.first_delivered_at is None else now - self.first_delivered_at
        return RowStatus(
            lead=self.delivered * seconds_per_frame - played,
            may_advance=self.may_advance(),
            has_delivered=self.first_delivered_at is not None,
            has_decoded=self.decoded > 0,
            paused_for=None if self.paused_at is None else now - self.paused_at,
            lacks_text=self.lacks_text() and not self.finished,
        )

    def text_has_failed(self) -> bool:
        """Whether its text has ended with an error, and all text before that has been spoken."""
        return bool(self.arriving and self.arriving.error and self.lacks_text() and self.checked == self.launched)

    @property
    def awaits_text(self) -> bool:
        """Whether more of its text is to come, whether or not a frame needs it now."""
        return bool(self.arriving and not (self.arriving.is_over or self.is_closed))

    def text_timed_out(self) -> StreamTimeout | None:
        """The error of a stream that has waited for text for too long."""
        needs_text = self.queued_at is None or self.lacks_text()
        return self.arriving.timed_out() if self.awaits_text and needs_text else None


class ListenerChunks(Iterator):
    """The audio of a listener, chunk by chunk. Closing or dropping it cancels the request.

    Not a generator: a generator that was never started runs no `finally`, and none can be closed while another thread
    waits in it.
    """

    def __init__(self, listener: Listener, items: queue.SimpleQueue):
        self.listener = listener
        self.items = items
        self.is_closed = False

    def __next__(self) -> Chunk:
        if self.is_closed:
            raise StopIteration
        try:
            audio = self.listener.receive(self.items.get())
            if audio is END:
                raise StopIteration
        except BaseException:
            self.close()
            raise
        return audio, self.listener.engine.rate

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.listener.cancel()
            self.items.put(END)  # another thread may be waiting for an item

    __del__ = close
