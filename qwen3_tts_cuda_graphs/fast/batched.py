"""A stack of decoder layers over tokens that are each at a position of their own: four matrix products and four small
kernels per layer (batched.cu), and one kernel that chooses tokens.

`BatchedStack` launches on torch's current stream, so that a graph can capture it. The kernels are compiled by NVRTC for
this GPU and model. The model must have been through `replace_layers` (fast/layers.py): its `rotary_emb` returns cos and
sin with the first half of sin negated. A stack must not run on two streams at once.

Shapes: B tokens, H hidden size, S cache length, D head dimension, Q query heads, KV key-value heads, V vocabulary size.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import layer_kernels, nvrtc
from qwen3_tts_cuda_graphs.fast.kernels import VECTOR, CudaSource, struct_of
from qwen3_tts_cuda_graphs.fast.layer_kernels import LayerKernels, layer_sizes
from qwen3_tts_cuda_graphs.fast.layers import concatenate, lookup_rope, rope_tables

THREADS = 128  # per block of qk_norm_rope_store, attention, short_attention and silu_and_multiply
SAMPLER_THREADS = 256
WARP = 32  # threads
SHORT_CACHE = 32  # positions: up to this length one warp computes a KV head of a token
MIN_SPLIT_LENGTH = 64  # positions
MIN_SPLIT_LENGTH_OF_MANY = 256  # where tokens fill the GPU anyway: merging shorter splits costs more than it saves
MANY_TOKENS = 32
ATTENTION_BLOCKS = 2048  # fills a GPU several times over, and is launched in a microsecond or two
MAX_SPLITS = 32
TOKENS_TO_SPLIT = range(32, 257)  # numbers of tokens for which `product` splits its sums
CAN_SPLIT = "dtype" in torch.ops.aten.bmm.overloads()  # torch 2.8 or newer: bfloat16 in, float32 out

# Fields of the kernels' structs, in order: the type of a tensor, or int. The compiler checks names and order.
SAMPLING_FIELDS = ("temperature", "topk_rank", "one_minus_top_p", "greedy")  # what Sampling has, (B, 1) each
SAMPLE_FIELDS: dict[str, Any] = {
    "logits": torch.bfloat16,
    "temperature": torch.float32,
    "topk_rank": torch.long,
    "one_minus_top_p": torch.float32,
    "greedy": torch.bool,
    "noise": torch.float32,
    "noise_stride": int,
    "token": torch.long,
}
STORE_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("qkv", "q_norm", "k_norm", "cos", "sin"), torch.bfloat16),
    **dict.fromkeys(("positions", "row_indices"), torch.long),
    "cache_length": int,
    **dict.fromkeys(("keys", "values"), torch.bfloat16),
}
ATTENTION_FIELDS: dict[str, Any] = {
    **STORE_FIELDS,
    **dict.fromkeys(("is_stored", "splits", "min_split_length"), int),
    **dict.fromkeys(("split_best", "split_weight", "split_sum"), torch.float32),
    "finished_splits": torch.int32,
    "output": torch.bfloat16,
}
KERNELS: dict[str, dict[str, Any]] = {
    **layer_kernels.KERNELS,
    "qk_norm_rope_store": STORE_FIELDS,
    "attention": ATTENTION_FIELDS,
    "short_attention": ATTENTION_FIELDS,
    "sample": SAMPLE_FIELDS,
    "choose": {
        **SAMPLE_FIELDS,
        "repetition_penalty": torch.float32,
        "suppressed": torch.bool,
        **dict.fromkeys(("end_token", "min_tokens"), torch.long),
        "advance": torch.bool,
        "frame": torch.long,
        **dict.fromkeys(("seen", "ended"), torch.bool),
    },
}


def kernel_sizes(model: Any) -> SimpleNamespace:
    """The constants that batched.cu is compiled with, there in capitals. `model` is a stack of decoder layers."""
    config = model.config
    return SimpleNamespace(
        vocab=config.vocab_size, threads=THREADS, sampler_threads=SAMPLER_THREADS, **layer_sizes(config)
    )


def needs_of(model: Any) -> dict[str, bool]:
    """What the kernels need of a stack of decoder layers, as text for messages, and whether it is so."""
    sizes = kernel_sizes(model)
    layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    linears = [linear for layer in model.layers for linear in matrices(layer)]
    return {
        f"bfloat16, the model is {model.dtype}": model.dtype == torch.bfloat16,
        f"heads of 128 dimensions, the model's have {sizes.head_dim}": sizes.head_dim == 128,
        f"1, 2, 3 or 4 query heads per KV head, the model has {sizes.heads} and {sizes.kv_heads}": (
            sizes.heads % sizes.kv_heads == 0 and sizes.heads <= 4 * sizes.kv_heads
        ),
        "a multiple of 8 heads of queries, keys and values": (sizes.heads + 2 * sizes.kv_heads) % 8 == 0,
        f"a hidden size that is a multiple of 256 up to 8192, not {sizes.hidden}": (
            sizes.hidden % 256 == 0 and sizes.hidden <= 8192
        ),
        f"an MLP whose width is a multiple of 8, not {sizes.inner}": sizes.inner % 8 == 0,
        f"a vocabulary that is a multiple of 256 up to 4096, not {sizes.vocab}": (
            sizes.vocab % SAMPLER_THREADS == 0 and sizes.vocab <= 4096
        ),
        f"silu between gate and down, not {model.config.hidden_act}": model.config.hidden_act == "silu",
        "full attention in every layer": layer_types == {"full_attention"},
        "projections without a bias": all(linear.bias is None for linear in linears),
        "a model that has been through replace_layers": getattr(model.rotary_emb.forward, "func", None) is lookup_rope,
    }


def matrices(layer: Any) -> list[Any]:
    attn = layer.self_attn
    mlp = layer.mlp
    return [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def structs_of(_: Any) -> dict[str, list[str]]:
    structs = {struct_of(name): list(fields) for name, fields in KERNELS.items() if name != "short_attention"}
    structs["Choose"] = [f"sample.{field}" if field in SAMPLE_FIELDS else field for field in KERNELS["choose"]]
    structs["Attention"] = [f"input.{field}" if field in STORE_FIELDS else field for field in ATTENTION_FIELDS]
    return structs


SOURCE = CudaSource(Path(__file__).with_suffix(".cu"), KERNELS, kernel_sizes, needs_of, structs_of)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x times a matrix with few outputs, (B, I), (H, I) -> (B, H), or its partial sums in float32, (partials, B, H).

    cuBLAS would split such sums itself, to fill the GPU, and add the parts in another kernel: `add_and_norm` adds them.
    """
    count, inputs = x.shape
    partials = 4 if count <= 128 else 2
    if count not in TOKENS_TO_SPLIT or inputs % (partials * VECTOR) or not CAN_SPLIT:
        return F.linear(x, weight)
    x = x.view(count, partials, -1).transpose(0, 1)
    weight = weight.view(len(weight), partials, -1).permute(1, 2, 0)
    if not x.is_cuda:  # torch has `out_dtype` on GPUs only
        return torch.bmm(x.float(), weight.float())
    return torch.bmm(x, weight, out_dtype=torch.float32)


