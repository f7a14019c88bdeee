"""How the figures of `bench.py --check` and of the self-test are distributed for a correct megakernel.

    python -m qwen3_tts_cuda_graphs.bench.calibrate 1.7B --output results/calibration_1.7B.json
    python -m qwen3_tts_cuda_graphs.bench.calibrate 1.7B --frames 0 --output results/self_test_1.7B.json

Each run has other random weights, another prompt and other tokens. It records the megakernel's error relative to that
of the model's own bfloat16 forward, in how many cases only one of the two has the best token of float32, and the
figures of fast/self_test.py. tests/test_results.py checks how far these are from the limits. Needs a GPU that runs the
megakernel.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from qwen3_tts_cuda_graphs.bench.measured import machine_card
from qwen3_tts_cuda_graphs.bench.parity import (
    FALSE_ALARM_RATE,
    Megakernel,
    TeacherForced,
    compare,
    one_pass,
    random_request,
)
from qwen3_tts_cuda_graphs.bench.random_checkpoint import randomize, write_checkpoint
from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.loading import load_upstream, model_errors
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of
from qwen3_tts_cuda_graphs.fast.self_test import run_test

SELF_TEST = "self-test"
GAINS = (1.0, 3.0)  # of the random weights; the runs take turns


@torch.no_grad()
def one_run(models: list, paths: list, seed: int, gain: float, frames: int) -> dict:
    """Give all models the same new weights, run the self-test, then compare the logits of the same tokens.

    models: on the model's own layers, on the megakernel and, unless `frames` is 0, in float32
    paths: TeacherForced and Megakernel of the first two
    """
    torch.manual_seed(seed)
    device = models[0].device
    randomize(models[0], gain)
    for other in models[1:]:
        for weight, copied in zip(models[0].parameters(), other.parameters()):
            copied.copy_(weight)
    own_path, megakernel = paths
    megakernel.refresh()
    reason, self_test_figures = run_test(megakernel.graphs)
    if reason:
        print(f"run {seed}: the self-test says that {reason}")
    if not frames:
        return {SELF_TEST: self_test_figures}

    request = random_request(models[0].config.hidden_size, device)
    tokens = torch.randint(2048, (frames, 16), device=device)
    logits = [megakernel.logits(tokens, **request), own_path.logits(tokens, **request)]
    logits.append(one_pass(models[2], tokens, **request))
    figures = {SELF_TEST: self_test_figures}
    for name, rows in zip(["codes 1 to 15", "first codes"], zip(*logits)):
        figures[name] = compare(*(row.to(device) for row in rows))
    return figures


def smallest_loss(name: str, runs: list[dict]) -> float:
    """The smallest share of best tokens that a kernel can lose and the check of one run still finds it."""
    sigmas = statistics.NormalDist().inv_cdf(1 - FALSE_ALARM_RATE)
    per_run = statistics.mean(run[name]["only_own"] + run[name]["only_megakernel"] for run in runs)
    return sigmas * math.sqrt(per_run) / statistics.mean(run[name]["cases"] for run in runs)


def results_json(card: dict, size: str, frames: int, runs: list[dict]) -> str:
    """The results file, with one run per line."""
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    return f'{{"card": {json.dumps(card)}, "size": "{size}", "frames": {frames}, "runs": [\n  {lines}\n]}}\n'


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=["0.6B", "1.7B"])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--frames", type=int, default=200, help="per run; default: 200, as --check; 0: the self-test alone"
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.runs < 2:
        parser.error(f"--runs is {args.runs}, it must be at least 2")

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), args.size, ends=False)
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32][: 3 if args.frames else 2]
        models = [load_upstream(folder, dtype=dtype).model.talker for dtype in dtypes]
    if reason := SOURCE.why_not(*stacks_of(models[1])):
        parser.error(f"the megakernel does not run here: {reason}")
    with torch.no_grad():
        paths = [TeacherForced(models[0]), Megakernel(models[1])]
    card = machine_card("random")
    runs = []
    for seed in range(args.runs):
        runs.append(one_run(models, paths, seed, GAINS[seed % len(GAINS)], args.frames))
        print(f"run {seed + 1} of {args.runs}", file=sys.stderr)
        args.output.write_text(results_json(card, args.size, args.frames, runs))
    for name in sorted(runs[0].keys() - {SELF_TEST}):
        print(f"{name}: the check of one run finds a loss of {smallest_loss(name, runs):.1%} of the best tokens")
    print(args.output)


if __name__ == "__main__":
    with cli_errors(), model_errors():
        main()
