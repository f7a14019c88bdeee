"""Send requests to a running server and report what listeners hear. Except for --compare, it needs Python alone.

    python -m qwen3_tts_cuda_graphs.bench.load_test --rate 20 --seconds 60  # independent (Poisson) arrivals
    python -m qwen3_tts_cuda_graphs.bench.load_test --at-once 64  # requests in the same instant
    python -m qwen3_tts_cuda_graphs.bench.load_test --one-by-one 100  # one request at a time
    python -m qwen3_tts_cuda_graphs.bench.load_test --compare MODEL --speaker speaker.pt  # server beside engine

A listener plays from the first chunk on. An underrun is audio that arrives later than the player needs it. Requests are
sent when they are due, whether or not earlier ones were answered, so a slow server cannot slow down its own load.

--compare measures what the server adds: the same listeners with the engine alone and with a server, each in a process
of its own, as listeners of the server are, too. Then the same server is measured again, for a shorter time, in other
formats, with listeners in several processes, beside idle WebSockets, and while all cores are busy.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from qwen3_tts_cuda_graphs.bench.listeners import TEXT, Hearing, StartStream, listen_at, poisson_arrivals, summary
from qwen3_tts_cuda_graphs.bench.over_http import in_format, running_server, wait_for_first_audio
from qwen3_tts_cuda_graphs.bench.processes import rows_from
from qwen3_tts_cuda_graphs.bench.report import report
from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE

SHORT = 10.0  # seconds of requests, for --other-rates and for the further conditions of --compare
SECONDS_TO_START = 1.0  # time for the listeners' processes to start
COLUMNS = "first_audio_ms first_audio_p95_ms first_audio_p99_ms audio_seconds_per_second underruns".split()


class Load(NamedTuple):
    """When the listeners of a row of the results start their requests."""

    name: str
    arrivals: list[float]  # in seconds
    one_by_one: bool = False  # each listener waits for the one before
    times: int = 1  # how often it is repeated


class Outcome(NamedTuple):
    """What the listeners of a load have heard."""

    listeners: list[Hearing]
    errors: list[str]
    seconds: float  # until all had finished


Drive = Callable[[Load], Outcome]


def measure(args: argparse.Namespace, drive: Drive, is_short: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield the name and the row of each load as soon as it is measured."""
    loads = [*planned_loads(args, is_short)]
    warm_up = drive(Load("warm-up", [0.0], one_by_one=True))
    if warm_up.errors:
        raise OSError(warm_up.errors[0])
    for load in loads:
        listeners, errors, seconds = zip(*(drive(load) for _ in range(load.times)))
        row = summary(sum(listeners, []), sum(seconds)) | {"errors": sum(errors, [])}
        if load.times > 1:  # one slow repetition shows here
            p95s = [summary(*repetition)["first_audio_p95_ms"] for repetition in zip(listeners, seconds)]
            row["first_audio_p95_ms_of_each"] = p95s
        yield load.name, row


def planned_loads(args: argparse.Namespace, is_short: bool) -> Iterator[Load]:
    """The loads that the options ask for. Without --compare, they are of one kind."""
    if args.one_by_one:
        yield Load(f"{args.one_by_one} one by one", [0.0] * args.one_by_one, one_by_one=True)
    rates = {}
    if args.compare or not (args.one_by_one or args.crowds):
        rates[args.rate] = min(args.seconds, SHORT) if is_short else args.seconds
        rates |= {} if is_short else dict.fromkeys(args.other_rates, SHORT)
    for rate, seconds in sorted(rates.items()):
        yield Load(f"{rate:g} requests per second for {seconds:g} s", [*poisson_arrivals(rate, seconds)])
    for count in args.crowds:
        yield Load(f"{count} at once", [0.0] * count, times=args.times)


def drive_here(start: StartStream, load: Load, begin_at: float = 0.0) -> Outcome:
    """Run a load's listeners in this process. begin_at: time.time() at which they begin"""
    errors = []

    def start_noting_errors() -> Iterator:
        try:
            yield from start()
        except OSError as error:  # what was heard before the error counts, too
            errors.append(str(error))

    time.sleep(max(0.0, begin_at - time.time()))
    listeners, seconds = listen_at(start_noting_errors, load.arrivals, *([1] if load.one_by_one else []))
    return Outcome(listeners, errors, seconds)


def drive_processes(start: StartStream, clients: int, load: Load) -> Outcome:
    """Divide a load's listeners between processes, which begin at the same time.

    They get the server's priority, so that on busy cores the server may have to wait, but not its listeners.
    """
    from qwen3_tts_cuda_graphs.serving.server_options import raise_priority

    clients = 1 if load.one_by_one else min(clients, len(load.arrivals))
    begin_at = time.time() + SECONDS_TO_START
    with ProcessPoolExecutor(clients, get_context("spawn"), initializer=raise_priority) as processes:
        shares = [load._replace(arrivals=load.arrivals[number::clients]) for number in range(clients)]
        futures = [processes.submit(drive_here, start, share, begin_at) for share in shares]
        listeners, errors, seconds = zip(*(future.result() for future in futures))
    return Outcome(sum(listeners, []), sum(errors, []), max(seconds))


