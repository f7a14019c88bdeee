"""fast/self_test.py accepts the megakernel and refuses wrong ones: on a CPU with a small model, on a GPU with the
published sizes. Each fault is a change of the source, made here."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_on_cpu import CpuKernel, PretendedGpu
from megakernel_cases import FAULTS, faulty_source
from test_megakernel import on_gpu

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import TalkerGraph
from fast import kernel_cache, megakernel, self_test
from fast.layers import replace_layers
from fast.megakernel import complete_source, kernel_sizes
from fast.prompts import decoder_of
from generate import accelerate, load_upstream
from tools.random_checkpoint import CODEC_IDS, PREDICTOR, TALKER, randomize

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
def graphs() -> tuple[TalkerGraph, PredictorGraph]:
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
        talker_graph = TalkerGraph(model, 1, 48)
        talker_graph.upstream = model
        return talker_graph, PredictorGraph(model, talker_graph)


def use_kernel(graphs: Any, folder: Path, fault: str | None, monkeypatch: Any) -> None:
    """Steps on 8 blocks of fibers. A fault is compiled into the stack that it is for."""
    talker, predictor = graphs

    def compile_for(model: Any, heads: Any, talker_hidden: int, _: int) -> tuple[megakernel.Sizes, CpuKernel]:
        is_talker = len(heads) == 1
        has_fault = fault is not None and FAULTS[fault].of_talker == is_talker
        source = faulty_source(fault) if has_fault else None
        sizes = replace(kernel_sizes(model, heads, talker_hidden, PretendedGpu()), grid=8)
        return sizes, CpuKernel(complete_source(sizes, source), sizes, folder)

    monkeypatch.setattr(megakernel, "compile_for", compile_for)
    with torch.no_grad():
        monkeypatch.setattr(talker, "step", megakernel.talker_step(talker.upstream, talker), raising=False)
        monkeypatch.setattr(predictor, "step", megakernel.predictor_step(predictor), raising=False)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(
    "fault",
    [None, "penalty on the wrong sign", pytest.param("one rounding left out, of the norm", marks=pytest.mark.slow)],
)
def test_faults_on_a_cpu(fault, graphs, tmp_path, monkeypatch):
    """The kernel as it is passes, each fault is found, and the reason says by which comparison."""
    use_kernel(graphs, tmp_path, fault, monkeypatch)
    torch.manual_seed(0)  # of the noise: so few choices do not show every fault
    reason = self_test.why_wrong(*graphs, **CPU_FAULTS[fault])
    print(f"{fault}: {reason}")
    if fault is None:
        assert reason == ""
        with torch.no_grad():
            run_like_capture(*graphs)
    else:
        assert FAULTS[fault].found_by in reason


def test_logits_far_from_float32_are_found(graphs):
    """Whatever the layers between the first and the last do wrong shows only there."""
    test = self_test.SelfTest(*graphs, **{name: SMALL[name] for name in ("prompt", "frames")})
    exact = torch.randn(30, 1024, generator=torch.Generator().manual_seed(1))
    separate, fused = (exact + 0.01 * torch.randn(30, 1024, generator=torch.Generator().manual_seed(i)) for i in (2, 3))
    test.check_logits("codes", fused, separate, exact)
    with pytest.raises(self_test.Wrong, match=r"1\.\d\d times .* as those of separate kernels, 1.5 may be"):
        test.check_logits("codes", exact + 1.6 * (fused - exact), separate, exact)


def run_like_capture(talker: TalkerGraph, predictor: PredictorGraph) -> None:
    """Capturing runs each step and each prefill once before any request."""
    talker.step()
    for bucket in (16, 32, 48):
        talker.prefill(bucket)
    predictor.step()


@pytest.mark.parametrize("error", [self_test.Wrong, RuntimeError, torch.OutOfMemoryError])
@torch.no_grad()
def test_the_graphs_can_be_captured_after_a_test_that_failed(error, graphs, monkeypatch):
    """The test's `prompt_length` was left behind: capturing a prefill then read past its end, and loading failed."""

    def fail() -> None:
        raise error

    talker, predictor = graphs
    before = {name: value.clone() for name, value in vars(talker).items() if isinstance(value, torch.Tensor)}
    with monkeypatch.context() as patch:
        patch.setattr(predictor, "step", fail)
        if error is torch.OutOfMemoryError:
            with pytest.raises(error):
                self_test.why_wrong(*graphs, **SMALL)
        else:
            self_test.why_wrong(*graphs, **SMALL)
    for name, value in before.items():
        assert torch.equal(getattr(talker, name), value), name
    run_like_capture(talker, predictor)


