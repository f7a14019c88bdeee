"""`bench.py --plot`: draw the figures in README.md and docs/ from the results files. The same results give the same
files.

The figures are narrow, with their charts one below another, so that a phone shows them at nearly full size.
"""

import io
import json
import re
from functools import partial
from pathlib import Path

from qwen3_tts_cuda_graphs.bench import MEGAKERNEL, PEER, SEPARATE, THREE_FILES, UPSTREAM

STYLE = {"svg.fonttype": "none", "svg.hashsalt": "qwen3-tts", "font.size": 12}  # text as text, the same ids each time
GRAY = "#767c84"  # readable on a light and on a dark page
WIDTH = 5.2  # inches: 500 pixels
LINE = 0.27  # inches from one bar to the next
BARS = {  # a row of the results -> its label and color
    UPSTREAM: ("upstream qwen-tts", "#9aa0a6"),
    PEER: ("faster-qwen3-tts", "#c58a2b"),
    THREE_FILES: ("the three files alone*", "#8e6bbf"),
    SEPARATE: ("separate kernels*", "#4f8fd0"),
    MEGAKERNEL: ("megakernel*", "#2f9e62"),
}
MODEL_COLORS = ("#2f9e62", "#4f8fd0", "#8e6bbf", "#9aa0a6")
PUBLISHED = {  # by others, under their own conditions: audio seconds per second
    "vLLM-Omni, 1.7B, as published": [("64 requests", "#c58a2b", 112, "112 on an H100, 97 on an H200")],
}

Models = dict[str, dict[str, dict]]  # a size, with its GPU where there are several -> the rows of the results
Chart = dict[str, list[tuple[str, str, float, str]]]  # name of a group -> its bars: label, color, value, text behind it


def plot(folder: Path) -> list[Path]:
    """Draw the results files in `folder`, and return the paths of the figures."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: install it with pip install matplotlib") from None
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    drawn = []
    for charts_of, name, row, note in (
        (speed, "speed.svg", UPSTREAM, "* this project; in brackets: ms per frame"),
        (listeners, "listeners.svg", "1 stream alone", ""),
        (server, "server.svg", "40 requests per second for 10 s", ""),
    ):
        chosen = [result for result in results if any(row in rows for rows in result.get("models", {}).values())]
        if chosen:
            with matplotlib.rc_context(STYLE):
                figure = draw(charts_of(models_of(chosen)))
                notes = "\n".join(filter(None, [note, *machines(chosen)]))
                figure.supxlabel(notes, color=GRAY, fontsize="small", x=0.01, ha="left")
                drawing = io.BytesIO()
                figure.savefig(drawing, format="svg", transparent=True, metadata={"Creator": None, "Date": None})
            path = folder / name
            if not path.is_file() or path.read_bytes() != drawing.getvalue():
                path.write_bytes(drawing.getvalue())
            drawn.append(path)
    if not drawn:
        raise ValueError(f"{folder} has no figures to draw: run qwen3-tts bench first")
    return drawn


def models_of(results: list[dict]) -> Models:
    models = {}
    for result in results:
        gpu = f", {result['card']['gpu']}" if len(results) > 1 else ""
        models |= {f"{size}{gpu}": rows for size, rows in result["models"].items()}
    return models


def machines(results: list[dict]) -> list[str]:
    machine = "{gpu}, {dtype}, {weights} weights, torch {torch}"
    return [*dict.fromkeys(machine.format(**result["card"]) for result in results)]


def speed(models: Models) -> dict[str, Chart]:
    """Charts of how many times as fast as upstream each path is, and of the milliseconds to the first audio."""

    def times_as_fast(rows: dict, name: str) -> tuple[float, str]:
        ms = rows[name]["ms_per_frame"]
        ratio = rows[UPSTREAM]["ms_per_frame"] / ms
        return ratio, f"{short(ratio)} x ({short(ms)} ms)"

    def first_audio(rows: dict, name: str) -> tuple[float, str]:
        row = rows.get(f"{name}, chunks of 1")
        return (row["first_audio_ms"], f"{short(row['first_audio_ms'])} ms") if row else (0, "does not stream")

    def chart(bar_of) -> Chart:
        return {
            model: [(*BARS[name], *bar_of(rows, name)) for name in BARS if name in rows]
            for model, rows in models.items()
        }

    return {"times as fast as upstream": chart(times_as_fast), "ms to the first audio": chart(first_audio)}


def listeners(models: Models) -> dict[str, Chart]:
    """Charts of audio seconds per second, and of the time to the first audio, by the number of listeners at once."""
    chart = partial(chart_by_number, models, r"(\d+) streams? (?:at once|alone)", "listener{s}")
    return {
        "audio seconds per second": chart("audio_seconds_per_second") | PUBLISHED,
        "ms to the first audio, 95th percentile": chart("first_audio_p95_ms"),
    }


def server(models: Models) -> dict[str, Chart]:
    """Charts of the time to the first audio by requests per second, from the engine and over HTTP."""
    chart = partial(chart_by_number, models, r"(\d+) requests per second for .*", "per second")
    return {
        "ms to the first audio by requests, median": chart("first_audio_ms"),
        "95th percentile": chart("first_audio_p95_ms"),
    }


def chart_by_number(models: Models, pattern: str, unit: str, key: str) -> Chart:
    """A bar for each row whose name matches the pattern, in the order of the number in it."""
    groups = {}
    for (model, rows), color in zip(models.items(), MODEL_COLORS * len(models)):
        found = ((re.fullmatch(pattern, name), row) for name, row in rows.items())
        values = sorted((int(name[1]), row[key]) for name, row in found if name)
        labels = [f"{count} {unit.format(s='s' * (count > 1))}" for count, _ in values]
        bars = [(label, color, value, short(value)) for label, (_, value) in zip(labels, values)]
        groups |= {model: bars} if len(bars) > 1 else {}
    return groups


def short(value: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{value:.{0 if value >= 50 else 1 if value >= 5 else 2}f}"


# ---- Drawing


def draw(charts: dict[str, Chart]):
    """A figure of bar charts, one below another."""
    from matplotlib.figure import Figure

    heights = [LINE * (1.5 + sum(len(bars) + 1.5 for bars in chart.values())) for chart in charts.values()]
    figure = Figure(figsize=(WIDTH, 0.6 + sum(heights)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    for axis, (title, chart) in zip(axes, charts.items()):
        draw_bars(axis, title, chart)
    return figure


def draw_bars(axis, title: str, chart: Chart) -> None:
    """Draw horizontal bars, with the name of each group above its bars. A bar of length 0 has only its text."""
    line, places = 0.0, {}
    widest = max(value for bars in chart.values() for _, _, value, _ in bars)
    for name, bars in chart.items():
        axis.text(0, line, name, color=GRAY, weight="bold", va="center_baseline")
        for label, color, value, text in bars:
            line += 1
            places[line] = label
            axis.barh(line, value, color=color)
            axis.text(value + 0.02 * widest, line, text, color=GRAY, va="center_baseline")
        line += 1.5
    axis.set_yticks([*places], [*places.values()])
    axis.set_ylim(max(places) + 0.6, -0.6)
    axis.set_xlim(0, 1.8 * widest)  # leaves room for the text
    axis.set_xticks([])
    axis.set_title(title, color=GRAY, fontsize="medium", loc="left")
    axis.tick_params(colors=GRAY, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
