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
from gpu_on_cpu import build
from sanitize import number, some_predictor, some_talker
from test_fused_layers import reference_choice, use_wrong_angles

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
LENGTH, HIDDEN = 40, 1024
NEAR = 0.1                                                        # bfloat16 alone is 0.05 off, of values of about 1


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """Step launches its kernel on 16 blocks of fibers."""
    torch.manual_seed(0)
    libraries, sizes_of = [], fused_layers.sizes_of

    def compiled(_, **sizes):
        folder = tmp_path / str(len(libraries))
        folder.mkdir()
        libraries.append(build(fused_layers.source(sizes), folder))
        return SimpleNamespace(func=libraries[-1])

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


def error_at(it, position):
    """Runs a talker's step; the largest error of the hidden state, the logits and the caches."""
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
    it = some_talker(HIDDEN, LENGTH)
    for position, top_k, top_p in ((0, 50, 0.2), (17, 1, 1.0), (LENGTH - 1, 50, 0.2)):
        it.how.set(True, 5.0, top_k, top_p)                       # hot: one candidate too many is often chosen
        seen = it.seen.clone()
        assert error_at(it, position) < NEAR
        scores = it.step.logits()
        scores = torch.where(seen, torch.where(scores < 0, scores * 1.5, scores / 1.5), scores)
        scores[:, 2150] = float("-inf")                           # too early to end
        scores = scores.masked_fill(it.suppressed, float("-inf"))
        assert it.graph.token == reference_choice(scores, it.how, it.step.noise, monkeypatch)
        assert it.graph.frame == 1 and it.lengths == 99
        seen[it.graph.token] = True
        assert torch.equal(it.seen, seen)


@torch.no_grad()
def test_a_wrong_kernel_is_seen(cpu, monkeypatch):
    use_wrong_angles(monkeypatch)
    assert error_at(some_talker(HIDDEN, LENGTH), 17) > 5 * NEAR


@torch.no_grad()
def test_a_frames_codes(cpu, monkeypatch):
    graph = SimpleNamespace(token=number(5), frame=number(3), hidden=torch.randn(2048).bfloat16(),         # it is wider
                            embedding=torch.zeros(2048).bfloat16())
    it = some_predictor(graph, 1, LENGTH)
    it.step()
    codes, cached = it.codes[3], [(layer.keys.float(), layer.values.float()) for layer in it.cache.layers]
    assert codes[0] == 5
    assert torch.equal(codes[1:], reference_choice(it.step.logits(), it.how, it.step.noise, monkeypatch))
    forward(it.model, cached, it.first.float(), 0)
    for i, (head, code) in enumerate(zip(it.heads, codes)):
        logits = times(forward(it.model, cached, it.inputs[i][code].float(), i + 1), head)
        assert (it.step.logits()[i] - logits).abs().max() < NEAR
    summed = sum(weight[code].float() for weight, code in zip(it.embeddings, codes)).bfloat16()
    assert torch.equal(graph.embedding, summed + it.text[3]) and torch.equal(it.hiddens[3], graph.hidden)
