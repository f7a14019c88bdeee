"""The fused layers are the same model: with the tokens forced, their logits and their cache are as near to a float32
run of the same weights as those of the model's own bfloat16 forward. Needs a GPU, but for the compiler's check."""
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import fused_layers
import paths
from cudagraph_predictor import PredictorGraph
from cudagraph_talker import Sampling, TalkerGraph, sample, static_cache
from fewer_kernels import use_fewer_kernels
from generate import accelerate, load_upstream
from parity import MARGIN, Forced, error, verdict
from sanitize import plain

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTH, PROMPT, FRAMES = 512, 20, 200
SOURCE = Path(__file__).parents[1] / "fused_layers.cu"
GPUS = {"H200": ("sm_90", 132, 227), "H100 PCIe": ("sm_90", 114, 227), "RTX 5090": ("sm_120", 170, 99)}
STACKS = {"0.6B": (28, 1024, 3072, 1), "1.7B": (28, 2048, 3072, 1), "predictor": (5, 1024, 2048, 15)}


def pretended(monkeypatch, gpu="H200", stack="0.6B"):
    """A stack of layers with its heads, as far as its sizes go, on a GPU that is not there."""
    (_, count, kib), (layers, hidden, vocab, codes) = GPUS[gpu], STACKS[stack]
    gpu = SimpleNamespace(multi_processor_count=count, shared_memory_per_block_optin=kib * 1024, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    config = SimpleNamespace(num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=hidden,
                             intermediate_size=3 * hidden, rms_norm_eps=1e-6)
    model = SimpleNamespace(config=config, device=None, layers=[None] * layers)
    return model, [SimpleNamespace(weight=range(vocab))] * codes, gpu


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("stack, gpu", [("0.6B", "H200"), ("1.7B", "RTX 5090"), ("predictor", "H100 PCIe"),
                                        ("predictor", "RTX 5090")])
@pytest.mark.parametrize("change", [str, plain], ids=["as it is", "for racecheck"])
def test_the_kernel_compiles(stack, gpu, change, tmp_path, monkeypatch):
    model, heads, _ = pretended(monkeypatch, gpu, stack)
    (tmp_path / "step.cu").write_text(change(fused_layers.source(fused_layers.sizes_of(model, heads, 2048))))
    run = subprocess.run(["nvcc", f"-arch={GPUS[gpu][0]}", "-cubin", "-o", tmp_path / "step.cubin",
                          tmp_path / "step.cu"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class Fused:
    """A talker and its predictor on the fused layers. They choose the tokens that the others are given."""

    def __init__(self, talker, length):
        use_fewer_kernels(talker, length)
        self.talker = TalkerGraph(talker, static_cache(talker.model, 1, length), fused=True)
        self.predictor = PredictorGraph(talker, self.talker)

    def step(self):
        self.predictor.step()
        self.talker.step()
        self.predictor_logits, self.talker_logits = (graph.fused.logits() for graph in (self.predictor, self.talker))

    begin = Forced.begin


@pytest.fixture(scope="module", params=[("0.6B", 1.0), ("0.6B", 3.0), ("1.7B", 1.0), ("1.7B", 3.0)], ids=str)
def routes(request, checkpoint):
    """Fused, the model's own in bfloat16, and in float32; with flat logits, and with peaked ones."""
    folder = str(checkpoint("base", *request.param))
    with torch.no_grad():
        yield [route(load_upstream(folder, dtype=dtype).model.talker, LENGTH) for route, dtype in (
            (Fused, torch.bfloat16), (Forced, torch.bfloat16), (Forced, torch.float32))]


@pytest.fixture(scope="module")
def fused(checkpoint):
    with torch.no_grad():
        return Fused(load_upstream(str(checkpoint("base", "0.6B"))).model.talker, LENGTH)


def begin(*routes):
    """The same random prompt and text for all."""
    width = routes[0].talker.prompt.shape[-1]
    prompt, text, pad = (torch.randn(1, n, width, device="cuda").bfloat16() for n in (PROMPT, 100, 1))
    for route in routes:
        route.talker.configure(1.05, range(2048, 3072), 2150, 2)
        for graph in (route.talker, route.predictor):
            graph.sampling.set(True, 0.9, 50, 1.0)
        route.begin(prompt, torch.ones(1, PROMPT, device="cuda", dtype=torch.long), text, pad)


def cached(graph, columns):
    return torch.cat([tensor[:, :, columns].float().flatten() for layer in graph.cache.layers
                      for tensor in (layer.keys, layer.values)])


def assert_no_worse(what, fused, own, exact):
    for q in (0.5, 0.99):
        ratio = error(fused, exact, q) / error(own, exact, q)
        print(f"{what}: error {ratio:.4f} times the model's own at {q}")
        assert 0 < ratio <= MARGIN, (what, q)


@on_gpu
@torch.no_grad()
def test_logits_and_cache_with_forced_tokens(routes):
    begin(*routes)
    fused, *others = routes
    rows, caches = {"predictor_logits": [], "talker_logits": []}, []
    for frame in range(FRAMES):
        fused.step()
        for route in others:
            route.codes.copy_(fused.predictor.codes[0, frame])
            route.step()
        for name, kept in rows.items():
            kept.append(torch.stack([getattr(route, name).clone() for route in routes]))
        caches.append(torch.stack([cached(route.predictor, slice(16)) for route in routes]))
    for name, kept in rows.items():
        good, figures = verdict(*torch.cat(kept, dim=1))
        print(name, figures)
        assert good, (name, figures)
    assert_no_worse("talker's cache", *(cached(route.talker, slice(PROMPT + FRAMES)) for route in routes))
    assert_no_worse("predictor's caches", *torch.cat(caches, dim=1))


@on_gpu
@torch.no_grad()
def test_positions(routes):
    """A random past, a random embedding, one step; what lies at other positions stays as it was."""
    fused, hidden, new = routes[0], [], []
    begin(*routes)
    for position in [0, 1, 15, 16, 17, 255, 256, 257, LENGTH - 2, LENGTH - 1] * 4:
        for layers in zip(*(route.talker.cache.layers for route in routes)):
            for first, *others in ([layer.keys for layer in layers], [layer.values for layer in layers]):
                first.normal_()
                for tensor in others:
                    tensor.copy_(first)
        before = cached(fused.talker, slice(None))
        embedding = torch.randn_like(fused.talker.embedding)
        for route in routes:
            talker = route.talker
            talker.start.fill_(position)
            talker.frame.zero_()
            talker.embedding.copy_(embedding)
            if route is fused:
                talker.step()
            else:
                talker.hidden.copy_(talker.forward(talker.embedding, talker.start, talker.cache))
        hidden.append(torch.stack([route.talker.hidden.float().flatten() for route in routes]))
        new.append(torch.stack([cached(route.talker, slice(position, position + 1)) for route in routes]))
        changed = (cached(fused.talker, slice(None)) != before).view(-1, LENGTH, 128).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [position]
    assert_no_worse("hidden states", *torch.cat(hidden, dim=1))
    assert_no_worse("new rows of the cache", *torch.cat(new, dim=1))


def reference_choice(scores, how, noise, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "exponential_", lambda tensor, generator=None: noise)
        return sample(scores, how)[:, 0]


@on_gpu
@torch.no_grad()
def test_the_same_choice_with_the_same_noise(fused, monkeypatch):
    """The predictor's 15 choices a step, over a grid of settings: more than 10,000 in all."""
    ties = rows = 0
    begin(fused)
    talker, predictor = fused.talker, fused.predictor
    for top_k in (1, 20, 50, 2048):
        for top_p in (0.8, 1.0):
            for temperature in (0.5, 0.9, 1.5):
                predictor.sampling.set(True, temperature, top_k, top_p)
                for _ in range(30):
                    talker.frame.zero_()
                    talker.hidden.normal_()
                    talker.token.random_(2048)
                    predictor.step()
                    scores, noise = predictor.fused.logits(), predictor.fused.noise
                    expected = reference_choice(scores, predictor.sampling, noise, monkeypatch)
                    assert torch.equal(predictor.codes[0, 0, 1:], expected), (top_k, top_p, temperature)
                    ranked = scores.sort(-1, descending=True).values
                    ties += (ranked[:, top_k - 1] == ranked[:, min(top_k, 2047)]).sum().item()
                    rows += len(scores)
    assert rows >= 10_000 and ties > 100


@on_gpu
@torch.no_grad()
def test_the_talkers_choice_and_rules(fused, monkeypatch):
    begin(fused)
    talker = fused.talker
    for trial in range(200):
        penalty, top_k, top_p = (1.0, 1.05, 1.5)[trial % 3], (1, 50, 3072)[trial % 5 % 3], (0.8, 1.0)[trial % 2]
        early = trial % 7 < 3
        talker.configure(penalty, torch.randint(3072, (1000,)), 2150, 100 if early else 2)
        talker.sampling.set(trial % 4 > 0, 0.9, top_k, top_p)
        talker.embedding.normal_()
        talker.frame.fill_(3)
        talker.seen.bernoulli_(0.3)
        seen = talker.seen.clone()
        talker.step()
        logits = talker.fused.logits()
        scores = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        scores = scores.masked_fill(talker.suppressed | (early & (talker.ids == 2150)), float("-inf"))
        assert torch.equal(talker.token[0], reference_choice(scores, talker.sampling, talker.fused.noise, monkeypatch))
        seen[0, talker.token[0]] = True
        assert torch.equal(talker.seen, seen) and talker.frame.item() == 4


@on_gpu
@torch.no_grad()
def test_choices_have_the_right_odds(fused):
    """Chi-square of 4,000 first codes against the softmax of the 20 best logits."""
    begin(fused)
    fused.predictor.sampling.set(True, 0.9, 20, 1.0)
    counts = torch.zeros(2048, device="cuda")
    for _ in range(4000):
        fused.talker.frame.zero_()
        fused.predictor.step()
        counts[fused.predictor.codes[0, 0, 1]] += 1
    logits = fused.predictor.fused.logits()[0]
    odds = logits.masked_fill(logits < logits.topk(20).values[-1], float("-inf")).div(0.9).softmax(-1)
    kept = odds > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - 4000 * odds)[kept] ** 2 / (4000 * odds[kept])).sum().item()
    freedom = kept.sum().item() - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def use_wrong_angles(monkeypatch):
    source, right, wrong = SOURCE.read_text(), "sin = a.sin[at(position)]", "sin = a.sin[at(position / 2)]"
    assert right in source
    monkeypatch.setattr(fused_layers, "SOURCE", SimpleNamespace(read_text=lambda: source.replace(right, wrong)))


@on_gpu
def test_a_wrong_kernel_is_found(checkpoint, monkeypatch):
    """RoPE with other angles: `bench.py --check` says so, of that path alone."""
    use_wrong_angles(monkeypatch)
    past_its_cache = fused_layers.compiled.__wrapped__
    for module in (fused_layers, paths):
        monkeypatch.setattr(module, "compiled", past_its_cache)
    verdicts = {name: good for name, good, _ in bench.check(str(checkpoint("base", "0.6B")), torch.randn(1024), 40)}
    assert not verdicts["fused layers: codes 1 to 15"] and verdicts["reference path: codes 1 to 15"]


@on_gpu
def test_where_it_cannot_run_it_says_why(checkpoint):
    tts = load_upstream(str(checkpoint("base", "tiny")), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sizes"):
        accelerate(tts, max_seq_len=64, fused=True)
    accelerate(tts, max_seq_len=64)
    assert "sizes" in tts.model.talker.generate.__self__.path


def test_on_a_cpu_it_says_why(checkpoint):
    tts = load_upstream(str(checkpoint("base", "tiny")), "cpu")
    with pytest.raises(ValueError, match="not on an NVIDIA GPU"):
        accelerate(tts, max_seq_len=64, fused=True)
    accelerate(tts, max_seq_len=64)
    assert tts.model.talker.generate.__self__.path.startswith("reference path")


def test_the_settings_are_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        how = Sampling(2048)
    finally:
        torch.set_default_dtype(torch.float32)
    assert how.temperature.dtype == how.tail.dtype == torch.float32


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])                          # AttributeError: torch 2.8
def test_a_kernel_that_does_not_compile_is_not_used(error, monkeypatch):
    """On a GPU that seems to have all it takes."""
    model, heads, gpu = pretended(monkeypatch)
    talker = SimpleNamespace(model=model, codec_head=heads[0], device=SimpleNamespace(type="cuda"),
                             dtype=torch.bfloat16, config=model.config,
                             code_predictor=SimpleNamespace(model=model, lm_head=heads * 15))
    monkeypatch.setattr(paths, "compiled", lambda *_, **sizes: None)
    assert paths.choose_path(talker, None) == (True, "fused layers")

    def refuse(*_, **sizes):
        raise error("Kernel compilation failed:\nno such instruction")
    monkeypatch.setattr(paths, "compiled", refuse)
    used, words = paths.choose_path(talker, None)
    assert not used and "no such instruction" in words and "\n" not in words
    with pytest.raises(ValueError, match="no such instruction"):
        paths.choose_path(talker, True)
    gpu.multi_processor_count = 30
    assert "30 multiprocessors" in paths.why_not(talker)
