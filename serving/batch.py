"""Many streams at once: rows of a batch, each with its own position, settings and random numbers.

A stream lives in a slot, one row of every tensor of `Slots`. The graph of the smallest batch size above the highest
slot in use runs all rows; rows without a stream, or whose stream waits, do not advance:

    slot 0   [ prompt | frame 0 | frame 1 | frame 2 |  ...            position 37
    slot 1   [ prompt      | frame 0 |                                position 12
    slot 2   [ a longer prompt            | frame 0 | frame 1 |       position 51
    slot 3     free
             every replay adds one frame to each row that may advance; a row joins and leaves between two replays

`Prefill` runs the prompts of several streams at once and writes their keys and values into their slots. A stream that
is alone is prefilled and decoded in the decoder's single-row graphs instead, and copied into a slot when another one
joins. Copies are exact; on a CPU in float32 a stream's codes do not depend on which rows run beside it.

Shapes: B rows, L positions, S cache length, H hidden size, V vocabulary size.
"""

import copy
import logging
from functools import lru_cache
from types import SimpleNamespace

import torch

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import GraphCache, Sampling, TalkerGraph, capture, round_up
from fast.batched import BatchedStack, compile_ahead, why_not

log = logging.getLogger("qwen3_tts_cudagraphs")

SAMPLING = ("temperature", "topk_rank", "one_minus_top_p", "greedy")
SETTINGS = ("repetition_penalty", "suppressed", "end_token", "min_tokens")
PROGRESS = ("prompt_length", "hidden", "token", "frame", "seen", "ended")
CONTENT = ("text", "codes")
REQUEST_SETTINGS = (  # arguments of talker.generate that `configure` reads, besides suppress_tokens
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id", "min_new_tokens"),
    *("subtalker_dosample", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
)

PREFILL_ROWS = (1, 4, 32)  # prompts per captured prefill
SHORTEST_PREFILL = 32  # positions; longer ones in powers of two
MAX_PREFILL_POSITIONS = 4096  # of all rows together, where there are several


class RowSampling(Sampling):
    """Sampling settings and noise of each row. The noise is drawn outside the graph, from each stream's generator."""

    def __init__(self, vocab_size: int, rows: int, draws: int):
        self.vocab_size = vocab_size
        self.temperature = torch.ones(rows, 1, dtype=torch.float32)
        self.topk_rank = torch.zeros(rows, 1, dtype=torch.long)
        self.one_minus_top_p = torch.zeros(rows, 1, dtype=torch.float32)
        self.greedy = torch.zeros(rows, 1, dtype=torch.bool)
        self.noise = torch.ones(rows, draws, vocab_size, dtype=torch.float32)

    def __getitem__(self, rows) -> "RowSampling":
        """The same rows of every tensor, sharing memory."""
        view = copy.copy(self)
        for name in (*SAMPLING, "noise"):
            setattr(view, name, getattr(self, name)[rows])
        return view

    def begin_frame(self) -> None:
        """`sample` is called once for each draw, in order."""
        self.draws = iter(range(self.noise.shape[1]))

    def draw_noise(self, like: torch.Tensor) -> torch.Tensor:
        return self.noise[:, next(self.draws)]


class Rows:
    """Settings and progress of `rows` streams: what TalkerGraph has for one request, with a row for each stream."""

    def __init__(self, config, rows: int, dtype: torch.dtype):
        predictor = config.code_predictor_config
        self.sampling = RowSampling(config.vocab_size, rows, 1)
        self.predictor_sampling = RowSampling(predictor.vocab_size, rows, config.num_code_groups - 1)
        self.repetition_penalty = torch.ones(rows, 1, dtype=torch.float32)
        self.suppressed = torch.zeros(rows, config.vocab_size, dtype=torch.bool)
        self.end_token = torch.zeros(rows, 1, dtype=torch.long)
        self.min_tokens = torch.zeros(rows, 1, dtype=torch.long)
        self.prompt_length = torch.ones(rows, 1, dtype=torch.long)
        self.hidden = torch.zeros(rows, 1, config.hidden_size, dtype=dtype)
        self.token = torch.zeros(rows, 1, dtype=torch.long)
        self.frame = torch.zeros(rows, 1, dtype=torch.long)
        self.seen = torch.zeros(rows, config.vocab_size, dtype=torch.bool)
        self.ended = torch.zeros(rows, dtype=torch.bool)

    def settings(self) -> list[torch.Tensor]:
        """All tensors that a request's settings are written to."""
        samplings = [getattr(self.sampling, name) for name in SAMPLING]
        samplings += [getattr(self.predictor_sampling, name) for name in SAMPLING]
        return [getattr(self, name) for name in SETTINGS] + samplings

    def state(self) -> list[torch.Tensor]:
        """All tensors that a prefill sets."""
        return self.settings() + [getattr(self, name) for name in PROGRESS]


class HostSettings:
    """Settings of requests on the host. Most requests have the same ones, so they are kept."""

    def __init__(self, config):
        self.config = config
        self.rows = lru_cache(maxsize=64, typed=True)(self.make_row)

    def row(self, request: dict) -> list[torch.Tensor]:
        """In the order of `Rows.settings` and shaped like one row of them."""
        settings = {name: request[name] for name in REQUEST_SETTINGS}
        return self.rows(suppress_tokens=tuple(request["suppress_tokens"]), **settings)

    def make_row(self, suppress_tokens: tuple[int, ...], **settings) -> list[torch.Tensor]:
        row = Rows(self.config, 1, torch.float32)
        talker = SimpleNamespace(**vars(row) | dict(suppressed=row.suppressed[0]))
        TalkerGraph.configure(talker, suppress_tokens=list(suppress_tokens), **settings)
        PredictorGraph.configure(SimpleNamespace(sampling=row.predictor_sampling), **settings)
        return [tensor[0] for tensor in row.settings()]


class Slots(Rows):
    """The state of every stream, one row each. The last row belongs to no stream: padding is written there."""

    def __init__(self, talker, slots: int, max_seq_len: int):
        config = talker.config
        length = round_up(max_seq_len)
        self.unused = slots
        self.cache = GraphCache(talker.model, slots + 1, length)
        self.reads_masked = True  # whether attention reads masked positions; the kernels of fast/batched.cu do not
        with talker.device:
            super().__init__(config, slots + 1, talker.dtype)
            self.text = torch.zeros(slots + 1, length, config.hidden_size, dtype=talker.dtype)
            self.codes = torch.zeros(slots + 1, length, config.num_code_groups, dtype=torch.long)
            self.advance = torch.zeros(slots + 1, dtype=torch.bool)  # rows that take part in the next frame
        self.cache_rows = [cache_row(self.cache, slot) for slot in range(slots + 1)]

    def slot_state(self, slot: int) -> list[torch.Tensor]:
        """All tensors of one stream, but for its cache."""
        return [tensor[slot] for tensor in (*self.state(), self.text, self.codes)]

    def single_state(self, talker: TalkerGraph, predictor: PredictorGraph) -> list[torch.Tensor]:
        """The same tensors of the single-row graphs, in the same order and shaped like those of a slot."""
        tensors = [getattr(talker, name) for name in SETTINGS]
        tensors += [getattr(graph.sampling, name) for graph in (talker, predictor) for name in SAMPLING]
        tensors += [getattr(talker, name) for name in PROGRESS]
        tensors += [predictor.text, predictor.codes]
        return [tensor.view(like.shape) for tensor, like in zip(tensors, self.slot_state(0), strict=True)]

    def set_text(self, slot: int, trailing_text_hidden: torch.Tensor, tts_pad_embed: torch.Tensor, **_) -> None:
        """Set what each frame adds to its embedding: the text (1, T, H), then padding (1, 1, H)."""
        text = trailing_text_hidden[0, : self.text.shape[1]]
        self.text[slot, : len(text)].copy_(text, non_blocking=True)
        self.text[slot, len(text) :].copy_(tts_pad_embed[0], non_blocking=True)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a stream with `length` positions to another slot."""
        torch._foreach_copy_(self.slot_state(target), self.slot_state(source))
        copy_cache_row(self.cache_rows[source], self.cache_rows[target], length, self.reads_masked)

    def copy_from_single(self, slot: int, talker: TalkerGraph, predictor: PredictorGraph, length: int) -> None:
        """Copy a stream from the single-row graphs."""
        torch._foreach_copy_(self.slot_state(slot), self.single_state(talker, predictor))
        copy_cache_row(cache_row(talker.cache, 0), self.cache_rows[slot], length, self.reads_masked)

    def copy_to_single(self, slot: int, talker: TalkerGraph, predictor: PredictorGraph, length: int) -> None:
        """Copy a stream back to the single-row graphs."""
        torch._foreach_copy_(self.single_state(talker, predictor), self.slot_state(slot))
        copy_cache_row(self.cache_rows[slot], cache_row(talker.cache, 0), length, clear=True)


def cache_row(cache, row: int) -> list[torch.Tensor]:
    """Keys and values of one row, (KV, S, D) each."""
    return [tensor[row] for layer in cache.layers for tensor in (layer.keys, layer.values)]


def copy_cache_row(source: list[torch.Tensor], target: list[torch.Tensor], length: int, clear: bool) -> None:
    """Copy the first `length` positions. `clear` the rest if attention reads it: 0 x NaN is NaN even where masked."""
    if clear:
        torch._foreach_zero_([tensor[:, length:] for tensor in target])
    torch._foreach_copy_([tensor[:, :length] for tensor in target], [tensor[:, :length] for tensor in source])


class RowLayer:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys = keys
        self.values = values


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


class PromptCache:
    """Stands in for a StaticCache in a prefill: prompts are written into their slots and attend to themselves only."""

    def __init__(self, cache, slots: torch.Tensor, length: int):
        self.layers = [RowLayer(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in cache.layers]
        self.length = length
        self.slots = slots  # (B)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, _) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(0, self.slots, key)
        layer.values.index_copy_(0, self.slots, value)
        return key, value


class PrefillGraph(TalkerGraph, Rows):
    """Prefill `rows` prompts of up to `length` positions: `forward` and `choose_token` are the talker's.

    Prompts begin at position 0. Padding after a prompt is computed too, as in a prefill of one row: decoding overwrites
    each position before attending to it.
    """

    def __init__(self, talker, slots: Slots, rows: int, length: int):
        self.model = talker.model
        self.head = talker.codec_head
        self.device = talker.device
        with self.device:
            Rows.__init__(self, talker.config, rows, talker.dtype)
            self.prompt = torch.zeros(rows, length, talker.config.hidden_size, dtype=talker.dtype)
            self.slots = torch.full((rows,), slots.unused)
            self.rows = torch.arange(rows)
            self.positions = torch.arange(length)
            self.token_ids = torch.arange(talker.config.vocab_size)
            self.padding = torch.zeros(1, dtype=torch.long)
        self.cache = PromptCache(slots.cache, self.slots, length)
        self.all_slots = slots
        self.ended_on_host = self.ended  # makes choose_token's copy a no-op: no prompt ends before its first frame

    def capture(self, pool=None) -> None:
        self.replay = capture(self.prefill, self.device, pool)

    def prefill(self) -> None:
        self.frame.fill_(-1)
        self.seen.zero_()
        self.ended.zero_()
        self.sampling.begin_frame()
        hidden = self.forward(self.prompt, self.positions[None], self.cache)
        self.hidden.copy_(hidden[self.rows, self.prompt_length[:, 0] - 1][:, None])
        self.choose_token()
        for state, new in zip(self.all_slots.state(), self.state()):
            state.index_copy_(0, self.slots, new)


class Prefill:
    """Prefills for several numbers of rows and lengths."""

    def __init__(self, talker, slots: Slots, pool=None):
        self.slots = slots
        longest = slots.text.shape[1]
        lengths = [length for i in range(16) if (length := SHORTEST_PREFILL << i) < longest] + [longest]
        most = min(slots.unused, max(PREFILL_ROWS))
        self.graphs = {}
        for rows in [*(rows for rows in PREFILL_ROWS if rows < most), most]:
            for length in lengths:
                if rows == 1 or rows * length <= MAX_PREFILL_POSITIONS:
                    self.graphs[rows, length] = PrefillGraph(talker, slots, rows, length)
        for graph in reversed(self.graphs.values()):  # the largest first: the others fit into its memory
            graph.capture(pool)

    def graph_for(self, prompt_lengths: list[int]) -> PrefillGraph | None:
        """The smallest graph for these prompts. None: they are too many to be prefilled together."""
        for (rows, length), graph in self.graphs.items():
            if rows >= len(prompt_lengths) and length >= max(prompt_lengths):
                return graph
        return None

    def load(self, slots: list[int], requests: list[dict], settings: list[list[torch.Tensor]]) -> PrefillGraph:
        """Write prompts, text and settings. The caller draws the noise into `sampling.noise` and calls `replay`."""
        lengths = [request["inputs_embeds"].shape[1] for request in requests]
        graph = self.graph_for(lengths)
        padding_rows = len(graph.rows) - len(slots)
        settings = settings + settings[:1] * padding_rows
        for target, values in zip(graph.settings(), zip(*settings)):
            copy_to_device(torch.stack(values), target)
        copy_to_device(torch.tensor(lengths + [1] * padding_rows)[:, None], graph.prompt_length)
        copy_to_device(torch.tensor(slots + [self.slots.unused] * padding_rows), graph.slots)
        for row, (slot, request) in enumerate(zip(slots, requests)):
            prompt = request["inputs_embeds"][0]
            graph.prompt[row, : len(prompt)].copy_(prompt, non_blocking=True)
            self.slots.set_text(slot, **request)
            if self.slots.reads_masked:
                torch._foreach_zero_(self.slots.cache_rows[slot])
        return graph


def copy_to_device(values: torch.Tensor, target: torch.Tensor) -> None:
    """Without waiting for the GPU: the source is pinned."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


class FrameGraph(TalkerGraph):
    """A whole frame of the first `rows` slots as one graph: `forward` and `choose_token` are the talker's."""

    def __init__(self, talker, predictor: PredictorGraph, slots: Slots, rows: int):
        """`predictor` is that of a single row; this one shares all but its cache and sampling."""
        self.model = talker.model
        self.head = talker.codec_head
        self.device = talker.device
        self.predictor = copy.copy(predictor)
        self.predictor.cache = GraphCache(predictor.model, rows, predictor.cache.length)
        self.predictor.sampling = slots.predictor_sampling[:rows]
        self.sampling = slots.sampling[:rows]
        for name in (*SETTINGS, *PROGRESS, *CONTENT, "advance"):
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
        for model in (talker.model, predictor.model):
            compile_ahead(model)  # both at once
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
