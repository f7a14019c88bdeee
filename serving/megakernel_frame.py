"""Frames of two or four streams on the megakernel, which reads the weights once for all of them."""

import logging
from types import SimpleNamespace

import torch

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import TalkerGraph
from fast.megakernel import FusedStep, PredictorStep, compile_ahead, predictor_step, talker_step
from fast.megakernel_reference import apply_talker_rules, choose
from fast.paths import stacks_of, why_stopped
from fast.self_test import restored
from serving.batch import PROGRESS, SAMPLING, FrameGraph, Slots, cache_row

log = logging.getLogger("qwen3_tts_cudagraphs")

ROWS = (4, 2)  # the larger first: the other fits into its memory
PROMPT_LENGTHS = (7, 300, 150, 43)  # in the test, where the cache is long enough
MAX_DIFFERENCE = 0.2  # in the test, of the values' median


class MegakernelFrame(FrameGraph):
    """A whole frame of the first `rows` slots in two launches of fast/megakernel.cu."""

    def __init__(self, talker, predictor: PredictorGraph, slots: Slots, rows: int):
        super().__init__(talker, predictor, slots, rows)
        with self.device:
            self.embedding = torch.zeros(rows, 1, talker.config.hidden_size, dtype=talker.dtype)
        self.predictor.talker_graph = self
        self.predictor.text = self.text
        self.predictor.codes = self.codes
        self.predictor.hiddens = None
        self.predictor_step = predictor_step(self.predictor, rows, like=predictor.step)
        self.talker_step = talker_step(talker, self, rows)
        self.steps = self.predictor_step, self.talker_step

    def step(self) -> None:
        for step in self.steps:
            step()


def rows_on_megakernel(single: tuple[TalkerGraph, PredictorGraph], batch_sizes: list[int]) -> list[int]:
    """Of these batch sizes, those that the megakernel has. `single` are the graphs of a single row."""
    has_megakernel = isinstance(single[1].step, PredictorStep)
    return [rows for rows in ROWS if has_megakernel and rows in batch_sizes]


def compile_frames_ahead(talker, single: tuple, batch_sizes: list[int]) -> None:
    """Start what `megakernel_frames` takes longest with, in threads."""
    for rows in rows_on_megakernel(single, batch_sizes):
        for stack in stacks_of(talker):
            compile_ahead(*stack, rows)


def megakernel_frames(talker, single: tuple, slots: Slots, batch_sizes: list[int], pool) -> dict[int, MegakernelFrame]:
    """Captured frames, by their rows; none where the megakernel does not run or is wrong."""
    frames = {}
    for rows in rows_on_megakernel(single, batch_sizes):
        try:
            frame = MegakernelFrame(talker, single[1], slots, rows)
            if reason := why_wrong(frame, slots, single):
                log.warning("the megakernel for %d streams failed its test and is not used: %s", rows, reason)
                continue
            frame.capture(pool)
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:  # too few multiprocessors for so many streams, for instance
            log.info("frames of %d streams run without the megakernel: %s", rows, " ".join(str(error).split())[:200])
            continue
        frames[rows] = frame
    return frames


# ---- The test


@torch.no_grad()
def why_wrong(frame: MegakernelFrame, slots: Slots, single: tuple[TalkerGraph, PredictorGraph]) -> str:
    """What is wrong with a frame; empty if nothing is.

    A frame of streams in random states is compared with what the single-row megakernel computes for each of them; that
    has had a test of its own. The two differ in the last bits: the talker splits its attention into other parts.
    """
    rows = len(frame.token)
    states = [tensor for slot in range(rows) for tensor in slots.slot_state(slot)]
    copies = [tensor.clone() for tensor in states]
    try:
        fill_with_random_states(frame, slots)
        projected = frame.predictor.project(frame.hidden)  # of all rows at once: of one it may round otherwise
        with restored(*single):
            alone = [run_alone(slots, row, projected[row], single) for row in range(rows)]
            synchronize(frame.device)
            if reason := why_stopped(*(graph.step for graph in single)):
                return reason
        before = {name: getattr(frame, name).clone() for name in PROGRESS}
        frame.step()
        synchronize(frame.device)
        if reason := why_stopped(*frame.steps):
            return reason
        reasons = (why_row_is_wrong(frame, slots, row, before, alone[row]) for row in range(rows))
        return next(filter(None, reasons), "")
    finally:
        for tensor, value in zip(states, copies):
            tensor.copy_(value)
        slots.advance.zero_()
        for row in range(rows):
            torch._foreach_zero_(slots.cache_rows[row])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fill_with_random_states(frame: MegakernelFrame, slots: Slots) -> None:
    """Other settings for each row. The third of four does not advance."""
    generator = torch.Generator(frame.device).manual_seed(0)
    rows = len(frame.token)
    frame.hidden.normal_(generator=generator)
    frame.token.random_(frame.predictor.sampling.vocab_size, generator=generator)
    frame.seen.random_(2, generator=generator)
    frame.suppressed.random_(2, generator=generator)
    frame.text[:, :rows].normal_(generator=generator)
    for row in range(rows):
        slots.advance[row] = row != 2
        frame.frame[row] = row
        frame.prompt_length[row] = min(PROMPT_LENGTHS[row], frame.cache.length - rows)
        frame.repetition_penalty[row] = 1.5 - 0.1 * row
        for tensor in slots.cache_rows[row]:
            tensor[:, : int(frame.prompt_length[row]) + row].normal_(generator=generator)
        for sampling in (frame.sampling, frame.predictor.sampling):
            sampling.temperature[row] = 100.0 - row  # so hot that the noise decides
            sampling.topk_rank[row] = sampling.vocab_size - (400, 20, 100, 5)[row]
            sampling.one_minus_top_p[row] = (0.0, 0.5, 0.0, 0.0)[row]
            sampling.greedy[row] = row == 3
            sampling.noise[row].exponential_(generator=generator)


