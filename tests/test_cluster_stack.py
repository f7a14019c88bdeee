"""The kernel for 32 and 64 rows: where it is used, and, on a GPU, that it computes what the kernels of batched.cu
compute, that its test at load finds a kernel with a fault, and that a block that falls silent stops nobody for long."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_on_cpu import changed_source
from helpers import on_gpu
from torch import Tensor

from cudagraph_talker import GraphPool, static_cache
from qwen3_tts_cuda_graphs.bench.random_checkpoint import PREDICTOR, TALKER
from qwen3_tts_cuda_graphs.fast import batched, cluster_stack
from qwen3_tts_cuda_graphs.fast.batched import BatchedStack
from qwen3_tts_cuda_graphs.fast.cluster_stack import SOURCE, ClusterStack, Subject, difference_of, make_stack
from qwen3_tts_cuda_graphs.fast.layers import replace_layers

# isort: split
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSTalkerConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration

LAYERS = 3
LENGTHS = {"predictor": 16, "talker": 256}  # of the cache
ROUNDINGS = 0.02  # how far results may be from those of the other kernels: their sums have another order


# ---- Where it is used


def unmet(major: int = 9, processors: int = 132, rows: int = 64, **sizes: int) -> str:
    config = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8) | sizes
    model = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(**config))
    gpu = SimpleNamespace(major=major, minor=0, multi_processor_count=processors)
    with (
        mock.patch.object(batched, "needs_of", lambda _: {}),
        mock.patch("torch.cuda.get_device_properties", lambda _: gpu),
    ):
        return SOURCE.unmet(Subject(model, rows, 2048))


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
        assert make_stack("model", keys, keys, 64, 128, may_stop=True) == ("model", keys, keys, 128)
        why_wrong.assert_called_once()
        assert str(error) in caplog.text
        assert make_stack("model", keys, keys, 64, 128, may_stop=False)[-1] == 128
        why_wrong.assert_called_once()  # not even tried


# ---- On a GPU


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    torch.manual_seed(0)
    with torch.device("cuda", 0) as device, torch.no_grad():
        yield device


@pytest.fixture
def talker(gpu) -> Any:
    """Upstream's talker and predictor with the published widths, few layers and random weights."""
    few = dict(num_hidden_layers=LAYERS)
    sizes = dict(TALKER, hidden_size=1024, intermediate_size=3072, text_vocab_size=8, text_hidden_size=16, **few)
    config = Qwen3TTSTalkerConfig(code_predictor_config=PREDICTOR | few, **sizes)
    talker = Qwen3TTSTalkerForConditionalGeneration(config).eval().bfloat16()
    for name, parameter in talker.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        elif parameter.dim() == 2:
            parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
    replace_layers(talker.requires_grad_(False), max(LENGTHS.values()))
    return talker


def some_stack(talker: Any, which: str, rows: int) -> ClusterStack:
    """Of the talker or of the predictor, over a cache in which every position has something."""
    model = talker.model if which == "talker" else talker.code_predictor.model
    keys, values = static_cache(model.config, rows, LENGTHS[which], model.dtype, model.device)
    for tensor in (*keys, *values):
        tensor.normal_()
    return ClusterStack(model, keys, values, rows, 2 * rows)


def results(stack: ClusterStack, kind: type, embeds: Tensor, positions: Tensor) -> list[Tensor]:
    """Hidden states, and the new keys and values of each layer, of one class's `forward`."""
    hidden = kind.forward(stack, embeds, positions)
    tensors = [tensor for layer in stack.layers for tensor in (layer.keys, layer.values)]
    return [hidden, *(tensor[torch.arange(len(embeds)), :, positions] for tensor in tensors)]


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
        for _ in range(10):
            replay()
            assert torch.equal(hidden, bits)
    assert stack.why_failed() == ""


@on_gpu
def test_its_test_leaves_the_cache_as_it_was(talker):
    stack = some_stack(talker, "talker", 32)
    before = [tensor.clone() for layer in stack.layers for tensor in (layer.keys, layer.values)]
    assert stack.why_wrong() == ""
    assert all(map(torch.equal, before, [tensor for layer in stack.layers for tensor in (layer.keys, layer.values)]))


FAULTS = {
    "the last layer left out": ("for (int i = 0; i < 4 * LAYERS; ++i)", "for (int i = 0; i < 4 * LAYERS - 4; ++i)"),
    "the norm of the other product": (
        "work.index == QKV ? layer.input_norm : layer.post_norm",
        "work.index == QKV ? layer.post_norm : layer.input_norm",
    ),
    "no residual": ("v = add(v, hidden);", "v = add(v, uint4{});"),
    "weights of another slice": ("(work.rank * work.chunks + i) * CHUNK", "(work.rank * work.chunks) * CHUNK"),
    "another row's attention": ("const int row = pair / KV_HEADS;", "const int row = pair / KV_HEADS ^ 1;"),
    "sums of one block too few": ("if (part < 4 || work.is_narrow)", "if (part < 3 || work.is_narrow)"),
}


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
    """All blocks leave when their time is over, this launch and the next one, and the host learns why."""
    stack = with_fault(
        some_stack(talker, "predictor", 64),
        (
            "        store_relaxed(result + place.index, v);",
            "        if (blockIdx.x != 3) store_relaxed(result + place.index, v);",
        ),
    )
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        assert "a thread block has waited for another one" in stack.why_wrong()
        assert time.perf_counter() - start < 10
