"""What the kernels of codec_kernels.cu compute, in torch: a function for each, of the same name.

They are the kernels' documentation, and tests/test_codec_kernels.py compares the kernels with them. Tensors are
bfloat16; every step here that returns one is a rounding of the model's own forward. The transformer's norms and silu
are in layer_kernels_reference.py.

Shapes: B chunks, T frames, L columns, C channels, P stored columns, Q codebooks, D head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import rotate


def embed_codes(codes: Tensor, tables: Tensor, semantic_codebooks: int) -> tuple[Tensor, Tensor]:
    """(B, Q, T), (Q, entries, C) -> the sums over the first codebooks and over the others, each (B, T, C)"""
    entries = [F.embedding(book_codes, table) for book_codes, table in zip(codes.unbind(1), tables, strict=True)]
    return sum(entries[:semantic_codebooks]), sum(entries[semantic_codebooks:])


def window_attention(
    qkv: Tensor,  # (B, T, 3, heads, D)
    cos: Tensor,  # (B, T, D)
    sin: Tensor,  # (B, T, D)
    positions: Tensor,  # (rows), of the first new frame
    row_indices: Tensor,  # (B)
    keys: Tensor,  # (rows, heads, ring, D), position p at p % ring
    values: Tensor,  # (rows, heads, ring, D)
    window: int,
) -> Tensor:
    """Returns (B, T, heads, D), and writes the new keys and values. All but RoPE is in float, rounded at the end."""
    ring = keys.shape[2]
    output = torch.empty_like(qkv[:, :, 0])
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # as `rotate` has it
    for chunk, row in enumerate(row_indices.tolist()):
        position = int(positions[row])
        query, key, value = qkv[chunk].unbind(1)  # (T, heads, D)
        query = rotate(query, cos[chunk, :, None], sin[chunk, :, None])
        key = rotate(key, cos[chunk, :, None], sin[chunk, :, None])
        for frame in range(len(query)):
            last = position + frame
            keys[row, :, last % ring] = key[frame]
            values[row, :, last % ring] = value[frame]
            visible = torch.arange(max(0, last - window + 1), last + 1, device=qkv.device) % ring
            scores = torch.einsum("hd,hpd->hp", query[frame].float(), keys[row, :, visible].float())
            weights = (scores * query.shape[-1] ** -0.5).softmax(-1)
            output[chunk, frame] = torch.einsum("hp,hpd->hd", weights, values[row, :, visible].float())
    return output


def snake(x: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
    """SnakeBeta: (B, L, C), (C), (C) -> (B, L, C)"""
    return x + inverse_beta * torch.sin(x * alpha).pow(2)


def activate(
    x: Tensor,  # (B, L, C), not interleaved
    bias: Tensor | None,  # (C)
    scale: Tensor | None,  # (C)
    residual: Tensor | None,  # (B, L, C)
    alpha: Tensor | None,  # (C)
    inverse_beta: Tensor | None,  # (C)
    state: Tensor | None,  # (rows, P, C)
    row_indices: Tensor | None,  # (B)
) -> tuple[Tensor, Tensor]:
    """Returns (B, P + L, C) and the sum (B, L, C), and writes the last P columns to the state."""
    if bias is not None:
        x = x + bias
    if scale is not None:
        x = scale * x
    if residual is not None:
        x = residual + x
    total = x
    if alpha is not None:
        x = snake(x, alpha, inverse_beta)
    if state is None:
        return x, total
    joined = torch.cat([state[row_indices], x], dim=1)
    state[row_indices] = joined[:, x.shape[1] :]
    return joined, total


def depthwise_norm(
    x: Tensor,  # (B, 6 + L, C)
    weight: Tensor,  # (7, C)
    bias: Tensor,  # (C)
    norm_weight: Tensor,  # (C)
    norm_bias: Tensor,  # (C)
    epsilon: float,
) -> Tensor:
    """(B, L, C). Convolution and norm are each rounded once."""
    columns = x.float().unfold(1, len(weight), 1)  # (B, L, C, 7)
    convolved = ((columns * weight.float().T).sum(-1) + bias.float()).bfloat16()
    return F.layer_norm(convolved, norm_weight.shape, norm_weight, norm_bias, epsilon)


def to_samples(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(B, 6 + L, C), (7, C), (1) -> (B, L)"""
    columns = x.float().unfold(1, len(weight), 1)  # (B, L, C, 7)
    return (columns * weight.float().T).sum((-2, -1)).bfloat16() + bias
