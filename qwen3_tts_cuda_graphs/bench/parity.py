"""How close the logits of a path are to those of the model, with teacher forcing.

bfloat16 results differ between kernels in the last bits, so free-running tokens diverge after one near-tie. Here every
path gets the same tokens. Its error is the difference between its logits and those of a float32 run with the same
weights, and is compared with the error of the model's own bfloat16 forward.

Shapes: T frames, 16 codes per frame, V vocabulary of the talker, V' of the predictor, H hidden size.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from cudagraph_talker import GraphPool, TalkerGraph, round_up
from qwen3_tts_cuda_graphs.fast.frame_graphs import MegakernelGraphs, PlainGraphs
from qwen3_tts_cuda_graphs.fast.layers import replace_layers
from qwen3_tts_cuda_graphs.fast.rows import SharedRows

LENGTH = 512  # positions of a cache
MARGIN = 1.05  # a path's error may be this many times the model's own
FORCED = 100.0, None, 1.0  # temperature, top-k and top-p that leave every code a chance
FALSE_ALARM_RATE = 1e-11  # of one comparison of best tokens, if the cases are independent of each other


class TeacherForced:
    """The graphs of a frame with a cache of their own. The noise is chosen so that the sampler picks given tokens."""

    @torch.no_grad()
    def __init__(
        self,
        talker,
        length: int = LENGTH,
        row_count: int = 1,
        make_graphs: Callable[..., PlainGraphs] = PlainGraphs,
    ):
        self.talker = talker
        self.rows = SharedRows(talker.config, row_count, round_up(length), talker.dtype, talker.device)
        self.graphs = make_graphs(talker, self.rows)
        self.launches = self.graphs.waiting_launches if isinstance(self.graphs, MegakernelGraphs) else ()
        self.heads = [*talker.code_predictor.lm_head, talker.codec_head]
        self.head_outputs = [head.weight.new_zeros(len(head.weight)) for head in self.heads]  # of the last row
        with self.keep_head_outputs():
            self.graphs.capture(GraphPool(talker.device))

    @contextlib.contextmanager
    def keep_head_outputs(self) -> Iterator[None]:
        """Register hooks that copy each head's logits. A CUDA graph captures the copies; on a CPU the hooks run with
        every frame. The megakernel needs none: it writes the logits to its own buffers."""

        def keep(output: torch.Tensor, head, inputs, logits: torch.Tensor) -> None:
            output.copy_(logits[-1])

        outputs = [] if self.launches else self.head_outputs
        hooks = [head.register_forward_hook(partial(keep, output)) for head, output in zip(self.heads, outputs)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def prefill(self, row: int, inputs_embeds, trailing_text_hidden, tts_pad_embed, **_) -> None:
        """Read a prompt, given as the arguments of talker.generate in any dtype, into a row of the cache."""
        view = self.rows[row : row + 1]
        prompt = inputs_embeds.new_zeros(
            1, round_up(inputs_embeds.shape[1]), inputs_embeds.shape[2], dtype=view.text.dtype
        )
        prompt[:, : inputs_embeds.shape[1]] = inputs_embeds
        view.prompt_length.fill_(inputs_embeds.shape[1])
        view.set_text(0, trailing_text_hidden[0], tts_pad_embed[0])
        TalkerGraph(self.talker, view, view.keys, view.values).prefill(prompt)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, **request) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (T, 16) -> logits of the predictor (T * 15, V') and of the talker (T, V) in the last row, on the CPU.

        All rows speak the same tokens. Row r starts r % 4 frames late, so that neighbours are at different positions.
        """
        rows = self.rows
        rows.whole_cache.zero_()
        for sampling in (rows.sampling, rows.code_sampling):
            sampling.set(True, *FORCED)
        first_frames = torch.arange(len(rows.token), device=tokens.device) % 4
        code_logits, token_logits = [], []
        for tick in range(len(tokens) + int(first_frames[-1])):
            for row in (first_frames == tick).nonzero()[:, 0].tolist():
                self.prefill(row, **request)
            frame = tick - first_frames  # (B)
            rows.advance.copy_((frame >= 0) & (frame < len(tokens)))
            codes = tokens[frame.clamp(0, len(tokens) - 1)]  # (B, 16)
            rows.token.copy_(codes[:, :1])
            rows.code_noise.fill_(1e30).scatter_(-1, codes[:, 1:, None], 1e-30)  # the sampler picks these
            with self.keep_head_outputs():
                self.graphs.predict()
                self.graphs.step()
            if self.launches:
                of_codes, of_token = (launch.logits()[-1] for launch in self.launches)
            else:
                *of_codes, of_token = self.head_outputs
                of_codes, of_token = torch.stack(of_codes), of_token[None].clone()
            code_logits.append(of_codes.float().cpu())
            token_logits.append(of_token.float().cpu())
        return torch.cat(code_logits[-len(tokens) :]), torch.cat(token_logits[-len(tokens) :])


