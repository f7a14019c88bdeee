"""fast/self_test.py accepts the megakernel and refuses wrong ones: on a CPU with a small model, on a GPU with the
published sizes. Each fault is a change of the source, made here."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_on_cpu import changed_source, needs_compiler
from helpers import on_gpu, slow
from megakernel_cases import (
    FAULTS,
    KernelFor,
    compile_with,
    cpu_kernel_for,
    faulty_source,
    gpu_kernel_for,
    rows_of,
    small_talker,
    vary_norms,
)

from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.fast import kernel_cache, megakernel, nvrtc, self_test
from qwen3_tts_cuda_graphs.fast.frame_graphs import MegakernelGraphs, PlainGraphs
from qwen3_tts_cuda_graphs.fast.layers import replace_layers
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Stack, kernel_sizes, stacks_of
from qwen3_tts_cuda_graphs.fast.rows import SharedRows
from qwen3_tts_cuda_graphs.speech import accelerate

LENGTH = 48
PROMPT = 44


@pytest.fixture(scope="module")
def talker() -> Any:
    """As small as the megakernel can."""
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    return small_talker(LENGTH, intermediate_size=1024, vocab_size=1024, **heads)


def with_fault(fault: str | None, right: KernelFor, wrong: KernelFor) -> KernelFor:
    """A fault is compiled into the stack that it is for."""

    def kernel_for(stack: Stack) -> tuple:
        has_fault = fault is not None and FAULTS[fault].of_talker == (len(stack.heads) == 1)
        return (wrong if has_fault else right)(stack)

    return kernel_for


@needs_compiler
@pytest.mark.parametrize(
    "fault, choices",  # a CPU takes seconds for each. A GPU has them all
    [
        (None, 5),
        ("penalty on the wrong sign", 3),
        *slow(("one rounding left out, of the norm", 5)),
    ],
)
@torch.no_grad()
def test_faults_on_a_cpu(fault, choices, talker, tmp_path):
    """The kernel as it is passes, each fault is found, and the reason says by which comparison.

    On 28 blocks shares are uneven: some have 5 rows per slice of the MLP, others 4, which they load before their input
    comes."""
    right = cpu_kernel_for(tmp_path, grid=8 if fault else 28)
    wrong = cpu_kernel_for(tmp_path, fault and faulty_source(fault), grid=8)
    with compile_with(with_fault(fault, right, wrong)):
        graphs = MegakernelGraphs(talker, rows_of(talker, LENGTH))
    before = state_of(graphs.rows)
    reason, _ = self_test.run_test(graphs, [PROMPT], frames=1, choices=choices)
    print(f"{fault}: {reason}")
    assert FAULTS[fault].found_by in reason if fault else reason == ""
    assert_same_state(graphs.rows, before)


def state_of(rows: SharedRows) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*rows.state(), rows.advance, rows.noise, rows.text, *rows.cache())]


def assert_same_state(rows: SharedRows, before: list[torch.Tensor]) -> None:
    for tensor, old in zip(state_of(rows), before, strict=True):
        assert torch.equal(tensor, old)


class NoKernel:
    """Stands in for a launch."""

    def __init__(self, error: type[Exception] = RuntimeError) -> None:
        self.error = error
        self.noise = torch.ones(1, 2, 1024)

    def __call__(self) -> None:
        raise self.error


def graphs_without_kernel(talker: Any, error: type[Exception] = RuntimeError) -> Any:
    graphs = PlainGraphs(talker, rows_of(talker, LENGTH))
    graphs.waiting_launches = NoKernel(error), NoKernel(error)
    return graphs


def test_logits_far_from_float32_are_found():
    """Whatever the layers between the first and the last do wrong shows only there."""
    figures = self_test.Figures()
    exact = torch.randn(1, 30, 1024, generator=torch.Generator().manual_seed(1))
    own, fused = (exact + 0.01 * torch.randn(1, 30, 1024, generator=torch.Generator().manual_seed(i)) for i in (2, 3))
    figures.keep_error("logits of the codes", fused, exact, own)
    assert figures.verdict()[0] == ""
    figures.keep_error("logits of the codes", exact + 1.6 * (fused - exact), exact, own)
    assert re.search(r"1\.\d\d times .* as the model's own, 1.5 may be", figures.verdict()[0])


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@torch.no_grad()
def test_the_frame_can_be_captured_after_a_test_that_failed(error, talker):
    """The test's `prompt_length` was left behind: capturing then read past its end, and loading failed."""
    graphs = graphs_without_kernel(talker, error)
    before = state_of(graphs.rows)
    if error is torch.OutOfMemoryError:
        with pytest.raises(error):
            self_test.run_test(graphs, [PROMPT])
    else:
        assert self_test.run_test(graphs, [PROMPT])[0] == error.__name__
    assert_same_state(graphs.rows, before)


