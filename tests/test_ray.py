"""The server on Ray Serve: two replicas on the CPU, streams through Ray's proxy, and replicas that die during speech.

Runs only if Ray is installed (./setup.sh none --test --ray); it takes two minutes.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT
from serving_helpers import FRAME, LIMIT, SHORT, Client, wait_until

from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint

pytest.importorskip("ray", reason="Ray is not installed: ./setup.sh none --test --ray")

import click
import psutil
from websockets.exceptions import ConnectionClosedError

from qwen3_tts_cuda_graphs.serving.ray_app import app

PROGRAM = """
import json, sys
import ray
from ray import serve
from qwen3_tts_cuda_graphs.serving import ray_app
from starlette.responses import Response

class Replica(ray_app.Replica):
    def __serve_build_asgi_app__(self):
        api = super().__serve_build_asgi_app__()
        api.add_route("/stop", self.stop, methods=["POST"])
        return api

    async def stop(self, request):  # as after three deaths
        await self.service.models[0].engine.close()
        self.service.models[0].engine.state = "gave up"
        return Response()

ray_app.Replica = Replica
ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _metrics_export_port=int(sys.argv[2]))
serve.start(http_options={"port": int(sys.argv[1])})
serve.run(ray_app.app(json.loads(sys.argv[3])))
print("ready", flush=True)
sys.stdin.read()
"""
LONG = 400  # frames; some seconds of work
CONFIG = {"response_format": "pcm", **SHORT}


def seconds_used(process: psutil.Process) -> float:
    """CPU time of a process and its children."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


