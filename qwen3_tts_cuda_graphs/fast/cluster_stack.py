"""A stack of decoder layers for 32 or 64 rows as one launch, by clusters of thread blocks: cluster_stack.cu, on Hopper.

`ClusterStack` is a BatchedStack whose `forward` takes a token of each row. cuBLAS's products and the kernels between
them take several times as long as it takes to read the weights, as each begins when the one before has ended.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import batched, nvrtc
from qwen3_tts_cuda_graphs.fast.batched import SHORT_CACHE, BatchedStack
from qwen3_tts_cuda_graphs.fast.kernel_cache import warn_once
from qwen3_tts_cuda_graphs.fast.kernels import CudaSource, kernel_arguments, one_line
from qwen3_tts_cuda_graphs.fast.layer_kernels import layer_sizes
from qwen3_tts_cuda_graphs.fast.megakernel import LAYER_FIELDS, WAITED_FOR, table

KERNEL = "run_stack"
CLUSTER = 8  # blocks
CLUSTERS = 15  # that a GPU with 132 multiprocessors runs at once: they are in groups, some of which have less than 16
THREADS = 512
WARPS = THREADS // 32
SLAB = 64  # inputs of a matrix that are copied at once
SQUARES = 16  # sums of squares of a row: at least one for each cluster
EMPTY = -1  # in `exchanged`, what has not been written
ROWS = 32, 64
TESTED = 80  # positions of the test
MAX_DIFFERENCE = 0.2  # of the root mean square of a result. Right: up to 0.03; the faults that tests try: from 0.59

FIELDS: dict[str, Any] = {
    "matrices": torch.uint8,
    "layers": torch.long,
    "cache_length": int,
    **dict.fromkeys(("cos", "sin", "embeds"), torch.bfloat16),
    **dict.fromkeys(("tokens", "positions"), torch.long),
    "result": torch.bfloat16,
    **dict.fromkeys(("exchanged", "failed", "failed_on_host"), torch.int32),
}


class Subject(NamedTuple):
    """What the kernel is compiled for."""

    model: Any  # decoder layers
    rows: int
    is_short: bool  # whether its cache is

    @property
    def device(self) -> torch.device:
        return self.model.device


def subject_of(model: Any, keys: Sequence[Tensor], rows: int) -> Subject:
    return Subject(model, rows, is_short=keys[0].shape[2] <= SHORT_CACHE)


def kernel_sizes(subject: Subject) -> SimpleNamespace:
    model, rows, is_short = subject
    config = model.config
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    heads = config.num_attention_heads * config.head_dim
    pairs = -(-rows * config.num_key_value_heads // (CLUSTERS * CLUSTER))
    exchanged = qkv + heads + config.intermediate_size + 3 * (config.hidden_size + 2 * SQUARES)
    return SimpleNamespace(
        **layer_sizes(config),
        layers=len(model.layers),
        rows=rows,
        clusters=CLUSTERS,
        cluster=CLUSTER,
        threads=THREADS,
        slab=SLAB,
        squares=SQUARES,
        sharing_warps=1 if is_short else WARPS // pairs,
        shared_bytes=nvrtc.gpu_properties(model.device).shared_memory_per_block_optin,
        exchanged_bytes=2 * rows * exchanged,
    )


def needs_of(subject: Subject) -> dict[str, bool]:
    gpu = torch.cuda.get_device_properties(subject.device)
    config = subject.model.config
    return batched.needs_of(subject.model) | {
        f"compute capability 9.0, the GPU has {gpu.major}.{gpu.minor}": (gpu.major, gpu.minor) == (9, 0),
        f"132 multiprocessors, the GPU has {gpu.multi_processor_count}": gpu.multi_processor_count >= 132,
        f"32 or 64 rows, not {subject.rows}": subject.rows in ROWS,
        f"a hidden size of 1024, not {config.hidden_size}": config.hidden_size == 1024,
        f"an MLP of 3072, not {config.intermediate_size}": config.intermediate_size == 3072,
        "16 query heads and 8 KV heads": (config.num_attention_heads, config.num_key_value_heads) == (16, 8),
    }


def structs_of(_: Any) -> dict[str, Sequence[str]]:
    return dict(Layer=LAYER_FIELDS, RunStack=list(FIELDS))


SOURCE = CudaSource(
    Path(__file__).with_suffix(".cu"), [KERNEL], kernel_sizes, needs_of, structs_of, architecture_suffix="a"
)


class ClusterStack(BatchedStack):
    name = "the kernel for 32 and 64 rows"

    def __init__(self, model: Any, keys: Sequence[Tensor], values: Sequence[Tensor], rows: int, count: int):
        super().__init__(model, keys, values, count)
        self.cluster_sizes, self.cluster_kernels = SOURCE.compile(subject_of(model, keys, rows))
        tiles = CLUSTERS * CLUSTER // 4
        maps = [
            tensor_map(*matrix)
            for layer in self.layers
            for matrix in (
                (layer.qkv, tiles),
                (layer.output, CLUSTERS),
                (layer.gate_up, tiles, 2),
                (layer.down, CLUSTERS),
            )
        ]
        layers = [[getattr(layer, name) for name in LAYER_FIELDS] for layer in self.layers]
        with model.device:
            exchanged = torch.full((self.cluster_sizes.exchanged_bytes // 4,), EMPTY, dtype=torch.int32)
            failed = torch.zeros(1, dtype=torch.int32)
        self.arguments = dict(
            matrices=torch.stack(maps).to(model.device),
            layers=table(layers, model.device),
            cache_length=self.cache_length,
            cos=self.cos,
            sin=self.sin,
            exchanged=exchanged,
            failed=failed,
            failed_on_host=torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=model.device.type == "cuda"),
        )

    def forward(
        self, embeds: Tensor, positions: Tensor, row_indices: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor:
        """As BatchedStack's, which computes all passes but those of a token of each row."""
        if row_indices is not None or len(positions) != self.cluster_sizes.rows:
            return super().forward(embeds, positions, row_indices, tokens)
        result = embeds.new_empty(len(positions), self.sizes.hidden)
        values = self.arguments | dict(embeds=embeds, tokens=tokens, positions=positions, result=result)
        fields = kernel_arguments(KERNEL, FIELDS, values)
        self.cluster_kernels.launch(KERNEL, (CLUSTERS * CLUSTER, 1), THREADS, fields, is_cooperative=True)
        return self.norm(result, self.final_norm)

    def why_failed(self) -> str:
        return WAITED_FOR.get(int(self.arguments["failed_on_host"]), "")

    @torch.no_grad()
    def why_wrong(self) -> str:
        """What is wrong with it on this GPU and with these weights; empty if nothing is. The cache stays as it is.

        Random tokens at random positions are compared with what the other kernels compute, over a random cache.
        """
        count = self.cluster_sizes.rows
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=self.final_norm.dtype)

        cached = [tensor[:count, :, :TESTED] for layer in self.layers for tensor in (layer.keys, layer.values)]
        before = [tensor.clone() for tensor in cached]
        filled = [random(*tensor.shape) for tensor in cached]
        positions = torch.randint(cached[0].shape[2], (count,), generator=generator, device=self.device)
        embeds = random(count, self.sizes.hidden)
        results = []
        for forward in (self.forward, super().forward):
            torch._foreach_copy_(cached, filled)
            hidden = forward(embeds, positions)
            results.append([hidden, *(tensor[self.row_indices[:count], :, positions] for tensor in cached)])
            torch.cuda.synchronize(self.device)
            if reason := self.why_failed():
                break
        torch._foreach_copy_(cached, before)
        return reason or difference_of(*results)


