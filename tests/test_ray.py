"""The server on Ray Serve: two replicas on the CPU, streams through Ray's proxy, and replicas that die in mid-speech.

Runs only where Ray is installed (./setup.sh none --test --ray); it takes two minutes.
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
from serving_helpers import FRAME, LIMIT, Answer

from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint

pytest.importorskip("ray", reason="Ray is not installed: ./setup.sh none --test --ray")

import click
import psutil
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

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
        await self.speech.models[0].engine.close()
        self.speech.models[0].engine.state = "gave up"
        return Response()

ray_app.Replica = Replica
ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _metrics_export_port=int(sys.argv[2]))
serve.start(http_options={"port": int(sys.argv[1])})
serve.run(ray_app.app(json.loads(sys.argv[3])))
print("ready", flush=True)
sys.stdin.read()
"""
LONG = 400  # frames; some seconds of work


def seconds_used(process: psutil.Process) -> float:
    """Of CPU time, with those of its children."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


class RayServer:
    """Ray in processes of its own, with two replicas that speak for as long as they are asked to."""

    def __init__(self, folder):
        write_checkpoint(folder / "model", "tiny", ends=False)
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            self.port, self.metrics_port = (free.getsockname()[1] for free in (first, second))
        arguments = dict(model=str(folder / "model"), speaker=str(folder / "model/speaker.pt"), device="cpu")
        arguments |= dict(voices=str(folder / "voices"), replicas="2", max_streams="2", max_seq_len="512")
        ports = [str(self.port), str(self.metrics_port)]
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

    def kill_the_busy_one(self) -> None:
        """SIGKILL to the replica whose worker is speaking."""
        before = {process: seconds_used(process) for process in self.replicas()}
        time.sleep(0.5)
        busy = max(before, key=lambda process: seconds_used(process) - before[process])
        os.kill(busy.pid, signal.SIGKILL)

    def wait_for_a_new_one(self, old: set) -> None:
        end = time.monotonic() + LIMIT
        while not set(self.replicas()) - old:
            assert time.monotonic() < end, "the replica was not replaced"
            time.sleep(0.5)

    def ask(self, method: str, path: str, port: int | None = None) -> Answer:
        address = "127.0.0.1", port or self.port
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=LIMIT)) as connection:
            connection.request(method, path)
            return Answer(connection.getresponse())

    @contextlib.contextmanager
    def speak(self, frames: int = 5, **fields):
        request = {"input": "Hello there.", "response_format": "pcm", "max_new_tokens": frames + 1, **fields}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)) as connection:
            connection.request("POST", "/v1/audio/speech", json.dumps(request), {"Content-Type": "application/json"})
            yield connection.getresponse()

    def speak_whole(self, frames: int = 5, **fields) -> Answer:
        with self.speak(frames, **fields) as response:
            return Answer(response)

    @contextlib.contextmanager
    def websocket(self, frames: int = 5):
        with connect(f"ws://127.0.0.1:{self.port}/v1/audio/speech/stream", open_timeout=LIMIT) as session:
            config = {"type": "session.config", "response_format": "pcm", "max_new_tokens": frames + 1}
            for message in (config, {"type": "input.text", "text": "Hello there."}, {"type": "input.done"}):
                session.send(json.dumps(message))
            assert json.loads(session.recv(LIMIT))["type"] == "audio.start"
            yield session


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RayServer(tmp_path_factory.mktemp("ray"))
    yield server
    server.close()


def test_audio_is_streamed_and_complete(server):
    """The proxy must not collect the audio: the first chunk arrives long before the last is made."""
    start = time.monotonic()
    with server.speak(LONG) as response:
        assert response.status == 200 and response.headers["X-Sample-Rate"] == "24000"
        first = response.read1(FRAME)
        first_after = time.monotonic() - start
        rest = response.read()
    assert len(first) + len(rest) == LONG * FRAME
    assert first_after < (time.monotonic() - start) / 4


def test_mistakes_get_the_servers_own_answer(server):
    answer = server.speak_whole(voice="nobody")
    assert answer.status == 400 and answer.error["code"] == "unknown_voice"
    assert server.ask("GET", "/health").json == {"status": "ok"}


def test_a_speech_that_fails_is_not_a_short_file(server):
    """A speech that is cut off at max_seq_len ends without the last chunk, and the proxy must pass that on."""
    with server.speak(2000) as response:
        assert response.status == 200
        with pytest.raises(http.client.IncompleteRead):
            response.read()


def test_the_websocket(server):
    with server.websocket() as session:
        audio = b""
        while isinstance(message := session.recv(LIMIT), bytes):
            audio += message
        assert json.loads(message) == dict(
            type="audio.done", utterance_index=0, sentence_index=0, total_bytes=len(audio)
        )
        assert len(audio) == 5 * FRAME and json.loads(session.recv(LIMIT))["type"] == "session.done"


def test_a_client_that_leaves_frees_its_place(server):
    """A replica must learn from the proxy that nobody listens any more."""
    with server.speak(LONG) as response:
        assert response.read1(FRAME)
    end = time.monotonic() + 30
    while b'requests_total{outcome="cancelled"} 1' not in server.ask("GET", "/metrics").body:
        assert time.monotonic() < end, "the speech went on"


def test_a_replica_that_dies_is_replaced_and_its_clients_see_an_error(server):
    """Killed in mid-speech: the client must not wait for ever, nor take what it has for the whole."""
    old = set(server.replicas())
    assert len(old) == 2
    with server.speak(LONG) as response:
        assert response.read1(FRAME)
        server.kill_the_busy_one()
        with pytest.raises(http.client.IncompleteRead):
            response.read()
    assert len(server.speak_whole().body) == 5 * FRAME  # the other one speaks on
    server.wait_for_a_new_one(old)
    assert all(len(server.speak_whole().body) == 5 * FRAME for _ in range(8))


def test_a_websocket_of_a_dead_replica_is_closed_with_an_error(server):
    with server.websocket(LONG) as session:
        server.kill_the_busy_one()
        with pytest.raises(ConnectionClosedError):
            for _ in range(LONG):
                session.recv(LIMIT)
    assert len(server.speak_whole().body) == 5 * FRAME


def test_a_replica_whose_engine_has_stopped_is_replaced(server):
    """Its process lives on: only the health check tells Ray."""
    end = time.monotonic() + LIMIT
    while len(old := set(server.replicas())) < 2:
        assert time.monotonic() < end, "the replica that died before was not replaced"
        time.sleep(0.5)
    assert server.ask("POST", "/stop").status == 200
    server.wait_for_a_new_one(old)
    while not all(server.ask("GET", "/health").status == 200 for _ in range(16)):
        assert time.monotonic() < end, "the stopped replica is still asked"


def test_ray_has_the_metrics_of_every_replica(server):
    """Through the proxy, Prometheus would see now one replica's counters, now the other's."""
    end = time.monotonic() + LIMIT
    replicas = set()
    while len(replicas) < 2:
        assert time.monotonic() < end, "the metrics do not come"
        lines = server.ask("GET", "/metrics", server.metrics_port).body.decode().splitlines()
        complete = [line for line in lines if line.startswith("ray_qwen3_tts_requests_total{") and "complete" in line]
        replicas = {part for line in complete for part in line.split(",") if part.startswith("replica=")}
        time.sleep(0.5)


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
