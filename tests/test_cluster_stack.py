"""The kernel for 32 and 64 rows: it computes what the kernels of batched.cu compute, on a CPU with few blocks and small
layers, on a GPU with the published widths; its test at load finds a kernel with a fault; and a block that falls silent
stops nobody for long."""

import ctypes
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_on_cpu import CpuKernel, CpuKernels, changed_source, needs_compiler
from helpers import on_gpu, random_talker, slow
from torch import Tensor

from cudagraph_talker import GraphPool, static_cache
from qwen3_tts_cuda_graphs.fast import batched, cluster_stack, nvrtc
from qwen3_tts_cuda_graphs.fast.batched import BatchedStack
from qwen3_tts_cuda_graphs.fast.cluster_stack import SOURCE, ClusterStack, Subject, difference_of, make_stack
from qwen3_tts_cuda_graphs.fast.layers import replace_layers

LENGTHS = {"predictor": 16, "talker": 256}  # of the cache
ROUNDINGS = 0.02  # how far results may be from those of the other kernels: their sums have another order
WIDTHS = dict(hidden_size=1024, intermediate_size=3072)
# For a CPU, for each number of rows: the fewest clusters that have room for them. The last tiles are smaller.
SMALL = {
    64: dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2),
    32: dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4),
}
SMALL_CLUSTERS = {64: 3, 32: 5}


# ---- Where it is used


def unmet(major: int = 9, processors: int = 132, rows: int = 64, **sizes: int) -> str:
    config = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8) | sizes
    model = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(**config))
    gpu = SimpleNamespace(major=major, minor=0, multi_processor_count=processors)
    with (
        mock.patch.object(batched, "needs_of", lambda _: {}),
        mock.patch("torch.cuda.get_device_properties", lambda _: gpu),
    ):
        return SOURCE.unmet(Subject(model, rows, is_short=False))


def test_where_it_runs():
    assert unmet() == unmet(rows=32) == ""


@pytest.mark.parametrize(
    "differs, need",
    [
        (dict(major=10), "compute capability 9.0, the GPU has 10.0"),
        (dict(processors=114), "132 multiprocessors, the GPU has 114"),
        (dict(rows=16), "32 or 64 rows, not 16"),
        (dict(hidden_size=2048), "a hidden size of 1024, not 2048"),
        (dict(intermediate_size=6144), "an MLP of 3072, not 6144"),
        (dict(num_key_value_heads=4), "16 query heads and 8 KV heads"),
    ],
)
def test_what_it_needs_is_said_in_words(differs, need):
    assert unmet(**differs) == f"the kernels need {need}"


@pytest.mark.parametrize("error", [RuntimeError("too many blocks"), "its results are 0.90 times their size away"])
def test_what_fails_its_test_is_not_used(error, caplog):
    """The kernels of batched.cu compute the rows then, and the log says why."""
    why_wrong = mock.Mock(side_effect=[error])
    with (
        mock.patch.object(SOURCE, "why_not", lambda _: ""),
        mock.patch.object(cluster_stack, "ClusterStack", lambda *_: SimpleNamespace(why_wrong=why_wrong)),
        mock.patch.object(cluster_stack, "BatchedStack", lambda *arguments: arguments),
        mock.patch.object(cluster_stack.ClusterStack, "name", "the kernel", create=True),
    ):
        keys = [torch.zeros(64, 8, 16, 128)]
        assert make_stack("model", keys, keys, 64, 128, may_wait=True) == ("model", keys, keys, 128)
        why_wrong.assert_called_once()
        assert str(error) in caplog.text
        assert make_stack("model", keys, keys, 64, 128, may_wait=False)[-1] == 128
        why_wrong.assert_called_once()  # not even tried


# ---- What it computes


def some_stack(talker: Any, which: str, rows: int) -> ClusterStack:
    """Of the talker or of the predictor, over a cache in which every position has something."""
    replace_layers(talker, max(LENGTHS.values()))
    model = talker.model if which == "talker" else talker.code_predictor.model
    keys, values = static_cache(model.config, rows, LENGTHS[which], model.dtype, model.device)
    for tensor in (*keys, *values):
        tensor.normal_()
    return ClusterStack(model, keys, values, rows, 2 * rows)


