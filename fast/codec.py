"""The codec's decoder as CUDA graphs: codes go in, a few frames at a time, and their samples come out.

The 12 Hz decoder is causal, so it can go on where it stopped: each convolution keeps the tail of its input, each
attention layer the keys and values of its window. That state lives in static tensors, shared by the graphs of all chunk
sizes, and `reset` clears it between utterances. Chunks of any sizes joined are the whole. It all runs on a CUDA stream
of its own, beside the talker's.
"""
import copy
from functools import partial

import torch
from torch import nn

from cudagraph_talker import additive_mask, aligned, capture
from fewer_kernels import use_constants

SIZES = (64, 32, 16, 8, 4, 2, 1)                                  # frames in a chunk; others are made of these


def extend(tail, x, dim=-1):
    """`x` with the end of what came before it in front; its own end replaces that."""
    joined = torch.cat([tail, x], dim)
    tail.copy_(joined.narrow(dim, x.shape[dim], tail.shape[dim]))
    return joined


def causal_conv(conv, tail, x):
    return conv(extend(tail, x))


def transposed_conv(conv, tail, x):
    before, new = (columns.shape[-1] * conv.stride[0] for columns in (tail, x))        # samples
    return conv(extend(tail, x))[..., before:before + new]


class Window:
    """Stands in for a cache: the last keys and values of each layer, in front of the new ones."""

    def __init__(self, config, dtype):
        shape = (1, config.num_key_value_heads, aligned(config.sliding_window), config.head_dim)
        self.tails = [[torch.zeros(shape, dtype=dtype) for _ in "kv"] for _ in range(config.num_hidden_layers)]
        self.length = config.sliding_window

    def update(self, keys, values, layer, _):
        columns = self.columns(keys.shape[2])
        return [extend(tail, new, 2)[:, :, -columns:] for tail, new in zip(self.tails[layer], (keys, values))]

    def columns(self, frames):
        return aligned(self.length - 1 + frames)


class CodecGraph:
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, tokenizer, turns):
        """`tokenizer` is upstream's. `decode` waits for its turn, `reset` and `feed` are for whoever has it."""
        model, self.tokenizer, self.turns = tokenizer.model.decoder, tokenizer, turns
        self.device, config = model.device, model.config
        self.samples_a_frame = tokenizer.get_decode_upsample_rate()
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # Modules of our own around upstream's weights: its own decoder stays as it is.
        self.decoder = copy.deepcopy(model, {id(w): w for w in (*model.parameters(), *model.buffers())})
        with self.device:
            self.codes = torch.zeros(1, config.num_quantizers, max(SIZES), dtype=torch.long)
            self.samples = torch.zeros(max(SIZES) * self.samples_a_frame, dtype=torch.float32)
            self.position = torch.zeros(1, dtype=torch.long)
            self.window = Window(config, model.dtype)
            self.state = [tail for tails in self.window.tails for tail in tails]
            for module in self.decoder.modules():
                self.carry_state(module, model.dtype)
        use_constants(self.decoder)
        self.decoder.pre_transformer.forward = self.transformer
        pool = torch.cuda.graph_pool_handle() if self.stream else None
        self.graphs = {size: capture(partial(self.step, size), self.device, pool) for size in SIZES}

    def carry_state(self, module, dtype):
        conv = getattr(module, "conv", None)
        if isinstance(conv, (nn.Conv1d, nn.ConvTranspose1d)):
            transposed = isinstance(conv, nn.ConvTranspose1d)
            columns = module.right_pad // conv.stride[0] if transposed else module.padding
            tail = torch.zeros(1, conv.in_channels, columns, dtype=dtype)
            module.forward = partial(transposed_conv if transposed else causal_conv, conv, tail)
            self.state.append(tail)

    def transformer(self, inputs_embeds):
        frames, columns = inputs_embeds.shape[1], self.window.columns(inputs_embeds.shape[1])
        queries = torch.arange(frames, device=self.device)
        keys = torch.arange(frames - columns, frames, device=self.device)              # counted from the first query
        age = queries[:, None] - keys                                                  # (frames, columns)
        visible = (age >= 0) & (age < self.window.length) & (keys + self.position >= 0)
        mask = additive_mask(visible, inputs_embeds.dtype)[None, None]
        positions = self.position + queries
        return type(self.decoder.pre_transformer).forward(
            self.decoder.pre_transformer, inputs_embeds=inputs_embeds, attention_mask={"sliding_attention": mask},
            position_ids=positions[None], cache_position=positions, past_key_values=self.window)

    def step(self, size):
        """The next `size` frames."""
        samples = self.decoder(self.codes[..., :size])                                 # (1, 1, T)
        self.samples[:samples.shape[-1]] = samples[0, 0]
        self.position += size

    def on_own_stream(self):
        """Work under this waits for what the caller has started, and for nothing that comes after."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)                     # of None: nothing

    @torch.no_grad()
    def reset(self):
        with self.on_own_stream():
            self.position.zero_()
            torch._foreach_zero_(self.state)

    @torch.no_grad()
    def feed(self, codes):
        """Starts to decode the next frames (T, 16). Returns a function that waits for their samples: numpy, float32."""
        audio = torch.empty(len(codes) * self.samples_a_frame, dtype=torch.float32, device="cpu",
                            pin_memory=self.stream is not None)
        with self.on_own_stream():
            rest, filled = codes.to(self.device).T, 0
            if self.stream:
                rest.record_stream(self.stream)                   # the caller may let go of them before they are read
            for size in SIZES:
                while rest.shape[1] >= size:
                    self.codes[0, :, :size] = rest[:, :size]
                    self.graphs[size]()
                    samples = self.samples[:size * self.samples_a_frame]
                    audio[filled:filled + len(samples)].copy_(samples, non_blocking=True)
                    rest, filled = rest[:, size:], filled + len(samples)
            done = self.stream.record_event() if self.stream else None

        def wait():
            if done:
                done.synchronize()
            return audio.numpy()
        return wait

    def decode(self, encoded):
        """Stands in for the speech tokenizer's decode: one utterance after another, each whole."""
        codes = encoded.audio_codes if hasattr(encoded, "audio_codes") else encoded
        codes = codes["audio_codes"] if isinstance(codes, dict) else codes
        waits = []
        with self.turns.take():
            for utterance in [codes] if torch.is_tensor(codes) and codes.dim() == 2 else codes:
                utterance = torch.as_tensor(utterance["audio_codes"] if isinstance(utterance, dict) else utterance)
                self.reset()
                waits.append(self.feed(utterance[utterance[:, 0] >= 0]))               # -1 pads a batch
            return [wait() for wait in waits], self.tokenizer.get_output_sample_rate()
