"""One frame of many streams at once: rows of a batch, each with its own position, settings and random numbers.

A stream lives in a slot, one row of every tensor of `Slots`. The streams in use are slots 0 to n - 1, and the graph of
the smallest batch size that holds them runs them all:

    slot 0   [ prompt | frame 0 | frame 1 | frame 2 |  ...            position 37
    slot 1   [ prompt      | frame 0 |                                position 12
    slot 2   [ a longer prompt            | frame 0 | frame 1 |       position 51
    slot 3     free
             every replay adds one frame to each row that may advance; a row joins and leaves between two replays

A stream is prefilled in the decoder's single-row graphs. It stays in them while it is the only one; otherwise it is
copied into a slot. Copies are exact; on a CPU in float32 a stream's codes do not depend on which rows run beside it.
"""

import copy
import logging

import torch

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import GraphCache, Sampling, TalkerGraph, capture, round_up
from fast.batched import BatchedStack, why_not

log = logging.getLogger("qwen3_tts_cudagraphs")

SETTINGS = ("temperature", "topk_rank", "one_minus_top_p", "greedy")
# Tensors of Slots with a row for each stream, beside its cache and sampling settings
STATE = (
    *("repetition_penalty", "suppressed", "end_token", "min_tokens", "prompt_length", "text", "codes"),
    *("hidden", "token", "frame", "seen", "ended"),
)


class RowSampling(Sampling):
    """Sampling settings and noise of each row. The noise is drawn outside the graph, from each stream's generator."""

    def __init__(self, vocab_size: int, rows: int, draws: int):
        self.vocab_size = vocab_size
        self.temperature = torch.ones(rows, 1, dtype=torch.float32)
        self.topk_rank = torch.zeros(rows, 1, dtype=torch.long)
        self.one_minus_top_p = torch.zeros(rows, 1, dtype=torch.float32)
        self.greedy = torch.zeros(rows, 1, dtype=torch.bool)
        self.noise = torch.ones(rows, draws, vocab_size, dtype=torch.float32)

    def view(self, rows: int) -> "RowSampling":
        """The first rows, sharing memory."""
        view = RowSampling.__new__(RowSampling)
        view.vocab_size = self.vocab_size
        for name in (*SETTINGS, "noise"):
            setattr(view, name, getattr(self, name)[:rows])
        return view

    def begin_frame(self) -> None:
        """`sample` is called once for each draw, in order."""
        self.draws = iter(range(self.noise.shape[1]))

    def draw_noise(self, like: torch.Tensor) -> torch.Tensor:
        return self.noise[:, next(self.draws)]


class RowCache:
    """Stands in for a StaticCache: each row writes its new key and value at its own position."""

    def __init__(self, layers: list, positions: torch.Tensor):
        self.layers = layers
        self.length = layers[0].keys.shape[2]
        self.positions = positions  # (B)
        self.rows = torch.arange(len(positions), device=positions.device)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, _) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        layer.keys[self.rows, :, self.positions] = key[:, :, 0]
        layer.values[self.rows, :, self.positions] = value[:, :, 0]
        return layer.keys, layer.values


