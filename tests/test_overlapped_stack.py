"""The kernels that overlap, for many rows: they compute what those of batched.cu compute, on a CPU with small
layers, on a GPU with the published widths; and their test at load finds a kernel with a fault."""

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_on_cpu import OPTIMIZED, CpuKernels, changed_source, needs_compiler
from helpers import on_gpu, random_talker, slow
from torch import Tensor

from cudagraph_talker import GraphPool, static_cache
from qwen3_tts_cuda_graphs.fast import batched, nvrtc, overlapped_stack
from qwen3_tts_cuda_graphs.fast.batched import BatchedStack
from qwen3_tts_cuda_graphs.fast.layers import replace_layers
from qwen3_tts_cuda_graphs.fast.overlapped_stack import (
    SOURCE,
    OverlappedStack,
    Subject,
    Tiling,
    difference_of,
    make_stack,
)

LENGTH, SHORT_LENGTH = 300, 16  # of the cache
ROUNDINGS = 0.02  # how far results may be from those of the other kernels: their sums have another order
SMALL = dict(hidden_size=256, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2)  # for a CPU


# ---- Where it is used


def unmet(major: int = 9, rows: int = 64, driver: tuple[int, int] = (12, 3), **sizes: int) -> str:
    config = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8) | sizes
    model = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(**config))
    gpu = SimpleNamespace(major=major, minor=0)
    with (
        mock.patch.object(batched, "needs_of", lambda _: {}),
        mock.patch("torch.cuda.get_device_properties", lambda _: gpu),
        mock.patch.object(nvrtc, "driver_version", lambda: driver),
    ):
        return SOURCE.unmet(Subject(model, rows))


def test_where_it_runs():
    assert unmet() == unmet(rows=32) == unmet(rows=128) == unmet(hidden_size=2048, intermediate_size=6144) == ""


@pytest.mark.parametrize(
    "differs, need",
    [
        (dict(major=10), "compute capability 9.0, the GPU has 10.0"),
        (dict(driver=(12, 2)), "a driver for CUDA 12.3, this one is for 12.2"),
        (dict(rows=16), "32, 64 or 128 rows, not 16"),
        (dict(hidden_size=512), "a hidden size of 1024 or 2048, not 512"),
        (dict(intermediate_size=4096), "an MLP three times as wide, not of 4096"),
        (dict(num_key_value_heads=4), "16 query heads and 8 KV heads"),
    ],
)
def test_what_it_needs_is_said_in_words(differs, need):
    assert unmet(**differs) == f"the kernels need {need}"


@pytest.mark.parametrize("number, version", [(12020, (12, 2)), (13000, (13, 0))])
def test_the_driver_is_asked_for_its_version(number, version, monkeypatch):
    def write_number(function: str, into: Any) -> None:
        assert function == "cuDriverGetVersion"
        into._obj.value = number

    monkeypatch.setattr(nvrtc, "call_driver", write_number)
    assert nvrtc.driver_version() == version


@pytest.mark.parametrize("wrong", ["", RuntimeError("no memory"), "its results are 0.90 times their size away"])
def test_what_fails_its_test_is_not_used(wrong, caplog):
    """The kernels of batched.cu compute the rows then, and the log says why."""
    stack = SimpleNamespace(why_wrong=mock.Mock(side_effect=[wrong]))
    with (
        mock.patch.object(SOURCE, "why_not", lambda _: ""),
        mock.patch.object(overlapped_stack, "OverlappedStack", mock.Mock(return_value=stack)) as kind,
        mock.patch.object(overlapped_stack, "BatchedStack", lambda *arguments: arguments),
    ):
        kind.name = "the kernels"
        assert make_stack("model", "keys", "values", 64, 128) == (("model", "keys", "values", 128) if wrong else stack)
        assert str(wrong) in caplog.text


# ---- What it computes


def some_stack(talker: Any, rows: int, length: int = LENGTH) -> OverlappedStack:
    """Of the talker, over a cache in which every position has something."""
    replace_layers(talker, LENGTH)
    model = talker.model
    keys, values = static_cache(model.config, rows, length, model.dtype, model.device)
    for tensor in (*keys, *values):
        tensor.normal_()
    return OverlappedStack(Subject(model, rows), keys, values, 2 * rows)


def cache_of(stack: OverlappedStack) -> list[Tensor]:
    return [tensor for layer in stack.layers for tensor in (layer.keys, layer.values)]


def results(stack: OverlappedStack, kind: type, embeds: Tensor, positions: Tensor) -> list[Tensor]:
    """Hidden states, and the new keys and values of each layer, of one class's `forward`."""
    hidden = kind.forward(stack, embeds, positions)
    return [hidden, *(tensor[torch.arange(len(embeds)), :, positions] for tensor in cache_of(stack))]


def check(stack: OverlappedStack, positions: Tensor) -> None:
    embeds = torch.randn(len(positions), stack.sizes.hidden).bfloat16()
    expected = results(stack, BatchedStack, embeds, positions)
    found = results(stack, OverlappedStack, embeds, positions)
    assert difference_of(found, expected, ROUNDINGS) == ""
    tokens = torch.randperm(len(positions))
    assert torch.equal(stack.forward(embeds[tokens.argsort()], positions, tokens=tokens), found[0])


