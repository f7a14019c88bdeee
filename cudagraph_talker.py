"""The talker as a CUDA graph: an embedding goes in, a hidden state and the next token come out.

`step` is captured once, `prefill` once for each prompt length bucket; both write the same StaticCache and end in the
same `choose`. All tensors in __init__ are static: the graphs read and write them in place, and so does the predictor.
The caller calls `begin`, replays one prefill, then replays predictor and talker in turn, one pair a frame.
`capture` and `sample` serve the predictor as well.
"""
import copy
from functools import partial

import torch
import torch.nn.functional as F
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NEVER = 1 << 40                                                   # the length of a row that has not ended


def capture(fn, device, pool=None):
    """Records `fn` and returns its replay; on a CPU returns `fn` itself."""
    if device.type != "cuda":
        return fn
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.random.fork_rng(devices=[device]):                 # the noise of a warm-up is not the caller's
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            fn()                                                  # warm-up
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            fn()                                                  # capture
    return graph.replay


def aligned(length):
    """A cache length whose mask rows start on 16 bytes: others make SDPA fail with a misaligned address."""
    return -(-length // 16) * 16


def buckets(length):
    """Prompt lengths to capture a prefill for: 16, 32, 64, ... up to the whole cache."""
    return [16 << i for i in range(length.bit_length()) if 16 << i < length] + [length]


class Sampling:
    """How to choose from logits. Device scalars, so that one capture serves every request."""

    def __init__(self, vocab, device):
        self.vocab = vocab
        self.temperature = torch.ones((), device=device)
        self.kth = torch.zeros(1, dtype=torch.long, device=device)   # rank of the k-th best of `vocab`, ascending
        self.tail = torch.zeros((), device=device)                   # 1 - top_p
        self.greedy = torch.zeros((), dtype=torch.bool, device=device)
        self.generator = None

    def set(self, do_sample, temperature, top_k, top_p):
        if do_sample and not temperature > 0:
            raise ValueError(f"temperature is {temperature}, it must be above 0: use do_sample=False for greedy choice")
        if do_sample and top_p is not None and not 0 <= top_p <= 1:
            raise ValueError(f"top_p is {top_p}, it must lie between 0 and 1")
        if do_sample and top_k is not None and top_k < 0:
            raise ValueError(f"top_k is {top_k}, it must be a number of candidates, or 0 for all of them")
        top_k = min(top_k or self.vocab, self.vocab) if do_sample else 1
        self.temperature.fill_(temperature if do_sample else 1.0)
        self.kth.fill_(self.vocab - top_k)
        self.tail.fill_(1 - top_p if do_sample and top_p is not None else 0.0)
        self.greedy.fill_(not do_sample)
        # Upstream draws nothing for a greedy choice. Uncaptured code can follow it: the noise that nobody looks at
        # comes from a generator of its own, and the caller's seed stays where upstream would leave it.
        on_cpu = self.greedy.device.type == "cpu"
        self.generator = torch.Generator() if on_cpu and not do_sample else None


def sample(scores, how):
    """Top-k, then top-p, then one draw, in transformers' order and with its noise. (B, V) -> (B, 1)"""
    scores = scores / how.temperature
    ranked, order = scores.sort(-1)                               # ascending
    ranked = ranked.masked_fill(ranked < ranked.index_select(-1, how.kth), float("-inf"))
    removed = ranked.softmax(-1).cumsum(-1) <= how.tail           # below the k-th best the sum is 0: removed too
    removed[:, -1] = False
    probs = scores.masked_fill(removed.scatter(-1, order, removed), float("-inf")).softmax(-1)
    noise = torch.empty_like(probs).exponential_(generator=how.generator)
    return (probs / torch.where(how.greedy, 1.0, noise)).argmax(-1, keepdim=True)


def grouped_attention(module, query, key, value, attention_mask, scaling, **_):
    """SDPA that reads each key-value head once: the query heads which share it become its query rows."""
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, groups, 1)   # (B, 1, G * L, S)
    query = query.reshape(batch, -1, groups * length, width)                           # (B, KV, G * L, D)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.view(query.shape).reshape(batch, heads, length, width).transpose(1, 2), None


def fewer_kernels(model, plain, length):
    """The same numbers from the model's own forward with fewer kernels: norms in one, keys and values not repeated,
    rotary embeddings looked up. The three rows of the talker's multimodal RoPE are always equal in speech, so its
    layers take the forward of the `plain` model's, the predictor."""
    ALL_ATTENTION_FUNCTIONS.register("grouped", grouped_attention)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight,
                                     eps=module.variance_epsilon)
    for layer in model.layers:
        layer.self_attn.forward = partial(type(plain.layers[0].self_attn).forward, layer.self_attn)
        layer.self_attn.config._attn_implementation = "grouped"
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    positions = torch.arange(length, device=model.device)[None]
    cos, sin = type(plain.rotary_emb).forward(model.rotary_emb, like, positions)       # (1, length, D)

    def look_up(_, position_ids):
        position_ids = position_ids if position_ids.dim() == 2 else position_ids[0]    # (B, L)
        return F.embedding(position_ids, cos[0]), F.embedding(position_ids, sin[0])
    model.rotary_emb.forward = look_up


