"""The codec's decoder with the kernels of codec_kernels.cu between its matrix products and convolutions.

Upstream's modules launch a kernel for each elementwise operation of an activation, and cuDNN converts their
channels-first tensors to channels-last and back, so most of the time goes into moving data. Here all tensors are
channels-last, (B, L, C), with one kernel between two matrix products. Convolutions add neither bias nor residual: the
next kernel does, with the same roundings, and writes its result behind the stored columns of each row, where the next
convolution reads it. A convolution of K columns is a batch of K matrix products, which cuBLAS computes faster than
cuDNN computes convolutions. One with dilation D reads interleaved columns (see codec_kernels.cu), (B, D, ceil(L / D),
C). A transposed convolution is a convolution of 1 or 2 columns to `stride` times as many channels.

Where `codec_kernels.SOURCE.why_not` gives a reason why this cannot run, upstream's modules do.

Shapes: B chunks, T frames, L columns, C channels, P stored columns, H hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_tts_cuda_graphs.fast.codec_kernels import HEAD_DIM, CodecKernels, PendingSum, Snake, stored_columns
from qwen3_tts_cuda_graphs.fast.layers import concatenate

MAX_PRODUCT_BYTES = 24 << 20  # of a convolution's input, so that it stays in L2 while K products read it


class KernelDecoder:
    """Upstream's decoder, resumable: each call decodes the next frames. `state` is a list of tensors with `row_count`
    rows each; the caller zeroes a row of them for a new utterance. `positions`, (rows), is the number of frames that
    each row has decoded; the caller counts them."""

    def __init__(self, decoder: Any, row_count: int, positions: Tensor, kernels: CodecKernels):
        self.kernels = kernels
        self.state: list[Tensor] = []

        def make_state(module: Any) -> Tensor | None:
            """A tensor for the last columns of a causal convolution's input, (rows, P, C); None if it reads none."""
            columns = stored_columns(module)
            if columns == 0:
                return None
            weight = module.conv.weight
            self.state.append(weight.new_zeros(row_count, columns, module.conv.in_channels))
            return self.state[-1]

        self.quantizer = Quantizer(decoder.quantizer)
        self.pre_conv = CausalConv(decoder.pre_conv, make_state)
        self.transformer = Transformer(decoder.pre_transformer, row_count, positions, kernels.sizes.ring)
        self.state += [*self.transformer.keys, *self.transformer.values]
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

    def __call__(self, codes: Tensor) -> Tensor:
        """(B, codebooks, T) -> (B, 1, samples)"""
        kernels = self.kernels
        pending = self.quantizer(kernels, codes)
        x, _ = kernels.activate(self.pre_conv(kernels, pending))
        pending = PendingSum(self.transformer(kernels, x))
        for conv, block in self.upsample:
            pending = block(kernels, conv(kernels, pending))
        pending = self.first(kernels, pending)
        for block in self.blocks:
            pending = block(kernels, pending)
        x, _ = kernels.activate(pending, self.last_snake, self.last_state)
        samples = kernels.to_samples(x, self.last_weight, self.last_bias)
        return samples.clamp(min=-1, max=1)[:, None]


class Quantizer:
    """The sums of the codes' embeddings, projected."""

    def __init__(self, quantizer: Any):
        books = [layer._codebook for part in (quantizer.rvq_first, quantizer.rvq_rest) for layer in part.vq.layers]
        tables = [book.embedding_sum / book.cluster_usage.clamp(min=book.epsilon)[:, None] for book in books]
        self.tables = torch.stack(tables)
        self.semantic_codebooks = quantizer.n_q_semantic
        self.semantic_weight = quantizer.rvq_first.output_proj.weight[:, :, 0]
        self.acoustic_weight = quantizer.rvq_rest.output_proj.weight[:, :, 0]

    def __call__(self, kernels: CodecKernels, codes: Tensor) -> PendingSum:
        semantic, acoustic = kernels.embed_codes(codes.contiguous(), self.tables, self.semantic_codebooks)
        return PendingSum(F.linear(acoustic, self.acoustic_weight), residual=F.linear(semantic, self.semantic_weight))