def test_every_fault_can_be_made():
    """Each replaces a part of the kernel; only the tests on a GPU need all of them."""
    for fault in FAULTS:
        faulty_source(fault)


# ---- On a GPU


@pytest.fixture(scope="module")
def gpu_graphs(checkpoint) -> tuple[TalkerGraph, PredictorGraph]:
    with torch.no_grad():
        talker = load_upstream(str(checkpoint("base", "0.6B")), dtype=torch.bfloat16).model.talker
        vary_norms(talker)
        talker.keepalive = replace_layers(talker, 512)
        talker_graph = TalkerGraph(talker, 1, 512)
        talker_graph.upstream = talker
        return talker_graph, PredictorGraph(talker, talker_graph)


@pytest.fixture(scope="module")
def reasons() -> Iterator[dict[str | None, str]]:
    """What the self-test said of each fault, printed as a table at the end."""
    reasons: dict[str | None, str] = {}
    yield reasons
    print("\n")
    for fault, reason in reasons.items():
        print(f"{fault or 'no fault':36} {f'caught by the self-test: {reason}' if reason else 'passes'}")


def faulty_kernel_source(fault: str, graphs: Any) -> tuple[megakernel.Sizes, str]:
    """For the stack that the fault is for."""
    talker, predictor = graphs
    model, heads = (talker.model, [talker.head]) if FAULTS[fault].of_talker else (predictor.model, predictor.heads)
    gpu = torch.cuda.get_device_properties(talker.device)
    sizes = kernel_sizes(model, heads, talker.hidden.shape[-1], gpu)
    return sizes, complete_source(sizes, faulty_source(fault))


@pytest.fixture(scope="module")
def compiled_ahead(gpu_graphs) -> None:
    """All faults at once, in threads."""
    major, minor = torch.cuda.get_device_capability(gpu_graphs[0].device)
    for fault in FAULTS:
        _, source = faulty_kernel_source(fault, gpu_graphs)
        kernel_cache.compile_ahead(source, f"sm_{major}{minor}")


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_on_a_gpu(fault, gpu_graphs, compiled_ahead, reasons, monkeypatch):
    """As on a CPU, with all layers of a published size."""
    compile_right = megakernel.compile_for

    def compile_for(model: Any, heads: Any, talker_hidden: int, _: int) -> tuple[megakernel.Sizes, Any]:
        if fault is None or FAULTS[fault].of_talker != (len(heads) == 1):
            return compile_right(model, heads, talker_hidden)
        sizes, source = faulty_kernel_source(fault, gpu_graphs)
        return sizes, megakernel.compile_kernel(model.device, sizes, source)

    talker, predictor = gpu_graphs
    monkeypatch.setattr(megakernel, "compile_for", compile_for)
    monkeypatch.setattr(talker, "step", megakernel.talker_step(talker.upstream, talker), raising=False)
    monkeypatch.setattr(predictor, "step", megakernel.predictor_step(predictor), raising=False)
    reason = self_test.why_wrong(talker, predictor)
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
    monkeypatch.setattr(megakernel, "SOURCE", wrong)
    megakernel.compile_once.cache_clear()
    try:
        folder = str(checkpoint("base", "0.6B"))
        tts = accelerate(load_upstream(folder), max_seq_len=256)
        assert decoder_of(tts).path.startswith("separate kernels") and "failed its test" in decoder_of(tts).path
        with pytest.raises(ValueError, match="failed its test"):
            accelerate(load_upstream(folder), max_seq_len=256, fused=True)
    finally:
        megakernel.compile_once.cache_clear()
