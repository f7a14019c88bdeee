"""`bench.py --tables`: write every measured figure in README.md and docs/ from results/*.json.

On a page, figures stand between the lines `<!-- results: NAME -->` and `<!-- end of results -->`. NAME is a key of
BLOCKS, whose function returns what is written there.
"""

import functools
import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from qwen3_tts_cuda_graphs.bench import MEGAKERNEL, PEER, ROOT, SIZES, THREE_FILES, UPSTREAM
from qwen3_tts_cuda_graphs.bench.bounds import BANDWIDTH, POSITION, bound_ms, bytes_per_frame, file_stem, meta_model
from qwen3_tts_cuda_graphs.bench.plot import short
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE
from qwen3_tts_cuda_graphs.serving.settings import LIMITS

BLOCK = re.compile(r"^(<!-- results: (\w+) -->\n)(?:(?!<!--).*\n)*(?=<!-- end of results -->$)", re.MULTILINE)

SUMMARY = {  # label -> row of results/h200.json or h200_streams.json, and its key
    "upstream qwen-tts, ms per frame": (UPSTREAM, "ms_per_frame"),
    "faster-qwen3-tts, ms per frame": (PEER, "ms_per_frame"),
    "the three files alone, ms per frame": (THREE_FILES, "ms_per_frame"),
    "**megakernel** (the same two graphs, one kernel each), ms per frame": (MEGAKERNEL, "ms_per_frame"),
    "times as fast as upstream": (f"{MEGAKERNEL}, times as fast", f"than {UPSTREAM}"),
    "times as fast as faster-qwen3-tts": (f"{MEGAKERNEL}, times as fast", f"than {PEER}"),
    "x real time, whole call (seconds of audio per second)": (MEGAKERNEL, "x_real_time"),
    "first audio (from text to the first 80 ms on the host), ms": (f"{MEGAKERNEL}, chunks of 1", "first_audio_ms"),
    "first audio, faster-qwen3-tts, ms": (f"{PEER}, chunks of 1", "first_audio_ms"),
    "64 streams at once, audio seconds per second": ("64 streams at once", "audio_seconds_per_second"),
    "peak memory of torch, one text at a time, GiB": (MEGAKERNEL, "peak_gib"),
    "GPU memory of each further row (2,048 positions), GiB": ("1 stream alone", "gib_per_stream"),
}
DETAILS = {
    "upstream, fastest to slowest run, ms per frame": (UPSTREAM, "ms_per_frame_spread"),
    "first audio, preset voice, 63 tokens of text, ms": ("voice: preset voice", "first_audio_63_tokens_ms"),
}
TITLES = {  # key of a row -> title
    "ms_per_frame": "ms per frame",
    "x_real_time": "x real time",
    "first_audio_ms": "first audio, ms",
    "late_chunks": "late chunks",
    "underruns": "gaps",
    "peak_gib": "peak GiB",
}
READY = {  # label -> key of results/h200_ready.json
    "`accelerate`, s": "accelerate_s",
    "`accelerate` where no kernels are compiled yet (one run), s": "accelerate_empty_cache_s",
    "first audio of the first request, ms": "first_request_ms",
    "first audio of the tenth request, ms": "tenth_request_ms",
    "from the shell to the first audio of `generate.py`, s": "shell_to_first_audio_s",
    "importing upstream and loading its model alone, s": "upstream_imported_and_loaded_s",
}
EXAMPLES = ("RTX 3060", "RTX 4090", "RTX 5090", "Jetson AGX Orin")  # in README.md
LABELS = {"Thor": "Jetson Thor", "GB10": "DGX Spark (GB10)"}
PUBLISHED = {  # what others have published for one listener, not measured here; two figures are of 0.6B / 1.7B
    "RTX 4060": "faster-qwen3-tts: 2.26 / 1.83 x real time, with codec",
    "RTX 4090": "qwen3-tts-cuda-graphs: 16 / 19 ms per step",
    "RTX 5070 Ti": "qwenTTS-turbo: 8.7 ms per frame (0.6B)",
    "RTX 5090": "qwen3-tts-megakernel: about 8.6 ms per frame (0.6B); X-Square: 12.7 ms (1.7B)",
    "H100 80GB HBM3": "qwen3-tts-cuda-graphs: 21 / 22 ms per step",
    "Jetson AGX Orin": "qwen3-tts-cuda-graphs: 54 / 66 ms per step",
    "GB10": "qwen3-tts-cuda-graphs: 55 / 62 ms per step",
}


