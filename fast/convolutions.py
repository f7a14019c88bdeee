"""The convolutional half of the codec's decoder, from the transformer's output to the samples, channels-last: tensors
are (B, L, C), and between two convolutions or matrix products there is one kernel of convolutions.cu.

Upstream's modules run each product and sum of an activation as a kernel of its own, and cuDNN converts their
channels-first tensors and back, so most of the time goes into moving data. Here the convolutions get no bias and no
residual: the next kernel adds them, with the same roundings, and writes its result where the next convolution reads it,
behind the stored columns of each row. A transposed convolution is one of 1 or 2 columns to `stride` times as many
channels, a convolution of one column is a matrix product. cuDNN's dilated convolutions are slow for some lengths, a
thousand times slower for a few, so their input is interleaved instead (see convolutions.cu): (B, D, ceil(L / D), C).

`why_not` says where this cannot run; there, upstream's modules do.

Shapes: B rows, L columns, C channels, P stored columns.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fast import nvrtc
from fast.batched import Launchable, kernel_argument

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256  # of a block of activate and to_samples
VECTOR = 8  # bfloat16 that a thread loads at once

# Fields of the kernels' structs, in order: the type of a tensor, or int. `complete_source` makes the compiler check
# names and order.
KERNELS: dict[str, dict[str, Any]] = {
    "activate": {
        **dict.fromkeys(("x", "bias", "scale", "residual", "alpha", "inverse_beta", "sum", "state"), torch.bfloat16),
        "slots": torch.long,
        "output": torch.bfloat16,
        **dict.fromkeys(("columns", "state_columns", "vectors", "x_sequences", "output_sequences"), int),
    },
    "depthwise_norm": {
        **dict.fromkeys(("x", "weight", "bias", "norm_weight", "norm_bias", "output"), torch.bfloat16),
        "columns": int,
    },
    "to_samples": {**dict.fromkeys(("x", "weight", "bias", "output"), torch.bfloat16), "columns": int},
}


@dataclass(frozen=True)
class Sizes:
    """The constants that convolutions.cu is compiled with, there in capitals."""

    latent: int
    epsilon: str
    last: int
    threads: int = THREADS


def kernel_sizes(decoder: Any) -> Sizes:
    return Sizes(
        latent=decoder.config.latent_dim,
        epsilon=f"{decoder.upsample[0][1].norm.eps}f",
        last=decoder.decoder[-1].conv.in_channels,
    )


def why_not(decoder: Any) -> str | None:
    """Why the kernels cannot run this decoder, in words. None: they can, and are compiled."""
    if decoder.device.type != "cuda" or torch.version.hip:
        return f"the kernels need an NVIDIA GPU, the codec is on {decoder.device.type}"
    gpu = torch.cuda.get_device_properties(decoder.device)
    if gpu.major < 8:
        return f"the kernels need compute capability 8.0, {gpu.name} has {gpu.major}.{gpu.minor}"
    if reason := unsupported(decoder):
        return reason
    try:
        compile_for(decoder.device, kernel_sizes(decoder))
    except (OSError, RuntimeError) as error:
        return f"the kernels cannot be compiled: {' '.join(str(error).split())[:200]}"
    return None


def unsupported(decoder: Any) -> str | None:
    """`why_not`, for any GPU."""
    if not (decoder.upsample and decoder.decoder):
        return "the kernels need a decoder with both of its stacks"
    latent = decoder.config.latent_dim
    narrowest = decoder.decoder[-1].conv.in_channels
    convs = [module for module in (*decoder.upsample.modules(), *decoder.decoder.modules()) if hasattr(module, "conv")]
    limits = {
        f"bfloat16, the codec is {decoder.dtype}": decoder.dtype == torch.bfloat16,
        f"a latent size that is a multiple of 256 up to 8192, not {latent}": latent % 256 == 0 and latent <= 8192,
        f"channels in multiples of 8, the last convolution has {narrowest}": narrowest % VECTOR == 0,
        "convolutions that look back at most one column per stride, or 256 columns": all(
            stored_columns(module) <= (1 if isinstance(module.conv, nn.ConvTranspose1d) else THREADS)
            for module in convs
        ),
        "ConvNeXt blocks and a last convolution of 7 columns": all(
            conv.kernel_size == (7,)
            for conv in (decoder.decoder[-1].conv, *(blocks[1].dwconv.conv for blocks in decoder.upsample))
        ),
    }
    for need, is_met in limits.items():
        if not is_met:
            return f"the kernels need {need}"
    return None


def stored_columns(module: Any) -> int:
    """Columns before its input that a causal convolution looks back at."""
    if isinstance(module.conv, nn.ConvTranspose1d):
        return module.right_pad // module.conv.stride[0]
    return module.padding


def complete_source(sizes: Sizes, source: str | None = None) -> str:
    """The sizes, the kernels, and the checks of their structs. `source` is convolutions.cu, if not given."""
    defines = "".join(f"#define {name.upper()} {value}\n" for name, value in asdict(sizes).items())
    kernels = SOURCE.read_text() if source is None else source
    checks = "".join(
        nvrtc.check_struct(name.title().replace("_", ""), list(fields), "convolutions.py")
        for name, fields in KERNELS.items()
    )
    return defines + '#line 1 "convolutions.cu"\n' + kernels + '#line 1 "convolutions.py"\n' + checks


@functools.cache
def compile_for(device: torch.device, sizes: Sizes) -> nvrtc.Kernels:
    """OSError: there is no NVRTC, or no CUDA driver. RuntimeError: the compiler or the driver refuses the kernels."""
    gpu = torch.cuda.get_device_properties(device)
    cubin = nvrtc.compile_to_cubin(complete_source(sizes), f"sm_{gpu.major}{gpu.minor}")
    return nvrtc.Kernels(cubin, KERNELS, device)


@dataclass
class Unsummed:
    """What `activate` is to add up: (x + bias) * scale + residual, each None if it is not there."""

    x: Tensor  # (B, L, C), or interleaved (B, D, ceil(L / D), C)
    bias: Tensor | None = None
    scale: Tensor | None = None
    residual: Tensor | None = None  # (B, L, C)

    def is_sum(self) -> bool:
        return self.bias is None and self.scale is None and self.residual is None


class Convolutions(nn.Module):
    """Stands in for the modules of `decoder.upsample` and `decoder.decoder`. `state` is what to zero for a new
    utterance; `get_slots` returns each row's place in it."""

    def __init__(self, decoder: Any, slots: int, get_slots: Callable[[], Tensor], kernels: Launchable | None = None):
        super().__init__()
        self.sizes = kernel_sizes(decoder)
        self.kernels = kernels or compile_for(decoder.device, self.sizes)
        self.get_slots = get_slots
        self.state: list[Tensor] = []
        make_state = functools.partial(self.make_state, slots)
        self.upsample = [
            (TransposedConv(conv, make_state), ConvNext(block, make_state)) for conv, block in decoder.upsample
        ]
        first, *blocks, last_snake, last = decoder.decoder
        self.first = CausalConv(first, make_state)
        self.blocks = [Block(block, make_state) for block in blocks]
        self.last_snake = Snake(last_snake)
        self.last_state = make_state(last)
        self.last_weight = last.conv.weight[0].T.contiguous()  # (7, C)
        self.last_bias = last.conv.bias

    def make_state(self, slots: int, module: Any) -> Tensor | None:
        """For the last columns of a causal convolution's input, (slots, P, C). None if it needs none."""
        columns = stored_columns(module)
        if columns == 0:
            return None
        weight = module.conv.weight
        state = torch.zeros(slots, columns, module.conv.in_channels, dtype=weight.dtype, device=weight.device)
        self.state.append(state)
        return state

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, C, frames) -> (B, 1, samples)"""
        unsummed = Unsummed(hidden.transpose(1, 2).contiguous())
        for conv, block in self.upsample:
            unsummed = block(self, conv(self, unsummed))
        unsummed = self.first(self, unsummed)
        for block in self.blocks:
            unsummed = block(self, unsummed)
        x, _ = self.activate(unsummed, self.last_snake, self.last_state)
        return self.to_samples(x, self.last_weight, self.last_bias)[:, None]

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, **values: Tensor | int | None) -> None:
        fields = KERNELS[kernel]
        self.kernels.launch(
            kernel,
            grid,
            threads,
            [0 if values[name] is None else kernel_argument(name, values[name], fields[name]) for name in fields],
        )

    def activate(
        self,
        unsummed: Unsummed,
        snake: "Snake | None" = None,
        state: Tensor | None = None,
        keep_sum: bool = False,
        dilation: int = 1,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the sum, its SnakeBeta if there is one, behind the stored columns if there are any, (B, P + L, C) or
        interleaved for a convolution with this dilation; and the sum itself if it is to be kept, (B, L, C). The last P
        columns become the stored ones."""
        x = unsummed.x
        natural = x if unsummed.residual is None else unsummed.residual  # in the order of time
        rows, columns, channels = natural.shape
        x_sequences = x.shape[1] if x.dim() == 4 else 1
        state_columns = 0 if state is None else state.shape[1]
        vectors = channels // VECTOR
        length = -(-(state_columns + columns) // dilation)  # of a sequence of the output
        blocks = -(-(length * dilation - state_columns) * vectors // THREADS)
        if state is not None:
            blocks += -(-vectors // (THREADS // state_columns))
        total = torch.empty_like(natural) if keep_sum else None
        shape = (length,) if dilation == 1 else (dilation, length)
        output = x.new_empty(rows, *shape, channels)
        self.launch(
            "activate",
            (blocks, rows),
            THREADS,
            x=x,
            bias=unsummed.bias,
            scale=unsummed.scale,
            residual=unsummed.residual,
            alpha=snake and snake.alpha,
            inverse_beta=snake and snake.inverse_beta,
            sum=total,
            state=state,
            slots=None if state is None else self.get_slots(),
            output=output,
            columns=columns,
            state_columns=state_columns,
            vectors=vectors,
            x_sequences=x_sequences,
            output_sequences=dilation,
        )
        return output, total

    def depthwise_norm(self, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Each channel convolved alone, then normalized. (B, 6 + L, C), (7, C) -> (B, L, C)"""
        rows, padded_columns, channels = x.shape
        columns = padded_columns - len(weight) + 1
        output = x.new_empty(rows, columns, channels)
        self.launch(
            "depthwise_norm",
            (columns, rows),
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
        rows, padded_columns, _ = x.shape
        columns = padded_columns - len(weight) + 1
        output = x.new_empty(rows, columns)
        blocks = -(-columns // (THREADS // 2))
        self.launch(
            "to_samples", (blocks, rows), THREADS, x=x, weight=weight, bias=bias, output=output, columns=columns
        )
        return output


class Snake:
    """The constants of a SnakeBeta, with upstream's roundings."""

    def __init__(self, module: Any):
        self.alpha = module.alpha.exp()
        self.inverse_beta = 1.0 / (module.beta.exp() + module.no_div_by_zero)


class CausalConv:
    """A convolution of several columns, without its bias."""

    def __init__(self, module: Any, make_state: Callable[[Any], Tensor | None]):
        conv = module.conv
        self.state = make_state(module)
        self.weight = conv.weight[:, :, None].contiguous(memory_format=torch.channels_last)
        self.dilation = conv.dilation[0]
        self.bias = conv.bias

    def __call__(
        self, kernels: Convolutions, unsummed: Unsummed, snake: Snake | None = None, keep_sum: bool = False
    ) -> Unsummed:
        x, total = kernels.activate(unsummed, snake, self.state, keep_sum, self.dilation)
        return Unsummed(convolve(x, self.weight), self.bias, residual=total)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """(B, L, C) or interleaved, channels-last (C', C, 1, K) -> the same with L - K + 1 columns, by cuDNN"""
    image = x if x.dim() == 4 else x[:, None]  # (B, height, L, C): a height of 1, or the sequences
    out = F.conv2d(image.permute(0, 3, 1, 2), weight).permute(0, 2, 3, 1).contiguous()  # nothing to copy
    return out if x.dim() == 4 else out[:, 0]


class TransposedConv:
    """Each column becomes `stride` columns, which depend on it and, if the kernel is longer than that, on the column
    before it: a convolution to `stride` times as many channels."""

    def __init__(self, module: Any, make_state: Callable[[Any], Tensor | None]):
        conv = module.conv
        self.state = make_state(module)
        self.stride = conv.stride[0]
        self.bias = conv.bias
        taps = conv.weight.unflatten(2, (-1, self.stride))  # (C, C', 1 or 2, stride), this column first
        weight = taps.flip(2).permute(3, 1, 0, 2).flatten(0, 1)  # (stride C', C, 1 or 2)
        self.is_product = weight.shape[2] == 1
        if self.is_product:
            self.weight = weight[:, :, 0].contiguous()
        else:
            self.weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)

    def __call__(self, kernels: Convolutions, unsummed: Unsummed, snake: Snake | None = None) -> Unsummed:
        if unsummed.is_sum() and snake is None and self.state is None:
            x = unsummed.x
        else:
            x, _ = kernels.activate(unsummed, snake, self.state)
        out = F.linear(x, self.weight) if self.is_product else convolve(x, self.weight)
        rows, columns, _ = out.shape
        return Unsummed(out.view(rows, columns * self.stride, -1), self.bias)


class ConvNext:
    """The block with a depthwise convolution and an MLP."""

    def __init__(self, block: Any, make_state: Callable[[Any], Tensor | None]):
        self.block = block
        self.state = make_state(block.dwconv)
        self.weight = block.dwconv.conv.weight[:, 0].T.contiguous()  # (7, C)

    def __call__(self, kernels: Convolutions, unsummed: Unsummed) -> Unsummed:
        block = self.block
        x, total = kernels.activate(unsummed, None, self.state, keep_sum=True)
        x = kernels.depthwise_norm(x, self.weight, block.dwconv.conv.bias, block.norm)
        x = block.pwconv2(block.act(block.pwconv1(x)))
        return Unsummed(x, scale=block.gamma, residual=total)


class Block:
    """Upsampling and three residual units."""

    def __init__(self, block: Any, make_state: Callable[[Any], Tensor | None]):
        snake, conv, *units = block.block
        self.snake = Snake(snake)
        self.conv = TransposedConv(conv, make_state)
        self.units = [ResidualUnit(unit, make_state) for unit in units]

    def __call__(self, kernels: Convolutions, unsummed: Unsummed) -> Unsummed:
        unsummed = self.conv(kernels, unsummed, self.snake)
        for unit in self.units:
            unsummed = unit(kernels, unsummed)
        return unsummed


class ResidualUnit:
    def __init__(self, unit: Any, make_state: Callable[[Any], Tensor | None]):
        self.snake1 = Snake(unit.act1)
        self.conv1 = CausalConv(unit.conv1, make_state)
        self.snake2 = Snake(unit.act2)
        self.weight2 = unit.conv2.conv.weight[:, :, 0]
        self.bias2 = unit.conv2.conv.bias

    def __call__(self, kernels: Convolutions, unsummed: Unsummed) -> Unsummed:
        convolved = self.conv1(kernels, unsummed, self.snake1, keep_sum=True)
        sequences = convolved.x.flatten(1, -2)  # stays interleaved, if it is
        x, _ = kernels.activate(Unsummed(sequences, convolved.bias), self.snake2)
        x = F.linear(x.view_as(convolved.x), self.weight2)
        return Unsummed(x, self.bias2, residual=convolved.residual)
