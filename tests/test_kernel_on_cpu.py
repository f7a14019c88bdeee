"""The megakernel, compiled for and run on a CPU, computes what fast/megakernel_reference.py computes, so that
a wrong one is found without a GPU, too. Few blocks and one or two layers, but the widths of the published
models."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_on_cpu import CpuKernel, PretendedGpu
from helpers import slow
from megakernel_cases import (
    END_TOKEN,
    PLAIN_COPIES,
    REPETITION_PENALTY,
    KernelFor,
    SomeTalker,
    config,
    faulty_source,
    number,
    predictor_of_rows,
    reference_choice,
    some_predictor,
    some_talker,
    talker_of_rows,
    talker_scores,
)

from qwen3_tts_cuda_graphs.fast import megakernel
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Sizes, Stack, kernel_sizes
from qwen3_tts_cuda_graphs.fast.megakernel_reference import linear, run_layers

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
LENGTH = 300  # more than FEW_POSITIONS of megakernel.cu
HIDDEN = 1024
TOLERANCE = 0.1  # rounding to bfloat16 alone makes an error of 0.05, for values of about 1


def cpu_kernel_for(folder: Path, source: str | None = None, defines: str = "", **changes: int) -> KernelFor:
    """Compiles for 16 blocks of fibers. `source` is megakernel.cu, if not given. `changes` are to the sizes."""

    def kernel_for(stack: Stack) -> tuple[Sizes, CpuKernel]:
        sizes = replace(kernel_sizes(stack, PretendedGpu()), **{"grid": 16, **changes})
        return sizes, CpuKernel(defines + SOURCE.complete(sizes, source), sizes, folder)

    return kernel_for


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def error_at(it: SomeTalker, position: int) -> float:
    """Runs a talker's step. Returns the largest error of the hidden state, the logits and the caches."""
    caches = [(layer.keys.float(), layer.values.float()) for layer in it.cache.layers]
    (hidden,) = run_layers(it.model, caches, it.graph.embedding.float()[None], position)
    it.graph.prompt_length.fill_(position)
    it.graph.frame.zero_()
    it.launch()
    pairs = [(it.graph.hidden, hidden), (it.step.logits()[0], linear(hidden, it.head))]
    for layer, (keys, values) in zip(it.cache.layers, caches, strict=True):
        pairs += [(layer.keys, keys), (layer.values, values)]
    return max(float((ours.float() - reference).abs().max()) for ours, reference in pairs)


@torch.no_grad()
def test_talker_step_matches_the_reference(tmp_path):
    """Layers, head, penalties, sampling and bookkeeping of a token, up to the last position of the cache."""
    it = some_talker(cpu_kernel_for(tmp_path), HIDDEN, LENGTH)
    for position, top_k, top_p in ((0, 50, 0.2), (17, 1, 1.0), (LENGTH - 1, 50, 0.2)):
        it.sampling.set(True, 5.0, top_k, top_p)  # so hot that one candidate too many is often chosen
        seen = it.graph.seen.clone()
        assert error_at(it, position) < TOLERANCE
        logits = it.step.logits()
        scores = talker_scores(logits, seen, it.graph.suppressed, REPETITION_PENALTY, END_TOKEN)
        assert it.graph.token == reference_choice(scores, it.sampling, it.step.noise)
        assert it.graph.frame == 1
        assert not it.graph.ended
        seen[it.graph.token] = True
        assert torch.equal(it.graph.seen, seen)


@pytest.mark.slow
@torch.no_grad()
def test_plain_copies_compute_the_same(tmp_path):
    """The variant for compute-sanitizer differs only in how the ring is filled and released."""
    it = some_talker(cpu_kernel_for(tmp_path, defines=PLAIN_COPIES), HIDDEN, LENGTH, layers=1)
    assert error_at(it, 17) < TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_any_number_of_blocks(tmp_path):
    """Rows that do not divide evenly, blocks without attention, copies of 16 bytes."""
    kernel_for = cpu_kernel_for(tmp_path, grid=20, bulk_copies=0, shared_bytes=99 * 1024)
    it = some_talker(kernel_for, HIDDEN, LENGTH, layers=1)
    assert error_at(it, LENGTH - 1) < TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_a_wide_talker_on_few_blocks(tmp_path):
    """1.7B has up to three rows per thread there: they were never published, and the kernel never ended."""
    kernel_for = cpu_kernel_for(tmp_path, grid=8, bulk_copies=0, shared_bytes=99 * 1024)
    it = some_talker(kernel_for, 2048, LENGTH, layers=1)
    assert error_at(it, 17) < TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_end_token_ends_the_row(tmp_path):
    """Once the end token is allowed and chosen, `ended` is set and stays set."""
    it = some_talker(cpu_kernel_for(tmp_path), HIDDEN, LENGTH, layers=1)
    it.graph.min_tokens.fill_(0)
    for end_is_allowed in (True, False):
        it.graph.suppressed.fill_(end_is_allowed)
        it.graph.suppressed[END_TOKEN] = not end_is_allowed
        it.launch()
        assert (it.graph.token == END_TOKEN) == end_is_allowed
        assert it.graph.ended


