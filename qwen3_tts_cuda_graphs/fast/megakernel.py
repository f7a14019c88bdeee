"""The decoder layers, heads and sampling of 1 to 16 rows as one kernel per step: megakernel.cu, compiled by
NVRTC for this GPU and model.

`TalkerStep` and `PredictorStep` are called or captured in place of the `step` of TalkerGraph and PredictorGraph. They
work on the same weights and the same `Rows`, so nothing around them changes. The layers must have been through
`replace_layers` (fast/layers.py): q, k and v are one matrix in memory, and `rotary_emb` returns cos and sin with the
first half of sin negated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import nvrtc
from qwen3_tts_cuda_graphs.fast.batched import SAMPLE_FIELDS, SAMPLING_FIELDS, StackLayer, sampling_values
from qwen3_tts_cuda_graphs.fast.kernels import CudaSource, kernel_argument, kernel_arguments
from qwen3_tts_cuda_graphs.fast.layer_kernels import layer_sizes
from qwen3_tts_cuda_graphs.fast.layers import rope_tables

KERNEL_NAME = "decode_step"

# As in megakernel.cu. The compiler checks them, or values that depend on them.
CONSUMERS = 256
MMA_TOKENS = 4

# The values of `failed`: what a thread still waited for WAIT_LIMIT_NS after the start of the launch.
WAITED_FOR = {
    1: "a thread block has waited for another one for 2 s",
    2: "a thread block has waited for its weights for 2 s",
    3: "a thread block has waited for room for its weights for 2 s",
}

# Fields of the kernel's structs, in order, and the types of its arguments. The compiler checks names and order.
MATRIX_FIELDS = ("address", "rows", "row_bytes")
LAYER_FIELDS = ("input_norm", "post_norm", "q_norm", "k_norm", "keys", "values")
COMMON_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("matrices", "layers"), torch.long),
    "cache_length": int,
    **dict.fromkeys(("final_norm", "cos", "sin"), torch.bfloat16),
    **dict.fromkeys(("exchange", "epoch", "failed", "failed_on_host"), torch.int32),
    "advance": torch.bool,
    **{name: SAMPLE_FIELDS[name] for name in (*SAMPLING_FIELDS, "noise")},
    **dict.fromkeys(("token", "frame"), torch.long),
    **dict.fromkeys(("hidden", "embedding"), torch.bfloat16),
}
TALKER_ARGUMENTS: dict[str, Any] = {
    "prompt_length": torch.long,
    **dict.fromkeys(("seen", "suppressed"), torch.bool),
    "repetition_penalty": torch.float32,
    **dict.fromkeys(("end_token", "min_tokens"), torch.long),
    "ended": torch.bool,
}
PREDICTOR_ARGUMENTS: dict[str, Any] = {
    "first_input": torch.bfloat16,
    **dict.fromkeys(("code_inputs", "code_embeddings"), torch.long),
    "frames": int,
    "text": torch.bfloat16,
    "codes": torch.long,
}


@dataclass(frozen=True)
class Sizes:
    """The constants that megakernel.cu is compiled with, there in capitals."""

    grid: int  # thread blocks
    shared_bytes: int  # shared memory of a block
    l2_bytes: int
    bulk_copies: int  # 1: copies of whole rows, from compute capability 9.0 on; 0: of 16 bytes
    exchange_bytes: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    codes: int  # heads after the layers: 1 for the talker, 15 for the predictor
    talker_hidden: int  # width of the talker's hidden state
    epsilon: str
    rows: int  # of a frame: 1, 2, 4, 8 or 16

    @property
    def first_positions(self) -> int:
        """Positions of a row in the predictor's first pass: two, unless they are too many tokens for one pass."""
        return 2 if self.codes > 1 and 2 * self.rows <= MMA_TOKENS else 1

    @property
    def replicas(self) -> int:
        """Copies of what the blocks exchange."""
        return 4 if self.rows <= MMA_TOKENS else 1

    @property
    def producers(self) -> int:
        """Threads of a block that copy weights."""
        return 8 if self.bulk_copies else 32

    @property
    def threads(self) -> int:
        return CONSUMERS + self.producers

    @property
    def activation_fields(self) -> dict[str, int]:
        """Fields of the kernel's Activations, and their lengths. In `exchange` the first token's follow the logits."""
        query_size = self.heads * self.head_dim
        qkv_size = query_size + 2 * self.kv_heads * self.head_dim
        return dict(
            hidden=self.hidden, post_attention=self.hidden, qkv=qkv_size, attention=query_size, inner=self.inner
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return COMMON_ARGUMENTS | (TALKER_ARGUMENTS if self.codes == 1 else PREDICTOR_ARGUMENTS)


def choose_grid(matrices: Sequence[tuple[int, int]], multiprocessors: int) -> int:
    """Thread blocks for matrices of (rows, columns): the fewest that minimize the work of the busiest block.

    All blocks must be on the GPU at once, and each takes a whole multiprocessor. Rows are assigned in groups of 8.
    """

    def work_of_busiest(grid: int) -> int:
        return sum(-(-rows // (8 * grid)) * columns for rows, columns in matrices)

    return min(range(8, max(8, min(128, multiprocessors)) + 1), key=work_of_busiest)


class Stack(NamedTuple):
    """What a step runs, for a frame of `row_count` rows."""

    model: Any  # decoder layers
    heads: Sequence[Any]  # linear layers after them
    talker_hidden: int
    row_count: int = 1

    @property
    def device(self) -> torch.device:
        return self.model.device


def stacks_of(talker: Any, row_count: int = 1) -> list[Stack]:
    """The stacks of upstream's talker and of its code predictor."""
    predictor = talker.code_predictor
    hidden_size = talker.config.hidden_size
    return [
        Stack(talker.model, [talker.codec_head], hidden_size, row_count),
        Stack(predictor.model, list(predictor.lm_head), hidden_size, row_count),
    ]


def kernel_sizes(stack: Stack, gpu: Any = None) -> Sizes:
    """The sizes for a GPU, by default the stack's own."""
    model, heads, talker_hidden, row_count = stack
    gpu = gpu or nvrtc.gpu_properties(model.device)
    config = model.config
    hidden = config.hidden_size
    inner = config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_key_value_heads * config.head_dim
    layer = [(qkv_size, hidden), (hidden, query_size), (inner, hidden), (inner, hidden), (hidden, inner)]
    return Sizes(
        grid=choose_grid(layer, gpu.multi_processor_count),
        shared_bytes=gpu.shared_memory_per_block_optin,
        l2_bytes=gpu.L2_cache_size,
        bulk_copies=int(gpu.major >= 9),
        exchange_bytes=row_count << 20,
        layers=len(model.layers),
        vocab=len(heads[0].weight),
        codes=len(heads),
        talker_hidden=talker_hidden,
        rows=row_count,
        **layer_sizes(config),
    )


def needs_of(stack: Stack) -> dict[str, bool]:
    gpu = nvrtc.gpu_properties(stack.device)
    shared_kib = gpu.shared_memory_per_block_optin >> 10
    return {
        f"bfloat16, the weights are {stack.model.dtype}": stack.model.dtype == torch.bfloat16,
        f"8 multiprocessors, the GPU has {gpu.multi_processor_count}": gpu.multi_processor_count >= 8,
        f"99 KiB of shared memory per block, the GPU has {shared_kib}": shared_kib >= 99,
    }


def structs_of(sizes: Sizes) -> dict[str, Iterable[str]]:
    return dict(Matrix=MATRIX_FIELDS, Layer=LAYER_FIELDS, Arguments=sizes.arguments)


def checks_of(sizes: Sizes) -> str:
    """C++ assertions that megakernel.cu has the same constants and offsets."""
    checks = ""
    offset = 0
    for name, length in sizes.activation_fields.items() if sizes.rows == 1 else ():
        message = f"megakernel.py reads Activations::{name}"
        checks += f'static_assert(OFFSET_OF(Activations, {name}) == {offset}, "{message}");\n'
        offset += 4 * length
    constants = dict(CONSUMERS=CONSUMERS, PRODUCERS=sizes.producers, REPLICAS=sizes.replicas)
    constants["FIRST_POSITIONS"] = sizes.first_positions
    for name, value in constants.items():
        checks += f'static_assert({name} == {value}, "megakernel.py has {name} = {value}");\n'
    return checks


SOURCE = CudaSource(Path(__file__).with_suffix(".cu"), [KERNEL_NAME], kernel_sizes, needs_of, structs_of, checks_of)


def table(structs: Sequence[Sequence[Tensor | int]], device: torch.device) -> Tensor:
    """Numbers and addresses of weights as 8 bytes each, for the kernel to read: an array of structs."""

    def field(value: Tensor | int) -> int:
        return kernel_argument("a table", value, value.dtype if isinstance(value, Tensor) else int)

    return torch.tensor([[field(value) for value in struct] for struct in structs], dtype=torch.long, device=device)


class FusedStep:
    """One step of a stack as one launch, to be called or captured.

    The talker has one head; the predictor has 15 and runs its layers before each of them. Only rows with `advance`
    change.
    """

    name = "the megakernel"

    def __init__(
        self, stack: Stack, rows: Any, cache: Sequence[Sequence[Tensor]], arguments: Mapping[str, Tensor | int]
    ) -> None:
        """
        rows: SharedRows of 1, 2, 4, 8 or 16
        cache: keys and values of the stack, a tensor for each layer
        arguments: the kernel's arguments that differ between talker and predictor
        """
        model, device = stack.model, stack.device
        self.stack = stack
        self.cache = [*zip(*cache, strict=True)]  # (keys, values) of each layer
        sizes, self.kernels = SOURCE.compile(stack)
        self.sizes = sizes
        self.noise = arguments["noise"]  # (rows, heads, vocab)

        layers = [StackLayer(layer, *pair) for layer, pair in zip(model.layers, self.cache, strict=True)]
        matrices = self.matrices(layers, stack.heads)
        matrix_fields = [[matrix, len(matrix), matrix[0].nbytes] for matrix in matrices]  # as in MATRIX_FIELDS
        end_of_list = [0] * len(MATRIX_FIELDS)
        length = cache[0][0].shape[-2]
        cos, sin = rope_tables(model, length)
        self.exchange = torch.full((sizes.replicas * sizes.exchange_bytes // 4,), -1, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self.failed_on_host = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        fields_by_name: dict[str, Tensor | int] = {
            "matrices": table([*matrix_fields, end_of_list], device),
            "layers": table([[getattr(layer, name) for name in LAYER_FIELDS] for layer in layers], device),
            "cache_length": length,
            "final_norm": model.norm.weight,
            "cos": cos,
            "sin": sin,
            "exchange": self.exchange,
            "epoch": torch.zeros(1, dtype=torch.int32, device=device),
            "failed": self.failed,
            "failed_on_host": self.failed_on_host,
            **{name: getattr(rows, name) for name in ("advance", "token", "frame", "hidden", "embedding")},
            **arguments,
        }
        self.fields = kernel_arguments(KERNEL_NAME, sizes.arguments, fields_by_name)
        self.keepalive: list[Any] = [fields_by_name, matrices, layers]  # the kernel knows only their addresses

    def matrices(self, layers: Sequence[StackLayer], heads: Sequence[Any]) -> list[Tensor]:
        """In the order of their use."""
        of_layers = []
        for layer in layers:
            of_layers += [layer.qkv, layer.output, *layer.gate_up.chunk(2), layer.down]
        has_pass_without_head = self.sizes.codes > 1 and self.sizes.first_positions == 1
        matrices = [*of_layers] if has_pass_without_head else []
        for head in heads:
            matrices += [*of_layers, head.weight]
        return matrices

    def __call__(self) -> None:
        self.kernels.launch(KERNEL_NAME, (self.sizes.grid, 1), self.sizes.threads, self.fields, is_cooperative=True)

    def why_failed(self) -> str:
        """Why the kernel gave up, in a launch that has ended; empty if it did not."""
        return WAITED_FOR.get(int(self.failed_on_host), "")

    def logits(self) -> Tensor:
        """The logits of the last step, in the shape of the noise: (rows, heads, vocab). They are the first part of the
        exchange buffer, as bfloat16 in the lower half of each 32 bits."""
        return self.values(0, self.noise.numel()).view_as(self.noise)

    def exchanged(self) -> dict[str, Tensor]:
        """What the blocks sent each other about the first row in the last layer of the last pass, by the names
        in Activations."""
        values = {}
        start = self.noise.numel()
        for name, size in self.sizes.activation_fields.items():
            sent = self.values(start, size)
            in_order = sent.view(-1, 2, 2, 2).transpose(1, 2).flatten()  # see place_of in megakernel.cu
            values[name] = sent if name == "qkv" else in_order
            start += size
        return values

    def values(self, start: int, size: int) -> Tensor:
        return (self.exchange[start : start + size] << 16).view(torch.float32)


class TalkerStep(FusedStep):
    def __init__(self, talker: Any, rows: Any) -> None:
        """talker: upstream's"""
        stack = Stack(talker.model, [talker.codec_head], rows.hidden.shape[-1], len(rows.token))
        arguments = {name: getattr(rows, name) for name in TALKER_ARGUMENTS}
        arguments |= sampling_values(rows.sampling, rows.noise)
        super().__init__(stack, rows, (rows.keys, rows.values), arguments)


def embeddings_of(predictor: Any) -> list[Tensor]:
    """The embedding tables of a PredictorGraph: of the token and of each code."""
    return [predictor.embed_token.weight, *(embed.weight for embed in predictor.embed_code)]


def projected_embeddings(predictor: Any) -> list[Tensor]:
    """The predictor's input for every token and code: projected once, so that steps only look them up."""
    return [predictor.project(weight) for weight in embeddings_of(predictor)]


class PredictorStep(FusedStep):
    """Projects the talker's hidden state to the predictor's width, then launches the kernel."""

    def __init__(self, predictor: Any, inputs: Sequence[Tensor]) -> None:
        """predictor: a PredictorGraph; inputs: its projected_embeddings"""
        rows = predictor.rows
        self.project = predictor.project
        self.talker_hidden = rows.hidden
        self.first_input = self.project(self.talker_hidden)

        self.embeddings = embeddings_of(predictor)
        self.inputs = inputs
        arguments = {
            "first_input": self.first_input,
            "code_inputs": table([inputs], rows.hidden.device),
            "code_embeddings": table([self.embeddings], rows.hidden.device),
            "frames": rows.text.shape[1],
            "text": rows.text,
            "codes": rows.codes,
            **sampling_values(rows.code_sampling, rows.code_noise),
        }
        stack = Stack(predictor.model, list(predictor.heads), rows.hidden.shape[-1], len(rows.token))
        super().__init__(stack, rows, (rows.code_keys, rows.code_values), arguments)

    def __call__(self) -> None:
        if self.first_input is not self.talker_hidden:  # else the projection is the identity
            self.first_input.copy_(self.project(self.talker_hidden))
        super().__call__()
