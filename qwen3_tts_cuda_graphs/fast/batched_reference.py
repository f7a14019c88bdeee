"""What the kernels of batched.cu compute, in torch: a function for each, of the same name.

They are the kernels' documentation, and tests/test_batched.py compares the kernels with them. The kernels `attention`
and `short_attention` compute qk_norm_rope_store and attention, or the latter alone where the kernel qk_norm_rope_store
was launched before. Tensors are bfloat16; every step here that returns one is a rounding of the model's own forward.
Norms and silu are in layer_kernels_reference.py. What `sample` and `choose` compute is in cudagraph_talker.py: `sample`
and Rows.choose_token.

Shapes: B tokens, Q query heads, KV key-value heads, D head dimension, S cache length.
"""

import torch
from torch import Tensor

from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import norm, rotate


def qk_norm_rope_store(
    qkv: Tensor,  # (B, Q + 2 KV, D)
    q_norm: Tensor,  # (D)
    k_norm: Tensor,  # (D)
    cos: Tensor,  # (S, D)
    sin: Tensor,  # (S, D), its first half negated
    positions: Tensor,  # (B)
    row_indices: Tensor,  # (B)
    keys: Tensor,  # (rows, KV, S, D)
    values: Tensor,  # (rows, KV, S, D)
    epsilon: float,
) -> Tensor:
    """Returns queries and keys (B, Q + KV, D), and writes one position of keys and values for each token."""
    kv_heads = keys.shape[1]
    query, key, value = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    query = rotate(norm(query, q_norm, epsilon), cos[positions, None], sin[positions, None])
    key = rotate(norm(key, k_norm, epsilon), cos[positions, None], sin[positions, None])
    keys[row_indices, :, positions] = key
    values[row_indices, :, positions] = value
    return torch.cat([query, key], dim=1)


def attention(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, row_indices: Tensor) -> Tensor:
    """(B, Q, D), (rows, KV, S, D) -> (B, Q, D). All in float, rounded at the end."""
    output = torch.empty_like(query)
    groups = query.shape[1] // keys.shape[1]
    for token, (position, row) in enumerate(zip(positions.tolist(), row_indices.tolist())):
        key = keys[row, :, : position + 1].float().repeat_interleave(groups, dim=0)  # (Q, positions, D)
        value = values[row, :, : position + 1].float().repeat_interleave(groups, dim=0)
        scores = (key @ query[token].float()[..., None])[..., 0] * query.shape[-1] ** -0.5  # (Q, positions)
        output[token] = (scores.softmax(-1)[:, None] @ value)[:, 0]
    return output
