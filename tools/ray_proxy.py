#!/usr/bin/env python3
"""How many chunks of audio per second can one of Ray's proxies pass on? Needs no model and no GPU.

    python tools/ray_proxy.py                                  Ray's own proxy
    RAY_SERVE_ENABLE_HA_PROXY=1 python tools/ray_proxy.py      HAProxy, which Ray brings

Two replicas send chunks as the engine makes them, 8 frames at a time to each listener. The CPU time per chunk does not
depend on what else the machine does; a proxy has one thread, so its limit is one second over that time.
"""

import argparse
import asyncio
import http.client
import os
import socket
import threading
import time

import psutil
import ray
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve

CHUNK = bytes(8 * 1920 * 2)  # 8 frames of 16-bit samples
PROXIES = ("ray::ProxyActor", "haproxy")
REPLICAS = ("ray::ServeReplica",)

api = FastAPI()


@api.get("/")
async def send_chunks(chunks: int, interval: float) -> StreamingResponse:
    async def evenly():
        due = time.monotonic()
        for _ in range(chunks):
            yield CHUNK
            due += interval
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    return StreamingResponse(evenly())


@serve.deployment(num_replicas=2, max_ongoing_requests=1000)
@serve.ingress(api)
class Replica:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listeners", type=int, default=64)
    parser.add_argument(
        "--rates", type=int, nargs="+", default=[320, 640, 1280], help="chunks per second, all together"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on this machine only, and ends soon
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port, "host": "127.0.0.1"})
    serve.run(Replica.bind())
    measure(port, args.listeners, 100, 1.0)  # warm up
    print(f"{'asked for':>12}{'passed on':>12}{'proxy CPU':>12}{'replicas CPU':>14}{'limit of a proxy':>18}")
    for rate in args.rates:
        passed, proxy, replicas = measure(port, args.listeners, rate, args.seconds)
        print(
            f"{rate:10}/s{passed:10.0f}/s{1e3 * proxy:9.2f} ms{1e3 * replicas:11.2f} ms{1 / proxy:16.0f}/s", flush=True
        )


def measure(port: int, listeners: int, rate: int, seconds: float) -> tuple[float, float, float]:
    """Chunks per second that arrived, and seconds of CPU time per chunk in the proxy and in the replicas."""
    chunks = max(1, round(rate * seconds / listeners))
    arrived = []
    threads = [
        threading.Thread(target=listen, args=[port, chunks, listeners / rate, arrived]) for _ in range(listeners)
    ]
    start, before = time.monotonic(), (cpu_seconds(PROXIES), cpu_seconds(REPLICAS))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - start
    proxy, replicas = cpu_seconds(PROXIES) - before[0], cpu_seconds(REPLICAS) - before[1]
    total = sum(arrived) / len(CHUNK)
    if total != listeners * chunks:
        raise RuntimeError(f"{total:g} of {listeners * chunks} chunks arrived")
    return total / elapsed, max(proxy, 1e-3) / total, replicas / total


def listen(port: int, chunks: int, interval: float, arrived: list[int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", f"/?chunks={chunks}&interval={interval}")
    arrived.append(len(connection.getresponse().read()))


def cpu_seconds(names: tuple[str, ...]) -> float:
    """Of the processes with these names that this one has started."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        title = process.cmdline()[0] if process.is_running() and process.cmdline() else ""
        if title.startswith(names) or os.path.basename(title).startswith(names):
            times = process.cpu_times()
            total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
