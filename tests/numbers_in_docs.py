"""Every measured number in README.md, CONTRIBUTING.md and docs/ is one that a results file has; links lead somewhere.

python tests/test_readme.py            # prints which numbers differ from results/
python tests/test_readme.py --write    # and corrects them
"""

import functools
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `python tests/numbers_in_docs.py`
from qwen3_tts_cuda_graphs.bench import bounds
from qwen3_tts_cuda_graphs.bench.calibrate import GAINS, SELF_TEST
from qwen3_tts_cuda_graphs.serving.settings import Settings

ROOT = Path(__file__).parents[1]
SIZES = "0.6B", "1.7B"
FUSED = "megakernel"
THREE_FILES = "the three files alone"
PEER = "faster-qwen3-tts"
FIRST_AUDIO = "megakernel, first audio's parts in ms"
GROWING = "1, 1, 2, 4, 8, ..."

# A row of a table with a column per size -> row and key of results/h200.json, and the digits shown. Labels are without
# what stands in brackets, without ** and without their unit at the end.
ROWS = {
    "upstream qwen-tts": ("upstream", "ms_per_frame", 0),
    "faster-qwen3-tts": (PEER, "ms_per_frame", 1),
    "the three files alone": (THREE_FILES, "ms_per_frame", 1),
    "separate kernels": ("separate kernels", "ms_per_frame", 1),
    "megakernel": (FUSED, "ms_per_frame", 2),
    "times as fast as upstream": (f"{FUSED}, times as fast", "than upstream", 0),
    "times as fast as faster-qwen3-tts": (f"{FUSED}, times as fast", f"than {PEER}", 1),
    "times as fast as upstream, the three files alone": (f"{THREE_FILES}, times as fast", "than upstream", 1),
    "times as fast as faster-qwen3-tts, the three files alone": (f"{THREE_FILES}, times as fast", f"than {PEER}", 1),
    "a frame alone at position 200": (f"{FUSED}, a frame's parts in ms", "frame at position 200", 2),
    "a frame alone at position 1500": (f"{FUSED}, a frame's parts in ms", "frame at position 1500", 2),
    "x real time, whole call": (FUSED, "x_real_time", 0),
    "x real time, whole call, the three files alone": (THREE_FILES, "x_real_time", 1),
    "x real time, whole call, separate kernels": ("separate kernels", "x_real_time", 1),
    "x real time, whole call, faster-qwen3-tts": (PEER, "x_real_time", 1),
    "x real time, whole call, upstream": ("upstream", "x_real_time", 2),
    "first audio": (f"{FUSED}, chunks of 1", "first_audio_ms", 1),
    "first audio, preset voice": ("voice: preset voice", "first_audio_ms", 1),
    "first audio, preset voice, 63 tokens of text": ("voice: preset voice", "first_audio_63_tokens_ms", 1),
    "first audio, in-context": ("voice: in-context", "first_audio_ms", 1),
    "first audio, separate kernels": ("separate kernels, chunks of 1", "first_audio_ms", 1),
    "first audio, faster-qwen3-tts": (f"{PEER}, chunks of 1", "first_audio_ms", 0),
    "x real time, stream in chunks of 1": (f"{FUSED}, chunks of 1", "x_real_time", 1),
    "x real time, stream in chunks of 1, faster-qwen3-tts": (f"{PEER}, chunks of 1", "x_real_time", 1),
    "x real time, stream in chunks of 8": (f"{FUSED}, chunks of 8", "x_real_time", 0),
    "x real time, stream in chunks of 8, faster-qwen3-tts": (f"{PEER}, chunks of 8", "x_real_time", 1),
    f"x real time, stream in chunks of {GROWING}": (f"{FUSED}, chunks of {GROWING}", "x_real_time", 0),
    "peak memory": (FUSED, "peak_gib", 1),
    "tokenizing and prompt": (FIRST_AUDIO, "tokenize and prompt", 1),
    "prefill": (FIRST_AUDIO, "prefill", 1),
    "the first frame's codes": (FIRST_AUDIO, "first codes", 1),
    "codec and copy to the host": (FIRST_AUDIO, "codec and copy", 1),
}
# The same for results/h200_streams.json.
STREAM_ROWS = {"64 streams at once": ("64 streams at once", "audio_seconds_per_second", 0)}
NUMBER = r"\d+(?:[.,]\d+)*"

