"""`bench.py --plot`: the figure in the README, from the results files."""

import json
from pathlib import Path

TITLES = "milliseconds per frame (80 ms of audio)", "milliseconds to the first audio"
COLORS = {  # a row of the results -> its bars
    "upstream": "#9aa0a6",
    "faster-qwen3-tts": "#c58a2b",
    "the three files alone": "#8e6bbf",
    "separate kernels": "#4f8fd0",
    "megakernel": "#2f9e62",
}
GRAY = "#808080"  # readable on a light and on a dark page


def plot(folder: Path) -> Path:
    """Draw ms per frame and ms to the first audio of every results file in `folder`. Returns the figure's path."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: install it with pip install matplotlib") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results = [result for result in results if any("upstream" in rows for rows in result.get("models", {}).values())]
    if not results:
        raise ValueError(f"{folder} has no figures to draw: run bench.py first")
    models = sum(len(result["models"]) for result in results)
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.6 + 1.7 * models))
    for axis, title, column in zip(axes, TITLES, zip(*bar_values(results))):
        draw_bars(axis, title, [bar for bar in column if bar is not None])

    machine = "{gpu}, {dtype}, {weights} weights, torch {torch}"
    machines = dict.fromkeys(machine.format(**result["card"]) for result in results)
    figure.text(0.01, 0.01, "; ".join(machines), color=GRAY)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    output = folder / "speed.svg"
    figure.savefig(output, transparent=True)
    return output


def bar_values(results: list[dict]) -> list[tuple]:
    """For every row of every model, a bar (label, value, color) in each of the two diagrams, or None."""
    bars = []
    for result in results:
        gpu = f", {result['card']['gpu']}" if len(results) > 1 else ""
        for size, rows in result["models"].items():
            for name, color in COLORS.items():
                label = f"{name}, {size}{gpu}"
                per_frame = rows.get(name, {}).get("ms_per_frame")
                first_audio = rows.get(f"{name}, chunks of 1", {}).get("first_audio_ms")
                bars.append(tuple(value and (label, value, color) for value in (per_frame, first_audio)))
    return bars


def draw_bars(axis, title: str, bars: list[tuple[str, float, str]]) -> None:
    labels, values, colors = zip(*bars)
    axis.barh(labels, values, color=colors)
    for place, value in enumerate(values):
        axis.annotate(f" {value:.3g}", (value, place), va="center", color=GRAY)
    axis.set_xscale("log")
    axis.set_title(title, color=GRAY)
    axis.tick_params(colors=GRAY)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlim(left=1)
    for spine in axis.spines.values():
        spine.set_visible(False)
