"""Frames of several streams on the megakernel: the test that they must pass finds what is wrong with them."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_on_cpu import CpuKernel, PretendedGpu
from helpers import joined
from megakernel_cases import changed_source
from test_self_test import graphs  # noqa: F401

import serving.engine
from cli.voices import speaker_prompt
from fast import megakernel
from fast.megakernel import FusedStep, complete_source, kernel_sizes
from fast.paths import MegakernelStopped
from generate import accelerate, load, load_upstream, stream
from serving.batch import Slots
from serving.engine import Engine
from serving.megakernel_frame import MegakernelFrame, why_wrong

LIMIT = 60  # seconds that a wait may take

FAULTS = {  # what one stream may take from another: the right text, the wrong one, and a part of the reason
    "position": ("prompt_length[attended]", "prompt_length[0]", "keys in layer"),
    "cache": ("(stream * KV_HEADS + kv_head)", "(0 * KV_HEADS + kv_head)", "the logits of the codes"),
    "projected hidden state": ("first_input + stream * HIDDEN", "first_input", "the logits of the codes"),
    "hidden state": ("arguments.hidden + stream * (HIDDEN / 2) + ", "arguments.hidden + ", "the hidden state"),
    "code": ("code_of(stream) * HIDDEN", "code_of(0) * HIDDEN", "the logits of the codes"),
    "noise": ("(stream * CODES + head) * VOCAB", "head * VOCAB", "the codes"),
    "top-k": ("arguments.topk_rank[stream]", "arguments.topk_rank[0]", "the codes"),
    "text": ("u64 frame = element_stream * arguments.frames +", "u64 frame =", "keys in layer"),
}
ON_CPU = [None, *FAULTS]


def faulty_source(fault: str) -> str:
    right, wrong, _ = FAULTS[fault]
    return changed_source(right, wrong)


def test_every_fault_can_be_made():
    for fault in FAULTS:
        faulty_source(fault)


def use_cpu_kernels(single: tuple, folder: Path, fault: str | None, monkeypatch: Any) -> None:
    """A fault is compiled into the kernels of several streams."""
    talker, predictor = single

    def compile_for(model: Any, heads: Any, talker_hidden: int, streams: int) -> tuple[megakernel.Sizes, CpuKernel]:
        source = faulty_source(fault) if fault and streams > 1 else megakernel.SOURCE.read_text()
        sizes = replace(kernel_sizes(model, heads, talker_hidden, PretendedGpu(), streams), grid=16)
        return sizes, CpuKernel(complete_source(sizes, source), sizes, folder)

    monkeypatch.setattr(megakernel, "compile_for", compile_for)
    monkeypatch.setattr(talker, "step", megakernel.talker_step(talker.upstream, talker), raising=False)
    monkeypatch.setattr(predictor, "step", megakernel.predictor_step(predictor), raising=False)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("fault", ON_CPU)
@torch.no_grad()
@pytest.mark.slow
def test_faults_on_a_cpu(fault, graphs, tmp_path, monkeypatch):  # noqa: F811
    use_cpu_kernels(graphs, tmp_path, fault, monkeypatch)
    talker, predictor = graphs
    slots = Slots(talker.upstream, 2, 48)
    before = [tensor.clone() for slot in range(2) for tensor in slots.slot_state(slot)]
    frame = MegakernelFrame(talker.upstream, predictor, slots, 2)
    reason = why_wrong(frame, slots, graphs)
    print(f"{fault}: {reason}")
    assert bool(reason) == bool(fault)
    assert fault is None or FAULTS[fault][2] in reason
    after = [tensor for slot in range(2) for tensor in slots.slot_state(slot)]
    assert all(torch.equal(old, new) for old, new in zip(before, after))


class PretendedFrame:
    """Stands in for a MegakernelFrame where there is none: the engine's own graph, which may claim to have stopped."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self.graph = engine.graphs[rows]
        self.step = FusedStep.__new__(FusedStep)
        self.step.failed_on_host = torch.zeros(1, dtype=torch.int32)
        self.steps = (self.step,)
        self.replays = 0
        self.stops_after = float("inf")

    def replay(self) -> None:
        self.graph.replay()
        self.replays += 1
        if self.replays >= self.stops_after:
            self.step.failed_on_host.fill_(1)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_two_streams_run_on_it_until_it_stops(stops, checkpoint, monkeypatch):
    """If it stops, the streams that were in it fail, and later ones run without it."""
    monkeypatch.setattr(serving.engine, "LONGEST_HOLD", 0.0)
    folder = checkpoint("base", "tiny")
    tts = accelerate(load_upstream(str(folder), "cpu"), max_seq_len=128)
    voice = speaker_prompt(torch.load(folder / "speaker.pt", weights_only=True))
    request = dict(text="Hello!", language="English", voice_clone_prompt=voice, max_new_tokens=12)
    torch.manual_seed(3)
    expected = joined(stream(tts.generate_voice_clone, **request))

    with Engine(tts, max_streams=2) as engine, ThreadPoolExecutor(2) as threads:
        frame = PretendedFrame(engine, 2)
        engine.megakernels[2] = frame
        frame.stops_after = 3 if stops else 1000

        def start_both() -> list[Future]:
            with engine.decoder.lock:  # so that they are admitted together
                streams = [engine.stream(tts.generate_voice_clone, seed=3, **request) for _ in range(2)]
            return [threads.submit(joined, chunks) for chunks in streams]

        for job in start_both():
            if stops:
                with pytest.raises(MegakernelStopped):
                    job.result(LIMIT)
            else:
                np.testing.assert_allclose(job.result(LIMIT), expected, rtol=0, atol=1e-5)
        assert frame.replays == 3 if stops else frame.replays > 5
        for job in start_both():
            np.testing.assert_allclose(job.result(LIMIT), expected, rtol=0, atol=1e-5)
        assert frame.replays == 3 if stops else frame.replays > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size, width", [("0.6B", 1024), ("1.7B", 2048)])
def test_on_a_gpu(size, width, checkpoint):
    """Both kernels pass their test, and streams that run on them are complete; a single one again has its own bits."""
    tts = load(str(checkpoint("base", size)), max_seq_len=256)
    prompt = speaker_prompt(torch.randn(width, generator=torch.Generator().manual_seed(0)))
    request = dict(text="Hello there.", language="English", voice_clone_prompt=prompt)
    with Engine(tts, max_streams=4) as engine, ThreadPoolExecutor(4) as threads:
        assert sorted(engine.megakernels) == [2, 4]

        def speak(number: int) -> np.ndarray:
            chunks = engine.stream(tts.generate_voice_clone, seed=number, max_new_tokens=40 + number, **request)
            return joined(chunks)

        alone = speak(7)
        for number, audio in enumerate(threads.map(speak, range(8))):
            assert len(audio) == (39 + number) * 1920 and np.isfinite(audio).all() and np.abs(audio).max() > 0
        np.testing.assert_array_equal(speak(7), alone)
