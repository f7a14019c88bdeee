"""The parts of a frame and of the first audio, each timed alone."""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from cudagraph_talker import draw_noise
from qwen3_tts_cuda_graphs.bench.bounds import POSITION
from qwen3_tts_cuda_graphs.bench.timing import Row, clock, repeat
from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

LATE_POSITION = 1500
REPLAYS = 20


@torch.no_grad()
def frame_parts(tts, arguments: dict) -> Row:
    """Time the predictor and the talker alone, then a whole frame at two positions of the cache; noise included."""
    runner = tts.speech.runner
    chunks = stream(tts.generate_voice_clone, **arguments)
    next(chunks)  # now the request is in row 0
    rows, graphs = runner.views[0], runner.graphs.of(1)

    def predict() -> None:
        draw_noise(rows.code_noise)
        graphs.predict()

    def step() -> None:
        draw_noise(rows.noise)
        graphs.step()

    def both() -> None:
        predict()
        step()

    parts = {"predictor": time_replays(predict), "talker": time_replays(step)}
    for position in (POSITION, LATE_POSITION):
        rows.frame.fill_(position - rows.prompt_length.item())
        parts[f"frame at position {position}"] = time_replays(both)
    chunks.close()
    return parts


def time_replays(replay: Callable[[], None]) -> float:
    """Milliseconds of one replay, of many that run back to back."""
    replay()  # warm-up
    ms, _ = clock(lambda: [replay() for _ in range(REPLAYS)])
    return ms / REPLAYS


@torch.no_grad()
def first_audio_parts(tts, arguments: dict, runs: int) -> Row:
    """Time what happens before the first audio, for a voice that has spoken before."""
    speech, runner = tts.speech, tts.speech.runner

    def make_utterance() -> Utterance:
        return speech.utterance(prepare_request(tts.generate_voice_clone, **arguments))

    utterance = make_utterance()
    utterance.row = 0
    runner.codec.reset(0)
    parts = {
        "tokenize and prompt": make_utterance,
        "prefill": lambda: runner.read_prompts([utterance]),
        "first codes": runner.graphs.of(1).predict,
        "codec and copy": lambda: runner.codec.feed([0], runner.rows.codes[:1, :1]).wait(),
    }
    return {name: statistics.median(ms for ms, _ in repeat(partial(clock, part), runs)) for name, part in parts.items()}
