"""The decoder layers of one row as one kernel a step: fused_layers.cu, compiled on loading for this GPU and model.

`talker_step` and `predictor_step` make what the two graphs capture in place of their own `step`. The kernel uses the
model's own weights, the same StaticCache and the same static tensors, so nothing around it changes.
"""
import ctypes
import functools
import sys
from pathlib import Path
from unittest import mock

import torch

SOURCE = Path(__file__).with_suffix(".cu")
WARPS, HEADS, KV_HEADS, HEAD, COPIES, STAGE = 8, 16, 8, 128, 4, 8 * (2048 + 64)        # as in fused_layers.cu


def choose_path(talker, wanted):
    """Whether to use the fused layers, and words that say so. `wanted`: True, False, or None for wherever they run."""
    reason = "not wanted" if wanted is False else why_not(talker)
    if wanted and reason:
        raise ValueError(f"fused=True is impossible here: {reason}")
    return not reason, f"reference path, no fused layers: {reason}" if reason else "fused layers"


def why_not(talker):
    """What keeps this model on this machine from the fused layers; empty if nothing does."""
    if talker.device.type != "cuda" or torch.version.hip:
        return "the model is not on an NVIDIA GPU"
    if talker.dtype != torch.bfloat16:
        return f"the weights are {talker.dtype}, not bfloat16"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} is older than 2.9"
    if (capability := torch.cuda.get_device_capability(talker.device)) < (9, 0):
        return f"the GPU's compute capability is {'.'.join(map(str, capability))}, below 9.0"
    if (count := torch.cuda.get_device_properties(talker.device).multi_processor_count) < 64:
        return f"the GPU has {count} multiprocessors, fewer than 64"
    predictor = talker.code_predictor
    for model, heads in ((talker.model, [talker.codec_head]), (predictor.model, predictor.lm_head)):
        config, vocab = model.config, len(heads[0].weight)
        if (config.num_attention_heads, config.num_key_value_heads, config.head_dim) != (HEADS, KV_HEADS, HEAD) or (
                vocab > 4096 or any(size % 1024 for size in (config.hidden_size, config.intermediate_size, vocab))):
            return "the model's sizes are none that the kernel knows"
        try:
            compiled(source(sizes_of(model, heads, talker.config.hidden_size)), model.device)
        except (RuntimeError, OSError) as error:
            return f"the kernel cannot be compiled: {' '.join(str(error).split())[:200]}"
    return ""


def sizes_of(model, heads, width):
    config, gpu = model.config, torch.cuda.get_device_properties(model.device)
    memory = gpu.shared_memory_per_block_optin
    ring = memory - 40 * 1024 - 2 * (2 * config.hidden_size + config.intermediate_size)    # beside vectors and tables
    return dict(GRID=128 if gpu.multi_processor_count >= 128 else 64, MEMORY=memory, STAGES=ring // STAGE,
                LAYERS=len(model.layers), HIDDEN=config.hidden_size, INNER=config.intermediate_size, WIDTH=width,
                CODES=len(heads), VOCAB=len(heads[0].weight), EPSILON=f"{config.rms_norm_eps}f")


def source(sizes):
    return "".join(f"#define {name} {value}\n" for name, value in sizes.items()) + SOURCE.read_text()


@functools.cache
def compiled(source, device):
    """_compile_kernel looks for the headers of a CUDA toolkit, which need not be there: none is included."""
    from torch.utils import cpp_extension                         # slow to import, and not for every user
    with torch.cuda.device(device), mock.patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "."):
        return torch.cuda._compile_kernel(source, "step")


def table(rows, device):
    """Numbers and addresses of tensors, for the kernel to read."""
    rows = [[x.data_ptr() if torch.is_tensor(x) else x for x in row] for row in rows]
    return torch.tensor(rows, dtype=torch.long, device=device)


class Step:
    """`model` is a stack of decoder layers with its `cache`; `heads` come after it: one for the talker, 15 for the
    predictor, which runs its layers once more than that. `fields` are the last of the kernel's Arguments."""

    def __init__(self, model, cache, heads, how, graph, fields):
        sizes, self.device, length = sizes_of(model, heads, graph.hidden.shape[-1]), model.device, cache.max_cache_len
        self.grid, self.shared_memory, vocab = sizes["GRID"], sizes["MEMORY"], sizes["VOCAB"]
        vectors = 2 * sizes["HIDDEN"] + 2 * (HEADS + KV_HEADS) * HEAD + sizes["INNER"]
        self.kernel = compiled(source(sizes), self.device)
        with torch.cuda.device(self.device):
            self.kernel.set_shared_memory_config(self.shared_memory)
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
        shares = [(matrix[0], sum(part.nbytes for part in matrix) // (self.grid * WARPS)) for matrix in order]
        cos, sin = (x.reshape(length, HEAD).contiguous() for x in model.rotary_emb(
            torch.empty(0, dtype=model.dtype, device=self.device), torch.arange(length, device=self.device)[None]))
        splits = self.grid // KV_HEADS if len(heads) == 1 else 1
        with self.device:
            self.exchange = torch.zeros(
                COPIES, vectors + len(heads) * vocab + 2 * HEADS * splits * (HEAD + 1), dtype=torch.int32)
            self.noise, turn = torch.zeros(len(heads), vocab), torch.zeros(1, dtype=torch.int32)
        self.words = self.exchange[0, vectors:vectors + len(heads) * vocab].view(len(heads), vocab)
        self.uses = [table(shares + [(0, 0)], self.device),
                     table(layers, self.device), length, model.norm.weight, cos, sin, self.exchange, turn,
                     how.temperature, how.kth, how.tail, how.greedy, self.noise, graph.token, graph.frame, graph.hidden,
                     graph.embedding, *fields]
        self.arguments, self.before = table([self.uses], self.device), lambda: None

    def __call__(self):
        self.before()
        self.noise.exponential_()
        arguments = ctypes.c_void_p(self.arguments.data_ptr())
        error = self.driver.cuLaunchCooperativeKernel(
            self.kernel.func, self.grid, 1, 1, 32 * (WARPS + 1), 1, 1, self.shared_memory,
            ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
            (ctypes.c_void_p * 1)(ctypes.addressof(arguments)))
        if error:
            raise RuntimeError(f"the fused kernel was not launched: CUDA error {error}")

    def logits(self):
        """Of the last step, a row for each head."""
        return (self.words << 16).view(torch.float32)


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