def results(stack: ClusterStack, kind: type, embeds: Tensor, positions: Tensor) -> list[Tensor]:
    """Hidden states, and the new keys and values of each layer, of one class's `forward`."""
    hidden = kind.forward(stack, embeds, positions)
    return [hidden, *(tensor[torch.arange(len(embeds)), :, positions] for tensor in cache_of(stack))]


def cache_of(stack: ClusterStack) -> list[Tensor]:
    return [tensor for layer in stack.layers for tensor in (layer.keys, layer.values)]


FAULTS = {
    "the last layer left out": ("for (int i = 0; i < 4 * LAYERS; ++i)", "for (int i = 0; i < 4 * LAYERS - 4; ++i)"),
    "the norm of the other product": (
        "work.index == QKV ? layer.input_norm : layer.post_norm",
        "work.index == QKV ? layer.post_norm : layer.input_norm",
    ),
    "no residual": ("v = add(v, hidden);", "v = add(v, uint4{});"),
    "weights of another slice": ("(work.rank * work.slabs + i) * SLAB", "i * SLAB"),
    "the position of another row": ("= arguments.positions[row];", "= arguments.positions[row ^ 1];"),
    "sums of one block too few": ("if (rank < 4 || work.is_narrow)", "if (rank < 3 || work.is_narrow)"),
}
SILENT_BLOCK = (
    "        store_relaxed(result + place.index, v);",
    "        if (blockIdx.x != 3) store_relaxed(result + place.index, v);",
)
LIMIT, SHORT_LIMIT = "CYCLES_TO_WAIT = 4'000'000'000;", "CYCLES_TO_WAIT = 1'000'000'000;"


