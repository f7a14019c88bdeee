"""The talker as a CUDA graph: an embedding goes in, a hidden state and the next frame's first code come out.

`Rows` has the state of the texts that are decoded together, one row each. Its tensors and the caches are
static: the graphs read and write them in place. The caller configures the rows and prefills their prompts.
Then, for each frame, it draws noise and replays predictor and talker in turn.

Shapes: B rows, L positions, S cache length, H hidden size, V vocabulary size.
"""

from collections.abc import Callable

import numpy as np
import torch
from transformers import Cache, StaticCache


class GraphPool:
    """CUDA graphs that never run at the same time share memory, and the stream that they are captured on."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            self.memory = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(device)

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Capture `fn` and return its replay. On a CPU, return `fn`."""
        if self.device.type != "cuda":
            return fn
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            fn()  # warm-up
        torch._C._cuda_clearCublasWorkspaces()  # or it would use another graph's, which may be freed first
        # "thread_local": other threads may allocate meanwhile
        with torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode="thread_local"):
            fn()
        torch._C._cuda_clearCublasWorkspaces()  # the new one is in this graph's memory: no other call may use it
        return graph.replay


class Sampling:
    """Sampling settings of each row, (B, 1), as tensors: one captured graph serves every request."""

    def __init__(self, vocab_size: int, row_count: int):
        self.vocab_size = vocab_size
        self.temperature = torch.ones(row_count, 1, dtype=torch.float32)
        self.topk_rank = torch.zeros(row_count, 1, dtype=torch.long)  # index of the k-th best, ascending
        self.one_minus_top_p = torch.zeros(row_count, 1, dtype=torch.float32)
        self.greedy = torch.zeros(row_count, 1, dtype=torch.bool)

    def set(self, do_sample: bool, temperature: float | None, top_k: int | None, top_p: float | None) -> None:
        if not do_sample:
            temperature, top_k, top_p = 1.0, 1, 1.0
        top_k = top_k or self.vocab_size  # transformers reads 0 and None as "all"
        temperature, top_p = (1.0 if value is None else value for value in (temperature, top_p))
        if not (temperature > 0 and top_k > 0 and 0 <= top_p <= 1):
            raise ValueError(f"temperature {temperature}, top_k {top_k} must be above 0, top_p {top_p} from 0 to 1")
        self.temperature.fill_(max(temperature, 1e-30))  # smaller ones overflow the scores
        self.topk_rank.fill_(max(self.vocab_size - top_k, 0))
        self.one_minus_top_p.fill_(min(1 - top_p, 1 - 1e-6))  # below 1: the best token always stays
        self.greedy.fill_(not do_sample)


def draw_noise(noise: torch.Tensor) -> None:
    """Exp(1) noise for `sample`, (B, N, V). On a CPU it is drawn code by code, in upstream's order."""
    for draw in noise.unbind(1) if noise.device.type == "cpu" else [noise]:
        draw.exponential_()


def sample(scores: torch.Tensor, sampling: Sampling, noise: torch.Tensor) -> torch.Tensor:
    """Top-k, top-p, then as torch.multinomial: argmax(weight / Exp(1) noise). (B, V), (B, V) -> (B, 1)"""
    ranked, order = (scores / sampling.temperature).sort(-1)  # ascending
    weights = (ranked - ranked[:, -1:]).exp()  # softmax without its denominator
    weights = weights.masked_fill(ranked < ranked.gather(-1, sampling.topk_rank), 0)
    cumulative = weights.cumsum(-1)
    weights = weights.masked_fill(cumulative <= sampling.one_minus_top_p * cumulative[:, -1:], 0)

    noise = torch.where(sampling.greedy, 1.0, noise).gather(-1, order)
    return order.gather(-1, (weights / noise).argmax(-1, keepdim=True))


def apply_rules(
    scores: torch.Tensor, seen: torch.Tensor, repetition_penalty: torch.Tensor, suppressed: torch.Tensor
) -> torch.Tensor:
    """As transformers' logits processors, in their order: penalize seen tokens, then suppress. (B, V)"""
    penalized = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
    return torch.where(seen, penalized, scores).masked_fill(suppressed, float("-inf"))


def round_up(length: int) -> int:
    """To a multiple of 16 positions: SDPA needs mask rows aligned to 16 bytes, in any dtype."""
    return -(-length // 16) * 16


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, else the lowest finite value: -inf would give NaN in rows that see nothing."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def static_cache(config, row_count: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[list, list]:
    """The keys and the values of every layer of a StaticCache, (B, KV, S, D) each."""
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(row_count, config.num_key_value_heads, config.head_dim, dtype, device)
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


class RowCache(Cache):
    """A static cache for one forward: rows write at their `positions` (B, L) and read those below `end`."""

    def __init__(self, keys: list, values: list, positions: torch.Tensor, end: int):
        super().__init__(layers=[])
        self.keys = keys
        self.values = values
        self.positions = positions
        self.end = end

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, _) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(len(keys), device=keys.device)[:, None], slice(None), self.positions
        self.keys[layer][index] = keys.transpose(1, 2)
        self.values[layer][index] = values.transpose(1, 2)
        return self.keys[layer][:, :, : self.end], self.values[layer][:, :, : self.end]


