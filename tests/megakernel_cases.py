"""GPUs to compile the megakernel for, small models to run it on, and faults: for the tests of the megakernel on a CPU
and on a GPU, and for compute-sanitizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_on_cpu import CpuKernel, changed_source
from torch import Tensor

from cudagraph_talker import Sampling, apply_rules, sample
from qwen3_tts_cuda_graphs.bench.random_checkpoint import CODEC_IDS, PREDICTOR, TALKER, randomize
from qwen3_tts_cuda_graphs.fast import megakernel
from qwen3_tts_cuda_graphs.fast.layers import replace_layers
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Sizes, Stack, TalkerStep, kernel_sizes
from qwen3_tts_cuda_graphs.fast.rows import SharedRows, view_of

# isort: split
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSTalkerConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration

# Before the source: the kernel for compute-sanitizer's racecheck, see megakernel.cu
PLAIN_COPIES = "#define MEGAKERNEL_PLAIN_COPIES\n"

KernelFor = Callable[[Stack], tuple[Sizes, Any]]  # SOURCE.compile of megakernel.py, or one for the CPU

# name: compute capability, multiprocessors, KiB of shared memory per block, MiB of L2
PROFILES = {
    "RTX 3060": (86, 28, 99, 3),
    "RTX 3090": (86, 82, 99, 6),
    "RTX 4060": (89, 24, 99, 24),
    "RTX 4090": (89, 128, 99, 72),
    "L4": (89, 58, 99, 48),
    "A10": (86, 72, 99, 6),
    "A100": (80, 108, 163, 40),
    "Jetson Orin": (87, 16, 163, 4),
    "Jetson Orin Nano": (87, 8, 163, 2),
    "Jetson Thor": (110, 20, 227, 32),
    "DGX Spark": (121, 48, 99, 24),
    "RTX 5070 Ti": (120, 70, 99, 48),
    "RTX 5090": (120, 170, 99, 96),
    "H100 PCIe": (90, 114, 227, 50),
    "H200": (90, 132, 227, 50),
    "H200, a seventh of it": (90, 16, 227, 7),
}
# name: layers, hidden size, vocabulary, heads
STACKS = {"0.6B": (28, 1024, 3072, 1), "1.7B": (28, 2048, 3072, 1), "predictor": (5, 1024, 2048, 15)}


def gpu_of(profile: str = "H200") -> SimpleNamespace:
    """What torch says of a GPU."""
    capability, multiprocessors, shared_kib, l2_mib = PROFILES[profile]
    return SimpleNamespace(
        name=profile,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=shared_kib << 10,
        L2_cache_size=l2_mib << 20,
    )


def stack_without_weights(name: str, rows: int = 1) -> Stack:
    """One of STACKS, as far as its sizes go."""
    layers, hidden, vocab, heads = STACKS[name]
    model = SimpleNamespace(config=config(hidden, 3 * hidden), device=None, layers=[None] * layers)
    return Stack(model, [SimpleNamespace(weight=range(vocab))] * heads, 2048 if heads > 1 else hidden, rows)


def sizes_of(profile: str, stack: str, rows: int = 1) -> Sizes:
    return kernel_sizes(stack_without_weights(stack, rows), gpu_of(profile))


def cpu_kernel_for(folder: Path, source: str | None = None, defines: str = "", **changes: int) -> KernelFor:
    """Compiles for 16 blocks of fibers. `source` is megakernel.cu, if not given. `changes` are to the sizes."""

    def kernel_for(stack: Stack) -> tuple[Sizes, CpuKernel]:
        sizes = replace(kernel_sizes(stack, gpu_of()), **{"grid": 16, **changes})
        return sizes, CpuKernel(defines + SOURCE.complete(sizes, source), sizes, folder)

    return kernel_for


def gpu_kernel_for(source: str | None = None, **changes: int) -> KernelFor:
    """The same for the GPU that the stack is on, with as many blocks as it has."""

    def kernel_for(stack: Stack) -> tuple[Sizes, Any]:
        sizes = replace(kernel_sizes(stack), **changes)
        return sizes, SOURCE.load(sizes, stack.device, source)

    return kernel_for


def compile_with(kernel_for: KernelFor) -> AbstractContextManager:
    """In this context all frames of the megakernel have such kernels."""
    return mock.patch.object(SOURCE, "compile", kernel_for)


def config(hidden: int, inner: int) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
    )


def small_talker(length: int, hidden: int = 1024, **sizes: int) -> Any:
    """Upstream's talker and predictor: a layer each, three codes per frame, random weights, the published widths.
    `sizes`: what both have instead."""
    sizes = dict(num_hidden_layers=1, num_code_groups=3) | sizes
    widths = dict(hidden_size=hidden, intermediate_size=3 * hidden, text_vocab_size=64, text_hidden_size=64)
    talker = TALKER | CODEC_IDS | widths | sizes
    torch.manual_seed(0)
    with torch.no_grad():
        config = Qwen3TTSTalkerConfig(**talker, code_predictor_config=PREDICTOR | sizes)
        model = randomize(Qwen3TTSTalkerForConditionalGeneration(config)).to(torch.bfloat16).eval()
        vary_norms(model)
        model.keepalive = replace_layers(model, length)
    return model


def vary_norms(talker: Any) -> None:
    """Random checkpoints have norms of 1, after which a second rounding changes nothing."""
    for name, weight in talker.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)


def rows_of(talker: Any, length: int, count: int = 1) -> SharedRows:
    return SharedRows(talker.config, count, length, talker.dtype, talker.device)


def some_talker(kernel_for: KernelFor, hidden: int, length: int, layers: int = 2) -> SimpleNamespace:
    """The talker's step of such a model, and its rows."""
    talker = small_talker(length, hidden, num_hidden_layers=layers)
    rows = rows_of(talker, length)
    for tensor in (rows.advance, rows.repetition_penalty):
        tensor.fill_(1)
    rows.embedding.normal_()
    rows.noise.exponential_()
    with compile_with(kernel_for):
        step = TalkerStep(talker, rows)
    return SimpleNamespace(graph=rows, step=step, launch=step)


