"""The kernels of the codec's decoder, compiled for and run on a CPU, compute what upstream's modules compute: each
kernel alone what fast/codec_kernels_reference.py says, all of them the decoder's audio. A kernel with a subtle fault is
detected."""

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gpu_on_cpu
import pytest
import torch
import torch.nn.functional as F
from gpu_on_cpu import (
    CpuKernels,
    assert_compiles_without_spills,
    assert_nearly_same,
    faults_of,
    needs_compiler,
    pretended_gpu,
)
from helpers import ExactProducts, on_gpu
from megakernel_cases import gpu_of
from torch import Tensor

from qwen3_tts_cuda_graphs.bench.random_checkpoint import (
    Qwen3TTSTokenizerV2Config,
    Qwen3TTSTokenizerV2Model,
    codec_config,
    randomize,
    soften,
)
from qwen3_tts_cuda_graphs.fast import codec as codec_module
from qwen3_tts_cuda_graphs.fast import codec_decoder, codec_kernels, kernel_cache, nvrtc
from qwen3_tts_cuda_graphs.fast import codec_kernels_reference as reference
from qwen3_tts_cuda_graphs.fast import layer_kernels_reference as layer_reference
from qwen3_tts_cuda_graphs.fast.codec import Codec
from qwen3_tts_cuda_graphs.fast.codec_kernels import SOURCE, CodecKernels, PendingSum, Snake, kernel_sizes

EPSILON = 1e-6
SMALL_DECODER = dict(latent_dim=256, hidden_size=256, head_dim=64, decoder_dim=128, upsample_rates=(4, 3, 2, 2))
SMALL_DECODER |= dict(num_quantizers=16)
ROW_INDICES = torch.tensor([3, 0, 1])
PUBLISHED = SimpleNamespace(
    codebook=2048,
    code_dim=256,
    hidden=512,
    inner=1024,
    epsilon="1e-5f",
    heads=16,
    window=72,
    ring=80,
    latent=1024,
    latent_epsilon="1e-6f",
    last=96,
    max_frames=codec_kernels.MAX_FRAMES,
    threads=codec_kernels.THREADS,
)


class Tokenizer:
    """A codec with random weights, among them those that upstream initializes to constants."""

    def __init__(self, size: str, dtype: torch.dtype, device: Any = "cpu", **decoder: Any):
        config = codec_config(size)
        config["decoder_config"] |= decoder
        torch.manual_seed(0)
        with torch.device(device), torch.no_grad():
            self.model = randomize(Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**config)), 0.7)
            for name, weight in self.model.decoder.named_parameters():
                if name.endswith(("alpha", "beta")):
                    weight.normal_(std=0.3)
                elif name.endswith(("gamma", "layer_scale.scale")):
                    weight.normal_(std=0.5)
                elif "layernorm" in name:
                    weight.normal_(mean=1, std=0.3)
                elif name.startswith(("decoder", "upsample")) and name.endswith("bias"):
                    weight.normal_(std=0.1)
            soften(self.model.decoder)
        self.samples_per_frame = int(self.model.decoder.total_upsample)
        self.model.to(dtype).eval().requires_grad_(False)

    def get_decode_upsample_rate(self) -> int:
        return self.samples_per_frame


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("tiny", torch.bfloat16, **SMALL_DECODER)


@pytest.fixture(scope="module")
def compiled(tokenizer, tmp_path_factory) -> CpuKernels:
    return compile_for_cpu(tokenizer, tmp_path_factory.mktemp("codec"))


def compile_for_cpu(tokenizer: Tokenizer, folder: Any, source: str | None = None) -> CpuKernels:
    sizes = kernel_sizes(tokenizer.model.decoder)
    return CpuKernels(SOURCE.complete(sizes, source), folder, codec_kernels.KERNELS)


def make_kernels(tokenizer: Tokenizer, compiled: CpuKernels | None) -> CodecKernels:
    decoder = tokenizer.model.decoder
    row_indices = ROW_INDICES.to(decoder.device)
    return CodecKernels(decoder, lambda: row_indices, compiled)


# ---- Each kernel. The checks are functions of the kernels, for wrong kernels to fail them.


