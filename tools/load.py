#!/usr/bin/env python3
"""Drive a running server over HTTP and report what listeners hear. Needs nothing but Python's standard library.

    python tools/load.py --rate 20 --seconds 60                  independent (Poisson) arrivals
    python tools/load.py --one-by-one 100                        one request at a time
    python tools/load.py --soak 5000                             many short requests, good, bad and abandoned
    python tools/load.py --compare MODEL --speaker speaker.pt    starts the server itself: what does HTTP add?

A listener plays from the first chunk on. An underrun is audio that arrives later than the player needs it. Requests are
sent when they are due, whether or not earlier ones were answered, so a slow server cannot slow down its own load.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATE = 24000  # samples per second
BYTES_PER_SECOND = 2 * RATE
FRAME_RATE = 12.5
TEXT = "Real time speech synthesis means that the first sound arrives before you notice the wait."
LIMIT = 120.0  # seconds that a request may take


@dataclass
class Listener:
    """What one request was like."""

    first_audio: float | None = None  # seconds after it was sent
    seconds: float = 0.0  # of audio
    underruns: int = 0
    outcome: str = "unfinished"  # complete, cancelled, or an error in words


@dataclass
class Server:
    """An HTTP/1.1 client for one server."""

    url: str
    api_key: str | None = None
    address: tuple = field(init=False)

    def __post_init__(self):
        parts = urllib.parse.urlsplit(self.url)
        self.address = parts.hostname, parts.port or 80

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[tuple[int, AsyncIterator]]:
        """Yields the status and the pieces of the body. Leaving early closes the connection."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            headers = [f"{method} {path} HTTP/1.1", f"Host: {self.address[0]}:{self.address[1]}", "Connection: close"]
            headers += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            headers += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
            writer.write("\r\n".join([*headers, "", ""]).encode() + body)
            status = int((await reader.readline()).split()[1])
            fields = {}
            while (line := await reader.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                fields[name.lower()] = value.strip().lower()
            is_chunked = fields.get("transfer-encoding") == "chunked"
            yield status, chunks_of(reader) if is_chunked else rest_of(reader)
        finally:
            writer.close()

    async def read(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        async with self.request(method, path, body) as (status, pieces):
            return status, b"".join([piece async for piece in pieces])

    async def metrics(self) -> dict[str, float]:
        _, text = await self.read("GET", "/metrics")
        lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def chunks_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        while size:
            data = await reader.read(size)
            if not data:
                raise ConnectionError("the connection was closed in the middle of the audio")
            size -= len(data)
            yield data
        await reader.readline()
    await reader.readline()


async def rest_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data


async def listen(server: Server, request: dict, leave_after: float | None = None) -> Listener:
    """Ask for speech and take the times. `leave_after`: seconds of audio after which the listener goes away."""
    listener = Listener()
    asked = time.perf_counter()
    try:
        body = json.dumps(request).encode()
        async with asyncio_timeout(LIMIT), server.request("POST", "/v1/audio/speech", body) as (status, pieces):
            if status != 200:
                text = b"".join([piece async for piece in pieces])
                raise ConnectionError(f"{status}: {json.loads(text)['error']['message']}")
            async for piece in pieces:
                now = time.perf_counter()
                if listener.first_audio is None:
                    listener.first_audio = now - asked
                elif now > asked + listener.first_audio + listener.seconds:
                    listener.underruns += 1
                listener.seconds += len(piece) / BYTES_PER_SECOND
                if leave_after is not None and listener.seconds > leave_after:
                    listener.outcome = "cancelled"
                    return listener
        listener.outcome = "complete" if listener.seconds else "no audio"
    except (OSError, ValueError, IndexError, asyncio.TimeoutError) as error:
        listener.outcome = str(error) or type(error).__name__
    return listener


@contextlib.asynccontextmanager
async def asyncio_timeout(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, which Python 3.10 does not have."""
    task = asyncio.current_task()
    is_late = False

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    handle = asyncio.get_running_loop().call_later(seconds, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if is_late:
            raise asyncio.TimeoutError(f"no answer within {seconds:g} s") from None
        raise
    finally:
        handle.cancel()


async def poisson(start: Callable[[], Coroutine], per_second: float, seconds: float, dice: random.Random) -> list:
    """Requests that arrive independently of each other."""
    tasks = []
    began = due = time.perf_counter()
    while (due := due + dice.expovariate(per_second)) < began + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(start()))
    return await asyncio.gather(*tasks)


async def soak(server: Server, request: dict, count: int, at_once: int, dice: random.Random) -> dict:
    """Short requests, some bad, some abandoned. Returns how the server's memory, tasks and threads have changed."""
    outcomes = collections.Counter()
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            short = request | {"max_new_tokens": dice.randint(2, 8), "seed": number}
            kind = dice.choice(["good"] * 7 + ["bad", "abandoned", "whole"])
            if kind == "bad":
                short["temperature"] = -1
            if kind == "whole":
                short |= {"response_format": "wav", "stream": False}
            listener = await listen(server, short, leave_after=0.0 if kind == "abandoned" else None)
            expected = {"bad": "400", "abandoned": ("cancelled", "complete")}.get(kind, "complete")
            outcomes[kind if listener.outcome.startswith(expected) else listener.outcome] += 1

    usage = []
    for _ in range(5):  # the first fifth fills the caches
        numbers = iter(range(count // 5))
        await asyncio.gather(*(work() for _ in range(at_once)))
        usage.append(await quiet_usage(server))
    return {"outcomes": dict(outcomes), "usage": usage}


async def quiet_usage(server: Server) -> dict:
    """Memory, tasks and threads once no request is in flight."""
    for _ in range(100):
        figures = await server.metrics()
        if not figures["qwen3_tts_streams_active"] and not figures["qwen3_tts_streams_waiting"]:
            break
        await asyncio.sleep(0.05)
    return {
        "rss_mb": figures["process_resident_memory_bytes"] / 1e6,
        "open_files": figures["process_open_fds"],
        "tasks": figures["qwen3_tts_tasks"],
        "threads": figures["qwen3_tts_threads"],
    }


def summary(listeners: list[Listener], wall: float) -> dict:
    times = sorted(listener.first_audio * 1e3 for listener in listeners if listener.first_audio is not None)
    good = ("complete", "cancelled")
    errors = collections.Counter(listener.outcome for listener in listeners if listener.outcome not in good)

    def percentile(share: float) -> float | None:
        return times[min(len(times) - 1, int(share * len(times)))] if times else None

    return dict(
        requests=len(listeners),
        complete=sum(listener.outcome == "complete" for listener in listeners),
        cancelled=sum(listener.outcome == "cancelled" for listener in listeners),
        errors=dict(errors),
        first_audio_p50_ms=percentile(0.5),
        first_audio_p95_ms=percentile(0.95),
        first_audio_p99_ms=percentile(0.99),
        underruns=sum(listener.underruns for listener in listeners),
        listeners_with_underruns=sum(listener.underruns > 0 for listener in listeners),
        audio_seconds_per_second=sum(listener.seconds for listener in listeners) / wall,
        wall_seconds=wall,
    )


async def drive(server: Server, args: argparse.Namespace) -> dict:
    dice = random.Random(args.seed)
    request = {"input": args.text, "voice": args.voice, "response_format": "pcm"}
    request["max_new_tokens"] = round(args.audio_seconds * FRAME_RATE) + 1

    async def start() -> Listener:
        leaves = dice.random() < args.cancel
        return await listen(server, request, dice.uniform(0, args.audio_seconds) if leaves else None)

    await listen(server, request)  # warm up
    began = time.perf_counter()
    if args.soak:
        return await soak(server, request, args.soak, args.at_once, dice)
    if args.one_by_one:
        listeners = [await start() for _ in range(args.one_by_one)]
    else:
        listeners = await poisson(start, args.rate, args.seconds, dice)
    return summary(listeners, time.perf_counter() - began)


async def in_process(model: str, args: argparse.Namespace) -> dict:
    """The same requests one at a time, straight to the engine."""
    sys.path.insert(0, str(ROOT))
    from serving.requests import Style
    from serving.speech import Speech, load_speakers

    speech = Speech(model, args.device, speakers=load_speakers(args.speaker, model))
    speech.load()
    style = Style(voice=args.voice, max_new_tokens=round(args.audio_seconds * FRAME_RATE) + 1)
    listeners = []
    for number in range(args.one_by_one + 1):
        listener = Listener()
        if number == 1:  # the first one warms up
            began = time.perf_counter()
        method, arguments = await speech.arguments(style)
        arguments |= speech.sampling(style)
        asked = time.perf_counter()
        with contextlib.suppress(UserWarning):  # the speech ends at max_new_tokens
            async for audio, rate in speech.engine.astream(method, text=args.text, **arguments):
                if listener.first_audio is None:
                    listener.first_audio = time.perf_counter() - asked
                listener.seconds += len(audio) / rate
        listener.outcome = "complete"
        listeners.append(listener)
    wall = time.perf_counter() - began
    speech.close()
    return summary(listeners[1:], wall)


def compare(args: argparse.Namespace) -> dict:
    """The engine alone and the server, each in a process of its own, one request at a time."""
    options = [item for path in args.speaker for item in ("--speaker", str(path))]
    options += ["--device", args.device] if args.device else []
    count = str(args.one_by_one or 50)
    shared = ["--one-by-one", count, "--audio-seconds", str(args.audio_seconds), "--voice", args.voice]
    with tempfile.NamedTemporaryFile() as output:
        command = [sys.executable, __file__, "--in-process", args.compare, *shared, *options, "--json", output.name]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        alone = json.loads(Path(output.name).read_text())

    command = [sys.executable, "-m", "serving", "--model", args.compare, "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = None
        for line in process.stdout:
            url = line.split()[2].rstrip(",") if line.startswith("listening on") else url
            if line.startswith("ready"):
                break
        else:
            raise SystemExit("error: the server did not start")
        args.one_by_one = int(count)
        over_http = asyncio.run(drive(Server(url), args))
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)
    added = over_http["first_audio_p50_ms"] - alone["first_audio_p50_ms"]
    return {"engine": alone, "http": over_http, "http_adds_to_first_audio_p50_ms": added}


def report(result: dict, indent: str = "") -> None:
    for name, value in result.items():
        if isinstance(value, dict) and name != "errors":
            print(f"{indent}{name}:")
            report(value, indent + "  ")
        elif isinstance(value, list):
            for row in value:
                print(f"{indent}{name}: " + ", ".join(f"{key} {figure:.1f}" for key, figure in row.items()))
        else:
            shown = f"{value:.1f}" if isinstance(value, float) else value
            print(f"{indent}{name.replace('_', ' '):32} {shown if shown != {} else 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--audio-seconds", type=float, default=4.6, help="length at which a speech is ended")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive")
    parser.add_argument("--cancel", type=float, default=0.0, help="share of listeners who leave early, 0 to 1")
    parser.add_argument("--one-by-one", type=int, default=0, metavar="N")
    parser.add_argument("--soak", type=int, default=0, metavar="N")
    parser.add_argument("--at-once", type=int, default=4, help="requests of a soak in flight")
    parser.add_argument("--compare", metavar="MODEL")
    parser.add_argument("--in-process", metavar="MODEL", help="one by one, straight to the engine")
    parser.add_argument("--speaker", type=Path, action="append", default=[], help="for --compare and --in-process")
    parser.add_argument("--device", help="for --compare and --in-process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.compare:
        result = compare(args)
    elif args.in_process:
        result = asyncio.run(in_process(args.in_process, args))
    else:
        result = asyncio.run(drive(Server(args.url, args.api_key), args))
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    sys.exit(1 if result.get("errors") else 0)


if __name__ == "__main__":
    main()