class Megakernel(TeacherForced):
    """TeacherForced on the megakernel. Replaces the talker's layers by those of fast/layers.py."""

    def __init__(self, talker, length: int = LENGTH, row_count: int = 1):
        self.keepalive = replace_layers(talker, length)
        super().__init__(talker, length, row_count, MegakernelGraphs)

    def refresh(self) -> None:
        """Update what was computed from the weights, after they have changed."""
        predict, _ = self.launches
        for projected, weight in zip(predict.inputs, predict.embeddings):
            if projected is not weight:
                projected.copy_(predict.project(weight))


def random_request(width: int, device: str | torch.device) -> dict:
    """Arguments of talker.generate: a prompt of random embeddings and text."""
    prompt, text, padding = (torch.randn(1, length, width, device=device).bfloat16() for length in (20, 100, 1))
    mask = torch.ones(1, prompt.shape[1], dtype=torch.long, device=device)
    return dict(inputs_embeds=prompt, attention_mask=mask, trailing_text_hidden=text, tts_pad_embed=padding)


@torch.no_grad()
def one_pass(
    talker, tokens: torch.Tensor, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **_
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits from upstream's own forwards: all frames (T, 16) at once, without a cache."""
    dtype = talker.dtype
    frames = len(tokens)
    predictor = talker.code_predictor
    tables = [talker.get_input_embeddings(), *predictor.get_input_embeddings()]
    codes = tokens.to(talker.device).T
    speech = torch.stack([embed(column) for embed, column in zip(tables, codes)], dim=1)  # (T, 16, H)
    text = torch.cat([trailing_text_hidden[0], tts_pad_embed[0].expand(frames, -1)])[:frames]
    embeds = torch.cat([inputs_embeds.to(dtype), (speech.sum(1) + text.to(dtype))[None]], dim=1)
    mask = torch.cat([attention_mask, attention_mask.new_ones(1, frames)], dim=1).to(talker.device)
    hidden = talker.model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state[0]

    before = hidden[-frames - 1 : -1, None]  # the hidden states from which the first codes were chosen, (T, 1, H)
    inputs = predictor.small_to_mtp_projection(torch.cat([before, speech[:, :-1]], dim=1))
    states = predictor.model(inputs_embeds=inputs, use_cache=False).last_hidden_state  # (T, 16, H')
    code_logits = [head(state) for head, state in zip(predictor.lm_head, states[:, 1:].unbind(1))]
    first_logits = talker.codec_head(hidden[-frames:])
    return torch.stack(code_logits, dim=1).flatten(0, 1).float().cpu(), first_logits.float().cpu()


def error(logits: torch.Tensor, exact: torch.Tensor, quantile: float) -> float:
    """A quantile of the absolute error."""
    errors = (logits - exact).abs().flatten()  # torch.quantile takes at most 2**24 elements
    return errors.kthvalue(max(1, int(quantile * errors.numel()))).values.item()


def compare(logits: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> dict:
    """Errors of a path relative to the model's own, and in how many cases only one of the two has the best token.

    "megakernel" in the key of the result may be any path: results/calibration_*.json have this name.
    """
    median, high = (error(logits, exact, quantile) / error(own, exact, quantile) for quantile in (0.5, 0.99))
    agree, own_agree = (rows.argmax(-1) == exact.argmax(-1) for rows in (logits, own))
    return dict(
        median=median,
        high=high,
        cases=len(agree),
        only_own=int((own_agree & ~agree).sum()),
        only_megakernel=int((agree & ~own_agree).sum()),
        own_agreement=own_agree.double().mean().item(),
    )


def mcnemar(only_own: int, only_path: int) -> float:
    """The probability that a path which is as good as the model's own agrees with float32 as rarely as this one does.

    McNemar's exact test: where only one of the two agrees, it is either of them with probability 1/2.
    """
    cases = only_own + only_path
    return sum(math.comb(cases, k) for k in range(only_path + 1)) / 2**cases


def verdict(logits: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> tuple[bool, str]:
    """Whether a path is as close to the exact logits as the model's own forward, and the figures as text.

    Three figures have limits: the median and the 99th percentile of the error, and how often the best token is that of
    float32. calibrate.py records their distribution for a correct kernel: results/calibration_*.json, 50 runs of 200
    frames for each size. The errors were 0.980 to 1.013 times the model's own, with a standard deviation of at most
    0.0062 for either gain of the weights; by Student's t distribution one of them is above the limit in one of 10^8
    runs. In McNemar's test the difference spread 0.8 to 1.2 times as far as that of independent cases. Even with 1.2
    the rate is 10^-8, and the 52 comparisons of `bench.py --check` with both sizes stay below one false alarm in a
    million runs.
    """
    figures = compare(logits, own, exact)
    median, high, only_own, only_path = (figures[name] for name in ("median", "high", "only_own", "only_megakernel"))
    own_agreement = figures["own_agreement"]
    agreement = own_agreement + (only_path - only_own) / figures["cases"]
    probability = mcnemar(only_own, only_path)
    good = 0 < median <= MARGIN and 0 < high <= MARGIN and probability > FALSE_ALARM_RATE
    return good, (
        f"error {median:.3f} (median) and {high:.3f} (99th percentile) times the model's own; best token as in float32 "
        f"in {agreement:.1%} of the cases (the model's own: {own_agreement:.1%}, p = {probability:.1g})"
    )
