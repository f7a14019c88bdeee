"""A stack of decoder layers for many rows, as kernels that overlap: overlapped_stack.cu, on Hopper.

`OverlappedStack` is a BatchedStack with a faster `forward` for one token of each row. Between cuBLAS's products and the
small kernels the memory idles, and each product waits for its first weights. Here a kernel's first weights are in
shared memory before the previous kernel has completed.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_tts_cuda_graphs.fast import batched, nvrtc
from qwen3_tts_cuda_graphs.fast.batched import BatchedStack
from qwen3_tts_cuda_graphs.fast.kernel_cache import warn_once
from qwen3_tts_cuda_graphs.fast.kernels import CudaSource, kernel_arguments, one_line
from qwen3_tts_cuda_graphs.fast.layer_kernels import layer_sizes

ROWS = 32, 64, 128
SLAB = 64  # inputs of a matrix that one step copies and multiplies
SPLITS = 4  # parts into which all products but gate_up split their inputs
ATTENTION_WARPS = 4
TILES_AHEAD = 2  # tiles of 16 positions that a warp copies ahead in attention
TESTED = 80  # positions of the cache in the test at load
MAX_DIFFERENCE = 0.2  # relative to a result's root mean square. Correct: up to 0.03; the faults in tests: 0.30 and more


class Tiling(NamedTuple):
    """How the blocks divide a product. The numbers of stages were found by measuring: they decide how many blocks fit
    on a multiprocessor, and so how early the next kernels begin to copy."""

    tile: int  # outputs of a block
    weight_stages: int  # steps whose weights are copied ahead
    x_stages: int  # steps whose activations are copied ahead
    parts: int = SPLITS  # into which the inputs are split; 1 for gates and ups, whose SiLU needs complete sums

    def shared_bytes(self, rows: int) -> int:
        slabs = 2 * SLAB * (self.weight_stages * self.tile + self.x_stages * rows)
        gated = self.tile * rows if self.parts == 1 else 16 * rows
        return whole_kilobytes(slabs + gated + 16 * (self.weight_stages + self.x_stages))

    @property
    def threads(self) -> int:
        return -(-self.tile // 64) * 128 + 64


PRODUCTS = "qkv", "output", "gate_up", "down"
TILINGS = {  # (hidden size, most rows) -> one Tiling for each of PRODUCTS
    (1024, 64): (Tiling(128, 4, 4), Tiling(64, 8, 8), Tiling(48, 8, 8, parts=1), Tiling(64, 12, 8)),
    (1024, 128): (Tiling(128, 4, 4), Tiling(64, 8, 4), Tiling(48, 8, 4, parts=1), Tiling(64, 8, 4)),
    (2048, 64): (Tiling(128, 4, 8), Tiling(64, 8, 8), Tiling(96, 8, 8, parts=1), Tiling(64, 12, 8)),
    (2048, 128): (Tiling(128, 4, 4), Tiling(64, 8, 4), Tiling(96, 6, 4, parts=1), Tiling(64, 10, 4)),
}
PRODUCT_FIELDS: dict[str, Any] = {"weights": torch.uint8, "x": torch.uint8, "result": torch.float32}
KERNELS: dict[str, dict[str, Any]] = {
    **{f"{name}_product": PRODUCT_FIELDS for name in PRODUCTS},
    "gate_up_product": PRODUCT_FIELDS | {"result": torch.bfloat16},
    "attention": {
        "sums": torch.float32,
        **dict.fromkeys(("q_norm", "k_norm", "cos", "sin"), torch.bfloat16),
        "positions": torch.long,
        "cache_length": int,
        **dict.fromkeys(("keys", "values", "heads"), torch.bfloat16),
    },
    "sum_and_norm": {
        "sums": torch.float32,
        **dict.fromkeys(("residual", "weight", "total", "x"), torch.bfloat16),
    },
}
STRUCTS = {"Product": "qkv_product", "Attention": "attention", "SumAndNorm": "sum_and_norm"}


class Subject(NamedTuple):
    """What the kernels are compiled for."""

    model: Any  # decoder layers
    rows: int

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def tilings(self) -> dict[str, Tiling]:
        return dict(zip(PRODUCTS, TILINGS[self.model.config.hidden_size, max(self.rows, 64)]))


def whole_kilobytes(size: int) -> int:
    return -(-size // 1024) * 1024


def kernel_sizes(subject: Subject) -> SimpleNamespace:
    sizes = layer_sizes(subject.model.config)
    of_tile = 2 * 2 * 16 * sizes["head_dim"]  # bytes of its keys and values
    attention = ATTENTION_WARPS * (TILES_AHEAD * of_tile + 10 * sizes["head_dim"]) + 16 * (ATTENTION_WARPS + 1)
    sizes |= dict(rows=subject.rows, slab=SLAB, splits=SPLITS, tiles_ahead=TILES_AHEAD)
    sizes |= dict(attention_shared_bytes=whole_kilobytes(attention))
    for name, tiling in subject.tilings.items():
        sizes |= {f"{name}_{field}": value for field, value in tiling._asdict().items()}
        sizes[f"{name}_shared_bytes"] = tiling.shared_bytes(subject.rows)
    most = max(value for name, value in sizes.items() if name.endswith("shared_bytes"))
    return SimpleNamespace(**sizes, shared_bytes=most)


def needs_of(subject: Subject) -> dict[str, bool]:
    gpu = torch.cuda.get_device_properties(subject.device)
    driver = nvrtc.driver_version()
    config = subject.model.config
    return batched.needs_of(subject.model) | {
        f"compute capability 9.0, the GPU has {gpu.major}.{gpu.minor}": (gpu.major, gpu.minor) == (9, 0),
        f"a driver for CUDA 12.3, this one is for {driver[0]}.{driver[1]}": driver >= (12, 3),  # for graphs of them
        f"32, 64 or 128 rows, not {subject.rows}": subject.rows in ROWS,
        f"a hidden size of 1024 or 2048, not {config.hidden_size}": (config.hidden_size, 64) in TILINGS,
        f"an MLP three times as wide, not of {config.intermediate_size}": (
            config.intermediate_size == 3 * config.hidden_size
        ),
        "16 query heads and 8 KV heads": (config.num_attention_heads, config.num_key_value_heads) == (16, 8),
    }


def structs_of(_: Any) -> dict[str, Sequence[str]]:
    return {struct: list(KERNELS[kernel]) for struct, kernel in STRUCTS.items()}


SOURCE = CudaSource(
    Path(__file__).with_suffix(".cu"), KERNELS, kernel_sizes, needs_of, structs_of, architecture_suffix="a"
)


class OverlappedStack(BatchedStack):
    name = "the kernels that overlap"

    def __init__(self, subject: Subject, keys: Sequence[Tensor], values: Sequence[Tensor], count: int):
        model, rows = subject
        super().__init__(model, keys, values, count)
        self.rows = rows
        self.tilings = subject.tilings
        self.own_sizes, self.own_kernels = SOURCE.compile(subject)
        sizes = self.sizes
        qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        with model.device:
            self.sums = torch.empty(SPLITS, rows, max(qkv, sizes.hidden))
            self.residual, self.x = torch.empty(2, rows, sizes.hidden, dtype=model.dtype)
            self.heads = torch.empty(rows, sizes.heads * sizes.head_dim, dtype=model.dtype)
            self.inner = torch.empty(rows, sizes.inner, dtype=model.dtype)
        inputs = dict(qkv=self.x, output=self.heads, gate_up=self.x, down=self.inner)
        maps = [tensor_map(inputs[name], 1) for name in PRODUCTS]
        for layer in self.layers:
            for name, tiling in self.tilings.items():
                weights = getattr(layer, name)
                maps.append(tensor_map(weights, len(weights) // tiling.tile, halves=2 if tiling.parts == 1 else 1))
        self.maps = torch.stack(maps).view(len(self.layers) + 1, len(PRODUCTS), -1).to(model.device)

    def forward(
        self, embeds: Tensor, positions: Tensor, row_indices: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor:
        """As in BatchedStack, which computes every pass that is not one token of each row."""
        if row_indices is not None or len(positions) != self.rows:
            return super().forward(embeds, positions, row_indices, tokens)
        residual = embeds if tokens is None else F.embedding(tokens, embeds)
        result = torch.empty_like(residual)
        self.launch_norm(residual, self.x, scale=None, residual=None, weight=self.layers[0].input_norm, sum=None)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        outputs = [self.x] * (len(self.layers) - 1) + [result]
        for i, (layer, next_norm, output) in enumerate(zip(self.layers, next_norms, outputs, strict=True)):
            self.multiply("qkv", i, self.sums)
            self.attend(layer, positions)
            self.multiply("output", i, self.sums)
            self.sum_and_norm(residual, layer.post_norm, self.x)
            residual = self.residual
            self.multiply("gate_up", i, self.inner)
            self.multiply("down", i, self.sums)
            self.sum_and_norm(residual, next_norm, output)
        return result

    def multiply(self, name: str, layer: int, result: Tensor) -> None:
        tiling, k = self.tilings[name], PRODUCTS.index(name)
        blocks = len(getattr(self.layers[layer], name)) // tiling.tile * tiling.parts
        fields = dict(weights=self.maps[1 + layer, k], x=self.maps[0, k], result=result)
        self.launch_overlapped(f"{name}_product", blocks, tiling.threads, tiling.shared_bytes(self.rows), **fields)

    def attend(self, layer: batched.StackLayer, positions: Tensor) -> None:
        self.launch_overlapped(
            "attention",
            self.rows * self.sizes.kv_heads,
            32 * ATTENTION_WARPS,
            self.own_sizes.attention_shared_bytes,
            sums=self.sums,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            cos=self.cos,
            sin=self.sin,
            positions=positions,
            cache_length=self.cache_length,
            keys=layer.keys,
            values=layer.values,
            heads=self.heads,
        )

    def sum_and_norm(self, residual: Tensor, weight: Tensor, x: Tensor) -> None:
        threads = self.sizes.hidden // 4
        values = dict(sums=self.sums, residual=residual, weight=weight, total=self.residual, x=x)
        self.launch_overlapped("sum_and_norm", self.rows, threads, threads // 8, **values)

    def launch_overlapped(self, kernel: str, blocks: int, threads: int, shared_bytes: int, **values: Any) -> None:
        fields = kernel_arguments(kernel, KERNELS[kernel], values)
        self.own_kernels.launch(kernel, (blocks, 1), threads, fields, shared_bytes=shared_bytes, overlaps=True)

    @torch.no_grad()
    def why_wrong(self) -> str:
        """Compare random tokens at random positions, over a random cache, with the results of BatchedStack.

        Returns what is wrong on this GPU and with these weights, or an empty string. The cache is restored.
        """
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=self.final_norm.dtype)

        cached = [tensor[: self.rows, :, :TESTED] for layer in self.layers for tensor in (layer.keys, layer.values)]
        before = [tensor.clone() for tensor in cached]
        filled = [random(*tensor.shape) for tensor in cached]
        positions = torch.randint(cached[0].shape[2], (self.rows,), generator=generator, device=self.device)
        embeds = random(self.rows, self.sizes.hidden)
        results = []
        for forward in (self.forward, super().forward):
            torch._foreach_copy_(cached, filled)
            hidden = forward(embeds, positions)
            results.append([hidden, *(tensor[self.row_indices[: self.rows], :, positions] for tensor in cached)])
        torch._foreach_copy_(cached, before)
        return difference_of(*results)


def difference_of(found: Sequence[Tensor], expected: Sequence[Tensor], limit: float = MAX_DIFFERENCE) -> str:
    """How much the tensors differ, in words; empty if not more than different roundings explain."""
    distance = torch.stack([(a.float() - b.float()).square().mean().sqrt() for a, b in zip(found, expected)])
    size = torch.stack([b.float().square().mean().sqrt() for b in expected])
    worst = float((distance / size).max())
    return "" if worst <= limit else f"its results are {worst:.2f} times their size away from those of the others"


def make_stack(model: Any, keys: Sequence[Tensor], values: Sequence[Tensor], rows: int, count: int) -> BatchedStack:
    """For one token of each row, and passes of up to `count` tokens. An OverlappedStack where it runs and passes its
    test, otherwise a BatchedStack."""
    subject = Subject(model, rows)
    if not SOURCE.why_not(subject):
        try:
            stack = OverlappedStack(subject, keys, values, count)
            reason = stack.why_wrong()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = one_line(error)
        if not reason:
            return stack
        warn_once("%s are not used: %s", OverlappedStack.name, reason)
    return BatchedStack(model, keys, values, count)


def compile_ahead(talker: Any, row_counts: Sequence[int]) -> None:
    for count in set(row_counts) & set(ROWS):
        SOURCE.compile_ahead(Subject(talker.model, count), Subject(talker.code_predictor.model, count))


def tensor_map(matrix: Tensor, tiles: int, halves: int = 1) -> Tensor:
    """A CUtensorMap (128 bytes): it describes how to copy boxes of a matrix to shared memory with a 128-byte swizzle.

    A box is a tile of the outputs x SLAB inputs. With halves=2 it takes eight outputs of each half of the matrix in
    turn: gates and the ups that belong to them.
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
