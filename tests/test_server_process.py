"""`python -m serving` as a process of its own: what it prints, how it ends, and that it leaks nothing."""

import asyncio
import collections
import contextlib
import gc
import http.client
import json
import math
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT
from safetensors.torch import load_file, save_file
from serving_helpers import FRAME, LIMIT, is_running, post, status, worker_of

from qwen3_tts_cuda_graphs.bench.load_test import listen, speak
from qwen3_tts_cuda_graphs.serving import messages
from qwen3_tts_cuda_graphs.serving.process import Server, greeting
from qwen3_tts_cuda_graphs.serving.server_options import PRIORITY, keep_to_this_machine, raise_priority
from qwen3_tts_cuda_graphs.serving.server_options import listen as bind
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


def soak(url: str, count: int) -> dict:
    """Short requests, some bad, some abandoned. Returns how they ended, and the server's memory, tasks and threads."""

    def ask(number: int) -> str:
        """The kind of the request if it ended as it should, else how it ended."""
        dice = random.Random(number)
        kind = dice.choice(["good"] * 7 + ["bad", "abandoned", "whole"])
        request = dict(input="Hi.", response_format="pcm", max_new_tokens=dice.randint(2, 8), seed=number)
        if kind == "bad":
            request["temperature"] = -1
        if kind == "whole":
            request |= dict(response_format="wav", stream=False)
        try:
            listener = listen(partial(speak, url, **request), leave_after=0 if kind == "abandoned" else math.inf)
            return kind if kind != "bad" and listener.seconds else f"{kind}: {listener.seconds:.2f} s of audio"
        except OSError as error:
            return kind if kind == "bad" and str(error).startswith("400") else f"{kind}: {error}"

    outcomes = collections.Counter()
    usage = []
    with ThreadPoolExecutor(4) as pool:
        for fifth in range(5):  # the first one fills the caches
            outcomes.update(pool.map(ask, range(fifth * count // 5, (fifth + 1) * count // 5)))
            usage.append(quiet_usage(url))
    return dict(outcomes=dict(outcomes), usage=usage)


def quiet_usage(url: str) -> dict:
    """Memory, tasks and threads once no request is in flight."""
    for _ in range(100):
        with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        figures = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        if not figures["qwen3_tts_streams_active"] and not figures["qwen3_tts_streams_waiting"]:
            break
        time.sleep(0.05)
    return {
        "rss_mb": figures["process_resident_memory_bytes"] / 1e6,
        "open_files": figures["process_open_fds"],
        "tasks": figures["qwen3_tts_tasks"],
        "threads": figures["qwen3_tts_threads"],
    }


def uses_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def imports(stderr: Path) -> list[str]:
    return [line for line in stderr.read_text().splitlines() if line.startswith("import time:")]


def speak_with_late_body(url: str, **fields) -> None:
    body = json.dumps({"input": "Hi.", "max_new_tokens": 3, **fields}).encode()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT)
    connection.putrequest("POST", "/v1/audio/speech")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    time.sleep(0.1)
    connection.send(body)
    response = connection.getresponse()
    assert response.status == 200 and response.read()
    connection.close()


def test_from_the_start_to_the_end(endless, tmp_path):
    """Starting, listening, a soak in small, a worker that is killed, and SIGTERM while somebody listens."""
    command = [
        sys.executable,
        "-m",
        "qwen3_tts_cuda_graphs.serving",
        "--model",
        str(endless),
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    command += ["--speaker", str(endless / "speaker.pt"), "--voices", str(tmp_path / "voices"), "--max-streams", "3"]
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # a line for each import
    with open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    killer = threading.Timer(3 * LIMIT, process.kill)
    killer.start()
    try:
        first = process.stdout.readline()
        assert first.startswith("listening on http://127.0.0.1:")
        url = first.split()[2].rstrip(",")
        assert status(f"{url}/health") in (200, 503)  # it answers while it loads
        assert process.stdout.readline().startswith("ready: ")
        assert process.stdout.readline() == "voices: speaker\n"
        assert process.stdout.readline() == "try it:\n"
        curl = process.stdout.readline()
        assert f"{url}/v1/audio/speech" in curl and '"voice": "speaker"' in curl
        assert status(f"{url}/health") == 200

        loaded = len(imports(tmp_path / "stderr"))
        speak_with_late_body(url, response_format="mp3")
        result = soak(url, 50)
        assert imports(tmp_path / "stderr")[loaded:] == []  # while clients wait
        assert sum(result["outcomes"].values()) == 50 and result["outcomes"].keys() <= {
            "good",
            "bad",
            "abandoned",
            "whole",
        }
        before, after = result["usage"][1], result["usage"][-1]
        assert after["rss_mb"] < 1.05 * before["rss_mb"] + 10, result["usage"]
        assert after["tasks"] <= before["tasks"] and after["open_files"] <= before["open_files"] + 2, result["usage"]
        assert after["threads"] <= before["threads"] + 2, result["usage"]  # pools may still grow

        worker = worker_of(process.pid)
        assert not uses_torch(process.pid) and uses_torch(worker)
        with urllib.request.urlopen(post(url, max_new_tokens=400, response_format="pcm"), timeout=LIMIT) as response:
            assert response.read(FRAME)
            os.kill(worker, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(http.client.IncompleteRead):  # not a short file
                response.read()
        assert time.monotonic() - killed < 2
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(post(url, max_new_tokens=3), timeout=LIMIT)
        assert (refused.value.code, refused.value.headers["Retry-After"]) == (503, "1")
        while status(f"{url}/health") != 200:
            assert time.monotonic() - killed < LIMIT, "it did not heal"
            time.sleep(0.1)
        assert status(post(url, max_new_tokens=3, voice="speaker")) == 200
        assert not is_running(worker) and worker_of(process.pid) != worker

        with urllib.request.urlopen(post(url, max_new_tokens=100, response_format="pcm"), timeout=LIMIT) as response:
            audio = response.read(FRAME)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + LIMIT
            while status(f"{url}/health") != 503:
                assert time.monotonic() < deadline
            assert status(post(url, max_new_tokens=3)) == 503
            audio += response.read()
        assert len(audio) == 99 * FRAME
        process.communicate(timeout=LIMIT)
        assert process.returncode == 0
        stderr = (tmp_path / "stderr").read_text()
        assert "Traceback" not in stderr and "shutting down when 1 streams" in stderr, stderr
        assert "has ended: killed by SIGKILL" in stderr
    finally:
        killer.cancel()
        process.kill()
        process.wait()


@pytest.mark.parametrize("files, connections", [(80, 32), (45, 4)])
def test_more_connections_than_files(checkpoint, tmp_path, files, connections):
    """asyncio logged each attempt to take one, 70 MB a minute, and nobody was answered."""
    command = [
        sys.executable,
        "-m",
        "qwen3_tts_cuda_graphs.serving",
        "--model",
        str(checkpoint("custom_voice")),
        "--device",
        "cpu",
    ]
    command += ["--port", "0", "--voices", str(tmp_path / "voices")]
    limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    with open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(limited, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    killer = threading.Timer(LIMIT, process.kill)
    killer.start()
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.callback(killer.cancel)
        url = process.stdout.readline().split()[2].rstrip(",")
        assert process.stdout.readline().startswith("ready: ")
        host, port = url.removeprefix("http://").split(":")
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT))
        time.sleep(3)
        assert status(f"{url}/v1/models") == 200  # an idle connection gives way
        log = (tmp_path / "stderr").read_text()
        assert f"ulimit -n is {files}: --max-connections is {connections}, not 1024" in log
        assert log.count("new connections wait") <= 1 and len(log) < 2000, log


@pytest.fixture
def run(monkeypatch, capsys):
    """run(option, ...) -> exit code and what was printed on stderr."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["serving", *map(str, options)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("qwen3_tts_cuda_graphs.serving", run_name="__main__", alter_sys=False)
        return ended.value.code, capsys.readouterr().err

    return run


def test_mistakes_on_the_command_line(run, checkpoint, tmp_path):
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
            (["--model", tiny, "--api-key", ""], "--api-key or $QWEN3_TTS_API_KEY is empty"),  # "$KEY" of an unset KEY
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
            (["--model", "0.6b-customvoice", "--max-seq-len", 7], "--max-seq-len is 7"),  # asks no hub
            (["--model", tiny, "--port", 1, "--port", 2], "--port was given twice, 1 and 2: give one"),
            (["--model", tiny, "--port", 0] + 2 * ["--speaker", tiny / "speaker.pt"], "two --speaker files"),
            (["--model", tiny, "--speaker", "nobody.pt"], "no speaker file"),
            (["--model", checkpoint("custom_voice"), "--speaker", tiny / "speaker.pt"], "give a Base model"),
            (["--model", tiny, "--device", "abacus"], "no device 'abacus'"),
        ):
            code, error = run(*options)
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


@pytest.mark.parametrize("before, wanted", [(0, PRIORITY), (-20, -20)])
def test_the_priority_is_raised_where_that_is_allowed(monkeypatch, before, wanted):
    raised = []
    monkeypatch.setattr(os, "getpriority", lambda *_: before)
    monkeypatch.setattr(os, "setpriority", lambda *arguments: raised.append(arguments))
    raise_priority()
    assert raised == [(os.PRIO_PROCESS, 0, wanted)]

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    raise_priority()  # no error


def test_an_origin_is_what_browsers_send():
    for origin in ("http://localhost:3000", "HTTP://Localhost:3000/"):
        assert check_origin(origin) == "http://localhost:3000"
    assert check_origin("*") == "*"


def test_the_line_to_try_has_a_place_for_the_key(checkpoint, tmp_path):
    """It read a variable that need not be set in the shell where the line is pasted."""
    speech = Service(str(checkpoint()), "cpu", settings=Settings("secret", voices=tmp_path))
    lines = greeting(speech, "http://127.0.0.1:8000").splitlines()
    assert sum('curl -H "Authorization: Bearer KEY"' in line for line in lines) == 2
    assert sum("with your API key instead of KEY" in line for line in lines) == 2
    assert "secret" not in str(lines) and "$" not in str(lines)
    assert lines[-1] == "or listen in a browser: http://127.0.0.1:8000/"


def test_recordings_fit_into_a_message():
    """A longer one ended the worker."""
    with pytest.raises(ValueError, match="--max-reference-seconds is above 600"):
        Settings(max_reference_seconds=601)
    assert 4 * 96_000 * 600 < messages.MAX_BYTES


def test_garbage_is_collected_between_streams(checkpoint, tmp_path, monkeypatch):
    """All objects of 1,000 WebSockets take 0.1 s, and a crowd of 64 listeners had to wait."""
    server = Server(Service(str(checkpoint()), "cpu", settings=Settings(voices=tmp_path)))
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(count))
    for streams, count in [(0, 10), (1, 11), (0, 11), (1, 1000), (1, 1001)]:
        server.speech.models[0].in_flight = streams
        monkeypatch.setattr(gc, "get_count", lambda: (0, 0, count))  # noqa: B023
        asyncio.run(server.on_tick(1))
    assert collected == [11, 1001]


def test_without_the_servers_packages(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("uvicorn", "qwen3_tts_cuda_graphs.serving"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, error = run("--model", "x")
    message = (
        "error: the server needs uvicorn, which is not installed: in a checkout run ./setup.sh none --server, else "
    )
    assert code == 2 and error.startswith(message) and error.endswith(" 'qwen3-tts-cuda-graphs[server]'\n")


def test_load_script_counts_underruns_and_errors():
    """Against a server that stalls after its first chunk, and one that breaks off."""

    async def stall(reader, writer):
        await reader.readuntil(b"}")  # all of it: to close with something unread is a reset
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nF00\r\n" + bytes(3840) + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.3)  # the first chunk lasts 0.08 s
        writer.write(b"F00\r\n" + bytes(3840) + b"\r\n0\r\n\r\n")
        writer.close()

    async def break_off(reader, writer):
        await reader.readuntil(b"}")  # all of it: to close with something unread is a reset
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nF00\r\n" + bytes(3840) + b"\r\nF00\r\n")
        writer.close()

    async def main(answer):
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(listen, partial(speak, f"http://127.0.0.1:{port}", input="Hi."))

    async def refuse(reader, writer):
        await reader.readuntil(b"}")
        writer.write(b'HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n{"detail":"Not Found"}')
        writer.close()

    stalled = asyncio.run(main(stall))
    assert (stalled.underruns, stalled.seconds) == (1, 0.16)
    with pytest.raises(OSError, match="closed in the middle"):
        asyncio.run(main(break_off))
    with pytest.raises(OSError, match="does not answer as this project's server does"):
        asyncio.run(main(refuse))
    with pytest.raises(OSError, match="give one like http://127.0.0.1:8000"):
        listen(partial(speak, "127.0.0.1:8000", input="Hi."))


@pytest.mark.slow
def test_what_the_server_adds_is_measured(checkpoint, tmp_path):
    """The engine alone and the server, also with two processes of listeners, idle WebSockets and busy cores."""
    folder, output = checkpoint(), tmp_path / "server.json"
    command = [
        sys.executable,
        "-m",
        "qwen3_tts_cuda_graphs.bench.load_test",
        "--compare",
        folder,
        "--speaker",
        folder / "speaker.pt",
    ]
    command += "--device cpu --one-by-one 2 --rate 2 --seconds 2 --crowds 3 --max-streams 2 --clients 2 --busy".split()
    command += ["--audio-seconds", "0.3", "--idle-websockets", "20", "--json", output]
    subprocess.run([*map(str, command)], cwd=ROOT, check=True, timeout=3 * LIMIT)
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
    """asyncio sets TCP_NODELAY only if a socket names its protocol. Without it the first audio could wait 40 ms."""

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
