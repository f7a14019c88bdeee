"""The shortest time of a frame: the bytes that it must read, over the memory bandwidth. A bound, not a measurement.

A frame reads the talker's layers once and the predictor's 15 times, once for each code but the first: they are 157 MB,
more than the caches of these GPUs hold. It reads the heads once, and the keys and values of all positions so far.
Embeddings and activations are small and left out, and so is the codec. tables.py writes the bounds of some GPUs.
"""

import functools
import re

import torch

from qwen3_tts_cuda_graphs.bench.random_checkpoint import talker_config
from qwen3_tts_cuda_graphs.upstream import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

POSITION = 200  # number of positions whose keys and values are counted
BANDWIDTH = {  # torch's name of a GPU, without NVIDIA and GeForce -> GB/s that its maker states
    "RTX 3060": 360,  # with 12 GB
    "RTX 3090": 936,
    "RTX 4060": 272,
    "RTX 4090": 1008,
    "RTX 5070 Ti": 896,
    "RTX 5090": 1792,
    "L4": 300,
    "A10": 600,
    "L40S": 864,
    "A100-SXM4-40GB": 1555,
    "A100-SXM4-80GB": 2039,
    "H100 80GB HBM3": 3350,
    "H200": 4800,
    "Jetson AGX Orin": 205,
    "Jetson Orin Nano": 68,
    "Thor": 273,
    "GB10": 273,
}


@functools.cache
def meta_model(size: str) -> Qwen3TTSForConditionalGeneration:
    """A Base model of the published size, without memory for its weights."""
    talker = talker_config(size, "base")
    encoder = dict(enc_dim=talker["hidden_size"])
    config = Qwen3TTSConfig(tts_model_type="base", talker_config=talker, speaker_encoder_config=encoder)
    with torch.device("meta"):
        return Qwen3TTSForConditionalGeneration(config).to(torch.bfloat16)


def bytes_per_frame(talker) -> int:
    predictor = talker.code_predictor
    config = talker.config
    element = talker.codec_head.weight.element_size()
    passes = config.num_code_groups - 1  # the first pass takes two positions
    key_values = len(talker.model.layers) * 2 * config.num_key_value_heads * config.head_dim * element * POSITION
    return (
        weight_bytes(talker.model.layers)
        + weight_bytes(talker.codec_head)
        + passes * weight_bytes(predictor.model.layers)
        + weight_bytes(predictor.lm_head)
        + weight_bytes(predictor.small_to_mtp_projection)
        + key_values
    )


def weight_bytes(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def bound_ms(talker, gigabytes_per_second: float) -> float:
    return bytes_per_frame(talker) / gigabytes_per_second / 1e6


def memory_bound(talker, frame_ms: float, bandwidth: float | None = None) -> dict[str, float]:
    """A row of the benchmark: the bound of this GPU, and the share of it that was reached. Empty if the bandwidth is
    not known. bandwidth: GB/s; default: that of the talker's GPU"""
    if bandwidth is None and talker.device.type == "cuda":
        bandwidth = bandwidth_of(torch.cuda.get_device_properties(talker.device))
    if bandwidth is None:
        return {}
    bound = bound_ms(talker, bandwidth)
    return {
        "GB per frame": bytes_per_frame(talker) / 1e9,
        "GB per second": bandwidth,
        "bound in ms": bound,
        "measured in ms": frame_ms,
        "share of the bound": bound / frame_ms,
    }


def short_name(gpu: str) -> str:
    """torch's name of a GPU, without NVIDIA and GeForce."""
    return re.sub(r"^NVIDIA (GeForce )?", "", gpu)


def file_stem(gpu: str) -> str:
    """The name of a results file, such as rtx_4090 for NVIDIA GeForce RTX 4090."""
    return short_name(gpu).lower().replace(" ", "_")


def bandwidth_of(gpu) -> float | None:
    """GB/s from the table, otherwise calculated from torch's properties of the GPU, if they include the memory's."""
    name = short_name(gpu.name)
    if name == "Orin" and gpu.multi_processor_count >= 14:  # Orin NX and Nano have 8 or fewer
        name = "Jetson AGX Orin"
    if name in BANDWIDTH:
        return BANDWIDTH[name]
    clock_khz = getattr(gpu, "memory_clock_rate", 0)
    bus_bits = getattr(gpu, "memory_bus_width", 0)
    return 2 * clock_khz * bus_bits / 8 / 1e6 or None  # two transfers per clock
