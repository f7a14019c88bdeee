"""The megakernel cannot hang: every wait has a time limit. Beyond it the request fails with a reason, and the next one
runs."""

import shutil
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gpu_on_cpu import changed_source
from helpers import ROOT, engine_of, joined, on_gpu
from megakernel_cases import compile_with, cpu_kernel_for, gpu_kernel_for, some_talker

from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.loading import load, load_upstream, model_errors
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast import megakernel, nvrtc
from qwen3_tts_cuda_graphs.fast.frame_graphs import PlainGraphs
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.runner import KernelStopped
from qwen3_tts_cuda_graphs.speech.streaming import stream

LIMIT = 60  # seconds that a wait of a test may take
LENGTH = 300  # of the cache

PUBLISHES = "store_relaxed((char *)destination + replica * sizeof(Exchange), epoch << 16 | bits);"
TWO_SECONDS = "WAIT_LIMIT_NS = 2'000'000'000"
SHORT_LIMIT = "WAIT_LIMIT_NS = 10'000'000"  # on a CPU this counts turns of all threads, not nanoseconds
FILLS = "fill(cursor, producer, source, bytes_per_slice, policy);"


def silent_block(condition: str) -> str:
    """megakernel.cu with a block that publishes nothing while the condition holds."""
    return changed_source(megakernel, (PUBLISHES, f"if (!(blockIdx.x == 3 && {condition})) {PUBLISHES}"))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@torch.no_grad()