def difference_of(found: Sequence[Tensor], expected: Sequence[Tensor], limit: float = MAX_DIFFERENCE) -> str:
    """How hidden states, and new keys and values of each layer, differ; empty if by no more than roundings do."""
    distance = torch.stack([(a.float() - b.float()).square().mean().sqrt() for a, b in zip(found, expected)])
    size = torch.stack([b.float().square().mean().sqrt() for b in expected])
    worst = float((distance / size).max())
    return "" if worst <= limit else f"its results are {worst:.2f} times their size away from those of the others"


def make_stack(
    model: Any, keys: Sequence[Tensor], values: Sequence[Tensor], rows: int, count: int, may_wait: bool
) -> BatchedStack:
    """For a token of each row, and passes of up to `count` tokens: a ClusterStack, tested, where it runs.

    may_wait: whether its thread blocks may wait for each other
    """
    if may_wait and not SOURCE.why_not(subject_of(model, keys, rows)):
        try:
            stack = ClusterStack(model, keys, values, rows, count)
            reason = stack.why_wrong()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # not all blocks fit on this GPU at once, for instance
            reason = one_line(error)
        if not reason:
            return stack
        warn_once("%s is not used: %s", ClusterStack.name, reason)
    return BatchedStack(model, keys, values, count)


def compile_ahead(talker: Any, row_counts: Sequence[int], cache_length: int) -> None:
    for count in set(row_counts) & set(ROWS):
        SOURCE.compile_ahead(Subject(talker.code_predictor.model, count, is_short=True))
        SOURCE.compile_ahead(Subject(talker.model, count, is_short=cache_length <= SHORT_CACHE))


def tensor_map(matrix: Tensor, tiles: int, halves: int = 1) -> Tensor:
    """What the GPU needs to know to copy boxes of a matrix into lines of 128 bytes, swizzled: CUtensorMap, 128 bytes.

    A box is a tile of the outputs times SLAB inputs. Of two halves it has eight outputs each in turn.
    """
    BFLOAT16, NO_INTERLEAVE, SWIZZLE_128B, L2_256B, NO_FILL = 9, 0, 3, 3, 0
    outputs, inputs = matrix.shape
    groups = outputs // (8 * halves)
    line = matrix.stride(0) * matrix.element_size()
    buffer = (ctypes.c_uint8 * 192)()
    offset = -ctypes.addressof(buffer) % 64
    nvrtc.call_driver(
        "cuTensorMapEncodeTiled",
        ctypes.byref(buffer, offset),
        BFLOAT16,
        4,
        ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 4)(inputs, 8, halves, groups),
        (ctypes.c_uint64 * 3)(line, outputs // halves * line, 8 * line),
        (ctypes.c_uint32 * 4)(SLAB, 8, halves, -(-groups // tiles)),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128B,
        L2_256B,
        NO_FILL,
    )
    return torch.frombuffer(bytearray(bytes(buffer)[offset : offset + 128]), dtype=torch.uint8)
