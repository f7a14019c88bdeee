"""A short run of the megakernel on small models of the published widths, for compute-sanitizer:

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
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_on_cpu import changed_source
from megakernel_cases import PLAIN_COPIES, compile_with, gpu_kernel_for, rows_of, small_talker

from qwen3_tts_cuda_graphs.fast import megakernel
from qwen3_tts_cuda_graphs.fast.frame_graphs import MegakernelGraphs
from qwen3_tts_cuda_graphs.fast.rows import fill_with_random_states
from qwen3_tts_cuda_graphs.fast.self_test import PROMPTS

LENGTH = 80
KV_HEADS = 8


@torch.no_grad()
def run(talker, count: int) -> None:
    """A frame of rows at different positions, and one at the last position of the cache."""
    rows = rows_of(talker, LENGTH, count)
    graphs = MegakernelGraphs(talker, rows)
    fill_with_random_states(rows, PROMPTS, frames=1)
    for _ in range(2):
        graphs.predict()
        graphs.step()
        rows.prompt_length.copy_(LENGTH - 1 - rows.frame)
    torch.cuda.synchronize()
    assert not any(launch.why_failed() for launch in graphs.waiting_launches)
    assert torch.isfinite(rows.embedding).all()
    assert rows.token.max() < rows.sampling.vocab_size and rows.codes[..., 1:].max() < rows.code_sampling.vocab_size
    print(f"hidden size {talker.config.hidden_size}, {count} rows: the talker chose {rows.token.flatten().tolist()}")


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
        # with time for the sanitizer
        source = changed_source(megakernel, ("WAIT_LIMIT_NS = 2'000'000'000", "WAIT_LIMIT_NS = 600'000'000'000"))
        kernel_for = gpu_kernel_for((PLAIN_COPIES if args.plain else "") + source, **changes)
        with compile_with(kernel_for):
            for hidden in (1024, 2048):
                run(small_talker(LENGTH, hidden, num_hidden_layers=2), 1)
            talker = small_talker(LENGTH, num_hidden_layers=2)
            for count in (2, 4, 8):
                if blocks < KV_HEADS * count:
                    print(f"{blocks} blocks are too few for {count} rows")
                    continue
                run(talker, count)


if __name__ == "__main__":
    main()
