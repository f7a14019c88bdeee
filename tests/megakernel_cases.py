"""Small stacks of decoder layers with random weights and the published widths, and their steps: for the tests
of the megakernel on a CPU and on a GPU, and for compute-sanitizer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from gpu_on_cpu import whole_source
from torch import Tensor

from cudagraph_talker import Sampling, apply_rules, sample
from qwen3_tts_cuda_graphs.fast import megakernel
from qwen3_tts_cuda_graphs.fast.megakernel import FusedStep, Sizes, Stack, table
from qwen3_tts_cuda_graphs.fast.rows import tensors_of, view_of

TALKER_VOCAB = 3072
CODE_VOCAB = 2048
END_TOKEN = 2150
REPETITION_PENALTY = 1.5

# Before the source: the kernel for compute-sanitizer's racecheck, see megakernel.cu
PLAIN_COPIES = "#define MEGAKERNEL_PLAIN_COPIES\n"

KernelFor = Callable[[Stack], tuple[Sizes, Any]]  # SOURCE.compile of megakernel.py, or one for the CPU


def linear(*shape: int) -> SimpleNamespace:
    """A matrix that keeps the variance of what it multiplies. Any other shape has values of about 1."""
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 1
    return SimpleNamespace(weight=torch.randn(*shape, dtype=torch.bfloat16) * scale)


def number(value: int) -> Tensor:
    return torch.full((1,), value)


def config(hidden: int, inner: int) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
    )


def stack(layers: int, hidden: int, inner: int, length: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Decoder layers with the attributes of upstream's, and their cache."""
    angles = torch.randn(2, length, 128).bfloat16()
    model = SimpleNamespace(
        config=config(hidden, inner),
        device=torch.get_default_device(),
        dtype=torch.bfloat16,
        layers=[],
        norm=linear(hidden),
        rotary_emb=lambda _, positions: angles[:, positions[0]],
    )
    cache = SimpleNamespace(length=length, layers=[])
    for _ in range(layers):
        qkv = linear(4096, hidden).weight
        q, k, v = (SimpleNamespace(weight=weight, bias=None) for weight in qkv.split([2048, 1024, 1024]))
        attention = SimpleNamespace(
            q_proj=q,
            k_proj=k,
            v_proj=v,
            o_proj=linear(hidden, 2048),
            q_norm=linear(128),
            k_norm=linear(128),
        )
        mlp = SimpleNamespace(
            gate_proj=linear(inner, hidden), up_proj=linear(inner, hidden), down_proj=linear(hidden, inner)
        )
        layer = SimpleNamespace(
            self_attn=attention,
            mlp=mlp,
            input_layernorm=linear(hidden),
            post_attention_layernorm=linear(hidden),
        )
        model.layers.append(layer)
        cached = SimpleNamespace(keys=linear(8, length, 128).weight, values=linear(8, length, 128).weight)
        cache.layers.append(cached)
    return model, cache


def sampling(vocab: int) -> Sampling:
    settings = Sampling(vocab, 1)
    settings.set(True, 0.9, 50, 0.2)  # top_p so low that without it most draws end elsewhere
    return settings


@dataclass
class SomeTalker:
    """A few layers, their step and all that it works on."""

    model: SimpleNamespace
    cache: SimpleNamespace
    head: SimpleNamespace
    sampling: Sampling
    graph: SimpleNamespace
    step: FusedStep

    def launch(self) -> None:
        """With new noise."""
        self.step.noise.exponential_()
        self.step()


def fused_step(kernel_for: KernelFor, stack: Stack, cache, settings, noise, graph, arguments) -> FusedStep:
    keys, values = zip(*((layer.keys, layer.values) for layer in cache.layers))
    return FusedStep(kernel_for(stack), stack, keys, values, settings, noise, graph, arguments)


def new_noise(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32).exponential_()


def some_talker(kernel_for: KernelFor, hidden: int, length: int, layers: int = 2) -> SomeTalker:
    settings = sampling(TALKER_VOCAB)
    model, cache = stack(layers, hidden, 3 * hidden, length)
    head = linear(TALKER_VOCAB, hidden)
    graph = SimpleNamespace(
        advance=torch.ones(1, dtype=torch.bool),
        token=number(5),
        frame=number(0),
        hidden=linear(hidden).weight,
        embedding=linear(hidden).weight,
        prompt_length=number(0),
        seen=torch.rand(TALKER_VOCAB) < 0.7,
        suppressed=torch.rand(TALKER_VOCAB) < 0.3,
        repetition_penalty=torch.tensor(REPETITION_PENALTY),
        end_token=number(END_TOKEN),
        min_tokens=number(2),
        ended=torch.zeros(1, dtype=torch.bool),
    )
    arguments = {name: getattr(graph, name) for name in megakernel.TALKER_ARGUMENTS}
    noise = new_noise(1, TALKER_VOCAB)
    step = fused_step(kernel_for, Stack(model, [head], hidden), cache, settings, noise, graph, arguments)
    return SomeTalker(model, cache, head, settings, graph, step)