@pytest.mark.slow
def test_how_far_one_rounding_goes():
    """Keys of the published width, computed twice with sums in another order. Where that changes a rounding inside the
    norm before the product, many values of the position differ: more than MAX_DIFFERENT of them in less than one of a
    thousand positions, and never MAX_DIFFERENT_OF_ONE."""
    generator = torch.Generator().manual_seed(0)
    count, width = 1024, 1024
    order = torch.randperm(width, generator=generator)
    blocks = order.view(16, -1)

    def norm(x, squares):
        return (x * torch.rsqrt(squares / x.shape[-1] + 1e-6)).bfloat16().float()

    shares = []
    for trial in range(96):
        gain = (1.0, 3.0)[trial % 2]
        weight = (torch.randn(width, width, generator=generator) * gain / width**0.5).bfloat16().float()
        x = (torch.randn(count, width, generator=generator) * gain).bfloat16().float()
        inputs = norm(x, x.square().sum(-1, keepdim=True))
        others = norm(x, sum(x[:, block].square().sum(-1, keepdim=True) for block in blocks))
        products = inputs @ weight.T, sum(others[:, block] @ weight[:, block].T for block in blocks)
        heads = [product.bfloat16().float().view(count, -1, 128) for product in products]
        keys = [norm(head, head.square().sum(-1, keepdim=True)) for head in heads]
        shares.append((keys[0] != keys[1]).flatten(1).float().mean(1))
    shares = torch.cat(shares)
    far = (shares > self_test.MAX_DIFFERENT).sum()
    print(f"{far} of {len(shares)} positions, the worst with {shares.max():.0%}")
    assert 0 < far < 1e-3 * len(shares) and shares.max() < self_test.MAX_DIFFERENT_OF_ONE


# ---- Several rows

ROW_FAULTS = {  # what one row may take from another: the right text, the wrong one, and a part of the reason
    "position": ("prompt_length[attended]", "prompt_length[0]", "the talker's first keys"),
    "cache": ("(row_to_attend() * KV_HEADS + kv_head)", "(0 * KV_HEADS + kv_head)", "first keys"),
    "projected hidden state": ("first_input + row * HIDDEN", "first_input", "first keys"),
    "hidden state": ("arguments.hidden + row * (HIDDEN / 2) + ", "arguments.hidden + ", "the hidden state"),
    "code": ("codes[row] * HIDDEN", "codes[0] * HIDDEN", "first keys"),
    "noise": ("(row * CODES + head) * VOCAB", "head * VOCAB", "the codes"),
    "top-k": ("arguments.topk_rank[row]", "arguments.topk_rank[0]", "the codes"),
    "text": ("u64 frame = element_row * arguments.frames +", "u64 frame =", "the text is wrong"),
    "seen token": ("arguments.seen[row * VOCAB + token]", "arguments.seen[token]", "what a step writes"),
}