FAULTS = {
    "no residual": ("arguments.residual[quad]);", "uint2{});"),
    "weights of another tile": ("input, tile * TILE_GROUPS, here);", "input, 0, here);"),
    "x of another part": ("shared.x_read, part * M::INPUTS,", "shared.x_read, 0,"),
    "sums of one part too few": ("for (int i = 1; i < SPLITS; ++i)", "for (int i = 2; i < SPLITS; ++i)"),
    "ups for gates": ("silu(round_to_bf16(of_part[of_gate]))", "silu(round_to_bf16(of_part[of_gate + 2]))"),
    "one head's queries for both": ("shared.own[r % GROUP])", "shared.own[0])"),
    "one head's sums for both": ("shared.sum[i][head][dimension]", "shared.sum[i][0][dimension]"),
    "positions of another warp": ("copy_tile(warp + i * ATTENTION_WARPS, i);", "copy_tile(i * ATTENTION_WARPS, i);"),
    "past the end": ("score[i] = at < position ?", "score[i] = true ?"),
    "no RoPE": ("if (warp <= GROUP) {", "if (warp < 0) {"),
    "one weight of the norm for all": ("arguments.weight[threadIdx.x];", "arguments.weight[0];"),
}


# ---- On a CPU


def encode_tensor_map(function: str, buffer: Any, *arguments: Any) -> None:
    """In place of the driver: what EncodedTensorMap of tests/gpu_on_cpu.h has."""
    assert function == "cuTensorMapEncodeTiled"
    _, rank, address, sizes, strides, box, *_ = arguments
    assert (rank, len(sizes), len(strides), len(box)) == (4, 4, 3, 4)
    fields = (ctypes.c_uint64 * 12)(address.value, *sizes, *strides, *box)
    ctypes.memmove(buffer, fields, ctypes.sizeof(fields))


@pytest.fixture
def stack_on_cpu(monkeypatch, tmp_path) -> Callable[..., OverlappedStack]:
    """stack_on_cpu(rows, (right, wrong), ...) -> on fibers, of kernels with these faults"""
    torch.manual_seed(0)
    # Fewer stages than gate_up has steps, and not the same number
    tilings = Tiling(128, 3, 2), Tiling(64, 3, 2), Tiling(96, 3, 2, parts=1), Tiling(64, 3, 2)

    def make(rows: int, *faults: tuple[str, str]) -> OverlappedStack:
        def compile(subject: Subject) -> tuple[SimpleNamespace, CpuKernels]:
            sizes = overlapped_stack.kernel_sizes(subject)
            source = SOURCE.complete(sizes, changed_source(overlapped_stack, *faults))
            return sizes, CpuKernels(source, tmp_path, overlapped_stack.KERNELS, OPTIMIZED)

        def compile_others(model: Any) -> tuple[SimpleNamespace, CpuKernels]:
            sizes = batched.kernel_sizes(model)
            return sizes, CpuKernels(batched.SOURCE.complete(sizes), tmp_path)

        monkeypatch.setattr(overlapped_stack, "TILINGS", {(SMALL["hidden_size"], max(rows, 64)): tilings})
        monkeypatch.setattr(SOURCE, "compile", compile)
        monkeypatch.setattr(batched.SOURCE, "compile", compile_others)
        with torch.no_grad():
            return some_stack(random_talker(num_hidden_layers=2, **SMALL), rows)

    monkeypatch.setattr(nvrtc, "call_driver", encode_tensor_map)
    return make


@needs_compiler
@pytest.mark.parametrize("rows", [32, *slow(64, 128)])
def test_it_computes_the_same_on_a_cpu(rows, stack_on_cpu):
    stack = stack_on_cpu(rows)
    before = [tensor.clone() for tensor in cache_of(stack)]
    assert stack.why_wrong() == ""
    assert all(map(torch.equal, before, cache_of(stack)))
    positions = torch.randint(LENGTH, (rows,))
    positions[:4] = torch.tensor([0, 1, 16, LENGTH - 1])
    check(stack, positions)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_on_a_cpu(fault, stack_on_cpu):
    reason = stack_on_cpu(32, FAULTS[fault]).why_wrong()
    print(reason)
    assert "times their size away" in reason


# ---- On a GPU


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    torch.manual_seed(0)
    with torch.device("cuda", 0) as device, torch.no_grad():
        yield device


@pytest.fixture(params=[1024, 2048])
def talker(gpu, request) -> Any:
    return random_talker(num_hidden_layers=3, hidden_size=request.param, intermediate_size=3 * request.param)


@on_gpu
@pytest.mark.parametrize("length", [SHORT_LENGTH, LENGTH])
@pytest.mark.parametrize("rows", overlapped_stack.ROWS)
def test_it_computes_what_the_other_kernels_compute(rows, length, talker):
    """At any positions, several times over, the first and the last among them; and each replay has the same bits."""
    stack = some_stack(talker, rows, length)
    assert stack.why_wrong() == ""
    embeds = torch.randn(rows, stack.sizes.hidden).bfloat16()
    positions = torch.zeros(rows, dtype=torch.long)
    hidden = torch.empty_like(embeds)
    replay = GraphPool(embeds.device).capture(lambda: hidden.copy_(stack.forward(embeds, positions)))
    for highest in (1, 2, 17, 100, LENGTH, LENGTH):
        positions.copy_(torch.randint(min(highest, length), (rows,)))
        check(stack, positions)
        bits = stack.forward(embeds, positions)
        for _ in range(10):
            replay()
            assert torch.equal(hidden, bits)


@on_gpu
def test_its_test_leaves_the_cache_as_it_was(talker):
    stack = some_stack(talker, 32)
    before = [tensor.clone() for tensor in cache_of(stack)]
    assert stack.why_wrong() == ""
    assert all(map(torch.equal, before, cache_of(stack)))


@on_gpu
def test_a_fault_is_found(talker):
    stack = some_stack(talker, 64)
    for name, fault in FAULTS.items():
        stack.own_kernels = SOURCE.load(stack.own_sizes, stack.device, changed_source(overlapped_stack, fault))
        reason = stack.why_wrong()
        print(f"{name}: {reason}")
        assert "times their size away" in reason, name