def random_bf16(kernels: CodecKernels, *shape: int) -> Tensor:
    return torch.randn(shape, device=kernels.get_row_indices().device, dtype=torch.bfloat16)


def check_embed_codes(kernels: CodecKernels) -> None:
    sizes = kernels.sizes
    tables = random_bf16(kernels, 5, sizes.codebook, sizes.code_dim)
    codes = torch.randint(sizes.codebook, (3, 5, 7), device=tables.device)
    for semantic in (1, 2):
        for ours, expected in zip(
            kernels.embed_codes(codes, tables, semantic), reference.embed_codes(codes, tables, semantic)
        ):
            assert torch.equal(ours, expected)
    beyond = torch.full_like(codes, -1)
    beyond[:, ::2] = sizes.codebook + 100
    last = torch.full_like(codes, sizes.codebook - 1)
    for ours, expected in zip(kernels.embed_codes(beyond, tables, 1), reference.embed_codes(last, tables, 1)):
        assert torch.equal(ours, expected)


def check_add_and_norm(kernels: CodecKernels) -> None:
    hidden = kernels.sizes.hidden
    epsilon = float(kernels.sizes.epsilon[:-1])
    random = functools.partial(random_bf16, kernels)
    for size in (1, 3e-3):  # epsilon counts for the small one
        x, residual = (random(3, 5, hidden) * size for _ in range(2))
        scale, weight = random(hidden), random(hidden)
        total, normalized = kernels.add_and_norm(x, residual, weight, scale)
        expected_total, expected = layer_reference.add_and_norm(x, residual, weight, epsilon, scale)
        assert torch.equal(total, expected_total)
        assert_nearly_same(normalized, expected)
        assert_nearly_same(kernels.norm(x, weight), layer_reference.norm(x, weight, epsilon))


def check_silu_and_multiply(kernels: CodecKernels) -> None:
    for rows, frames in ((1, 1), (3, 5)):
        gate_up = random_bf16(kernels, rows, frames, 2 * kernels.sizes.inner) * 4
        assert_nearly_same(kernels.silu_and_multiply(gate_up), layer_reference.silu_and_multiply(gate_up))


def check_window_attention(kernels: CodecKernels) -> None:
    """Chunks that fill the window, begin in the middle of the ring, and are as long as can be."""
    sizes = kernels.sizes
    random = functools.partial(random_bf16, kernels)
    row_indices = kernels.get_row_indices()
    positions = torch.tensor([5, 1000, 99, 0], device=row_indices.device)  # rows 3, 0 and 1 are in use
    for frames in (1, 2, 8, 64):
        keys, values = (random(4, sizes.heads, sizes.ring, 64) for _ in range(2))
        for row, position in enumerate(positions.tolist()):  # never written yet
            keys[row, :, position:] = torch.nan
            values[row, :, position:] = torch.nan
        expected_keys, expected_values = keys.clone(), values.clone()
        qkv = random(3, frames, 3, sizes.heads, 64)
        angles = torch.randn(3, frames, 64, device=row_indices.device) * 3
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        expected = reference.window_attention(
            qkv, cos, sin, positions, row_indices, expected_keys, expected_values, sizes.window
        )
        ours = kernels.window_attention(qkv.flatten(2), cos, sin, positions, keys, values)
        difference = (ours.float() - expected.flatten(2).float()).abs()
        assert (difference <= 2**-7 * expected.flatten(2).float().abs() + 1e-5).all()
        assert (difference > 0).float().mean() < 0.02
        for cache, expected_cache in ((keys, expected_keys), (values, expected_values)):
            assert torch.equal(cache.nan_to_num(7), expected_cache.nan_to_num(7))
        positions += frames


