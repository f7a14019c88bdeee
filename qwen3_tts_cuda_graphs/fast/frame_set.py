"""The captured frames of a model, one for each number of rows, each computed in the fastest way that runs here."""

import logging

import torch

from cudagraph_talker import GraphPool
from qwen3_tts_cuda_graphs.fast.codec import batch_sizes
from qwen3_tts_cuda_graphs.fast.frames import Frame, KernelFrame, MegakernelFrame, frame_without_megakernel
from qwen3_tts_cuda_graphs.fast.kernels import one_line
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of
from qwen3_tts_cuda_graphs.fast.paths import choose_path, describe
from qwen3_tts_cuda_graphs.fast.rows import SharedRows
from qwen3_tts_cuda_graphs.fast.self_test import run_test, why_rows_wrong

log = logging.getLogger("qwen3_tts_cuda_graphs")

MEGAKERNEL_ROWS = (1, 2, 4, 8, 16)


class FrameSet:
    def __init__(self, talker, rows: SharedRows, row_count: int, fused: bool | None):
        """fused: True requires the megakernel, False avoids it, None uses it where it runs"""
        self.talker = talker
        self.rows = rows
        self.pool = GraphPool(talker.device)
        self.sizes = batch_sizes(row_count)
        self.frames: dict[int, Frame] = {}
        uses_megakernel, self.path = choose_path(talker, fused)  # what makes a frame of one row, in words
        if uses_megakernel:
            self.use_megakernel(fused)
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            log.info("capturing frames of %d %s", size, "row" if size == 1 else "rows")
            if size in self.frames:
                self.frames[size].capture(self.pool)
            self.of(size)

    def of(self, row_count: int) -> Frame:
        """The smallest frame that has at least this many rows."""
        size = next(size for size in self.sizes if size >= row_count)
        if size not in self.frames:
            frame = frame_without_megakernel(self.talker, self.rows[:size], like=self.frames.get(1))
            self.frames[size] = frame.capture(self.pool)
        return self.frames[size]

    def reads_masked_positions(self) -> bool:
        """Whether a frame runs SDPA over the whole cache: positions that are masked must then be finite."""
        return not all(isinstance(self.frames.get(size), KernelFrame | MegakernelFrame) for size in self.sizes)

    def use_megakernel(self, fused: bool | None) -> None:
        """Make the megakernel's frames, if it passes its test on this machine."""
        sizes = [size for size in self.sizes if size in MEGAKERNEL_ROWS]
        for size in sizes:
            SOURCE.compile_ahead(*stacks_of(self.talker, size))
        log.info("testing the megakernel")
        alone = MegakernelFrame(self.talker, self.rows[:1])
        reason, _ = run_test(alone)
        if reason:
            if fused:
                raise ValueError(f"fused=True: the megakernel failed its test on this machine: {reason}")
            log.warning("the megakernel failed its test on this machine and is not used: %s", reason)
            self.path = describe(f"it failed its test on this machine: {reason}")
            return
        self.frames[1] = alone
        for size in sizes[1:]:
            try:
                frame = MegakernelFrame(self.talker, self.rows[:size], like=alone)
                reason = why_rows_wrong(frame, alone)
            except torch.OutOfMemoryError:
                raise
            except (OSError, RuntimeError) as error:  # too few multiprocessors for this many rows, for instance
                log.info("frames of %d rows run without the megakernel: %s", size, one_line(error))
                continue
            if reason:
                log.warning("the megakernel for %d rows failed its test and is not used: %s", size, reason)
            else:
                self.frames[size] = frame

    def why_stopped(self) -> str:
        """Why the megakernel gave up in a step that has ended; empty if it did not. If it did, all further frames run
        on separate kernels."""
        launches = [launch for frame in self.frames.values() for launch in frame.launches]
        reason = next(filter(None, (launch.why_failed() for launch in launches)), "")
        if reason:
            reason = f"the megakernel has stopped: {reason}"
            log.warning("%s", reason)
            self.path = describe(reason)
            self.frames = {size: frame for size, frame in self.frames.items() if not frame.launches}
        return reason
