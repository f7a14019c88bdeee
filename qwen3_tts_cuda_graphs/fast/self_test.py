"""Is the megakernel right on this GPU, with the weights that were loaded? A few frames, each time a model is loaded.

The megakernel generates FRAMES frames after a prompt of random codes. Compared are:

    phases        of the first and the last frame: each phase of the last layer, and the first layer's keys and
                  values, with megakernel_reference.py, which gets the kernel's own input of that phase and rounds
                  where the kernel rounds. They differ only where another order of summation rounds to the other side.
    logits        their error against float32, relative to the error of the separate kernels with the same tokens:
                  all layers together
    choices       with the reference, given the kernel's own logits and noise
    bookkeeping   the next embedding, which is a sum: it must be equal
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudagraph_talker import RowCache, Sampling, apply_rules, round_up, sample
from qwen3_tts_cuda_graphs.fast.frames import MegakernelFrame
from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import norm
from qwen3_tts_cuda_graphs.fast.megakernel import FusedStep
from qwen3_tts_cuda_graphs.fast.megakernel_reference import (
    add_projection,
    angles,
    attend,
    gate_and_up,
    linear,
    project_qkv,
    run_layers,
    to_bfloat16,
)
from qwen3_tts_cuda_graphs.fast.rows import SharedRows, copy_row, draw_seeded, view_of

log = logging.getLogger("qwen3_tts_cuda_graphs")

PROMPT = 255  # positions: two frames attend to few, two to more, with more than one for every warp
FRAMES = 4
TALKER_CHOICES = 16

# Limits, between what a correct kernel gives (50 runs of each size with random weights, results/self_test_*.json: all
# limits are 13 or more standard deviations away) and what wrong ones give (tests/test_self_test.py).
MAX_DIFFERENT = 0.06  # of the values of a phase. Right: below 0.01; one rounding left out: above 0.15
MAX_ERROR = 1.5  # of the logits. Right: 0.93 to 1.08
MAX_ERROR_OF_ONE = 3.0  # of the logits of a single code. Right: 0.81 to 1.15; a layer left out of the first pass: 57
MAX_OTHER_CHOICES = 0.05  # Right: 0; top-k off by one: 0.2 and more

# Choices are flat among few candidates: temperature 100, so that one candidate too many is often chosen.
# Top-p keeps 2.5 of 20: no candidate is so near the limit that rounding decides.
SETTINGS = [(True, 100.0, 2, 1.0), (True, 100.0, 20, 0.125), (True, 100.0, 3, 1.0), (False, 1.0, 1, 1.0)]


# Of several rows: the prompts' lengths, where the cache is long enough, and how far the values may be apart.
PROMPT_LENGTHS = (7, 300, 150, 43)
MAX_ROW_DIFFERENCE = 0.2  # of their median


class Wrong(Exception):
    """What the megakernel has computed wrongly."""


@torch.no_grad()
def run_test(
    frame: MegakernelFrame, prompt: int = PROMPT, frames: int = FRAMES, choices: int = TALKER_CHOICES
) -> tuple[str, dict[str, tuple[float, float]]]:
    """What is wrong with a frame of one row, empty if nothing is; and the figures that were measured before it was
    found, each with its limit."""
    reason = ""
    with restored(frame.rows):
        test = SelfTest(frame, prompt, frames)
        try:
            test.run(choices)
        except torch.OutOfMemoryError:
            raise
        except (Wrong, RuntimeError) as error:  # RuntimeError: the driver refuses the launch
            reason = " ".join(str(error).split())[:200] or type(error).__name__
    log.debug("self-test: %s", test.figures)
    return reason, test.figures


@contextmanager
def restored(rows: SharedRows) -> Iterator[None]:
    """Afterwards the rows are as they were before, but for their text, codes and cache, which are empty.

    Capturing runs each step once: with the test's `prompt_length` and `frame` it would read and write beyond its
    tensors.
    """
    tensors = [*rows.state(), rows.advance, rows.noise, rows.code_noise, rows.embedding]
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        torch._foreach_copy_(tensors, copies)
        torch._foreach_zero_([rows.text, rows.codes, *rows.cache(), *rows.code_keys, *rows.code_values])


class SelfTest:
    def __init__(self, frame: MegakernelFrame, prompt: int, frames: int) -> None:
        self.rows = frame.rows
        self.talker = frame.talker
        self.predictor = frame.predictor
        self.predictor_step, self.talker_step = frame.launches
        self.prompt = max(1, min(prompt, self.rows.text.shape[1] - frames))
        self.frames = frames
        self.figures = {}  # what was compared -> the figure and its limit
        self.device = self.rows.token.device
        self.random = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every GPU
        self.generator = torch.Generator(self.device).manual_seed(0)

    def run(self, choices: int) -> None:
        self.begin()
        self.caches = self.float_caches(self.rows.keys, self.rows.values)
        frames = [self.run_frame(frame) for frame in range(self.frames)]
        self.check_choices("codes", [frame.codes_as_chosen for frame in frames])
        self.check_choices("first codes", [self.talker_choice(trial) for trial in range(choices)])
        self.check_talker(frames)
        self.check_predictor(frames[-1])

    def begin(self) -> None:
        """A prompt of random codes, read by the separate kernels."""
        rows, predictor = self.rows, self.predictor
        codes = self.random_integers(self.prompt, len(predictor.embed_token.weight))
        prompt = torch.zeros(1, round_up(self.prompt), rows.text.shape[-1], dtype=rows.text.dtype, device=self.device)
        prompt[0, : self.prompt] = predictor.embed_token(codes)
        rows.prompt_length.fill_(self.prompt)
        rows.repetition_penalty.fill_(1.5)
        rows.suppressed.zero_()
        rows.min_tokens.zero_()
        rows.end_token.zero_()
        rows.advance.fill_(True)
        self.talker.prefill(prompt)
        rows.token.copy_(codes[:1, None])
        rows.seen.zero_()
        rows.ended.zero_()
        text = torch.randn(self.frames, rows.text.shape[-1], generator=self.random)
        rows.text[0, : self.frames] = text.to(rows.text)

    def positions(self, first: int, count: int) -> Tensor:
        """(1, count)"""
        return torch.arange(first, first + count, device=self.device)[None]

    def random_integers(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.random).to(self.device)

    def float_caches(self, keys: list[Tensor], values: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Copies of the layers' keys and values in float32, as far as they are used. (G, T, D) each"""
        length = min(keys[0].shape[2], round_up(self.prompt + self.frames))
        return [(key[0, :, :length].float(), value[0, :, :length].float()) for key, value in zip(keys, values)]

    def launch(self, step: FusedStep, sampling: Any, setting: int) -> None:
        sampling.set(*SETTINGS[setting % len(SETTINGS)])
        draw_seeded(step.noise, self.generator)
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if reason := step.why_failed():
            raise Wrong(reason)

    def run_frame(self, frame: int) -> SimpleNamespace:
        """One frame of the megakernel: its inputs, and copies of all that it has computed."""
        rows, predictor = self.rows, self.predictor
        self.launch(self.predictor_step, rows.code_sampling, frame)
        codes = rows.codes[0, frame].clone()
        result = SimpleNamespace(
            codes=codes,
            first_input=self.predictor_step.first_input.clone(),
            code_logits=self.predictor_step.logits()[0].clone(),
        )
        is_compared = frame in (0, self.frames - 1)
        if is_compared:
            inputs = [result.first_input.flatten(), self.predictor_step.inputs[0][codes[0]]]
            caches = self.float_caches(rows.code_keys, rows.code_values)
            last = len(predictor.heads)
            self.check_phases(
                "the predictor's", predictor.model, self.predictor_step, caches, inputs, 0, last, predictor.heads[-1]
            )
        settings = expanded(rows.code_sampling, len(predictor.heads))
        expected = sample(result.code_logits, settings, rows.code_noise[0])[:, 0]
        result.codes_as_chosen = codes[1:] == expected
        self.check_bookkeeping(frame, result)

        if frame == 0:  # so small that epsilon matters
            rows.embedding.mul_(1e-3 / rows.embedding.float().square().mean().sqrt())
        result.embedding = rows.embedding.clone()
        self.launch(self.talker_step, rows.sampling, frame)
        result.logits = self.talker_step.logits()[0].clone()
        if is_compared:
            talker = self.talker
            position = self.prompt + frame
            caches = self.float_caches(rows.keys, rows.values)
            inputs = [rows.embedding.flatten()]
            self.check_phases(
                "the talker's", talker.model, self.talker_step, caches, inputs, position, position, talker.head
            )
        return result

    def check_phases(
        self,
        whose: str,
        model: Any,
        step: FusedStep,
        caches: list[tuple[Tensor, Tensor]],
        inputs: list[Tensor],
        first: int,
        last: int,
        head: Any,
    ) -> None:
        """Each phase of the kernel from its own input of that phase: of the first layer at the position `first` and
        those that follow, which have these `inputs`; of the last layer at the position `last`."""
        epsilon = model.config.rms_norm_eps
        sent = {name: values[None] for name, values in step.exchanged().items()}

        keys, values = caches[0]
        for position, x in enumerate(inputs, first):
            cos, sin = angles(model, position)
            qkv = project_qkv(model.layers[0], x.float()[None], epsilon, to_bfloat16)
            cache = keys.clone(), values.clone()
            attend(model.config, model.layers[0].self_attn, qkv, cache, position, cos, sin, to_bfloat16)
            self.compare(f"{whose} first keys", cache[0][:, position], keys[:, position])
            self.compare(f"{whose} first values", cache[1][:, position], values[:, position])

        layer = model.layers[-1]
        keys, values = caches[-1]
        cache = keys.clone(), values.clone()
        cos, sin = angles(model, last)
        heads = attend(model.config, layer.self_attn, sent["qkv"], cache, last, cos, sin, to_bfloat16)
        self.compare(f"{whose} last keys", cache[0][:, last], keys[:, last])
        self.compare(f"{whose} last values", cache[1][:, last], values[:, last])
        self.compare(f"{whose} attention", heads, sent["attention"])
        x = sent["post_attention"]
        self.compare(f"{whose} MLP", gate_and_up(layer, x, epsilon, to_bfloat16), sent["inner"])
        hidden = add_projection(x, sent["inner"], layer.mlp.down_proj, to_bfloat16)
        self.compare(f"{whose} residual stream", hidden, sent["hidden"])
        hidden = norm(sent["hidden"], model.norm.weight, epsilon, to_bfloat16)
        self.compare(f"{whose} head", linear(hidden, head, to_bfloat16), step.logits()[0, -1:])

    def keep(self, what: str, figure: float, limit: float) -> None:
        """The largest figure of each kind."""
        largest, _ = self.figures.get(what, (0.0, limit))
        self.figures[what] = max(figure, largest), limit

    def compare(self, what: str, expected: Tensor, found: Tensor) -> None:
        different = (expected != found).float().mean().item()
        self.keep(what, different, MAX_DIFFERENT)
        if not different <= MAX_DIFFERENT:
            raise Wrong(f"{different:.1%} of {what} differ from the reference, {MAX_DIFFERENT:.0%} may")

    def talker_choice(self, trial: int) -> Tensor:
        """The talker's last step again, with other rules for its choice: whether it is the right one."""
        rows = self.rows
        logits = self.talker_step.logits()[0].clone()  # (1, V)
        rows.frame.fill_(self.frames - 1)
        rows.seen.copy_(torch.rand(rows.seen.shape, generator=self.random).to(self.device) < 0.5)
        rows.suppressed.copy_(logits > 0 if trial // 4 % 2 else torch.zeros_like(rows.suppressed))
        best = logits[0].masked_fill(rows.suppressed[0], float("-inf")).argmax()
        is_too_early = trial % 3 == 0
        rows.end_token.copy_(best)
        rows.min_tokens.fill_(2 * self.frames if is_too_early else 0)
        seen = rows.seen.clone()
        suppressed = rows.suppressed.clone()
        suppressed[0, best] |= is_too_early
        self.launch(self.talker_step, rows.sampling, trial)
        scores = apply_rules(self.talker_step.logits()[0], seen, rows.repetition_penalty, suppressed)
        return rows.token[0] == sample(scores, rows.sampling, rows.noise[:, 0])[0]

    def check_choices(self, what: str, chosen_rightly: list[Tensor]) -> None:
        wrong = 1 - torch.cat(chosen_rightly).float().mean().item()
        self.keep(f"{what} chosen otherwise", wrong, MAX_OTHER_CHOICES)
        if wrong > MAX_OTHER_CHOICES:
            raise Wrong(
                f"{wrong:.0%} of the {what} it chose are not those that the reference chooses, "
                f"{MAX_OTHER_CHOICES:.0%} may be others"
            )

    def check_bookkeeping(self, frame: int, result: SimpleNamespace) -> None:
        summed = sum(weight[code].float() for weight, code in zip(self.predictor_step.embeddings, result.codes))
        embedding = summed.bfloat16() + self.rows.text[0, frame]
        if not torch.equal(self.rows.embedding.flatten(), embedding):
            raise Wrong("the sum of the codes' embeddings and the text is wrong")

    def check_talker(self, frames: list[SimpleNamespace]) -> None:
        rows, talker = self.rows, self.talker
        inputs = torch.cat([frame.embedding for frame in frames], dim=1)  # (1, L, H)
        float_hidden = run_layers(talker.model, self.caches, inputs[0].float(), self.prompt)

        hiddens = []
        for frame in range(len(frames)):
            positions = self.positions(self.prompt + frame, 1)
            length = rows.keys[0].shape[2]
            visible = torch.arange(length, device=self.device) <= positions[..., None]
            cache = RowCache(rows.keys, rows.values, positions, length)
            hiddens.append(talker.forward(inputs[:, frame : frame + 1], positions, visible, cache)[0])
        separate = talker.head(torch.cat(hiddens)).float()
        fused = torch.cat([frame.logits for frame in frames])
        self.check_logits("first codes", fused, separate, linear(float_hidden, talker.head))

    def check_predictor(self, frame: SimpleNamespace) -> None:
        """One frame is enough: they do not depend on each other."""
        rows, predictor = self.rows, self.predictor
        model = predictor.model
        heads = list(predictor.heads)
        last = len(heads)
        inputs = [frame.first_input.flatten()]
        inputs += [table[code] for table, code in zip(self.predictor_step.inputs[:last], frame.codes)]
        inputs = torch.stack(inputs)  # (16, H')
        float_hidden = run_layers(model, self.float_caches(rows.code_keys, rows.code_values), inputs.float(), 0)
        float_logits = [linear(row, head) for head, row in zip(heads, float_hidden[1:])]

        positions = self.positions(0, last + 1)
        hidden = model(
            inputs_embeds=inputs[None],
            attention_mask={"full_attention": predictor.masks[:, :, : last + 1]},
            position_ids=positions,
            cache_position=positions[0],
            past_key_values=RowCache(rows.code_keys, rows.code_values, positions, len(predictor.positions)),
        ).last_hidden_state[0]
        separate = [head(row).float() for head, row in zip(heads, hidden[1:])]
        logits = frame.code_logits, torch.stack(separate), torch.stack(float_logits)
        self.check_logits("codes", *logits)
        first = (of_all[:1] for of_all in logits)
        self.check_logits("first predicted code", *first, MAX_ERROR_OF_ONE)  # of the pass with two tokens

    def check_logits(
        self, what: str, fused: Tensor, separate: Tensor, exact_logits: Tensor, limit: float = MAX_ERROR
    ) -> None:
        ratio = ((fused - exact_logits).abs().median() / (separate - exact_logits).abs().median()).item()
        self.keep(f"error of the {what}", ratio, limit)
        if not ratio <= limit:
            raise Wrong(
                f"the logits of the {what} are {ratio:.2f} times as far from float32 as those of separate kernels, "
                f"{limit} may be"
            )


# ---- Several rows


@torch.no_grad()
def why_rows_wrong(frame: MegakernelFrame, alone: MegakernelFrame) -> str:
    """What is wrong with a frame of several rows; empty if nothing is.

    A frame of rows in random states is compared with what the frame of one row, which has had a test of its own,
    computes for each of them. The two sum in another order, so a code that is nearly as good may be chosen instead.
    Therefore the talker reads the same embeddings in both. `alone` has the first of the same rows.
    """
    rows = frame.rows
    with restored(rows):
        fill_with_random_states(rows)
        frame.launches[0]()
        embeddings = rows.embedding.clone()
        expected = []
        for row in range(len(rows.token)):
            positions = fill_with_random_states(rows)
            frame.launches[0].project_hidden()  # of all rows at once: of one it may round otherwise
            projected = frame.launches[0].first_input[row].clone()
            copy_row(rows[row], rows[0], positions[row])
            for noise in (rows.noise, rows.code_noise):
                noise[0] = noise[row].clone()
            expected.append(run_alone(alone, row, positions[row], projected, embeddings[row]))
        fill_with_random_states(rows)
        before = {name: getattr(rows, name).clone() for name in ("hidden", "token", "frame", "seen", "ended")}
        for launch in frame.launches:
            launch()
        if rows.token.is_cuda:
            torch.cuda.synchronize(rows.token.device)
        reasons = [launch.why_failed() for launch in (*alone.launches, *frame.launches)]
        reasons += [why_row_wrong(frame, row, before, expected[row]) for row in range(len(rows.token))]
        return next(filter(None, reasons), "")


def fill_with_random_states(rows: SharedRows) -> list[int]:
    """Other settings for each row. The third of four does not advance. Returns the next position of each."""
    generator = torch.Generator(rows.token.device).manual_seed(0)
    codes = rows.code_sampling.vocab_size
    for tensor in (rows.hidden, rows.text):
        tensor.normal_(generator=generator)
    rows.token.random_(codes, generator=generator)
    for tensor in (rows.seen, rows.suppressed):
        tensor.random_(2, generator=generator)
    for tensor in (rows.noise, rows.code_noise):
        tensor.exponential_(generator=generator)
    rows.ended.zero_()
    positions = []
    for row in range(len(rows.token)):
        position = min(PROMPT_LENGTHS[row % 4], rows.text.shape[1] - len(rows.token)) + row
        positions.append(position)
        rows.advance[row] = row % 4 != 2
        rows.frame[row] = row
        rows.prompt_length[row] = position - row
        rows.repetition_penalty[row] = 1.5 - 0.05 * row
        for tensor in rows[row].cache():
            tensor[:, :position].normal_(generator=generator)
        for sampling in (rows.sampling, rows.code_sampling):
            sampling.temperature[row] = 100.0 - row  # so hot that the noise decides
            sampling.topk_rank[row] = sampling.vocab_size - (400, 20, 100, 5)[row % 4]
            sampling.one_minus_top_p[row] = (0.0, 0.475, 0.0, 0.0)[row % 4]  # leaves 9.5 of 20 out
            sampling.greedy[row] = row % 4 == 3
    return positions


def run_alone(
    alone: MegakernelFrame, frame: int, position: int, projected: Tensor, embedding: Tensor
) -> SimpleNamespace:
    """The next frame of row 0 by the frame of one row. Its talker reads this embedding."""
    rows = alone.rows
    predict, step = alone.launches
    rows.advance.fill_(True)
    predict.first_input.copy_(projected)
    FusedStep.__call__(predict)  # without the projection
    rows.embedding[0] = embedding
    step()
    return SimpleNamespace(
        codes=rows.codes[0, frame].clone(),
        code_logits=predict.logits()[0].clone(),
        logits=step.logits()[0].clone(),
        hidden=rows.hidden[0].clone(),
        position=position,
        cached=[tensor[0, :, position].clone() for tensor in rows.cache()],
    )


def why_row_wrong(frame: MegakernelFrame, row: int, before: dict, alone: SimpleNamespace) -> str:
    rows = frame.rows
    name = f"row {row + 1} of {len(rows.token)}"
    code_logits, logits = (launch.logits()[row] for launch in frame.launches)
    codes = rows.codes[row, row]
    same = int((codes == alone.codes).cumprod(0).sum())  # codes up to the first that differs
    if reason := why_different({"logits of the codes": (code_logits[:same], alone.code_logits[:same])}, name):
        return reason
    settings = expanded(rows[row : row + 1].code_sampling, len(code_logits))
    if not torch.equal(codes[1:], sample(code_logits, settings, rows.code_noise[row])[:, 0]):
        return f"the codes of {name} are not those to choose"

    advances = bool(rows.advance[row])
    embedded = [table[code] for table, code in zip(frame.launches[0].embeddings, codes)]
    pairs = {"embedding": (rows.embedding[row, 0], torch.stack(embedded).float().sum(0) + rows.text[row, row])}
    for i, (tensor, cached) in enumerate(zip(rows.cache(), alone.cached)):
        pairs[f"cache, tensor {i}"] = tensor[row, :, alone.position], cached
    pairs["logits of the first code"] = logits, alone.logits
    if advances:
        pairs["hidden state"] = rows.hidden[row], alone.hidden
    if reason := why_different(pairs, name):
        return reason

    expected = {name: values[row] for name, values in before.items()}
    if advances:
        part = rows[row : row + 1]
        scores = apply_rules(logits, before["seen"][row], part.repetition_penalty, part.suppressed)
        token = sample(scores, part.sampling, part.noise[:, 0])[0]
        expected["seen"][token] = True
        expected = dict(token=token, frame=expected["frame"] + 1, seen=expected["seen"])
    for what, value in expected.items():
        if not torch.equal(getattr(rows, what)[row], value):
            return f"{what!r} of {name} is wrong"
    return ""


def why_different(pairs: dict[str, tuple[Tensor, Tensor]], name: str) -> str:
    for what, (found, expected) in pairs.items():
        difference = (found.float() - expected.float()).abs().median() / expected.float().abs().median()
        log.debug("the %s of %s: %.4f", what, name, difference)
        if not difference <= MAX_ROW_DIFFERENCE:
            return f"the {what} of {name} differ by {difference:.2f} of their size from those that it has alone"
    return ""


def expanded(sampling: Sampling, count: int) -> Sampling:
    """The settings of one row, for `count` choices."""
    return view_of(sampling, [0] * count)