# Tables are told apart by their first line.
NOT_MEASURED = {
    "| project | GPU, size | figure |",  # what others published
    "| file or folder | what it is |",
    "| option | meaning |",
    "| phase | every block reads | and writes |",
    "| program | file |",
    "| program | version | how |",
    "| route | what it does |",
    "| field | meaning |",
    "| command | in a checkout |",
}
BY_SIZE = re.compile(r"\|[^|]*\| 0\.6B \| 1\.7B \|")
LISTENERS = "| | 0.6B: audio s/s | first audio | underruns | 1.7B: audio s/s | first audio | underruns |"
LISTS = "| texts | 0.6B: upstream's method | engine.generate | 1.7B: upstream's method | engine.generate |"
SERVER = "| 1.7B | engine: first audio | audio s/s | over HTTP: first audio | audio s/s | underruns |"
CONDITIONS = "| 1.7B over HTTP: first audio |"  # and so on
OPTIONS = "| option | default | what it limits |"
BOUNDS = "| GPU | memory, GB/s |"  # and so on
EXAMPLES = "| x real time at most, calculated |"


# ---- The pages


@dataclass(frozen=True)
class Figure:
    """A piece of a page that must be what was measured."""

    page: str
    start: int
    end: int
    expected: str
    what: str


@dataclass(frozen=True)
class Table:
    """The first line of a table, the place in its page, and that of each cell in the rows."""

    header: str
    start: int
    end: int
    rows: list[list[tuple[int, int]]]


def read_pages() -> dict[str, str]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


@functools.cache
def results(name: str) -> dict:
    return json.loads((ROOT / f"results/{name}.json").read_text())