class StackLayer:
    """A decoder layer's weights and its part of the cache."""

    def __init__(self, layer: Any, keys: Tensor, values: Tensor):
        attn = layer.self_attn
        mlp = layer.mlp
        self.input_norm = layer.input_layernorm.weight
        self.qkv = concatenate(attn.q_proj, attn.k_proj, attn.v_proj)  # no copy: replace_layers has joined them
        self.q_norm = attn.q_norm.weight
        self.k_norm = attn.k_norm.weight
        self.output = attn.o_proj.weight
        self.post_norm = layer.post_attention_layernorm.weight
        self.gate_up = concatenate(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj.weight
        self.keys = keys  # (rows, KV, S, D)
        self.values = values


class BatchedStack(LayerKernels):
    """Upstream's `model`, a stack of decoder layers, for up to `count` tokens. `keys` and `values` of each layer,
    (rows, KV, S, D), are written and read in place. Each call allocates its intermediate tensors."""

    def __init__(
        self,
        model: Any,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        count: int,
        kernels: nvrtc.Kernels | None = None,
    ):
        sizes, kernels = (kernel_sizes(model), kernels) if kernels else SOURCE.compile(model)
        super().__init__(kernels, KERNELS, sizes)
        self.device = model.device
        self.layers = [StackLayer(*layer) for layer in zip(model.layers, keys, values, strict=True)]
        self.final_norm = model.norm.weight
        self.cache_length = keys[0].shape[2]
        with model.device:
            self.row_indices = torch.arange(count)
            self.finished_splits = torch.zeros(count, self.sizes.kv_heads, dtype=torch.int32)
        self.cos, self.sin = rope_tables(model, self.cache_length)

    def forward(
        self, embeds: Tensor, positions: Tensor, row_indices: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor:
        """The tokens through all layers and the final norm. (B, H), (B) -> (B, H)

        If `tokens` (B) are given, `embeds` is a table, and they index its rows.
        Token b writes its key and value to the cache at [row_indices[b], :, positions[b]] and attends to all positions
        up to there. `row_indices` are 0 to B - 1 if not given. If given, a row may have several tokens, each at another
        position, in any order.
        Positions must be below S: nothing checks them.
        """
        if tokens is not None:
            embeds = F.embedding(tokens, embeds)
        count = len(embeds)
        may_share_rows = row_indices is not None
        row_indices = self.row_indices[:count] if row_indices is None else row_indices
        if not (len(positions) == len(row_indices) == count <= len(self.finished_splits)):
            counts = f"{count} embeddings, {len(positions)} positions, {len(row_indices)} rows"
            raise ValueError(f"{counts}: they must be equal, and at most {len(self.finished_splits)}")
        residual = embeds
        x = self.norm(embeds, self.layers[0].input_norm)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            qkv = F.linear(x, layer.qkv)
            if may_share_rows:  # tokens attend to keys of others, which must be in the cache first
                self.qk_norm_rope_store(qkv, layer, positions, row_indices)
            heads = self.attention(qkv, layer, positions, row_indices, is_stored=may_share_rows)
            residual, x = self.add_and_norm(product(heads, layer.output), residual, layer.post_norm)
            inner = self.silu_and_multiply(F.linear(x, layer.gate_up))
            residual, x = self.add_and_norm(product(inner, layer.down), residual, next_norm)
        return x

    def store_values(
        self, qkv: Tensor, layer: StackLayer, positions: Tensor, row_indices: Tensor
    ) -> dict[str, Tensor | int]:
        return dict(
            qkv=qkv,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            cos=self.cos,
            sin=self.sin,
            positions=positions,
            row_indices=row_indices,
            cache_length=self.cache_length,
            keys=layer.keys,
            values=layer.values,
        )

    def qk_norm_rope_store(self, qkv: Tensor, layer: StackLayer, positions: Tensor, row_indices: Tensor) -> None:
        """(B, (Q + 2 KV) * D): norm and RoPE of queries and keys in place, keys and values into the cache"""
        sizes = self.sizes
        heads_per_block = THREADS // (sizes.head_dim // VECTOR)
        grid = (sizes.heads + 2 * sizes.kv_heads) // heads_per_block, len(qkv)
        self.launch("qk_norm_rope_store", grid, THREADS, **self.store_values(qkv, layer, positions, row_indices))

    def splits(self, count: int) -> tuple[int, int]:
        """The maximum number of splits of a token's positions in attention, and the minimum length of a split: few long
        ones where many tokens fill the GPU anyway."""
        min_length = MIN_SPLIT_LENGTH if count < MANY_TOKENS else MIN_SPLIT_LENGTH_OF_MANY
        wanted = -(-ATTENTION_BLOCKS // (count * self.sizes.kv_heads))
        useful = -(-self.cache_length // min_length)
        return min(wanted, useful, MAX_SPLITS), min_length

    def attention(
        self, qkv: Tensor, layer: StackLayer, positions: Tensor, row_indices: Tensor, is_stored: bool = False
    ) -> Tensor:
        """(B, (Q + 2 KV) * D) -> (B, Q * D). Unless qkv `is_stored`, this first does what qk_norm_rope_store does; then
        no two tokens may have the same row."""
        sizes = self.sizes
        count = len(qkv)
        splits, min_split_length = self.splits(count)
        if self.cache_length <= SHORT_CACHE:
            kernel = "short_attention"
            blocks = -(-sizes.kv_heads // (THREADS // WARP))
        else:
            kernel = "attention"
            blocks = sizes.kv_heads
        with qkv.device:
            split_best, split_weight = torch.empty(2, count, sizes.heads, splits)
            split_sum = torch.empty(count, sizes.heads, splits, sizes.head_dim)
        output = qkv.new_empty(count, sizes.heads * sizes.head_dim)
        self.launch(
            kernel,
            (blocks * count, splits),
            THREADS,
            **self.store_values(qkv, layer, positions, row_indices),
            is_stored=is_stored,
            splits=splits,
            min_split_length=min_split_length,
            split_best=split_best,
            split_weight=split_weight,
            split_sum=split_sum,
            finished_splits=self.finished_splits[:count],
            output=output,
        )
        return output

    def sample_rows(self, logits: Tensor, sampling: Any, noise: Tensor) -> Tensor:
        """`sample` of cudagraph_talker.py, with settings and noise per row. (B, V), (B, V) -> (B, 1)

        `logits` are bfloat16, as the head returns them. `sampling` has SAMPLING_FIELDS.
        """
        token = torch.empty(len(logits), 1, dtype=torch.long, device=logits.device)
        values = sample_values(logits, sampling, noise, token)
        self.launch("sample", (len(logits), 1), SAMPLER_THREADS, **values)
        return token

    def choose_rows(self, logits: Tensor, state: Any, sampling: Any, noise: Tensor) -> None:
        """`choose_token` of cudagraph_talker.py for the rows that may advance: writes their token, frame, seen, ended.

        `state` has these, and repetition_penalty, suppressed, end_token, min_tokens and advance: (B, V), (B, 1) or (B).
        """
        values = sample_values(logits, sampling, noise, state.token)
        for name in KERNELS["choose"]:
            if name not in values:
                values[name] = getattr(state, name)
        self.launch("choose", (len(logits), 1), SAMPLER_THREADS, **values)


def sampling_values(sampling: Any, noise: Tensor) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in SAMPLING_FIELDS} | dict(noise=noise)


def sample_values(logits: Tensor, sampling: Any, noise: Tensor, token: Tensor) -> dict[str, Tensor | int]:
    return sampling_values(sampling, noise) | dict(logits=logits, noise_stride=noise.stride(0), token=token)