class Slots:
    """The state of every stream, one row each."""

    def __init__(self, talker, slots: int, max_seq_len: int):
        config = talker.config
        length = round_up(max_seq_len)
        predictor = talker.code_predictor
        self.cache = GraphCache(talker.model, slots, length)
        self.reads_masked = True  # whether attention reads masked positions; the kernels of fast/batched.cu do not
        with talker.device:
            self.talker_sampling = RowSampling(config.vocab_size, slots, 1)
            self.predictor_sampling = RowSampling(predictor.config.vocab_size, slots, config.num_code_groups - 1)
            self.repetition_penalty = torch.ones(slots, 1, dtype=torch.float32)
            self.suppressed = torch.zeros(slots, config.vocab_size, dtype=torch.bool)
            self.end_token = torch.zeros(slots, 1, dtype=torch.long)
            self.min_tokens = torch.zeros(slots, 1, dtype=torch.long)
            self.prompt_length = torch.ones(slots, 1, dtype=torch.long)
            self.text = torch.zeros(slots, length, config.hidden_size, dtype=talker.dtype)
            self.codes = torch.zeros(slots, length, config.num_code_groups, dtype=torch.long)
            self.hidden = torch.zeros(slots, 1, config.hidden_size, dtype=talker.dtype)
            self.token = torch.zeros(slots, 1, dtype=torch.long)
            self.frame = torch.zeros(slots, 1, dtype=torch.long)
            self.seen = torch.zeros(slots, config.vocab_size, dtype=torch.bool)
            self.ended = torch.zeros(slots, dtype=torch.bool)
            self.advance = torch.zeros(slots, dtype=torch.bool)  # rows that take part in the next frame

    def slot_state(self, slot: int) -> list[torch.Tensor]:
        """All tensors of one stream, but for its cache."""
        tensors = [getattr(self, name)[slot] for name in STATE]
        for sampling in (self.talker_sampling, self.predictor_sampling):
            tensors += [getattr(sampling, name)[slot] for name in SETTINGS]
        return tensors

    def single_state(self, talker: TalkerGraph, predictor: PredictorGraph) -> list[torch.Tensor]:
        """The same tensors of the single-row graphs, in the same order and shaped like those of a slot."""
        owners = [predictor if name in ("text", "codes") else talker for name in STATE]
        tensors = [getattr(owner, name) for owner, name in zip(owners, STATE)]
        for sampling in (talker.sampling, predictor.sampling):
            tensors += [getattr(sampling, name) for name in SETTINGS]
        return [tensor.view(like.shape) for tensor, like in zip(tensors, self.slot_state(0), strict=True)]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a stream with `length` positions to another slot."""
        torch._foreach_copy_(self.slot_state(target), self.slot_state(source))
        copy_cache_row(cache_row(self.cache, source), cache_row(self.cache, target), length, self.reads_masked)

    def copy_from_single(self, slot: int, talker: TalkerGraph, predictor: PredictorGraph, length: int) -> None:
        """Copy a stream from the single-row graphs."""
        torch._foreach_copy_(self.slot_state(slot), self.single_state(talker, predictor))
        copy_cache_row(cache_row(talker.cache, 0), cache_row(self.cache, slot), length, self.reads_masked)

    def copy_to_single(self, slot: int, talker: TalkerGraph, predictor: PredictorGraph, length: int) -> None:
        """Copy a stream back to the single-row graphs."""
        torch._foreach_copy_(self.single_state(talker, predictor), self.slot_state(slot))
        copy_cache_row(cache_row(self.cache, slot), cache_row(talker.cache, 0), length, clear=True)


def cache_row(cache, row: int) -> list[torch.Tensor]:
    """Keys and values of one row, (KV, S, D) each."""
    return [tensor[row] for layer in cache.layers for tensor in (layer.keys, layer.values)]


def copy_cache_row(source: list[torch.Tensor], target: list[torch.Tensor], length: int, clear: bool) -> None:
    """Copy the first `length` positions. `clear` the rest if attention reads it: 0 x NaN is NaN even where masked."""
    if clear:
        torch._foreach_zero_([tensor[:, length:] for tensor in target])
    torch._foreach_copy_([tensor[:, :length] for tensor in target], [tensor[:, :length] for tensor in source])


class FrameGraph(TalkerGraph):
    """A whole frame of the first `rows` slots as one graph: `forward` and `choose_token` are the talker's."""

    def __init__(self, talker, predictor: PredictorGraph, slots: Slots, rows: int):
        """`predictor` is that of a single row; this one shares all but its cache and sampling."""
        self.model = talker.model
        self.head = talker.codec_head
        self.device = talker.device
        self.predictor = copy.copy(predictor)
        self.predictor.cache = GraphCache(predictor.model, rows, predictor.cache.length)
        self.predictor.sampling = slots.predictor_sampling.view(rows)
        self.sampling = slots.talker_sampling.view(rows)
        for name in (*STATE, "advance"):
            setattr(self, name, getattr(slots, name)[:rows])
        layers = [RowLayer(layer.keys[:rows], layer.values[:rows]) for layer in slots.cache.layers]
        with self.device:
            self.positions = torch.arange(slots.cache.length)
            self.token_ids = torch.arange(talker.config.vocab_size)
            self.padding = torch.zeros(rows, dtype=torch.long)
            self.cache = RowCache(layers, torch.zeros(rows, dtype=torch.long))
        self.ended_on_host = self.ended  # makes choose_token's copy a no-op: the engine copies `ended` to the host

    def capture(self, pool=None) -> None:
        self.replay = capture(self.step, self.device, pool)

    def next_positions(self) -> torch.Tensor:
        """(B, 1). Clamped: a row whose cache is full does not advance, but is computed with the others."""
        return (self.prompt_length + self.frame).clamp(max=len(self.positions) - 1)

    def step(self) -> None:
        """With upstream's layers. KernelFrameGraph has the same from fewer kernels."""
        state = (self.hidden, self.token, self.frame, self.seen, self.ended)
        before = [tensor.clone() for tensor in state]
        self.sampling.begin_frame()
        self.predictor.sampling.begin_frame()

        codes, embedding = self.predictor.predict(self.hidden, self.token)
        rows, frame = self.cache.rows, self.frame[:, 0]
        self.codes[rows, frame] = codes
        embedding = embedding + self.text[rows, frame][:, None]
        positions = self.next_positions()
        self.cache.positions.copy_(positions[:, 0])
        self.hidden.copy_(self.forward(embedding, positions, self.cache))
        self.choose_token()

        # Rows that must not advance keep their state. What they wrote to cache and codes, their next frame overwrites.
        for tensor, old in zip(state, before, strict=True):
            advance = self.advance.view(-1, *[1] * (tensor.dim() - 1))
            tensor.copy_(torch.where(advance, tensor, old))


