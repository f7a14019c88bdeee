"""A short run of the fused kernel on small stacks of the published widths, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --plain

racecheck follows neither bulk copies nor one lane that arrives at a barrier for its warp: of the kernel as it is, it
reports every read of the ring, and no more than that. With --plain the ring is filled by ordinary stores and every
thread arrives for itself; all else is the same.
"""
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import fused_layers
from cudagraph_talker import Sampling
from fused_layers import Step, table

PLAIN = {
    "start(slot(threadIdx.x).empty);": "start(slot(threadIdx.x).empty, 256);",
    "start(u64 &barrier) { asm(\"mbarrier.init.shared.b64 [%0], 8;\" :: \"r\"(address(&barrier)) : \"memory\"); }":
        "start(u64 &barrier, int count = 8) { asm volatile(\"mbarrier.init.shared.b64 [%0], %1;\" :: "
        "\"r\"(address(&barrier)), \"r\"(count) : \"memory\"); }",
    "if (threadIdx.x % 32 == 0)\n                asm volatile": "asm volatile",
    "asm volatile(\"mbarrier.arrive.expect_tx.shared.b64 _, [%0], 2048; cp.async.bulk.shared::cluster.global\"":
        "for (int i = 0; i < 128; ++i) ((uint4 *)slot(n).rows[eighth])[i] = ((const uint4 *)from)[i];"
        "asm volatile(\"mbarrier.arrive.shared.b64 _, [%0];\"",
    "\".mbarrier::complete_tx::bytes.L2::cache_hint [%1], [%2], 2048, [%0], %3;\"": "",
}


def plain(source):
    for old, new in PLAIN.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def linear(*shape):
    """A matrix that keeps the variance of what it multiplies; anything else is of about 1."""
    return Namespace(weight=torch.randn(*shape, dtype=torch.bfloat16) * (shape[-1] ** -0.5 if len(shape) == 2 else 1))


def stack(layers, hidden, inner, length):
    config = Namespace(hidden_size=hidden, intermediate_size=inner, num_attention_heads=16, num_key_value_heads=8,
                       head_dim=128, rms_norm_eps=1e-6)
    angles = torch.randn(2, length, 128).bfloat16()
    model = Namespace(config=config, device=torch.get_default_device(), dtype=torch.bfloat16, layers=[],
                      norm=linear(hidden), rotary_emb=lambda *_: angles)
    cache = Namespace(max_cache_len=length, layers=[])
    for _ in range(layers):
        qkv = linear(4096, hidden).weight
        q, k, v = (Namespace(weight=weight) for weight in qkv.split([2048, 1024, 1024]))
        attn = Namespace(q_proj=q, k_proj=k, v_proj=v, o_proj=linear(hidden, 2048), q_norm=linear(128),
                         k_norm=linear(128))
        mlp = Namespace(gate_proj=linear(inner, hidden), up_proj=linear(inner, hidden), down_proj=linear(hidden, inner))
        model.layers.append(Namespace(self_attn=attn, mlp=mlp, input_layernorm=linear(hidden),
                                      post_attention_layernorm=linear(hidden)))
        cache.layers.append(Namespace(keys=linear(8, length, 128).weight, values=linear(8, length, 128).weight))
    return model, cache


def number(n):
    return torch.full((1,), n)


def sampling(vocab):
    how = Sampling(vocab)
    how.set(True, 0.9, 50, 0.2)                                   # so that most draws end elsewhere without top-p
    return how


def some_talker(hidden, length):
    """Two layers, their step and all that it works on."""
    how, (model, cache), head = sampling(3072), stack(2, hidden, 3 * hidden, length), linear(3072, hidden)
    graph = Namespace(token=number(5), frame=number(0), hidden=linear(hidden).weight, embedding=linear(hidden).weight)
    start, lengths, seen, suppressed = number(0), number(99), torch.rand(3072) < 0.7, torch.rand(3072) < 0.3
    step = Step(model, cache, [head], how, graph, [
        start, seen, suppressed, torch.tensor(1.5), number(2150), number(2), lengths, lengths.clone()])
    return Namespace(**locals())


def some_predictor(graph, layers, length):
    """Three heads for a talker's `graph`, their step and all that it works on."""
    width = len(graph.hidden)
    how, (model, cache), heads = sampling(2048), stack(layers, 1024, 3072, 16), [linear(2048, 1024) for _ in "123"]
    embeddings, inputs = ([torch.randn(n, size).bfloat16() for n in (3072, 2048, 2048, 2048)] for size in (width, 1024))
    first, text, hiddens = linear(1024).weight, *torch.randn(2, length, width).bfloat16()
    codes = torch.zeros(length, 4, dtype=torch.long)
    step = Step(model, cache, heads, how, graph, [
        first, *(table([weights], model.device) for weights in (inputs, embeddings)), text, hiddens, codes])
    return Namespace(**locals())


def main():
    with torch.device("cuda", 0):
        for hidden in (1024, 2048):
            length = 80
            talker = some_talker(hidden, length)
            graph, predictor = talker.graph, some_predictor(talker.graph, 2, length)
            for position in (0, 17, length - 1):                  # the last row of the cache
                talker.start.fill_(position), graph.frame.zero_()
                talker.step()
            for frame in (0, length - 1):
                graph.frame.fill_(frame)
                predictor.step()
            torch.cuda.synchronize()
            codes = predictor.codes
            assert torch.isfinite(graph.embedding).all() and codes[:, 1:].max() < 2048 and graph.token < 3072
            print(f"a talker {hidden} wide chose {graph.token.item()}, its predictor {codes[[0, -1]].tolist()}")


if __name__ == "__main__":
    if "--plain" in sys.argv:
        whole = fused_layers.source
        fused_layers.source = lambda sizes: plain(whole(sizes))
    main()
