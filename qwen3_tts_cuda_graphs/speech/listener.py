"""One request of an engine: an utterance, the text that is still coming for it, and where its audio goes."""

import enum
import math
import time
from collections.abc import Callable

from qwen3_tts_cuda_graphs.fast.codec import BATCH_CHUNK_SIZES
from qwen3_tts_cuda_graphs.prompts.build import check_text_timeout
from qwen3_tts_cuda_graphs.speech.schedule import RowStatus
from qwen3_tts_cuda_graphs.speech.utterance import Utterance, growing_chunks


class QueueFull(RuntimeError):
    """Too many requests are waiting: try again later."""


class StreamTimeout(TimeoutError):
    """Its text does not come, or nobody reads its audio. The message is for whoever asked for the speech."""


class State(enum.Enum):
    PREPARING = "its prompt is being built, or waits for text"
    WAITING = "for a row"
    SPEAKING = "it has a row"
    DELIVERING = "all of its audio is on its way"
    ENDED = "its listener has all of it, or an error, or has gone"


class Listener(Utterance):
    def __init__(self, put: Callable, text_timeout: float = 60.0):
        """put: takes audio, an exception or speech.arriving_text.END, in any thread"""
        check_text_timeout(text_timeout)
        super().__init__(growing_chunks())  # the same for every stream, so that a seed reproduces
        self.put = put
        self.state = State.PREPARING
        self.queued_at = None  # time
        # a text that is still arriving
        self.text = None  # ArrivingText
        self.max_text_tokens = math.inf  # what comes after them is not part of this utterance
        self.text_timeout = text_timeout
        self.text_came_at = time.monotonic()
        self.text_error = None
        # its audio
        self.delivered = 0  # frames whose audio the listener has, or could have
        self.first_delivered_at = None  # time
        self.unread = 0  # chunks that the listener has not taken yet
        self.paused_at = None  # time at which it began to wait for its listener

    @property
    def has_ended(self) -> bool:
        return self.state is State.ENDED

    def end(self, last=None) -> None:
        """Nothing more is to be delivered but `last`, an error."""
        self.state = State.ENDED
        if last is not None:
            self.put(last)

    def next_chunk(self) -> int:
        """In sizes that the codec decodes for several streams at once."""
        available = 0 if self.has_ended else super().next_chunk()
        return next((size for size in BATCH_CHUNK_SIZES if size <= available), 0)

    def listener(self, now: float, seconds_per_frame: float) -> RowStatus:
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
        return self.text_error is not None and self.lacks_text() and self.checked == self.launched

    def seconds_for_text(self) -> float | None:
        """How long its text may still take. None: it is not what this stream waits for."""
        if self.text is None or self.text.is_finished:
            return None
        waits_for_text = self.state is State.PREPARING or self.lacks_text()
        return max(0.0, self.text_came_at + self.text_timeout - time.monotonic()) if waits_for_text else None

    def text_timed_out(self) -> StreamTimeout | None:
        """The error of a stream that has waited too long for its text."""
        if self.seconds_for_text() != 0:
            return None
        return StreamTimeout(f"no text has come for {self.text_timeout:g} s, and it has not ended")
