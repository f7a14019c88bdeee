"""`python -m serving` as a process: what it prints, how it ends, and that it does not leak."""

import asyncio
import collections
import contextlib
import http.client
import io
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, on_gpu, run_program
from safetensors.torch import load_file, save_file
from serving_helpers import FRAME, LIMIT, Client, is_running, read_answer, request_bytes, wait_until, worker_of

from qwen3_tts_cuda_graphs.bench.listeners import listen
from qwen3_tts_cuda_graphs.bench.over_http import audio_from
from qwen3_tts_cuda_graphs.serving import messages, server
from qwen3_tts_cuda_graphs.serving.__main__ import main
from qwen3_tts_cuda_graphs.serving.server import greeting
from qwen3_tts_cuda_graphs.serving.server_options import PRIORITY, keep_to_this_machine
from qwen3_tts_cuda_graphs.serving.server_options import open_port as bind
from qwen3_tts_cuda_graphs.serving.service import Service
from qwen3_tts_cuda_graphs.serving.settings import Settings, check_origin


@pytest.fixture(scope="module")
def endless(checkpoint, tmp_path_factory):
    """A tiny model that speaks until max_new_tokens."""
    folder = tmp_path_factory.mktemp("endless") / "tiny"
    shutil.copytree(checkpoint(), folder)
    weights = load_file(folder / "model.safetensors")
    end = json.loads((folder / "config.json").read_text())["talker_config"]["codec_eos_token_id"]
    weights["talker.codec_head.weight"][end] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def soak(server, count: int) -> tuple[collections.Counter, list[dict]]:
    """Short requests, some invalid, some abandoned: returns how they ended, and the server's usage after each fifth of
    them."""
    speak_there = partial(audio_from, f"http://127.0.0.1:{server.port}")

    def ask(number: int) -> str:
        """Send one request. Returns its kind if it ended as expected, else how it ended."""
        dice = random.Random(number)
        kind = dice.choice(["good"] * 7 + ["bad", "abandoned", "whole"])
        request = dict(input="Hi.", response_format="pcm", max_new_tokens=dice.randint(2, 8), seed=number)
        if kind == "bad":
            request["temperature"] = -1
        if kind == "whole":
            request |= dict(response_format="wav", stream=False)
        try:
            listener = listen(partial(speak_there, **request), leave_after=0 if kind == "abandoned" else math.inf)
            return kind if kind != "bad" and listener.seconds else f"{kind}: {listener.seconds:.2f} s of audio"
        except OSError as error:
            return kind if kind == "bad" and str(error).startswith("400") else f"{kind}: {error}"

    outcomes = collections.Counter()
    usage = []
    with ThreadPoolExecutor(4) as pool:
        for fifth in range(5):  # the first fifth fills the caches
            outcomes.update(pool.map(ask, range(fifth * count // 5, (fifth + 1) * count // 5)))
            usage.append(quiet_usage(server))
    return outcomes, usage


def quiet_usage(server) -> dict:
    """Memory, tasks and threads when no request is in flight."""

    def figures() -> dict:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    wait_until(lambda: not figures()["qwen3_tts_streams_active"] + figures()["qwen3_tts_streams_waiting"])
    now = figures()
    return {
        "rss_mb": now["process_resident_memory_bytes"] / 1e6,
        "open_files": now["process_open_fds"],
        "tasks": now["qwen3_tts_tasks"],
        "threads": now["qwen3_tts_threads"],
    }


class Server(Client):
    """`with Server(...)`: a server in its own process, whose stderr is written to a file."""

    def __init__(self, folder: Path, *options, files: int | None = None, **environment):
        """folder: for its voices and stderr; files: how many it may open; options: of the command line"""
        self.folder = folder
        command = [sys.executable, "-m", "qwen3_tts_cuda_graphs.serving", "--port", "0", "--voices", folder / "voices"]
        self.command = [*map(str, command), *map(str, options)]
        if files:
            self.command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *self.command]
        self.environment = os.environ | environment

    def __enter__(self) -> "Server":
        with open(self.folder / "stderr", "w") as stderr:
            pipes = dict(stdout=subprocess.PIPE, stderr=stderr, text=True)
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.environment, **pipes)
        self.killer = threading.Timer(3 * LIMIT, self.process.kill)
        self.killer.start()
        first = self.process.stdout.readline()
        assert first.startswith("listening on http://127.0.0.1:"), self.stderr
        super().__init__(int(first.split()[2].rstrip(",").rpartition(":")[2]))
        assert self.health in (200, 503)  # it answers while loading
        assert self.process.stdout.readline().startswith("ready: ")
        return self

    def __exit__(self, *error) -> None:
        self.killer.cancel()
        self.process.kill()
        self.process.wait()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def imports(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("import time:")]

    @property
    def health(self) -> int:
        return self.ask("GET", "/health").status


def uses_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def speak_with_late_body(server, **fields) -> None:
    head, body = request_bytes(fields).split(b"\r\n\r\n")
    with server.open() as connection:
        connection.sendall(head + b"\r\n\r\n")
        time.sleep(0.1)
        connection.sendall(body)
        assert read_answer(connection).status == 200


def crowd_out(server) -> None:
    """Open more connections than it may have files, for a while. asyncio logged each attempt to accept one, 70 MB a
    minute, and no request was answered."""
    with contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(server.open())
        time.sleep(2)

        def is_answered() -> bool:
            with contextlib.suppress(OSError):  # the others may still be accepted
                return server.ask("GET", "/v1/models").status == 200

        wait_until(is_answered)  # an idle connection is closed for it
    log = [line for line in server.stderr.splitlines() if not line.startswith("import time:")]
    assert "ulimit -n is 62: --max-connections is 16, not 1024" in log[0]
    assert len(log) < 10 and sum("new connections wait" in line for line in log) <= 1, log


def test_from_the_start_to_the_end(endless, tmp_path):
    """Starting, listening, a short soak test, more connections than files, a killed worker, and SIGTERM during
    speech."""
    options = "--device", "cpu", "--model", endless, "--speaker", endless / "speaker.pt", "--max-streams", 3
    with Server(tmp_path, *options, files=62, PYTHONPROFILEIMPORTTIME="1") as server:  # a line for each import
        voices, try_it, curl = (server.process.stdout.readline() for _ in range(3))
        assert (voices, try_it) == ("voices: speaker\n", "try it:\n")
        assert f"http://127.0.0.1:{server.port}/v1/audio/speech" in curl and '"voice": "speaker"' in curl
        assert server.health == 200

        # The last import of the worker, and that of the spare:
        wait_until(lambda: sum(line.endswith(".engine_host") for line in server.imports) == 2)
        loaded = len(server.imports)
        speak_with_late_body(server, response_format="mp3")
        outcomes, usage = soak(server, 50)
        assert server.imports[loaded:] == []  # while clients wait
        assert outcomes.total() == 50 and outcomes.keys() <= {"good", "bad", "abandoned", "whole"}
        before, after = usage[1], usage[-1]
        assert after["rss_mb"] < 1.05 * before["rss_mb"] + 10, usage
        assert after["tasks"] <= before["tasks"] and after["open_files"] <= before["open_files"] + 2, usage
        assert after["threads"] <= before["threads"] + 2, usage  # pools may still grow

        crowd_out(server)

        worker = worker_of(server.process.pid)
        assert not uses_torch(server.process.pid) and uses_torch(worker)
        with server.asking(max_new_tokens=400) as connection:
            response = connection.getresponse()
            assert response.read(FRAME)
            os.kill(worker, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(http.client.IncompleteRead):  # not a short file
                response.read()
        assert time.monotonic() - killed < 2
        refused = server.speak()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        wait_until(lambda: server.health == 200)  # the worker is replaced
        assert server.speak(voice="speaker").status == 200
        assert not is_running(worker) and worker_of(server.process.pid) != worker

        with server.asking(max_new_tokens=100) as connection:
            response = connection.getresponse()
            audio = response.read(FRAME)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.health == 503)
            assert server.speak().status == 503
            assert len(audio + response.read()) == 99 * FRAME
        server.process.communicate(timeout=LIMIT)
        assert server.process.returncode == 0
        assert "Traceback" not in server.stderr and "shutting down when 1 streams" in server.stderr
        assert "has ended: killed by SIGKILL" in server.stderr


# Makes the worker's next kernel write to address 16, after which every CUDA call in that process fails.
CRASH = """
import signal

def crash(*_):
    import torch
    from qwen3_tts_cuda_graphs.fast.nvrtc import Kernels, architecture_of, compile_source
    device = torch.device("cuda")
    source = 'extern "C" __global__ void crash(int *address) { *address = 1; }'
    Kernels(compile_source(source, architecture_of(device)), ["crash"], device).launch("crash", (1, 1), 1, [16])

signal.signal(signal.SIGUSR1, crash)
"""


@on_gpu
def test_it_heals_after_an_illegal_address(checkpoint, tmp_path):
    """While sixteen clients listen."""
    (tmp_path / "sitecustomize.py").write_text(CRASH)
    model = checkpoint("base", "0.6B")
    options = "--model", model, "--speaker", model / "speaker.pt", "--max-streams", 16
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Server(tmp_path, *options, PYTHONPATH=path) as server, ThreadPoolExecutor(16) as pool:
        ended = []  # when and how each listener's speech ended

        request = dict(input="Hi.", max_new_tokens=1500, response_format="pcm")

        def hear() -> None:
            try:
                listen(partial(audio_from, f"http://127.0.0.1:{server.port}", **request))
                ended.append((time.monotonic(), "complete"))
            except OSError as error:
                ended.append((time.monotonic(), str(error)))

        listeners = [pool.submit(hear) for _ in range(16)]
        time.sleep(1)
        assert not ended, ended
        crashed_at = time.monotonic()
        os.kill(worker_of(server.process.pid), signal.SIGUSR1)
        wait(listeners, LIMIT)
        times, ways = zip(*ended)
        assert max(times) - crashed_at < 2 and "complete" not in ways, ended
        assert server.health == 503
        wait_until(lambda: server.health == 200)
        assert server.speak(voice="speaker", response_format="wav").status == 200
        print(f"errors after {max(times) - crashed_at:.2f} s, healed after {time.monotonic() - crashed_at:.1f} s")


def test_mistakes_on_the_command_line(call, checkpoint, tmp_path):
    tiny = checkpoint()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, message in (
            (["--model", "nowhere"], "there is no folder nowhere"),
            (["--model", tiny, "--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--model", tiny, "--port", 70000], "from 0 to 65535"),
            (["--model", tiny, "--host", "no such host"], "cannot listen on no such host"),
            (["--model", tiny, "--max-streams", 0], "--max-streams is 0, it must be above 0"),
            (["--model", tiny, "--max-text", "many"], "invalid int value"),
            (["--model", tiny, "--max-seq-len", 7], "--max-seq-len is 7"),
            (["--model", tiny, "--api-key", " "], "--api-key or $QWEN3_TTS_API_KEY is empty"),
            (["--model", tiny, "--api-key", ""], "--api-key or $QWEN3_TTS_API_KEY is empty"),  # "$KEY" with KEY unset
            (["--model", tiny, "--cors-origin", "example.com"], "--cors-origin is 'example.com', it must be like"),
            (["--model", tiny, "--cors-origin", "http://example.com/page"], "it must be like https://example.com"),
            (["--model", tiny, "--voices", tiny / "config.json"], "Not a directory: choose another --voices"),
            (["--model", tiny, "--voices", "/proc/voices"], "cannot be kept in /proc/voices"),  # also as root
            (["--model", tiny, "--voices", "x" * 300], "File name too long: choose another --voices"),
            (["--model", tiny, "--voices", tmp_path / "dangling"], "it is a link to nothing"),
            (["--model", tiny, "--voices", ""], "argument --voices: its value is empty"),
            (["--model", tiny, "--voice", "ryan"], "there is no --voice: did you mean --speaker?"),
            (["--model", tiny, "--speaker", "ryan"], "use --model 0.6B-CustomVoice or 1.7B-CustomVoice"),
            (["--model", tiny, "--speaker", tiny / "config.json"], "not a speaker file: if it is a recording"),
            (["--model", "0.6b-customvoice", "--max-seq-len", 7], "--max-seq-len is 7"),  # does not access the hub
            (["--model", tiny, "--port", 1, "--port", 2], "--port was given twice, 1 and 2: give one"),
            (["--model", tiny, "--port", 0] + 2 * ["--speaker", tiny / "speaker.pt"], "two --speaker files"),
            (["--model", tiny, "--speaker", "nobody.pt"], "no speaker file"),
            (["--model", checkpoint("custom_voice"), "--speaker", tiny / "speaker.pt"], "give a Base model"),
            (["--model", tiny, "--device", "abacus"], "no device 'abacus'"),
        ):
            code, _, error = call(main, *options)
            assert code == 2 and message in error and error.count("\n") == 1, (options, error)


@pytest.mark.parametrize(
    "host, key, warned", [("127.0.0.1", None, 0), ("127.0.0.1", "key", 0), ("0.0.0.0", None, 1), ("0.0.0.0", "key", 0)]
)
def test_a_server_without_a_key_is_not_opened_silently(host, key, warned):
    with bind(host, 0) as listening, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = keep_to_this_machine(listening, Settings(key))
    assert len(caught) == warned
    assert settings.only_this_machine == (host == "127.0.0.1" and key is None)


def test_an_origin_is_what_browsers_send():
    for origin in ("http://localhost:3000", "HTTP://Localhost:3000/"):
        assert check_origin(origin) == "http://localhost:3000"
    assert check_origin("*") == "*"


@pytest.mark.parametrize("before, wanted", [(0, PRIORITY), (-20, -20)])
def test_the_priority_is_raised_where_that_is_allowed(before, wanted):
    """In a separate process, as it cannot be lowered again. Without the permission it stays the same."""
    program = f"""
        import os
        from qwen3_tts_cuda_graphs.serving.server_options import raise_priority
        is_allowed = os.geteuid() == 0
        if is_allowed:
            os.setpriority(os.PRIO_PROCESS, 0, {before})
        before = os.getpriority(os.PRIO_PROCESS, 0)
        raise_priority()
        print(os.getpriority(os.PRIO_PROCESS, 0) == ({wanted} if is_allowed else before))
        if is_allowed:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
            os.setuid(65534)
        raise_priority()
    """
    result = run_program(program, ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


def test_the_line_to_try_has_a_place_for_the_key(checkpoint, tmp_path):
    """It used a variable that may not be set in the shell where the line is pasted."""
    speech = Service(str(checkpoint()), "cpu", settings=Settings("secret", voices=tmp_path))
    lines = greeting(speech, "http://127.0.0.1:8000").splitlines()
    assert sum('curl -H "Authorization: Bearer KEY"' in line for line in lines) == 2
    assert sum("with your API key instead of KEY" in line for line in lines) == 2
    assert "secret" not in str(lines) and "$" not in str(lines)
    assert lines[-1] == "or listen in a browser: http://127.0.0.1:8000/"


def test_recordings_fit_into_a_message():
    """A longer recording ended the worker."""
    with pytest.raises(ValueError, match="--max-reference-seconds is above 600"):
        Settings(max_reference_seconds=601)
    assert 4 * 96_000 * 600 < messages.MAX_BYTES


def test_a_server_whose_terminal_is_gone(checkpoint, tmp_path):
    """The handler of SIGTERM raised an error anywhere in the event loop, and a closed stdout caused a traceback."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(Gone()):
        running = server.Server(Service(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path)))
        running.handle_exit(signal.SIGTERM, None)
    assert running.service.is_draining and not running.should_exit


def test_garbage_is_collected_between_streams(checkpoint, tmp_path, monkeypatch):
    """Collecting all objects of 1,000 WebSockets takes 0.1 s, which delayed 64 listeners."""
    running = server.Server(Service(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path)))
    collector = SimpleNamespace(collected=[])
    collector.get_count = lambda: (0, 0, collector.count)
    collector.collect = lambda: collector.collected.append(collector.count)
    monkeypatch.setattr("qwen3_tts_cuda_graphs.serving.server.gc", collector)
    for streams, collector.count in [(0, 10), (1, 11), (0, 11), (1, 1000), (1, 1001)]:
        running.service.models[0].engine.in_flight = streams
        asyncio.run(running.on_tick(1))
    assert collector.collected == [11, 1001]


def test_without_the_servers_packages():
    program = """
        sys.modules["uvicorn"] = None
        from qwen3_tts_cuda_graphs.serving.__main__ import main
        sys.argv[1:] = ["--model", "x"]
        main()
    """
    result = run_program(program, ROOT)
    problem = "error: the server needs uvicorn, which is not installed: "
    message = f"{problem}in a checkout run ./setup.sh none --server, else "
    assert result.returncode == 2 and result.stderr.startswith(message)
    assert result.stderr.endswith(" 'qwen3-tts-cuda-graphs[server]'\n")


def test_load_script_counts_underruns_and_errors():
    """With a server that stalls after its first chunk, one that breaks off, and another program."""
    head, chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"F00\r\n" + bytes(3840) + b"\r\n"

    def hear(*answers):
        """What the script measures for these bytes, which are sent with a pause longer than a chunk, 0.08 s."""

        async def answer(reader, writer):
            await reader.readuntil(b"}")  # read everything: closing with unread data resets the connection
            for number, data in enumerate(answers):
                await asyncio.sleep(0.3 if number else 0)
                writer.write(data)
                await writer.drain()
            writer.close()

        async def main():
            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                return await asyncio.to_thread(listen, partial(audio_from, f"http://127.0.0.1:{port}", input="Hi."))

        return asyncio.run(main())

    stalled = hear(head + chunk, chunk + b"0\r\n\r\n")
    assert (stalled.underruns, stalled.seconds) == (1, 0.16)
    with pytest.raises(OSError, match="closed in the middle"):
        hear(head + chunk + b"F00\r\n")
    with pytest.raises(OSError, match="does not answer as this project's server does"):
        hear(b'HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n{"detail":"Not Found"}')
    with pytest.raises(OSError, match="give one like http://127.0.0.1:8000"):
        listen(partial(audio_from, "127.0.0.1:8000", input="Hi."))


@pytest.mark.slow
def test_what_the_server_adds_is_measured(checkpoint, tmp_path):
    """The engine alone and the server, also with two processes of listeners, idle WebSockets and busy cores."""
    folder, output = checkpoint(), tmp_path / "server.json"
    command = [sys.executable, "-m", "qwen3_tts_cuda_graphs.bench.load_test", "--compare", folder]
    command += ["--speaker", folder / "speaker.pt", "--audio-seconds", "0.3", "--idle-websockets", "20"]
    command += "--device cpu --one-by-one 2 --rate 2 --seconds 2 --crowds 3 --max-streams 2 --clients 2 --busy".split()
    subprocess.run([*map(str, command), "--json", output], cwd=ROOT, check=True, timeout=3 * LIMIT)
    result = json.loads(output.read_text())
    assert result["card"]["gpu"] == "none"
    names = ["2 one by one", "2 requests per second for 2 s", "3 at once"]
    conditions = ["2 processes of listeners", "20 idle WebSockets", "all cores busy"]
    ways = ["engine", "over HTTP", *(f"over HTTP, {condition}" for condition in conditions)]
    assert [*result["models"]] == [f"{folder.name}, {way}" for way in ways]
    for rows in result["models"].values():
        assert [*rows] == names and not any(row["errors"] for row in rows.values())
        assert all(row["audio_seconds_per_second"] > 0 and row["first_audio_p99_ms"] for row in rows.values())
        crowd = rows["3 at once"]  # three times
        assert crowd["listeners"] == 9 and len(crowd["first_audio_p95_ms_of_each"]) == 3


def test_audio_is_sent_at_once():
    """asyncio sets TCP_NODELAY only if the socket was created with its protocol. Without it the first audio could wait
    40 ms."""

    async def accepted_without_delay() -> bool:
        accepted = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(
            lambda _, writer: accepted.set_result(writer), sock=bind("127.0.0.1", 0)
        ) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            connection = await asyncio.wait_for(accepted, LIMIT)
            writer.close()
            return connection.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    assert asyncio.run(accepted_without_delay())