def write_tables(folder: Path) -> list[Path]:
    """Write the figures into the pages of a checkout, and return the pages that have changed."""
    changed = []
    for path in (folder / "README.md", *sorted((folder / "docs").glob("*.md"))):
        page = path.read_text()
        written = up_to_date(page)
        if written != page:
            path.write_text(written)
            changed.append(path)
    return changed


def up_to_date(page: str) -> str:
    """The page with the figures of results/*.json."""
    return BLOCK.sub(lambda found: f"{found[1]}{wrapped(BLOCKS[found[2]]())}\n", page)


def wrapped(block: str) -> str:
    return block if block.startswith("|") else textwrap.fill(block, 120, break_on_hyphens=False)


# ---- Figures


@functools.cache
def results_of(kind: str = "") -> dict:
    return json.loads((ROOT / f"results/h200{kind}.json").read_text())


@functools.cache
def rows_of(size: str) -> dict[str, dict]:
    """The rows of one listener and of many. They have no names in common."""
    return results_of()["models"][size] | results_of("_streams")["models"][size]


def cell(rows: dict, name: str, key: str) -> str:
    if key not in rows.get(name, {}):
        raise ValueError(f"results/ has no {key} of {name!r}: measure it, or take it out of bench/tables.py")
    value = rows[name][key]
    if isinstance(value, list):
        return " to ".join(map(short, value))
    return str(value) if isinstance(value, int) else short(value)


def both_sizes(name: str, key: str) -> list[str]:
    return [cell(rows_of(size), name, key) for size in SIZES]


