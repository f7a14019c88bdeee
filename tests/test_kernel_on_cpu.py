"""The fused kernel run on a CPU, against a few lines of torch, so that a wrong one is seen where there is no GPU, too.
Its blocks are few and its layers one or two, its widths those of the published models."""
import contextlib
import ctypes
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fused_layers
from cudagraph_talker import Sampling, sample
from fused_layers import Step, table
from gpu_on_cpu import build
from sanitize import linear, stack
from test_fused_layers import use_wrong_angles

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
LENGTH, HIDDEN, INNER = 40, 1024, 3072
NEAR = 0.1                                                        # bfloat16 alone is 0.05 off, of values of about 1


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """Step launches its kernel on 16 blocks of fibers."""
    libraries, sizes_of = [], fused_layers.sizes_of

    def compiled(source, _):
        folder = tmp_path / str(len(libraries))
        folder.mkdir()
        libraries.append(build(source, folder))
        return SimpleNamespace(func=libraries[-1], set_shared_memory_config=lambda _: None)

    def launch(run, grid, _y, _z, threads, _v, _w, memory, _stream, arguments):
        return run(ctypes.c_void_p.from_address(arguments[0]).value, grid, threads, memory)
    gpu = SimpleNamespace(multi_processor_count=64, shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(fused_layers, "compiled", compiled)
    monkeypatch.setattr(fused_layers, "sizes_of", lambda *given: sizes_of(*given) | {"GRID": 16})
    monkeypatch.setattr(fused_layers, "ctypes", SimpleNamespace(
        CDLL=lambda _: SimpleNamespace(cuLaunchCooperativeKernel=launch), c_void_p=ctypes.c_void_p,
        addressof=ctypes.addressof))


def number(n):
    return torch.full((1,), n)


def layers_of(count, length):
    """Norms around 1, and one rotary table for all."""
    model, cache = stack(count, HIDDEN, INNER, length)
    tables = torch.randn(2, length, 128).bfloat16()
    model.rotary_emb = lambda *_: tables
    for layer in model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm,
                     layer.self_attn.k_norm, model.norm):
            norm.weight.normal_()
    for layer in cache.layers:
        layer.keys.normal_(), layer.values.normal_()
    return model, cache


def norm(x, module):
    return F.rms_norm(x, x.shape[-1:], module.weight.float(), 1e-6)


def times(x, module):
    return x @ module.weight.float().T


