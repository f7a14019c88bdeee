"""The codec's decoder as CUDA graphs: codes go in, a few frames at a time, and their samples come out.

The 12 Hz decoder is causal, so it can be resumed: each convolution keeps the last columns of its input, each attention
layer the keys and values of its window. This state lives in static tensors with a row for each utterance, which the
graphs of all chunk sizes and batch sizes share. Chunks of any sizes, joined, are the audio of the whole utterance.
Everything runs on a CUDA stream of its own, beside the talker's.

Shapes: B chunks, each of a different row, T frames, C channels, H hidden size.
"""

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from cudagraph_talker import GraphPool, additive_mask, round_up
from qwen3_tts_cuda_graphs.fast import codec_kernels
from qwen3_tts_cuda_graphs.fast.codec_decoder import KernelDecoder
from qwen3_tts_cuda_graphs.fast.cublas import products_on
from qwen3_tts_cuda_graphs.fast.rows import batch_sizes

log = logging.getLogger("qwen3_tts_cuda_graphs")

# Frames per captured graph; a chunk of another size is split into these. AttentionWindow.columns(size) must not exceed
# the stored window plus `size`, which holds for powers of two but not for every size (10: 96 > 80 + 10).
# Each takes 0.1 s to capture; 16 frames take 0.6 ms longer as two times 8.
CHUNK_SIZES = (32, 8, 4, 2, 1)
BATCH_CHUNK_SIZES = CHUNK_SIZES[1:]  # of several utterances
MAX_BATCH = 64  # utterances that are decoded together; more take much memory and are not faster

# Full chunks of many rows are decoded while the next frames run, and leave multiprocessors free for those.
MANY_ROWS = 32
SHARE_BESIDE_FRAMES = 0.5

# cuDNN is faster with channels-last weights up to about this batch x length, and much slower beyond.
MAX_CHANNELS_LAST_COLUMNS = 2048


