"""Is the megakernel right on this GPU, with the weights that were loaded? A few frames, each time a model is loaded.

The megakernel generates FRAMES frames after a prompt of random codes. Compared are:

    phases        of the first and the last frame: each phase of the last layer, and the first layer's keys and
                  values, with megakernel_reference.py, which gets the kernel's own input of that phase and rounds
                  where the kernel rounds. They differ only where another order of summation rounds to the other side.
    bookkeeping   the next embedding, which is a sum: it must be equal
    choices       with the reference, given the kernel's own logits and noise
    logits        their error against float32, relative to that of the reference that rounds: all layers together

A frame of several rows is compared with what the graphs of one row compute for each of them. The host reads all
figures at once, in the end.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudagraph_talker import Sampling, apply_rules, round_up, sample
from qwen3_tts_cuda_graphs.fast import megakernel_reference as reference
from qwen3_tts_cuda_graphs.fast.frame_graphs import MegakernelGraphs
from qwen3_tts_cuda_graphs.fast.kernels import one_line
from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import exact as unrounded
from qwen3_tts_cuda_graphs.fast.layer_kernels_reference import norm, to_bfloat16
from qwen3_tts_cuda_graphs.fast.megakernel import FusedStep
from qwen3_tts_cuda_graphs.fast.rows import SharedRows, draw_seeded, view_of

log = logging.getLogger("qwen3_tts_cuda_graphs")

PROMPT = 255  # positions: two frames attend to few, two to more, with more than one for every warp
FRAMES = 4
TALKER_CHOICES = 16

# Limits, between what a correct kernel gives (50 runs of each size with random weights, results/self_test_*.json: all
# limits are 13 or more standard deviations away) and what wrong ones give (tests/test_self_test.py).
MAX_DIFFERENT = 0.06  # of the values of a phase. Right: below 0.01; one rounding left out: above 0.15
NO_DIFFERENCE = 1e-6
MAX_ERROR = 1.5  # of the logits. Right: 0.93 to 1.08
MAX_ERROR_OF_ONE = 3.0  # of the logits of a single code. Right: 0.81 to 1.15; a layer left out of the first pass: 57
MAX_OTHER_CHOICES = 0.05  # Right: 0; top-k off by one: 0.2 and more

# Choices are flat among few candidates: temperature 100, so that one candidate too many is often chosen.
# Top-p keeps 2.5 of 20: no candidate is so near the limit that rounding decides.
SETTINGS = [(True, 100.0, 2, 1.0), (True, 100.0, 20, 0.125), (True, 100.0, 3, 1.0), (False, 1.0, 1, 1.0)]

# Of several rows: the prompts' lengths, where the cache is long enough, and how far the values may be apart.
PROMPT_LENGTHS = (7, 300, 150, 43)
MAX_ROW_DIFFERENCE = 0.2  # of their median


@torch.no_grad()
def run_test(
    graphs: MegakernelGraphs, prompt: int = PROMPT, frames: int = FRAMES, choices: int = TALKER_CHOICES
) -> tuple[str, dict[str, tuple[float, float]]]:
    """What is wrong with the graphs of one row, empty if nothing is; and the measured figures, with their limits."""
    with restored(graphs.rows):
        try:
            test = SelfTest(graphs, prompt, frames)
            test.run(choices)
            reason, figures = test.verdict()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the kernel has stopped, or the driver refuses the launch
            reason, figures = one_line(error) or type(error).__name__, {}
    log.debug("self-test: %s", figures)
    return reason, figures


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


def launch(step: FusedStep) -> None:
    """Launch a step and wait for it: a kernel that has stopped would take 2 s in every further launch."""
    step()
    if step.noise.is_cuda:
        torch.cuda.synchronize(step.noise.device)
    if reason := step.why_failed():
        raise RuntimeError(reason)


class SelfTest:
    def __init__(self, graphs: MegakernelGraphs, prompt: int, frames: int) -> None:
        rows, predictor, talker = graphs.rows, graphs.predictor, graphs.talker
        self.rows, self.predictor, self.talker = rows, predictor, talker
        self.predict, self.step = graphs.waiting_launches
        self.prompt = max(1, min(prompt, rows.text.shape[1] - frames))
        self.frames = frames
        self.figures: dict[str, tuple[Tensor, float, str]] = {}  # each with its limit, and what to say beyond it
        self.device = rows.token.device
        self.random = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every GPU
        self.generator = torch.Generator(self.device).manual_seed(0)

    def run(self, choices: int) -> None:
        rows, talker, predictor = self.rows, self.talker, self.predictor
        self.begin()
        cache = rows.whole_cache[0, ..., : round_up(self.prompt + self.frames), :].float()
        results = [self.run_frame(frame) for frame in range(self.frames)]
        inputs, codes, code_logits, wrong_codes, embeddings, logits = map(torch.stack, zip(*results))
        self.check_choices("codes", wrong_codes)
        self.check_first_codes(choices)

        exact, own = self.logits(talker.model, [talker.head] * self.frames, cache, embeddings, self.prompt)
        self.check_logits("first codes", logits, own, exact)
        # Of the predictor's frames one is enough: they do not depend on each other.
        cache = torch.zeros(2, len(rows.code_keys), *rows.code_keys[0].shape[1:], device=self.device)
        embedded = [F.embedding(*pair) for pair in zip(codes[-1, :-1, None], self.predict.inputs)]
        inputs = torch.cat([inputs[-1:], *embedded])  # (16, H')
        exact, own = self.logits(predictor.model, predictor.heads, cache, inputs, 0)
        self.check_logits("codes", code_logits[-1], own, exact)
        of_two_tokens = code_logits[-1, :1], own[:1], exact[:1]
        self.check_logits("first predicted code", *of_two_tokens, MAX_ERROR_OF_ONE)

    def begin(self) -> None:
        """A prompt of random codes, read by the separate kernels."""
        rows, embed = self.rows, self.predictor.embed_token
        codes = torch.randint(len(embed.weight), (self.prompt,), generator=self.random).to(self.device)
        rows.prompt_length.fill_(self.prompt)
        rows.repetition_penalty.fill_(1.5)
        rows.advance.fill_(True)
        torch._foreach_zero_([rows.suppressed, rows.min_tokens, rows.end_token])
        self.talker.prefill(F.pad(embed(codes), (0, 0, 0, round_up(self.prompt) - self.prompt))[None])
        rows.token.copy_(codes[:1, None])
        torch._foreach_zero_([rows.seen, rows.ended])
        text = torch.randn(self.frames, rows.text.shape[-1], generator=self.random)
        rows.text[0, : self.frames] = text.to(rows.text)

    def launch(self, step: FusedStep, sampling: Sampling, number: int) -> None:
        sampling.set(*SETTINGS[number % len(SETTINGS)])
        draw_seeded(step.noise, self.generator)
        launch(step)

    def run_frame(self, frame: int) -> tuple[Tensor, ...]:
        """One frame of the megakernel: its inputs, and copies of all that it has computed."""
        rows, predictor, talker = self.rows, self.predictor, self.talker
        is_compared = frame in (0, self.frames - 1)
        self.launch(self.predict, rows.code_sampling, frame)
        first_input, codes, logits = (
            self.predict.first_input[0, 0].clone(),
            rows.codes[0, frame],
            self.predict.logits()[0],
        )
        settings = view_of(rows.code_sampling, [0] * len(logits))
        wrong_codes = codes[1:] != sample(logits, settings, rows.code_noise[0])[:, 0]
        if is_compared:
            inputs = [first_input, F.embedding(codes[0], self.predict.inputs[0])]
            layers = zip(predictor.model.layers, rows.code_keys, rows.code_values)
            self.check_phases("the predictor's", self.predict, predictor.model, [*layers], inputs, 0, predictor.heads)
        embedded = (F.embedding(*pair).float() for pair in zip(codes, self.predict.embeddings))
        wrong = rows.embedding[0, 0] != sum(embedded).bfloat16() + rows.text[0, frame]
        self.keep("embeddings", wrong, NO_DIFFERENCE, "the sum of the codes' embeddings and the text is wrong")
        if frame == 0:  # so small that epsilon matters
            rows.embedding.mul_(1e-3 / rows.embedding.float().square().mean().sqrt())
        embedding = rows.embedding[0, 0].clone()
        self.launch(self.step, rows.sampling, frame)
        if is_compared:
            layers = zip(talker.model.layers, rows.keys, rows.values)
            position = self.prompt + frame
            self.check_phases("the talker's", self.step, talker.model, [*layers], [embedding], position, [talker.head])
        return first_input, codes, logits, wrong_codes, embedding, self.step.logits()[0, 0]

    def check_phases(self, whose: str, step: FusedStep, model: Any, layers: list, inputs: list, first: int, heads: Any):
        """Each phase of the kernel from its own input of that phase: of the first layer at the position `first` and
        those that follow, which have these `inputs`; of the last layer at the last position."""
        config, epsilon = model.config, model.config.rms_norm_eps
        sent = {name: values[None] for name, values in step.exchanged().items()}

        def compare(what: str, expected: Tensor, found: Tensor) -> None:
            sentence = "{:.1%} of " + f"{whose} {what} differ from the reference, " + "{:.0%} may"
            self.keep(f"{whose} {what}", expected != found, MAX_DIFFERENT, sentence)

        def attention(name: str, layer: Any, keys: Tensor, values: Tensor, qkv: Tensor, position: int) -> Tensor:
            found = [tensor[0, :, : position + 1].float() for tensor in (keys, values)]
            own = [tensor.clone() for tensor in found]
            out = reference.attend(
                config, layer.self_attn, qkv, own, position, *reference.angles(model, position), to_bfloat16
            )
            compare(f"{name} keys", own[0][:, position], found[0][:, position])
            compare(f"{name} values", own[1][:, position], found[1][:, position])
            return out

        for position, x in enumerate(inputs, first):
            qkv = reference.project_qkv(layers[0][0], x.float()[None], epsilon, to_bfloat16)
            attention("first", *layers[0], qkv, position)
        last = first + len(heads) - (step is self.step)
        compare("attention", attention("last", *layers[-1], sent["qkv"], last), sent["attention"])
        x, layer = sent["post_attention"], layers[-1][0]
        compare("MLP", reference.gate_and_up(layer, x, epsilon, to_bfloat16), sent["inner"])
        hidden = reference.add_projection(x, sent["inner"], layer.mlp.down_proj, to_bfloat16)
        compare("residual stream", hidden, sent["hidden"])
        hidden = norm(sent["hidden"], model.norm.weight, epsilon, to_bfloat16)
        compare("head", reference.linear(hidden, heads[-1], to_bfloat16), step.logits()[0, -1:])

    def check_first_codes(self, trials: int) -> None:
        """The talker's last step again, with other rules for its choice."""
        rows = self.rows
        logits = self.step.logits()[0]  # (1, V)
        wrong = []
        for trial in range(trials):
            rows.frame.fill_(self.frames - 1)
            rows.seen.random_(2, generator=self.generator)
            rows.suppressed.copy_((logits > 0) & (trial // 4 % 2 == 1))
            rows.end_token.copy_(logits.masked_fill(rows.suppressed, float("-inf")).argmax())
            is_too_early = trial % 3 == 0
            rows.min_tokens.fill_(2 * self.frames * is_too_early)
            forbidden = rows.suppressed.scatter(1, rows.end_token, is_too_early)
            scores = apply_rules(logits, rows.seen, rows.repetition_penalty, forbidden)
            self.launch(self.step, rows.sampling, trial)
            wrong.append(rows.token != sample(scores, rows.sampling, rows.noise[:, 0]))
        self.check_choices("first codes", torch.stack(wrong))

    def logits(self, model: Any, heads: Sequence, cache: Tensor, inputs: Tensor, position: int) -> list[Tensor]:
        """The logits of the last tokens, which are those with a head: in float32, and rounded as the model's own."""
        logits = []
        for rounded in (unrounded, to_bfloat16):
            hidden = reference.run_layers(model, [*zip(*cache)], inputs.float(), position, rounded)[-len(heads) :]
            logits.append(torch.stack([reference.linear(row, head, rounded) for head, row in zip(heads, hidden)]))
        return logits

    def check_choices(self, what: str, wrong: Tensor) -> None:
        sentence = "{:.0%} of the " + what + " it chose are not those that the reference chooses, {:.0%} may be others"
        self.keep(f"{what} chosen otherwise", wrong, MAX_OTHER_CHOICES, sentence)

    def check_logits(self, what: str, found: Tensor, own: Tensor, exact: Tensor, limit: float = MAX_ERROR) -> None:
        sentence = f"the logits of the {what} are " + "{:.2f} times as far from float32 as the model's own, {} may be"
        ratio = (found - exact).abs().median() / (own - exact).abs().median()
        self.keep(f"error of the {what}", ratio, limit, sentence)

    def keep(self, what: str, figures: Tensor, limit: float, sentence: str) -> None:
        """Keep the mean of these figures, or the one that was kept before, if it is larger; a NaN stays."""
        figure = figures.float().mean()
        if what in self.figures:
            figure = torch.maximum(figure, self.figures[what][0])
        self.figures[what] = figure, limit, sentence

    def verdict(self) -> tuple[str, dict[str, tuple[float, float]]]:
        """What is wrong, empty if nothing is; and all figures with their limits."""
        figures = torch.stack([figure for figure, _, _ in self.figures.values()]).tolist()
        measured = {what: (figure, self.figures[what][1]) for what, figure in zip(self.figures, figures)}
        wrong = (what for what, (figure, limit) in measured.items() if not figure <= limit)
        return next((self.figures[what][2].format(*measured[what]) for what in wrong), ""), measured


# ---- Several rows


@torch.no_grad()
def why_rows_wrong(graphs: MegakernelGraphs, alone: MegakernelGraphs) -> str:
    """What is wrong with the graphs of several rows; empty if nothing is.

    A frame of rows in random states is compared with what the graphs of one row, which have had a test of their own,
    compute for each of them. The two sum in another order, so a code that is nearly as good may be chosen instead.
    Therefore the talker reads the same embeddings in both. `alone` has the first of the same rows.
    """
    rows = graphs.rows
    predict, step = graphs.waiting_launches
    count = len(rows.token)
    index = torch.arange(count, device=rows.token.device)
    with restored(rows):
        positions = fill_with_random_states(rows)
        state = [*rows.state(), rows.noise, rows.code_noise, rows.text[:, :count]]
        before = [tensor.clone() for tensor in state]
        launch(predict)
        projected, embeddings = predict.first_input.clone(), rows.embedding.clone()
        launch(step)
        new = {name: getattr(rows, name).clone() for name in ("hidden", "token", "frame", "seen", "ended")}
        codes, code_logits, logits = rows.codes[index, index], predict.logits(), step.logits()[:, 0]
        cached = rows.whole_cache[index, ..., torch.tensor(positions, device=index.device), :]  # (B, 2, layers, KV, D)
        alone_results = []
        for row, position in enumerate(positions):
            torch._foreach_copy_([tensor[0] for tensor in state], [tensor[row] for tensor in before])
            rows.whole_cache[0, ..., :position, :] = rows.whole_cache[row, ..., :position, :]
            alone_results.append(run_alone(alone, row, position, projected[row], embeddings[row]))
        alone_codes, alone_code_logits, alone_logits, alone_cached, hidden = map(torch.stack, zip(*alone_results))
        torch._foreach_copy_(state, before)  # as before the frame

        advance = rows.advance[:, None]
        same = (codes == alone_codes)[:, :-1].cumprod(1).bool()  # all codes before
        summed = sum(F.embedding(*pair).float() for pair in zip(codes.T, predict.embeddings))
        settings = view_of(rows.code_sampling, index.repeat_interleave(code_logits.shape[1]))
        chosen = sample(code_logits.flatten(0, 1), settings, rows.code_noise.flatten(0, 1)).view_as(codes[:, 1:])
        scores = apply_rules(logits, rows.seen, rows.repetition_penalty, rows.suppressed)
        token = sample(scores, rows.sampling, rows.noise[:, 0])
        after = dict(token=token, frame=rows.frame + 1, seen=rows.seen.scatter(1, token, True))
        figures = {
            "logits of the codes": torch.where(same, difference(code_logits, alone_code_logits, 2), 0),
            "codes": codes[:, 1:] != chosen,
            "embedding": difference(embeddings, summed + rows.text[index, index], 1),
            "cached keys and values": difference(cached, alone_cached, 3),
            "logits of the first code": difference(logits, alone_logits, 1),
            "hidden state": difference(new["hidden"], hidden, 1)[:, None] * advance,
        }
        for name, found in new.items():
            expected, old = after.get(name, found), getattr(rows, name)
            expected = torch.where(advance, expected.view(count, -1), old.view(count, -1))
            figures[name] = found.view(count, -1) != expected
        largest = torch.stack([figure.float().view(count, -1).amax(1) for figure in figures.values()]).tolist()
    log.debug("self-test of %d rows: %s", count, dict(zip(figures, largest)))
    for what, of_rows in zip(figures, largest):
        for row, figure in enumerate(of_rows):
            if not figure <= MAX_ROW_DIFFERENCE:
                return f"the {what} of row {row + 1} of {count} differ by {figure:.2f} from what it has alone"
    return ""


def difference(found: Tensor, expected: Tensor, dim: int) -> Tensor:
    """The median difference along the dimensions from `dim` on, relative to the values. (B, ...) -> (B, ...)"""
    found, expected = (tensor.float().flatten(dim) for tensor in (found, expected))
    return (found - expected).abs().median(-1).values / expected.abs().median(-1).values


def fill_with_random_states(rows: SharedRows) -> list[int]:
    """Other settings for each row. The third of four does not advance. Returns the next position of each."""
    count, device = len(rows.token), rows.token.device
    generator = torch.Generator(device).manual_seed(0)
    row = torch.arange(count, device=device)[:, None]
    room = rows.text.shape[1] - count
    prompts = [min(PROMPT_LENGTHS[i % 4], room) for i in range(count)]

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values, device=device)[row % 4]

    for tensor in (rows.hidden, rows.text[:, :count], rows.whole_cache[..., : max(prompts) + count, :]):
        tensor.normal_(generator=generator)
    rows.token.random_(rows.code_sampling.vocab_size, generator=generator)
    for tensor in (rows.seen, rows.suppressed):
        tensor.random_(2, generator=generator)
    for tensor in (rows.noise, rows.code_noise):
        tensor.exponential_(generator=generator)
    rows.ended.zero_()
    rows.advance.copy_((row % 4 != 2)[:, 0])
    rows.frame.copy_(row)
    rows.prompt_length.copy_(torch.tensor(prompts)[:, None])
    rows.repetition_penalty.copy_(1.5 - 0.05 * row)
    for sampling in (rows.sampling, rows.code_sampling):
        sampling.temperature.copy_(100.0 - row)  # so hot that the noise decides
        sampling.topk_rank.copy_(sampling.vocab_size - one_of(400, 20, 100, 5))
        sampling.one_minus_top_p.copy_(one_of(0.0, 0.475, 0.0, 0.0))  # leaves 9.5 of 20 out
        sampling.greedy.copy_(row % 4 == 3)
    return [prompt + i for i, prompt in enumerate(prompts)]


def run_alone(alone: MegakernelGraphs, frame: int, position: int, projected: Tensor, embedding: Tensor) -> tuple:
    """The next frame of row 0 by the graphs of one row. Its talker reads this embedding."""
    rows = alone.rows
    predict, step = alone.waiting_launches
    predict.first_input.copy_(projected)
    predict.launch()  # without the projection
    rows.embedding[0] = embedding
    launch(step)
    cached = rows.whole_cache[0, ..., position, :].clone()
    return rows.codes[0, frame].clone(), predict.logits()[0], step.logits()[0, 0], cached, rows.hidden[0].clone()
