"""fast/self_test.py accepts the megakernel and refuses wrong ones: on a CPU with a small model, on a GPU with the
published sizes. Each fault is a change of the source, made here."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_on_cpu import CpuKernel, PretendedGpu
from megakernel_cases import FAULTS, changed_source, faulty_source
from test_megakernel import on_gpu

from qwen3_tts_cuda_graphs.bench.random_checkpoint import CODEC_IDS, PREDICTOR, TALKER, randomize
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.fast import kernel_cache, nvrtc, self_test
from qwen3_tts_cuda_graphs.fast.frames import Frame, MegakernelFrame
from qwen3_tts_cuda_graphs.fast.layers import replace_layers
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Sizes, Stack, kernel_sizes, stacks_of
from qwen3_tts_cuda_graphs.fast.rows import SharedRows
from qwen3_tts_cuda_graphs.speech import accelerate

# isort: split
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSTalkerConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration

SMALL = dict(prompt=44, frames=2, choices=5)

# One for each kind of comparison, with what it takes to find it: a CPU takes seconds for each. A GPU has them all.
CPU_FAULTS = {
    None: SMALL | dict(frames=1),
    "one rounding left out, of the norm": SMALL | dict(frames=1),
    "penalty on the wrong sign": SMALL | dict(frames=1, choices=3),
}


def vary_norms(talker: Any) -> None:
    """Random checkpoints have norms of 1, after which a second rounding changes nothing."""
    for name, weight in talker.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)


@pytest.fixture(scope="module")
def small_talker() -> Any:
    """A layer each, as small as the megakernel can, and three codes per frame."""
    small = dict(hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4)
    small |= dict(num_hidden_layers=1, vocab_size=1024, num_code_groups=3)
    talker = TALKER | CODEC_IDS | small
    talker |= dict(text_vocab_size=64, text_hidden_size=64, code_predictor_config=PREDICTOR | small)
    torch.manual_seed(0)
    with torch.no_grad():
        model = Qwen3TTSTalkerForConditionalGeneration(Qwen3TTSTalkerConfig(**talker))
        model = randomize(model).to(torch.bfloat16).eval()
        vary_norms(model)
        model.keepalive = replace_layers(model, 48)
    return model


def rows_of(talker: Any, count: int = 1) -> SharedRows:
    return SharedRows(talker.config, count, 48, talker.dtype, talker.device)


def cpu_frame(talker: Any, folder: Path, fault: str | None, monkeypatch: Any, grid: int) -> MegakernelFrame:
    """A frame of one row on `grid` blocks of fibers. A fault is compiled into the stack that it is for."""

    def compile(stack: Stack) -> tuple[Sizes, CpuKernel]:
        has_fault = fault is not None and FAULTS[fault].of_talker == (len(stack.heads) == 1)
        source = faulty_source(fault) if has_fault else None
        sizes = replace(kernel_sizes(stack, PretendedGpu()), grid=grid)
        return sizes, CpuKernel(SOURCE.complete(sizes, source), sizes, folder)

    monkeypatch.setattr(SOURCE, "compile", compile)
    with torch.no_grad():
        return MegakernelFrame(talker, rows_of(talker))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(
    "fault",
    [None, "penalty on the wrong sign", pytest.param("one rounding left out, of the norm", marks=pytest.mark.slow)],
)
def test_faults_on_a_cpu(fault, small_talker, tmp_path, monkeypatch):
    """The kernel as it is passes, each fault is found, and the reason says by which comparison.

    On 28 blocks shares are uneven: some have 5 rows per slice of the MLP, others 4, which they load before their input
    comes."""
    frame = cpu_frame(small_talker, tmp_path, fault, monkeypatch, grid=8 if fault else 28)
    before = state_of(frame.rows)
    reason, _ = self_test.run_test(frame, **CPU_FAULTS[fault])
    print(f"{fault}: {reason}")
    if fault is None:
        assert reason == ""
        assert_same_state(frame.rows, before)
    else:
        assert FAULTS[fault].found_by in reason


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


def frame_without_kernel(talker: Any, error: type[Exception] = RuntimeError) -> Any:
    frame = Frame(talker, rows_of(talker))
    frame.launches = NoKernel(error), NoKernel(error)
    return frame


def test_logits_far_from_float32_are_found(small_talker):
    """Whatever the layers between the first and the last do wrong shows only there."""
    test = self_test.SelfTest(frame_without_kernel(small_talker), SMALL["prompt"], SMALL["frames"])
    exact = torch.randn(30, 1024, generator=torch.Generator().manual_seed(1))
    own, fused = (exact + 0.01 * torch.randn(30, 1024, generator=torch.Generator().manual_seed(i)) for i in (2, 3))
    test.check_logits("codes", fused, own, exact)
    assert test.verdict()[0] == ""
    test.check_logits("codes", exact + 1.6 * (fused - exact), own, exact)
    assert re.search(r"1\.\d\d times .* as the model's own, 1.5 may be", test.verdict()[0])


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@torch.no_grad()
def test_the_frame_can_be_captured_after_a_test_that_failed(error, small_talker):
    """The test's `prompt_length` was left behind: capturing then read past its end, and loading failed."""
    frame = frame_without_kernel(small_talker, error)
    before = state_of(frame.rows)
    if error is torch.OutOfMemoryError:
        with pytest.raises(error):
            self_test.run_test(frame, **SMALL)
    else:
        assert self_test.run_test(frame, **SMALL)[0] == error.__name__
    assert_same_state(frame.rows, before)


