"""Is the megakernel right on this GPU, with the weights that were loaded? A few frames, each time a model is loaded.

From random states of the rows it generates FRAMES frames of one row, or a single frame of several. Compared are:

    phases        the first layer's keys and values, and, of one row, each phase of the last layer, with
                  megakernel_reference.py, which gets the kernel's own input of that phase and rounds where the kernel
                  rounds. Values differ only where another order of summation rounds the other way. Once in thousands
                  of positions that happens in a norm, and up to a third of what is computed from it differs.
    bookkeeping   the next embedding, which is a sum, and the rows' progress: they must be equal
    choices       with the reference, given the kernel's own logits and noise
    errors        of the logits, keys, values and hidden state of all layers together: the distance from float32,
                  relative to that of the reference that rounds
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from cudagraph_talker import sample
from qwen3_tts_cuda_graphs.fast import megakernel_reference as reference
from qwen3_tts_cuda_graphs.fast.frame_graphs import MegakernelGraphs
from qwen3_tts_cuda_graphs.fast.kernels import one_line
from qwen3_tts_cuda_graphs.fast.megakernel import FusedStep
from qwen3_tts_cuda_graphs.fast.rows import draw_choices, fill_with_random_states, view_of

log = logging.getLogger("qwen3_tts_cuda_graphs")

# Lengths of prompts. A single row attends to few positions first, then to more than FEW_POSITIONS of megakernel.cu.
PROMPT = 255
PROMPTS = (7, 300, 150, 43)  # of several rows
FRAMES = 4
TALKER_CHOICES = 16

# Limits, between what a correct kernel gives (50 runs of each size with random weights, results/self_test_*.json) and
# what wrong ones give (tests/test_self_test.py).
MAX_DIFFERENT = 0.06  # of a phase, the median of positions. Right: below 0.01; one rounding left out: above 0.15
MAX_DIFFERENT_OF_ONE = 0.6  # at each position. Right: up to 0.1, rarely 0.3; that of another row: nearly 1
NO_DIFFERENCE = 1e-6
MAX_ERROR = 1.5  # of many values. Right: 0.92 to 1.09
MAX_ERROR_OF_ONE = 3.0  # of a single vector. Right: 0.8 to 1.19; a layer left out of the first pass: 57
MAX_OTHER_CHOICES = 0.05  # Right: 0; top-k off by one: 0.2 and more


class Figures(dict[str, tuple[Tensor, float, str]]):
    """What was measured, each figure with its limit and what to say beyond it."""

    def keep(self, what: str, values: Tensor, limit: float, sentence: str) -> None:
        """Keep the largest mean of a row (rows, ...), or what was kept before, if it is larger; a NaN stays."""
        figure = values.float().flatten(1).mean(1).amax()
        if what in self:
            figure = torch.maximum(figure, self[what][0])
        self[what] = figure, limit, sentence

    def keep_choices(self, what: str, wrong: Tensor) -> None:
        sentence = "{:.0%} of the " + what + " it chose are not those that the reference chooses, {:.0%} may be others"
        self.keep(f"{what} chosen otherwise", wrong, MAX_OTHER_CHOICES, sentence)

    def keep_error(self, what: str, found: Tensor, exact: Tensor, own: Tensor, limit: float = MAX_ERROR) -> None:
        sentence = f"the {what} are " + "{:.2f} times as far from float32 as the model's own, {} may be"
        error, own_error = ((tensor - exact).abs().flatten(1).median(1).values for tensor in (found.float(), own))
        self.keep(f"error of the {what}", (error / own_error)[:, None], limit, sentence)

    def verdict(self) -> tuple[str, dict[str, tuple[float, float]]]:
        """What is wrong, empty if nothing is; and all figures with their limits. The host reads them all at once."""
        figures = torch.stack([figure for figure, _, _ in self.values()]).tolist()
        measured = {what: (figure, self[what][1]) for what, figure in zip(self, figures)}
        wrong = (what for what, (figure, limit) in measured.items() if not figure <= limit)
        return next((self[what][2].format(*measured[what]) for what in wrong), ""), measured


@torch.no_grad()
def run_test(
    graphs: MegakernelGraphs, prompts: Sequence[int] = (PROMPT,), frames: int = FRAMES, choices: int = TALKER_CHOICES
) -> tuple[str, dict[str, tuple[float, float]]]:
    """What is wrong with the graphs, empty if nothing is; and the measured figures, with their limits. Several rows
    have one frame.

    Afterwards the rows are as they were before, but for their text, codes and cache, which are empty. Capturing runs
    each step once: with the test's `prompt_length` and `frame` it would read and write beyond its tensors.
    """
    rows = graphs.rows
    tensors = [*rows.state(), rows.advance, rows.noise, rows.code_noise, rows.embedding]
    copies = [tensor.clone() for tensor in tensors]
    try:
        fill_with_random_states(rows, prompts, frames)
        reason, figures = SelfTest(graphs, frames).run(choices).verdict()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the kernel has stopped, or the driver refuses the launch
        reason, figures = one_line(error) or type(error).__name__, {}
    finally:
        torch._foreach_copy_(tensors, copies)
        torch._foreach_zero_([rows.text, rows.codes, *rows.cache(), *rows.code_keys, *rows.code_values])
    log.debug("self-test of %d rows: %s", len(rows.token), figures)
    return reason, figures


def launch(step: FusedStep) -> None:
    """Launch a step and wait for it: a kernel that has stopped would take 2 s in every further launch."""
    step()
    if step.noise.is_cuda:
        torch.cuda.synchronize(step.noise.device)
    if reason := step.why_failed():
        raise RuntimeError(reason)


class SelfTest:
    def __init__(self, graphs: MegakernelGraphs, frames: int) -> None:
        self.rows = rows = graphs.rows
        self.predict, self.step = graphs.waiting_launches
        self.figures = Figures()
        with rows.token.device:
            self.index = torch.arange(len(rows.token))
            self.positions = rows.prompt_length + rows.frame + torch.arange(frames)  # (B, frames)
            self.code_positions = torch.arange(rows.codes.shape[2]).expand(len(rows.token), -1)  # (B, 16)

    def run(self, choices: int) -> Figures:
        """All frames, then the talker's last step again, with other rules for its choice."""
        rows, figures = self.rows, self.figures
        last = self.positions.shape[1] - 1
        inputs, logits, wrong_codes, wrong_tokens = [], [], [], []
        shares = defaultdict(list)  # what -> the share of it that differs, at each position (B, positions)
        for frame in range(last + 1):
            draw_choices(rows, frame)
            code_inputs, wrong = self.run_predictor()
            wrong_codes.append(wrong)
            if frame == 0:  # so small that epsilon matters
                rows.embedding.mul_(1e-3 / rows.embedding.float().square().mean().sqrt())
            inputs.append(rows.embedding.clone())
            wrong_tokens.append(self.run_talker())
            logits.append(self.step.logits())
            if frame in (0, last):
                of_predictor = "predictor's", self.predict, code_inputs, self.code_positions
                of_talker = "talker's", self.step, torch.cat(inputs, 1), self.positions[:, : frame + 1]
                for whose, *read in (of_predictor, of_talker):
                    for what, found, expected in self.phases(*read):
                        shares[f"the {whose} {what}"].append((found != expected).float().flatten(2).mean(2))
        for what in shares:
            share, message = torch.cat(shares[what], 1), "{:.1%} of " + what + " differ from the reference, {:.0%} may"
            figures.keep(f"{what}, at most", share.amax(1, True), MAX_DIFFERENT_OF_ONE, f"at a position {message}")
            if share.shape[1] > 1:
                figures.keep(what, share.median(1, True).values, MAX_DIFFERENT, message)
        scores = logits[-1][:, 0]
        for trial in range(choices):
            draw_choices(rows, trial)
            rows.frame.sub_(rows.advance[:, None].long())
            rows.suppressed.copy_((scores > 0) & (trial // 4 % 2 == 1))
            rows.end_token.copy_(scores.masked_fill(rows.suppressed, float("-inf")).argmax(-1, keepdim=True))
            rows.min_tokens.fill_(rows.text.shape[1] if trial % 3 == 0 else 0)
            wrong_tokens.append(self.run_talker())
        figures.keep_choices("codes", torch.cat(wrong_codes, 1))
        figures.keep_choices("first codes", torch.cat(wrong_tokens, 1))

        # Of the predictor's frames one is enough: they do not depend on each other.
        code_logits = self.predict.logits()
        exact, own = self.check_errors("codes", self.predict, code_logits, code_inputs, self.code_positions)
        of_two_tokens = [tensor[:, :1] for tensor in (code_logits, exact[0], own[0])]
        figures.keep_error("logits of the first predicted code", *of_two_tokens, MAX_ERROR_OF_ONE)
        logits, inputs = torch.cat(logits, 1), torch.cat(inputs, 1)
        exact, own = self.check_errors("first codes", self.step, logits, inputs, self.positions)
        hidden = torch.where(rows.advance[:, None], rows.hidden[:, 0], own[1])
        figures.keep_error("hidden states", hidden, exact[1], own[1], MAX_ERROR_OF_ONE)
        return figures

    def run_predictor(self) -> tuple[Tensor, Tensor]:
        """Generate a frame's codes. Returns what the predictor's layers have read, (B, 16, H'), and which codes the
        reference chooses otherwise, (B, 15)."""
        rows, predict = self.rows, self.predict
        launch(predict)
        at = self.index, rows.frame[:, 0]
        codes, logits = rows.codes[at], predict.logits()  # (B, 16), (B, 15, V')
        settings = view_of(rows.code_sampling, self.index.repeat_interleave(logits.shape[1]))
        chosen = sample(logits.flatten(0, 1), settings, rows.code_noise.flatten(0, 1)).view(logits.shape[:2])
        summed = sum(F.embedding(*pair).float() for pair in zip(codes.T, predict.embeddings))
        wrong = rows.embedding[:, 0] != summed.bfloat16() + rows.text[at]
        self.figures.keep("embeddings", wrong, NO_DIFFERENCE, "the sum of the codes' embeddings and the text is wrong")
        inputs = [F.embedding(*pair) for pair in zip(codes[:, :-1].T, predict.inputs)]
        return torch.stack([predict.first_input[:, 0], *inputs], 1), codes[:, 1:] != chosen

    def run_talker(self) -> Tensor:
        """Run a step. Returns in which rows the reference chooses another first code, (B, 1)."""
        rows, step = self.rows, self.step
        progress = [rows.token, rows.frame, rows.seen, rows.ended[:, None], rows.hidden[:, 0]]
        before = [tensor.clone() for tensor in progress]
        launch(step)
        found = [tensor.clone() for tensor in progress]
        torch._foreach_copy_(progress[:4], before[:4])
        rows.frame += 1
        rows.choose_token(lambda hidden: step.logits()[:, 0])
        wrong = []
        for tensor, old, new in zip(progress, before, found):
            tensor.copy_(torch.where(rows.advance[:, None], tensor, old))  # rows that wait keep their state
            wrong.append((tensor != new).any(1, keepdim=True))
        wrong_token, *others = wrong
        message = "what a step writes besides its token is wrong"
        self.figures.keep("progress", torch.cat(others, 1) & ~wrong_token, NO_DIFFERENCE, message)
        return wrong_token

    def cached(self, cache: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """Keys and values of a layer at these positions, (B, L, KV, D) each."""
        return [tensor[self.index[:, None], :, positions] for tensor in cache]

    def phases(self, step: FusedStep, inputs: Tensor, positions: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What kernel and reference have computed, (B, positions, ...): keys and values of the first layer, which has
        read `inputs` at these positions; for a single row each phase of the last layer at the last position."""
        model = step.stack.model
        _, cached = reference.run_layers(model, step.cache[:1], inputs.float(), positions, reference.to_bfloat16)
        yield from zip(("first keys", "first values"), self.cached(step.cache[0], positions), cached)
        if len(self.index) == 1:
            last = positions[:, -1:]
            found = {name: values[None, None] for name, values in step.exchanged().items()}  # (1, 1, size)
            found["keys"], found["values"] = self.cached(step.cache[-1], last)
            found["logits"] = step.logits()[:, -1:]
            yield from reference.last_layer(model, step.stack.heads[-1], found, step.cache[-1], last)

    def check_errors(self, what: str, step: FusedStep, logits: Tensor, inputs: Tensor, positions: Tensor) -> list:
        """The logits, and the keys and values of all layers, where they have read `inputs` at these positions. Returns
        the reference's logits and last hidden state: in float32, and rounded as the model's own."""
        keep, model = self.figures.keep_error, step.stack.model
        results, caches = [], []
        for rounded in (reference.exact, reference.to_bfloat16):
            hidden, cached = reference.run_layers(model, step.cache, inputs.float(), positions, rounded)
            last = zip(hidden[:, -logits.shape[1] :].unbind(1), cycle(step.stack.heads))
            own_logits = torch.stack([reference.linear(x, head, rounded) for x, head in last], 1)
            results.append((own_logits, hidden[:, -1]))
            caches.append(torch.stack(cached, 1))
        limit = MAX_ERROR if logits.shape[1] > 1 else MAX_ERROR_OF_ONE
        keep(f"logits of the {what}", logits, *(logits for logits, _ in results), limit)
        found = torch.stack([tensor for cache in step.cache for tensor in self.cached(cache, positions)], 1)
        keep("cached keys and values", found, *caches)
        return results
