"""Prompts of several requests at once, read into rows that need not be neighbours: captured for several sizes."""

from functools import lru_cache

import torch

from cudagraph_talker import RowCache, TalkerGraph, capture
from fast.rows import Slots

PREFILL_ROWS = (1, 4, 32)  # prompts per captured prefill
SHORTEST_PREFILL = 32  # positions; longer ones in powers of two
MAX_PREFILL_POSITIONS = 4096  # of all prompts together, where there are several
REQUEST_SETTINGS = (  # arguments of talker.generate that `Rows.configure` reads, besides suppress_tokens
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id", "min_new_tokens"),
    *("subtalker_dosample", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
)


class HostSettings:
    """Settings of requests as tensors on the host. Most requests have the same ones, so they are kept."""

    def __init__(self, config):
        self.config = config
        self.rows = lru_cache(maxsize=64, typed=True)(self.make_row)

    def row(self, request: dict) -> list[torch.Tensor]:
        """In the order of `Slots.settings` and shaped like one row of them."""
        settings = {name: request[name] for name in REQUEST_SETTINGS}
        return self.rows(suppress_tokens=tuple(request["suppress_tokens"]), **settings)

    def make_row(self, suppress_tokens: tuple[int, ...], **settings) -> list[torch.Tensor]:
        row = Slots(self.config, 1, 0, torch.float32, torch.device("cpu"))
        row.configure(suppress_tokens=list(suppress_tokens), **settings)
        return [tensor[0] for tensor in row.settings()]


class PrefillGraph:
    """Prefill `count` prompts of up to `length` positions."""

    def __init__(self, talker, slots: Slots, count: int, length: int):
        self.slots = slots
        self.settings = []  # of the last prompts
        self.new = Slots(talker.config, count, 0, talker.dtype, talker.device)  # settings and state of these prompts
        self.talker = TalkerGraph(talker, self.new)
        with talker.device:
            self.prompts = torch.zeros(count, length, talker.config.hidden_size, dtype=talker.dtype)
            self.rows = torch.full((count,), len(slots.token) - 1)  # that they are read into

    def configure(self, settings: list[list[torch.Tensor]]) -> None:
        """The settings of each prompt. Most requests have the same ones, and then nothing is copied."""
        if [*map(id, settings)] != [*map(id, self.settings)]:
            for target, values in zip(self.new.settings(), zip(*settings)):
                copy_to_device(torch.stack(values), target)
            self.settings = settings

    def capture(self, pool: tuple | None) -> None:
        self.replay = capture(self.step, self.prompts.device, pool)

    def step(self) -> None:
        self.talker.prefill(self.prompts, RowCache(self.slots.keys, self.slots.values, None, self.rows))
        for state, value in zip(self.slots.state(), self.new.state()):
            state.index_copy_(0, self.rows, value)


class Prefills:
    def __init__(self, talker, slots: Slots, rows: int, pool: tuple | None):
        """slots: `rows` of them and, where there are several, one more that padding is read into"""
        self.slots = slots
        longest = slots.text.shape[1]
        lengths = [length for i in range(16) if (length := SHORTEST_PREFILL << i) < longest] + [longest]
        most = min(rows, max(PREFILL_ROWS))
        self.graphs = {
            (count, length): PrefillGraph(talker, slots, count, length)
            for count in [*(count for count in PREFILL_ROWS if count < most), most]
            for length in lengths
            if count == 1 or count * length <= MAX_PREFILL_POSITIONS
        }
        for graph in reversed(self.graphs.values()):  # the largest first: the others fit into its memory
            graph.capture(pool)

    def graph_for(self, prompt_lengths: list[int]) -> PrefillGraph | None:
        """The smallest graph for these prompts. None: they are too many to be prefilled together."""
        fitting = (
            graph
            for (count, length), graph in self.graphs.items()
            if count >= len(prompt_lengths) and length >= max(prompt_lengths)
        )
        return next(fitting, None)

    def count_that_fit(self, prompt_lengths: list[int]) -> int:
        """How many of them can be prefilled together, from the first on."""
        counts = range(len(prompt_lengths), 0, -1)
        return next(count for count in counts if self.graph_for(prompt_lengths[:count]))

    def load(self, rows: list[int], requests: list[dict], settings: list[list[torch.Tensor]]) -> PrefillGraph:
        """Write prompts, text and settings. The caller draws the noise into `new.noise` and calls `replay`."""
        lengths = [request["inputs_embeds"].shape[1] for request in requests]
        graph = self.graph_for(lengths)
        padding = len(graph.rows) - len(rows)
        graph.configure(settings + settings[:1] * padding)
        copy_to_device(torch.tensor(lengths + [1] * padding)[:, None], graph.new.prompt_length)
        copy_to_device(torch.tensor(rows + [len(self.slots.token) - 1] * padding), graph.rows)
        for index, (row, request) in enumerate(zip(rows, requests)):
            prompt = request["inputs_embeds"][0]
            graph.prompts[index, : len(prompt)].copy_(prompt, non_blocking=True)
            self.slots.set_text(row, request["trailing_text_hidden"][0], request["tts_pad_embed"][0])
        return graph


def copy_to_device(values: torch.Tensor, target: torch.Tensor) -> None:
    """Without waiting for the GPU: the source is pinned."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
