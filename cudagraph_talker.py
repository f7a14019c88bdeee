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
        if do_sample and top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, it must be above 0 and at most 1")
        if do_sample and top_k is not None and top_k < 0:
            raise ValueError(f"top_k is {top_k}, it must be a number of candidates, or 0 for all of them")
        top_k = min(top_k or self.vocab, self.vocab) if do_sample else 1
        self.temperature.fill_(temperature if do_sample else 1.0)
        self.kth.fill_(self.vocab - top_k)
        self.tail.fill_(min(1 - top_p, 1 - 1e-6) if do_sample and top_p is not None else 0.0)
        self.greedy.fill_(not do_sample)
        # Upstream draws nothing for a greedy choice. Uncaptured code can follow it: the noise that nobody looks at
        # comes from a generator of its own, and the caller's seed stays where upstream would leave it.
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


def attention(attn, qkv, qk_norm, hidden_states, position_embeddings, attention_mask, past_key_values, cache_position, **_):
    """Upstream's attention from fewer kernels: one projection, queries and keys normed and rotated together, and each
    key and value read once, the query heads that share them being rows of one head."""
    batch, length, _ = hidden_states.shape
    (both, width), kv = qk_norm.shape, len(qkv) // attn.head_dim - len(qk_norm)
    heads = F.linear(hidden_states, qkv).view(batch, length, both + kv, width)
    qk = F.rms_norm(heads[:, :, :both], (width,), eps=attn.q_norm.variance_epsilon) * qk_norm
    cos, sin = position_embeddings                                                     # (B, L, 1, D)
    qk = qk * cos + qk.roll(width // 2, -1) * sin
    query, key, value = (x.transpose(1, 2) for x in (qk[:, :, :-kv], qk[:, :, -kv:], heads[:, :, both:]))
    keys, values = past_key_values.update(key, value, attn.layer_idx, {"cache_position": cache_position})
    query = query.reshape(batch, kv, -1, width)                                        # (B, KV, G * L, D)
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, query.shape[2] // length, 1)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=attn.scaling)
    return attn.o_proj(out.reshape(batch, -1, length, width).transpose(1, 2).reshape(batch, length, -1)), None


def feed_forward(mlp, gate_up, x):
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return mlp.down_proj(mlp.act_fn(gate) * up)


def stack(*linears):
    """One weight for several projections of the same input; theirs become views of it."""
    weight = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, weight.split([len(linear.weight) for linear in linears])):
        linear.weight.data = part
    return weight


def fewer_kernels(model, rotary, length):
    """Gives the model's own forward faster parts. `rotary` is upstream's plain rotary embedding: the talker's has three
    rows, for time, height and width, which are equal in speech."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight,
                                     eps=module.variance_epsilon)
    for layer in model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        qkv = stack(attn.q_proj, attn.k_proj, attn.v_proj)
        norms = (norm.weight.expand(len(proj.weight) // attn.head_dim, -1) for norm, proj in (
            (attn.q_norm, attn.q_proj), (attn.k_norm, attn.k_proj)))
        attn.forward = partial(attention, attn, qkv, torch.cat([*norms]))
        mlp.forward = partial(feed_forward, mlp, stack(mlp.gate_proj, mlp.up_proj))

    like = torch.empty(0, dtype=model.dtype, device=model.device)
    cos, sin = rotary.forward(model.rotary_emb, like, torch.arange(length, device=model.device)[None])
    sin[..., :sin.shape[-1] // 2] *= -1                           # for halves that are swapped, not negated

    def look_up(_, position_ids):
        position_ids = position_ids if position_ids.dim() == 2 else position_ids[0]    # (B, L)
        return [F.embedding(position_ids, table[0])[:, :, None] for table in (cos, sin)]
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