class Rows:
    """The state of B texts that are decoded together."""

    def __init__(self, config, row_count: int, length: int, dtype: torch.dtype, device: torch.device):
        """config: the talker's; length: positions of its cache"""
        predictor = config.code_predictor_config
        groups = config.num_code_groups
        with device:
            # settings of each row
            self.sampling = Sampling(config.vocab_size, row_count)
            self.code_sampling = Sampling(predictor.vocab_size, row_count)
            self.repetition_penalty = torch.ones(row_count, 1, dtype=torch.float32)
            self.suppressed = torch.zeros(row_count, config.vocab_size, dtype=torch.bool)
            self.end_token = torch.zeros(row_count, 1, dtype=torch.long)
            self.min_tokens = torch.zeros(row_count, 1, dtype=torch.long)
            # progress of each row
            self.prompt_length = torch.ones(row_count, 1, dtype=torch.long)
            self.frame = torch.zeros(row_count, 1, dtype=torch.long)  # the number of the current frame
            self.token = torch.zeros(row_count, 1, dtype=torch.long)  # the first code of that frame
            self.hidden = torch.zeros(row_count, 1, config.hidden_size, dtype=dtype)  # `token` comes from it
            self.seen = torch.zeros(row_count, config.vocab_size, dtype=torch.bool)  # for the repetition penalty
            self.ended = torch.zeros(row_count, dtype=torch.bool)  # whether the end token has been chosen
            # for the next frame: noise, and the talker's input
            self.noise = torch.ones(row_count, 1, config.vocab_size, dtype=torch.float32)
            self.code_noise = torch.ones(row_count, groups - 1, predictor.vocab_size, dtype=torch.float32)
            self.embedding = torch.zeros(row_count, 1, config.hidden_size, dtype=dtype)
            # what each frame adds to its embedding, and the codes of all frames
            self.text = torch.zeros(row_count, length, config.hidden_size, dtype=dtype)
            self.codes = torch.zeros(row_count, length, groups, dtype=torch.long)

    def configure(self, **request) -> None:
        """Set all rows from the arguments of talker.generate."""
        names = "temperature", "top_k", "top_p"
        self.sampling.set(request["do_sample"], *(request[name] for name in names))
        self.code_sampling.set(request["subtalker_dosample"], *(request[f"subtalker_{name}"] for name in names))
        self.repetition_penalty.fill_(1.0 if request["repetition_penalty"] is None else request["repetition_penalty"])
        self.suppressed.zero_()
        self.suppressed[:, np.asarray(request["suppress_tokens"])] = True  # numpy converts a long list fast
        self.end_token.fill_(request["eos_token_id"])
        self.min_tokens.fill_(request["min_new_tokens"])

    def set_text(self, row: int, text: torch.Tensor, padding: torch.Tensor) -> None:
        """Set what the frames of a row add to their embeddings: the text (T, H), then padding (1, H)."""
        text = text[: self.text.shape[1]]
        self.text[row, : len(text)].copy_(text, non_blocking=True)
        self.text[row, len(text) :].copy_(padding.to(self.text.device, non_blocking=True))  # broadcast

    def choose_token(self, head: torch.nn.Module) -> None:
        """Choose the first code of frame number `frame` from `hidden`."""
        vocabulary = torch.arange(self.seen.shape[1], device=self.seen.device)
        too_early = (self.frame < self.min_tokens) & (vocabulary == self.end_token)  # (B, V)
        scores = head(self.hidden[:, -1]).float()
        scores = apply_rules(scores, self.seen, self.repetition_penalty, self.suppressed | too_early)
        self.token.copy_(sample(scores, self.sampling, self.noise[:, 0]))
        self.seen.scatter_(1, self.token, True)
        self.ended |= (self.token == self.end_token)[:, 0]


class TalkerGraph:
    def __init__(self, talker, rows: Rows, keys: list, values: list):
        """keys, values: of each layer's static cache, (B, KV, S, D)"""
        self.model = talker.model
        self.head = talker.codec_head
        self.rows = rows
        self.keys = keys
        self.values = values

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, cache) -> torch.Tensor:
        """Run the layers. (B, L, H), (B, L), (B, L, keys) -> (B, L, H)"""
        return self.model(
            inputs_embeds=embeds,
            attention_mask=additive_mask(visible, embeds.dtype)[:, None],
            position_ids=positions,
            cache_position=positions[0],
            past_key_values=cache,
        ).last_hidden_state

    def prefill(self, prompts: torch.Tensor) -> None:
        """Read prompts (B, L, H) from position 0 on, and choose their first tokens. Positions after the end of a
        shorter prompt are computed, too, and overwritten before anything reads them."""
        rows = self.rows
        torch._foreach_zero_([*self.keys, *self.values])  # masked positions must be finite: 0 x NaN is NaN
        positions = torch.arange(prompts.shape[1], device=prompts.device)
        visible = (positions <= positions[:, None])[None]
        positions = positions.expand(len(prompts), -1)
        cache = RowCache(self.keys, self.values, positions, prompts.shape[1])
        hidden = self.forward(prompts, positions, visible, cache)
        last = (rows.prompt_length - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        rows.hidden.copy_(hidden.gather(1, last))
        torch._foreach_zero_([rows.frame, rows.seen, rows.ended])
        rows.choose_token(self.head)

    def step(self) -> None:
        """Advance each row by one position, finished ones too: upstream's random numbers depend on it."""
        rows = self.rows
        length = self.keys[0].shape[2]
        positions = (rows.prompt_length + rows.frame).clamp(max=length - 1)  # (B, 1)
        visible = torch.arange(length, device=positions.device) <= positions[..., None]  # (B, 1, S)
        cache = RowCache(self.keys, self.values, positions, length)
        rows.hidden.copy_(self.forward(rows.embedding, positions, visible, cache))
        rows.frame += 1
        rows.choose_token(self.head)
        rows.token.copy_(torch.where(rows.ended[:, None], rows.end_token, rows.token))  # as transformers pads
