"""The kernels of a decoder layer that batched.cu and codec_kernels.cu share: layer_kernels.h, and a method for each."""

from typing import Any

import torch
from torch import Tensor

from fast.kernels import VECTOR, Launchable, kernel_arguments

KERNELS: dict[str, dict[str, Any]] = {
    "add_and_norm": dict.fromkeys(("x", "scale", "residual", "weight", "sum", "normalized"), torch.bfloat16),
    "silu_and_multiply": {**dict.fromkeys(("gate_up", "inner"), torch.bfloat16), "vectors": int},
}


class LayerKernels:
    """Launches the kernels of a source that includes layer_kernels.h, on torch's current stream. `fields` are those of
    the kernels' structs, `sizes` what the source was compiled with."""

    def __init__(self, kernels: Launchable, fields: dict[str, dict[str, Any]], sizes: Any):
        self.kernels = kernels
        self.fields = fields
        self.sizes = sizes

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, **values: Tensor | int | None) -> None:
        """None is a null pointer."""
        self.kernels.launch(kernel, grid, threads, kernel_arguments(kernel, self.fields[kernel], values))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """(..., H), (H) -> (..., H)"""
        normalized = torch.empty_like(x)
        self.launch_norm(x=x, scale=None, residual=None, weight=weight, sum=None, normalized=normalized)
        return normalized

    def add_and_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(..., H), (..., H), (H), (H) -> x * scale + residual, and that normalized"""
        total = torch.empty_like(x)
        normalized = torch.empty_like(x)
        self.launch_norm(x=x, scale=scale, residual=residual, weight=weight, sum=total, normalized=normalized)
        return total, normalized

    def launch_norm(self, x: Tensor, **values: Tensor | None) -> None:
        rows = x.shape[:-1].numel()
        self.launch("add_and_norm", (rows, 1), self.sizes.hidden // VECTOR, x=x, **values)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """(..., 2 * I) -> (..., I)"""
        inner = gate_up.new_empty(*gate_up.shape[:-1], self.sizes.inner)
        vectors = inner.numel() // VECTOR
        blocks = -(-vectors // self.sizes.threads)
        self.launch("silu_and_multiply", (blocks, 1), self.sizes.threads, gate_up=gate_up, inner=inner, vectors=vectors)
        return inner
