#!/usr/bin/env python3
"""How the figures of `bench.py --check` and of the self-test are distributed for a correct megakernel.

    python tools/calibrate.py 1.7B --output results/calibration_1.7B.json
    python tools/calibrate.py 1.7B --frames 0 --output results/self_test_1.7B.json

Each run has other random weights, another prompt and other tokens. It gives the megakernel's error relative to that of
the model's own bfloat16 forward, in how many cases only one of the two has the best token of float32, and the figures
of fast/self_test.py. The spread over the runs shows how far the limits are away. Needs a GPU that runs the megakernel.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.loading import model_errors
from cli.scripts import Parser, cli_errors
from fast.paths import why_not
from fast.self_test import run_test
from generate import load_upstream
from tools.machine import machine_card
from tools.parity import FALSE_ALARM_RATE, MARGIN, Forced, Megakernel, error, one_pass, random_request
from tools.random_checkpoint import randomize, write_checkpoint

SELF_TEST = "self-test"
LENGTH = 512
GAINS = (1.0, 3.0)  # of the weights, in turn


@torch.no_grad()
def one_run(models: list, routes: list, seed: int, gain: float, frames: int) -> dict:
    """New weights for all models, the self-test, then the same tokens through all: the model's own layers, a model on
    the megakernel, and one in float32. Without frames the last is not needed."""
    torch.manual_seed(seed)
    device = models[0].device
    randomize(models[0], gain)
    for other in models[1:]:
        for weight, copied in zip(models[0].parameters(), other.parameters()):
            copied.copy_(weight)
    own_route, megakernel = routes
    megakernel.refresh()
    reason, self_test_figures = run_test(megakernel.talker, megakernel.predictor)
    if reason:
        print(f"run {seed}: the self-test says that {reason}")
    if not frames:
        return {SELF_TEST: self_test_figures}

    request = random_request(models[0].config.hidden_size, device)
    tokens = torch.randint(2048, (frames, 16), device=device)
    logits = [megakernel.logits(tokens, **request), own_route.logits(tokens, **request)]
    logits.append(one_pass(models[2], tokens, **request))
    figures = {}
    for name, rows in zip(["codes 1 to 15", "first codes"], zip(*logits)):
        fused, own, exact = (row.to(device) for row in rows)
        agree = fused.argmax(-1) == exact.argmax(-1)
        own_agree = own.argmax(-1) == exact.argmax(-1)
        figures[name] = dict(
            median=error(fused, exact, 0.5) / error(own, exact, 0.5),
            high=error(fused, exact, 0.99) / error(own, exact, 0.99),
            cases=len(agree),
            only_own=int((own_agree & ~agree).sum()),
            only_megakernel=int((agree & ~own_agree).sum()),
            own_agreement=own_agree.double().mean().item(),
        )
    return figures | {SELF_TEST: self_test_figures}


def summarize_self_test(runs: list[dict]) -> str:
    lines = [SELF_TEST]
    for name in dict.fromkeys(name for run in runs for name in run[SELF_TEST]):
        values, limits = zip(*(run[SELF_TEST][name] for run in runs if name in run[SELF_TEST]))
        limit = limits[0]
        line = f"  {name}: {min(values):.4f} to {max(values):.4f} in {len(values)} runs; {limit} may be"
        if min(values) < max(values):
            distance = (limit - statistics.mean(values)) / statistics.stdev(values)
            line += f", {distance:.0f} standard deviations away"
        lines.append(line)
    return "\n".join(lines)


def mcnemar_deviation(only_own: int, only_megakernel: int) -> float:
    """How many more best tokens only the model's own has right than only the megakernel, in standard deviations of
    McNemar's test, for which either is right with probability 1/2, independently in each case."""
    return (only_own - only_megakernel) / math.sqrt(max(1, only_own + only_megakernel))


def mcnemar_spread(name: str, runs: list[dict]) -> float:
    """The standard deviation of that over the runs. 1: the cases are independent."""
    return statistics.stdev(mcnemar_deviation(run[name]["only_own"], run[name]["only_megakernel"]) for run in runs)


def summarize(name: str, runs: list[dict]) -> str:
    lines = [name]
    for figure in ("median", "high"):
        ratios = [run[name][figure] for run in runs]
        mean, spread = statistics.mean(ratios), statistics.stdev(ratios)
        lines.append(
            f"  error, {figure}: {mean:.4f} +- {spread:.4f} times the model's own, {min(ratios):.4f} to "
            f"{max(ratios):.4f} in {len(ratios)} runs; {MARGIN} is {(MARGIN - mean) / spread:.0f} "
            "standard deviations away"
        )
    cases, own, fused = (sum(run[name][key] for run in runs) for key in ("cases", "only_own", "only_megakernel"))
    lines.append(
        f"  best tokens: of {cases} only the model's own has {own} right, only the megakernel {fused}: a difference of "
        f"{(own - fused) / cases:+.3%}, {mcnemar_deviation(own, fused):+.1f} standard deviations of McNemar's test; "
        f"from run to run it spreads {mcnemar_spread(name, runs):.2f} times as far as that of independent cases"
    )
    sigmas = statistics.NormalDist().inv_cdf(1 - FALSE_ALARM_RATE)
    per_run = statistics.mean(run[name]["only_own"] + run[name]["only_megakernel"] for run in runs)
    lines.append(
        f"  the check of one run of this length finds a loss of {sigmas * math.sqrt(per_run) * len(runs) / cases:.1%}, "
        f"with a false-alarm rate of {FALSE_ALARM_RATE:.0e}"
    )
    return "\n".join(lines)


def to_json(card: dict, size: str, frames: int, runs: list[dict]) -> str:
    """One run per line."""
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    return f'{{"card": {json.dumps(card)}, "size": "{size}", "frames": {frames}, "runs": [\n  {lines}\n]}}\n'


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=["0.6B", "1.7B"])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--frames", type=int, default=200, help="per run; default: 200, as --check; 0: the self-test alone"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.runs < 2:
        parser.error(f"--runs is {args.runs}, it must be at least 2")

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), args.size, ends=False)
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32][: 3 if args.frames else 2]
        models = [load_upstream(folder, dtype=dtype).model.talker for dtype in dtypes]
    if reason := why_not(models[1]):
        parser.error(f"the megakernel does not run here: {reason}")
    with torch.no_grad():
        routes = [Forced(models[0], LENGTH), Megakernel(models[1], LENGTH)]
    card = machine_card("random")
    runs = []
    for seed in range(args.runs):
        runs.append(one_run(models, routes, seed, GAINS[seed % len(GAINS)], args.frames))
        print(f"run {seed + 1} of {args.runs}", file=sys.stderr)
        if args.output:
            args.output.write_text(to_json(card, args.size, args.frames, runs))
    for name in runs[0]:
        if name != SELF_TEST:
            print(summarize(name, runs))
    print(summarize_self_test(runs))


if __name__ == "__main__":
    with cli_errors(), model_errors():
        main()
