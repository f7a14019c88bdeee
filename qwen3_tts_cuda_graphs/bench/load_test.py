"""Drive a running server over HTTP and report what listeners hear. But for --compare, it needs Python alone.

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

from qwen3_tts_cuda_graphs.bench.listeners import TEXT, Hearing, StartStream, listen_at, poisson_arrivals, summary
from qwen3_tts_cuda_graphs.bench.over_http import in_format, running_server, until_it_speaks
from qwen3_tts_cuda_graphs.bench.processes import rows_from
from qwen3_tts_cuda_graphs.bench.report import report
from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE

SHORT = 10.0  # seconds of requests, for what is measured beside --rate
SECONDS_TO_START = 1.0  # of the processes of listeners
COLUMNS = "first_audio_ms first_audio_p95_ms first_audio_p99_ms audio_seconds_per_second underruns".split()

Drive = Callable[[list[float], bool], tuple[list[Hearing], list[str], float]]
# takes when listeners come, and whether each waits for the one before; returns them, their errors, and the seconds


def measure(args: argparse.Namespace, drive: Drive, is_short: bool = False) -> Iterator[tuple[str, dict]]:
    """Rows of results, each with its name, when it is measured. Without --compare, one of the three kinds."""
    cases, rates = {}, {}
    if args.one_by_one:
        cases[f"{args.one_by_one} one by one"] = [([0.0] * args.one_by_one, True)]
    if args.compare or not (args.one_by_one or args.crowds):
        rates[args.rate] = min(args.seconds, SHORT) if is_short else args.seconds
        rates |= {} if is_short else dict.fromkeys(args.other_rates, SHORT)
    for rate, seconds in sorted(rates.items()):
        cases[f"{rate:g} requests per second for {seconds:g} s"] = [([*poisson_arrivals(rate, seconds)], False)]
    for count in args.crowds:
        cases[f"{count} at once"] = [([0.0] * count, False)] * args.times
    _, errors, _ = drive([0.0], True)  # warm-up
    if errors:
        raise OSError(errors[0])
    for name, runs in cases.items():
        parts, errors, walls = zip(*(drive(*run) for run in runs))
        row = summary(sum(parts, []), sum(walls)) | {"errors": sum(errors, [])}
        if len(runs) > 1:  # one slow crowd of many shows here
            p95s = [summary(part, wall)["first_audio_p95_ms"] for part, wall in zip(parts, walls)]
            row["first_audio_p95_ms_of_each"] = p95s
        yield name, row


def drive_here(
    start: StartStream, arrivals: list[float], one_by_one: bool, begin_at: float = 0.0
) -> tuple[list[Hearing], list[str], float]:
    """Listeners in this process."""
    errors = []

    def start_noting_errors() -> Iterator:
        try:
            yield from start()
        except OSError as error:  # what was heard before it counts, too
            errors.append(str(error))

    time.sleep(max(0.0, begin_at - time.time()))
    listeners, wall = listen_at(start_noting_errors, arrivals, *([1] if one_by_one else []))
    return listeners, errors, wall


def drive_processes(
    start: StartStream, clients: int, arrivals: list[float], one_by_one: bool
) -> tuple[list[Hearing], list[str], float]:
    """The listeners divided between processes, which begin at the same time. Busy cores are to keep the server waiting,
    not its listeners, so they have the same priority."""
    from qwen3_tts_cuda_graphs.serving.server_options import raise_priority

    clients = 1 if one_by_one else min(clients, len(arrivals))
    begin_at = time.time() + SECONDS_TO_START
    with ProcessPoolExecutor(clients, get_context("spawn"), initializer=raise_priority) as processes:
        parts = [
            processes.submit(drive_here, start, arrivals[number::clients], one_by_one, begin_at)
            for number in range(clients)
        ]
        listeners, errors, walls = zip(*(part.result() for part in parts))
    return sum(listeners, []), sum(errors, []), max(walls)


# ---- Beside the engine


def beside_engine(args: argparse.Namespace, request: dict) -> Iterator[tuple[str, str, dict]]:
    """Who was measured, and what `measure` yields."""
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
        until_it_speaks(server, url)
        start = in_format(url, None, "pcm", request)
        name = f"{size}, over HTTP"
        for row in measure(args, partial(drive_processes, start, 1)):
            yield name, *row
        nothing = contextlib.nullcontext()
        conditions = [(kind, in_format(url, None, kind, request), 1, nothing) for kind in args.formats]
        if args.clients > 1:
            conditions += [(f"{args.clients} processes of listeners", start, args.clients, nothing)]
        if args.idle_websockets:
            idle = idle_websockets(url, args.idle_websockets)
            conditions += [(f"{args.idle_websockets} idle WebSockets", start, 1, idle)]
        if args.busy:
            conditions += [("all cores busy", start, 1, busy_cores())]
        for which, start, clients, condition in conditions:
            with condition:
                for row in measure(args, partial(drive_processes, start, clients), is_short=True):
                    yield f"{name}, {which}", *row


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
        result = {"card": machine_card(args.weights), "max_streams": args.max_streams, "models": {}}
        rows = beside_engine(args, request)
    else:
        result = {"models": {}}
        start = in_format(args.url, args.api_key, args.format, request)
        rows = ((args.url, *row) for row in measure(args, partial(drive_here, start)))
    report(rows, COLUMNS, result, args.json)
    sys.exit(any(row["errors"] for rows in result["models"].values() for row in rows.values()))


if __name__ == "__main__":
    with cli_errors():
        main()