class Codec:
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, tokenizer, row_count: int):
        """
        tokenizer: upstream's speech tokenizer
        row_count: utterances that can be decoded at the same time
        """
        model = tokenizer.model.decoder
        config = model.config
        self.device = model.device
        self.samples_per_frame = tokenizer.get_decode_upsample_rate()
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.batches = batch_sizes(min(row_count, MAX_BATCH))
        if row_count > 1:
            row_count += 1  # one that belongs to no utterance: padding of a batch reads and writes it
        self.padding_row = row_count - 1

        with self.device:
            self.codes = torch.zeros(self.batches[-1], config.num_quantizers, max(CHUNK_SIZES), dtype=torch.long)
            self.samples = torch.zeros(self.batches[-1], max(CHUNK_SIZES) * self.samples_per_frame, dtype=torch.float32)
            self.position = torch.zeros(row_count, dtype=torch.long)
            self.state = [self.position]
            self.indices = {batch: torch.full((batch,), self.padding_row) for batch in self.batches}  # rows of a batch
            self.row_indices = self.indices[1]  # those of the step that runs or is being captured
            reason = codec_kernels.SOURCE.why_not(model)
            if reason:
                log.info("the codec runs upstream's modules: %s", reason)
                self.use_modules(model, row_count)
            else:
                self.use_kernels(model, row_count)
        pool = GraphPool(self.device)
        position, *others = self.state
        self.row_states = [(position[row], [state[row] for state in others]) for row in range(row_count)]
        self.graphs = {
            (batch, size): self.capture(batch, size, pool)
            for batch in reversed(self.batches)  # the largest first: the others reuse its memory
            for size in (CHUNK_SIZES if batch == 1 else BATCH_CHUNK_SIZES)
        }
        torch._foreach_zero_(self.state)  # capturing has run each of them

    def use_kernels(self, model: nn.Module, row_count: int) -> None:
        """The same layers from few kernels, on the same weights."""
        kernels = codec_kernels.CodecKernels(model, lambda: self.row_indices)
        self.decoder = KernelDecoder(model, row_count, self.position, kernels)
        self.state += self.decoder.state

    def use_modules(self, model: nn.Module, row_count: int) -> None:
        """Copy the modules but share the weights: upstream's own decoder stays as it is."""
        shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
        self.decoder = copy.deepcopy(model, shared)
        self.window = AttentionWindow(self, model.config, row_count, model.dtype)
        self.state += [*self.window.keys, *self.window.values]
        for module in self.decoder.modules():
            self.keep_input(module, row_count, model.dtype)
        precompute_constants(self.decoder)
        self.decoder.pre_transformer.forward = self.transformer

    def capture(self, batch: int, size: int, pool: GraphPool) -> Callable[[], None]:
        """Decode the next `size` frames of `batch` rows."""

        def step() -> None:
            self.row_indices = self.indices[batch]
            self.step(size)

        leaves_room = self.stream and batch >= MANY_ROWS and size == max(BATCH_CHUNK_SIZES)
        with products_on(SHARE_BESIDE_FRAMES, self.device) if leaves_room else contextlib.nullcontext():
            return pool.capture(step)

    def keep_input(self, module: nn.Module, row_count: int, dtype: torch.dtype) -> None:
        """Give a causal convolution a static tensor for the end of its input."""
        conv = getattr(module, "conv", None)
        if isinstance(conv, nn.Conv1d):
            columns, forward = module.padding, self.causal_conv
        elif isinstance(conv, nn.ConvTranspose1d):
            columns, forward = module.right_pad // conv.stride[0], self.causal_transposed_conv
        else:
            return
        previous = torch.zeros(row_count, conv.in_channels, columns, dtype=dtype)
        module.forward = partial(forward, conv, previous)
        self.state.append(previous)

    def extend(self, previous: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The current rows of `previous` joined with `x`. Their new end replaces them, for the next call."""
        joined = torch.cat([previous[self.row_indices], x], dim)
        previous.index_copy_(0, self.row_indices, joined.narrow(dim, x.shape[dim], previous.shape[dim]))
        return joined

    def causal_conv(self, conv: nn.Conv1d, previous: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return conv(self.extend(previous, x))

    def causal_transposed_conv(self, conv: nn.ConvTranspose1d, previous: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = previous.shape[-1] * conv.stride[0]
        count = x.shape[-1] * conv.stride[0]
        return conv(self.extend(previous, x))[..., first : first + count]

    def transformer(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """The decoder's transformer over the new frames (B, T, H) and the window before them."""
        frames = inputs_embeds.shape[1]
        columns = self.window.columns(frames)
        position = self.position[self.row_indices, None]  # (B, 1)
        queries = torch.arange(frames, device=self.device)
        keys = torch.arange(frames - columns, frames, device=self.device)  # relative to the first query
        age = queries[:, None] - keys  # (T, columns)
        visible = (age >= 0) & (age < self.window.length) & (keys + position[..., None] >= 0)  # (B, T, columns)
        mask = additive_mask(visible, inputs_embeds.dtype)[:, None]
        transformer = self.decoder.pre_transformer
        return type(transformer).forward(
            transformer,
            inputs_embeds=inputs_embeds,
            attention_mask={"sliding_attention": mask},
            position_ids=position + queries,
            cache_position=queries,
            past_key_values=self.window,
        )

    def step(self, size: int) -> None:
        """Decode the next `size` frames of the current rows from `codes` to `samples`."""
        batch = len(self.row_indices)
        samples = self.decoder(self.codes[:batch, :, :size])  # (B, 1, samples)
        self.samples[:batch, : samples.shape[-1]] = samples[:, 0]
        self.position.index_add_(0, self.row_indices, torch.full_like(self.row_indices, size))

    def on_own_stream(self):
        """A context in which work waits for what the caller has launched so far, and for nothing later."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)  # does nothing for None

    @torch.no_grad()
    def reset(self, *row_indices: int) -> None:
        positions, others = zip(*(self.row_states[row] for row in row_indices))
        with self.on_own_stream():
            torch._foreach_zero_(positions)
            torch._foreach_zero_([*itertools.chain(*others)])  # one kernel for many tensors of the same dtype

    @torch.no_grad()
    def move(self, source: int, target: int) -> None:
        (position, others), (new_position, new_others) = self.row_states[source], self.row_states[target]
        with self.on_own_stream():
            new_position.copy_(position)
            torch._foreach_copy_(new_others, others)

    def wait(self) -> None:
        if self.stream:
            self.stream.synchronize()

    @torch.no_grad()
    def feed(self, row_indices: list[int], codes: torch.Tensor) -> "PendingAudio":
        """Start decoding the next frames (B, T, 16) of these rows."""
        batch = next(batch for batch in self.batches if batch >= len(row_indices))
        samples = codes.shape[1] * self.samples_per_frame
        count = len(row_indices)
        audio = torch.empty(count, samples, dtype=torch.float32, device="cpu", pin_memory=self.stream is not None)
        index = torch.tensor([*row_indices, *[self.padding_row] * (batch - count)], pin_memory=self.stream is not None)
        with self.on_own_stream():
            codes = codes.to(self.device).transpose(1, 2)
            if self.stream:
                codes.record_stream(self.stream)  # the caller may free the codes before they are read
            self.indices[batch].copy_(index, non_blocking=True)
            first = 0
            for size in CHUNK_SIZES if batch == 1 else BATCH_CHUNK_SIZES:
                while first + size <= codes.shape[2]:
                    self.codes[:count, :, :size] = codes[:, :, first : first + size]
                    self.graphs[batch, size]()
                    begin, end = (frame * self.samples_per_frame for frame in (first, first + size))
                    audio[:, begin:end].copy_(self.samples[:count, : end - begin], non_blocking=True)
                    first += size
            done = self.stream.record_event() if self.stream else None
        return PendingAudio(audio, done)


class PendingAudio:
    """Samples of a batch that are being copied to the host."""

    def __init__(self, audio: torch.Tensor, done: torch.cuda.Event | None):
        self.audio = audio
        self.done = done

    def is_ready(self) -> bool:
        return self.done is None or self.done.query()

    def views(self) -> np.ndarray:
        """Wait for the samples: (B, samples) in the pinned memory of the batch."""
        if self.done:
            self.done.synchronize()
        return self.audio.numpy()

    def wait(self) -> list[np.ndarray]:
        """A copy for each utterance, so that no listener keeps the memory of the whole batch."""
        return [samples.copy() for samples in self.views()]


class AttentionWindow:
    """Stands in for a KV cache: the last keys and values of each layer, in front of the new ones."""

    def __init__(self, codec: Codec, config, row_count: int, dtype: torch.dtype):
        shape = (row_count, config.num_key_value_heads, round_up(config.sliding_window), config.head_dim)
        self.codec = codec
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.length = config.sliding_window

    def update(self, keys, values, layer: int, _) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.columns(keys.shape[2])
        keys = self.codec.extend(self.keys[layer], keys, dim=2)[:, :, -columns:]
        values = self.codec.extend(self.values[layer], values, dim=2)[:, :, -columns:]
        return keys, values

    def columns(self, frames: int) -> int:
        """Keys to attend to for this many new frames, aligned for SDPA."""
        return round_up(self.length - 1 + frames)


def precompute_constants(decoder: nn.Module) -> None:
    """Compute once what upstream's modules, and cuDNN, compute in every call.

    Codebooks divide their sums, activations take the exponential of their parameters, and cuDNN converts the weights of
    convolutions to channels-last.
    """
    for module in decoder.modules():
        if hasattr(module, "embedding_sum"):
            table = module.embedding_sum / module.cluster_usage.clamp(min=module.epsilon)[:, None]
            module.decode = partial(F.embedding, weight=table)
        elif hasattr(module, "no_div_by_zero"):
            alpha = module.alpha.exp()[:, None]  # (C, 1)
            beta = module.beta.exp()[:, None]
            module.forward = partial(snake, alpha, 1.0 / (beta + module.no_div_by_zero))
        elif isinstance(module, nn.Conv1d | nn.ConvTranspose1d) and module.groups == 1 and module.kernel_size[0] > 1:
            weight = module.weight[:, :, None].contiguous(memory_format=torch.channels_last)
            module.forward = partial(channels_last_conv, module, weight)


def channels_last_conv(conv: nn.Conv1d | nn.ConvTranspose1d, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A 1-d convolution as a 2-d one of height 1: only those take channels-last weights."""
    if len(x) * x.shape[-1] > MAX_CHANNELS_LAST_COLUMNS:
        return type(conv).forward(conv, x)
    conv2d = F.conv2d if isinstance(conv, nn.Conv1d) else F.conv_transpose2d
    out = conv2d(x[:, :, None], weight, conv.bias, stride=(1, *conv.stride), dilation=(1, *conv.dilation))
    return out[:, :, 0]


def snake(alpha: torch.Tensor, inverse_beta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + inverse_beta * torch.sin(x * alpha).pow(2)
