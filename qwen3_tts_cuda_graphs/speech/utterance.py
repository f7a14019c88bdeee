"""One request in the runner: what to decode, its progress, and which frames the codec gets next."""

import collections
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from qwen3_tts_cuda_graphs.prompts.request import Request


class CutOff(UserWarning):
    """The speech ended at a limit instead of by itself."""


def growing_chunks() -> Iterator[int]:
    """Frames per chunk: small ones first, for an early start, then larger ones."""
    return itertools.chain((1, 1, 2, 4), itertools.repeat(8))


def warn_each_time(warning: str | Warning) -> None:
    """No speech may be cut short silently, but `warnings.warn` shows the same text only once."""
    warnings.warn_explicit(warning, UserWarning, __file__, 1)


class NewText(NamedTuple):
    """Text that came after the request was made."""

    first_frame: int  # the frame that adds the first of the embeddings
    embeddings: torch.Tensor  # (T, H), one for each frame from `first_frame` on
    frames_with_text: float  # frames whose text is known, with this text
    ready: torch.cuda.Event | None  # recorded after the kernels that compute the embeddings


class Utterance:
    """A request with its progress, as three counts of frames:

    launched   launched on the GPU; one frame too many if the host reads the end only after the next launch
    checked    frames after which the host has read whether the speech has ended
    decoded    handed to the codec; at most `valid_frames`, which are known to belong to the speech
    """

    def __init__(self, chunk_sizes: Iterator[int] | None = None):
        """chunk_sizes: frames of each chunk of audio; None: only codes are wanted"""
        self.request = None  # dropped on admission, to free the memory of its embeddings
        self.settings = None  # tensors on the host; dropped on admission, too
        self.prompt_ready = None  # a CUDA event after the kernels that built the prompt, if it was built on the GPU
        self.prompt_length = 0
        self.max_frames = 0
        self.max_new_tokens = 0
        self.samples_token = self.samples_codes = True  # False: greedy
        self.generator = None  # None: an unseeded stream of an engine, which uses `Runner.shared_generator`
        self.row = None
        # a text that is still arriving
        self.new_text = collections.deque()  # NewText that the runner has not written yet
        self.frames_with_text = math.inf  # frames whose text is known
        # progress, in frames
        self.launched = 0
        self.checked = 0
        self.decoded = 0
        self.finished = False  # no further frame will be launched
        self.was_cut_off = False
        self.must_be_released = False  # by the next call that uses the runner, as its engine has stopped
        self.chunk_sizes = chunk_sizes
        self.chunk_size = next(chunk_sizes) if chunk_sizes else 0

    def load(self, request: Request, runner) -> None:
        """Set what to speak, in a row of this runner."""
        if request.inputs.is_cuda:  # built on the GPU, with a reference recording
            self.prompt_ready = runner.record_event()
        self.request = request
        self.settings = runner.settings_on_host(**request.settings)
        self.prompt_length = request.prompt_length
        self.max_frames = request.max_frames(runner.max_seq_len)
        self.max_new_tokens = request.max_new_tokens or 0  # None: see Request.max_frames
        self.samples_token = request.settings["do_sample"]
        self.samples_codes = request.settings["subtalker_dosample"]
        self.frames_with_text = request.frames_with_text

    @property
    def length(self) -> int:
        """Positions of the cache in use."""
        return self.prompt_length + self.launched

    @property
    def valid_frames(self) -> int:
        """Frames known to belong to the speech. The flag after frame k says whether there is a frame k + 1."""
        return self.checked if self.finished else min(self.launched, self.checked + 1)

    def lacks_text(self) -> bool:
        return self.launched >= self.frames_with_text and not self.new_text

    def may_advance(self) -> bool:
        return self.launched < self.max_frames and not self.lacks_text() and not self.finished

    def is_complete(self) -> bool:
        """Whether it has ended, and all of its frames have been decoded."""
        return self.finished and (self.chunk_sizes is None or self.decoded >= self.valid_frames)

    def may_have_chunk(self) -> bool:
        """A fast test before `next_chunk`, for hundreds of utterances in every frame: if False, that returns 0."""
        return (
            self.launched - self.decoded >= self.chunk_size or self.finished or self.launched >= self.frames_with_text
        )

    def next_chunk(self) -> int:
        """Frames of the chunk to decode next, 0 if it is not complete."""
        available = self.valid_frames - self.decoded
        if self.chunk_sizes is None or available <= 0:
            return 0
        if self.finished or self.lacks_text():
            return min(available, self.chunk_size)
        return self.chunk_size if self.chunk_size <= available else 0

    def note_decoded(self, size: int) -> None:
        """Note that the codec has got the next chunk, of so many frames."""
        self.decoded += size
        if not self.finished:
            self.chunk_size = next(self.chunk_sizes)

    def note_ended(self, has_ended: bool) -> None:
        """Note that the host has read the `ended` flag of the next frame."""
        if not self.finished:
            self.checked += 1
            self.was_cut_off = self.checked >= self.max_frames and not has_ended
            self.finished = has_ended or self.was_cut_off

    def warn_if_cut_off(self, is_error: bool = False) -> None:
        """Warn, or raise an error, if the utterance ended at a limit."""
        if not self.was_cut_off:
            return
        name = "max_seq_len" if self.max_frames + 1 < self.max_new_tokens else "max_new_tokens"
        warning = CutOff(f"the speech was cut off after {self.max_frames} frames, before its end: raise {name}")
        if is_error:
            raise warning
        warn_each_time(warning)
