"""The talker as CUDA graphs: an embedding goes in, a hidden state and the next frame's first code come out.

`step` decodes one position, `prefill` reads a prompt. Both run the model's own forward over one StaticCache and end in
`choose_token`. All tensors made in TalkerGraph.__init__ are static: the talker's graphs and the predictor's read and
write them in place. For each request the caller calls `configure` and `begin`, then replays predictor and talker in
turn, once per frame. Shapes: B rows (texts), L positions, S cache length, H hidden size, V vocabulary size.
"""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import StaticCache


def new_pool(device: torch.device) -> tuple:
    """Memory that graphs share, and a stream to capture all of them: each stream has a cuBLAS workspace of its own."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


def capture(fn: Callable[[], None], device: torch.device, pool=None, generator=None) -> Callable[[], None]:
    """Capture `fn`, which draws from `generator`, as a CUDA graph and return its replay. On a CPU, return `fn`."""
    if device.type != "cuda":
        return fn
    graph = torch.cuda.CUDAGraph()
    pool, stream = pool or new_pool(device)
    with torch.cuda.device(device):  # the generator's state is allocated on the current one
        if generator is not None:
            graph.register_generator_state(generator)
        fn()  # warm-up, on another stream: the capture's own cuBLAS workspace is then allocated in the pool
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # others may allocate
        fn()
    return graph.replay


class Sampling:
    """Sampling settings as device scalars: one captured graph serves every request. Make it under `with device:`."""

    def __init__(self, vocab_size: int, generator: torch.Generator | None = None):
        self.vocab_size = vocab_size
        self.generator = generator  # None: torch's default generator
        self.temperature = torch.ones((), dtype=torch.float32)
        self.topk_rank = torch.zeros(1, 1, dtype=torch.long)  # ascending rank of the k-th best score
        self.one_minus_top_p = torch.zeros((), dtype=torch.float32)
        self.greedy = torch.zeros((), dtype=torch.bool)

    def set(self, do_sample: bool, temperature: float, top_k: int | None, top_p: float | None) -> None:
        if not do_sample:
            temperature, top_k, top_p = 1.0, 1, 1.0
        top_k = top_k or self.vocab_size  # transformers reads 0 and None as "all"
        top_p = 1.0 if top_p is None else top_p
        if not (temperature > 0 and top_k > 0 and 0 <= top_p <= 1):
            raise ValueError(f"temperature {temperature} and top_k {top_k} must be above 0, top_p {top_p} from 0 to 1")
        self.temperature.fill_(max(temperature, 1e-30))  # smaller ones overflow the scores
        self.topk_rank.fill_(max(self.vocab_size - top_k, 0))
        self.one_minus_top_p.fill_(min(1 - top_p, 1 - 1e-6))  # below 1: the best token always stays
        self.greedy.fill_(not do_sample)
        # `sample` draws noise even when greedy, upstream does not: leave the default generator as it is.
        if self.greedy.device.type == "cpu":
            self.generator = None if do_sample else torch.Generator()

    def draw_noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).exponential_(generator=self.generator)


def sample(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Sample after top-k and top-p as torch.multinomial does, by argmax(weight / Exp(1) noise). (B, V) -> (B, 1)"""
    ranked, order = (scores / sampling.temperature).sort(-1)  # ascending
    weights = (ranked - ranked[:, -1:]).exp()  # softmax without its denominator
    weights = weights.masked_fill(ranked < ranked.gather(-1, sampling.topk_rank.expand(len(ranked), 1)), 0)
    cumulative = weights.cumsum(-1)
    weights = weights.masked_fill(cumulative <= sampling.one_minus_top_p * cumulative[:, -1:], 0)

    noise = torch.where(sampling.greedy, 1.0, sampling.draw_noise(scores)).gather(-1, order)  # drawn in token order
    return order.gather(-1, (weights / noise).argmax(-1, keepdim=True))