@pytest.mark.parametrize(
    "source, reason",
    [
        (SOURCE.file.read_text(), ""),
        (silent_block("true"), "for another one"),
        pytest.param(
            changed_source(megakernel, (FILLS, f"if (blockIdx.x != 3 || cursor.slot != 1 || !cursor.parity) {FILLS}")),
            "for another one",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a kernel that works", "a block never publishes", "weights never come"],
)
def test_a_wait_that_is_never_over_ends_on_a_cpu(source, reason, tmp_path):
    """Block 3 does not publish, or gets no weights, and the other blocks wait for it. All blocks exit, and the host
    gets the reason."""
    source = source.replace(TWO_SECONDS, SHORT_LIMIT)
    it = some_talker(cpu_kernel_for(tmp_path, source, grid=8), 1024, LENGTH, layers=1)
    it.launch()
    found = it.step.why_failed()
    assert reason in found and bool(reason) == bool(found)
    assert it.step.failed == it.step.failed_on_host


class StoppingGraphs:
    """Replaces the graphs of a frame. Gives up in one frame and writes NaN, as a megakernel may."""

    name = "the megakernel"

    def __init__(self, graphs: PlainGraphs, stops_in: int) -> None:
        self.graphs = graphs
        self.rows = graphs.rows
        self.step = graphs.step
        self.stops_in = stops_in
        self.waiting_launches = (self,)
        self.count = 0
        self.has_failed = False
        self.stops = threading.Event()
        self.may_go_on = threading.Event()

    def why_failed(self) -> str:
        return "a thread block has waited for another one for 2 s" if self.has_failed else ""

    def predict(self) -> None:
        self.graphs.predict()
        self.count += 1
        if self.count == self.stops_in:
            self.stops.set()
            assert self.may_go_on.wait(LIMIT)
            self.has_failed = True
            self.rows.hidden.fill_(float("nan"))
            for keys in self.rows.keys:
                keys.fill_(float("nan"))


class Stopping:
    """An accelerated model whose graphs for one or two rows give up in the fifth frame, and the expected audio."""

    def __init__(self, folder: Any) -> None:
        self.tts = accelerate(load_upstream(str(folder), "cpu"), max_seq_len=128, rows=2)
        talker = self.tts.model.talker
        talker.codec_head.weight.data[talker.config.codec_eos_token_id] = 0  # no end before the fifth frame
        self.method = self.tts.generate_voice_clone
        voice = speaker_prompt(torch.load(folder / "speaker.pt", weights_only=True))
        self.request = dict(text="Hello!", language="English", voice_clone_prompt=voice, max_new_tokens=12)
        self.expected = self.speak_alone()
        self.graphs = self.tts.speech.runner.graphs

    def stop_in(self, rows: int) -> StoppingGraphs:
        self.graphs.by_size[rows] = StoppingGraphs(self.graphs.by_size[rows], 5)
        return self.graphs.by_size[rows]

    def speak_alone(self) -> np.ndarray:
        torch.manual_seed(3)
        return joined(stream(self.method, **self.request))

    def speak_in(self, engine: Engine) -> np.ndarray:
        return joined(engine.stream(self.method, seed=3, **self.request))

    def check_that_it_is_left(self, engine: Engine) -> None:
        """The engine's next request and the next plain call are right, and do not use the graphs that have stopped."""
        np.testing.assert_allclose(self.speak_in(engine), self.expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(self.speak_alone(), self.expected, rtol=0, atol=1e-5)
        assert not any(graphs.waiting_launches for graphs in self.graphs.by_size.values())
        assert self.tts.speech.path.startswith("separate kernels, no megakernel: the megakernel has stopped")


@pytest.fixture
def stopping(checkpoint) -> Stopping:
    return Stopping(checkpoint("base", "tiny"))


@pytest.mark.filterwarnings("ignore:the speech was cut off")
@pytest.mark.parametrize("rows", [1, 2])
def test_in_the_engine_the_requests_fail_and_the_next_ones_run(stopping, rows):
    graphs = stopping.stop_in(rows)
    graphs.may_go_on.set()
    with engine_of(stopping.tts, 2) as engine, ThreadPoolExecutor(2) as threads:
        with stopping.tts.speech.turns.take():  # so that they are admitted together
            streams = [engine.stream(stopping.method, seed=3, **stopping.request) for _ in range(rows)]
        for job in [threads.submit(joined, chunks) for chunks in streams]:
            with pytest.raises(KernelStopped, match="waited for another one for 2 s: .* next request"):
                job.result(LIMIT)
        stopping.check_that_it_is_left(engine)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_a_stream_that_joins_in_that_moment_is_right(stopping):
    """Only the stream that took part in the stopped frame fails."""
    graphs = stopping.stop_in(1)
    with engine_of(stopping.tts, 2) as engine:
        first = engine.stream(stopping.method, seed=3, **stopping.request)
        assert graphs.stops.wait(LIMIT)
        second = engine.stream(stopping.method, seed=3, **stopping.request)
        graphs.may_go_on.set()
        np.testing.assert_allclose(joined(second), stopping.expected, rtol=0, atol=1e-5)
        with pytest.raises(KernelStopped):
            joined(first)
        stopping.check_that_it_is_left(engine)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_the_engine_does_not_use_what_stopped_outside(stopping):
    stopping.stop_in(1).may_go_on.set()
    with engine_of(stopping.tts, 2) as engine:
        with pytest.raises(KernelStopped, match="waited for another one for 2 s: .* next request"):
            stopping.speak_alone()
        stopping.check_that_it_is_left(engine)


def test_the_command_line_says_so_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended, cli_errors(), model_errors():
        raise KernelStopped("the megakernel has stopped")
    assert ended.value.code == 2
    message = "the megakernel has stopped: the speech is lost, the next request runs on separate kernels"
    assert capsys.readouterr().err == f"error: {message}\n"


# ---- On a GPU


def seconds_of(step: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.fixture
def on_cuda() -> Any:
    with torch.device("cuda", 0), torch.no_grad():
        yield


@on_gpu
@pytest.mark.parametrize("bulk_copies", [0, 1])
def test_a_block_that_never_publishes(bulk_copies, on_cuda):
    it = some_talker(gpu_kernel_for(silent_block("true"), bulk_copies=bulk_copies), 1024, LENGTH)
    taken = seconds_of(it.step)
    print(f"{taken:.2f} s: {it.step.why_failed()}")
    assert "for another one" in it.step.why_failed() and taken < 5
    assert seconds_of(it.step) < 5  # the flag stays set, so the next launch ends as well


@on_gpu
def test_more_blocks_than_fit(on_cuda):
    """The driver refuses such a cooperative launch. In a plain launch the resident blocks give up, and then the others
    run and give up, too."""
    source = changed_source(megakernel, ("GRID <= 128,", "GRID <= 256,"))
    # The exchange must be larger, as each split of the attention takes space in it.
    it = some_talker(gpu_kernel_for(source, grid=256, exchange_bytes=2 << 20), 2048, LENGTH)
    with pytest.raises(RuntimeError, match="cuLaunchCooperativeKernel"):
        it.step()
    call_driver = nvrtc.call_driver

    def launch_plainly(function: str, *arguments: Any) -> None:
        assert function == "cuLaunchCooperativeKernel"
        call_driver("cuLaunchKernel", *arguments, None)

    with mock.patch.object(nvrtc, "call_driver", launch_plainly):
        taken = seconds_of(it.step)
    print(f"{taken:.2f} s: {it.step.why_failed()}")
    assert "for another one" in it.step.why_failed() and taken < 10


OCCUPY = """
extern "C" __global__ void occupy(unsigned long long nanoseconds) {
    __shared__ volatile char room[48 << 10];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        room[threadIdx.x] = 1;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


@on_gpu
@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_beside_a_kernel_that_occupies_multiprocessors(seconds, on_cuda):
    """If the SMs are occupied for a second, the step waits and is right. If for longer, it may give up, but it ends."""
    it = some_talker(gpu_kernel_for(), 1024, LENGTH)
    device = torch.device("cuda", 0)
    gpu = torch.cuda.get_device_properties(device)
    occupier = nvrtc.Kernels(nvrtc.compile_source(OCCUPY, f"sm_{gpu.major}{gpu.minor}"), ["occupy"], device)
    it.step()
    torch.cuda.synchronize()
    it.graph.frame.zero_()
    expected = it.step.logits().clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        occupier.launch("occupy", (40, 1), 32, [int(seconds * 1e9)])
    time.sleep(0.1)
    start = time.perf_counter()
    it.step()
    torch.cuda.current_stream().synchronize()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    print(f"occupied for {seconds} s: the step took {taken:.2f} s, {it.step.why_failed() or 'right'}")
    assert taken < seconds + 5
    if seconds < 2:
        assert it.step.why_failed() == "" and torch.equal(it.step.logits(), expected)


@on_gpu
def test_the_request_fails_and_the_next_one_runs(checkpoint):
    """The next request runs on separate kernels, and `path` says why. Block 3 of the talker stops publishing after 40
    launches of 28 layers, which is long after the self-test."""
    folder = checkpoint("base", "0.6B")
    with compile_with(gpu_kernel_for(silent_block("CODES == 1 && epoch > 40 * LAYERS"))):
        tts = accelerate(load_upstream(str(folder)), max_seq_len=256)
    assert tts.speech.path == "megakernel"
    voice = speaker_prompt(torch.load(folder / "speaker.pt", weights_only=True))
    request = dict(text="Hello!", language="English", voice_clone_prompt=voice, max_new_tokens=60)
    with pytest.raises(KernelStopped, match="waited for another one"):
        tts.generate_voice_clone(**request)
    (audio,), _ = tts.generate_voice_clone(**request)
    assert len(audio) > 0
    assert tts.speech.path.startswith("separate kernels") and "stopped" in tts.speech.path


TWO_PROCESSES = """
    import sys, time
    sys.path.insert(0, {root!r})
    import torch
    from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
    from qwen3_tts_cuda_graphs.common.loading import load

    tts = load({folder!r}, max_seq_len=512)
    voice = speaker_prompt(torch.load({folder!r} + "/speaker.pt", weights_only=True))
    spoken = []
    start = time.perf_counter()
    while time.perf_counter() - start < 8:
        torch.manual_seed(0)
        (audio,), _ = tts.generate_voice_clone("Hello!", "English", voice_clone_prompt=voice, max_new_tokens=200)
        spoken.append(audio)
    assert all((audio == spoken[0]).all() for audio in spoken)
    print(tts.speech.path, len(spoken))
"""


@on_gpu
def test_two_processes(checkpoint):
    """Two processes on one GPU speak the same text repeatedly on the megakernel, each with equal audio."""
    program = textwrap.dedent(TWO_PROCESSES).format(root=str(ROOT), folder=str(checkpoint("base", "0.6B")))
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        print(output.strip())
        assert process.returncode == 0 and output.startswith("megakernel")


@on_gpu
@pytest.mark.parametrize("size, width", [("0.6B", 1024), ("1.7B", 2048)])
def test_rows_on_the_megakernel(size, width, checkpoint):
    """The megakernels for several rows pass their self-test, and streams on them are complete. A stream that is alone
    again has the bits of a single row."""
    tts = load(str(checkpoint("base", size)), max_seq_len=256, rows=4)
    prompt = speaker_prompt(torch.randn(width, generator=torch.Generator().manual_seed(0)))
    request = dict(text="Hello there.", language="English", voice_clone_prompt=prompt)
    with Engine(tts) as engine, ThreadPoolExecutor(4) as threads:
        assert all(graphs.waiting_launches for graphs in tts.speech.runner.graphs.by_size.values())

        def speak(number: int) -> np.ndarray:
            chunks = engine.stream(tts.generate_voice_clone, seed=number, max_new_tokens=40 + number, **request)
            return joined(chunks)

        alone = speak(7)
        for number, audio in enumerate(threads.map(speak, range(8))):
            assert len(audio) == (39 + number) * 1920 and np.isfinite(audio).all() and np.abs(audio).max() > 0
        np.testing.assert_array_equal(speak(7), alone)