ROW_FAULTS_OF_8 = {  # what a row of the second four may take from the first
    "vectors": ("columns_of_row, x[group][quad]", "columns_of_row, x[0][quad]", "first keys"),
    "code": ("row / 4 == group ? of_four[group] : four", "four", "the codes"),
}


@needs_compiler
@pytest.mark.parametrize(
    "count, fault",
    [
        (8, None),
        *slow((2, None), (4, None), *((2, fault) for fault in ROW_FAULTS), *((8, fault) for fault in ROW_FAULTS_OF_8)),
    ],
)
@torch.no_grad()
def test_faults_of_several_rows_on_a_cpu(count, fault, talker, tmp_path):
    """A fault is compiled into the kernels of several rows."""
    *change, found_by = (ROW_FAULTS if count == 2 else ROW_FAULTS_OF_8).get(fault, [""])
    rows = rows_of(talker, LENGTH, count)
    before = state_of(rows)
    source = changed_source(megakernel, change) if fault else None
    with compile_with(cpu_kernel_for(tmp_path, source, grid=max(16, 4 * count))):
        graphs = MegakernelGraphs(talker, rows)
    reason, _ = self_test.run_test(graphs, self_test.PROMPTS, frames=1, choices=0)
    print(f"{fault}: {reason}")
    assert bool(reason) == bool(fault) and found_by in reason
    assert_same_state(rows, before)


def test_every_fault_can_be_made():
    """Each replaces a part of the kernel; only the tests on a GPU need all of them."""
    for fault in FAULTS:
        faulty_source(fault)
    for right, wrong, _ in (*ROW_FAULTS.values(), *ROW_FAULTS_OF_8.values()):
        changed_source(megakernel, (right, wrong))


# ---- On a GPU


@pytest.fixture(scope="module")
def gpu_talker(checkpoint) -> Any:
    with torch.no_grad():
        talker = load_upstream(str(checkpoint("base", "0.6B")), dtype=torch.bfloat16).model.talker
        vary_norms(talker)
        talker.keepalive = replace_layers(talker, 512)
    return talker


@pytest.fixture(scope="module")
def reasons() -> Iterator[dict[str | None, str]]:
    """What the self-test said of each fault, printed as a table at the end."""
    reasons: dict[str | None, str] = {}
    yield reasons
    print("\n")
    for fault, reason in reasons.items():
        print(f"{fault or 'no fault':36} {f'caught by the self-test: {reason}' if reason else 'passes'}")


@pytest.fixture(scope="module")
def compiled_ahead(gpu_talker) -> None:
    """All faults at once, in threads."""
    talker, predictor = map(kernel_sizes, stacks_of(gpu_talker))
    for fault in FAULTS:
        source = SOURCE.complete(talker if FAULTS[fault].of_talker else predictor, faulty_source(fault))
        kernel_cache.start_compiling(source, nvrtc.architecture_of(gpu_talker.device))


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_on_a_gpu(fault, gpu_talker, compiled_ahead, reasons):
    """As on a CPU, with all layers of a published size."""
    with compile_with(with_fault(fault, gpu_kernel_for(), gpu_kernel_for(fault and faulty_source(fault)))):
        reason, _ = self_test.run_test(MegakernelGraphs(gpu_talker, rows_of(gpu_talker, 512)))
    reasons[fault] = reason
    assert FAULTS[fault].found_by in reason if fault else reason == ""


@on_gpu
def test_a_wrong_kernel_is_not_used(checkpoint):
    """The separate kernels are, and the path says why; fused=True is an error."""
    folder = str(checkpoint("base", "0.6B"))
    with compile_with(gpu_kernel_for(faulty_source("the wrong KV head"))):
        tts = accelerate(load_upstream(folder), max_seq_len=256)
        assert tts.speech.path.startswith("separate kernels") and "failed its test" in tts.speech.path
        with pytest.raises(ValueError, match="failed its test"):
            accelerate(load_upstream(folder), max_seq_len=256, fused=True)
