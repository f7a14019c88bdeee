"""What is measured in a process of its own: a Python program that prints rows as JSON, each when it is measured."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

LIMIT = 1200.0  # seconds, more than ten times what any of them takes on an H200


def printed_by(
    program: list,
    first_bytes: int | None = None,
    python: str | Path = sys.executable,
    environment: dict | None = None,
    limit: float = LIMIT,
) -> Iterator[bytes]:
    """The lines that a Python program prints. Or its first bytes: then it is stopped. ValueError if it fails."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen([python, *program], stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
            killer = threading.Timer(limit, process.kill)
            killer.start()
            try:
                if first_bytes is None:
                    yield from process.stdout
                    process.wait()
                elif len(output := process.stdout.read(first_bytes)) == first_bytes:
                    yield output
                    return
            finally:
                killer.cancel()
                process.kill()
        if first_bytes or process.returncode:
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["it took too long"]
            raise ValueError(f"{' '.join(map(str, program[:3]))} has failed: {reason[0]}")


def rows_from(module: str, *arguments, **options) -> Iterator[list]:
    """What a module of this folder gives to `print_rows`."""
    for line in printed_by(["-m", f"{__package__}.{module}", *arguments], **options):
        if line.startswith(b"["):
            yield json.loads(line)


def print_rows(rows: Iterable[tuple[str, dict]]) -> None:
    """Whatever else is printed meanwhile goes to stderr. Ends the process: torch need not tidy up."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for row in rows:
        print(json.dumps(row), file=output, flush=True)
    os._exit(0)