class RayServer(Client):
    """Ray in separate processes, with two replicas whose speech does not end before max_new_tokens."""

    def __init__(self, folder):
        write_checkpoint(folder / "model", "tiny", ends=False)
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            port, metrics_port = (free.getsockname()[1] for free in (first, second))
        super().__init__(port)
        self.metrics = Client(metrics_port)
        arguments = dict(model=str(folder / "model"), speaker=str(folder / "model/speaker.pt"), device="cpu")
        arguments |= dict(voices=str(folder / "voices"), replicas="2", max_streams="2", max_seq_len="512")
        ports = [str(port), str(metrics_port)]
        command = [sys.executable, "-c", PROGRAM, *ports, json.dumps(arguments | {"cpus_per_replica": "1"})]
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        too_late = threading.Timer(2 * LIMIT, self.process.kill)
        too_late.start()
        is_ready = any(line == "ready\n" for line in self.process.stdout)
        too_late.cancel()
        assert is_ready, "Ray did not start: see above"

    def close(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            for process in [*family, self.process]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()

    def replicas(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "ray::ServeReplica" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def seconds_used_now(self) -> dict[psutil.Process, float]:
        """CPU time of each replica within half a second."""
        before = {process: seconds_used(process) for process in self.replicas()}
        time.sleep(0.5)
        return {process: seconds_used(process) - seconds for process, seconds in before.items()}

    def wait_until_idle(self) -> None:
        """Wait until nothing speaks and nothing starts: the imports of a spare worker take seconds."""

        def is_idle() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                used = self.seconds_used_now()
                return len(used) == 2 and max(used.values()) < 0.1
            return False

        wait_until(is_idle)

    def kill_the_busy_one(self) -> None:
        """SIGKILL to the replica whose worker is speaking."""
        used = self.seconds_used_now()
        os.kill(max(used, key=used.get).pid, signal.SIGKILL)

    def wait_for_a_new_one(self, old: set) -> None:
        wait_until(lambda: set(self.replicas()) - old)

    @contextlib.contextmanager
    def speaking(self, frames: int):
        """A response of this many frames, of which nothing was read yet."""
        with self.asking(max_new_tokens=frames + 1) as connection:
            response = connection.getresponse()
            assert response.status == 200
            yield response


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RayServer(tmp_path_factory.mktemp("ray"))
    yield server
    server.close()


def test_audio_is_streamed_and_complete(server):
    """The proxy must not buffer the audio: the first chunk arrives long before the last is generated."""
    start = time.monotonic()
    with server.speaking(LONG) as response:
        assert response.headers["X-Sample-Rate"] == "24000"
        first = response.read1(FRAME)
        first_after = time.monotonic() - start
        rest = response.read()
    assert len(first) + len(rest) == LONG * FRAME
    assert first_after < (time.monotonic() - start) / 4


def test_mistakes_get_the_servers_own_answer(server):
    answer = server.speak(voice="nobody")
    assert answer.status == 400 and answer.error["code"] == "unknown_voice"
    assert server.ask("GET", "/health").json == {"status": "ok"}


def test_an_utterance_that_fails_is_not_a_short_file(server):
    """The response to an utterance that is cut off at max_seq_len has no last chunk, also behind the proxy."""
    with server.speaking(2000) as response, pytest.raises(http.client.IncompleteRead):
        response.read()


def test_the_websocket(server):
    with server.talk(CONFIG) as session:
        messages, audio = session.say("Hello there.")
    assert [message["type"] for message in messages] == ["audio.start", "audio.done", "session.done"]
    assert messages[1]["total_bytes"] == len(audio) == 5 * FRAME


def test_a_client_that_leaves_frees_its_place(server):
    """The proxy must tell the replica that the client has disconnected."""
    with server.speaking(LONG) as response:
        assert response.read1(FRAME)
    wait_until(lambda: b'requests_total{outcome="cancelled"} 1' in server.ask("GET", "/metrics").body)


def test_a_replica_that_dies_is_replaced_and_its_clients_see_an_error(server):
    """Killed during speech: the client must neither wait forever nor take the audio for complete."""
    old = set(server.replicas())
    assert len(old) == 2
    server.wait_until_idle()
    with server.speaking(LONG) as response:
        assert response.read1(FRAME)
        server.kill_the_busy_one()
        with pytest.raises(http.client.IncompleteRead):
            response.read()
    assert len(server.pcm()) == 5 * FRAME  # the other one continues to speak
    server.wait_for_a_new_one(old)
    assert all(len(server.pcm()) == 5 * FRAME for _ in range(8))


def test_a_websocket_of_a_dead_replica_is_closed_with_an_error(server):
    server.wait_until_idle()
    with server.talk(CONFIG | {"max_new_tokens": LONG + 1}) as session:
        session.write("Hello there.")
        session.until("audio.start")
        server.kill_the_busy_one()
        with pytest.raises(ConnectionClosedError):
            session.until("session.done")
    assert len(server.pcm()) == 5 * FRAME


def test_a_replica_whose_engine_has_stopped_is_replaced(server):
    """Its process stays alive: Ray learns of it only through the health check."""
    wait_until(lambda: len(server.replicas()) == 2)  # also in place of the one that died before
    old = set(server.replicas())
    assert server.ask("POST", "/stop").status == 200
    server.wait_for_a_new_one(old)
    wait_until(lambda: all(server.ask("GET", "/health").status == 200 for _ in range(16)))


def test_ray_has_the_metrics_of_every_replica(server):
    """Through the proxy, Prometheus would read the counters of one replica or another."""

    def replicas() -> set[str]:
        lines = server.metrics.ask("GET", "/metrics").body.decode().splitlines()
        complete = [line for line in lines if line.startswith("ray_qwen3_tts_requests_total{") and "complete" in line]
        return {part for line in complete for part in line.split(",") if part.startswith("replica=")}

    wait_until(lambda: len(replicas()) == 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"modell": "0.6B"}, "modell"),
        ({"model": "no such folder"}, "no such folder"),
        ({"device": "cuda:1"}, "device"),
        ({"replicas": "0"}, "replicas"),
        ({"replicas": "4", "max_replicas": "2"}, "max_replicas is 2"),
        ({"max_streams": "many"}, "max_streams"),
    ],
)
def test_wrong_arguments_get_one_line(checkpoint, arguments, message):
    """Before anything is started. Ray would try to start the replicas again and again."""
    with pytest.raises(click.UsageError) as error:
        app({"model": str(checkpoint()), **arguments})
    assert message in error.value.message and "\n" not in error.value.message