def check_activate(kernels: CodecKernels, channels: int = 64, exact: bool = False) -> None:
    """Every combination of what may be left out; chunks longer and shorter than the stored columns."""
    same = functools.partial(torch.testing.assert_close, rtol=0, atol=0) if exact else assert_nearly_same
    row_indices = kernels.get_row_indices()
    device = row_indices.device
    random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    for columns, stored, has_terms, has_snake in itertools.product((70, 5, 1), (0, 1, 6, 54), (0, 1, 3), (False, True)):
        x = random(3, columns, channels)
        bias = random(channels) if has_terms > 0 else None
        scale = random(channels) if has_terms > 2 else None
        residual = random(3, columns, channels) if has_terms > 0 else None
        snake = SimpleNamespace(alpha=random(channels) * 3, inverse_beta=random(channels)) if has_snake else None
        state = random(4, stored, channels) if stored else None
        expected_state = state.clone() if stored else None
        expected, expected_sum = reference.activate(
            x,
            bias,
            scale,
            residual,
            snake and snake.alpha,
            snake and snake.inverse_beta,
            expected_state,
            row_indices,
        )
        pending = PendingSum(x, bias, scale, residual)
        output, total = kernels.activate(pending, snake, state, keep_sum=True)
        torch.testing.assert_close(total, expected_sum, rtol=0, atol=0)
        same(output, expected)
        if stored:
            same(state, expected_state)


def check_snake(kernels: CodecKernels) -> None:
    """The sine of every bfloat16."""
    angles = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    angles = angles[angles.isfinite()].view(1, -1, 8).to(kernels.get_row_indices().device)
    one = torch.ones(8, dtype=torch.bfloat16, device=angles.device)
    factor = 2.0**20 * one  # so that the sine counts in the sum
    output, _ = kernels.activate(PendingSum(angles), SimpleNamespace(alpha=one, inverse_beta=factor))
    assert torch.equal(output, reference.snake(angles, one, factor))


def interleave(x: Tensor, sequences: int) -> Tensor:
    """(B, L, C) -> (B, D, ceil(L / D), C): sequence r has the columns r, r + D, r + 2 D, ..., the last may be zeros."""
    missing = -x.shape[1] % sequences
    return F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, sequences)).transpose(1, 2)


def check_interleaved(kernels: CodecKernels, channels: int = 64) -> None:
    """In one order, out in another: lengths that the dilations divide and others."""
    row_indices = kernels.get_row_indices()
    random = functools.partial(torch.randn, device=row_indices.device, dtype=torch.bfloat16)
    for columns, (x_sequences, dilation) in itertools.product((256, 20, 9, 1), ((1, 3), (3, 9), (9, 1))):
        x = random(3, columns, channels)
        bias, residual, state = random(channels), random(3, columns, channels), random(4, 6 * dilation, channels)
        expected_state = state.clone()
        expected, expected_sum = reference.activate(x, bias, None, residual, None, None, expected_state, row_indices)
        interleaved = interleave(x, x_sequences) if x_sequences > 1 else x
        pending = PendingSum(interleaved.contiguous(), bias, residual=residual)
        output, total = kernels.activate(pending, None, state, keep_sum=True, dilation=dilation)
        if dilation > 1:
            output = output.transpose(1, 2).flatten(1, 2)[:, : expected.shape[1]]
        assert torch.equal(output, expected)
        assert torch.equal(total, expected_sum)
        assert torch.equal(state, expected_state)


def check_depthwise_norm(kernels: CodecKernels, columns: int = 5) -> None:
    latent = kernels.sizes.latent
    device = kernels.get_row_indices().device
    random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    norm = SimpleNamespace(weight=random(latent), bias=random(latent))
    for scale in (1, 1e-3):  # epsilon counts for the small one
        x = random(3, 6 + columns, latent) * scale + scale
        weight, bias = random(7, latent), random(latent) * scale
        expected = reference.depthwise_norm(x, weight, bias, norm.weight, norm.bias, EPSILON)
        ours = kernels.depthwise_norm(x, weight, bias, norm)
        # Where the norm's two terms nearly cancel, the result is as exact as they are.
        terms = (expected - norm.bias).float().abs() + norm.bias.float().abs()
        difference = (ours.float() - expected.float()).abs()
        assert (difference <= 2**-6 * terms).all()
        assert (difference > 2**-8 * expected.float().abs()).float().mean() < 0.01