class Transformer:
    """The transformer over the new frames and the window before them. The cache is a ring: position p is at index
    p % ring."""

    def __init__(self, transformer: Any, row_count: int, positions: Tensor, ring: int):
        config = transformer.config
        weight = transformer.input_proj.weight
        shape = (len(transformer.layers), row_count, config.num_attention_heads, ring, HEAD_DIM)
        self.positions = positions
        self.rotary_emb = transformer.rotary_emb
        self.input_proj = transformer.input_proj
        self.output_proj = transformer.output_proj
        self.layers = [CodecLayer(layer) for layer in transformer.layers]
        self.norms = [layer.input_layernorm.weight for layer in transformer.layers] + [transformer.norm.weight]
        self.keys = list(weight.new_zeros(shape))
        self.values = list(weight.new_zeros(shape))

    def __call__(self, kernels: CodecKernels, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        residual = self.input_proj(x)  # (B, T, H)
        frames = torch.arange(x.shape[1], device=x.device)
        cos, sin = self.rotary_emb(residual, self.positions[kernels.get_row_indices(), None] + frames)
        x = kernels.norm(residual, self.norms[0])
        for layer, next_norm, keys, values in zip(self.layers, self.norms[1:], self.keys, self.values, strict=True):
            qkv = F.linear(x, layer.qkv)
            heads = kernels.window_attention(qkv, cos, sin, self.positions, keys, values)
            x = F.linear(heads, layer.output)
            residual, x = kernels.add_and_norm(x, residual, layer.post_norm, layer.attention_scale)
            inner = kernels.silu_and_multiply(F.linear(x, layer.gate_up))
            residual, x = kernels.add_and_norm(F.linear(inner, layer.down), residual, next_norm, layer.mlp_scale)
        return self.output_proj(x)


class CodecLayer:
    """A layer's weights."""

    def __init__(self, layer: Any):
        attn = layer.self_attn
        mlp = layer.mlp
        self.qkv = concatenate(attn.q_proj, attn.k_proj, attn.v_proj)
        self.output = attn.o_proj.weight
        self.attention_scale = layer.self_attn_layer_scale.scale
        self.post_norm = layer.post_attention_layernorm.weight
        self.gate_up = concatenate(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj.weight
        self.mlp_scale = layer.mlp_layer_scale.scale


class CausalConv:
    """A convolution of several columns, without its bias."""

    def __init__(self, module: Any, make_state: Callable[[Any], Tensor | None]):
        conv = module.conv
        self.state = make_state(module)
        self.weight = channels_last(conv)
        self.dilation = conv.dilation[0]
        self.bias = conv.bias

    def __call__(
        self, kernels: CodecKernels, pending: PendingSum, snake: Snake | None = None, keep_sum: bool = False
    ) -> PendingSum:
        x, total = kernels.activate(pending, snake, self.state, keep_sum, self.dilation)
        return PendingSum(convolve(x, self.weight), self.bias, None, total, pending.columns)


def channels_last(conv: Any) -> Tensor:
    """The weight for `convolve`, (C', K, C). The convolution's own becomes a view of it, to save memory."""
    weight = conv.weight.data.transpose(1, 2).contiguous()
    conv.weight.data = weight.transpose(1, 2)
    return weight


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """(B, L, C) or interleaved, (C', K, C) -> the same shape with C' channels, of which the last K - 1 columns of each
    sequence are meaningless. Computes a few chunks at a time, so that they stay in L2 for all K products."""
    out = x.new_empty(*x.shape[:-1], len(weight))
    count = max(1, MAX_PRODUCT_BYTES // x[0].nbytes)
    for x_chunks, out_chunks in zip(x.split(count), out.split(count), strict=True):
        multiply_windows(x_chunks, weight, out_chunks)
    return out


def multiply_windows(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Convolve all sequences as one, by a batch of K matrix products. Product r computes the windows of K columns that
    begin at r, r + K, r + 2 K, ...: they do not overlap, so they are the rows of a matrix in memory. The last windows
    read past the end of x, into its spare columns."""
    columns = x.shape[:-1].numel()
    _, taps, channels = weight.shape
    windows = -(-(columns - taps + 1) // taps)  # of a product
    x_windows = x.as_strided((taps, windows, taps * channels), (channels, taps * channels, 1))
    out_windows = out.flatten(0, -2)[: windows * taps].unflatten(0, (windows, taps)).transpose(0, 1)
    torch.bmm(x_windows, weight.flatten(1).T.expand(taps, -1, -1), out=out_windows)


class TransposedConv:
    """Each column becomes `stride` columns, which depend on that column and, if the kernel is longer than the stride,
    on the one before it. So it is a convolution to `stride` times as many channels."""

    def __init__(self, module: Any, make_state: Callable[[Any], Tensor | None]):
        conv = module.conv
        self.state = make_state(module)
        self.stride = conv.stride[0]
        self.bias = conv.bias
        taps = conv.weight.unflatten(2, (-1, self.stride))  # (C, C', 1 or 2, stride), this column first
        self.weight = taps.flip(2).permute(3, 1, 2, 0).flatten(0, 1).contiguous()  # (stride C', 1 or 2, C)

    def __call__(self, kernels: CodecKernels, pending: PendingSum, snake: Snake | None = None) -> PendingSum:
        if pending.is_sum() and snake is None and self.state is None:
            x = pending.x
        else:
            x, _ = kernels.activate(pending, snake, self.state)
        out = convolve(x, self.weight)
        count, columns, _ = out.shape
        out = out.view(count, columns * self.stride, -1)
        return PendingSum(out, self.bias, columns=pending.columns * self.stride)


class ConvNext:
    """The block with a depthwise convolution and an MLP."""

    def __init__(self, block: Any, make_state: Callable[[Any], Tensor | None]):
        self.block = block
        self.state = make_state(block.dwconv)
        self.weight = block.dwconv.conv.weight[:, 0].T.contiguous()  # (7, C)

    def __call__(self, kernels: CodecKernels, pending: PendingSum) -> PendingSum:
        block = self.block
        x, total = kernels.activate(pending, None, self.state, keep_sum=True)
        x = kernels.depthwise_norm(x, self.weight, block.dwconv.conv.bias, block.norm)
        x = block.pwconv2(block.act(block.pwconv1(x)))
        return PendingSum(x, scale=block.gamma, residual=total)


class Block:
    """Upsampling and three residual units."""

    def __init__(self, block: Any, make_state: Callable[[Any], Tensor | None]):
        snake, conv, *units = block.block
        self.snake = Snake(snake)
        self.conv = TransposedConv(conv, make_state)
        self.units = [ResidualUnit(unit, make_state) for unit in units]

    def __call__(self, kernels: CodecKernels, pending: PendingSum) -> PendingSum:
        pending = self.conv(kernels, pending, self.snake)
        for unit in self.units:
            pending = unit(kernels, pending)
        return pending


class ResidualUnit:
    def __init__(self, unit: Any, make_state: Callable[[Any], Tensor | None]):
        self.snake1 = Snake(unit.act1)
        self.conv1 = CausalConv(unit.conv1, make_state)
        self.snake2 = Snake(unit.act2)
        self.weight2 = unit.conv2.conv.weight[:, :, 0]
        self.bias2 = unit.conv2.conv.bias

    def __call__(self, kernels: CodecKernels, pending: PendingSum) -> PendingSum:
        convolved = self.conv1(kernels, pending, self.snake1, keep_sum=True)
        sequences = convolved.x.flatten(1, -2)  # if it is interleaved, it stays so
        x, _ = kernels.activate(PendingSum(sequences, convolved.bias), self.snake2)
        x = F.linear(x.view_as(convolved.x), self.weight2)
        return PendingSum(x, self.bias2, None, convolved.residual, convolved.columns)
