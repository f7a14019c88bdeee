"""How close a path is to the model: its logits with teacher forcing, compared with float32.

bfloat16 results differ between kernels in the last bits, so free-running tokens diverge after one near-tie. Here every
path gets the same tokens. Its error is the difference of its logits from a float32 run of the same weights, and is
compared with the error of the model's own bfloat16 forward.

Shapes: T frames, 16 codes per frame, V vocabulary of the talker, V' of the predictor, H hidden size.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import TalkerGraph, capture
from fast.layers import replace_layers
from fast.megakernel import predictor_step, talker_step

MARGIN = 1.05  # a path's error may be this many times the model's own
FORCED = 100.0, None, 1.0  # temperature, top-k, top-p with which any code can be chosen
FALSE_ALARM_RATE = 1e-11  # of one comparison of best tokens, if they are independent of each other


class Route:
    """A way to compute a frame. The caller sets `codes`; `step` computes the logits of `codes[1:]`, and then those of
    the next frame's first code."""

    def __init__(self, talker, length: int):
        self.talker = TalkerGraph(talker, 1, length)
        self.predictor = PredictorGraph(talker, self.talker)
        self.codes = torch.zeros(len(self.predictor.heads) + 1, dtype=torch.long, device=talker.device)

    def begin(self, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **_) -> None:
        """Takes the arguments of talker.generate, in any dtype."""
        dtype = self.talker.prompt.dtype
        self.predictor.begin(trailing_text_hidden.to(dtype), tts_pad_embed.to(dtype))
        self.talker.begin(inputs_embeds.to(dtype), attention_mask)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, **request) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (T, 16) -> logits of the predictor (T * 15, V') and of the talker (T, V), on the CPU."""
        self.begin(**request)
        predictor_logits, talker_logits = [], []
        for codes in tokens:
            self.codes.copy_(codes)
            self.step()
            predictor_logits.append(self.predictor_logits.clone().cpu())
            talker_logits.append(self.talker_logits.clone().cpu())
        return torch.cat(predictor_logits), torch.cat(talker_logits)


class Forced(Route):
    """The layers of a talker and its predictor, as they are, over static caches."""

    @torch.no_grad()
    def __init__(self, talker, length: int):
        super().__init__(talker, length)
        longest = len(self.talker.positions)
        self.talker.prefills = {longest: partial(self.talker.prefill, longest)}  # run once: not worth a capture
        with talker.device:
            self.predictor_logits = torch.zeros(len(self.predictor.heads), self.predictor.sampling.vocab_size)
            self.talker_logits = torch.zeros(1, self.talker.sampling.vocab_size)
        self.step = capture(self.step, talker.device)

    def step(self) -> None:
        talker, predictor = self.talker, self.predictor
        tables = [predictor.embed_token, *predictor.embed_code]
        embeds = [embed(code)[None] for embed, code in zip(tables, self.codes.split(1))]  # 16 x (1, 1, H)
        hidden = predictor.forward(torch.cat([talker.hidden, embeds[0]], dim=1), 0)  # positions 0 and 1
        for i, head in enumerate(predictor.heads):
            if i > 0:
                hidden = predictor.forward(embeds[i], i + 1)
            self.predictor_logits[i] = head(hidden)[0]

        text = predictor.text.index_select(1, talker.frame)
        talker.embedding.copy_(torch.cat(embeds, dim=1).sum(1, keepdim=True) + text)
        talker.hidden.copy_(talker.forward(talker.embedding, (talker.prompt_length + talker.frame)[None], talker.cache))
        self.talker_logits[0] = talker.head(talker.hidden[:, -1])[0]
        talker.frame += 1


class Megakernel(Route):
    """The megakernel, in place of a talker's layers and its predictor's."""

    @torch.no_grad()
    def __init__(self, talker, length: int):
        self.keepalive = replace_layers(talker, length)
        super().__init__(talker, length)
        self.talker.step = talker_step(talker, self.talker)
        self.predictor.step = predictor_step(self.predictor)
        self.talker.capture()
        self.predictor.capture()

    def refresh(self) -> None:
        """Compute again what was computed from the weights."""
        for projected, weight in zip(self.predictor.step.inputs, self.predictor.step.embeddings):
            if projected is not weight:
                projected.copy_(self.predictor.project(weight))

    def step(self) -> None:
        """It samples by itself: this noise makes it choose `codes`."""
        talker, predictor = self.talker, self.predictor
        predictor.sampling.set(True, *FORCED)
        force(predictor.step.noise, self.codes[1:])
        talker.token.copy_(self.codes[:1])
        predictor.step(draw_noise=False)
        talker.step()
        self.predictor_logits = predictor.step.logits()
        self.talker_logits = talker.step.logits()


def random_request(width: int, device: str | torch.device) -> dict:
    """Arguments of talker.generate: a prompt of random embeddings and text."""
    prompt, text, padding = (torch.randn(1, length, width, device=device).bfloat16() for length in (20, 100, 1))
    mask = torch.ones(1, prompt.shape[1], dtype=torch.long, device=device)
    return dict(inputs_embeds=prompt, attention_mask=mask, trailing_text_hidden=text, tts_pad_embed=padding)


def force(noise: torch.Tensor, codes: torch.Tensor) -> None:
    """Noise with which the sampler chooses these codes. (..., V), (...)"""
    noise.fill_(1e30).scatter_(-1, codes[..., None], 1e-30)


def frames_of_batch(engine, rows: int, tokens: torch.Tensor, request: dict) -> Iterator[torch.Tensor]:
    """The codes (B, 16) of each frame of a batch; the caller runs the frame. The engine must be idle.

    All rows speak the same tokens (T, 16). Row r joins r % 4 frames late, so that neighbours are at different
    positions. The last row takes part in the last T frames.
    """
    settings = engine.settings.row(request)
    first_frames = torch.arange(rows, device=tokens.device) % 4
    try:
        with engine.decoder.lock:
            for tick in range(len(tokens) + int(first_frames[-1])):
                for slot in (first_frames == tick).nonzero()[:, 0].tolist():
                    engine.prefills.load([slot], [request], [settings]).prefill()
                frame = tick - first_frames  # (B)
                engine.slots.advance[:rows] = (frame >= 0) & (frame < len(tokens))
                yield tokens[frame.clamp(0, len(tokens) - 1)]
            torch.cuda.synchronize()
    finally:
        engine.slots.advance.zero_()


@torch.no_grad()
def batch_logits(engine, rows: int, tokens: torch.Tensor, request: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `Route.logits`, of the last row of a batch as serving/ runs it."""
    graph = engine.graphs[rows]
    predictor_logits, talker_logits = [], []

    def sample_rows(logits: torch.Tensor, *_) -> torch.Tensor:
        predictor_logits.append(logits[-1:].float().cpu())
        return codes[:, len(predictor_logits) % len(graph.predictor.heads) or len(graph.predictor.heads)][:, None]

    def choose_rows(logits: torch.Tensor, *_) -> None:
        talker_logits.append(logits[-1:].float().cpu())
        graph.frame += graph.advance[:, None]

    graph.predictor_stack.sample_rows = sample_rows
    graph.talker_stack.choose_rows = choose_rows
    try:
        for codes in frames_of_batch(engine, rows, tokens, request):
            graph.token.copy_(codes[:, :1])
            graph.step()
    finally:
        del graph.predictor_stack.sample_rows, graph.talker_stack.choose_rows
    count = len(tokens)
    return torch.cat(predictor_logits[-count * len(graph.predictor.heads) :]), torch.cat(talker_logits[-count:])


@torch.no_grad()
def megakernel_logits(engine, rows: int, tokens: torch.Tensor, request: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `batch_logits`, on the megakernel for several streams."""
    frame = engine.megakernels[rows]
    sampling = frame.predictor.sampling
    predictor_logits, talker_logits = [], []
    for codes in frames_of_batch(engine, rows, tokens, request):
        sampling.set(True, *FORCED)
        force(sampling.noise, codes[:, 1:])
        frame.token.copy_(codes[:, :1])
        frame.step()
        predictor_logits.append(frame.predictor_step.logits()[-1].cpu())
        talker_logits.append(frame.talker_step.logits()[-1].cpu())
    count = len(tokens)
    return torch.cat(predictor_logits[-count:]), torch.cat(talker_logits[-count:])


@torch.no_grad()
def one_pass(
    talker, tokens: torch.Tensor, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **_
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `Route.logits`, from upstream's own forwards: all frames (T, 16) at once, without a cache."""
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

    before = hidden[-frames - 1 : -1, None]  # each frame's, from which its first code was chosen
    inputs = predictor.small_to_mtp_projection(torch.cat([before, speech[:, :-1]], dim=1))
    states = predictor.model(inputs_embeds=inputs, use_cache=False).last_hidden_state  # (T, 16, H')
    code_logits = [head(state) for head, state in zip(predictor.lm_head, states[:, 1:].unbind(1))]
    first_logits = talker.codec_head(hidden[-frames:])
    return torch.stack(code_logits, dim=1).flatten(0, 1).float().cpu(), first_logits.float().cpu()


def error(logits: torch.Tensor, exact: torch.Tensor, quantile: float) -> float:
    """A quantile of the absolute error. torch.quantile takes at most 2**24 elements."""
    errors = (logits - exact).abs().flatten()
    return errors.kthvalue(max(1, int(quantile * errors.numel()))).values.item()


def mcnemar(agree: torch.Tensor, own_agree: torch.Tensor) -> float:
    """How likely a path that is as good as the model's own agrees with float32 as rarely as this one, or less.

    McNemar's exact test: of the cases in which only one of the two agrees, either is right with probability 1/2.
    """
    only_own = int((own_agree & ~agree).sum())
    only_path = int((agree & ~own_agree).sum())
    cases = only_own + only_path
    return sum(math.comb(cases, k) for k in range(only_path + 1)) / 2**cases


def verdict(logits: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> tuple[bool, str]:
    """Whether a path is as close to the exact logits as the model's own forward, and the figures.

    Compared are the median and the 99th percentile of the error, and how often the best token is the exact one.
    calibrate.py shows how these figures are distributed for a correct kernel: results/calibration_*.json, 50 runs of
    200 frames of each size. The errors were 0.980 to 1.013 times the model's own, with a standard deviation of at most
    0.0062 for either gain of the weights; by Student's t distribution one of them is above the limit in one of 10^8
    runs. In McNemar's test the difference spread 0.8 to 1.2 times as far as that of independent cases. Even with 1.2
    the rate is 10^-8, and the 44 comparisons of `bench.py --check` with both sizes stay below one false alarm in a
    million runs.
    """
    median, high = (error(logits, exact, quantile) / error(own, exact, quantile) for quantile in (0.5, 0.99))
    agree = logits.argmax(-1) == exact.argmax(-1)
    own_agree = own.argmax(-1) == exact.argmax(-1)
    probability = mcnemar(agree, own_agree)
    good = 0 < median <= MARGIN and 0 < high <= MARGIN and probability > FALSE_ALARM_RATE
    return good, (
        f"error {median:.3f} (median) and {high:.3f} (99th percentile) times the model's own; best token as in float32 "
        f"in {agree.double().mean():.1%} of the cases (the model's own: {own_agree.double().mean():.1%}, "
        f"p = {probability:.1g})"
    )
