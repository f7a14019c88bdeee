"""Print and write each row of figures as soon as it is measured: a table for each model, and one JSON file."""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

WIDTH = 100  # columns of the terminal
FIGURES = {  # key of a row -> its title in the table, and the digits after the point
    "ms_per_frame": ("ms/frame", 2),
    "x_real_time": ("x real time", 2),
    "audio_seconds_per_second": ("audio s/s", 1),
    "first_audio_ms": ("first ms", 1),
    "first_audio_p95_ms": ("p95 ms", 1),
    "first_audio_p99_ms": ("p99 ms", 1),
    "late_chunks": ("late", 0),
    "underruns": ("underruns", 0),
    "peak_gib": ("peak GiB", 2),
    "seconds_to_capture": ("capture s", 1),
    "word_errors_percent": ("word errors %", 1),
    "word_errors_low": ("from", 1),
    "word_errors_high": ("to", 1),
    "change_low": ("change from", 1),
    "change_high": ("to", 1),
    "similarity": ("similarity", 3),
    "seconds": ("seconds", 1),
    "runaways": ("runaways", 0),
}


def report(rows: Iterable[tuple[str, str, dict]], columns: list[str], results: dict, path: Path | None) -> None:
    """Print the rows, add them to `results["models"]`, and write `results` to the file.

    rows: the model's name, the row's name, and its figures
    columns: keys of FIGURES; a row that has none of them is printed as text
    """
    for model, name, row in rows:
        if model not in results["models"]:
            print()
            print_table_line(model, columns, [FIGURES[key][0] for key in columns])
        results["models"].setdefault(model, {})[name] = row
        print_row(name, row, columns)
        if row.get("errors"):
            print_wrapped(f"    {len(row['errors'])} errors: {row['errors'][0]}")
        if path:
            path.write_text(json.dumps(results, indent=1) + "\n")


def print_row(name: str, row: dict, columns: list[str]) -> None:
    if not row.keys() & columns:
        print_wrapped(f"{name}: {as_text(row)}")
        return
    figures = [(row.get(key), FIGURES[key][1]) for key in columns]
    print_table_line(name, columns, ["" if value is None else f"{value:.{digits}f}" for value, digits in figures])


def print_table_line(name: str, columns: list[str], cells: list[str]) -> None:
    """Print the cells right-aligned below their titles. A long name may run into empty cells."""
    line = "".join(f"{cell:>{len(FIGURES[key][0]) + 2}}" for cell, key in zip(cells, columns)).rjust(WIDTH)
    print((name + line[len(name) :]).rstrip(), flush=True)


def as_text(row: dict) -> str:
    figures = []
    for key, value in row.items():
        if isinstance(value, dict):
            figures.append(f"{key} ({as_text(value)})")
        else:
            figures.append(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(figures)


def print_wrapped(text: str) -> None:
    print(textwrap.fill(text, WIDTH, subsequent_indent="    "), flush=True)
