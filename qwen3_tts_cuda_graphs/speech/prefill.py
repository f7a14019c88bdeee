"""Prefill: compute the keys and values of the prompts of several requests, in any rows of the cache.

The last position of a prompt is computed by a step of the talker, which also chooses the first token. The positions
before it, the prefix, are computed here, by graphs captured for several sizes. In the layout for streams the prefix
depends on voice, language and style, but not on the text, so its keys and values are kept for the next request with the
same prefix.
"""

import collections
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache

from cudagraph_talker import GraphPool, TalkerGraph
from qwen3_tts_cuda_graphs.fast.batched import BatchedStack
from qwen3_tts_cuda_graphs.fast.rows import SharedRows
from qwen3_tts_cuda_graphs.prompts.host import to_device
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

PREFILL_ROWS = (1, 4, 32)  # prompts per captured prefill
# Positions: small steps for a sentence or two, then powers of two and the middle between each two of them.
PREFILL_LENGTHS = (32, 64, 96, 128, 192, 256, 320, *(size << i for i in range(12) for size in (384, 512)))
MAX_PREFILL_POSITIONS = 4096  # of all prompts of a graph together, unless it has only one
SHORTEST_FOR_SDPA = 128  # positions; the attention kernel of batched.cu is faster for shorter prompts


class PrefillGraph:
    """Compute the keys and values of `count` prefixes of up to `length` positions. Positions after the end of a shorter
    prefix are computed as well; they are overwritten before anything attends to them."""

    def __init__(self, talker, rows: SharedRows, count: int, length: int, with_kernels: bool):
        self.rows = rows
        self.talker = TalkerGraph(talker, rows, rows.keys, rows.values)
        with talker.device:
            self.prefixes = torch.zeros(count, length, talker.config.hidden_size, dtype=talker.dtype)
            self.row_indices = torch.full((count,), len(rows.token) - 1)  # the row of each prefix
            self.positions = torch.arange(length)
        self.kernels = None
        if with_kernels:
            stack = partial(PromptStack, count) if length >= SHORTEST_FOR_SDPA else BatchedStack
            self.kernels = stack(talker.model, rows.keys, rows.values, count * length)

    def capture(self, pool: GraphPool) -> None:
        self.replay = pool.capture(self.step)

    def step(self) -> None:
        count, length, _ = self.prefixes.shape
        if self.kernels:
            row_indices = self.row_indices[:, None].repeat(1, length).flatten()
            self.kernels.forward(self.prefixes.flatten(0, 1), self.positions.repeat(count), row_indices)
        else:
            visible = (self.positions <= self.positions[:, None])[None]
            cache = PromptCache(self.rows.keys, self.rows.values, self.row_indices)
            self.talker.forward(self.prefixes, self.positions[None], visible, cache)


class PromptCache(Cache):
    """A static cache for one prefill: each prompt is written to its row from position 0 on, and attends to itself."""

    def __init__(self, keys: list, values: list, row_indices: torch.Tensor):
        super().__init__(layers=[])
        self.keys = keys
        self.values = values
        self.row_indices = row_indices

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, _) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer][:, :, : keys.shape[2]].index_copy_(0, self.row_indices, keys)
        self.values[layer][:, :, : keys.shape[2]].index_copy_(0, self.row_indices, values)
        return keys, values


