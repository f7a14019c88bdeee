"""The codec for many streams: one state row per stream; a graph decodes chunks of one size for any subset of rows."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from cudagraph_talker import capture
from fast.codec import CHUNK_SIZES, CodecGraph

BATCH_CHUNK_SIZES = (8, 4, 2, 1)  # frames per chunk of several rows; single rows have all of CHUNK_SIZES


class BatchCodec(CodecGraph):
    def __init__(self, tokenizer, slots: int, batches: list[int]):
        self.batches = batches
        self.unused = slots  # an extra slot that the padding rows of a batch read and write
        super().__init__(tokenizer, None, slots + 1)
        self.state_rows = [[state[slot] for state in self.state] for slot in range(slots)]

    def capture(self) -> None:
        pool = torch.cuda.graph_pool_handle() if self.stream else None
        self.graphs = {}
        self.indices = {}
        for batch in self.batches:
            self.rows = torch.full((batch,), self.unused, device=self.device)
            self.indices[batch] = self.rows
            for size in CHUNK_SIZES if batch == 1 else BATCH_CHUNK_SIZES:
                self.graphs[batch, size] = self.with_rows(
                    self.rows, capture(partial(self.step, size), self.device, pool)
                )

    def with_rows(self, rows: torch.Tensor, step: Callable[[], None]) -> Callable[[], None]:
        """On a CPU nothing is captured, so `step` must find its row indices in `self.rows` when it runs."""

        def run() -> None:
            self.rows = rows
            step()

        return run

    @torch.no_grad()
    def reset_row(self, slot: int) -> None:
        with self.on_own_stream():
            torch._foreach_zero_(self.state_rows[slot])

    @torch.no_grad()
    def move(self, source: int, target: int) -> None:
        with self.on_own_stream():
            torch._foreach_copy_(self.state_rows[target], self.state_rows[source])

    def wait(self) -> None:
        if self.stream:
            self.stream.synchronize()

    def prime(self, slot: int, codes: torch.Tensor) -> None:
        """Decode a reference (T, 16) and discard its audio."""
        for size in CHUNK_SIZES:
            while len(codes) >= size:
                self.feed_rows([slot], codes[None, :size])
                codes = codes[size:]

    @torch.no_grad()
    def feed_rows(self, slots: list[int], codes: torch.Tensor) -> "PendingAudio":
        """Start decoding the next frames (B, T, 16) of these slots."""
        batch = next(batch for batch in self.batches if batch >= len(slots))
        size = codes.shape[1]
        count = size * self.samples_per_frame
        audio = torch.empty(len(slots), count, dtype=torch.float32, device="cpu", pin_memory=self.stream is not None)
        padded = [*slots, *[self.unused] * (batch - len(slots))]
        index = torch.tensor(padded, pin_memory=self.stream is not None)
        with self.on_own_stream():
            codes = codes.to(self.device)
            if self.stream:
                codes.record_stream(self.stream)  # the caller may free the codes before they are read
            self.indices[batch].copy_(index, non_blocking=True)
            self.codes[: len(slots), :, :size] = codes.transpose(1, 2)
            self.graphs[batch, size]()
            audio.copy_(self.samples[: len(slots), :count], non_blocking=True)
            done = self.stream.record_event() if self.stream else None

        return PendingAudio(audio, done)


class PendingAudio:
    """Samples of a batch on their way to the host."""

    def __init__(self, audio: torch.Tensor, done: torch.cuda.Event | None):
        self.audio = audio
        self.done = done

    def wait(self) -> list[np.ndarray]:
        """A copy for each row, so that no listener keeps the pinned memory of the whole batch."""
        if self.done:
            self.done.synchronize()
        return [samples.copy() for samples in self.audio.numpy()]
