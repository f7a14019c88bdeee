"""The kernels of codec_kernels.cu: which codecs they can run, how they are compiled, and a method to launch each.

They launch on torch's current stream, so that a graph can capture them. NVRTC compiles them for this GPU and codec.

Shapes: B chunks, T frames, L columns, C channels, P stored columns, H hidden size, Q codebooks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cudagraph_talker import round_up
from qwen3_tts_cuda_graphs.fast import layer_kernels, nvrtc
from qwen3_tts_cuda_graphs.fast.kernels import VECTOR, CudaSource, struct_of
from qwen3_tts_cuda_graphs.fast.layer_kernels import LayerKernels

THREADS = 256  # per block of activate, to_samples and silu_and_multiply
ATTENTION_THREADS = 128
HEAD_DIM = 64
MAX_FRAMES = 64  # per chunk
SPARE_COLUMNS = 8  # allocated behind the output of `activate`

# Fields of the kernels' structs, in order: the type of a tensor, or int. The compiler checks names and order.
KERNELS: dict[str, dict[str, Any]] = {
    **layer_kernels.KERNELS,
    "embed_codes": {
        "codes": torch.long,
        **dict.fromkeys(("tables", "semantic", "acoustic"), torch.bfloat16),
        **dict.fromkeys(("codebooks", "semantic_codebooks", "frames"), int),
    },
    "window_attention": {
        **dict.fromkeys(("qkv", "cos", "sin"), torch.bfloat16),
        **dict.fromkeys(("positions", "row_indices"), torch.long),
        **dict.fromkeys(("keys", "values", "output"), torch.bfloat16),
        "frames": int,
    },
    "activate": {
        **dict.fromkeys(("x", "bias", "scale", "residual", "alpha", "inverse_beta", "sum", "state"), torch.bfloat16),
        "row_indices": torch.long,
        "output": torch.bfloat16,
        **dict.fromkeys(("columns", "state_columns", "vectors", "x_sequences", "x_length"), int),
        **dict.fromkeys(("output_sequences", "output_length"), int),
    },
    "depthwise_norm": {
        **dict.fromkeys(("x", "weight", "bias", "norm_weight", "norm_bias", "output"), torch.bfloat16),
        "columns": int,
    },
    "to_samples": {**dict.fromkeys(("x", "weight", "bias", "output"), torch.bfloat16), "columns": int},
}


def kernel_sizes(decoder: Any) -> SimpleNamespace:
    """The constants that codec_kernels.cu is compiled with, there in capitals."""
    config = decoder.config
    return SimpleNamespace(
        codebook=config.codebook_size,
        code_dim=decoder.quantizer.rvq_first.vq.layers[0]._codebook.embedding_sum.shape[1],
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        epsilon=f"{config.rms_norm_eps}f",
        heads=config.num_attention_heads,
        window=config.sliding_window,
        ring=round_up(max(config.sliding_window, MAX_FRAMES)),
        latent=config.latent_dim,
        latent_epsilon=f"{decoder.upsample[0][1].norm.eps}f",
        last=decoder.decoder[-1].conv.in_channels,
        max_frames=MAX_FRAMES,
        threads=THREADS,
    )


def needs_of(decoder: Any) -> dict[str, bool]:
    """What the kernels need of a decoder, as text for messages, and whether it is so."""
    config = decoder.config
    sizes = kernel_sizes(decoder)
    convs = [module for module in (*decoder.upsample.modules(), *decoder.decoder.modules()) if hasattr(module, "conv")]
    of_seven = [decoder.decoder[-1].conv, *(block.dwconv.conv for _, block in decoder.upsample)]
    return {
        f"bfloat16, the codec is {decoder.dtype}": decoder.dtype == torch.bfloat16,
        f"a latent size that is a multiple of 256 up to 8192, not {sizes.latent}": (
            sizes.latent % 256 == 0 and sizes.latent <= 8192
        ),
        f"a hidden size that is a multiple of 256 up to 8192, not {sizes.hidden}": (
            sizes.hidden % 256 == 0 and sizes.hidden <= 8192
        ),
        f"an MLP whose width is a multiple of 8, not {sizes.inner}": sizes.inner % VECTOR == 0,
        f"codebook entries in multiples of 8, not {sizes.code_dim}": sizes.code_dim % VECTOR == 0,
        f"silu between gate and down, not {config.hidden_act}": config.hidden_act == "silu",
        f"heads of {HEAD_DIM} dimensions, the codec's have {config.head_dim}": config.head_dim == HEAD_DIM,
        "as many KV heads as query heads": config.num_key_value_heads == config.num_attention_heads,
        f"an attention window of at most 96 frames, not {sizes.window}": sizes.window <= 96,
        "attention without a bias": not config.attention_bias,
        f"channels in multiples of 8, the last convolution has {sizes.last}": sizes.last % VECTOR == 0,
        "convolutions that look back at most one column per stride, or 256 columns": all(
            stored_columns(module) <= (1 if isinstance(module.conv, nn.ConvTranspose1d) else THREADS)
            for module in convs
        ),
        f"convolutions of at most {SPARE_COLUMNS + 1} columns": all(
            stored_columns(module) <= SPARE_COLUMNS * module.conv.dilation[0] for module in convs
        ),
        "ConvNeXt blocks and a last convolution of 7 columns": all(conv.kernel_size == (7,) for conv in of_seven),
    }


def stored_columns(module: Any) -> int:
    """How many columns before its input a causal convolution reads."""
    if isinstance(module.conv, nn.ConvTranspose1d):
        return module.right_pad // module.conv.stride[0]
    return module.padding


def structs_of(_: Any) -> dict[str, dict[str, Any]]:
    return {struct_of(name): fields for name, fields in KERNELS.items()}


SOURCE = CudaSource(Path(__file__).with_suffix(".cu"), KERNELS, kernel_sizes, needs_of, structs_of)


@dataclass
class PendingSum:
    """The sum that `activate` computes, (x + bias) * scale + residual. A term that is None is skipped."""

    x: Tensor  # (B, L, C), or interleaved (B, D, ceil(L / D), C); columns from L on are ignored
    bias: Tensor | None = None
    scale: Tensor | None = None
    residual: Tensor | None = None  # (B, L, C)
    columns: int = 0  # L

    def __post_init__(self):
        self.columns = self.columns or (self.x if self.residual is None else self.residual).shape[1]

    def is_sum(self) -> bool:
        return self.bias is None and self.scale is None and self.residual is None


class Snake:
    """The constants of a SnakeBeta, with upstream's roundings."""

    def __init__(self, module: Any):
        self.alpha = module.alpha.exp()
        self.inverse_beta = 1.0 / (module.beta.exp() + module.no_div_by_zero)