# ---- Several rows

ROW_FAULTS = {  # what one row may take from another: the right text, the wrong one, and a part of the reason
    "position": ("prompt_length[attended]", "prompt_length[0]", "the cached keys and values"),
    "cache": ("(row_to_attend() * KV_HEADS + kv_head)", "(0 * KV_HEADS + kv_head)", "the logits of the codes"),
    "projected hidden state": ("first_input + row * HIDDEN", "first_input", "the logits of the codes"),
    "hidden state": ("arguments.hidden + row * (HIDDEN / 2) + ", "arguments.hidden + ", "the hidden state"),
    "code": ("codes[row] * HIDDEN", "codes[0] * HIDDEN", "the logits of the codes"),
    "noise": ("(row * CODES + head) * VOCAB", "head * VOCAB", "the codes"),
    "top-k": ("arguments.topk_rank[row]", "arguments.topk_rank[0]", "the codes"),
    "text": ("u64 frame = element_row * arguments.frames +", "u64 frame =", "the embedding"),
}


MANY_ROW_FAULTS = {  # what a row of the second four may take from the first
    "vectors": ("columns_of_row, x[group][quad]", "columns_of_row, x[0][quad]", "the logits of the codes"),
    "code": ("row / 4 == group ? of_four[group] : four", "four", "the logits of the codes"),
}


def row_fault(fault: str, count: int = 2) -> str:
    right, wrong, _ = (ROW_FAULTS if count <= 4 else MANY_ROW_FAULTS)[fault]
    return changed_source(right, wrong)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(
    "count, fault",
    [*((2, fault) for fault in (None, *ROW_FAULTS)), *((8, fault) for fault in (None, *MANY_ROW_FAULTS))],
)
@torch.no_grad()
@pytest.mark.slow
def test_faults_of_several_rows_on_a_cpu(count, fault, small_talker, tmp_path, monkeypatch):
    """A fault is compiled into the kernels of several rows."""

    def compile(stack: Stack) -> tuple[Sizes, CpuKernel]:
        source = row_fault(fault, count) if fault and stack.row_count > 1 else None
        sizes = replace(kernel_sizes(stack, PretendedGpu()), grid=max(16, 4 * stack.row_count))
        return sizes, CpuKernel(SOURCE.complete(sizes, source), sizes, tmp_path)

    monkeypatch.setattr(SOURCE, "compile", compile)
    rows = rows_of(small_talker, count)
    before = state_of(rows)
    alone = MegakernelFrame(small_talker, rows[:1])
    reason = self_test.why_rows_wrong(MegakernelFrame(small_talker, rows, alone), alone)
    print(f"{fault}: {reason}")
    assert bool(reason) == bool(fault)
    assert fault is None or (ROW_FAULTS if count == 2 else MANY_ROW_FAULTS)[fault][2] in reason
    assert_same_state(rows, before)


def test_every_fault_can_be_made():
    """Each replaces a part of the kernel; only the tests on a GPU need all of them."""
    for fault in FAULTS:
        faulty_source(fault)
    for fault in ROW_FAULTS:
        row_fault(fault)
    for fault in MANY_ROW_FAULTS:
        row_fault(fault, 8)


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
        kernel_cache.compile_ahead(source, nvrtc.architecture_of(gpu_talker.device))


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_on_a_gpu(fault, gpu_talker, compiled_ahead, reasons, monkeypatch):
    """As on a CPU, with all layers of a published size."""
    compile_right = SOURCE.compile

    def compile(stack: Stack) -> tuple[Sizes, Any]:
        if fault is None or FAULTS[fault].of_talker != (len(stack.heads) == 1):
            return compile_right(stack)
        sizes = kernel_sizes(stack)
        return sizes, SOURCE.load(sizes, stack.device, faulty_source(fault))

    monkeypatch.setattr(SOURCE, "compile", compile)
    rows = SharedRows(gpu_talker.config, 1, 512, gpu_talker.dtype, gpu_talker.device)
    reason, _ = self_test.run_test(MegakernelFrame(gpu_talker, rows))
    reasons[fault] = reason
    if fault is None:
        assert reason == ""
    else:
        assert FAULTS[fault].found_by in reason


@on_gpu
def test_a_wrong_kernel_is_not_used(checkpoint, monkeypatch, tmp_path):
    """The separate kernels are, and the path says why; fused=True is an error."""
    wrong = tmp_path / "megakernel.cu"
    wrong.write_text(faulty_source("the wrong KV head"))
    monkeypatch.setattr(SOURCE, "file", wrong)
    folder = str(checkpoint("base", "0.6B"))
    tts = accelerate(load_upstream(folder), max_seq_len=256)
    assert tts.speech.path.startswith("separate kernels") and "failed its test" in tts.speech.path
    with pytest.raises(ValueError, match="failed its test"):
        accelerate(load_upstream(folder), max_seq_len=256, fused=True)
