"""The kernels for many rows, compiled for and run on a CPU, compute what the model's own modules compute: each kernel
alone what fast/batched_reference.py says, all of them the model's forward, and the choices are those of
cudagraph_talker.py. A kernel with a subtle fault is detected."""

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
    changed_source,
    faults_of,
    needs_compiler,
)
from helpers import ExactProducts, on_gpu, random_talker
from torch import Tensor

from cudagraph_talker import GraphPool, RowCache, Rows, Sampling, additive_mask, round_up, sample, static_cache
from qwen3_tts_cuda_graphs.bench.random_checkpoint import PREDICTOR, TALKER
from qwen3_tts_cuda_graphs.fast import batched, frame_graphs, graph_set
from qwen3_tts_cuda_graphs.fast import batched_reference as reference
from qwen3_tts_cuda_graphs.fast import layer_kernels_reference as layer_reference
from qwen3_tts_cuda_graphs.fast.batched import SOURCE, BatchedStack, kernel_sizes, product
from qwen3_tts_cuda_graphs.fast.frame_graphs import KernelGraphs
from qwen3_tts_cuda_graphs.fast.kernels import kernel_arguments
from qwen3_tts_cuda_graphs.fast.layers import replace_layers
from qwen3_tts_cuda_graphs.fast.rows import SharedRows, view_of
from qwen3_tts_cuda_graphs.speech.prefill import PrefillGraph, PromptStack

# isort: split
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSTalkerConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration

LENGTH = round_up(200)  # of the cache: up to four splits
POSITIONS = torch.tensor([100, 0, LENGTH - 1, 17, 1, 64, 63, 128])
SHORT_POSITIONS = torch.tensor([15, 0, 9, 8, 1, 7, 14, 4])
ROW_INDICES = torch.tensor([1, 0, 4, 3, 2, 7, 9, 8])
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def talker() -> Any:
    """Upstream's talker and predictor with the published widths but for the MLP's, few layers and random weights."""
    torch.manual_seed(0)
    return random_talker(hidden_size=1024, intermediate_size=512, num_hidden_layers=2, num_code_groups=4)


@pytest.fixture(scope="module")
def fused(talker) -> Any:
    fused = copy.deepcopy(talker)
    replace_layers(fused, LENGTH)
    return fused