def check_to_samples(kernels: CodecKernels) -> None:
    last = kernels.sizes.last
    random = functools.partial(torch.randn, device=kernels.get_row_indices().device, dtype=torch.bfloat16)
    for columns in (1, 127, 128, 300):
        x, weight, bias = random(3, 6 + columns, last), random(7, last), random(1)
        expected = reference.to_samples(x, weight, bias)
        difference = (kernels.to_samples(x, weight, bias).float() - expected.float()).abs()
        assert (difference <= 2**-6 * (expected.float().abs() + bias.float().abs())).all()
        assert (difference > 0).float().mean() < 0.02


CHECKS = [
    check_embed_codes,
    check_add_and_norm,
    check_silu_and_multiply,
    check_window_attention,
    check_activate,
    check_snake,
    check_interleaved,
    check_depthwise_norm,
    check_to_samples,
]


@needs_compiler
@pytest.mark.parametrize("check", CHECKS, ids=lambda it: it.__name__)
def test_each_kernel_computes_what_the_reference_says(check, tokenizer, compiled):
    check(make_kernels(tokenizer, compiled))


@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("shape", "taps"), [((3, 20, 16), 7), ((3, 9, 11, 16), 7), ((2, 10, 16), 2), ((1, 3, 16), 3), ((2, 5, 16), 1)]
)
def test_products_are_a_convolution(shape, taps, most_bytes):
    """But for the last columns of each sequence. What is behind the last sequence does not count."""
    columns = torch.Size(shape[:-1]).numel()
    memory = torch.randn(columns + codec_kernels.SPARE_COLUMNS, shape[-1], dtype=torch.double)
    memory[columns:] = torch.nan
    x = memory[:columns].view(shape)
    weight = torch.randn(24, taps, shape[-1], dtype=torch.double)
    image = x.view(len(x), -1, *shape[-2:]).permute(0, 3, 1, 2)  # a sequence is a line
    expected = F.conv2d(image, weight.transpose(1, 2)[:, :, None]).permute(0, 2, 3, 1)
    with mock.patch.object(codec_decoder, "MAX_PRODUCT_BYTES", most_bytes):
        ours = codec_decoder.convolve(x, weight)[..., : shape[-2] - taps + 1, :]
    torch.testing.assert_close(ours, expected.reshape(ours.shape))


def test_constants_have_upstreams_roundings(tokenizer):
    """The reference's SnakeBeta is upstream's module, bit by bit."""
    module = tokenizer.model.decoder.decoder[1].block[0]
    snake = Snake(module)
    x = torch.randn(2, 30, module.in_features).bfloat16()
    expected = module(x.transpose(1, 2)).transpose(1, 2)
    assert torch.equal(reference.snake(x, snake.alpha, snake.inverse_beta), expected)


