"""`bench.py --plot`: the figures in the README, from the results files. The same results give the same files."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

STYLE = {"svg.fonttype": "none", "svg.hashsalt": "qwen3-tts", "font.size": 12}  # text stays text, ids stay the same
GRAY = "#767c84"  # readable on a light and on a dark page
BARS = {  # a row of the results -> its label and color
    "upstream": ("upstream qwen-tts", "#9aa0a6"),
    "faster-qwen3-tts": ("faster-qwen3-tts", "#c58a2b"),
    "the three files alone": ("this project: the three files alone", "#8e6bbf"),
    "separate kernels": ("this project: separate kernels", "#4f8fd0"),
    "megakernel": ("this project: megakernel", "#2f9e62"),
}
SIZE_COLORS = ("#2f9e62", "#4f8fd0", "#8e6bbf", "#9aa0a6")  # in the order of the models
AT_ONCE = re.compile(r"(\d+) streams? (?:at once|alone)")
PER_SECOND = re.compile(r"(\d+) requests per second for .*")
PUBLISHED = {  # by others, under their own conditions: requests at once -> audio seconds per second, and whose
    64: (112, "vLLM-Omni, 1.7B, as published:\n112 on an H100, 97 on an H200"),
}

Models = dict[str, dict[str, dict]]  # a size, and its GPU where there are several -> the rows of the results


def plot(folder: Path) -> list[Path]:
    """Draw the results files in `folder`. Returns the figures' paths."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: install it with pip install matplotlib") from None
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    drawn = []
    for draw, name, row in (
        (draw_speed, "speed.svg", "upstream"),
        (draw_listeners, "listeners.svg", "1 stream alone"),
        (draw_server, "server.svg", "40 requests per second for 10 s"),
    ):
        chosen = [result for result in results if any(row in rows for rows in result.get("models", {}).values())]
        if chosen:
            with matplotlib.rc_context(STYLE):
                figure = draw(models_of(chosen))
                figure.supxlabel("; ".join(machines(chosen)), color=GRAY, fontsize="small", x=0.01, ha="left")
                drawing = io.BytesIO()
                figure.savefig(drawing, format="svg", transparent=True, metadata={"Creator": None, "Date": None})
            path = folder / name
            if not path.is_file() or path.read_bytes() != drawing.getvalue():
                path.write_bytes(drawing.getvalue())
            drawn.append(path)
    if not drawn:
        raise ValueError(f"{folder} has no figures to draw: run python bench.py first")
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


def draw_speed(models: Models):
    """How many times as fast as upstream, and the milliseconds to the first audio."""
    from matplotlib.figure import Figure

    def speed(rows: dict, name: str) -> tuple[float, str] | None:
        if name not in rows:
            return None
        ms = rows[name]["ms_per_frame"]
        ratio = rows["upstream"]["ms_per_frame"] / ms
        return ratio, f"{short(ratio)} x ({short(ms)} ms)"

    def first_audio(rows: dict, name: str) -> tuple[float, str] | None:
        row = rows.get(f"{name}, chunks of 1")
        return row and (row["first_audio_ms"], f"{short(row['first_audio_ms'])} ms")

    figure = Figure(figsize=(11, 0.9 + 2.1 * len(models)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.2)  # a viewer's font may be wider
    left, right = figure.subplots(1, 2, sharey=True)
    draw_bars(left, "times as fast as upstream (ms per frame)", models, speed)
    draw_bars(right, "milliseconds to the first audio", models, first_audio)
    return figure


def short(value: float) -> str:
    return f"{value:.{0 if value >= 50 else 1 if value >= 5 else 2}f}"


def draw_bars(axis, title: str, models: Models, bar_of: Callable[[dict, str], tuple[float, str] | None]) -> None:
    """A group of bars for each model. A way to speak without such a figure keeps its place."""
    places = {}
    for number, (model, rows) in enumerate(models.items()):
        top = number * (len(BARS) + 1.5)
        axis.text(0, top, model, color=GRAY, weight="bold", va="center")
        for place, (name, (label, color)) in enumerate(BARS.items(), 1):
            places[top + place] = label
            value, words = bar_of(rows, name) or (0, "")
            axis.barh(top + place, value, color=color)
            axis.text(value, top + place, f" {words}", color=GRAY, va="center")
    axis.set_yticks([*places], [*places.values()])
    axis.set_ylim(max(places) + 0.6, -0.6)
    axis.margins(x=0.45)
    finish(axis, title)


def draw_listeners(models: Models):
    """Audio seconds per second, and the time to the first audio, by the number of listeners who ask at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, first_audio = figure.subplots(1, 2)
    counts = sorted({int(found[1]) for rows in models.values() for name in rows if (found := AT_ONCE.fullmatch(name))})
    width = 0.76 / len(models)
    for axis, key in ((speed, "audio_seconds_per_second"), (first_audio, "first_audio_p95_ms")):
        for number, (model, rows) in enumerate(models.items()):
            values = {int(found[1]): row[key] for name, row in rows.items() if (found := AT_ONCE.fullmatch(name))}
            left = [counts.index(count) - 0.38 + number * width for count in values]
            color = SIZE_COLORS[number % len(SIZE_COLORS)]
            bars = axis.bar(left, [*values.values()], width, align="edge", color=color, label=model)
            axis.bar_label(bars, fmt="{:.0f}", color=GRAY, fontsize="small")
        axis.set_xticks(range(len(counts)), counts)
        axis.set_xlabel("listeners who ask at once", color=GRAY)
        axis.legend(frameon=False, labelcolor=GRAY, loc="upper left")
    for count, (value, words) in PUBLISHED.items():
        if count in counts:
            place = counts.index(count) - 0.5  # between two groups of bars
            speed.plot([place, place], [value, 5 * value], color=GRAY, linewidth=0.7)
            speed.plot(place, value, marker="x", color=BARS["faster-qwen3-tts"][1])
            speed.text(place, 5 * value, words, color=GRAY, fontsize="small", ha="right")
    finish(speed, "audio seconds per second")
    finish(first_audio, "ms to the first audio, 95th percentile")
    return figure


def draw_server(models: Models):
    """The time to the first audio by requests per second: from the engine, and over HTTP."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    titles = {"first_audio_ms": "ms to the first audio, median", "first_audio_p95_ms": "95th percentile"}
    for axis, (key, title) in zip(figure.subplots(1, 2, sharey=True), titles.items()):
        for (name, rows), color in zip(models.items(), SIZE_COLORS):
            found = ((PER_SECOND.fullmatch(what), row) for what, row in rows.items())
            values = dict(sorted((int(rate[1]), row[key]) for rate, row in found if rate))
            if len(values) > 1:
                axis.plot([*values], [*values.values()], color=color, marker="o", label=name)
        axis.set_xlabel("requests per second", color=GRAY)
        axis.legend(frameon=False, labelcolor=GRAY, loc="lower right")
        finish(axis, title)
    axis.set_ylim(bottom=0)  # of both, when all is drawn
    return figure


def finish(axis, title: str) -> None:
    axis.set_title(title, color=GRAY, fontsize="medium")
    axis.tick_params(colors=GRAY, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
