"""The captured graphs of a model's frames, a pair for each number of rows, each in the fastest way that runs here."""

import logging

import torch

from cudagraph_talker import GraphPool
from qwen3_tts_cuda_graphs.fast.frame_graphs import (
    KernelGraphs,
    MegakernelGraphs,
    PlainGraphs,
    graphs_without_megakernel,
)
from qwen3_tts_cuda_graphs.fast.kernels import one_line
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of
from qwen3_tts_cuda_graphs.fast.paths import choose_path, path_without
from qwen3_tts_cuda_graphs.fast.rows import SharedRows, batch_sizes
from qwen3_tts_cuda_graphs.fast.self_test import PROMPTS, run_test

log = logging.getLogger("qwen3_tts_cuda_graphs")

MEGAKERNEL_ROWS = (1, 2, 4, 8, 16)
FRAME_PRIORITY = -1  # before the codec, which is 0


class GraphSet:
    def __init__(self, talker, rows: SharedRows, row_count: int, fused: bool | None):
        """fused: True requires the megakernel, False avoids it, None uses it where it runs"""
        self.talker = talker
        self.rows = rows
        self.pool = GraphPool(talker.device)
        if talker.device.type == "cuda":
            self.pool.stream = torch.cuda.Stream(talker.device, FRAME_PRIORITY)
        self.sizes = batch_sizes(row_count)
        self.by_size: dict[int, PlainGraphs] = {}
        uses_megakernel, self.path = choose_path(talker, fused)  # the path's name, for messages
        if uses_megakernel:
            self.use_megakernel(fused)
        for size in reversed(self.sizes):  # the largest first: the others reuse its memory
            log.info("capturing frames of %d %s", size, "row" if size == 1 else "rows")
            if size in self.by_size:  # the megakernel's, which were tested without being captured
                self.by_size[size].capture(self.pool)
            self.of(size)

    def of(self, row_count: int) -> PlainGraphs:
        """The graphs of the smallest size with room for this many rows, captured now if `why_stopped` removed them."""
        size = next(size for size in self.sizes if size >= row_count)
        if size not in self.by_size:
            like = next(iter(self.by_size.values()), None)
            graphs = graphs_without_megakernel(self.talker, self.rows[:size], like)
            self.by_size[size] = graphs.capture(self.pool)
        return self.by_size[size]

    def reads_masked_positions(self) -> bool:
        """Whether any of the graphs runs SDPA over the whole cache: masked positions must then be finite."""
        return not all(isinstance(self.by_size.get(size), KernelGraphs | MegakernelGraphs) for size in self.sizes)

    def use_megakernel(self, fused: bool | None) -> None:
        """Make the megakernel's graphs, if it passes its test on this machine."""
        sizes = [size for size in self.sizes if size in MEGAKERNEL_ROWS]
        for size in sizes:
            SOURCE.compile_ahead(*stacks_of(self.talker, size))
        log.info("testing the megakernel")
        alone = MegakernelGraphs(self.talker, self.rows[:1])
        reason, _ = run_test(alone)
        if reason:
            if fused:
                raise ValueError(f"fused=True: the megakernel failed its test on this machine: {reason}")
            log.warning("the megakernel failed its test on this machine and is not used: %s", reason)
            self.path = path_without(f"it failed its test on this machine: {reason}")
            return
        self.by_size[1] = alone
        for size in sizes[1:]:
            try:
                graphs = MegakernelGraphs(self.talker, self.rows[:size], like=alone)
                reason, _ = run_test(graphs, PROMPTS, frames=1, choices=4)
            except torch.OutOfMemoryError:
                raise
            except (OSError, RuntimeError) as error:  # too few multiprocessors for this many rows, for instance
                log.info("frames of %d rows run without the megakernel: %s", size, one_line(error))
                continue
            if reason:
                log.warning("the megakernel for %d rows failed its test and is not used: %s", size, reason)
            else:
                self.by_size[size] = graphs

    def why_stopped(self) -> str:
        """Why a kernel whose thread blocks wait for each other has given up, in a step that has ended; empty if none
        has. After that, all frames run on kernels that do not wait."""
        launches = [launch for graphs in self.by_size.values() for launch in graphs.waiting_launches]
        reasons = [f"{launch.name} has stopped: {why}" for launch in launches if (why := launch.why_failed())]
        if not reasons:
            return ""
        log.warning("%s", reasons[0])
        self.path = path_without(reasons[0])
        self.by_size = {size: graphs for size, graphs in self.by_size.items() if not graphs.waiting_launches}
        return reasons[0]
