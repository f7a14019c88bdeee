"""Measurements in a process of their own: a Python program that prints each row as JSON as soon as it is measured."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

TIMEOUT = 1200.0  # seconds, more than ten times what any of the programs takes on an H200


def output_of(
    program: list,
    first_bytes: int | None = None,
    python: str | Path = sys.executable,
    environment: dict | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[bytes]:
    """Run a Python program and yield the lines that it prints. With `first_bytes`, yield that many bytes and kill it.

    A program that fails is a ValueError with the last line of its stderr.
    """
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen([python, *program], stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
            timer = threading.Timer(timeout, process.kill)
            timer.start()
            try:
                if first_bytes is None:
                    yield from process.stdout
                    process.wait()
                elif len(output := process.stdout.read(first_bytes)) == first_bytes:
                    yield output
                    return
            finally:
                timer.cancel()
                process.kill()
        if first_bytes or process.returncode:
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["it took too long"]
            raise ValueError(f"{' '.join(map(str, program[:3]))} has failed: {reason[0]}")


def rows_from(module: str, *arguments, **options) -> Iterator[list]:
    """Run a module of this folder and yield the rows that it prints with `print_rows`."""
    for line in output_of(["-m", f"{__package__}.{module}", *arguments], **options):
        if line.startswith(b"["):
            yield json.loads(line)


def print_rows(rows: Iterable[tuple[str, dict]]) -> None:
    """Print the rows to stdout and end the process at once, without waiting for torch to free everything."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    for row in rows:
        print(json.dumps(row), file=output, flush=True)
    os._exit(0)
