"""A short run of the fused kernel on small stacks of the published widths, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py
"""
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from cudagraph_talker import Sampling
from fused_layers import Step, table

SIZES = (1024, 3072), (2048, 6144)


def linear(*shape):
    return Namespace(weight=torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5)


def stack(layers, hidden, inner, length):
    config = Namespace(hidden_size=hidden, intermediate_size=inner, num_attention_heads=16, num_key_value_heads=8,
                       rms_norm_eps=1e-6)
    model = Namespace(config=config, device=torch.device("cuda", 0), dtype=torch.bfloat16, layers=[],
                      norm=linear(hidden), rotary_emb=lambda *_: torch.randn(2, length, 128, device="cuda").bfloat16())
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


def main():
    with torch.device("cuda", 0):
        for hidden, inner in SIZES:
            length, how = 80, Sampling(3072)
            how.set(True, 0.9, 50, 0.8)
            number = lambda n: torch.full((1,), n)                                                        # noqa: E731
            graph = Namespace(token=number(5), frame=number(0), hidden=linear(hidden).weight,
                              embedding=linear(hidden).weight)
            start, lengths = number(0), number(99)
            layers, heads = stack(2, hidden, inner, length), [linear(3072, hidden)]
            talker = Step(*layers, heads, hidden, how, graph, [
                start, torch.zeros(3072, dtype=torch.bool), torch.zeros(3072, dtype=torch.bool), torch.tensor(1.05),
                number(2150), number(2), lengths, lengths.cpu().pin_memory()])
            for position in (0, 17, length - 1):                  # the last row of the cache
                start.fill_(position), graph.frame.zero_()
                talker()
            how, embeddings = Sampling(2048), [linear(n, hidden).weight for n in (3072, 2048, 2048, 2048)]
            how.set(True, 0.9, 50, 0.8)
            inputs = [linear(len(weight), 1024).weight for weight in embeddings]
            codes = torch.zeros(length, 4, dtype=torch.long)
            few_layers, few_heads = stack(2, 1024, 3072, 16), [linear(2048, 1024) for _ in "123"]
            predictor = Step(*few_layers, few_heads, hidden, how, graph, [
                linear(1024).weight, table([inputs], "cuda"), table([embeddings], "cuda"),
                linear(length, hidden).weight, linear(length, hidden).weight, codes])
            for frame in (0, length - 1):
                graph.frame.fill_(frame)
                predictor()
            torch.cuda.synchronize()
            print(hidden, graph.token.item(), codes[[0, -1]].tolist(), torch.isfinite(graph.embedding).all().item())


if __name__ == "__main__":
    main()
