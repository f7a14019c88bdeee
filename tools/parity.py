"""How near a path is to the model: its logits with given tokens, and a verdict. For `bench.py --check` and the tests.

bfloat16 results differ between kernels in the last bits, so free-running tokens part ways after one near-tie. Here each
path gets the same tokens, and its error is that against a float32 run of the same weights. The measure of a path is the
error of the model's own bfloat16 forward.
"""
import torch

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import TalkerGraph, capture, static_cache

MARGIN = 1.05                                                     # times the model's own error, at most


class Forced:
    """The layers of a talker and its predictor, as they are, over static caches; the tokens are given."""

    @torch.no_grad()
    def __init__(self, talker, length):
        self.talker = TalkerGraph(talker, static_cache(talker.model, 1, length))
        self.predictor = PredictorGraph(talker, self.talker)
        with talker.device:
            self.codes = torch.zeros(len(self.predictor.heads) + 1, dtype=torch.long)
            self.predictor_logits = torch.zeros(len(self.predictor.heads), self.predictor.sampling.vocab)
            self.talker_logits = torch.zeros(1, self.talker.sampling.vocab)
        self.step = capture(self.step, talker.device)

    def begin(self, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **_):
        dtype = self.talker.prompt.dtype
        self.predictor.begin(trailing_text_hidden.to(dtype), tts_pad_embed.to(dtype))
        self.talker.begin(inputs_embeds.to(dtype), attention_mask)

    def step(self):
        """One frame of `codes`: the logits of the 15 codes behind the first, and those of the next frame's first."""
        talker, predictor = self.talker, self.predictor
        embeds = [embed(code)[None] for embed, code in zip(
            (predictor.embed_token, *predictor.embed_code), self.codes.split(1))]                  # (1, 1, H) each
        hidden = predictor.forward(torch.cat([talker.hidden, embeds[0]], dim=1), 0)
        for i, head in enumerate(predictor.heads):
            if i > 0:
                hidden = predictor.forward(embeds[i], i + 1)
            self.predictor_logits[i] = head(hidden)[0]
        text = predictor.text.index_select(1, talker.frame)
        talker.embedding.copy_(torch.cat(embeds, dim=1).sum(1, keepdim=True) + text)
        talker.hidden.copy_(talker.forward(talker.embedding, talker.start + talker.frame, talker.cache))
        self.talker_logits[0] = talker.head(talker.hidden[:, -1])[0]
        talker.frame += 1

    @torch.no_grad()
    def logits(self, tokens, **request):
        """(T, 16) -> the predictor's (T * 15, V) and the talker's (T, V'), on the CPU."""
        self.begin(**request)
        rows = []
        for codes in tokens:
            self.codes.copy_(codes)
            self.step()
            rows.append((self.predictor_logits.clone().cpu(), self.talker_logits.clone().cpu()))
        return [torch.cat(column) for column in zip(*rows)]


@torch.no_grad()
def one_pass(talker, tokens, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **_):
    """The talker's logits as upstream's own forward gives them: all frames (T, 16) at once, without a cache."""
    dtype, tokens = talker.dtype, tokens.to(talker.device)
    embeds = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
    frames = sum(embed(codes) for embed, codes in zip(embeds, tokens.T))                           # (T, H)
    text = torch.cat([trailing_text_hidden[0], tts_pad_embed[0].expand(len(tokens), -1)])[:len(tokens)]
    whole = torch.cat([inputs_embeds.to(dtype), (frames + text.to(dtype))[None]], dim=1)
    mask = torch.cat([attention_mask, attention_mask.new_ones(1, len(tokens))], dim=1)
    hidden = talker.model(inputs_embeds=whole, attention_mask=mask, use_cache=False).last_hidden_state
    return talker.codec_head(hidden[0, -len(tokens):]).float().cpu()


def error(logits, exact, quantile):
    errors = (logits - exact).abs().flatten()
    return errors.kthvalue(max(1, int(quantile * errors.numel()))).values.item()


def verdict(logits, own, exact):
    """Whether a path is as near to the exact logits as the model's own: in the error's median and 99th percentile, and
    in how often the best choice is the exact one (but for twice its statistical spread). And figures that say so."""
    ratios = [error(logits, exact, q) / error(own, exact, q) for q in (0.5, 0.99)]
    agree, own_agree = ((x.argmax(-1) == exact.argmax(-1)).double() for x in (logits, own))
    spread = (agree - own_agree).std().item() * len(agree) ** -0.5
    good = all(0 < ratio <= MARGIN for ratio in ratios) and agree.mean() >= own_agree.mean() - 2 * spread
    return good, (f"error {ratios[0]:.3f} (median) and {ratios[1]:.3f} (99th percentile) times the model's own, first "
                  f"choice as in float32 {agree.mean():.1%} of the time (its own {own_agree.mean():.1%})")