def tables(text: str) -> Iterator[Table]:
    for found in re.finditer(r"^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE):
        header, body = found.groups()
        rows = []
        for line in re.finditer(r"^.+$", body, re.MULTILINE):
            offset = found.start(2) + line.start()
            cells = re.finditer(r"(?<=\| )[^|]*?(?= \|)", line[0])
            rows.append([(offset + cell.start(), offset + cell.end()) for cell in cells])
        yield Table(header, found.start(), found.end() - 1, rows)


def plain(label: str) -> str:
    """Without bold, brackets and unit."""
    label = label.replace("*", "").replace("`", "")
    return re.sub(r" \([^)]*\)|, (ms|GiB)( per frame)?$|, audio seconds per second$", "", label)


# ---- What the numbers must be


def compare(pages: dict[str, str]) -> tuple[list[Figure], list[str]]:
    """Every number that a results file has, and what is missing or unknown, in words."""
    figures, mistakes = [], []
    for page, text in pages.items():
        for table in tables(text):
            if BY_SIZE.fullmatch(table.header):
                check = figures_by_size(page, text, table.rows)
            elif whole := [lines for start, lines in whole_tables().items() if table.header.startswith(start)]:
                check = [Figure(page, table.start, table.end, whole[0], "the table")]
            elif table.header in NOT_MEASURED:
                check = []
            else:
                check = [f"{page}: no results file is known for the table {table.header}"]
            for item in check:
                (mistakes if isinstance(item, str) else figures).append(item)
    for page, template, values in sentences():
        parts = (re.escape(part).replace(r"\ ", r"\s+") for part in template.split("{}"))
        found = [*re.finditer(f"({NUMBER})".join(parts), pages[page])]
        if len(found) != 1:
            mistakes.append(f"{page}: {len(found)} sentences like {template!r}")
            continue
        assert found[0].re.groups == len(values), template
        for number, value in enumerate(values, 1):
            figures.append(Figure(page, *found[0].span(number), value, template))
    mistakes += missing(pages)
    return figures, mistakes


def figures_by_size(page: str, text: str, rows: list) -> Iterator[Figure | str]:
    for (start, end), *cells in rows:
        label = plain(text[start:end])
        if label not in ROWS | STREAM_ROWS:
            yield f"{page}: it is not known where the row {label!r} comes from"
            continue
        name, key, digits = (ROWS | STREAM_ROWS)[label]
        models = results("h200_streams" if label in STREAM_ROWS else "h200")["models"]
        for size, cell in zip(SIZES, cells, strict=True):
            value = models[size].get(name, {}).get(key)
            if value is None:
                yield f"{page}: {label}, {size}: the results have no {key} of {name!r}"
            else:
                yield Figure(page, *cell, f"{value:.{digits}f}", f"{label}, {size}")
        for package, version in versions().items():
            if label == package and f"({version})" not in text[start:end]:
                yield f"{page}: the row {label!r} does not name version {version}"


@functools.cache
def whole_tables() -> dict[str, str]:
    """Tables that are written from the files as they are, by how they begin."""
    streams = [results("h200_streams")["models"][size] for size in SIZES]
    listeners = [LISTENERS, "|---|---|---|---|---|---|---|"]
    for name in streams[0]:
        if name == "lists":
            continue
        cells = [name]
        for row in (models[name] for models in streams):
            first_audio = f"{row['first_audio_ms']:.0f} / {row['first_audio_p95_ms']:.0f}"
            cells += [f"{row['audio_seconds_per_second']:.0f}", first_audio, f"{row['underruns']}"]
        listeners.append(f"| {' | '.join(cells)} |")

    lists = [LISTS, "|---|---|---|---|---|"]
    for texts in streams[0].get("lists", ()):
        speeds = [models["lists"][texts][way] for models in streams for way in ("upstream_method", "engine")]
        lists.append(f"| {' | '.join([texts, *(f'{speed:.0f}' for speed in speeds)])} |")

    server = [SERVER, "|---|---|---|---|---|---|"]
    ways = [results("h200_server")["models"][f"1.7B, {way}"] for way in ("engine", "over HTTP")]
    for name in ways[0]:
        cells = [name]
        for row in (way[name] for way in ways):
            cells += [f"{row['first_audio_ms']:.1f} / {row['first_audio_p95_ms']:.1f}"]
            cells += [f"{row['audio_seconds_per_second']:.0f}"]
        server.append(f"| {' | '.join(cells)} | {sum(way[name]['underruns'] for way in ways)} |")

    served = results("h200_server")["models"]
    conditions = {name.removeprefix("1.7B, over HTTP, "): rows for name, rows in served.items() if name.count(",") > 1}
    under_conditions = [f"{CONDITIONS} {''.join(f'{name} | ' for name in conditions)}underruns |"]
    under_conditions.append("|---" * (len(conditions) + 2) + "|")
    for name in next(iter(conditions.values()), ()):
        rows = [of[name] for of in conditions.values()]
        cells = [f"{row['first_audio_ms']:.1f} / {row['first_audio_p95_ms']:.1f}" for row in rows]
        under_conditions.append(f"| {' | '.join([name, *cells])} | {sum(row['underruns'] for row in rows)} |")

    options = [OPTIONS, "|---|---|---|"]
    for item in fields(Settings):
        if "help" in item.metadata:
            option = "--" + item.name.replace("_", "-")
            default = "what fits" if item.default is None else f"{item.default:.0f}"
            options.append(f"| `{option}` | {default} | {item.metadata['help']} |")

    parts = {LISTENERS: listeners, LISTS: lists, SERVER: server, CONDITIONS: under_conditions, OPTIONS: options}
    parts |= {BOUNDS: bounds.table(), EXAMPLES: bounds.examples()}
    return {start: "\n".join(lines) for start, lines in parts.items()}


def missing(pages: dict[str, str]) -> Iterator[str]:
    """docs/results.md has every row of ROWS, and every table is on some page."""
    page = pages["docs/results.md"]
    shown = {plain(page[slice(*cells[0])]) for table in tables(page) for cells in table.rows}
    yield from (f"docs/results.md: the row {label!r} is missing" for label in ROWS if label not in shown)
    for start, whole in whole_tables().items():
        has_rows = whole.count("\n") > 1
        if has_rows and not any(start in text for text in pages.values()):
            yield f"this table is missing:\n{whole}"


def versions() -> dict[str, str]:
    """Of the packages whose rows name their version."""
    return {
        "upstream qwen-tts": results("h200")["card"]["qwen-tts"],
        PEER: results("h200")["models"]["0.6B"][PEER]["version"],
    }


def sentences() -> Iterator[tuple[str, str, list[str]]]:
    """A page, a sentence in it with {} for each number, and the numbers. Words that depend on a number are in it."""
    card = results("h200")["card"]
    models = [results("h200")["models"][size] for size in SIZES]
    streams = [results("h200_streams")["models"][size] for size in SIZES]
    page = "docs/results.md"

    yield "README.md", f"One {card['gpu']}, {card['dtype']}, {card['weights']} weights", []
    first_audio = [f"{model[f'{FUSED}, chunks of 1']['first_audio_ms']:.1f}" for model in models]
    per_frame = [f"{model[FUSED]['ms_per_frame']:.2f}" for model in models]
    yield "README.md", "a frame takes {} ms (0.6B) or {} ms (1.7B)", per_frame
    yield "README.md", "first audio is there after {} or {} ms", first_audio

    downloads = [f"{bounds.download_bytes(size) / 1e9:.1f}" for size in SIZES]
    yield "README.md", "{} GB to download for a 0.6B, {} GB for a 1.7B", downloads
    shares = re.findall(r"(\d+)%", re.search(r"^\| H200 \|.*", whole_tables()[BOUNDS], re.M)[0])
    yield "README.md", "the H200 reaches {} (0.6B) and {}% (1.7B)", shares

    yield page, f"One {card['gpu']}, {card['dtype']}, **{card['weights']} weights**", []
    yield page, "torch {}, transformers {};", [card["torch"].split("+")[0], card["transformers"]]
    yield page, "in a process of its own, with transformers {}.", [models[0][PEER]["transformers"]]
    spreads = [f"{value:.0f}" for model in models for value in model["upstream"]["ms_per_frame_spread"]]
    yield page, "upstream's frames took {} to {} ms for 0.6B and {} to {} ms for 1.7B", spreads
    same_stream = f"{FUSED}, chunks of 1", f"{FUSED}, chunks of {GROWING}", "voice: x-vector"
    times = [[model[row]["first_audio_ms"] for row in same_stream] for model in models]
    yield page, "differs by up to {} ms", [f"{max(max(row) - min(row) for row in times):.1f}"]
    late = sum(model[f"{FUSED}, chunks of {chunks}"]["late_chunks"] for model in models for chunks in ("1", GROWING))
    yield page, f"from the first chunk on, had {late or 'no'} underrun in chunks of 1 or growing ones", []

    arriving = [model[f"{FUSED}, text at 50 tokens per second"] for model in models]
    gaps = sum(row["underruns"] for row in arriving)
    values = [str(arriving[0]["runs"]), *(f"{row['first_audio_ms']:.1f}" for row in arriving)]
    template = "(medians of {}): the first audio comes {} ms (1.7B: {} ms) after the text that it needs, and there are "
    yield page, f"{template}{gaps or 'no'} gaps", values

    ready = results("h200_ready")["models"]["0.6B"]["ready"]
    yield page, "medians of {}, in [results/h200_ready.json]", [str(ready["runs"])]
    compiled = [f"{ready[key]:.1f}" for key in ("accelerate_s", "accelerate_empty_cache_s")]
    yield page, "takes {} s, {} s where no kernels are compiled yet", compiled
    requests = [f"{ready[key]:.1f}" for key in ("first_request_ms", "tenth_request_ms")]
    yield page, "first audio after {} ms, the tenth after {} ms", requests
    yield page, "`generate.py` takes {} s.", [f"{ready['shell_to_first_audio_s']:.1f}"]
    yield page, "loading its model alone take {} s", [f"{ready['upstream_imported_and_loaded_s']:.1f}"]

    per_stream = [rows["1 stream alone"]["gib_per_stream"] for rows in streams]
    largest = f"{max(per_stream):.2f}"
    yield page, "A stream takes {} GiB of GPU memory (2,048 positions)", [largest]
    yield "README.md", "A row takes {} GiB of GPU memory", [largest]
    yield "docs/serving.md", "peak memory of one text, and {} GiB per stream", [largest]
    room = [
        f"{model[FUSED]['peak_gib'] + count * gib:.0f}" for count in (64, 8) for model, gib in zip(models, per_stream)
    ]
    template = "takes about {} GiB of GPU memory with 0.6B and {} GiB with 1.7B; with `--max-streams 8` it is about "
    yield "docs/serving.md", template + "{} and {} GiB", room
    cache = 28 * 2 * 8 * 128 * 2 * 2048 / 2**30
    yield "docs/serving.md", "keys and values of a stream are {} GiB of it", [f"{cache:.2f}"]

    asked = round(max(rows["20 requests per second for 60 s"]["audio_seconds_per_second"] for rows in streams))
    yield page, "arrive at random ask for {} audio seconds per second", [str(asked)]
    served = results("h200_server")["models"]["1.7B, over HTTP"]
    heard = max(row["audio_seconds_per_second"] for name, row in served.items() if name.startswith("20 requests"))
    yield "docs/serving.md", "With the server, {} were measured (1.7B, 20 requests per second)", [f"{heard:.0f}"]
    yield "docs/serving.md", "{} H200s at {} each", [f"{10_000 / round(heard):.0f}", f"{heard:.0f}"]
    counts = [rows[f"{count} listeners for 60 s"]["underruns"] for rows in streams for count in (320, 400)]
    template = "320 and 400 of them heard a minute of 0.6B with {} and {} underruns, of 1.7B with {} and {}."
    yield "docs/serving.md", template, [str(underruns) for underruns in counts]

    template = "errors of `--check` were {} to {} times the model's own, with a standard deviation of at most {}"
    yield "CONTRIBUTING.md", template, calibration()


@functools.cache
def calibration() -> list[str]:
    """Errors of a correct kernel relative to the model's own: lowest, highest, and their largest standard deviation."""
    ratios = []
    for size in SIZES:
        runs = results(f"calibration_{size}")["runs"]
        for name in runs[0].keys() - {SELF_TEST}:
            for figure in ("median", "high"):
                for gain in range(len(GAINS)):
                    ratios.append([run[name][figure] for run in runs[gain :: len(GAINS)]])
    spread = max(map(statistics.stdev, ratios))
    return [f"{min(map(min, ratios)):.3f}", f"{max(map(max, ratios)):.3f}", f"{spread:.4f}"]


def differences(pages: dict[str, str]) -> list[str]:
    figures, mistakes = compare(pages)
    for figure in figures:
        found = pages[figure.page][figure.start : figure.end]
        first_line = pages[figure.page].count("\n", 0, figure.start) + 1
        lines = itertools.zip_longest(found.split("\n"), figure.expected.split("\n"), fillvalue="(no line)")
        for line, (old, new) in enumerate(lines, first_line):
            if old != new:
                mistakes.append(f"{figure.page}:{line}: {old} must be {new} ({figure.what})")
    return mistakes


def corrected(pages: dict[str, str]) -> dict[str, str]:
    """The pages with every number as it was measured."""
    pages = dict(pages)
    for figure in sorted(compare(pages)[0], key=lambda figure: figure.start, reverse=True):
        text = pages[figure.page]
        pages[figure.page] = text[: figure.start] + figure.expected + text[figure.end :]
    return pages


def main() -> None:
    pages = read_pages()
    print(*differences(pages) or ["every number is what was measured"], sep="\n")
    if "--write" in sys.argv:
        for page, text in corrected(pages).items():
            (ROOT / page).write_text(text)


if __name__ == "__main__":
    main()