def run_alone(slots: Slots, row: int, projected: torch.Tensor, single: tuple) -> SimpleNamespace:
    """The next frame of one slot from the single-row graphs, with the slot's noise."""
    talker, predictor = single
    position = int(slots.prompt_length[row] + slots.frame[row])
    slots.copy_to_single(row, talker, predictor, position)
    frame = int(talker.frame)
    predictor.step.first_input.copy_(projected)
    for step, noise in ((predictor.step, slots.predictor_sampling.noise), (talker.step, slots.sampling.noise)):
        step.noise.copy_(noise[row])
        FusedStep.__call__(step, draw_noise=False)  # without the projection
    return SimpleNamespace(
        codes=predictor.codes[0, frame].clone(),
        code_logits=predictor.step.logits().clone(),
        logits=talker.step.logits().clone(),
        hidden=talker.hidden.clone(),
        position=position,
        cached=[tensor[:, position].clone() for tensor in cache_row(talker.cache, 0)],
    )


def why_row_is_wrong(frame: MegakernelFrame, slots: Slots, row: int, before: dict, alone: SimpleNamespace) -> str:
    stream = f"stream {row + 1} of {len(frame.token)}"
    code_logits, logits = (step.logits()[row] for step in frame.steps)
    codes = frame.codes[row, row]
    same = int((codes == alone.codes).cumprod(0).sum())  # codes before one that is another
    if reason := why_different({"logits of the codes": (code_logits[:same], alone.code_logits[:same])}, stream):
        return reason
    if not torch.equal(codes[1:], choose_for(frame.predictor.sampling, row, code_logits)):
        return f"the codes of {stream} are not those to choose"

    advances = bool(frame.advance[row])
    pairs = {}
    for i, (tensor, cached) in enumerate(zip(slots.cache_rows[row], alone.cached)):
        pairs[f"{('keys', 'values')[i % 2]} in layer {i // 2}"] = tensor[:, alone.position], cached
    pairs["logits of the first code"] = logits, alone.logits
    if advances:
        pairs["hidden state"] = frame.hidden[row], alone.hidden[0]
    if reason := why_different(pairs, stream):
        return reason

    penalty = float(frame.repetition_penalty[row])
    scores = apply_talker_rules(logits, before["seen"][row], frame.suppressed[row], penalty, None)
    expected = {name: values[row] for name, values in before.items()}
    if advances:
        token = choose_for(frame.sampling, row, scores)
        expected["seen"][token] = True
        expected = dict(token=token, frame=expected["frame"] + 1, seen=expected["seen"])
    for what, value in expected.items():
        if not torch.equal(getattr(frame, what)[row], value):
            return f"{what!r} of {stream} is wrong"
    return ""


def why_different(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], stream: str) -> str:
    for what, (found, expected) in pairs.items():
        difference = (found.float() - expected.float()).abs().median() / expected.float().abs().median()
        log.debug("the %s of %s: %.4f", what, stream, difference)
        if not difference <= MAX_DIFFERENCE:
            return f"the {what} of {stream} differ by {difference:.2f} of their size from those that it has alone"
    return ""


def choose_for(sampling, row: int, scores: torch.Tensor) -> torch.Tensor:
    settings = SimpleNamespace(**{name: getattr(sampling, name)[row] for name in SAMPLING})
    return choose(scores, settings, sampling.noise[row])
