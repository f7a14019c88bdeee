"""One request of an engine: what to decode, how far it is, and where its audio goes."""

import collections
import math
import time
from collections.abc import Callable

from fast.streaming import growing_chunks


class QueueFull(RuntimeError):
    """Too many requests are waiting: try again later."""


class CutOff(UserWarning):
    """The speech ended at a limit instead of by itself."""


class StreamTimeout(TimeoutError):
    """Its text does not come, or nobody reads its audio. The message is for whoever asked for the speech."""


class Stream:
    def __init__(self, put: Callable, text_timeout: float = 60.0):
        if not 0 < text_timeout < math.inf:
            raise ValueError(f"text_timeout is {text_timeout}, it must be above 0 and finite, in seconds")
        self.put = put  # takes audio, an exception or fast.arriving_text.END
        self.cancelled = False
        # the request
        self.request = None  # arguments of talker.generate
        self.settings = None  # the same for `Prefill`
        self.prompt_ready = None  # a CUDA event after the kernels that built the prompt, if it was built on the GPU
        self.prompt_length = 0
        self.queued_at = None  # time
        self.max_frames = 0
        self.reference = None  # codes that precede the speech, for the codec
        self.generator = None  # draws this stream's noise if it is seeded or alone
        self.is_seeded = False  # unseeded streams of a batch share one draw
        self.slot = None
        # a text that is still arriving
        self.text = None  # ArrivingText
        self.text_timeout = text_timeout
        self.text_came_at = time.monotonic()
        self.text_error = None
        self.new_rows = collections.deque()  # (first frame, rows (T, H), frames with text then, CUDA event)
        self.frames_with_text = math.inf  # frames whose text the GPU has
        # how far it is, in frames
        self.launched = 0  # on the GPU
        self.checked = 0  # frames whose `ended` flag the host has read
        self.decoded = 0  # handed to the codec
        self.finished = False  # no further frame will be launched
        self.was_cut_off = False
        # its audio
        self.chunk_sizes = growing_chunks()  # the same for every stream, so that a seed reproduces
        self.chunk_size = next(self.chunk_sizes)
        self.delivered = 0  # frames whose audio the listener has, or could have
        self.first_delivered_at = None  # time
        self.unread = 0  # chunks that the listener has not taken yet
        self.paused_at = None  # time at which it began to wait for its listener

    @property
    def length(self) -> int:
        """Positions of the cache in use."""
        return self.prompt_length + self.launched

    @property
    def valid(self) -> int:
        """Frames known to belong to the speech. The flag after frame k tells whether there is a frame k + 1."""
        return self.checked if self.finished else min(self.launched, self.checked + 1)

    def lacks_text(self) -> bool:
        return self.launched >= self.frames_with_text

    def may_advance(self) -> bool:
        return self.launched < self.max_frames and not self.lacks_text() and not self.finished

    def text_has_failed(self) -> bool:
        """Whether all there was before an error of the text has been spoken, and the error comes next."""
        is_all = self.lacks_text() and not self.new_rows and self.checked == self.launched
        return self.text_error is not None and is_all

    def seconds_for_text(self) -> float | None:
        """How long to wait for audio before `text_timed_out`. None: as long as it takes."""
        if self.text is None or self.text.is_finished:
            return None
        return max(0.01, self.text_came_at + self.text_timeout - time.monotonic())

    def text_timed_out(self) -> StreamTimeout | None:
        """The error of a stream that has waited too long for its text."""
        limit = self.seconds_for_text()
        waits_for_text = self.request is None or (self.lacks_text() and not self.new_rows)
        if limit is None or limit > 0.01 or not waits_for_text:
            return None
        return StreamTimeout(f"no text has come for {self.text_timeout:g} s, and it has not ended")
