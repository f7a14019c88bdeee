"""A short run of the megakernel on small stacks of the published widths, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --plain
    compute-sanitizer --tool memcheck python tests/sanitize.py --async --blocks 28     # as on an RTX 3060

racecheck follows neither bulk copies nor one lane that arrives at an mbarrier for its warp: of the kernel as
it is, it reports every read of the ring, and nothing else. With --plain the kernel is compiled with
MEGAKERNEL_PLAIN_COPIES: the ring is filled by ordinary stores and every thread arrives for itself, all else
is the same. --async takes the copies of GPUs below compute capability 9.0.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from megakernel_cases import (
    CODE_VOCAB,
    PLAIN_COPIES,
    TALKER_VOCAB,
    KernelFor,
    predictor_of_rows,
    some_predictor,
    some_talker,
    talker_of_rows,
)

from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Sizes, Stack, kernel_sizes
from qwen3_tts_cuda_graphs.fast.nvrtc import Kernels

LENGTH = 80
KV_HEADS = 8


def kernel_with(defines: str, changes: dict[str, int]) -> KernelFor:
    """As SOURCE.compile, with these definitions and these changes to the sizes, and with time for the sanitizer."""
    source = SOURCE.file.read_text()
    limit = "WAIT_LIMIT_NS = 2'000'000'000"
    assert source.count(limit) == 1
    source = source.replace(limit, "WAIT_LIMIT_NS = 600'000'000'000")

    def kernel_for(stack: Stack) -> tuple[Sizes, Kernels]:
        sizes = replace(kernel_sizes(stack), **changes)
        return sizes, SOURCE.load(sizes, stack.device, defines + source)

    return kernel_for


def run(kernel_for: KernelFor, hidden: int) -> None:
    talker = some_talker(kernel_for, hidden, LENGTH)
    graph = talker.graph
    predictor = some_predictor(kernel_for, graph, 2, LENGTH)
    for position in (0, 17, LENGTH - 1):  # up to the last row of the cache
        graph.prompt_length.fill_(position)
        graph.frame.zero_()
        talker.launch()
    for frame in (0, LENGTH - 1):
        graph.frame.fill_(frame)
        predictor.step()
    torch.cuda.synchronize()

    assert talker.step.why_failed() == "" and predictor.step.why_failed() == ""
    assert torch.isfinite(graph.embedding).all()
    assert graph.token < TALKER_VOCAB
    assert predictor.codes[:, 1:].max() < CODE_VOCAB
    codes = predictor.codes[[0, -1]].tolist()
    print(f"hidden size {hidden}: the talker chose {graph.token.item()}, its predictor {codes}")


def run_rows(kernel_for: KernelFor, hidden: int, count: int) -> None:
    single = some_talker(kernel_for, hidden, LENGTH)
    talker = talker_of_rows(single, kernel_for, count)
    predictor = predictor_of_rows(some_predictor(kernel_for, single.graph, 2, LENGTH), kernel_for, count)
    talker.step()
    predictor.step()
    torch.cuda.synchronize()
    assert talker.step.why_failed() == "" and predictor.step.why_failed() == ""
    assert torch.isfinite(predictor.graph.embedding).all()
    assert talker.graph.token.max() < TALKER_VOCAB and predictor.codes[..., 1:].max() < CODE_VOCAB
    codes = [predictor.codes[row, row].tolist() for row in range(count)]
    print(f"{count} rows: the talker chose {talker.graph.token.tolist()}, its predictor {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the megakernel once, for compute-sanitizer.")
    parser.add_argument("--plain", action="store_true", help="fill the ring by ordinary stores")
    parser.add_argument("--async", dest="async_copies", action="store_true", help="copy as below capability 9.0")
    parser.add_argument("--blocks", type=int, help="thread blocks")
    args = parser.parse_args()
    changes = {}
    if args.async_copies:
        changes |= dict(bulk_copies=0, shared_bytes=99 * 1024)
    if args.blocks:
        changes |= dict(grid=args.blocks)
    blocks = args.blocks or torch.cuda.get_device_properties(0).multi_processor_count
    with torch.device("cuda", 0):
        defines = PLAIN_COPIES if args.plain else ""
        kernel_for = kernel_with(defines, changes)
        for hidden in (1024, 2048):
            run(kernel_for, hidden)
        for count in (2, 4, 8):
            if blocks < KV_HEADS * count:
                print(f"{blocks} blocks are too few for {count} rows")
                continue
            run_rows(kernel_for, 1024, count)


if __name__ == "__main__":
    main()