FAULTS: dict[Callable, dict[str, tuple[str, str]]] = {
    check_embed_codes: {
        "the semantic sum goes on": ("book == 0 || book == arguments.semantic_codebooks", "book == 0"),
    },
    check_add_and_norm: {
        "the norm of another epsilon": ("/ HIDDEN + EPSILON", "/ HIDDEN + 10 * EPSILON"),
        "no layer scale": (
            "if (arguments.scale) {\n        sum = multiply(sum, arguments.scale[threadIdx.x]",
            "if (false) {\n        sum = multiply(sum, arguments.scale[threadIdx.x]",
        ),
    },
    check_window_attention: {
        "a window that is one frame too long": ("first = max(end - WINDOW, 0)", "first = max(end - WINDOW - 1, 0)"),
        "a ring that is one frame too short": ("(position + frame) % RING", "(position + frame) % (RING - 1)"),
        "RoPE turned the other way": (
            "i < half ? -low_half(head[i + half]) : low_half(head[i - half])",
            "i < half ? low_half(head[i + half]) : -low_half(head[i - half])",
        ),
        "scores of another scale": ("rsqrtf(HEAD_DIM)", "rsqrtf(HEAD_DIM + 1)"),
    },
    check_silu_and_multiply: {
        "a silu that is half a step too large": ("value = silu(value);", "value = 1.004f * silu(value);"),
    },
    check_activate: {
        "a sine of another angle": ("return short_sine(angle.v[i])", "return short_sine(angle.v[i] * 1.004f)"),
        "an unrounded sine": (
            "multiply(sine, sine)",
            "rounded([&](int i) { return short_sine(angle.v[i]) * short_sine(angle.v[i]); })",
        ),
        "a scale that is added": ("x = multiply(x, arguments.scale[channel])", "x = add(x, arguments.scale[channel])"),
        "the state of another row": ("arguments.row_indices[chunk] *", "chunk *"),
        "the state of a short chunk": ("? state[next_column *", "? state[column *"),
        "the new state in front": ("output(column, channel) = before", "output(column, channel) = next"),
        "another channel": ("channel = vector % vectors", "channel = 0"),
    },
    check_snake: {
        "a sine with half of pi's digits": ("fmaf(turns, 8.74227766e-8f, high)", "high"),
        "short sines of large angles": ("MAX_SHORT_ANGLE = 65536", "MAX_SHORT_ANGLE = 1e9"),
    },
    check_interleaved: {
        "columns in the wrong sequence": (
            "column % sequences) * length + column / sequences",
            "column / length) * length + column % length",
        ),
    },
    check_depthwise_norm: {
        "one tap less": (
            "for (int tap = 0; tap < TAPS; ++tap) {\n        const Eight x",
            "for (int tap = 1; tap < TAPS; ++tap) {\n        const Eight x",
        ),
        "no epsilon": ("/ LATENT + LATENT_EPSILON", "/ LATENT"),
        "the mean forgotten": ("return (x.v[i] - mean) * factor", "return x.v[i] * factor"),
    },
    check_to_samples: {
        "half of the channels": ("sum += __shfl_xor_sync(~0u, sum, 1)", "sum += sum"),
        "no bias": ("round_to_bf16(sum) + low_half(arguments.bias[0])", "round_to_bf16(sum)"),
    },
}


INDEPENDENT = [
    (check_embed_codes,),
    (check_add_and_norm,),
    (check_silu_and_multiply,),
    (check_window_attention,),
    (check_activate, check_snake, check_interleaved),
    (check_depthwise_norm,),
    (check_to_samples,),
]


@pytest.fixture(scope="module")
def wrong_kernels(tokenizer, tmp_path_factory) -> Callable[[str], CpuKernels]:
    folder = tmp_path_factory.mktemp("wrong")
    compile = functools.partial(compile_for_cpu, tokenizer, folder)
    return gpu_on_cpu.wrong_kernels(codec_kernels, FAULTS, INDEPENDENT, compile)


@needs_compiler
@pytest.mark.parametrize("check, fault", faults_of(FAULTS))
def test_wrong_kernel_is_detected(check, fault, tokenizer, wrong_kernels):
    kernels = make_kernels(tokenizer, wrong_kernels(fault))
    with pytest.raises(AssertionError):
        check(kernels)


# ---- The whole decoder


@pytest.fixture
def usable_kernels(compiled) -> Iterator[None]:
    """Codecs decode with the kernels, on fibers."""
    with mock.patch.multiple(SOURCE, why_not=lambda _: "", compile=lambda decoder: (kernel_sizes(decoder), compiled)):
        yield


def error_of(audio: Tensor, exact: Tensor) -> float:
    return (audio - exact).square().mean().sqrt().item()


@torch.no_grad()
def one_pass(tokenizer: Tokenizer, codes: Tensor) -> Tensor:
    """Upstream's decoder: (B, T, 16) -> (B, samples)"""
    return tokenizer.model.decoder(codes.transpose(1, 2))[:, 0].float()


def decode_in_chunks(codec: Codec, row_indices: list[int], codes: Tensor, sizes: list[int]) -> Tensor:
    chunks = []
    first = 0
    for size in sizes:
        audio = codec.feed(row_indices, codes[:, first : first + size]).wait()
        chunks.append(torch.stack([torch.from_numpy(samples) for samples in audio]))
        first += size
    assert first == codes.shape[1]
    return torch.cat(chunks, dim=1)