@dataclass
class SomePredictor:
    """Three heads for a talker's graph, their step and all that it works on."""

    model: SimpleNamespace
    cache: SimpleNamespace
    heads: list[SimpleNamespace]
    sampling: Sampling
    embeddings: list[Tensor]
    inputs: list[Tensor]
    first_input: Tensor
    text: Tensor
    codes: Tensor
    graph: SimpleNamespace  # the talker's
    step: FusedStep = field(init=False)

    def make_step(self, kernel_for: KernelFor, noise: Tensor) -> None:
        arguments = {
            "first_input": self.first_input,
            "code_inputs": table([self.inputs], self.model.device),
            "code_embeddings": table([self.embeddings], self.model.device),
            "frames": self.text.shape[-2],
            "text": self.text,
            "codes": self.codes,
        }
        stack = Stack(self.model, self.heads, self.text.shape[-1], len(self.graph.token))
        self.step = fused_step(kernel_for, stack, self.cache, self.sampling, noise, self.graph, arguments)


def some_predictor(kernel_for: KernelFor, graph: SimpleNamespace, layers: int, length: int) -> SomePredictor:
    hidden = 1024
    talker_hidden = len(graph.hidden)
    model, cache = stack(layers, hidden, 3072, 16)
    vocabs = (TALKER_VOCAB, CODE_VOCAB, CODE_VOCAB, CODE_VOCAB)
    text = torch.randn(length, talker_hidden).bfloat16()
    predictor = SomePredictor(
        model=model,
        cache=cache,
        heads=[linear(CODE_VOCAB, hidden) for _ in range(3)],
        sampling=sampling(CODE_VOCAB),
        embeddings=[torch.randn(vocab, talker_hidden).bfloat16() for vocab in vocabs],
        inputs=[torch.randn(vocab, hidden).bfloat16() for vocab in vocabs],
        first_input=linear(hidden).weight,
        text=text,
        codes=torch.zeros(length, 4, dtype=torch.long),
        graph=graph,
    )
    predictor.make_step(kernel_for, new_noise(3, CODE_VOCAB))
    return predictor


def predictor_of_rows(single: SomePredictor, kernel_for: KernelFor, count: int) -> SomePredictor:
    """The same layers for several rows, each with another frame, temperature, text and noise."""
    hidden = single.model.config.hidden_size
    length, talker_hidden = single.text.shape
    graph = SimpleNamespace(
        advance=torch.ones(count, dtype=torch.bool),
        token=torch.arange(5, 5 + count),
        frame=torch.arange(count),
        hidden=torch.randn(count, talker_hidden).bfloat16(),
        embedding=torch.zeros(count, talker_hidden).bfloat16(),
    )
    layers = [
        SimpleNamespace(keys=layer.keys.repeat(count, 1, 1), values=layer.values.repeat(count, 1, 1))
        for layer in single.cache.layers
    ]
    settings = view_of(single.sampling, [0] * count)
    settings.temperature *= torch.arange(1, count + 1)[:, None]
    text = torch.randn(count, length, talker_hidden).bfloat16()
    several = replace(
        single,
        cache=SimpleNamespace(length=single.cache.length, layers=layers),
        sampling=settings,
        first_input=torch.randn(count, hidden).bfloat16(),
        text=text,
        codes=torch.zeros(count, length, len(single.heads) + 1, dtype=torch.long),
        graph=graph,
    )
    several.make_step(kernel_for, new_noise(count, len(single.heads), CODE_VOCAB))
    return several


def talker_of_rows(it: SomeTalker, kernel_for: KernelFor, count: int) -> SomeTalker:
    """The same layers for several rows, each at another position and with other settings. The second one of four
    does not advance."""

    def stacked(make: Callable[[int], Any]) -> Tensor:
        return torch.stack([torch.as_tensor(make(row)) for row in range(count)])

    hidden = it.model.config.hidden_size
    length = it.cache.length
    layers = [
        SimpleNamespace(keys=linear(count, 8, length, 128).weight, values=linear(count, 8, length, 128).weight)
        for _ in it.model.layers
    ]
    cache = SimpleNamespace(length=length, layers=layers)
    settings = view_of(sampling(TALKER_VOCAB), [0] * count)
    for row in range(count):
        own = sampling(TALKER_VOCAB)
        own.set(row != 3, 5.0 - row % 4, 50 - 10 * (row % 4), 1.0 - 0.2 * (row % 4))
        for all_rows, of_one in zip(tensors_of(settings), tensors_of(own)):
            all_rows[row] = of_one[0]
    graph = SimpleNamespace(
        advance=stacked(lambda row: row != 1 or count < 4),
        token=stacked(lambda row: 5 + row),
        frame=stacked(lambda row: row),
        hidden=linear(count, 1, hidden).weight,
        embedding=linear(count, 1, hidden).weight,
        prompt_length=stacked(lambda row: [0, 17, length - 9, 9][row % 4]),
        seen=torch.rand(count, TALKER_VOCAB) < 0.7,
        suppressed=torch.rand(count, TALKER_VOCAB) < 0.3,
        repetition_penalty=stacked(lambda row: 1.5 - 0.1 * row),
        end_token=stacked(lambda row: END_TOKEN + row),
        min_tokens=stacked(lambda row: 2),
        ended=torch.zeros(count, dtype=torch.bool),
    )
    arguments = {name: getattr(graph, name) for name in megakernel.TALKER_ARGUMENTS}
    noise = new_noise(count, 1, TALKER_VOCAB)
    stack = Stack(it.model, [it.head], hidden, count)
    step = fused_step(kernel_for, stack, cache, settings, noise, graph, arguments)
    return SomeTalker(it.model, cache, it.head, settings, graph, step)


