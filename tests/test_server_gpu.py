"""The server on a GPU heals after a real CUDA error, while many listen."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import ROOT
from serving_helpers import LIMIT, post, status, worker_of

from qwen3_tts_cuda_graphs.bench.load_test import listen, speak

LISTENERS = 16
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


@contextlib.contextmanager
def running(command, **options):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    killer = threading.Timer(3 * LIMIT, process.kill)
    killer.start()
    try:
        yield process
    finally:
        killer.cancel()
        process.kill()
        process.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_heals_after_an_illegal_address(checkpoint, tmp_path):
    """A kernel of the worker writes to address 16: from then on every call of CUDA in that process fails."""
    (tmp_path / "sitecustomize.py").write_text(CRASH)
    model = checkpoint("base", "0.6B")
    command = [
        sys.executable,
        "-m",
        "qwen3_tts_cuda_graphs.serving",
        "--model",
        str(model),
        "--speaker",
        str(model / "speaker.pt"),
    ]
    command += ["--port", "0", "--max-streams", str(LISTENERS), "--voices", str(tmp_path / "voices")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with running(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}) as server:
        url = server.stdout.readline().split()[2].rstrip(",")
        assert server.stdout.readline().startswith("ready: ")
        ended = []  # when each listener's speech ended, and how

        def hear() -> None:
            try:
                listen(partial(speak, url, input="Hi.", response_format="pcm", max_new_tokens=1500))
                ended.append((time.monotonic(), "complete"))
            except OSError as error:
                ended.append((time.monotonic(), str(error)))

        with ThreadPoolExecutor(LISTENERS) as pool:
            for _ in range(LISTENERS):
                pool.submit(hear)
            time.sleep(1)
            assert not ended, ended
            crashed_at = time.monotonic()
            os.kill(worker_of(server.pid), signal.SIGUSR1)
        times, ways = zip(*ended)
        assert max(times) - crashed_at < 2 and "complete" not in ways, ended
        assert status(f"{url}/health") == 503
        while status(f"{url}/health") != 200:
            assert time.monotonic() - crashed_at < LIMIT, "it did not heal"
            time.sleep(0.1)
        assert status(post(url, max_new_tokens=3, voice="speaker", response_format="wav")) == 200
        print(f"errors after {max(times) - crashed_at:.2f} s, healed after {time.monotonic() - crashed_at:.1f} s")