def static_cache(model, rows, length):
    config = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(rows, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    return cache


def first_rows(cache, rows):
    """A cache over the first rows of another one's memory."""
    view = copy.copy(cache)
    view.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in view.layers:
        layer.keys, layer.values = layer.keys[:rows], layer.values[:rows]
    return view


class TalkerGraph:
    def __init__(self, talker, cache, pool=None):
        device, dtype, width = talker.device, talker.dtype, talker.config.hidden_size
        batch, vocab, length = len(cache.layers[0].keys), talker.config.vocab_size, cache.max_cache_len
        self.model, self.head, self.cache, self.device, self.pool = talker.model, talker.codec_head, cache, device, pool
        self.columns, self.ids = torch.arange(length, device=device), torch.arange(vocab, device=device)
        # settings
        self.sampling = Sampling(vocab, device)
        self.repetition_penalty = torch.ones((), device=device)
        self.suppressed = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.end_token = torch.zeros((), dtype=torch.long, device=device)
        self.min_tokens = torch.zeros((), dtype=torch.long, device=device)
        # the prompt: `start` columns, of which the first `pad` of each row are empty
        self.prompt = torch.zeros(batch, length, width, dtype=dtype, device=device)
        self.start = torch.ones(1, dtype=torch.long, device=device)
        self.pad = torch.zeros(batch, dtype=torch.long, device=device)
        # the frame
        self.embedding = torch.zeros(batch, 1, width, dtype=dtype, device=device)
        self.hidden = torch.zeros_like(self.embedding)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.frame = torch.zeros(1, dtype=torch.long, device=device)         # the frame that `token` begins
        self.seen = torch.zeros(batch, vocab, dtype=torch.bool, device=device)
        self.lengths = torch.full((batch,), NEVER, device=device)            # frames of each row, once it has ended
        self.lengths_on_host = self.lengths if device.type == "cpu" else self.lengths.cpu().pin_memory()

        self.step = capture(self.step, device, pool)
        self.prefills = {bucket: None for bucket in buckets(length)}

    def configure(self, sampling, repetition_penalty, suppress_tokens, eos_token_id, min_new_tokens):
        if not repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {repetition_penalty}, it must be above 0: 1.0 for none")
        self.sampling.set(**sampling)
        self.repetition_penalty.fill_(repetition_penalty)
        self.suppressed.zero_()
        self.suppressed[suppress_tokens] = True
        self.end_token.fill_(eos_token_id)
        self.min_tokens.fill_(min_new_tokens)

    def begin(self, inputs_embeds, attention_mask):
        """Forgets the request before, reads a prompt (B, L, H), left-padded where its mask (B, L) is 0, and chooses
        the first token."""
        length = inputs_embeds.shape[1]
        self.prompt[:, :length] = inputs_embeds
        self.start.fill_(length)
        self.pad.copy_((1 - attention_mask).sum(-1))
        prefill = self.captured_prefill(next(bucket for bucket in self.prefills if bucket >= length))
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
        hidden = self.forward(self.prompt[:, :bucket], self.columns[:bucket])
        self.hidden.copy_(hidden.index_select(1, self.start - 1))
        self.choose()

    def step(self):
        self.hidden.copy_(self.forward(self.embedding, self.start + self.frame))
        self.choose()

    def forward(self, embeds, columns):
        """Embeddings for these columns of the cache -> hidden states. (B, L, H), (L) -> (B, L, H)"""
        pad = self.pad[:, None]
        visible = (self.columns <= columns[:, None]) & (self.columns >= pad[..., None])        # (B, L, S)
        # Not -inf: a pad column sees nothing at all, and the NaN it got would spread through the cache.
        mask = torch.zeros_like(visible, dtype=embeds.dtype).masked_fill(~visible, torch.finfo(embeds.dtype).min)
        return self.model(inputs_embeds=embeds, attention_mask=mask[:, None], position_ids=(columns - pad).clamp(min=0),
                          cache_position=columns, past_key_values=self.cache).last_hidden_state

    def choose(self):
        """The next frame's token, by transformers' rules in transformers' order. A row that has ended repeats the end
        token and draws on, as it does there: the other rows' noise depends on it."""
        self.frame += 1
        scores = self.head(self.hidden[:, -1]).float()                                         # (B, V)
        penalized = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
        scores = torch.where(self.seen, penalized, scores).masked_fill(self.suppressed, float("-inf"))
        too_early = (self.frame < self.min_tokens) & (self.ids == self.end_token)              # (V)
        token = sample(scores.masked_fill(too_early, float("-inf")), self.sampling)
        self.token.copy_(torch.where(self.lengths[:, None] < NEVER, self.end_token, token))
        self.seen.scatter_(1, self.token, True)
        ended = (self.token == self.end_token)[:, 0]
        self.lengths.copy_(torch.where(ended, self.lengths.minimum(self.frame), self.lengths))
        self.lengths_on_host.copy_(self.lengths, non_blocking=True)
