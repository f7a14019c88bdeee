"""One request in the runner: what to decode, how far it is, and which of its frames are to be heard next."""

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
    """Frames per chunk: an early start, then fewer chunks."""
    return itertools.chain((1, 1, 2, 4), itertools.repeat(8))


def warn_each_time(warning: str | Warning) -> None:
    """`warnings.warn` shows the same text once per line of code, but no speech may be cut short silently."""
    warnings.warn_explicit(warning, UserWarning, __file__, 1)


class NewText(NamedTuple):
    """Text that has come after the request was made."""

    first_frame: int  # the first that it is for
    embeddings: torch.Tensor  # what this frame and those after it add (T, H)
    frames_with_text: float  # how many have text then
    ready: torch.cuda.Event | None  # after the kernels that made the embeddings


class Utterance:
    """Three counts of frames say how far it is:

    launched   the GPU has got them: one more than there are, where the host learns late of the end
    checked    the host has read, after each of them, whether it is the last
    decoded    the codec has got them: at most `valid_frames`, which surely belong to the speech
    """

    def __init__(self, chunk_sizes: Iterator[int] | None = None):
        """chunk_sizes: frames of each chunk of audio; None: only codes are wanted"""
        self.request = None  # dropped when it is admitted: its embeddings take memory, and the rest is copied below
        self.settings = None  # tensors on the host
        self.prompt_ready = None  # a CUDA event after the kernels that built the prompt, if it was built on the GPU
        self.prompt_length = 0
        self.max_frames = 0
        self.max_new_tokens = 0
        self.samples_token = self.samples_codes = True  # False: the best is chosen
        self.generator = None  # None: an unseeded stream of an engine, which shares `Runner.shared_generator`
        self.row = None
        # a text that is still arriving
        self.new_text = collections.deque()  # NewText that the runner has not written yet
        self.frames_with_text = math.inf  # frames whose text is known
        # how far it is, in frames
        self.launched = 0
        self.checked = 0
        self.decoded = 0
        self.finished = False  # no further frame will be launched
        self.was_cut_off = False
        self.is_abandoned = False  # whoever drives the runner next is to release it
        self.chunk_sizes = chunk_sizes
        self.chunk_size = next(chunk_sizes) if chunk_sizes else 0

    def load(self, request: Request, runner) -> None:
        """Take over what a request is to speak, in a row of that runner."""
        if request.inputs.is_cuda:  # with a reference recording
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
        """Frames known to belong to the speech. The flag after frame k tells whether there is a frame k + 1."""
        return self.checked if self.finished else min(self.launched, self.checked + 1)

    def lacks_text(self) -> bool:
        return self.launched >= self.frames_with_text and not self.new_text

    def may_advance(self) -> bool:
        return self.launched < self.max_frames and not self.lacks_text() and not self.finished

    def is_complete(self) -> bool:
        """Whether all of it has been decoded."""
        return self.finished and (self.chunk_sizes is None or self.decoded >= self.valid_frames)

    def may_have_chunk(self) -> bool:
        """False where `next_chunk` is 0 for sure: a quick look, for hundreds of utterances in every frame."""
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
        """The codec has got the next chunk, of so many frames."""
        self.decoded += size
        if not self.finished:
            self.chunk_size = next(self.chunk_sizes)

    def note_ended(self, has_ended: bool) -> None:
        """The host has read the `ended` flag after the next frame."""
        if not self.finished:
            self.checked += 1
            self.was_cut_off = self.checked >= self.max_frames and not has_ended
            self.finished = has_ended or self.was_cut_off

    def warn_if_cut_off(self, is_error: bool = False) -> None:
        """Tell the listener of an utterance that ended at a limit, by a warning or an error."""
        if not self.was_cut_off:
            return
        name = "max_seq_len" if self.max_frames + 1 < self.max_new_tokens else "max_new_tokens"
        warning = CutOff(f"the speech was cut off after {self.max_frames} frames, before its end: raise {name}")
        if is_error:
            raise warning
        warn_each_time(warning)