def reference_choice(scores: Tensor, settings: Sampling, noise: Tensor, row: int = 0) -> Tensor:
    """The choices of `sample` with the settings of one row. (B, V), (B, V) -> (B)"""
    return sample(scores, view_of(settings, [row] * len(scores)), noise)[:, 0]


def talker_scores(logits: Tensor, seen: Tensor, suppressed: Tensor, penalty: float, forbidden: int | None) -> Tensor:
    """The talker's rules. `forbidden` is the end token as long as it would come too early."""
    suppressed = suppressed.clone()
    if forbidden is not None:
        suppressed[..., forbidden] = True
    return apply_rules(logits, seen, penalty, suppressed)


@dataclass(frozen=True)
class Fault:
    """A subtle mistake in megakernel.cu: text that is there once, what it becomes, and who finds it."""

    right: str
    wrong: str
    of_talker: bool  # which of the two stacks to compile it into
    found_by: str  # part of the self-test's reason


FAULTS = {
    "one rounding left out, of the norm": Fault(
        "return multiply(pack(y), weight);",
        "const auto w = unpack(weight);"
        "for (int i = 0; i < sizeof(Vector) / 2; ++i) { y.v[i] *= w.v[i]; }"
        "return pack(y);",
        True,
        "first keys",
    ),
    "one rounding left out, of silu": Fault("round_to_bf16(silu(gate))", "silu(gate)", False, "MLP"),
    "epsilon times ten": Fault("sum / HIDDEN + EPSILON", "sum / HIDDEN + 10 * EPSILON", True, "first keys"),
    "one key too few": Fault(
        "this_position <= position ? product", "this_position < position ? product", True, "attention"
    ),
    "a stale row": Fault(
        "if (cached_position < position) {", "if (cached_position < position - 1) {", True, "attention"
    ),
    "one of few keys left out": Fault(
        "score[g] = position_of(g) < position ?", "score[g] = position_of(g) < position - 1 ?", True, "attention"
    ),
    "the wrong KV head": Fault(
        "layer.values[place * QUADS + lane] =",
        "layer.values[(place ^ arguments.cache_length) * QUADS + lane] =",
        False,
        "first values",
    ),
    "RoPE of another position": Fault(
        "arguments.sin[position * QUADS + lane]", "arguments.sin[position / 2 * QUADS + lane]", True, "first keys"
    ),
    "one split is not merged": Fault(
        "const float weight = expf(log_sum - best);",
        "const float weight = split == 1 ? 0 : expf(log_sum - best);",
        True,
        "attention",
    ),
    "a middle layer without its MLP": Fault(
        "token, row, activated * up, epoch);",
        "token, row, layer == arguments.layers + LAYERS / 2 ? 0 : activated * up, epoch);",
        False,
        "logits of the codes",
    ),
    "the last layer adds nothing to the second token": Fault(
        "residual = round_to_bf16(residual + sum);",
        "residual = round_to_bf16(residual + (epoch % LAYERS || threadIdx.x < MAX_ROWS<HIDDEN> ? sum : 0));",
        False,
        "logits of the first predicted code",
    ),
    "top-k off by one": Fault("> sampling.topk_rank", ">= sampling.topk_rank", False, "of the codes"),
    "top-p left out": Fault(
        "if (sampling.one_minus_top_p > 0) {", "if (sampling.one_minus_top_p > 1) {", False, "of the codes"
    ),
    "penalty on the wrong sign": Fault(
        "score = score < 0 ? score", "score = score > 0 ? score", True, "of the first codes"
    ),
    "text one row late": Fault(
        "low_half(arguments.text[place])",
        "low_half(arguments.text[place - (frame > 0) * TALKER_HIDDEN])",
        False,
        "the text is wrong",
    ),
}


def changed_source(right: str, wrong: str) -> str:
    """megakernel.cu and its headers with another text in one place."""
    source = whole_source(megakernel)
    assert source.count(right) == 1, right
    return source.replace(right, wrong)


def faulty_source(name: str) -> str:
    """megakernel.cu with one of the faults."""
    return changed_source(FAULTS[name].right, FAULTS[name].wrong)
