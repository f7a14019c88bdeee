"""The megakernel, compiled for and run on a CPU, passes the self-test, which compares it with
fast/megakernel_reference.py, so that a wrong one is found without a GPU, too. Few blocks and one layer, but the widths
of the published models."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_on_cpu import CpuKernel, changed_source, needs_compiler
from helpers import slow
from megakernel_cases import PLAIN_COPIES, compile_with, config, cpu_kernel_for, gpu_of, rows_of, small_talker

from qwen3_tts_cuda_graphs.fast import megakernel, self_test
from qwen3_tts_cuda_graphs.fast.frame_graphs import MegakernelGraphs
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Sizes, Stack, kernel_sizes

pytestmark = needs_compiler
FEW_POSITIONS = 256  # of megakernel.cu
LENGTH = FEW_POSITIONS + 32
SMALL_COPIES = dict(bulk_copies=0, shared_bytes=99 * 1024)


@pytest.mark.parametrize(
    "hidden, options",
    [
        (1024, dict()),  # tests/test_self_test.py has few positions in CI
        *slow(
            (1024, dict(prompt=17)),
            # The variant for compute-sanitizer differs only in how the ring is filled and released.
            (1024, dict(defines=PLAIN_COPIES)),
            # Rows that do not divide evenly, blocks without attention, copies of 16 bytes.
            (1024, dict(grid=20, **SMALL_COPIES)),
            # 1.7B has up to three rows per thread here: they were never published, and the kernel never ended.
            (2048, dict(grid=8, **SMALL_COPIES)),
        ),
    ],
    ids=["0.6B", "few positions", "plain copies", "any number of blocks", "a wide talker on few blocks"],
)
@torch.no_grad()
def test_the_kernel_computes_what_the_reference_says(hidden, options, tmp_path):
    """Each phase, the logits, choices and bookkeeping, up to the last position of the cache; and the end token ends the
    row. tests/test_self_test.py has wrong kernels, which fail this, and several rows."""
    prompt = options.pop("prompt", LENGTH - 1)
    talker = small_talker(LENGTH, hidden)
    rows = rows_of(talker, LENGTH)
    with compile_with(cpu_kernel_for(tmp_path, **options)):
        graphs = MegakernelGraphs(talker, rows)
    # torch's sort on a CPU is not stable: where top-p cuts between equal scores, another one could remain.
    with mock.patch.object(torch.Tensor, "sort", lambda scores, dim: torch.sort(scores, dim=dim, stable=True)):
        assert self_test.run_test(graphs, [prompt], frames=1, choices=3)[0] == ""

    _, step = graphs.waiting_launches
    rows.advance.fill_(True)
    rows.min_tokens.zero_()
    rows.noise.exponential_()
    for end_is_allowed in (True, False):
        rows.suppressed.fill_(end_is_allowed)
        rows.suppressed[0, rows.end_token] = not end_is_allowed
        step()
        assert (rows.token == rows.end_token) == end_is_allowed
        assert rows.ended  # and stays so


def sizes_with(hidden: int = 1024, vocab: int = 3072, codes: int = 1, **changes: Any) -> Sizes:
    """Of a published stack on an H200, and changes to that."""
    model = SimpleNamespace(config=config(hidden, 3 * hidden), layers=[None] * 28)
    heads = [SimpleNamespace(weight=range(vocab))] * codes
    return replace(kernel_sizes(Stack(model, heads, hidden), gpu_of()), **changes)


def compile_error(folder: Path, sizes: Sizes, *changes: tuple[str, str]) -> str:
    with pytest.raises(RuntimeError) as caught:
        CpuKernel(SOURCE.complete(sizes, changed_source(megakernel, *changes)), sizes, folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (sizes_with(hidden=4096, grid=8), "HIDDEN * tokens must be at most 256 * GRID"),  # no thread would publish them
        (sizes_with(hidden=1536), "HIDDEN must be a multiple of 1024"),
        (sizes_with(hidden=64), "HIDDEN must be a multiple of 1024"),
        (sizes_with(inner=2560), "INNER must be a multiple of 1024"),
        (sizes_with(vocab=3000), "VOCAB must be a multiple of 1024"),
        (sizes_with(vocab=8192, hidden=4096), "VOCAB must be at most 4096"),
        (sizes_with(vocab=4096, inner=1024, heads=8, kv_heads=4), "VOCAB must be at most 2 * INNER"),
        (sizes_with(inner=1024), "the rows of q, k, v must be at most 2 * INNER"),
        (sizes_with(head_dim=64), "HEAD_DIM must be 128"),
        (sizes_with(heads=32), "HEADS must be twice KV_HEADS"),
        (sizes_with(grid=4), "GRID must be from 8 to 128"),
        (sizes_with(grid=256, hidden=2048), "GRID must be from 8 to 128"),
        (sizes_with(grid=8, heads=32, kv_heads=16, inner=6144), "GRID must be at least ROWS * KV_HEADS"),
        (sizes_with(grid=8, rows=2), "GRID must be at least ROWS * KV_HEADS"),
        (sizes_with(grid=48, rows=8), "GRID must be at least ROWS * KV_HEADS"),
        (sizes_with(grid=32, rows=4, hidden=4096), "HIDDEN * tokens must be at most 256 * GRID"),
        (sizes_with(rows=3), "ROWS must be 1, 2, 4, 8 or 16"),
        (sizes_with(rows=8, inner=2048), "INNER must be more than HIDDEN and HEADS * HEAD_DIM"),
        (sizes_with(talker_hidden=65536), "TALKER_HIDDEN must be the talker's"),
        (sizes_with(talker_hidden=65536, vocab=2048, codes=15), "TALKER_HIDDEN must be at most 256 * GRID"),
        (sizes_with(shared_bytes=40 * 1024), "SHARED_BYTES is too small"),
        (sizes_with(exchange_bytes=1 << 16), "EXCHANGE_BYTES is too small"),
        (sizes_with(layers=0), "LAYERS and CODES must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_sizes_do_not_compile(sizes, message, tmp_path):
    """Each size that would hang the kernel or corrupt memory is refused, by name."""
    error = compile_error(tmp_path, sizes)
    assert "unsupported sizes: " in error and message in error


@pytest.mark.parametrize(
    "original, changed, message",
    [
        ("    const float *temperature; ", "    // ", "has no member named"),
        ("    u64 *token; ", "    u64 *another;\n    u64 *token; ", "Arguments.token is not field 16"),
        ("    const bool *greedy;\n    const float *noise; ", "    const float *noise;\n    const bool *greedy; ", ""),
        ("    bool *ended; ", "    bool *ended;\n    int *more; ", "Arguments does not have the"),
        ("    uint2 *values; ", "    uint2 *values;\n    int *more; ", "Layer does not have the 6 fields"),
        ("    u64 row_bytes;\n", "    u64 row_bytes;\n    u64 more;\n", "Matrix does not have the 3 fields"),
    ],
    ids=["removed", "inserted", "swapped", "in the tail", "in Layer", "in Matrix"],
)
def test_struct_mismatch_does_not_compile(original, changed, message, tmp_path):
    """A struct whose fields are not those of megakernel.py is a compile error, not a wrong pointer."""
    assert message in compile_error(tmp_path, sizes_with(), (original, changed))


@pytest.mark.parametrize("name, value", [("CONSUMERS", 256), ("PRODUCERS", 8), ("REPLICAS", 4), ("FIRST_POSITIONS", 1)])
def test_constant_mismatch_does_not_compile(name, value, tmp_path):
    """Other numbers than megakernel.py has would need more threads, or read at wrong addresses."""
    change = f"constexpr int {name} = ", f"constexpr int {name} = 2, OTHER = "
    assert f"megakernel.py has {name} = {value}" in compile_error(tmp_path, sizes_with(), change)
