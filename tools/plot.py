"""`bench.py --plot`: the figures in the README, from the results files."""

import json
import re
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
SIZE_COLORS = {"0.6B": "#2f9e62", "1.7B": "#4f8fd0"}
AT_ONCE = re.compile(r"(\d+) streams? (?:at once|alone)")
PUBLISHED = {  # by others for one GPU, under their own conditions: name -> (requests at once, audio seconds per second)
    "vLLM-Omni, 1.7B, H200: 97; H100: 112": (64, 112),
}


def plot(folder: Path) -> list[Path]:
    """Draw the results files in `folder`. Returns the figures' paths."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: install it with pip install matplotlib") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    drawn = []
    for draw, name, row in ((plot_speed, "speed.svg", "upstream"), (plot_listeners, "listeners.svg", "1 stream alone")):
        chosen = [result for result in results if any(row in rows for rows in result.get("models", {}).values())]
        if chosen:
            figure = draw(plt, chosen)
            figure.text(0.01, 0.01, "; ".join(machines(chosen)), color=GRAY)
            figure.tight_layout(rect=(0, 0.05, 1, 1))
            figure.savefig(folder / name, transparent=True)
            drawn.append(folder / name)
    if not drawn:
        raise ValueError(f"{folder} has no figures to draw: run bench.py first")
    return drawn


def machines(results: list[dict]) -> list[str]:
    machine = "{gpu}, {dtype}, {weights} weights, torch {torch}"
    return [*dict.fromkeys(machine.format(**result["card"]) for result in results)]


def plot_speed(plt, results: list[dict]):
    """Milliseconds per frame and to the first audio."""
    models = sum(len(result["models"]) for result in results)
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.6 + 1.7 * models))
    for axis, title, column in zip(axes, TITLES, zip(*bar_values(results))):
        draw_bars(axis, title, [bar for bar in column if bar is not None])
    return figure


def plot_listeners(plt, results: list[dict]):
    """Audio seconds per second, and the time to the first audio, against the number of listeners who ask at once."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure, (speed, first_audio) = plt.subplots(1, 2, figsize=(10, 4))
    for result in results:
        gpu = f", {result['card']['gpu']}" if len(results) > 1 else ""
        for size, rows in result["models"].items():
            points = sorted((int(found[1]), row) for name, row in rows.items() if (found := AT_ONCE.fullmatch(name)))
            counts = [count for count, _ in points]
            style = dict(marker="o", color=SIZE_COLORS.get(size), label=f"{size}{gpu}")
            speed.plot(counts, [row["audio_seconds_per_second"] for _, row in points], **style)
            first_audio.plot(counts, [row["first_audio_p95_ms"] for _, row in points], **style)
    for name, (requests, value) in PUBLISHED.items():
        speed.plot(requests, value, marker="x", linestyle="none", color="#c58a2b")
        speed.annotate(f"  {name},\n  as published", (requests, value), va="center", color=GRAY, fontsize=7)
    for axis, title in ((speed, "audio seconds per second"), (first_audio, "ms to the first audio, 95th percentile")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_xticks([1, 4, 16, 64, 256])
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_major_formatter("{x:.0f}")
        axis.margins(x=0.2)
        axis.set_title(title, color=GRAY)
        axis.set_xlabel("listeners who ask at once", color=GRAY)
        axis.tick_params(colors=GRAY)
        axis.legend(frameon=False, labelcolor=GRAY)
        for spine in axis.spines.values():
            spine.set_visible(False)
    return figure


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