def markdown_table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [re.sub(" +", " ", f"| {' | '.join(cells)} |") for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


# ---- Blocks


def by_size(rows: dict[str, tuple[str, str]]) -> str:
    return markdown_table(["", *SIZES], ([label, *both_sizes(*place)] for label, place in rows.items()))


def every_key(*names: str) -> dict[str, tuple[str, str]]:
    return {f"{name}: {key}": (name, key) for name in names for key in rows_of("0.6B")[name]}


def by_row() -> str:
    """Every row of one listener that has one of the TITLES, with both sizes in a cell."""
    lines = []
    for name, row in results_of()["models"]["0.6B"].items():
        if row.keys() & TITLES:
            lines.append([name, *(" / ".join(both_sizes(name, key)) if key in row else "" for key in TITLES)])
    return markdown_table(["0.6B / 1.7B", *TITLES.values()], lines)


def by_load(title: str, models: dict[str, dict]) -> str:
    """First audio (median / 95th percentile) and audio seconds per second of each model, and the sum of underruns."""
    lines = []
    for name, first in next(iter(models.values())).items():
        if "first_audio_ms" not in first:
            continue  # the row of the lists of texts
        line = [name]
        for rows in models.values():
            line.append(" / ".join(cell(rows, name, key) for key in ("first_audio_ms", "first_audio_p95_ms")))
            line.append(cell(rows, name, "audio_seconds_per_second"))
        lines.append([*line, str(sum(rows[name]["underruns"] for rows in models.values()))])
    columns = [column for model in models for column in (f"{model}: first audio", "audio s/s")]
    return markdown_table([title, *columns, "underruns"], lines)


def server_by_load(title: str, pattern: str, kind: str = "_server") -> str:
    """A column for each model whose name after the size matches the pattern. Its group is the title; if empty, pcm."""
    found = [(re.fullmatch(f"[^,]+, {pattern}", name), rows) for name, rows in results_of(kind)["models"].items()]
    return by_load(title, {name[1] or "pcm": rows for name, rows in found if name})


def by_list() -> str:
    sizes = [results_of("_streams")["models"][size]["lists"] for size in SIZES]
    columns = [title for size in SIZES for title in (f"{size}: upstream's method", "engine.generate")]
    calls = ("upstream_method", "engine")
    lines = ([texts, *(cell(lists, texts, call) for lists in sizes for call in calls)] for texts in sizes[0])
    return markdown_table(["texts", *columns], lines)


def new_process() -> str:
    rows = results_of("_ready")["models"]["0.6B"]
    header = ["a new process, 0.6B", f"median of {rows['ready']['runs']}"]
    return markdown_table(header, ([label, cell(rows, "ready", key)] for label, key in READY.items()))


def server_limits() -> str:
    lines = []
    for item in LIMITS:
        default = "the machine's" if item.default is None else f"{item.default:.0f}"
        lines.append([f"`--{item.name.replace('_', '-')}`", default, item.metadata["help"]])
    return markdown_table(["option", "default", "what it limits"], lines)


def bounds_of(gpu: str) -> dict[str, float]:
    return {size: bound_ms(meta_model(size).talker, BANDWIDTH[gpu]) for size in SIZES}


def by_gpu() -> str:
    amounts = [f"bound, {size} ({bytes_per_frame(meta_model(size).talker) / 1e9:.2f} GB)" for size in SIZES]
    lines = []
    for gpu, bandwidth in BANDWIDTH.items():
        bounds = [f"{ms:.2f} ms" for ms in bounds_of(gpu).values()]
        lines.append([LABELS.get(gpu, gpu), f"{bandwidth:,}", *bounds, measured_frame(gpu), PUBLISHED.get(gpu, "")])
    header = ["GPU", "memory, GB/s", *amounts, "measured with this project", "published by others"]
    return markdown_table(header, lines)


def measured_frame(gpu: str) -> str:
    """The time of a frame on the fastest path, and the share of the bound that it reaches, from the GPU's results."""
    path = ROOT / "results" / f"{file_stem(gpu)}.json"
    key = f"frame at position {POSITION}"
    cells = []
    for size, rows in json.loads(path.read_text())["models"].items() if path.is_file() else ():
        if times := [row[key] for row in rows.values() if key in row]:
            cells.append(f"{min(times):.2f} ms, {bounds_of(gpu)[size] / min(times):.0%} ({size})")
    return "; ".join(cells)


def by_example() -> str:
    """The bound of seconds of audio per second, for a few GPUs."""
    frame_ms = 1000 / FRAME_RATE
    lines = ([size, *(f"{frame_ms / bounds_of(gpu)[size]:.1f}" for gpu in EXAMPLES)] for size in SIZES)
    return markdown_table(["x real time at most, calculated", *EXAMPLES], lines)


def headline() -> str:
    frames = both_sizes(MEGAKERNEL, "ms_per_frame")
    first = both_sizes(f"{MEGAKERNEL}, chunks of 1", "first_audio_ms")
    return (
        f"On one H200 a frame takes {frames[0]} ms (0.6B) or {frames[1]} ms (1.7B), and the first audio is there after "
        f"{first[0]} or {first[1]} ms."
    )


def measured_on() -> str:
    card, peer = results_of()["card"], rows_of("0.6B")[PEER]
    return (
        f"One {card['gpu']}, {card['dtype']}, **{card['weights']} weights** (speed does not depend on their values), "
        f"commit {card['commit']}, torch {card['torch']}, transformers {card['transformers']}, qwen-tts "
        f"{card['qwen-tts']}; faster-qwen3-tts {peer['version']} with transformers {peer['transformers']}. Medians of "
        "one run of `bench.py`; of `bench.py --streams` for 64 streams and further rows."
    )


def server_memory() -> str:
    peaks = [rows_of(size)[MEGAKERNEL]["peak_gib"] for size in SIZES]
    per_row = [rows_of(size)["1 stream alone"]["gib_per_stream"] for size in SIZES]
    room = [f"{peak + count * row:.0f}" for count in (64, 8) for peak, row in zip(peaks, per_row)]
    return (
        "Room for 64 listeners takes about {} GiB of GPU memory with 0.6B and {} GiB with 1.7B; with `--max-streams 8` "
        "it is about {} and {} GiB (calculated from the [results](results.md)). Most of it is keys and values: lower "
        "`--max-streams` or `--max-seq-len` to save memory."
    ).format(*room)


def many_listeners() -> str:
    served = results_of("_server")["models"]["1.7B, over HTTP"]["20 requests per second for 60 s"]
    heard = round(served["audio_seconds_per_second"])
    return (
        f"With the server, {heard} were measured (1.7B, 20 requests per second); that was the load, not the limit. Ten "
        f"thousand listeners (a calculation, not a measurement) are {10_000 / heard:.0f} H200s at that load."
    )


BLOCKS = {
    "headline": headline,
    "measured_on": measured_on,
    "summary": lambda: by_size(SUMMARY),
    "rows": by_row,
    "details": lambda: by_size(
        every_key(f"{THREE_FILES}, times as fast", f"{MEGAKERNEL}, a frame's parts in ms") | DETAILS
    ),
    "first_audio": lambda: by_size(every_key(f"{MEGAKERNEL}, first audio's parts in ms")),
    "lists": by_list,
    "listeners": lambda: by_load("", results_of("_streams")["models"]),
    "server": lambda: server_by_load("1.7B", "(engine|over HTTP)"),
    "server_conditions": lambda: server_by_load("1.7B over HTTP", "over HTTP, (.+)"),
    "formats": lambda: server_by_load("1.7B over HTTP", "over HTTP(?:, (.+))?", "_formats"),
    "new_process": new_process,
    "limits": server_limits,
    "memory": server_memory,
    "many_listeners": many_listeners,
    "bounds": by_gpu,
    "bounds_of_some": by_example,
}
