"""The megakernel cannot hang: every wait has a limit, the request then fails with a reason, the next one runs."""

import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import ROOT
from megakernel_cases import some_talker
from test_kernel_on_cpu import HIDDEN, LENGTH, cpu_kernel_for
from test_megakernel import on_gpu

from cli import cli_errors, speaker_prompt
from fast import check_and_end, megakernel, nvrtc
from fast.megakernel import Sizes, complete_source, kernel_sizes
from fast.paths import MegakernelStopped
from fast.streaming import decoder_of
from generate import accelerate, load_upstream

PUBLISHES = "if (row < EIGHTHS * share.rows_per_eighth) {"
FILLS = "fill(stage, producer, source, bytes_per_eighth, policy);"


def changed_source(right: str, wrong: str) -> str:
    source = megakernel.SOURCE.read_text()
    assert source.count(right) == 1
    return source.replace(right, wrong)


def silent_block(condition: str) -> str:
    """megakernel.cu with a block that does not publish its rows while the condition holds."""
    return changed_source(PUBLISHES, PUBLISHES.replace(") {", f" && !(blockIdx.x == 3 && {condition})) {{"))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@torch.no_grad()
@pytest.mark.parametrize(
    "source",
    [silent_block("true"), changed_source(FILLS, f"if (blockIdx.x != 3 || stage != 40) {FILLS}")],
    ids=["a block never publishes", "weights never come"],
)
def test_a_wait_that_is_never_over_ends_on_a_cpu(source, tmp_path):
    """All blocks leave and the host learns why: in both cases the others wait for block 3."""
    it = some_talker(cpu_kernel_for(tmp_path, source, grid=8), HIDDEN, LENGTH, layers=1)
    it.step()
    assert "for another one" in it.step.why_failed()
    assert it.step.failed == it.step.failed_on_host


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@torch.no_grad()
def test_a_kernel_that_works_has_not_failed(tmp_path):
    it = some_talker(cpu_kernel_for(tmp_path, grid=8), HIDDEN, LENGTH, layers=1)
    it.step()
    assert it.step.why_failed() == ""


class StoppedStep(megakernel.FusedStep):
    """A step that has given up."""

    def __init__(self) -> None:
        self.failed_on_host = torch.tensor([1], dtype=torch.int32)


def test_a_stopped_megakernel_ends_the_request_and_is_left(checkpoint):
    """The request fails with the reason; the next one gets new graphs, and the path says why. Without a GPU."""
    folder = checkpoint("base", "tiny")
    tts = accelerate(load_upstream(str(folder), "cpu"), max_seq_len=128)
    decoder = decoder_of(tts)
    talker_graph, predictor_graph = decoder.graphs_for(1)
    predictor_graph.step = StoppedStep()  # what was captured still runs
    talker_graph.all_ended = partial(check_and_end, decoder, talker_graph.all_ended, talker_graph, predictor_graph)
    voice = speaker_prompt(torch.load(folder / "speaker.pt", weights_only=True))
    request = dict(text="Hello!", language="English", voice_clone_prompt=voice, max_new_tokens=8)
    with pytest.raises(MegakernelStopped, match="waited for another one for 2 s: .* next request"):
        tts.generate_voice_clone(**request)
    (audio,), _ = tts.generate_voice_clone(**request)
    assert len(audio) > 0
    assert decoder.graphs_for(1)[0] is not talker_graph
    assert decoder.path.startswith("separate kernels, no megakernel: the megakernel has stopped")


def test_the_command_line_says_so_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended, cli_errors():
        raise MegakernelStopped("the megakernel has stopped: a thread block has waited for 2 s")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the megakernel has stopped: a thread block has waited for 2 s\n"


# ---- On a GPU