# ---- Beside the engine


def beside_engine(args: argparse.Namespace, request: dict) -> Iterator[tuple[str, str, dict]]:
    """Measure the engine alone, then the server. Yields what was measured, and the name and row of each load."""
    from qwen3_tts_cuda_graphs.serving.server_options import raise_file_limit

    size = Path(args.compare).name
    for row in rows_from("engine_alone", json.dumps(vars(args) | {"request": request}, default=str)):
        yield f"{size}, engine", *row
    raise_file_limit()  # for many connections, of this process and its children
    options = f"--max-streams {args.max_streams} --max-connections 10000 --idle-seconds 3600".split()
    options += ["--model", args.compare]
    options += ["--device", args.device] if args.device else []
    options += ["--speaker", args.speaker] if args.speaker else []
    with running_server(*options) as (server, url):
        wait_for_first_audio(server, url)
        start = in_format(url, None, "pcm", request)
        name = f"{size}, over HTTP"
        for row in measure(args, partial(drive_processes, start, 1)):
            yield name, *row

        as_usual = contextlib.nullcontext()
        conditions = [(kind, in_format(url, None, kind, request), 1, as_usual) for kind in args.formats]
        if args.clients > 1:
            conditions += [(f"{args.clients} processes of listeners", start, args.clients, as_usual)]
        if args.idle_websockets:
            idle = idle_websockets(url, args.idle_websockets)
            conditions += [(f"{args.idle_websockets} idle WebSockets", start, 1, idle)]
        if args.busy:
            conditions += [("all cores busy", start, 1, busy_cores())]
        for condition, start, clients, context in conditions:
            with context:
                for row in measure(args, partial(drive_processes, start, clients), is_short=True):
                    yield f"{name}, {condition}", *row


@contextlib.contextmanager
def idle_websockets(url: str, count: int) -> Iterator[None]:
    """Open WebSockets that send their configuration and nothing else."""
    from websockets.sync.client import connect  # which the server needs, too

    with contextlib.ExitStack() as connections:
        for _ in range(count):
            address = f"{url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
            connection = connections.enter_context(connect(address, ping_interval=None))
            connection.send('{"type": "session.config"}')
        yield


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Run an endless loop for each core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


# ---- The command


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--audio-seconds", type=float, default=4.6, help="length at which an utterance is ended")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive")
    parser.add_argument("--crowds", "--at-once", type=int, nargs="*", metavar="N", help="listeners at once")
    parser.add_argument("--times", type=int, default=3, help="how often each of these crowds comes")
    parser.add_argument("--one-by-one", type=int, metavar="N")
    parser.add_argument("--format", default="pcm", help="what listeners ask for; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    starts = parser.add_argument_group("with --compare")
    starts.add_argument("--compare", metavar="MODEL")
    starts.add_argument("--speaker", type=Path, help="a speaker.pt, for a Base model")
    starts.add_argument("--device")
    starts.add_argument("--weights", default="random", help="whose they are, for the results' card")
    starts.add_argument("--max-streams", type=int, default=64)
    starts.add_argument("--other-rates", type=float, nargs="*", default=[], help="also these, for 10 s each")
    starts.add_argument("--clients", type=int, default=1, help="also with this many processes of listeners")
    starts.add_argument("--idle-websockets", type=int, default=0, help="also beside this many")
    starts.add_argument("--formats", nargs="*", default=[], help="also in these, such as mp3 opus aac flac")
    starts.add_argument("--busy", action="store_true", help="also with a busy loop on each core")
    args = parser.parse_args()
    if min([args.rate, *args.other_rates]) <= 0:
        raise ValueError("--rate and --other-rates must be above 0")

    request = dict(input=args.text, voice=args.voice, response_format="pcm")
    request["max_new_tokens"] = round(args.audio_seconds * FRAME_RATE) + 1
    args.crowds = args.crowds if args.crowds is not None else [16, 64] if args.compare else []
    if args.compare:
        from qwen3_tts_cuda_graphs.bench.measured import machine_card  # imports torch

        args.one_by_one = args.one_by_one or 50
        results = {"card": machine_card(args.weights), "max_streams": args.max_streams, "models": {}}
        rows = beside_engine(args, request)
    else:
        results = {"models": {}}
        start = in_format(args.url, args.api_key, args.format, request)
        rows = ((args.url, *row) for row in measure(args, partial(drive_here, start)))
    report(rows, COLUMNS, results, args.json)
    sys.exit(any(row["errors"] for rows in results["models"].values() for row in rows.values()))


if __name__ == "__main__":
    with cli_errors():
        main()