@pytest.fixture(scope="module")
def kernels(talker, tmp_path_factory) -> CpuKernels:
    return CpuKernels(SOURCE.complete(kernel_sizes(talker.model)), tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def predictor_kernels(talker, tmp_path_factory) -> CpuKernels:
    sizes = kernel_sizes(talker.code_predictor.model)
    return CpuKernels(SOURCE.complete(sizes), tmp_path_factory.mktemp("predictor"))


def filled_cache(model: Any, row_count: int, length: int) -> Any:
    """A cache in which every position has something that would be heard."""
    keys, values = static_cache(model.config, row_count, length, model.dtype, model.device)
    for tensor in (*keys, *values):
        tensor.normal_()
    return SimpleNamespace(layers=[SimpleNamespace(keys=key, values=value) for key, value in zip(keys, values)])


def stack_of(model: Any, cache: Any, rows: int, kernels: Any = None) -> BatchedStack:
    keys, values = zip(*((layer.keys, layer.values) for layer in cache.layers))
    return BatchedStack(model, keys, values, rows, kernels)


def talker_stack(fused: Any, kernels: CpuKernels) -> BatchedStack:
    """For 10 rows, of which the tokens use 8."""
    return stack_of(fused.model, filled_cache(fused.model, 10, LENGTH), 10, kernels)


def positions_and_rows(stack: BatchedStack) -> tuple[Tensor, Tensor]:
    return POSITIONS.to(stack.device), ROW_INDICES.to(stack.device)


# ---- Each kernel. The checks are functions of the kernels, for wrong kernels to fail them.


def check_norms(stack: BatchedStack) -> None:
    scales = torch.tensor([1.0, 3e-3, 30.0])[:, None]  # epsilon counts for the small row
    x = (torch.randn(3, 1024) * scales).bfloat16()
    residual = (torch.randn(3, 1024) * scales).bfloat16()
    weight = stack.layers[0].post_norm
    assert_nearly_same(stack.norm(x, weight), layer_reference.norm(x, weight, EPSILON))
    total, normalized = stack.add_and_norm(x, residual, weight)
    expected_total, expected = layer_reference.add_and_norm(x, residual, weight, EPSILON)
    assert torch.equal(total, expected_total)
    assert_nearly_same(normalized, expected)
    partials = torch.stack([2 * x.float(), -0.25 * x.float(), -0.75 * x.float()])  # sums are exact
    total, from_partials = stack.add_and_norm(partials, residual, weight)
    assert torch.equal(total, expected_total) and torch.equal(from_partials, normalized)


def check_qk_norm_rope_store(stack: BatchedStack) -> None:
    layer = stack.layers[0]
    positions, row_indices = positions_and_rows(stack)
    qkv = torch.randn(8, 32, 128).bfloat16()
    qkv[0] *= 3e-3
    before = layer.keys.clone(), layer.values.clone()
    keys, values = (tensor.clone() for tensor in before)
    cos, sin = (table.view(-1, 128) for table in (stack.cos, stack.sin))
    norms = layer.q_norm, layer.k_norm
    rotated = reference.qk_norm_rope_store(qkv, *norms, cos, sin, positions, row_indices, keys, values, EPSILON)
    stored = qkv.clone()
    stack.qk_norm_rope_store(stored.view(8, -1), layer, positions, row_indices)
    assert_nearly_same(stored[:, :24], rotated)
    assert torch.equal(stored[:, 24:], qkv[:, 24:])
    assert torch.equal(layer.keys[row_indices, :, positions], stored[:, 16:24])
    assert torch.equal(layer.values, values)
    layer.keys[row_indices, :, positions] = before[0][row_indices, :, positions]
    assert torch.equal(layer.keys, before[0])  # nothing else was written


def check_attention(stack: BatchedStack, positions: Tensor = POSITIONS) -> None:
    """After qk_norm_rope_store what the reference says, and the same bits without it."""
    check_attention_in_splits(stack, positions)
    undivided = copy.copy(stack)
    undivided.splits = lambda count: (1, 64)
    check_attention_in_splits(undivided, positions)


def check_attention_in_splits(stack: BatchedStack, positions: Tensor) -> None:
    layer = stack.layers[0]
    all_positions, all_row_indices = positions.to(stack.device), ROW_INDICES.to(stack.device)
    for row, position in zip(all_row_indices, all_positions):  # not to be read before it is written
        layer.keys[row, :, position:] = torch.nan
        layer.values[row, :, position:] = torch.nan
    before = torch.stack([layer.keys, layer.values])
    for rows in (1, 3, 8):
        positions, row_indices = all_positions[:rows], all_row_indices[:rows]
        for _ in range(2):  # with what the first launch left behind, too
            qkv = torch.randn(rows, 32, 128).bfloat16()
            stored = qkv.clone()
            stack.qk_norm_rope_store(stored.view(rows, -1), layer, positions, row_indices)
            output = stack.attention(stored.view(rows, -1), layer, positions, row_indices, is_stored=True)
            expected = reference.attention(stored[:, :16], layer.keys, layer.values, positions, row_indices)
            assert_nearly_same(output, expected.view(rows, -1))

            cache = torch.stack([layer.keys, layer.values])
            layer.keys.copy_(before[0])
            layer.values.copy_(before[1])
            given = qkv.clone()
            assert torch.equal(stack.attention(given.view(rows, -1), layer, positions, row_indices), output)
            assert torch.equal(given, qkv)
            assert same_bits(torch.stack([layer.keys, layer.values]), cache)
            layer.keys.copy_(before[0])
            layer.values.copy_(before[1])
    assert not stack.finished_splits.any()


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Also where both are NaN"""
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


def check_short_attention(stack: BatchedStack) -> None:
    """The predictor's cache: a warp has a KV head."""
    short = copy.copy(stack)
    short.cache_length = 16
    short.layers = [copy.copy(stack.layers[0])]
    for name in ("keys", "values"):
        setattr(short.layers[0], name, getattr(stack.layers[0], name)[:, :, :16].clone())
    check_attention(short, SHORT_POSITIONS)


def check_silu_and_multiply(stack: BatchedStack) -> None:
    for rows in (1, 3):
        gate_up = (torch.randn(rows, 1024) * 4).bfloat16()
        assert_nearly_same(stack.silu_and_multiply(gate_up), layer_reference.silu_and_multiply(gate_up))


@needs_compiler
@pytest.mark.parametrize(
    "check",
    [check_norms, check_qk_norm_rope_store, check_attention, check_short_attention, check_silu_and_multiply],
    ids=lambda it: it.__name__,
)
def test_each_kernel_computes_what_the_reference_says(check, fused, kernels):
    check(talker_stack(fused, kernels))


# ---- All layers


def forward_of_model(model: Any, embeds: Tensor, cache: Any, position: int) -> Tensor:
    """Upstream's own forward for one row at one position. (H) -> (H)"""
    keys, values = ([getattr(layer, name) for layer in cache.layers] for name in ("keys", "values"))
    visible = torch.arange(keys[0].shape[2]) <= position
    mask = additive_mask(visible, model.dtype)[None, None, None]
    return model(
        inputs_embeds=embeds[None, None].to(model.dtype),
        attention_mask=mask,
        position_ids=torch.tensor([[position]]),
        cache_position=torch.tensor([position]),
        past_key_values=RowCache(keys, values, torch.tensor([[position]]), keys[0].shape[2]),
    ).last_hidden_state[0, 0]


def row_of(cache: Any, row: int, dtype: torch.dtype) -> Any:
    one = copy.deepcopy(cache)
    for layer in one.layers:
        layer.keys = layer.keys[row : row + 1].to(dtype)
        layer.values = layer.values[row : row + 1].to(dtype)
    return one


def compare_with_upstream(talker: Any, fused: Any, kernels: CpuKernels | None) -> None:
    """Hidden states and cache are as near to a float32 run of the same weights as upstream's bfloat16 forward.

    The errors of 12 rows are summed, for the hidden states and for each layer's keys and values. With exact products,
    nine of ten rows are upstream's bit by bit, and the ratio of the errors has a standard deviation of 0.004. If every
    row had roundings of its own it would be 0.017: even then, a false alarm is rarer than one in ten million.
    """
    with torch.no_grad(), ExactProducts():
        errors = sum(squared_errors(talker, fused, kernels, rows) for rows in (1, 3, 8))
    ours, upstreams = errors.sqrt().unbind(1)
    assert (ours < 1.1 * upstreams).all()


def squared_errors(talker: Any, fused: Any, kernels: CpuKernels | None, rows: int) -> Tensor:
    """(tensors, 2): hidden states, keys and values of each layer; our error and upstream's, summed over the rows"""
    cache = filled_cache(fused.model, 10, LENGTH)
    stack = stack_of(fused.model, cache, rows, kernels)
    positions, row_indices = (tensor[:rows] for tensor in positions_and_rows(stack))
    has_own_rows = rows == 3  # the others might share them, for all that `forward` knows
    row_indices = stack.row_indices if has_own_rows else row_indices
    embeds = torch.randn(rows, 1024).bfloat16()
    before = copy.deepcopy((embeds, cache))

    expected = []  # of each row, in float32 and in bfloat16: hidden state, and new keys and values of each layer
    exact = copy.deepcopy(talker.model).float()
    for row in range(rows):
        for model in (exact, talker.model):
            own = row_of(cache, int(row_indices[row]), model.dtype)
            results = [forward_of_model(model, embeds[row], own, int(positions[row]))]
            for layer in own.layers:
                results += [layer.keys[0, :, positions[row]], layer.values[0, :, positions[row]]]
            expected.append([result.float() for result in results])

    hidden = stack.forward(embeds, positions, None if has_own_rows else row_indices)
    errors = []
    for row in range(rows):
        ours = [hidden[row]]
        for layer in cache.layers:
            ours += [layer.keys[row_indices[row], :, positions[row]], layer.values[row_indices[row], :, positions[row]]]
        for x, y, z in zip(ours, *expected[2 * row : 2 * row + 2], strict=True):
            errors.append(torch.stack([(x.float() - y).square().sum(), (z - y).square().sum()]))

    # Nothing else was written.
    assert torch.equal(embeds, before[0])
    for layer, old in zip(cache.layers, before[1].layers):
        for tensor, old_tensor in ((layer.keys, old.keys), (layer.values, old.values)):
            tensor[row_indices, :, positions] = old_tensor[row_indices, :, positions]
            assert torch.equal(tensor, old_tensor)
    return torch.stack(errors).unflatten(0, (rows, -1)).sum(0)


PARTIALS = [(8, 0), (32, 4), (128, 4), (256, 2), (300, 0)]  # rows, partial sums


@pytest.mark.parametrize("rows, partials", PARTIALS)
def test_the_partial_sums_of_a_product(rows, partials, device="cpu"):
    """Their sum is as near to the exact product as float32 is, and rounds to what one product in bfloat16 gives."""
    x, weight = torch.randn(rows, 3072).bfloat16().to(device), torch.randn(1024, 3072).bfloat16().to(device)
    exact = x.double() @ weight.double().T
    ours = product(x, weight)
    if partials:
        assert ours.dtype == torch.float32 and ours.shape == (partials, rows, 1024)
        assert (ours.double().sum(0) - exact).abs().max() < 0.001
    else:
        assert torch.equal(ours, F.linear(x, weight))


@needs_compiler
@pytest.mark.parametrize("tokens_to_split", [batched.TOKENS_TO_SPLIT, range(1, 257)], ids=["", "split products"])
def test_rows_compute_upstreams_forward(talker, fused, kernels, tokens_to_split):
    with mock.patch.object(batched, "TOKENS_TO_SPLIT", tokens_to_split):
        compare_with_upstream(talker, fused, kernels)


@needs_compiler
def test_a_layer_with_a_wrong_norm_is_detected(talker, kernels):
    """A norm that is too large by 1% makes the error of the hidden states 1.6 times upstream's."""
    wrong = copy.deepcopy(talker)
    wrong.model.layers[1].post_attention_layernorm.weight.data *= 1.01
    replace_layers(wrong, LENGTH)
    with pytest.raises(AssertionError):
        compare_with_upstream(talker, wrong, kernels)


@needs_compiler
@torch.no_grad()
def test_two_positions_of_a_slot_can_be_two_rows(fused, predictor_kernels):
    """The predictor's first two positions, which do not depend on each other's codes, are one call of 2 B rows.

    With exact products, both give the same bits.
    """
    model = fused.code_predictor.model
    caches = [filled_cache(model, 3, 16) for _ in range(2)]
    embeds = torch.randn(6, 1024).bfloat16()
    at_once = stack_of(model, caches[0], 6, predictor_kernels)
    in_turn = stack_of(model, caches[1], 3, predictor_kernels)
    row_indices = torch.arange(3).repeat(2)
    with ExactProducts():
        hidden = at_once.forward(embeds, torch.tensor([0, 0, 0, 1, 1, 1]), row_indices)[3:]
        in_turn.forward(embeds[:3], torch.zeros(3, dtype=torch.long))
        expected = in_turn.forward(embeds[3:], torch.ones(3, dtype=torch.long))
    assert torch.equal(hidden, expected)
    for one, other in zip(caches[0].layers, caches[1].layers):
        assert torch.equal(one.keys[:, :, :2], other.keys[:, :, :2])


@needs_compiler
@pytest.mark.parametrize("with_sdpa", [False, True])
@pytest.mark.parametrize("lengths", [[9], [5, 9]])
@torch.no_grad()
def test_positions_of_prompts_can_be_rows(lengths, with_sdpa, fused, kernels):
    """A prefill of one or more prompts: what SDPA and the modules compute, but for rounding."""
    all_rows = SharedRows(fused.config, 3, 32, torch.bfloat16, torch.device("cpu"))
    graph = PrefillGraph(fused, all_rows, len(lengths), 16, with_kernels=False)
    graph.prefixes.normal_()
    graph.row_indices.copy_(torch.arange(len(lengths)) + 1)
    caches = []
    kind = functools.partial(PromptStack, len(lengths)) if with_sdpa else BatchedStack
    for stack in (None, kind(fused.model, all_rows.keys, all_rows.values, 16 * len(lengths), kernels)):
        graph.kernels = stack
        all_rows.whole_cache.zero_()
        with ExactProducts():
            graph.step()
        caches.append(all_rows.whole_cache.clone())
    expected, ours = caches
    for row, length in enumerate(lengths, start=1):
        error, scale = (cache[row, ..., :length, :].float() for cache in (ours - expected, expected))
        assert (error.norm(dim=-1) < 0.01 * scale.norm(dim=-1)).all()
    assert (ours[0] == 0).all() and (ours[..., 16:, :] == 0).all()


def test_splits_fit_the_batch_and_the_cache(fused):
    """One row is spread over the whole GPU, 256 rows fill it as they are, and 16 positions are never split. From 32
    rows on a split has 256 positions."""
    talker = SimpleNamespace(sizes=kernel_sizes(fused.model), cache_length=2048)
    predictor = SimpleNamespace(sizes=talker.sizes, cache_length=16)
    splits = [BatchedStack.splits(talker, rows) for rows in (1, 8, 16, 31, 32, 64, 256)]
    assert splits == [(32, 64), (32, 64), (16, 64), (9, 64), (8, 256), (4, 256), (1, 256)]
    assert BatchedStack.splits(predictor, 1) == (1, 64)


# ---- Choices


def row_settings(vocab: int, rows: int) -> Sampling:
    """Settings of every kind, a row each."""
    kinds = []
    for temperature in (1e-3, 0.9, 20.0):
        for top_k in (1, 2, 50, None):
            for top_p in (1.0, 0.9, 0.2, 0.0):
                kinds.append((True, temperature, top_k, top_p))
    greedy = (False, 0.9, 50, 0.2)
    order = torch.randperm(len(kinds)).tolist()  # neighbours have little in common
    settings = Sampling(vocab, rows)
    for row in range(rows):
        view_of(settings, slice(row, row + 1)).set(*greedy if row % 9 == 0 else kinds[order[row % len(kinds)]])
    return settings


def some_logits(rows: int, vocab: int) -> Tensor:
    """Of a trained model's spread. A third of the rows are full of ties; the best in every sixth are 0 and -0."""
    logits = torch.randn(rows, vocab) * 4
    logits[::3] = logits[::3].round()
    logits[::6] = logits[::6].clamp(max=0)
    return logits.bfloat16()


def stable_sort() -> AbstractContextManager:
    """Equal scores in the order of their tokens. On a CPU torch's sort leaves them in any order if not asked."""
    sort = torch.Tensor.sort
    return mock.patch.object(torch.Tensor, "sort", lambda tensor, dim, **_: sort(tensor, dim=dim, stable=True))


def check_sample(stack: BatchedStack, vocab: int = 3072, rows: int = 96) -> None:
    sampling = row_settings(vocab, rows)
    logits = some_logits(rows, vocab)
    noise = torch.empty(rows, 2, vocab).exponential_()[:, 1]  # with a stride, as one draw of several
    noise[::4] = noise[::4].ceil()  # equal weights with equal noise
    with stable_sort():
        expected = sample(logits.float(), sampling, noise)
    assert torch.equal(stack.sample_rows(logits, sampling, noise), expected)
    assert len(expected.unique()) > rows / 2


def check_choose(stack: BatchedStack, vocab: int = 3072, rows: int = 96) -> None:
    sampling = row_settings(vocab, rows)
    logits = some_logits(rows, vocab)
    noise = torch.empty(rows, vocab).exponential_()
    state = SimpleNamespace(
        hidden=torch.zeros(rows, 1, 1),
        sampling=sampling,
        noise=noise[:, None],
        repetition_penalty=torch.tensor([1.0, 1.05, 1.5, 0.8]).repeat(rows)[:rows, None].contiguous(),
        suppressed=torch.rand(rows, vocab) < 0.3,
        end_token=torch.randint(vocab, (rows, 1)),
        min_tokens=torch.full((rows, 1), 2),
        frame=torch.arange(rows)[:, None] % 4 - 1,  # the end token is too early in frames 0 and 1
        seen=torch.rand(rows, vocab) < 0.5,
        token=torch.zeros(rows, 1, dtype=torch.long),
        ended=torch.rand(rows) < 0.1,
        advance=torch.arange(rows) % 5 > 0,
    )
    logits.scatter_(1, state.end_token, 30)  # it would be chosen wherever it may be
    state.suppressed.scatter_(1, state.end_token, (torch.arange(rows) % 3 == 0)[:, None])
    names = ("token", "frame", "seen", "ended")
    expected = copy.deepcopy(state)
    with stable_sort():
        expected.frame += 1
        Rows.choose_token(expected, lambda hidden: logits)
    for name in names:  # rows that may not advance stay as they were
        getattr(expected, name)[~state.advance] = getattr(state, name)[~state.advance]

    stack.choose_rows(logits, state, sampling, noise)
    for name in names:
        assert torch.equal(getattr(state, name), getattr(expected, name)), name
    assert 10 < state.ended.sum() < rows - 10


@needs_compiler
def test_talker_chooses_as_torch_does(fused, kernels):
    """With the same noise the same token in every row: ties, both zeros, all of the settings; and what follows."""
    stack = talker_stack(fused, kernels)
    check_sample(stack, rows=240)
    check_choose(stack, rows=240)


@needs_compiler
def test_predictor_chooses_as_torch_does(fused, predictor_kernels):
    cache = filled_cache(fused.code_predictor.model, 1, 16)
    stack = stack_of(fused.code_predictor.model, cache, 1, predictor_kernels)
    check_sample(stack, vocab=2048, rows=240)


# ---- Faults are detected

Check = Callable[[BatchedStack], None]
FAULTS: dict[Callable, dict[str, tuple[str, str]]] = {
    check_norms: {
        "a norm without the addition": (
            "arguments.normalized[vector] = normalize(sum,",
            "arguments.normalized[vector] = normalize(arguments.x[vector],",
        ),
        "a partial sum that is not added": ("partial < arguments.count", "partial < arguments.count - 1"),
        "partial sums of another token": ("partial * arguments.partial_vectors", "partial * HIDDEN_VECTORS"),
        "a norm rounded once": (
            "return multiply(pack(y), weight);",
            "const auto w = unpack(weight);"
            "for (int i = 0; i < sizeof(Vector) / 2; ++i) { y.v[i] *= w.v[i]; }"
            "return pack(y);",
        ),
    },
    check_qk_norm_rope_store: {
        "the position of another token": (
            "const u64 position = arguments.positions[token]",
            "const u64 position = arguments.positions[token ^ 1]",
        ),
        "the norm of queries for keys": (
            "is_query ? arguments.q_norm[lane] : arguments.k_norm[lane]",
            "arguments.q_norm[lane]",
        ),
        "RoPE of neighbours": ("pair, LANES / 2)", "pair, LANES / 4)"),
        "another row": ("const u64 row = arguments.row_indices[token]", "const u64 row = token"),
    },
    check_attention: {
        "one key too few": ("split_length, own_position);", "split_length, own_position - 1);"),
        "one key too many": ("split_length, own_position);", "split_length, own_position + 1);"),
        "the last key twice": ("+ 8 * i + r < end ?", "+ 8 * i + r <= end ?"),
        "the keys of the loop before": ("load_keys(k, next +", "load_keys(k, next + 0 *"),
        "the values of the loop before": ("load_values(v, next +", "load_values(v, next + 0 *"),
        "the weights of other positions": ("row_of_scores + g / 2", "(row_of_scores ^ 1) + g / 2"),
        "the scores of one query head for all": ("r == g ? of_head", "r < GROUP ? of_head"),
        "the queries of other KV heads": ("kv_head * GROUP + i :", "i * KV_HEADS + kv_head :"),
        "the cache of another row": ("row = input.row_indices[token]", "row = token"),
        "the own position in every split": ("split == splits_in_use - 1 && warp == 0", "warp == 0"),
        "the own position in every warp": ("split == splits_in_use - 1 && warp == 0", "split == splits_in_use - 1"),
        "the own position counted in every lane": ("= r == 0;", "= 1;"),
        "the own key not stored": ("= own_key;\n", "= token.keys[0];\n"),
        "the own key normalized as a query": ("norm_and_rope<16>(own_key, k_norm", "norm_and_rope<16>(own_key, q_norm"),
        "the own key for its value": ("(i - GROUP) * KV_HEADS", "0 * KV_HEADS"),
        "RoPE of the position before": (
            "input.cos + at_position",
            "input.cos + max(0, own_position - 1) * 16",
        ),
        "norm and RoPE once more": ("if (token.is_stored)", "if (false)"),
        "sums not rescaled": ("value *= of_head;", "value *= 1;"),
        "one half-warp for all positions": ("value += __shfl_xor_sync", "value += 0 * __shfl_xor_sync"),
        "one split forgotten": ("const u64 index = first_split + s;", "const u64 index = first_split + max(s, 1);"),
        "merged one block too early": ("== splits_in_use - 1;\n", "== splits_in_use - 2;\n"),
    },
    check_short_attention: {
        "one key too few of a few": ("int end = own_position;", "int end = own_position - 1;"),
        "one KV head for all warps": ("+ warp_index() / SHARING_WARPS;", "+ 0;"),
        "one half-warp for all query heads": ("threadIdx.x / 16 % 2 == g % 2", "threadIdx.x / 16 % 2 == 0 && g == 0"),
    },
    check_silu_and_multiply: {
        "sigmoid for silu": ("return x / (1 + expf(-x));", "return 1 / (1 + expf(-x));"),
        "silu not rounded": (
            "arguments.inner[vector] = multiply(pack(gate), up);",
            "for (int i = 0; i < 8; ++i) { gate.v[i] *= unpack(up).v[i]; } arguments.inner[vector] = pack(gate);",
        ),
    },
    check_sample: {
        "top-k off by one": ("> sampling.topk_rank", ">= sampling.topk_rank"),
        "top-p before top-k": ("from_ordered_bits(ordered[i]) < threshold_score ? 0", "false ? 0"),
        "ties at the k-th score dropped": (
            "not_above += ordered[i] <= chosen_score",
            "not_above += ordered[i] < chosen_score",
        ),
        "top-p off by one": ("rank(i) < first_kept ? 0", "rank(i) <= first_kept ? 0"),
        "noise of a greedy row": ("greedy ? 1 :", "false ? 1 :"),
        "not the lowest of equals": (
            "kept == choice.ratio && rank(i) < choice.rank",
            "kept == choice.ratio && rank(i) > choice.rank",
        ),
        "two zeros": ("__float_as_uint(x + 0.0f)", "__float_as_uint(x)"),
        "the settings of another row": ("arguments.temperature[row]", "arguments.temperature[max(0, row - 1)]"),
    },
    check_choose: {
        "the penalty on the wrong sign": (
            "score < 0 ? score * repetition_penalty",
            "score > 0 ? score * repetition_penalty",
        ),
        "the end one frame too early": ("const bool too_early = frame <", "const bool too_early = frame + 1 <"),
        "a row that advances when it may not": ("if (!arguments.advance[row]) {", "if (false) {"),
    },
}


INDEPENDENT = [
    (check_norms, check_qk_norm_rope_store, check_attention, check_short_attention),
    (check_silu_and_multiply,),
    (check_sample, check_choose),
]


@pytest.fixture(scope="module")
def wrong_kernels(fused, tmp_path_factory) -> Callable[[str], CpuKernels]:
    def compile(source: str) -> CpuKernels:
        return CpuKernels(SOURCE.complete(kernel_sizes(fused.model), source), tmp_path_factory.mktemp("wrong"))

    return gpu_on_cpu.wrong_kernels(batched, FAULTS, INDEPENDENT, compile)


@needs_compiler
@pytest.mark.parametrize("check, fault", faults_of(FAULTS))
def test_wrong_kernel_is_detected(check, fault, fused, wrong_kernels):
    stack = talker_stack(fused, wrong_kernels(fault))
    with pytest.raises(AssertionError):
        check(stack)


@needs_compiler
def test_wrong_epsilon_is_detected(fused, tmp_path):
    """Ten times the epsilon."""
    sizes = kernel_sizes(fused.model)
    sizes.epsilon = "1e-5f"
    stack = talker_stack(fused, CpuKernels(SOURCE.complete(sizes), tmp_path))
    for check in (check_norms, check_qk_norm_rope_store):
        with pytest.raises(AssertionError):
            check(stack)


# ---- What is refused


def changed(model: Any, **sizes: Any) -> SimpleNamespace:
    config = copy.deepcopy(model.config)
    for name, value in sizes.items():
        setattr(config, name, value)
    return SimpleNamespace(config=config, dtype=model.dtype, layers=model.layers, rotary_emb=model.rotary_emb)


def test_unsupported_models_are_refused_in_words(talker, fused):
    assert SOURCE.unmet(fused.model) == "" == SOURCE.unmet(fused.code_predictor.model)
    assert "NVIDIA GPU" in SOURCE.why_not(fused.model)
    assert "replace_layers" in SOURCE.unmet(talker.model)
    assert "bfloat16" in SOURCE.unmet(copy.deepcopy(fused.model).float())
    for sizes, message in (
        (dict(head_dim=64), "128 dimensions, the model's have 64"),
        (dict(num_attention_heads=64), "query heads per KV head"),
        (dict(num_attention_heads=9, num_key_value_heads=9), "multiple of 8 heads"),
        (dict(hidden_size=1000), "multiple of 256 up to 8192, not 1000"),
        (dict(intermediate_size=100), "multiple of 8, not 100"),
        (dict(vocab_size=8192), "multiple of 256 up to 4096, not 8192"),
        (dict(hidden_act="gelu"), "silu between gate and down, not gelu"),
        (dict(layer_types=["sliding_attention"]), "full attention"),
    ):
        assert message in SOURCE.unmet(changed(fused.model, **sizes))


def test_tensors_of_another_type_are_refused(fused):
    """A pointer has no type: int32 positions or a transposed matrix would be read as something else."""
    never = SimpleNamespace(launch=None)
    stack = stack_of(fused.model, filled_cache(fused.model, 1, 16), 1, never)
    embeds = torch.zeros(1, 1024, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="reads x as torch.bfloat16, it is torch.float32"):
        stack.norm(embeds.float(), stack.final_norm)
    with pytest.raises(ValueError, match="reads positions as torch.int64, it is torch.int32"):
        qkv = torch.zeros(1, 4096, dtype=torch.bfloat16)
        stack.attention(qkv, stack.layers[0], torch.zeros(1, dtype=torch.int32), stack.row_indices)
    with pytest.raises(ValueError, match="2 embeddings, 2 positions, 1 rows: they must be equal, and at most 1"):
        stack.forward(embeds.repeat(2, 1), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="x does not begin at a multiple"):
        stack.norm(torch.zeros(1025, dtype=torch.bfloat16)[1:][None], stack.final_norm)
    with pytest.raises(ValueError, match="x has strides"):
        stack.norm(torch.zeros(1024, 2, dtype=torch.bfloat16).T, stack.final_norm)
    noise = torch.zeros(2, 2, 4)[:, 1]
    fields = dict(noise=torch.float32, noise_stride=int)
    assert kernel_arguments("sample", fields, dict(noise=noise, noise_stride=8)) == [noise.data_ptr(), 8]
    with pytest.raises(ValueError, match="noise has strides"):  # a kernel that does not know how far rows are apart
        kernel_arguments("decode_step", dict(noise=torch.float32), dict(noise=noise))


@needs_compiler
@pytest.mark.parametrize(
    "original, changed, message",
    [
        ("    u64 splits; ", "    u64 more;\n    u64 splits; ", "Attention.splits is not field 11"),
        ("    uint4 *qkv; ", "    u32 more[4];\n    uint4 *qkv; ", "QkNormRopeStore.qkv is not field 0"),
        ("    bool *ended; ", "    bool *ended;\n    int *more; ", "Choose does not have the 16 fields"),
    ],
    ids=["inserted", "another size", "at the end"],
)
def test_struct_mismatch_does_not_compile(original, changed, message, fused, tmp_path):
    """A struct whose fields are not those of batched.py is a compile error, not a wrong pointer."""
    source = changed_source(batched, (original, changed))
    with pytest.raises(RuntimeError, match=message):
        CpuKernels(SOURCE.complete(kernel_sizes(fused.model), source), tmp_path)


# ---- Compilation for GPUs


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_the_kernels_compile(architecture, fused, tmp_path):
    sizes = kernel_sizes(fused.model)
    sizes.hidden, sizes.inner = 2048, 6144
    assert_compiles_without_spills(SOURCE.complete(sizes), len(batched.KERNELS), architecture, tmp_path)


# ---- The same checks on a GPU


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    with torch.device("cuda", 0) as device:
        yield device


@pytest.fixture
def fused_on_gpu(talker, gpu) -> Any:
    fused = copy.deepcopy(talker).to(gpu)
    replace_layers(fused, LENGTH)
    return fused


@on_gpu
def test_kernels_compute_the_same_on_a_gpu(talker, fused_on_gpu, gpu):
    assert SOURCE.why_not(fused_on_gpu.model) == ""
    stack = talker_stack(fused_on_gpu, None)
    for check in (
        *(check_norms, check_qk_norm_rope_store, check_attention, check_short_attention),
        check_silu_and_multiply,
    ):
        check(stack)
    for case in PARTIALS:
        test_the_partial_sums_of_a_product(*case, gpu)
    check_sample(stack, rows=2400)
    check_choose(stack, rows=2400)
    compare_with_upstream(copy.deepcopy(talker).to(gpu), fused_on_gpu, None)


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_rows_of_any_length_attend_on_a_gpu(rows, fused_on_gpu):
    """All lengths up to 2,048 in one batch, several times over: the splits of a row meet in any order."""
    cache = filled_cache(fused_on_gpu.model, rows, 2048)
    replace_layers(fused_on_gpu, 2048)
    stack = stack_of(fused_on_gpu.model, cache, rows)
    layer = stack.layers[0]
    for _ in range(20):
        positions = torch.randint(2048, (rows,))
        qkv = torch.randn(rows, 32, 128).bfloat16()
        stored = qkv.clone()
        stack.qk_norm_rope_store(stored.view(rows, -1), layer, positions, stack.row_indices)
        expected = reference.attention(stored[:, :16], layer.keys, layer.values, positions, stack.row_indices)
        assert_nearly_same(
            stack.attention(qkv.view(rows, -1), layer, positions, stack.row_indices), expected.view(rows, -1)
        )
    assert not stack.finished_splits.any()


@on_gpu
@torch.no_grad()
def test_a_captured_position_equals_its_launches(fused_on_gpu, gpu):
    """A replay takes positions and embeddings from the static tensors, and gives what the launches give."""
    stack = talker_stack(fused_on_gpu, None)
    embeds = torch.randn(8, 1024).bfloat16()
    positions = torch.zeros(8, dtype=torch.long)
    hidden = torch.empty_like(embeds)
    replay = GraphPool(gpu).capture(lambda: hidden.copy_(stack.forward(embeds, positions)))
    for _ in range(3):
        embeds.normal_()
        positions.copy_(torch.randint(LENGTH, (8,)))
        replay()
        replayed = hidden.clone()
        assert torch.equal(replayed, stack.forward(embeds, positions))


# ---- A predictor that is narrower than the talker


def test_tables_are_projected_once_for_all_sizes(monkeypatch):
    """The largest frame is captured first; those of 1.7B take 69 MB."""
    made = []

    def make(_, rows: Any, like: Any) -> Any:
        graphs = SimpleNamespace(capture=lambda pool: graphs, waiting_launches=())
        made.append((len(rows), like))
        return graphs

    monkeypatch.setattr(graph_set, "graphs_without_megakernel", make)
    graphs = graph_set.GraphSet(SimpleNamespace(device=torch.device("cpu")), range(8), 8, fused=False)
    assert made == [(8, None), *((size, graphs.of(8)) for size in (4, 2, 1))]


@torch.no_grad()
def test_projected_embeddings_are_those_of_the_codes():
    """Each position of the predictor looks up what a projection would give it, and the talker gets the sum of all."""
    small = dict(num_hidden_layers=1, intermediate_size=64, num_code_groups=5)
    sizes = dict(TALKER, hidden_size=64, text_vocab_size=8, text_hidden_size=16, **small)
    config = Qwen3TTSTalkerConfig(code_predictor_config=PREDICTOR | small | dict(hidden_size=32), **sizes)
    talker = Qwen3TTSTalkerForConditionalGeneration(config).eval()
    rows = SharedRows(config, 3, 16, torch.float32, torch.device("cpu"))
    rows.hidden.normal_()
    given = []

    def forward(x: Tensor, positions: Tensor, row_indices: Any = None, tokens: Tensor | None = None) -> Tensor:
        given.append(x if tokens is None else x[tokens])
        return torch.zeros(len(positions), 32)

    codes = torch.arange(100, 112).view(4, 3, 1)
    next_codes = iter(codes)
    stack = SimpleNamespace(forward=forward, sample_rows=lambda *_: next(next_codes))
    with mock.patch.object(frame_graphs, "make_stack", lambda *_: stack):
        graphs = KernelGraphs(talker, rows)
    rows.token[:] = torch.tensor([[7], [8], [9]])
    rows.text.normal_()
    graphs.predict()
    assert torch.equal(rows.codes[:, 0], torch.cat([rows.token, *codes], dim=1))
    predictor = graphs.predictor
    embeds = [predictor.embed_token(rows.token), *(embed(of) for embed, of in zip(predictor.embed_code, codes))]
    assert torch.equal(rows.embedding[:, 0], torch.cat(embeds, dim=1).sum(1) + rows.text[:, 0])
    expected = [torch.cat([rows.hidden, embeds[0]]), *embeds[1:4]]
    for x, y in zip(given, expected, strict=True):
        assert x.shape[1] == 32 and torch.allclose(x, predictor.project(y[:, 0]), atol=1e-6)
