"""The talker as a CUDA graph: an embedding goes in, a hidden state and the next token come out.

`step` is captured once, `prefill` once for each bucket of prompt lengths; both write the same StaticCache and end in
`choose`. The tensors made in __init__ are static: the graphs read and write them in place, and so does the predictor's.
The caller sets up a request with `configure`, `sampling.set` and `begin`, here and in the predictor, then replays the
predictor's `step` and this one in turn, a pair a frame. `capture` and `sample` serve the predictor as well.
"""
import copy
from functools import partial

import numpy as np
import torch
from transformers import StaticCache

from fused_layers import talker_step

NEVER = 1 << 40                                                   # the length of a row that has not ended


def capture(fn, device, pool=None):
    """Records `fn` and returns its replay; on a CPU returns `fn` itself. Other threads may go on meanwhile."""
    if device.type != "cuda":
        return fn
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.random.fork_rng(devices=[device]):                 # the noise of a warm-up is not the caller's
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            fn()                                                  # warm-up
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            fn()                                                  # capture
    return graph.replay


def aligned(length):
    """A cache length whose mask rows start on 16 bytes: others make SDPA fail with a misaligned address."""
    return -(-length // 16) * 16


def additive_mask(visible, dtype):
    """Not -inf: a pad column sees nothing at all, and the NaN it got would spread through the cache."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def buckets(length):
    """Prompt lengths to capture a prefill for: 16, 32, 64, ... up to the whole cache."""
    return [16 << i for i in range(length.bit_length()) if 16 << i < length] + [length]


class Sampling:
    """How to choose from logits. Device scalars, so that one capture serves every request."""
    def __init__(self, vocab):
        self.vocab, self.generator = vocab, None
        self.temperature = torch.ones((), dtype=torch.float32)
        self.kth = torch.zeros(1, dtype=torch.long)               # the rank of the k-th best, counted from the worst
        self.tail = torch.zeros((), dtype=torch.float32)          # 1 - top_p
        self.greedy = torch.zeros((), dtype=torch.bool)

    def set(self, do_sample, temperature, top_k, top_p):
        if not do_sample:
            temperature, top_k, top_p = 1.0, 1, 1.0
        top_k, top_p = top_k or self.vocab, 1.0 if top_p is None else top_p      # as transformers reads 0 and None
        if not (temperature > 0 and top_k > 0 and 0 <= top_p <= 1):
            raise ValueError(f"temperature {temperature} must be above 0, top_k {top_k} a number of candidates, and "
                             f"top_p {top_p} between 0 and 1; do_sample=False always takes the best")
        self.temperature.fill_(max(temperature, 1e-30))           # less would make infinities of scores
        self.kth.fill_(max(self.vocab - top_k, 0))
        self.tail.fill_(min(1 - top_p, 1 - 1e-6))                 # short of 1, so that the best always stays
        self.greedy.fill_(not do_sample)
        # Upstream draws nothing for a greedy choice. Where nothing is captured we leave the caller's seed there too:
        # noise that nobody looks at comes from a generator of its own.
        on_cpu = self.greedy.device.type == "cpu"
        self.generator = torch.Generator() if on_cpu and not do_sample else None


def sample(scores, how):
    """Top-k, then top-p, then one draw with the noise of torch.multinomial. (B, V) -> (B, 1)"""
    ranked, order = (scores / how.temperature).sort(-1)           # ascending
    weights = (ranked - ranked[:, -1:]).exp()                     # a softmax but for its sum, which changes no choice
    weights = weights.masked_fill(ranked < ranked.index_select(-1, how.kth), 0)
    summed = weights.cumsum(-1)
    weights = weights.masked_fill(summed <= how.tail * summed[:, -1:], 0)
    noise = torch.empty_like(scores).exponential_(generator=how.generator)
    noise = torch.where(how.greedy, 1.0, noise).gather(-1, order)
    return order.gather(-1, (weights / noise).argmax(-1, keepdim=True))


def static_cache(model, rows, length):
    config = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(rows, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    return cache


def part_of(cache, rows=None, columns=None):
    """A cache over the first rows and columns of another one's memory."""
    view = copy.copy(cache)
    view.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in view.layers:
        layer.keys, layer.values = (tensor[:rows, :, :columns] for tensor in (layer.keys, layer.values))
    return view


def clear(cache):
    """A masked NaN or infinity from the request before would still be one."""
    torch._foreach_zero_([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])


class TalkerGraph:
    def __init__(self, talker, cache, pool=None, fused=False):
        device, dtype, width = talker.device, talker.dtype, talker.config.hidden_size
        batch, vocab, length = len(cache.layers[0].keys), talker.config.vocab_size, cache.max_cache_len
        self.model, self.head, self.cache, self.device, self.pool = talker.model, talker.codec_head, cache, device, pool
        with device:
            self.columns, self.ids = torch.arange(length), torch.arange(vocab)
            # settings
            self.sampling = Sampling(vocab)
            self.repetition_penalty = torch.ones((), dtype=torch.float32)
            self.suppressed = torch.zeros(vocab, dtype=torch.bool)
            self.end_token, self.min_tokens = torch.zeros(2, dtype=torch.long)
            # the prompt: `start` columns, of which the first `pad` of each row are empty
            self.prompt = torch.zeros(batch, length, width, dtype=dtype)
            self.start = torch.ones(1, dtype=torch.long)
            self.pad = torch.zeros(batch, dtype=torch.long)
            # the frame
            self.embedding = torch.zeros(batch, 1, width, dtype=dtype)
            self.hidden = torch.zeros(batch, 1, width, dtype=dtype)
            self.token = torch.zeros(batch, 1, dtype=torch.long)
            self.frame = torch.zeros(1, dtype=torch.long)                    # the frame that `token` begins
            self.seen = torch.zeros(batch, vocab, dtype=torch.bool)
            self.lengths = torch.full((batch,), NEVER)                       # frames of each row, once it has ended
        self.lengths_on_host = self.lengths if device.type == "cpu" else self.lengths.cpu().pin_memory()
        self.fused = talker_step(talker, self) if fused else None
        self.step = capture(self.fused or self.step, device, pool)
        self.prefills = {bucket: None for bucket in buckets(length)}

    def configure(self, repetition_penalty, suppress_tokens, eos_token_id, min_new_tokens):
        if not repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {repetition_penalty}, it must be above 0: 1.0 for none")
        self.repetition_penalty.fill_(repetition_penalty)
        self.suppressed.zero_()[np.asarray(suppress_tokens)] = True          # torch reads a long list slowly
        self.end_token.fill_(eos_token_id)
        self.min_tokens.fill_(min_new_tokens)

    def begin(self, inputs_embeds, attention_mask):
        """Forgets the request before, reads a prompt (B, L, H), left-padded where its mask (B, L) is 0, and chooses
        the first token."""
        pad = (1 - attention_mask).sum(-1)
        length = inputs_embeds.shape[1] - int(pad.min())          # without columns that are padding in every row
        self.prompt[:, :length] = inputs_embeds[:, -length:]
        self.start.fill_(length)
        self.pad.copy_(pad - pad.min())                           # 0 for a row alone: the fused layers count on it
        prefill = self.captured_prefill(next(bucket for bucket in self.prefills if bucket >= length))
        clear(self.cache)
        self.frame.fill_(-1)
        self.seen.zero_()
        self.lengths.fill_(NEVER)
        prefill()

    def ended_by(self, frame, chosen):
        """Whether no row has such a frame. `chosen` is an event after the choice of its token."""
        if chosen is not None:
            chosen.synchronize()
        return int(self.lengths_on_host.max()) <= frame

    def captured_prefill(self, bucket):
        if self.prefills[bucket] is None:
            self.prefills[bucket] = capture(partial(self.prefill, bucket), self.device, self.pool)
        return self.prefills[bucket]

    def prefill(self, bucket):
        """What the columns behind the prompt leave in the cache is overwritten before any frame may look at it."""
        hidden = self.forward(self.prompt[:, :bucket], self.columns[:bucket], part_of(self.cache, columns=bucket))
        self.hidden.copy_(hidden.index_select(1, self.start - 1))
        self.choose()

    def step(self):
        self.hidden.copy_(self.forward(self.embedding, self.start + self.frame, self.cache))
        self.choose()

    def forward(self, embeds, columns, cache):
        """Embeddings for these columns of the cache -> hidden states. (B, L, H), (L) -> (B, L, H)"""
        pad, keys = self.pad[:, None], self.columns[:cache.layers[0].keys.shape[2]]
        visible = (keys <= columns[:, None]) & (keys >= pad[..., None])                        # (B, L, S)
        mask = additive_mask(visible, embeds.dtype)[:, None]
        return self.model(inputs_embeds=embeds, attention_mask=mask, position_ids=(columns - pad).clamp(min=0),
                          cache_position=columns, past_key_values=cache).last_hidden_state

    def choose(self):
        """The next frame's token, by transformers' rules in transformers' order. A row that has ended goes on unheard
        until all have, as it does there: the noise of the others depends on it."""
        self.frame += 1
        scores = self.head(self.hidden[:, -1]).float()                                         # (B, V)
        penalized = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
        scores = torch.where(self.seen, penalized, scores).masked_fill(self.suppressed, float("-inf"))
        too_early = (self.frame < self.min_tokens) & (self.ids == self.end_token)              # (V)
        self.token.copy_(sample(scores.masked_fill(too_early, float("-inf")), self.sampling))
        self.seen.scatter_(1, self.token, True)
        ended = (self.token == self.end_token)[:, 0]
        self.lengths.copy_(torch.where(ended, self.lengths.minimum(self.frame), self.lengths))
        self.lengths_on_host.copy_(self.lengths, non_blocking=True)
