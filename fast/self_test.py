"""Is the megakernel right on this GPU, with the weights that were loaded? A few frames, each time a model is loaded.

The megakernel generates FRAMES frames after a prompt of random codes. Compared are:

    phases        of the first and the last frame: each phase of the last layer, and the first layer's keys and
                  values, with megakernel_reference.py, which gets the kernel's own input of that phase and rounds
                  where the kernel rounds. They differ only where another order of summation rounds to the other side.
    logits        their error against float32, relative to the error of the separate kernels with the same tokens:
                  all layers together
    choices       with the reference, given the kernel's own logits and noise
    bookkeeping   codes, hidden states and the next embedding, which is a sum: they must be equal
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudagraph_talker import GraphCache, round_up
from fast.megakernel_reference import (
    add_projection,
    angles,
    apply_talker_rules,
    attend,
    choose,
    gate_and_up,
    linear,
    project_qkv,
    rms_norm,
    run_layers,
    to_bfloat16,
)

log = logging.getLogger("qwen3_tts_cudagraphs")

PROMPT = 304  # positions: more than one key for every warp of the split attention
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


class Wrong(Exception):
    """What the megakernel has computed wrongly."""


def why_wrong(talker: Any, predictor: Any, **sizes: int) -> str:
    """What is wrong with the steps of a TalkerGraph and a PredictorGraph; empty if nothing is."""
    reason, figures = run_test(talker, predictor, **sizes)
    log.debug("self-test: %s", figures)
    return reason


@torch.no_grad()
def run_test(
    talker: Any, predictor: Any, prompt: int = PROMPT, frames: int = FRAMES, choices: int = TALKER_CHOICES
) -> tuple[str, dict[str, tuple[float, float]]]:
    """What is wrong, and the figures that were measured before it was found, each with its limit."""
    reason = ""
    with restored(talker, predictor):
        test = SelfTest(talker, predictor, prompt, frames)
        try:
            test.run(choices)
        except torch.OutOfMemoryError:
            raise
        except (Wrong, RuntimeError) as error:  # RuntimeError: the driver refuses the launch
            reason = " ".join(str(error).split())[:200]
    return reason, test.figures


@contextmanager
def restored(*graphs: Any) -> Iterator[None]:
    """Afterwards the graphs' tensors are as they were before, the caches empty.

    Capturing runs each prefill and each step once: with the test's `prompt_length` and `frame` they would read and
    write beyond their tensors.
    """
    owners = [owner for graph in graphs for owner in (graph, graph.sampling)]
    tensors = [value for owner in owners for value in vars(owner).values() if isinstance(value, Tensor)]
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, before in zip(tensors, copies):
            tensor.copy_(before)
        for graph in graphs:
            graph.cache.reset()


def shortened(cache: GraphCache, length: int) -> GraphCache:
    """The same memory; attention sees `length` positions."""
    cache = copy.copy(cache)
    cache.length = length
    return cache


class SelfTest:
    def __init__(self, talker: Any, predictor: Any, prompt: int, frames: int) -> None:
        self.talker = talker
        self.predictor = predictor
        self.prompt = max(1, min(prompt, len(talker.positions) - frames))
        self.frames = frames
        self.figures = {}  # what was compared -> the figure and its limit
        self.device = talker.device
        self.random = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every GPU
        if talker.generator is not None:
            talker.generator.manual_seed(0)

    def run(self, choices: int) -> None:
        self.begin()
        self.caches = self.float_caches(self.talker)
        frames = [self.run_frame(frame) for frame in range(self.frames)]
        self.check_choices("codes", [frame.codes_as_chosen for frame in frames])
        self.check_choices("first codes", [self.talker_choice(trial) for trial in range(choices)])
        self.check_talker(frames)
        self.check_predictor(frames[-1])

    def begin(self) -> None:
        """A prompt of random codes, read by the separate kernels."""
        talker, predictor = self.talker, self.predictor
        codes = self.random_integers(self.prompt, len(predictor.embed_token.weight))
        prompt = predictor.embed_token(codes)[None]  # (1, P, H)
        talker.padding.zero_()
        talker.cache.reset()
        predictor.cache.reset()
        view = shortened(talker.cache, round_up(self.prompt + self.frames))
        hidden = talker.forward(prompt, talker.positions[None, : self.prompt], view)
        talker.hidden.copy_(hidden[:, -1:])
        talker.prompt_length.fill_(self.prompt)
        talker.frame.zero_()
        talker.token.copy_(codes[:1, None])
        talker.seen.zero_()
        talker.suppressed.zero_()
        talker.ended.zero_()
        talker.repetition_penalty.fill_(1.5)
        talker.min_tokens.zero_()
        talker.end_token.zero_()
        text = torch.randn(self.frames, predictor.text.shape[-1], generator=self.random)
        predictor.text[0, : self.frames] = text.to(predictor.text)

    def random_integers(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.random).to(self.device)

    def float_cache(self, graph: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of a layer's keys and values in float32, as far as they are used. (G, T, D) each"""
        length = min(graph.cache.length, round_up(self.prompt + self.frames))
        cached = graph.cache.layers[layer]
        return cached.keys[0, :, :length].float(), cached.values[0, :, :length].float()

    def float_caches(self, graph: Any) -> list[tuple[Tensor, Tensor]]:
        return [self.float_cache(graph, layer) for layer in range(len(graph.cache.layers))]

    def launch(self, graph: Any) -> None:
        graph.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if reason := graph.step.why_failed():
            raise Wrong(reason)

    def run_frame(self, frame: int) -> SimpleNamespace:
        """One frame of the megakernel: its inputs, and copies of all that it has computed."""
        talker, predictor = self.talker, self.predictor
        hidden = talker.hidden.clone()
        predictor.sampling.set(*SETTINGS[frame % len(SETTINGS)])
        talker.sampling.set(*SETTINGS[frame % len(SETTINGS)])
        self.launch(predictor)
        codes = predictor.codes[0, frame].clone()
        result = SimpleNamespace(
            codes=codes,
            hidden=hidden,
            first_input=predictor.step.first_input.clone(),
            code_logits=predictor.step.logits().clone(),
        )
        last = len(predictor.heads)
        first_inputs = [result.first_input.flatten(), predictor.step.inputs[0][codes[0]]]
        is_compared = frame in (0, self.frames - 1)
        if is_compared:
            self.check_phases("the predictor's", predictor, first_inputs, 0, last, predictor.heads[-1])
        expected = choose(result.code_logits, predictor.sampling, predictor.step.noise)
        result.codes_as_chosen = codes[1:] == expected
        self.check_bookkeeping(frame, result)

        if frame == 0:  # so small that epsilon matters
            talker.embedding.mul_(1e-3 / talker.embedding.float().square().mean().sqrt())
        result.embedding = talker.embedding.clone()
        self.launch(talker)
        result.logits = talker.step.logits().clone()
        if is_compared:
            position = self.prompt + frame
            self.check_phases("the talker's", talker, [talker.embedding.flatten()], position, position, talker.head)
        return result

    def check_phases(self, whose: str, graph: Any, inputs: list[Tensor], first: int, last: int, head: Any) -> None:
        """Each phase of the kernel from its own input of that phase: of the first layer at the position `first` and
        those that follow, which have these `inputs`; of the last layer at the position `last`."""
        model = graph.model
        epsilon = model.config.rms_norm_eps
        sent = {name: values[None] for name, values in graph.step.exchanged().items()}

        keys, values = self.float_cache(graph, 0)
        for position, x in enumerate(inputs, first):
            cos, sin = angles(model, position)
            qkv = project_qkv(model.layers[0], x.float()[None], epsilon, to_bfloat16)
            cache = keys.clone(), values.clone()
            attend(model.config, model.layers[0].self_attn, qkv, cache, position, cos, sin, to_bfloat16)
            self.compare(f"{whose} first keys", cache[0][:, position], keys[:, position])
            self.compare(f"{whose} first values", cache[1][:, position], values[:, position])

        layer = model.layers[-1]
        keys, values = self.float_cache(graph, -1)
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
        hidden = rms_norm(sent["hidden"], model.norm, epsilon, to_bfloat16)
        self.compare(f"{whose} head", linear(hidden, head, to_bfloat16), graph.step.logits()[-1:])

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
        talker = self.talker
        logits = talker.step.logits().clone()
        vocab = logits.shape[-1]
        talker.sampling.set(*SETTINGS[trial % len(SETTINGS)])
        talker.frame.fill_(self.frames - 1)
        seen = torch.rand(vocab, generator=self.random) < 0.5
        talker.seen.copy_(seen.to(self.device))
        talker.suppressed.copy_(logits[0] > 0 if trial // 4 % 2 else torch.zeros_like(talker.suppressed))
        best = logits[0].masked_fill(talker.suppressed, float("-inf")).argmax()
        is_too_early = trial % 3 == 0
        talker.end_token.copy_(best)
        talker.min_tokens.fill_(2 * self.frames if is_too_early else 0)
        before = talker.seen.clone()
        self.launch(talker)
        forbidden = int(best) if is_too_early else None
        scores = apply_talker_rules(talker.step.logits(), before, talker.suppressed, 1.5, forbidden)
        return talker.token[0] == choose(scores, talker.sampling, talker.step.noise)

    def check_choices(self, what: str, chosen_rightly: list[Tensor]) -> None:
        wrong = 1 - torch.cat(chosen_rightly).float().mean().item()
        self.keep(f"{what} chosen otherwise", wrong, MAX_OTHER_CHOICES)
        if wrong > MAX_OTHER_CHOICES:
            raise Wrong(
                f"{wrong:.0%} of the {what} it chose are not those that the reference chooses, "
                f"{MAX_OTHER_CHOICES:.0%} may be others"
            )

    def check_bookkeeping(self, frame: int, result: SimpleNamespace) -> None:
        predictor = self.predictor
        summed = sum(weight[code].float() for weight, code in zip(predictor.step.embeddings, result.codes))
        embedding = summed.bfloat16() + predictor.text[0, frame]
        if not torch.equal(self.talker.embedding.flatten(), embedding):
            raise Wrong("the sum of the codes' embeddings and the text is wrong")
        if not torch.equal(predictor.hiddens[0, frame], result.hidden.flatten()):
            raise Wrong("the hidden state it recorded is not the talker's")

    def check_talker(self, frames: list[SimpleNamespace]) -> None:
        talker = self.talker
        positions = [self.prompt + frame for frame in range(len(frames))]
        inputs = torch.cat([frame.embedding for frame in frames], dim=1)  # (1, L, H)
        float_hidden = run_layers(talker.model, self.caches, inputs[0].float(), self.prompt)

        view = shortened(talker.cache, round_up(positions[-1] + 1))
        hidden = talker.forward(inputs, torch.tensor([positions], device=self.device), view)
        separate = talker.head(hidden[0]).float()
        fused = torch.cat([frame.logits for frame in frames])
        self.check_logits("first codes", fused, separate, linear(float_hidden, talker.head))

    def check_predictor(self, frame: SimpleNamespace) -> None:
        """One frame is enough: they do not depend on each other."""
        predictor = self.predictor
        model = predictor.model
        heads = list(predictor.heads)
        last = len(heads)
        rows = [frame.first_input.flatten()]
        rows += [table[code] for table, code in zip(predictor.step.inputs[:last], frame.codes)]
        inputs = torch.stack(rows)  # (16, H')
        float_hidden = run_layers(model, self.float_caches(predictor), inputs.float(), 0)
        float_logits = [linear(row, head) for head, row in zip(heads, float_hidden[1:])]

        positions = predictor.positions[: last + 1]
        hidden = model(
            inputs_embeds=inputs[None],
            attention_mask={"full_attention": predictor.masks[:, :, : last + 1]},
            position_ids=positions[None],
            cache_position=positions,
            past_key_values=predictor.cache,
        ).last_hidden_state[0]
        separate = [head(row).float() for head, row in zip(heads, hidden[1:])]
        logits = frame.code_logits, torch.stack(separate), torch.stack(float_logits)
        self.check_logits("codes", *logits)
        first = (rows[:1] for rows in logits)
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