class KernelFrameGraph(FrameGraph):
    """The same frame with the kernels of fast/batched.cu around the matrix products, for bfloat16 on a GPU."""

    def __init__(self, talker, predictor: PredictorGraph, slots: Slots, rows: int):
        super().__init__(talker, predictor, slots, rows)
        self.talker_stack = BatchedStack(talker.model, self.cache.layers, rows)
        self.predictor_stack = BatchedStack(predictor.model, self.predictor.cache.layers, 2 * rows)
        with self.device:
            self.code_positions = torch.arange(talker.config.num_code_groups)[:, None].repeat(1, rows)  # (16, B)
            self.first_slots = torch.arange(rows).repeat(2)  # (2 B): positions 0 and 1 of each row

    def step(self) -> None:
        rows, frame = self.cache.rows, self.frame[:, 0]
        codes, embedding = self.predict()
        self.codes[rows, frame] = codes
        embedding = embedding + self.text[rows, frame]
        hidden = self.talker_stack.forward(embedding, self.next_positions()[:, 0])
        self.hidden.copy_(torch.where(self.advance[:, None, None], hidden[:, None], self.hidden))
        self.talker_stack.choose_rows(self.head(hidden), self, self.sampling, self.sampling.noise[:, 0])

    def predict(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes (B, 16) of the frame and the sum of their embeddings (B, H). Positions 0 and 1 are one pass."""
        predictor, stack = self.predictor, self.predictor_stack
        codes = [self.token]
        embeds = [predictor.embed_token(self.token)[:, 0]]
        first = predictor.project(torch.cat([self.hidden[:, 0], embeds[0]]))  # (2 B, H')
        hidden = stack.forward(first, self.code_positions[:2].flatten(), self.first_slots)[len(self.token) :]
        for i, (head, embed) in enumerate(zip(predictor.heads, predictor.embed_code)):
            if i > 0:
                hidden = stack.forward(predictor.project(embeds[-1]), self.code_positions[i + 1])
            codes.append(stack.sample_rows(head(hidden), predictor.sampling, predictor.sampling.noise[:, i]))
            embeds.append(embed(codes[-1][:, 0]))
        return torch.cat(codes, dim=1), torch.stack(embeds, dim=1).sum(1)


def frame_graph(talker, predictor: PredictorGraph, slots: Slots, rows: int) -> FrameGraph:
    """With the kernels of fast/batched.cu where they run."""
    if not (why_not(talker.model) or why_not(predictor.model)):
        try:
            graph = KernelFrameGraph(talker, predictor, slots, rows)
            slots.reads_masked = False
            return graph
        except (OSError, RuntimeError) as error:
            log.warning("frames of %d streams run without the kernels of fast/batched.cu: %s", rows, error)
    return FrameGraph(talker, predictor, slots, rows)


class RowLayer:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys = keys
        self.values = values
