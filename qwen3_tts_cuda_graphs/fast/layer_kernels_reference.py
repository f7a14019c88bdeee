"""What the kernels of layer_kernels.h compute, in torch: a function for each, of the same name; and what the references
of all kernels share.

Tensors are bfloat16: then every step that returns one is a rounding of the model's own forward. Or they are float32:
then `rounded` is called where the model's forward rounds. H is the hidden size, I the inner size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def to_bfloat16(x: Tensor) -> Tensor:
    """float32 with the values of bfloat16."""
    return x.bfloat16().float()


def norm(x: Tensor, weight: Tensor, epsilon: float, rounded: Rounding = exact) -> Tensor:
    """RMS norm: (..., H), (H) -> (..., H). Rounded before and after the multiplication by the weight."""
    variance = x.float().square().mean(-1, keepdim=True)
    normalized = (x.float() * torch.rsqrt(variance + epsilon)).to(x.dtype)
    return rounded(rounded(normalized) * weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rounded: Rounding = exact) -> Tensor:
    """RoPE. The first half of sin is negated, so that swapping the halves is enough. Both products are rounded, and
    their sum."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return rounded(rounded(x * cos) + rounded(swapped * sin))


def add_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(..., H), (..., H), (H), (H) -> x * scale + residual, and that normalized"""
    total = residual + (x if scale is None else scale * x)
    return total, norm(total, weight, epsilon)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """(..., 2 I) -> (..., I). silu is rounded, and its product with up."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