class CodecKernels(LayerKernels):
    """`get_row_indices` returns the rows of the state that the chunks of the current batch use: (B)"""

    def __init__(self, decoder: Any, get_row_indices: Callable[[], Tensor], kernels: nvrtc.Kernels | None = None):
        sizes, kernels = (kernel_sizes(decoder), kernels) if kernels else SOURCE.compile(decoder)
        super().__init__(kernels, KERNELS, sizes)
        self.get_row_indices = get_row_indices

    def embed_codes(self, codes: Tensor, tables: Tensor, semantic_codebooks: int) -> tuple[Tensor, Tensor]:
        """(B, Q, T), (Q, entries, C) -> the sums over the first codebooks and over the others, each (B, T, C)"""
        count, codebooks, frames = codes.shape
        semantic = tables.new_empty(count, frames, self.sizes.code_dim)
        acoustic = torch.empty_like(semantic)
        self.launch(
            "embed_codes",
            (frames, count),
            self.sizes.code_dim // VECTOR,
            codes=codes,
            tables=tables,
            semantic=semantic,
            acoustic=acoustic,
            codebooks=codebooks,
            semantic_codebooks=semantic_codebooks,
            frames=frames,
        )
        return semantic, acoustic

    def window_attention(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """(B, T, 3 * heads * D) -> (B, T, heads * D). `positions` are those of the rows, (rows); `keys` and `values`,
        (rows, heads, ring, D), get those of the new frames."""
        count, frames, _ = qkv.shape
        if frames > MAX_FRAMES:
            raise ValueError(f"{frames} frames at once, the kernel has memory for {MAX_FRAMES}")
        output = qkv.new_empty(count, frames, self.sizes.heads * HEAD_DIM)
        self.launch(
            "window_attention",
            (self.sizes.heads, count),
            ATTENTION_THREADS,
            qkv=qkv,
            cos=cos,
            sin=sin,
            positions=positions,
            row_indices=self.get_row_indices(),
            keys=keys,
            values=values,
            output=output,
            frames=frames,
        )
        return output

    def activate(
        self,
        pending: PendingSum,
        snake: Snake | None = None,
        state: Tensor | None = None,
        keep_sum: bool = False,
        dilation: int = 1,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the sum, or its SnakeBeta, after the stored columns if there are any: (B, P + L, C), or interleaved
        for a convolution with this dilation; and with `keep_sum` the sum itself, (B, L, C). The last P columns become
        the stored ones."""
        x = pending.x
        count, *sequences, x_length, channels = x.shape
        columns = pending.columns
        state_columns = 0 if state is None else state.shape[1]
        vectors = channels // VECTOR
        length = -(-(state_columns + columns) // dilation)  # of a sequence of the output
        blocks = -(-columns * vectors // THREADS)
        if state is not None:
            blocks += -(-vectors // (THREADS // state_columns))
        total = x.new_empty(count, columns, channels) if keep_sum else None
        shape = (length,) if dilation == 1 else (dilation, length)
        # `convolve` reads the spare columns, too, and ignores what it computes from them.
        output = x.new_empty(count * length * dilation + SPARE_COLUMNS, channels)[:-SPARE_COLUMNS]
        self.launch(
            "activate",
            (blocks, count),
            THREADS,
            x=x,
            bias=pending.bias,
            scale=pending.scale,
            residual=pending.residual,
            alpha=snake and snake.alpha,
            inverse_beta=snake and snake.inverse_beta,
            sum=total,
            state=state,
            row_indices=None if state is None else self.get_row_indices(),
            output=output,
            columns=columns,
            state_columns=state_columns,
            vectors=vectors,
            x_sequences=sequences[0] if sequences else 1,
            x_length=x_length,
            output_sequences=dilation,
            output_length=length,
        )
        return output.view(count, *shape, channels), total

    def depthwise_norm(self, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Each channel convolved alone, then normalized. (B, 6 + L, C), (7, C) -> (B, L, C)"""
        count, padded_columns, channels = x.shape
        columns = padded_columns - len(weight) + 1
        output = x.new_empty(count, columns, channels)
        self.launch(
            "depthwise_norm",
            (columns, count),
            channels // VECTOR,
            x=x,
            weight=weight,
            bias=bias,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            output=output,
            columns=columns,
        )
        return output

    def to_samples(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A convolution to one channel. (B, 6 + L, C), (7, C) -> (B, L)"""
        count, padded_columns, _ = x.shape
        columns = padded_columns - len(weight) + 1
        output = x.new_empty(count, columns)
        blocks = -(-columns // (THREADS // 2))
        self.launch(
            "to_samples", (blocks, count), THREADS, x=x, weight=weight, bias=bias, output=output, columns=columns
        )
        return output