def check_that_it_ends(stack: ClusterStack) -> None:
    """All blocks leave when their time is over, in the next launch at once, and the host learns why."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        assert "a thread block has waited for another one" in stack.why_wrong()
        times.append(time.perf_counter() - start)
    first, second = times
    assert second < first / 2 and first < 60, times


# ---- On a CPU


def encode_tensor_map(function: str, buffer: Any, *arguments: Any) -> None:
    """In place of the driver: what EncodedTensorMap of tests/gpu_on_cpu.h has."""
    assert function == "cuTensorMapEncodeTiled"
    _, rank, address, sizes, strides, box, *_ = arguments
    assert (rank, len(sizes), len(strides), len(box)) == (4, 4, 3, 4)
    fields = (ctypes.c_uint64 * 12)(address.value, *sizes, *strides, *box)
    ctypes.memmove(buffer, fields, ctypes.sizeof(fields))


@pytest.fixture(params=["talker", *slow("predictor")])
def which(request) -> str:
    return request.param


@pytest.fixture
def stack_on_cpu(monkeypatch, tmp_path) -> Callable[..., ClusterStack]:
    """stack_on_cpu(which, rows, (right, wrong), ...) -> on fibers, of a kernel with these faults"""
    torch.manual_seed(0)
    gpu = SimpleNamespace(shared_memory_per_block_optin=227 << 10)

    def make(which: str, rows: int, *faults: tuple[str, str]) -> ClusterStack:
        def compile(subject: Subject) -> tuple[SimpleNamespace, CpuKernel]:
            sizes = cluster_stack.kernel_sizes(subject)
            source = SOURCE.complete(sizes, changed_source(cluster_stack, *faults))
            return sizes, CpuKernel(source, sizes, tmp_path, cluster_stack.KERNEL)

        def compile_others(model: Any) -> tuple[SimpleNamespace, CpuKernels]:
            sizes = batched.kernel_sizes(model)
            return sizes, CpuKernels(batched.SOURCE.complete(sizes), tmp_path)

        monkeypatch.setattr(cluster_stack, "CLUSTERS", SMALL_CLUSTERS[rows])
        monkeypatch.setattr(SOURCE, "compile", compile)
        monkeypatch.setattr(batched.SOURCE, "compile", compile_others)
        with torch.no_grad():
            return some_stack(random_talker(num_hidden_layers=2, **SMALL[rows]), which, rows)

    monkeypatch.setattr(nvrtc, "gpu_properties", lambda _: gpu)
    monkeypatch.setattr(nvrtc, "call_driver", encode_tensor_map)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return make


@needs_compiler
@pytest.mark.parametrize("rows", [64, *slow(32)])
def test_it_computes_the_same_on_a_cpu(which, rows, stack_on_cpu):
    """Launch after launch: what one leaves behind is not taken for what the next one waits for."""
    stack = stack_on_cpu(which, rows)
    before = [tensor.clone() for tensor in cache_of(stack)]
    assert stack.why_wrong() == ""
    assert all(map(torch.equal, before, cache_of(stack)))
    positions = torch.randint(LENGTHS[which], (rows,))
    positions[:2] = torch.tensor([0, LENGTHS[which] - 1])
    embeds = torch.randn(rows, SMALL[rows]["hidden_size"]).bfloat16()
    expected = results(stack, BatchedStack, embeds, positions)
    found = results(stack, ClusterStack, embeds, positions)
    assert difference_of(found, expected, ROUNDINGS) == ""
    tokens = torch.randperm(rows)
    assert torch.equal(stack.forward(embeds[tokens.argsort()], positions, tokens=tokens), found[0])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_on_a_cpu(fault, stack_on_cpu):
    assert "times their size away" in stack_on_cpu("predictor", 64, fault).why_wrong()


@needs_compiler
@pytest.mark.slow
def test_a_block_that_never_publishes_on_a_cpu(stack_on_cpu):
    check_that_it_ends(stack_on_cpu("predictor", 64, SILENT_BLOCK, (LIMIT, SHORT_LIMIT)))


# ---- On a GPU


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    torch.manual_seed(0)
    with torch.device("cuda", 0) as device, torch.no_grad():
        yield device


@pytest.fixture
def talker(gpu) -> Any:
    return random_talker(num_hidden_layers=3, **WIDTHS)


@on_gpu
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("which", LENGTHS)
def test_it_computes_what_the_other_kernels_compute(which, rows, talker):
    """At any positions, several times over, the first and the last among them; and each replay has the same bits."""
    stack = some_stack(talker, which, rows)
    assert stack.why_wrong() == ""
    embeds = torch.randn(rows, 1024).bfloat16()
    positions = torch.zeros(rows, dtype=torch.long)
    hidden = torch.empty_like(embeds)
    replay = GraphPool(embeds.device).capture(lambda: hidden.copy_(stack.forward(embeds, positions)))
    for highest in (1, 2, 17, 100, LENGTHS[which], LENGTHS[which]):
        embeds.normal_()
        positions.copy_(torch.randint(min(highest, LENGTHS[which]), (rows,)))
        expected = results(stack, BatchedStack, embeds, positions)
        assert difference_of(results(stack, ClusterStack, embeds, positions), expected, ROUNDINGS) == ""
        bits = stack.forward(embeds, positions)
        tokens = torch.randperm(rows)
        assert torch.equal(stack.forward(embeds[tokens.argsort()], positions, tokens=tokens), bits)
        for _ in range(10):
            replay()
            assert torch.equal(hidden, bits)
    assert stack.why_failed() == ""


@on_gpu
def test_its_test_leaves_the_cache_as_it_was(talker):
    stack = some_stack(talker, "talker", 32)
    before = [tensor.clone() for tensor in cache_of(stack)]
    assert stack.why_wrong() == ""
    assert all(map(torch.equal, before, cache_of(stack)))


def with_fault(stack: ClusterStack, *fault: tuple[str, str]) -> ClusterStack:
    source = changed_source(cluster_stack, *fault)
    stack.cluster_kernels = SOURCE.load(stack.cluster_sizes, stack.device, source)
    stack.arguments["exchanged"].fill_(cluster_stack.EMPTY)  # another fault may have left something
    return stack


@on_gpu
@pytest.mark.parametrize("which", LENGTHS)
def test_a_fault_is_found(which, talker):
    stack = some_stack(talker, which, 64)
    for name, fault in FAULTS.items():
        reason = with_fault(stack, fault).why_wrong()
        print(f"{which}, {name}: {reason}")
        assert "times their size away" in reason, name


@on_gpu
def test_a_block_that_never_publishes(talker):
    check_that_it_ends(with_fault(some_stack(talker, "predictor", 64), SILENT_BLOCK))
