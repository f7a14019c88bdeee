"""What one step of megakernel.cu computes, in torch and float32: layers, head and choice for one token.

This is the kernel's documentation, and tests/test_kernel_on_cpu.py and self_test.py compare the kernel with
it. The kernel sums in float32 too, but its weights, its cache and all values that pass between blocks are
bfloat16. `rounded` is called where it rounds: with `to_bfloat16` this computes what the kernel computes, up to
the order of summation.

Shapes: H hidden size, Q query heads, G key-value heads, D dimensions of a head, T length of the cache,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def to_bfloat16(x: Tensor) -> Tensor:
    """float32 with the values of bfloat16."""
    return x.bfloat16().float()


def rms_norm(x: Tensor, module: Any, epsilon: float, rounded: Rounding = exact) -> Tensor:
    """(..., H)"""
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return rounded(rounded(normalized) * module.weight.float())


def linear(x: Tensor, module: Any, rounded: Rounding = exact) -> Tensor:
    """(..., H) -> (..., rows)"""
    return rounded(x @ module.weight.float().T)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rounded: Rounding = exact) -> Tensor:
    """RoPE of (heads, D). The first half of sin is negated, so that swapping the halves is enough."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return rounded(rounded(x * cos) + rounded(swapped * sin))


def run_layers(
    model: Any, caches: Sequence[tuple[Tensor, Tensor]], x: Tensor, position: int, rounded: Rounding = exact
) -> Tensor:
    """One token's input (H) through all layers and the final norm. Writes keys and values of this position to
    `caches`, for each layer (G, T, D). With fewer caches than the model has layers, only through those."""
    config = model.config
    epsilon = config.rms_norm_eps
    kv_heads = config.num_key_value_heads
    head_dim = config.head_dim
    positions = torch.arange(caches[0][0].shape[1], device=x.device)
    all_cos, all_sin = model.rotary_emb(x.bfloat16(), positions[None])  # T * D elements each
    cos = all_cos.reshape(-1, head_dim)[position].float()  # (D)
    sin = all_sin.reshape(-1, head_dim)[position].float()  # (D)

    for layer, (keys, values) in zip(model.layers, caches):
        attention = layer.self_attn
        mlp = layer.mlp

        # Phase 1: input norm; q, k, v
        normalized = rms_norm(x, layer.input_layernorm, epsilon, rounded)
        q = linear(normalized, attention.q_proj, rounded).view(-1, head_dim)  # (Q, D)
        k = linear(normalized, attention.k_proj, rounded).view(-1, head_dim)  # (G, D)
        v = linear(normalized, attention.v_proj, rounded).view(-1, head_dim)  # (G, D)

        # Phases 2 and 3: each key-value head with its group of query heads. Scores and weights are not rounded.
        q = rotate(rms_norm(q, attention.q_norm, epsilon, rounded), cos, sin, rounded)
        k = rotate(rms_norm(k, attention.k_norm, epsilon, rounded), cos, sin, rounded)
        keys[:, position] = k
        values[:, position] = v
        groups = q.view(kv_heads, -1, head_dim)  # (G, Q/G, D)
        scores = torch.einsum("ghd,gpd->ghp", groups, keys[:, : position + 1]) * head_dim**-0.5
        heads = torch.einsum("ghp,gpd->ghd", scores.softmax(-1), values[:, : position + 1])  # (G, Q/G, D)

        # Phase 4: o_proj and residual
        x = rounded(x + linear(rounded(heads.flatten()), attention.o_proj, rounded))

        # Phase 5: post-attention norm; silu(gate) * up
        normalized = rms_norm(x, layer.post_attention_layernorm, epsilon, rounded)
        silu = rounded(F.silu(linear(normalized, mlp.gate_proj, rounded)))
        inner = rounded(silu * linear(normalized, mlp.up_proj, rounded))

        # Phase 6: down_proj and residual
        x = rounded(x + linear(inner, mlp.down_proj, rounded))

    return rms_norm(x, model.norm, epsilon, rounded)


def apply_talker_rules(
    logits: Tensor, seen: Tensor, suppressed: Tensor, repetition_penalty: float, forbidden_token: int | None
) -> Tensor:
    """The talker's logits (..., V) with repetition penalty, then suppression. `forbidden_token` is the end
    token as long as it would come too early."""
    penalized = torch.where(logits < 0, logits * repetition_penalty, logits / repetition_penalty)
    scores = torch.where(seen, penalized, logits).masked_fill(suppressed, float("-inf"))
    if forbidden_token is not None:
        scores[..., forbidden_token] = float("-inf")
    return scores


def choose(scores: Tensor, sampling: Any, noise: Tensor) -> Tensor:
    """Top-k, top-p, then the largest weight / noise. (B, V), (B, V) -> (B)

    The kernel finds the same two thresholds bit by bit instead of sorting, and sums the weights for top-p as
    integers of 22 bits.
    """
    ranked, order = (scores / sampling.temperature).sort(-1)  # ascending
    weights = (ranked - ranked[:, -1:]).exp()

    # Top-k keeps the k-th best score and all that equal it.
    weights = weights.masked_fill(ranked < ranked[:, sampling.topk_rank.flatten()], 0)

    # Top-p drops the least likely ones, as many as have at most 1 - p of the probability together.
    cumulative = weights.cumsum(-1)
    weights = weights.masked_fill(cumulative <= sampling.one_minus_top_p * cumulative[:, -1:], 0)

    noise = torch.where(sampling.greedy, 1.0, noise).gather(-1, order)
    best = (weights / noise).argmax(-1, keepdim=True)
    return order.gather(-1, best)[:, 0]