@torch.no_grad()
def test_wrong_kernel_is_detected(tmp_path):
    """A kernel with the RoPE angles of another position is far outside of the tolerance."""
    it = some_talker(cpu_kernel_for(tmp_path, faulty_source("RoPE of another position")), HIDDEN, LENGTH, layers=1)
    assert error_at(it, 17) > 5 * TOLERANCE


@torch.no_grad()
def test_predictor_step_matches_the_reference(tmp_path):
    """A frame's codes and the next embedding; the talker is wider than the predictor."""
    graph = SimpleNamespace(
        advance=torch.ones(1, dtype=torch.bool),
        token=number(5),
        frame=number(3),
        hidden=torch.randn(2048).bfloat16(),
        embedding=torch.zeros(2048).bfloat16(),
    )
    it = some_predictor(cpu_kernel_for(tmp_path), graph, 1, LENGTH)
    it.step()
    codes = it.codes[3]
    caches = [(layer.keys.float(), layer.values.float()) for layer in it.cache.layers]
    assert codes[0] == 5
    assert torch.equal(codes[1:], reference_choice(it.step.logits(), it.sampling, it.step.noise))

    run_layers(it.model, caches, it.first_input.float()[None], 0)
    for i, (head, code) in enumerate(zip(it.heads, codes)):
        (logits,) = linear(run_layers(it.model, caches, it.inputs[i][code].float()[None], i + 1), head)
        assert (it.step.logits()[i] - logits).abs().max() < TOLERANCE

    summed = sum(weight[code].float() for weight, code in zip(it.embeddings, codes)).bfloat16()
    assert torch.equal(graph.embedding, summed + it.text[3])


@pytest.mark.parametrize("count", [8, *slow(2, 4)])
@torch.no_grad()
def test_a_talker_of_several_rows(count, tmp_path):
    """Each row has its own position, cache, settings and noise; the one that does not advance keeps its state."""
    one = some_talker(cpu_kernel_for(tmp_path), HIDDEN, LENGTH, layers=1)
    it = talker_of_rows(one, cpu_kernel_for(tmp_path, grid=max(32, 8 * count)), count)
    graph = it.graph
    before = SimpleNamespace(**{name: value.clone() for name, value in vars(graph).items()})
    caches = [(layer.keys.float(), layer.values.float()) for layer in it.cache.layers]
    it.step()
    for row in range(count):
        position = int(graph.prompt_length[row]) + row
        own = [(keys[row], values[row]) for keys, values in caches]
        (hidden,) = run_layers(it.model, own, before.embedding[row].float(), position)
        logits = it.step.logits()[row]
        assert (logits[0] - linear(hidden, it.head)).abs().max() < TOLERANCE
        for layer, (keys, values) in zip(it.cache.layers, own, strict=True):
            assert (layer.keys[row].float() - keys).abs().max() < TOLERANCE
            assert (layer.values[row].float() - values).abs().max() < TOLERANCE
        if not graph.advance[row]:
            for name in ("hidden", "token", "frame", "seen", "ended"):
                assert torch.equal(getattr(graph, name)[row], getattr(before, name)[row])
            continue
        assert (graph.hidden[row, 0].float() - hidden).abs().max() < TOLERANCE
        is_early = row + 1 < 2
        scores = talker_scores(
            logits,
            before.seen[row],
            graph.suppressed[row],
            float(graph.repetition_penalty[row]),
            END_TOKEN + row if is_early else None,
        )
        assert graph.token[row] == reference_choice(scores, it.sampling, it.step.noise[row], row)
        assert graph.frame[row] == row + 1 and graph.seen[row, graph.token[row]]
        assert not graph.ended[row]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
@torch.no_grad()
def test_a_predictor_of_several_rows(count, tmp_path):
    """It computes the same as that of a single row, but for the order of its sums."""
    one = SimpleNamespace(token=number(0), frame=number(0), hidden=torch.randn(HIDDEN).bfloat16())
    one.advance = torch.ones(1, dtype=torch.bool)
    one.embedding = torch.zeros(HIDDEN).bfloat16()
    single = some_predictor(cpu_kernel_for(tmp_path), one, 1, LENGTH)

    kernel_for = cpu_kernel_for(tmp_path, grid=max(32, 8 * count))
    several = predictor_of_rows(single, kernel_for, count)
    several.step()
    graph = several.graph
    for row in range(count):
        one.token.copy_(graph.token[row])
        one.frame.fill_(row)
        one.hidden.copy_(graph.hidden[row])
        single.sampling.temperature.copy_(several.sampling.temperature[row])
        single.first_input.copy_(several.first_input[row])
        single.text.copy_(several.text[row])
        single.step.noise.copy_(several.step.noise[row])
        single.step()
        assert (several.step.logits()[row] - single.step.logits()).abs().max() < TOLERANCE
        assert torch.equal(several.codes[row, row], single.codes[row])
        assert torch.equal(graph.embedding[row], one.embedding)
        for layer, own in zip(several.cache.layers, single.cache.layers):
            heads = slice(8 * row, 8 * row + 8)
            assert (layer.keys[heads] - own.keys).abs().max() < TOLERANCE
            assert (layer.values[heads] - own.values).abs().max() < TOLERANCE


