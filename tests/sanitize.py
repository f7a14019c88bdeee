"""A short run of the megakernel on small stacks of the published widths, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --plain

racecheck follows neither bulk copies nor one lane that arrives at an mbarrier for its warp: of the kernel as
it is, it reports every read of the ring, and nothing else. With --plain the kernel is compiled with
MEGAKERNEL_PLAIN_COPIES: the ring is filled by ordinary stores and every thread arrives for itself, all else
is the same.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from megakernel_cases import CODE_VOCAB, PLAIN_COPIES, TALKER_VOCAB, KernelFor, some_predictor, some_talker

from fast.megakernel import Sizes, compile_for, compile_kernel, complete_source, kernel_sizes
from fast.nvrtc import Kernel

LENGTH = 80


def compile_plain(model: Any, heads: Sequence[Any], talker_hidden: int) -> tuple[Sizes, Kernel]:
    """As compile_for, with MEGAKERNEL_PLAIN_COPIES."""
    sizes = kernel_sizes(model, heads, talker_hidden, torch.cuda.get_device_properties(model.device))
    return sizes, compile_kernel(model.device, sizes, PLAIN_COPIES + complete_source(sizes))


def run(kernel_for: KernelFor, hidden: int) -> None:
    talker = some_talker(kernel_for, hidden, LENGTH)
    graph = talker.graph
    predictor = some_predictor(kernel_for, graph, 2, LENGTH)
    for position in (0, 17, LENGTH - 1):  # up to the last row of the cache
        graph.prompt_length.fill_(position)
        graph.frame.zero_()
        talker.step()
    for frame in (0, LENGTH - 1):
        graph.frame.fill_(frame)
        predictor.step()
    torch.cuda.synchronize()

    assert torch.isfinite(graph.embedding).all()
    assert graph.token < TALKER_VOCAB
    assert predictor.codes[:, 1:].max() < CODE_VOCAB
    codes = predictor.codes[[0, -1]].tolist()
    print(f"hidden size {hidden}: the talker chose {graph.token.item()}, its predictor {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the megakernel once, for compute-sanitizer.")
    parser.add_argument("--plain", action="store_true", help="fill the ring by ordinary stores")
    args = parser.parse_args()
    with torch.device("cuda", 0):
        for hidden in (1024, 2048):
            run(compile_plain if args.plain else compile_for, hidden)


if __name__ == "__main__":
    main()