@needs_compiler
def test_audio_is_as_near_to_float32_as_that_of_upstreams_modules(tokenizer, usable_kernels):
    """All of it on a CPU: chunks of any rows, in chunks of any size, and a single stream.

    With exact products, the ratio of the two errors is 1.00 with a standard deviation of 0.006 over weights and codes:
    the limit is eight of them. A stream that is alone is then its row of the batch bit by bit. A bias that is wrong by
    5% is detected.
    """
    codes = torch.randint(2048, (3, 15, 16))
    exact = one_pass(Tokenizer("tiny", torch.float32, **SMALL_DECODER), codes)
    with ExactProducts(), mock.patch.object(codec_module, "CHUNK_SIZES", (8, 4, 2, 1)):
        codec = Codec(tokenizer, 4)
        ours = decode_in_chunks(codec, [2, 0, 3], codes, [1, 2, 4, 8])
        limit = 1.05 * error_of(one_pass(tokenizer, codes), exact)
        alone = Codec(tokenizer, 1)
        assert error_of(ours, exact) < limit
        assert exact.std() > 10 * limit
        for _ in range(2):  # what the first left behind must be gone
            alone.reset(0)
            assert torch.equal(torch.from_numpy(alone.feed([0], codes[1:2]).wait()[0]), ours[1])

        unit = codec.decoder.blocks[1].units[0]
        unit.bias2 = 1.05 * unit.bias2
        for row in (2, 0, 3):
            codec.reset(row)
        assert error_of(decode_in_chunks(codec, [2, 0, 3], codes, [1, 2, 4, 8]), exact) > limit


@needs_compiler
def test_weights_are_shared_with_upstreams_modules(usable_kernels):
    """A copy of the weights for each codec that is made takes 100 MiB of a GPU. Upstream's decoder must still work."""
    tokenizer = Tokenizer("tiny", torch.bfloat16, **SMALL_DECODER)
    model = tokenizer.model.decoder
    codes = torch.randint(2048, (1, 5, 16))
    with ExactProducts():
        audio = one_pass(tokenizer, codes)

    first, second = (Codec(tokenizer, 1).decoder for _ in range(2))
    for layer, same, original in zip(first.transformer.layers, second.transformer.layers, model.pre_transformer.layers):
        attn, mlp = original.self_attn, original.mlp
        assert layer.qkv.data_ptr() == same.qkv.data_ptr() == attn.q_proj.weight.data_ptr()
        assert layer.gate_up.data_ptr() == same.gate_up.data_ptr() == mlp.gate_proj.weight.data_ptr()
        assert torch.equal(layer.qkv, torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]))
    for conv, same, original in (
        (first.pre_conv, second.pre_conv, model.pre_conv),
        (first.first, second.first, model.decoder[0]),
        (first.blocks[0].units[1].conv1, second.blocks[0].units[1].conv1, model.decoder[1].block[3].conv1),
    ):
        assert conv.weight.data_ptr() == same.weight.data_ptr() == original.conv.weight.data_ptr()
        assert torch.equal(conv.weight.transpose(1, 2), original.conv.weight)
    with ExactProducts():
        assert torch.equal(one_pass(tokenizer, codes), audio)


# ---- What is refused


def test_unsupported_codecs_are_refused_in_words(tokenizer):
    decoder = tokenizer.model.decoder
    assert SOURCE.unmet(decoder) == ""
    assert "NVIDIA GPU" in SOURCE.why_not(decoder)
    assert "bfloat16" in SOURCE.unmet(Tokenizer("tiny", torch.float32, **SMALL_DECODER).model.decoder)
    for changes, message in (
        (dict(latent_dim=64), "multiple of 256 up to 8192, not 64"),
        (dict(decoder_dim=48), "the last convolution has 3"),
        (dict(hidden_size=64), "hidden size that is a multiple of 256 up to 8192, not 64"),
        (dict(head_dim=32), "heads of 64 dimensions, the codec's have 32"),
        (dict(num_key_value_heads=1), "as many KV heads"),
        (dict(sliding_window=100), "at most 96 frames, not 100"),
        (dict(hidden_act="gelu"), "silu between gate and down, not gelu"),
        (dict(intermediate_size=100), "multiple of 8, not 100"),
    ):
        changed = Tokenizer("tiny", torch.bfloat16, **SMALL_DECODER | changes)
        assert message in SOURCE.unmet(changed.model.decoder)
    with mock.patch.object(codec_kernels, "SPARE_COLUMNS", 5):
        assert "convolutions of at most 6 columns" in SOURCE.unmet(decoder)