def sizes_of(hidden: int = 1024, vocab: int = 3072, codes: int = 1, **changes: Any) -> Sizes:
    """Of a published stack on an H200, and changes to that."""
    model = SimpleNamespace(config=config(hidden, 3 * hidden), layers=[None] * 28)
    heads = [SimpleNamespace(weight=range(vocab))] * codes
    return replace(kernel_sizes(Stack(model, heads, hidden), PretendedGpu()), **changes)


def compile_error(sizes: Sizes, folder: Path, source: str | None = None) -> str:
    with pytest.raises(RuntimeError) as caught:
        CpuKernel(SOURCE.complete(sizes, source), sizes, folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (sizes_of(hidden=4096, grid=8), "HIDDEN * tokens must be at most 256 * GRID"),  # no thread would publish them
        (sizes_of(hidden=1536), "HIDDEN must be a multiple of 1024"),
        (sizes_of(hidden=64), "HIDDEN must be a multiple of 1024"),
        (sizes_of(inner=2560), "INNER must be a multiple of 1024"),
        (sizes_of(vocab=3000), "VOCAB must be a multiple of 1024"),
        (sizes_of(vocab=8192, hidden=4096), "VOCAB must be at most 4096"),
        (sizes_of(vocab=4096, inner=1024, heads=8, kv_heads=4), "VOCAB must be at most 2 * INNER"),
        (sizes_of(inner=1024), "the rows of q, k, v must be at most 2 * INNER"),
        (sizes_of(head_dim=64), "HEAD_DIM must be 128"),
        (sizes_of(heads=32), "HEADS must be twice KV_HEADS"),
        (sizes_of(grid=4), "GRID must be from 8 to 128"),
        (sizes_of(grid=256, hidden=2048), "GRID must be from 8 to 128"),
        (sizes_of(grid=8, heads=32, kv_heads=16, inner=6144), "GRID must be at least ROWS * KV_HEADS"),
        (sizes_of(grid=8, rows=2), "GRID must be at least ROWS * KV_HEADS"),
        (sizes_of(grid=48, rows=8), "GRID must be at least ROWS * KV_HEADS"),
        (sizes_of(grid=32, rows=4, hidden=4096), "HIDDEN * tokens must be at most 256 * GRID"),
        (sizes_of(rows=3), "ROWS must be 1, 2, 4, 8 or 16"),
        (sizes_of(rows=8, inner=2048), "INNER must be more than HIDDEN and HEADS * HEAD_DIM"),
        (sizes_of(talker_hidden=65536), "TALKER_HIDDEN must be the talker's"),
        (sizes_of(talker_hidden=65536, vocab=2048, codes=15), "TALKER_HIDDEN must be at most 256 * GRID"),
        (sizes_of(shared_bytes=40 * 1024), "SHARED_BYTES is too small"),
        (sizes_of(exchange_bytes=1 << 16), "EXCHANGE_BYTES is too small"),
        (sizes_of(layers=0), "LAYERS and CODES must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_sizes_do_not_compile(sizes, message, tmp_path):
    """Each size that would hang the kernel or corrupt memory is refused, by name."""
    error = compile_error(sizes, tmp_path)
    assert "unsupported sizes: " in error and message in error


@pytest.mark.parametrize(
    "original, changed, message",
    [
        ("    const float *temperature; ", "    // ", "has no member named"),
        ("    u64 *token; ", "    u64 *another;\n    u64 *token; ", "Arguments.token is not field 16"),
        (
            "    const bool *greedy;\n    const float *noise; ",
            "    const float *noise;\n    const bool *greedy; ",
            "",
        ),
        ("    bool *ended; ", "    bool *ended;\n    int *more; ", "Arguments does not have the"),
        ("    uint2 *values; ", "    uint2 *values;\n    int *more; ", "Layer does not have the 6 fields"),
        (
            "    u64 row_bytes;\n",
            "    u64 row_bytes;\n    u64 more;\n",
            "Matrix does not have the 3 fields",
        ),
    ],
    ids=["removed", "inserted", "swapped", "in the tail", "in Layer", "in Matrix"],
)
def test_struct_mismatch_does_not_compile(original, changed, message, tmp_path):
    """A struct whose fields are not those of megakernel.py is a compile error, not a wrong pointer."""
    source = SOURCE.file.read_text()
    assert source.count(original) == 1
    assert message in compile_error(sizes_of(), tmp_path, source.replace(original, changed))


@pytest.mark.parametrize("name", ["CONSUMERS", "PRODUCERS", "REPLICAS", "FIRST_POSITIONS"])
def test_constant_mismatch_does_not_compile(name, monkeypatch, tmp_path):
    """Other numbers in megakernel.py would launch too few threads or give the kernel wrong addresses."""
    is_of_sizes = name != "CONSUMERS"
    monkeypatch.setattr(*((Sizes, name.lower()) if is_of_sizes else (megakernel, name)), 2)
    assert f"megakernel.py has {name} = 2" in compile_error(sizes_of(), tmp_path)
