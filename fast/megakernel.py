"""The decoder layers of one row as one kernel a step: fused_layers.cu, compiled on loading for this GPU and model.
The two graphs capture `talker_step` and `predictor_step` in place of their own `step`. The weights, the StaticCache and
the static tensors are the same, so nothing around it changes."""
import ctypes
import functools
import sys
from pathlib import Path
from unittest import mock

import torch

SOURCE = Path(__file__).with_suffix(".cu")
BLOCK, COPIES, EXCHANGE = 256 + 8, 4, 1 << 20                     # as in fused_layers.cu; 8 bring weights


def sizes_of(model, heads, width):
    config, gpu = model.config, torch.cuda.get_device_properties(model.device)
    return dict(GRID=128 if gpu.multi_processor_count >= 128 else 64, MEMORY=gpu.shared_memory_per_block_optin,
                EXCHANGE=EXCHANGE, LAYERS=len(model.layers), HIDDEN=config.hidden_size, INNER=config.intermediate_size,
                HEADS=config.num_attention_heads, KV_HEADS=config.num_key_value_heads, HEAD=config.head_dim,
                WIDTH=width, CODES=len(heads), VOCAB=len(heads[0].weight), EPSILON=f"{config.rms_norm_eps}f")


def source(sizes):
    return "".join(f"#define {name} {value}\n" for name, value in sizes.items()) + SOURCE.read_text()


@functools.cache
def compiled(device, **sizes):
    """_compile_kernel looks for the headers of a CUDA toolkit, which need not be there: none is included."""
    from torch.utils import cpp_extension                         # slow to import, and not for every user
    with torch.cuda.device(device), mock.patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "."):
        kernel = torch.cuda._compile_kernel(source(sizes), "step")
        kernel.set_shared_memory_config(sizes["MEMORY"])
    return kernel


def table(rows, device):
    """Numbers and addresses of tensors, for the kernel to read."""
    rows = [[x.data_ptr() if torch.is_tensor(x) else x for x in row] for row in rows]
    return torch.tensor(rows, dtype=torch.long, device=device)


class Step:
    """`model` is a stack of decoder layers with its `cache`; `heads` come after it: one for the talker, 15 for the
    predictor, which runs its layers once more than that. `fields` are the last of the kernel's Arguments."""

    def __init__(self, model, cache, heads, how, graph, fields):
        sizes, self.device, length = sizes_of(model, heads, graph.hidden.shape[-1]), model.device, cache.max_cache_len
        self.grid, self.memory, self.kernel = sizes["GRID"], sizes["MEMORY"], compiled(self.device, **sizes)
        self.driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        layers, matrices = [], []
        for layer, cached in zip(model.layers, cache.layers):
            attn, mlp = layer.self_attn, layer.mlp
            layers.append([layer.input_layernorm.weight, layer.post_attention_layernorm.weight, attn.q_norm.weight,
                           attn.k_norm.weight, cached.keys, cached.values])
            q, k, v = attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight
            assert (k.data_ptr(), v.data_ptr()) == (q.data_ptr() + q.nbytes, k.data_ptr() + k.nbytes)  # one matrix
            others = attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
            matrices += [(q, k, v), *((linear.weight,) for linear in others)]
        order = matrices * (len(heads) > 1) + [matrix for head in heads for matrix in (*matrices, (head.weight,))]
        shares = [(matrix[0], sum(part.nbytes for part in matrix) // (self.grid * 8)) for matrix in order]
        with self.device:
            cos, sin = model.rotary_emb(torch.empty(0, dtype=model.dtype), torch.arange(length)[None])
            self.exchange, turn = (torch.zeros(n, dtype=torch.int32) for n in (COPIES * EXCHANGE // 4, 1))
            self.noise = torch.zeros(len(heads), sizes["VOCAB"], dtype=torch.float32)
        self.uses = [table([*shares, (0, 0)], self.device), table(layers, self.device), length, model.norm.weight,
                     cos.contiguous(), sin.contiguous(), self.exchange, turn, how.temperature, how.kth, how.tail,
                     how.greedy, self.noise, graph.token, graph.frame, graph.hidden, graph.embedding, *fields]
        self.arguments, self.before = table([self.uses], self.device), lambda: None

    def __call__(self):
        self.before()
        self.noise.exponential_()
        arguments = ctypes.c_void_p(self.arguments.data_ptr())
        error = self.driver.cuLaunchCooperativeKernel(
            self.kernel.func, self.grid, 1, 1, BLOCK, 1, 1, self.memory,
            ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
            (ctypes.c_void_p * 1)(ctypes.addressof(arguments)))
        if error:
            raise RuntimeError(f"the fused kernel was not launched: CUDA error {error}")

    def logits(self):
        """Of the last step, a row for each head."""
        return (self.exchange[:self.noise.numel()] << 16).view(torch.float32).view_as(self.noise)


def talker_step(talker, graph):
    return Step(talker.model, graph.cache, [talker.codec_head], graph.sampling, graph, [
        graph.start, graph.seen, graph.suppressed, graph.repetition_penalty, graph.end_token, graph.min_tokens,
        graph.lengths, graph.lengths_on_host])


def predictor_step(predictor, graph):
    """`predictor` is the PredictorGraph to serve, `graph` its TalkerGraph. The projection in front of the predictor's
    layers is done once for all embeddings."""
    embeddings = [predictor.embed_token.weight, *(embed.weight for embed in predictor.embed_code)]
    inputs, first = [predictor.project(weight) for weight in embeddings], predictor.project(graph.hidden)
    step = Step(predictor.model, predictor.cache, [*predictor.heads], predictor.sampling, graph, [
        first, *(table([weights], graph.device) for weights in (inputs, embeddings)), predictor.text, predictor.hiddens,
        predictor.codes])
    step.inputs, step.before = inputs, lambda: first is graph.hidden or first.copy_(predictor.project(graph.hidden))
    return step