def forward(model, cached, x, position):
    """One token in float32. `cached`: keys and values of each layer, (8, T, 128), written at the position."""
    cos, sin = (rows[position].float() for rows in model.rotary_emb())
    for layer, (keys, values) in zip(model.layers, cached):
        attn, mlp = layer.self_attn, layer.mlp
        q, k, v = (times(norm(x, layer.input_layernorm), proj).view(-1, 128) for proj in (
            attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = (y * cos + y.roll(64, -1) * sin for y in (norm(q, attn.q_norm), norm(k, attn.k_norm)))
        keys[:, position], values[:, position] = k, v
        scores = torch.einsum("ghd,gpd->ghp", q.view(8, 2, 128), keys[:, :position + 1]) * 128 ** -0.5
        heads = torch.einsum("ghp,gpd->ghd", scores.softmax(-1), values[:, :position + 1])
        x = x + times(heads.flatten(), attn.o_proj)
        y = norm(x, layer.post_attention_layernorm)
        x = x + times(F.silu(times(y, mlp.gate_proj)) * times(y, mlp.up_proj), mlp.down_proj)
    return norm(x, model.norm)


def chosen(scores, how, noise, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "exponential_", lambda tensor, generator=None: noise)
        return sample(scores, how)[:, 0]


def talker_step():
    torch.manual_seed(0)
    how, (model, cache), head = Sampling(3072), layers_of(2, LENGTH), linear(3072, HIDDEN)
    how.set(True, 0.9, 50, 0.8)
    graph = SimpleNamespace(token=number(0), frame=number(0), hidden=torch.zeros(HIDDEN).bfloat16(),
                            embedding=torch.randn(HIDDEN).bfloat16())
    start, suppressed, lengths = number(0), torch.rand(3072) < 0.3, number(99)
    seen = torch.rand(3072) < 0.3
    step = Step(model, cache, [head], how, graph, [
        start, seen, suppressed, torch.tensor(1.5), number(2150), number(2), lengths, lengths.clone()])
    return SimpleNamespace(**locals())


def error_at(it, position):
    """Runs a step; the largest error of the hidden state, the logits and the new row of the caches."""
    cached = [(layer.keys.float(), layer.values.float()) for layer in it.cache.layers]
    hidden = forward(it.model, cached, it.graph.embedding.float(), position)
    it.start.fill_(position), it.graph.frame.zero_()
    it.step()
    pairs = [(it.graph.hidden, hidden), (it.step.logits()[0], times(hidden, it.head))]
    for layer, (keys, values) in zip(it.cache.layers, cached):
        pairs += [(layer.keys, keys), (layer.values, values)]
    return max((ours.float() - theirs).abs().max() for ours, theirs in pairs)


@torch.no_grad()
def test_a_talkers_token(cpu, monkeypatch):
    it = talker_step()
    for position in (0, 17, LENGTH - 1):
        seen = it.seen.clone()
        assert error_at(it, position) < NEAR
        scores = it.step.logits()
        scores = torch.where(seen, torch.where(scores < 0, scores * 1.5, scores / 1.5), scores)
        scores[:, 2150] = float("-inf")                           # too early to end
        expected = chosen(scores.masked_fill(it.suppressed, float("-inf")), it.how, it.step.noise, monkeypatch)
        assert it.graph.token == expected and it.graph.frame == 1 and it.lengths == 99
        seen[it.graph.token] = True
        assert torch.equal(it.seen, seen)


@torch.no_grad()
def test_a_wrong_kernel_is_seen(cpu, monkeypatch):
    use_wrong_angles(monkeypatch)
    assert error_at(talker_step(), 17) > 5 * NEAR


@torch.no_grad()
def test_a_frames_codes(cpu, monkeypatch):
    torch.manual_seed(1)
    how, (model, cache), heads = Sampling(2048), layers_of(1, 16), [linear(2048, HIDDEN) for _ in "123"]
    how.set(True, 0.9, 50, 0.8)
    embeddings = [torch.randn(n, 2048).bfloat16() for n in (3072, 2048, 2048, 2048)]       # the talker is wider
    inputs = [torch.randn(len(weight), HIDDEN).bfloat16() for weight in embeddings]
    graph = SimpleNamespace(token=number(5), frame=number(3), hidden=torch.randn(2048).bfloat16(),
                            embedding=torch.zeros(2048).bfloat16())
    first, text, hiddens = (torch.randn(n).bfloat16() for n in (HIDDEN, (LENGTH, 2048), (LENGTH, 2048)))
    codes = torch.zeros(LENGTH, 4, dtype=torch.long)
    step = Step(model, cache, heads, how, graph, [
        first, table([inputs], "cpu"), table([embeddings], "cpu"), text, hiddens, codes])
    step()
    cached = [(layer.keys.float(), layer.values.float()) for layer in cache.layers]
    forward(model, cached, first.float(), 0)
    assert codes[3, 0] == 5 and torch.equal(codes[3, 1:], chosen(step.logits(), how, step.noise, monkeypatch))
    for i, (head, code) in enumerate(zip(heads, codes[3])):
        logits = times(forward(model, cached, inputs[i][code].float(), i + 1), head)
        assert (step.logits()[i] - logits).abs().max() < NEAR
    summed = sum(weight[code].float() for weight, code in zip(embeddings, codes[3])).bfloat16()
    assert torch.equal(graph.embedding, summed + text[3]) and torch.equal(hiddens[3], graph.hidden)
