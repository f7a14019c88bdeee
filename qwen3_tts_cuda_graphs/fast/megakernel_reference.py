"""What the layers of megakernel.cu compute, in torch and float32, for one token or several in a row.

This is the kernel's documentation, and tests/test_kernel_on_cpu.py and self_test.py compare the kernel with
it. The kernel sums in float32 too, but its weights, its cache and all values that pass between blocks are
bfloat16. `rounded` is called where it rounds: with `to_bfloat16` this computes what the kernel computes, up to
the order of summation.

Shapes: L tokens (the kernel has one or two), H hidden size, I inner size, Q query heads, G key-value heads,
D dimensions of a head, T length of the cache, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import Rounding, exact, norm, rotate
from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import to_bfloat16 as to_bfloat16


def linear(x: Tensor, module: Any, rounded: Rounding = exact) -> Tensor:
    """(..., H) -> (..., rows)"""
    return rounded(x @ module.weight.float().T)


def angles(model: Any, first: int, count: int = 1) -> tuple[Tensor, Tensor]:
    """cos and sin of this many positions, (L, 1, D) each."""
    device = model.norm.weight.device
    positions = torch.arange(first, first + count, device=device)
    tables = model.rotary_emb(torch.empty(0, dtype=torch.bfloat16, device=device), positions[None])  # L * D each
    cos, sin = (table.reshape(count, 1, -1).float() for table in tables)
    return cos, sin


def project_qkv(layer: Any, x: Tensor, epsilon: float, rounded: Rounding = exact) -> Tensor:
    """Phase 1: input norm; q, k, v in one row. (L, H) -> (L, (Q + 2 G) * D)"""
    attention = layer.self_attn
    normalized = norm(x, layer.input_layernorm.weight, epsilon, rounded)
    matrices = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([linear(normalized, matrix, rounded) for matrix in matrices], -1)


def attend(
    config: Any,
    attention: Any,
    qkv: Tensor,
    cache: tuple[Tensor, Tensor],
    position: int,
    cos: Tensor,
    sin: Tensor,
    rounded: Rounding = exact,
) -> Tensor:
    """Phases 2 and 3: each key-value head with its group of query heads. Writes keys and values to `cache`, (G, T, D)
    each, from `position` on. Scores and weights are not rounded. (L, (Q + 2 G) * D) -> (L, Q * D)"""
    epsilon = config.rms_norm_eps
    kv_heads = config.num_key_value_heads
    count = len(qkv)
    end = position + count
    keys, values = cache
    heads = qkv.view(count, -1, config.head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    q = rotate(norm(q, attention.q_norm.weight, epsilon, rounded), cos, sin, rounded)
    k = rotate(norm(k, attention.k_norm.weight, epsilon, rounded), cos, sin, rounded)
    keys[:, position:end] = k.transpose(0, 1)
    values[:, position:end] = v.transpose(0, 1)
    groups = q.view(count, kv_heads, -1, config.head_dim)  # (L, G, Q/G, D)
    scores = torch.einsum("lghd,gpd->ghlp", groups, keys[:, :end]) * config.head_dim**-0.5
    later = torch.ones(count, end, dtype=torch.bool, device=qkv.device).triu(position + 1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return rounded(torch.einsum("ghlp,gpd->lghd", weights, values[:, :end]).reshape(count, -1))


def gate_and_up(layer: Any, x: Tensor, epsilon: float, rounded: Rounding = exact) -> Tensor:
    """Phase 5: post-attention norm; silu(gate) * up. (L, H) -> (L, I)"""
    normalized = norm(x, layer.post_attention_layernorm.weight, epsilon, rounded)
    silu = rounded(F.silu(linear(normalized, layer.mlp.gate_proj, rounded)))
    return rounded(silu * linear(normalized, layer.mlp.up_proj, rounded))


def add_projection(x: Tensor, y: Tensor, module: Any, rounded: Rounding = exact) -> Tensor:
    """Phases 4 and 6: a projection (o_proj, down_proj) of y, added to the residual stream x."""
    return rounded(x + linear(y, module, rounded))


def run_layers(
    model: Any, caches: Sequence[tuple[Tensor, Tensor]], x: Tensor, position: int, rounded: Rounding = exact
) -> Tensor:
    """Tokens from `position` on, (L, H), through all layers and the final norm. Writes their keys and values to
    `caches`, for each layer (G, T, D)."""
    config = model.config
    epsilon = config.rms_norm_eps
    cos, sin = angles(model, position, len(x))
    for layer, cache in zip(model.layers, caches, strict=True):
        qkv = project_qkv(layer, x, epsilon, rounded)
        attention = attend(config, layer.self_attn, qkv, cache, position, cos, sin, rounded)
        x = add_projection(x, attention, layer.self_attn.o_proj, rounded)
        inner = gate_and_up(layer, x, epsilon, rounded)
        x = add_projection(x, inner, layer.mlp.down_proj, rounded)
    return norm(x, model.norm.weight, epsilon, rounded)
