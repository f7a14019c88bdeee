"""What the kernels of convolutions.cu compute, in torch: a function for each, of the same name.

They are the kernels' documentation, and tests/test_convolutions.py compares the kernels with them. Tensors are
bfloat16; every step here that returns one is a rounding of the model's own forward.

Shapes: B rows, L columns, C channels, P stored columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def snake(x: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
    """SnakeBeta: (B, L, C), (C), (C) -> (B, L, C)"""
    return x + inverse_beta * torch.sin(x * alpha).pow(2)


def interleave(x: Tensor, sequences: int) -> Tensor:
    """(B, L, C) -> (B, D, ceil(L / D), C): sequence r has the columns r, r + D, r + 2 D, ..., the last may be zeros."""
    missing = -x.shape[1] % sequences
    return F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, sequences)).transpose(1, 2)


def activate(
    x: Tensor,  # (B, L, C), not interleaved
    bias: Tensor | None,  # (C)
    scale: Tensor | None,  # (C)
    residual: Tensor | None,  # (B, L, C)
    alpha: Tensor | None,  # (C)
    inverse_beta: Tensor | None,  # (C)
    state: Tensor | None,  # (slots, P, C)
    slots: Tensor | None,  # (B)
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
    joined = torch.cat([state[slots], x], dim=1)
    state[slots] = joined[:, x.shape[1] :]
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