def round_up(length: int) -> int:
    """Round a length up to a multiple of 16 positions: SDPA needs mask rows aligned to 16 bytes, in any dtype."""
    return -(-length // 16) * 16


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, else the lowest finite value: -inf would give NaN in rows that see nothing."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


class GraphCache(StaticCache):
    """A StaticCache that writes at `cache_position`. That of transformers 5 ignores it and keeps a count of its own."""

    def __init__(self, model, rows: int, length: int):
        config = model.config
        super().__init__(config=config, max_cache_len=length)
        self.early_initialization(rows, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
        self.length = length  # positions that attention sees

    def update(self, keys, values, layer_idx: int, cache_kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, cache_kwargs["cache_position"], keys)
        layer.values.index_copy_(2, cache_kwargs["cache_position"], values)
        return layer.keys[:, :, : self.length], layer.values[:, :, : self.length]


class TalkerGraph:
    def __init__(self, talker, rows: int, max_seq_len: int):
        length = round_up(max_seq_len)
        hidden_size, vocab_size = talker.config.hidden_size, talker.config.vocab_size
        self.model = talker.model
        self.head = talker.codec_head
        self.device = talker.device
        self.cache = GraphCache(talker.model, rows, length)
        self.generator = torch.Generator(self.device) if self.device.type == "cuda" else None
        self.prefills = {}  # longest prompt -> prefill, captured or not

        with self.device:
            self.positions = torch.arange(length)
            self.token_ids = torch.arange(vocab_size)
            # settings of the request
            self.sampling = Sampling(vocab_size, self.generator)
            self.repetition_penalty = torch.ones((), dtype=torch.float32)
            self.suppressed = torch.zeros(vocab_size, dtype=torch.bool)
            self.end_token = torch.zeros((), dtype=torch.long)
            self.min_tokens = torch.zeros((), dtype=torch.long)
            # its prompt, left-padded
            self.prompt = torch.zeros(rows, length, hidden_size, dtype=talker.dtype)
            self.prompt_length = torch.ones(1, dtype=torch.long)  # with padding: the same for all rows
            self.padding = torch.zeros(rows, dtype=torch.long)
            # the current frame
            self.embedding = torch.zeros(rows, 1, hidden_size, dtype=talker.dtype)
            self.hidden = torch.zeros(rows, 1, hidden_size, dtype=talker.dtype)
            self.token = torch.zeros(rows, 1, dtype=torch.long)  # first code of frame number `frame`
            self.frame = torch.zeros(1, dtype=torch.long)
            self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool)  # for the repetition penalty
            self.ended = torch.zeros(rows, dtype=torch.bool)  # rows that have chosen their end token
        self.ended_on_host = torch.zeros(rows, dtype=torch.bool, device="cpu", pin_memory=self.device.type == "cuda")

    def capture(self, pool=None) -> None:
        """Capture `step` and, for one row, `prefill` in buckets of 32, 64, ...; a batch is not launch-bound."""
        self.replay = capture(self.step, self.device, pool, self.generator)
        rows, length = self.prompt.shape[:2]
        for bucket in [length] + [32 << i for i in reversed(range(length.bit_length())) if 32 << i < length]:
            prefill = partial(self.prefill, bucket)  # the largest first: the others reuse its memory
            self.prefills[bucket] = capture(prefill, self.device, pool, self.generator) if rows == 1 else prefill

    def configure(self, repetition_penalty, suppress_tokens, eos_token_id, min_new_tokens, **settings) -> None:
        self.sampling.set(settings["do_sample"], settings["temperature"], settings["top_k"], settings["top_p"])
        self.repetition_penalty.fill_(repetition_penalty)
        self.suppressed.zero_()[np.asarray(suppress_tokens)] = True  # numpy converts a long list faster than torch
        self.end_token.fill_(eos_token_id)
        self.min_tokens.fill_(min_new_tokens)

    def begin(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, **_) -> None:
        """Reset the state, prefill a left-padded prompt (B, L, H) with its mask (B, L), choose the first token."""
        rows = len(inputs_embeds)  # the graph may have more; nobody reads what those decode
        padding = (1 - attention_mask).sum(-1)
        length = inputs_embeds.shape[1] - int(padding.min())  # drop columns that are padding in every row
        self.prompt[:rows, :length] = inputs_embeds[:, -length:]
        self.prompt_length.fill_(length)
        self.padding[:rows] = padding - padding.min()
        self.frame.fill_(-1)
        self.seen.zero_()
        self.ended.zero_()
        self.cache.reset()  # masked positions must be finite: 0 x NaN is NaN
        self.prefills[min(bucket for bucket in self.prefills if bucket >= length)]()

    def all_ended(self, rows: int, token_chosen: torch.cuda.Event | None) -> bool:
        """Whether the first `rows` rows have ended. The event was recorded after the last `step`."""
        if token_chosen is not None:
            token_chosen.synchronize()
        return bool(self.ended_on_host[:rows].all())

    def prefill(self, length: int) -> None:
        """Padding after the prompt is computed too: decoding overwrites each position before attending to it."""
        cache = copy.copy(self.cache)  # the same memory
        cache.length = length
        hidden = self.forward(self.prompt[:, :length], self.positions[None, :length], cache)
        self.hidden.copy_(hidden.index_select(1, self.prompt_length - 1))
        self.choose_token()

    def step(self) -> None:
        self.hidden.copy_(self.forward(self.embedding, (self.prompt_length + self.frame)[None], self.cache))
        self.choose_token()

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, cache: GraphCache) -> torch.Tensor:
        """Run the layers at these positions of the cache. (B, L, H), (1, L) -> (B, L, H)"""
        keys = self.positions[: cache.length]
        padding = self.padding[:, None]  # (B, 1)
        visible = (keys <= positions[..., None]) & (keys >= padding[..., None])  # (B, L, S)
        return self.model(
            inputs_embeds=embeds,
            attention_mask=additive_mask(visible, embeds.dtype)[:, None],
            position_ids=(positions - padding).clamp(min=0),
            cache_position=positions[0],
            past_key_values=cache,
        ).last_hidden_state

    def choose_token(self) -> None:
        """Choose the next token by the rules of transformers' logits processors, in their order."""
        self.frame += 1
        scores = self.head(self.hidden[:, -1]).float()  # (B, V)
        penalized = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
        scores = torch.where(self.seen, penalized, scores)
        too_early = (self.frame < self.min_tokens) & (self.token_ids == self.end_token)  # (V)
        scores = scores.masked_fill(self.suppressed | too_early, float("-inf"))

        # Finished rows keep decoding, as they do upstream: the random numbers of the others depend on it.
        self.token.copy_(sample(scores, self.sampling))
        self.seen.scatter_(1, self.token, True)
        self.ended |= (self.token == self.end_token)[:, 0]
        self.ended_on_host.copy_(self.ended, non_blocking=True)