def test_compilation(tokenizer):
    """A machine without NVRTC decodes with upstream's modules. What was compiled ahead is not compiled again, and
    nothing is compiled for a codec that the kernels cannot run."""
    parts = {name: getattr(tokenizer.model.decoder, name) for name in ("config", "quantizer", "upsample", "decoder")}
    decoder = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, **parts)
    with pretended_gpu(gpu_of("H200")), mock.patch.object(nvrtc, "load_nvrtc", side_effect=OSError("no NVRTC")):
        SOURCE.compile_ahead(decoder)  # no error yet
        assert SOURCE.why_not(decoder) == "the kernels cannot be compiled: no NVRTC"

    compile_source = mock.Mock(return_value=b"code")
    with pretended_gpu(gpu_of("H200"), compile_source):
        SOURCE.compile_ahead(decoder)
        assert SOURCE.why_not(decoder) == "" and compile_source.call_count == 1
    decoder.dtype = torch.float32
    with pretended_gpu(gpu_of("H200")):
        SOURCE.compile_ahead(decoder)
        assert not kernel_cache.started


# ---- Compilation for GPUs


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_the_kernels_compile(architecture, tmp_path):
    source = SOURCE.complete(PUBLISHED)
    assert_compiles_without_spills(source, len(codec_kernels.KERNELS), architecture, tmp_path)


# ---- On a GPU, with the published shapes


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    return Tokenizer("0.6B", torch.bfloat16, "cuda")


@on_gpu
@torch.no_grad()
def test_kernels_compute_the_same_on_a_gpu(published):
    assert SOURCE.why_not(published.model.decoder) == ""
    kernels = make_kernels(published, None)
    for check in CHECKS:
        check(kernels)
    for channels in (96, 192, 384, 768, 1024, 1536):
        check_activate(kernels, channels, exact=True)
        check_interleaved(kernels, channels)
    check_depthwise_norm(kernels, 64)


@on_gpu
@torch.no_grad()
def test_activations_are_upstreams_bit_by_bit(published):
    """Every SnakeBeta of the decoder, for large and small angles."""
    kernels = make_kernels(published, None)
    modules = [module for module in published.model.decoder.modules() if hasattr(module, "no_div_by_zero")]
    assert len(modules) == 29
    for module in modules:
        for scale in (0.01, 1, 100, 1e5):
            x = (torch.randn(2, 500, module.in_features, device="cuda") * scale).bfloat16()
            ours, _ = kernels.activate(PendingSum(x), Snake(module))
            expected = module(x.transpose(1, 2)).transpose(1, 2)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_audio_on_a_gpu_is_as_near_to_float32(rows, published):
    """In chunks of several sizes, against upstream's modules in the same chunks; and chunks joined are the whole."""
    codes = torch.randint(2048, (rows, 15, 16), device="cuda")
    row_indices = list(reversed(range(rows)))
    exact = one_pass(Tokenizer("0.6B", torch.float32, "cuda"), codes).cpu()
    ours = {}
    codec = Codec(published, rows)
    for sizes in ([1, 2, 4, 8], [8, 4, 2, 1], [1] * 15):
        for row in row_indices:
            codec.reset(row)
        ours[len(sizes), sizes[0]] = decode_in_chunks(codec, row_indices, codes, sizes)
    with mock.patch.object(SOURCE, "why_not", lambda decoder: "not in this test"):
        modules = decode_in_chunks(Codec(published, rows), row_indices, codes, [1, 2, 4, 8])
    limit = 1.05 * error_of(modules, exact)
    errors = [error_of(audio, exact) for audio in ours.values()]
    print(f"{rows} rows: error of upstream's modules {limit / 1.05:.6f}, ours {errors}")
    for audio in ours.values():
        assert error_of(audio, exact) <= limit
    assert exact.std() > 10 * limit
