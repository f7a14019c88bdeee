"""What the server adds: the same listeners with the engine alone and with a server, each in a process of its own.

    python -m qwen3_tts_cuda_graphs.bench.load_test --compare 0.6B --speaker speaker.pt --json results/server.json

Listeners of the server are in a process of their own, too, as real ones are. Then the same server is measured again,
for a shorter time, in other formats, with listeners in several processes, beside idle WebSockets, and while all cores
are busy.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

from qwen3_tts_cuda_graphs.bench.listeners import Hearing, listen_at, noting_errors, poisson_arrivals, summary
from qwen3_tts_cuda_graphs.serving.server_options import raise_file_limit, raise_priority

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 1.0  # of the processes of listeners
SHORT = 10.0  # seconds of requests, for what is measured beside --rate


Drive = Callable[[list[float], bool], tuple[list[Hearing], list[str], float]]
# takes when listeners come, and whether each waits for the one before; returns them, their errors, and the seconds


def measure(args: argparse.Namespace, drive: Drive, is_short: bool = False) -> Iterator[tuple[str, dict]]:
    """Rows of results, each with its name, when it is measured."""
    cases = {f"{args.one_by_one} one by one": [([0.0] * args.one_by_one, True)]}
    rates = {args.rate: min(args.seconds, SHORT) if is_short else args.seconds}
    rates |= {} if is_short else dict.fromkeys(args.other_rates, SHORT)
    for rate, seconds in sorted(rates.items()):
        cases[f"{rate:g} requests per second for {seconds:g} s"] = [(poisson_arrivals(rate, seconds), False)]
    for count in args.crowds:
        cases[f"{count} at once"] = [([0.0] * count, False)] * args.times
    drive([0.0], True)  # warm-up
    for name, runs in cases.items():
        parts, errors, walls = zip(*(drive([*arrivals], one_by_one) for arrivals, one_by_one in runs))
        row = summary(sum(parts, []), sum(walls)) | {"errors": sum(errors, [])}
        if len(runs) > 1:  # one slow crowd of many shows here
            p95s = [summary(part, wall)["first_audio_p95_ms"] for part, wall in zip(parts, walls)]
            row["first_audio_p95_ms_of_each"] = p95s
        yield name, row


def compare(args: argparse.Namespace, in_format: Callable, request: dict) -> Iterator[tuple[str, str, dict]]:
    """Who was measured, and what `measure` yields.

    in_format: load_test.in_format; request: what listeners ask for
    """
    size = Path(args.compare).name
    command = [
        sys.executable,
        "-m",
        "qwen3_tts_cuda_graphs.bench.compare",
        json.dumps(vars(args) | {"request": request}, default=str),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as engine:
        try:
            for line in engine.stdout:
                yield f"{size}, engine", *json.loads(line)
        except BaseException:
            engine.kill()
            raise
    if engine.returncode != 0:
        raise ValueError("the engine alone could not be measured: it says why above")
    raise_file_limit()  # for many connections, of this process and its children
    with running_server(args) as url:
        start = in_format(url, None, "pcm", request)
        server = f"{size}, over HTTP"
        for row in measure(args, partial(drive_server, start, 1)):
            yield server, *row
        nothing = contextlib.nullcontext()
        conditions = [(name, in_format(url, None, name, request), 1, nothing) for name in args.formats]
        if args.clients > 1:
            conditions += [(f"{args.clients} processes of listeners", start, args.clients, nothing)]
        if args.idle_websockets:
            idle = idle_websockets(url, args.idle_websockets)
            conditions += [(f"{args.idle_websockets} idle WebSockets", start, 1, idle)]
        if args.busy:
            conditions += [("all cores busy", start, 1, busy_cores())]
        for name, start, clients, condition in conditions:
            with condition:
                for row in measure(args, partial(drive_server, start, clients), is_short=True):
                    yield f"{server}, {name}", *row


def drive_server(
    start: Callable, clients: int, arrivals: list[float], one_by_one: bool
) -> tuple[list[Hearing], list[str], float]:
    """The listeners divided between processes, which begin at the same time. Busy cores are to keep the server waiting,
    not its listeners, so they have the same priority."""
    clients = 1 if one_by_one else min(clients, len(arrivals))
    begin_at = time.time() + SECONDS_TO_START
    with ProcessPoolExecutor(clients, get_context("spawn"), initializer=raise_priority) as processes:
        parts = [
            processes.submit(drive_part, start, arrivals[number::clients], one_by_one, begin_at)
            for number in range(clients)
        ]
        results = [part.result() for part in parts]
    listeners = [listener for part, _, _ in results for listener in part]
    errors = [error for _, errors, _ in results for error in errors]
    return listeners, errors, max(wall for _, _, wall in results)


def drive_part(start, arrivals, one_by_one, begin_at=0.0) -> tuple[list[Hearing], list[str], float]:
    """In this process."""
    errors = []
    time.sleep(max(0.0, begin_at - time.time()))
    listeners, wall = listen_at(noting_errors(start, errors), arrivals, *([1] if one_by_one else []))
    return listeners, errors, wall


@contextlib.contextmanager
def running_server(args: argparse.Namespace) -> Iterator[str]:
    """Its address, once it is ready."""
    with tempfile.TemporaryDirectory() as voices:
        command = [
            sys.executable,
            "-m",
            "qwen3_tts_cuda_graphs.serving",
            "--model",
            args.compare,
            "--port",
            "0",
            "--voices",
            voices,
        ]
        command += ["--max-streams", str(args.max_streams), "--max-connections", "10000", "--idle-seconds", "3600"]
        command += ["--device", args.device] if args.device else []
        command += ["--speaker", str(args.speaker)] if args.speaker else []
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            url = None
            for line in process.stdout:
                url = line.split()[2].rstrip(",") if line.startswith("listening on") else url
                if line.startswith("try it"):
                    break
            else:
                raise ValueError("the server did not start: it says why above")
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=120)


@contextlib.contextmanager
def idle_websockets(url: str, count: int) -> Iterator[None]:
    """Sessions that are configured and then say nothing."""
    from websockets.sync.client import connect  # which the server needs, too

    with contextlib.ExitStack() as connections:
        for _ in range(count):
            address = f"{url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
            connection = connections.enter_context(connect(address, ping_interval=None))
            connection.send('{"type": "session.config"}')
        yield


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A loop for each core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


# ---- The engine alone, in its process


def measure_engine(args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    from qwen3_tts_cuda_graphs.serving.engine_host import EngineHost
    from qwen3_tts_cuda_graphs.speech.warm_up import some_voice

    raise_priority()  # before there are threads, which have that of the one that starts them
    spec = dict(model=args.compare, device=args.device, dtype=None, max_seq_len=2048, speakers={})
    host = EngineHost(spec, connection=SimpleNamespace(flush=lambda: None), stop=None)
    host.begin(args.max_streams, 1)
    _, voice = some_voice(host.tts)
    arguments = voice | {"language": "Auto"}
    arguments |= {"text": args.request["input"], "max_new_tokens": args.request["max_new_tokens"]}

    def start() -> Iterator:
        with contextlib.suppress(UserWarning):  # the speech ends at max_new_tokens
            yield from host.engine.stream(host.method, **arguments)

    yield from measure(args, partial(drive_part, start))
    host.close()


if __name__ == "__main__":
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not a row
    for row in measure_engine(argparse.Namespace(**json.loads(sys.argv[1]))):
        print(json.dumps(row), file=rows, flush=True)
    os._exit(0)  # torch need not tidy up
