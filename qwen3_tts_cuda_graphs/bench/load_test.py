"""Drive a running server over HTTP and report what listeners hear. But for --compare, it needs Python alone.

    python -m qwen3_tts_cuda_graphs.bench.load_test --rate 20 --seconds 60  # independent (Poisson) arrivals
    python -m qwen3_tts_cuda_graphs.bench.load_test --at-once 64  # requests in the same instant
    python -m qwen3_tts_cuda_graphs.bench.load_test --one-by-one 100  # one request at a time
    python -m qwen3_tts_cuda_graphs.bench.load_test --compare MODEL --speaker speaker.pt  # server beside engine

A listener plays from the first chunk on. An underrun is audio that arrives later than the player needs it. Requests are
sent when they are due, whether or not earlier ones were answered, so a slow server cannot slow down its own load.
"""

import argparse
import collections
import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from qwen3_tts_cuda_graphs.bench.listeners import TEXT, StartStream, crowd, listen, noting_errors, poisson_arrivals
from qwen3_tts_cuda_graphs.common.scripts import Parser, cli_errors

BYTES_PER_SECOND = 2 * 24000  # of audio as pcm
FRAME_RATE = 12.5
LIMIT = 120.0  # seconds to wait for a server


def speak(
    url: str, api_key: str | None = None, bytes_per_second: float = BYTES_PER_SECOND, **request
) -> Iterator[tuple[bytes, float]]:
    """Audio as a server sends it, and how many bytes make a second. Raises OSError for all that can go wrong."""
    address = urllib.parse.urlsplit(url)
    if not address.hostname:
        raise OSError(f"{url} is no address: give one like http://127.0.0.1:8000")
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname, address.port, timeout=LIMIT)
    try:
        connection.request("POST", "/v1/audio/speech", json.dumps(request), headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise OSError(f"{response.status}: {json.load(response)['error']['message']}")
            while piece := response.read1(65536):
                yield piece, bytes_per_second
    except http.client.IncompleteRead:
        raise OSError("the connection was closed in the middle of the audio") from None
    except (http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise OSError(f"{url} does not answer as this project's server does: {error}") from None
    finally:
        connection.close()


def in_format(url: str, api_key: str | None, name: str, request: dict) -> StartStream:
    """Listeners who ask for this format. One answer, whose length is known, tells how many bytes make a second."""
    start = partial(speak, url, api_key, **request | dict(response_format=name))
    if name == "pcm":
        return start
    frames = request["max_new_tokens"] - 1
    return partial(start, bytes_per_second=sum(len(piece) for piece, _ in start()) * FRAME_RATE / frames)


def drive(start_stream: StartStream, args: argparse.Namespace) -> dict:
    """Listeners as the options say. `errors` counts what went wrong."""
    errors = []
    listen(start_stream)  # warm-up
    start = noting_errors(start_stream, errors)
    if args.one_by_one:
        row = crowd(start, [0.0] * args.one_by_one, threads=1)
    elif args.at_once:
        row = crowd(start, [0.0] * args.at_once)
    else:
        row = crowd(start, poisson_arrivals(args.rate, args.seconds))
    return row | dict(errors=dict(collections.Counter(errors)))


def compare_and_print(args: argparse.Namespace, request: dict) -> bool:
    """Print and write every row when it is measured. Returns whether there were errors."""
    from qwen3_tts_cuda_graphs.bench.compare import compare
    from qwen3_tts_cuda_graphs.bench.machine import machine_card  # imports torch

    columns = ["first_audio_ms", "first_audio_p95_ms", "first_audio_p99_ms", "audio_seconds_per_second", "underruns"]
    result = {"card": machine_card(args.weights), "max_streams": args.max_streams, "models": {}}
    has_errors = False
    print(" " * 74 + "  p50 ms   p95 ms   p99 ms  audio s/s  underruns")
    for who, name, row in compare(args, in_format, request):
        figures = [f"{row[column]:9.1f}" if row[column] is not None else "        -" for column in columns]
        errors = f"   {len(row['errors'])} errors: {row['errors'][0]}" if row["errors"] else ""
        print(f"{f'{who}: {name}':72} {''.join(figures)}{errors}", flush=True)
        has_errors = has_errors or bool(errors)
        result["models"].setdefault(who, {})[name] = row
        write_json(args.json, result)
    return has_errors


def write_json(path: Path | None, result: dict) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--audio-seconds", type=float, default=4.6, help="length at which a speech is ended")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive")
    parser.add_argument("--at-once", type=int, metavar="N")
    parser.add_argument("--one-by-one", type=int, metavar="N")
    parser.add_argument("--format", default="pcm", help="what listeners ask for; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    starts = parser.add_argument_group("with --compare")
    starts.add_argument("--compare", metavar="MODEL")
    starts.add_argument("--speaker", type=Path, help="a speaker.pt, for a Base model")
    starts.add_argument("--device")
    starts.add_argument("--weights", default="random", help="whose they are, for the results' card")
    starts.add_argument("--max-streams", type=int, default=64)
    starts.add_argument("--crowds", type=int, nargs="*", default=[16, 64], help="listeners at once")
    starts.add_argument("--times", type=int, default=3, help="how often each of these crowds comes")
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
    if args.compare:
        args.one_by_one = args.one_by_one or 50
        has_errors = compare_and_print(args, request)
    else:
        result = drive(in_format(args.url, args.api_key, args.format, request), args)
        for name, value in result.items():
            print(f"{name.replace('_', ' '):32} {f'{value:.1f}' if isinstance(value, float) else value}")
        has_errors = bool(result["errors"])
        write_json(args.json, result)
    sys.exit(has_errors)


if __name__ == "__main__":
    with cli_errors():
        main()
