"""What the layers of megakernel.cu compute, in torch and float32: the kernel's documentation, with which self_test.py
compares it.

The kernel sums in float32 too, but its weights, its cache and all values that pass between blocks are bfloat16.
`rounded` is called where it rounds: with `to_bfloat16` this computes what the kernel computes, up to the order of
summation.

Shapes: B rows, L tokens of each (the kernel has one or two), H hidden size, I inner size, Q query heads, G key-value
heads, D dimensions of a head, T cached positions, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import Rounding, exact, norm, rotate, to_bfloat16


def linear(x: Tensor, module: Any, rounded: Rounding = exact) -> Tensor:
    """(..., H) -> (..., V)"""
    return rounded(x @ module.weight.float().T)


def angles_of(model: Any, positions: Tensor) -> list[Tensor]:
    """cos and sin of these positions: (B, L) -> (B, L, 1, D) each"""
    like = torch.empty(0, dtype=torch.bfloat16, device=positions.device)
    return [table.float() for table in model.rotary_emb(like, positions)]


def project_qkv(layer: Any, x: Tensor, epsilon: float, rounded: Rounding = exact) -> Tensor:
    """Phase 1: input norm; q, k, v in one row. (B, L, H) -> (B, L, (Q + 2 G) * D)"""
    attention = layer.self_attn
    normalized = norm(x, layer.input_layernorm.weight, epsilon, rounded)
    matrices = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([linear(normalized, matrix, rounded) for matrix in matrices], -1)


def attend(
    config: Any,
    attention: Any,
    qkv: Tensor,
    cache: Iterable[Tensor],
    positions: Tensor,
    angles: Iterable[Tensor],
    rounded: Rounding = exact,
) -> tuple[Tensor, Tensor, Tensor]:
    """Phases 2 and 3: each key-value head with its group of query heads. Scores and weights are not rounded.
    (B, L, (Q + 2 G) * D) -> (B, L, Q * D), and the tokens' own keys and values, (B, L, G, D) each.

    `cache` has keys and values of earlier positions, (B, G, T, D) each, and is not changed.
    """
    epsilon = config.rms_norm_eps
    kv_heads = config.num_key_value_heads
    cos, sin = angles
    heads = qkv.unflatten(-1, (-1, config.head_dim))
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    q = rotate(norm(q, attention.q_norm.weight, epsilon, rounded), cos, sin, rounded)
    k = rotate(norm(k, attention.k_norm.weight, epsilon, rounded), cos, sin, rounded)

    keys, values = (tensor.to(torch.float32, copy=True) for tensor in cache)
    rows = torch.arange(len(qkv), device=qkv.device)[:, None]
    keys[rows, :, positions] = k
    values[rows, :, positions] = v
    groups = q.unflatten(2, (kv_heads, -1))  # (B, L, G, Q/G, D)
    scores = torch.einsum("blghd,bgtd->bghlt", groups, keys) * config.head_dim**-0.5
    later = torch.arange(keys.shape[2], device=qkv.device) > positions[..., None]  # (B, L, T)
    weights = scores.masked_fill(later[:, None, None], float("-inf")).softmax(-1)
    return rounded(torch.einsum("bghlt,bgtd->blghd", weights, values).flatten(2)), k, v


def gate_and_up(layer: Any, x: Tensor, epsilon: float, rounded: Rounding = exact) -> Tensor:
    """Phase 5: post-attention norm; silu(gate) * up. (B, L, H) -> (B, L, I)"""
    normalized = norm(x, layer.post_attention_layernorm.weight, epsilon, rounded)
    silu = rounded(F.silu(linear(normalized, layer.mlp.gate_proj, rounded)))
    return rounded(silu * linear(normalized, layer.mlp.up_proj, rounded))


def add_projection(x: Tensor, y: Tensor, module: Any, rounded: Rounding = exact) -> Tensor:
    """Phases 4 and 6: a projection (o_proj, down_proj) of y, added to the residual stream x."""
    return rounded(x + linear(y, module, rounded))


def run_layers(
    model: Any, caches: Sequence[Iterable[Tensor]], x: Tensor, positions: Tensor, rounded: Rounding = exact
) -> tuple[Tensor, list[Tensor]]:
    """Tokens (B, L, H) at `positions` (B, L) through the layers that `caches` are for, from the first one on, and the
    final norm. Returns the hidden states (B, L, H), and the tokens' keys and values in each layer, in turn."""
    config = model.config
    epsilon = config.rms_norm_eps
    angles = angles_of(model, positions)
    end = int(positions.max()) + 1
    cached = []
    for layer, cache in zip(model.layers, caches):
        cache = [tensor[:, :, :end] for tensor in cache]
        qkv = project_qkv(layer, x, epsilon, rounded)
        attention, *keys_and_values = attend(config, layer.self_attn, qkv, cache, positions, angles, rounded)
        cached += keys_and_values
        x = add_projection(x, attention, layer.self_attn.o_proj, rounded)
        inner = gate_and_up(layer, x, epsilon, rounded)
        x = add_projection(x, inner, layer.mlp.down_proj, rounded)
    return norm(x, model.norm.weight, epsilon, rounded), cached


def last_layer(
    model: Any, head: Any, found: Mapping[str, Tensor], cache: Iterable[Tensor], position: Tensor
) -> list[tuple[str, Tensor, Tensor]]:
    """The phases of the last layer, and then this head: what the kernel has `found`, and what it should have found in
    that phase, given its own input of it. Without phases 1 and 4: their inputs have been overwritten.

    found: FusedStep.exchanged, the keys and values that were stored, and the logits, (1, 1, ...) each
    """
    layer, epsilon = model.layers[-1], model.config.rms_norm_eps
    angles = angles_of(model, position)
    attended, k, v = attend(model.config, layer.self_attn, found["qkv"], cache, position, angles, to_bfloat16)
    x = found["post_attention"]
    hidden = norm(found["hidden"], model.norm.weight, epsilon, to_bfloat16)
    return [
        ("last keys", found["keys"], k),
        ("last values", found["values"], v),
        ("attention", found["attention"], attended),
        ("MLP", found["inner"], gate_and_up(layer, x, epsilon, to_bfloat16)),
        ("residual stream", found["hidden"], add_projection(x, found["inner"], layer.mlp.down_proj, to_bfloat16)),
        ("head", found["logits"], linear(hidden, head, to_bfloat16)),
    ]