class PromptStack(BatchedStack):
    """A BatchedStack with SDPA's attention. Its tokens are all positions of the first prompt, then of the next, ..."""

    def __init__(self, prompts: int, *args):
        """prompts: how many there are; args: of BatchedStack"""
        super().__init__(*args)
        self.prompts = prompts

    def attention(self, qkv: torch.Tensor, *_, **__) -> torch.Tensor:
        """(B * L, (Q + 2 KV) * D) -> (B * L, Q * D). Norm and RoPE have been applied in place."""
        heads = qkv.view(self.prompts, -1, qkv.shape[1] // self.sizes.head_dim, self.sizes.head_dim).transpose(1, 2)
        parts = heads.split([self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads], dim=1)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # cuDNN takes 80 ms to plan for each shape
            heads = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return heads.transpose(1, 2).reshape(len(qkv), -1)  # from (B, Q, L, D)


class Prefills:
    def __init__(self, talker, rows: SharedRows, row_count: int, pool: GraphPool, with_kernels: bool):
        """rows: `row_count` of them; if there are several, one more, into which padding is written"""
        self.rows = rows
        self.prefix_cache = PrefixCache(rows)
        longest = rows.text.shape[1]
        lengths = [*(length for length in PREFILL_LENGTHS if length < longest), longest]
        most = min(row_count, max(PREFILL_ROWS))
        self.graphs = {
            (count, length): PrefillGraph(talker, rows, count, length, with_kernels)
            for count in [*(count for count in PREFILL_ROWS if count < most), most]
            for length in lengths
            if count == 1 or count * length <= MAX_PREFILL_POSITIONS
        }
        for graph in reversed(self.graphs.values()):  # the largest first: the others fit into its memory
            graph.capture(pool)

    def read(self, utterances: list[Utterance]) -> None:
        """Write the keys and values of all prompts, except for their last positions."""
        utterances = self.prefix_cache.copy(utterances)
        while utterances:
            count = self.count_that_fit([len(utterance.request.prefix) for utterance in utterances])
            together, utterances = utterances[:count], utterances[count:]
            self.load([one.row for one in together], [one.request.prefix for one in together]).replay()
            if count == 1:  # batched results may differ in the last bits, and a seed must reproduce
                self.prefix_cache.keep(together[0])

    def graph_for(self, lengths: list[int]) -> PrefillGraph | None:
        """The smallest graph for prefixes of these lengths; None if no graph is large enough for all of them."""
        fitting = (
            graph for (count, length), graph in self.graphs.items() if count >= len(lengths) and length >= max(lengths)
        )
        return next(fitting, None)

    def count_that_fit(self, lengths: list[int]) -> int:
        """How many of them, from the first on, fit into one graph."""
        counts = range(len(lengths), 0, -1)
        return next(count for count in counts if self.graph_for(lengths[:count]))

    def load(self, row_indices: list[int], prefixes: list[torch.Tensor]) -> PrefillGraph:
        """Copy the prefixes (L, H) of these rows into the inputs of a graph. Returns the graph, to be replayed."""
        graph = self.graph_for([*map(len, prefixes)])
        padding = len(graph.row_indices) - len(row_indices)
        copy_to_device(torch.tensor(row_indices + [len(self.rows.token) - 1] * padding), graph.row_indices)
        for target, prefix in zip(graph.prefixes, prefixes):
            copy_to_device(prefix, target[: len(prefix)])
        return graph


class PrefixCache:
    """The keys and values of the last prefixes. The content of a prefix's embeddings is its key."""

    def __init__(self, rows: SharedRows):
        self.cache = rows.whole_cache  # (B, 2, layers, KV, S, D)
        self.prefixes = collections.OrderedDict()  # (2, layers, KV, L, D) each

    def copy(self, utterances: list[Utterance]) -> list[Utterance]:
        """Copy the prefixes that are kept to the rows of their utterances. Returns the other utterances."""
        row_indices, missing = collections.defaultdict(list), []
        for utterance in utterances:
            if utterance.request.prefix_key in self.prefixes:
                row_indices[utterance.request.prefix_key].append(utterance.row)
            else:
                missing.append(utterance)
        for key, indices in row_indices.items():
            kept = self.prefixes[key]
            self.prefixes.move_to_end(key)
            index = indices[0] if len(indices) == 1 else to_device(torch.tensor(indices), kept.device)
            self.cache[..., : kept.shape[3], :][index] = kept
            if kept.is_cuda:
                kept.record_stream(torch.cuda.current_stream(kept.device))
        return missing

    def keep(self, utterance: Utterance) -> None:
        """Keep the prefix of this utterance's row. All prefixes together take no more memory than a row."""
        request = utterance.request
        if request.prefix_key is None:
            return
        self.prefixes[request.prefix_key] = self.cache[utterance.row, ..., : len(request.prefix), :].clone()
        while sum(kept.shape[3] for kept in self.prefixes.values()) > self.cache.shape[4]:
            self.prefixes.popitem(last=False)


def copy_to_device(values: torch.Tensor, target: torch.Tensor) -> None:
    """Without waiting for the GPU: the source is pinned."""
    target.copy_(values.pin_memory() if target.is_cuda and not values.is_cuda else values, non_blocking=True)