def kernel_for(source: str | None = None, launch_plainly: bool = False, **changes: int) -> Any:
    def compile_for(model: Any, heads: Any, talker_hidden: int) -> tuple[Sizes, nvrtc.Kernel]:
        sizes = kernel_sizes(model, heads, talker_hidden, torch.cuda.get_device_properties(model.device))
        sizes = replace(sizes, **changes)
        kernel = megakernel.compile_kernel(model.device, sizes, complete_source(sizes, source))
        if launch_plainly:
            original = kernel.call
            kernel.call = lambda name, *rest: (
                original("cuLaunchKernel", *rest, None) if "Cooperative" in name else original(name, *rest)
            )
        return sizes, kernel

    return compile_for


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
    it = some_talker(kernel_for(silent_block("true"), bulk_copies=bulk_copies), 1024, LENGTH)
    taken = seconds_of(it.step)
    print(f"{taken:.2f} s: {it.step.why_failed()}")
    assert "for another one" in it.step.why_failed() and taken < 5
    assert seconds_of(it.step) < 5  # the word stays set, and the next launch ends as well


@on_gpu
def test_more_blocks_than_fit(on_cuda):
    """The driver refuses a cooperative launch. Without its help the blocks that are there give up, the rest follow."""
    source = changed_source("GRID <= 128,", "GRID <= 256,")
    with pytest.raises(RuntimeError, match="cuLaunchCooperativeKernel"):
        some_talker(kernel_for(source, grid=256), 2048, LENGTH).step()
    it = some_talker(kernel_for(source, launch_plainly=True, grid=256), 2048, LENGTH)
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
    """For a second it waits and is right; for longer it may give up, but it ends."""
    it = some_talker(kernel_for(), 1024, LENGTH)
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


@pytest.fixture
def late_fault(monkeypatch, tmp_path) -> Any:
    """A talker's kernel whose block 3 falls silent long after the self-test: 28 layers per launch."""
    wrong = tmp_path / "megakernel.cu"
    wrong.write_text(silent_block("CODES == 1 && epoch > 40 * LAYERS"))
    monkeypatch.setattr(megakernel, "SOURCE", wrong)
    megakernel.compile_once.cache_clear()
    yield
    megakernel.compile_once.cache_clear()


@on_gpu
def test_the_request_fails_and_the_next_one_runs(late_fault, checkpoint):
    """On separate kernels, and the path says why."""
    folder = checkpoint("base", "0.6B")
    tts = accelerate(load_upstream(str(folder)), max_seq_len=256)
    decoder = decoder_of(tts)
    assert decoder.path == "megakernel"
    voice = speaker_prompt(torch.load(folder / "speaker.pt", weights_only=True))
    request = dict(text="Hello!", language="English", voice_clone_prompt=voice, max_new_tokens=60)
    with pytest.raises(MegakernelStopped, match="waited for another one"):
        tts.generate_voice_clone(**request)
    (audio,), _ = tts.generate_voice_clone(**request)
    assert len(audio) > 0
    assert decoder.path.startswith("separate kernels") and "stopped" in decoder.path


TWO_PROCESSES = """
    import sys, time
    sys.path.insert(0, {root!r})
    import torch
    from cli import cli_errors, speaker_prompt
from fast import check_and_end, megakernel, nvrtc
    from fast.streaming import decoder_of
    from generate import load

    tts = load({folder!r}, max_seq_len=512)
    voice = speaker_prompt(torch.load({folder!r} + "/speaker.pt", weights_only=True))
    speeches = []
    start = time.perf_counter()
    while time.perf_counter() - start < 8:
        torch.manual_seed(0)
        (audio,), _ = tts.generate_voice_clone("Hello!", "English", voice_clone_prompt=voice, max_new_tokens=200)
        speeches.append(audio)
    assert all((speech == speeches[0]).all() for speech in speeches)
    print(decoder_of(tts).path, len(speeches))
"""


@on_gpu
def test_two_processes(checkpoint):
    """Both speak the same again and again, on the megakernel."""
    program = textwrap.dedent(TWO_PROCESSES).format(root=str(ROOT), folder=str(checkpoint("base", "0.6B")))
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        print(output.strip())
        assert process.returncode == 0 and output.startswith("megakernel")
