"""The kernels of a decoder layer that batched.cu and codec_kernels.cu share: layer_kernels.h, and a method for each."""

from typing import Any

import torch
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import nvrtc
from qwen3_tts_cuda_graphs.fast.kernels import VECTOR, kernel_arguments

KERNELS: dict[str, dict[str, Any]] = {
    "add_and_norm": {
        "x": torch.bfloat16,
        "partials": torch.float32,
        **dict.fromkeys(("count", "partial_vectors"), int),
        **dict.fromkeys(("scale", "residual", "weight", "sum", "normalized"), torch.bfloat16),
    },
    "silu_and_multiply": {**dict.fromkeys(("gate_up", "inner"), torch.bfloat16), "vectors": int},
}


def layer_sizes(config: Any) -> dict[str, int | str]:
    """Constants that a stack's kernels are compiled with."""
    return dict(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        epsilon=f"{config.rms_norm_eps}f",
    )


class LayerKernels:
    """Launches the kernels of a source that includes layer_kernels.h, on torch's current stream. `fields` are those of
    the kernels' structs, `sizes` what the source was compiled with."""

    def __init__(self, kernels: nvrtc.Kernels, fields: dict[str, dict[str, Any]], sizes: Any):
        self.kernels = kernels
        self.fields = fields
        self.sizes = sizes

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, **values: Tensor | int | None) -> None:
        """Launch a kernel with these fields. None is a null pointer."""
        self.kernels.launch(kernel, grid, threads, kernel_arguments(kernel, self.fields[kernel], values))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """(..., H), (H) -> (..., H)"""
        normalized = torch.empty_like(x)
        self.launch_norm(x, normalized, scale=None, residual=None, weight=weight, sum=None)
        return normalized

    def add_and_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(..., H), (..., H), (H), (H) -> x * scale + residual, and that normalized. x may also be partial sums in
        float32, (partials, ..., H)."""
        total = torch.empty_like(residual)
        normalized = torch.empty_like(residual)
        self.launch_norm(x, normalized, scale=scale, residual=residual, weight=weight, sum=total)
        return total, normalized

    def launch_norm(self, x: Tensor, normalized: Tensor, **values: Tensor | None) -> None:
        vectors = self.sizes.hidden // VECTOR
        count = normalized.shape[:-1].numel()
        is_split = x.dim() > normalized.dim()
        values |= dict(x=None, partials=x, count=len(x)) if is_split else dict(x=x, partials=None, count=0)
        values |= dict(partial_vectors=count * vectors, normalized=normalized)
        self.launch("add_and_norm", (count, 1), vectors, **values)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """(..., 2 * I) -> (..., I)"""
        inner = gate_up.new_empty(*gate_up.shape[:-1], self.sizes.inner)
        vectors = inner.numel() // VECTOR
        blocks = -(-vectors // self.sizes.threads)
        self.launch("silu_and_multiply", (blocks, 1), self.sizes.threads, gate_up=gate_up, inner=inner, vectors=vectors)
        return inner