def reference_choice(scores: Tensor, settings: Sampling, noise: Tensor, row: int = 0) -> Tensor:
    """The choices of `sample` with the settings of one row. (B, V), (B, V) -> (B)"""
    return sample(scores, view_of(settings, [row] * len(scores)), noise)[:, 0]


def talker_scores(logits: Tensor, seen: Tensor, suppressed: Tensor, penalty: float, forbidden: int | None) -> Tensor:
    """The talker's rules. `forbidden` is the end token as long as it would come too early."""
    suppressed = suppressed.clone()
    if forbidden is not None:
        suppressed[..., forbidden] = True
    return apply_rules(logits, seen, penalty, suppressed)


@dataclass(frozen=True)
class Fault:
    """A subtle mistake in megakernel.cu: text that is there once, what it becomes, and who finds it."""

    right: str
    wrong: str
    of_talker: bool  # which of the two stacks to compile it into
    found_by: str  # part of the self-test's reason


FAULTS = {
    "one rounding left out, of the norm": Fault(
        "return multiply(pack(y), weight);",
        "const auto w = unpack(weight);"
        "for (int i = 0; i < sizeof(Vector) / 2; ++i) { y.v[i] *= w.v[i]; }"
        "return pack(y);",
        True,
        "first keys",
    ),
    "one rounding left out, of silu": Fault("round_to_bf16(silu(gate))", "silu(gate)", False, "MLP"),
    "epsilon times ten": Fault("sum / HIDDEN + EPSILON", "sum / HIDDEN + 10 * EPSILON", True, "first keys"),
    "one key too few": Fault(
        "this_position <= position ? product", "this_position < position ? product", True, "attention"
    ),
    "a stale row": Fault(
        "if (cached_position < position) {", "if (cached_position < position - 1) {", True, "attention"
    ),
    "one of few keys left out": Fault(
        "score[g] = position_of(g) < position ?", "score[g] = position_of(g) < position - 1 ?", True, "attention"
    ),
    "the wrong KV head": Fault(
        "layer.values[place * QUADS + lane] =",
        "layer.values[(place ^ arguments.cache_length) * QUADS + lane] =",
        False,
        "first values",
    ),
    "RoPE of another position": Fault(
        "arguments.sin[position * QUADS + lane]", "arguments.sin[position / 2 * QUADS + lane]", True, "first keys"
    ),
    "one split is not merged": Fault(
        "const float weight = expf(log_sum - best);",
        "const float weight = split == 1 ? 0 : expf(log_sum - best);",
        True,
        "attention",
    ),
    "a middle layer without its MLP": Fault(
        "token, row, activated * up, epoch);",
        "token, row, layer == arguments.layers + LAYERS / 2 ? 0 : activated * up, epoch);",
        False,
        "logits of the codes",
    ),
    "the last layer adds nothing to the second token": Fault(
        "residual = round_to_bf16(residual + sum);",
        "residual = round_to_bf16(residual + (epoch % LAYERS || threadIdx.x < MAX_ROWS<HIDDEN> ? sum : 0));",
        False,
        "logits of the first predicted code",
    ),
    "top-k off by one": Fault("> sampling.topk_rank", ">= sampling.topk_rank", False, "of the codes"),
    "top-p left out": Fault(
        "if (sampling.one_minus_top_p > 0) {", "if (sampling.one_minus_top_p > 1) {", False, "of the codes"
    ),
    "penalty on the wrong sign": Fault(
        "score = score < 0 ? score", "score = score > 0 ? score", True, "of the first codes"
    ),
    "text one row late": Fault(
        "low_half(arguments.text[place])",
        "low_half(arguments.text[place - (frame > 0) * TALKER_HIDDEN])",
        False,
        "the text is wrong",
    ),
}


def faulty_source(name: str) -> str:
    """megakernel.cu with one of the faults."""
    return changed_source(megakernel, (FAULTS[name].right, FAULTS[name].wrong))
