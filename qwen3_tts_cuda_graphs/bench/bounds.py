"""How fast a frame can be at most: the bytes that it must read, over the memory bandwidth. A bound, not a measurement.

    python -m qwen3_tts_cuda_graphs.bench.bounds  # the tables of docs/other_gpus.md and README.md, size of the weights

A frame reads the talker's layers once and the predictor's 15 times, once for each code but the first: 157 MB, more than
the caches of these GPUs hold. The heads are read once, and the keys and values of all positions so far. Embeddings and
activations are small and left out. The codec is not part of a frame here.
"""

import functools
import json
import re
from pathlib import Path

import torch

from qwen3_tts_cuda_graphs.bench.random_checkpoint import PREDICTOR, TALKER, TALKER_SIZES, codec_config
from qwen3_tts_cuda_graphs.common.published import voices_of
from qwen3_tts_cuda_graphs.upstream import (
    Qwen3TTSConfig,
    Qwen3TTSForConditionalGeneration,
    Qwen3TTSTalkerForConditionalGeneration,
    Qwen3TTSTokenizerV2Config,
    Qwen3TTSTokenizerV2Model,
)

ROOT = Path(__file__).resolve().parents[2]
FRAME_MS = 80  # of audio
POSITION = 200  # of the frame whose keys and values are counted
SIZES = ("0.6B", "1.7B")
BANDWIDTH = {  # GPU -> GB/s as its maker states it; the name as torch gives it, without NVIDIA and GeForce
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
EXAMPLES = ("RTX 3060", "RTX 4090", "RTX 5090", "Jetson AGX Orin")  # in README.md
ORINS = ("Jetson AGX Orin", "Jetson Orin Nano")  # torch calls all of them Orin
LABELS = {"Thor": "Jetson Thor", "GB10": "DGX Spark (GB10)"}
PUBLISHED = {  # what others have published for one listener, not measured here; 0.6B / 1.7B where there are two
    "RTX 4060": "faster-qwen3-tts: 2.26 / 1.83 x real time, with codec",
    "RTX 4090": "qwen3-tts-cuda-graphs: 16 / 19 ms per step",
    "RTX 5070 Ti": "qwenTTS-turbo: 8.7 ms per frame (0.6B)",
    "RTX 5090": "qwen3-tts-megakernel: about 8.6 ms per frame (0.6B); X-Square: 12.7 ms (1.7B)",
    "H100 80GB HBM3": "qwen3-tts-cuda-graphs: 21 / 22 ms per step",
    "Jetson AGX Orin": "qwen3-tts-cuda-graphs: 54 / 66 ms per step",
    "GB10": "qwen3-tts-cuda-graphs: 55 / 62 ms per step",
}


def main() -> None:
    print(*table(), "", *examples(), "", sep="\n")
    print(*(f"weights of {size}: {download_bytes(size) / 1e9:.1f} GB" for size in SIZES), sep="\n")


def table() -> list[str]:
    """The lines of that table."""
    talkers = {size: meta_talker(size) for size in SIZES}
    amounts = [f"{bytes_per_frame(talker) / 1e9:.2f} GB" for talker in talkers.values()]
    lines = [
        f"| GPU | memory, GB/s | bound, 0.6B ({amounts[0]}) | bound, 1.7B ({amounts[1]}) | measured with this project "
        "| published by others |",
        "|---|---|---|---|---|---|",
    ]
    for gpu, bandwidth in BANDWIDTH.items():
        bounds = {size: bound_ms(talker, bandwidth) for size, talker in talkers.items()}
        cells = [f"{ms:.2f} ms" for ms in bounds.values()]
        cells = [LABELS.get(gpu, gpu), f"{bandwidth:,}", *cells, measured(gpu, bounds), PUBLISHED.get(gpu, "")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def examples() -> list[str]:
    """Seconds of audio per second at most, for a few GPUs."""
    lines = [f"| x real time at most, calculated | {' | '.join(EXAMPLES)} |", "|---" * (len(EXAMPLES) + 1) + "|"]
    for size in SIZES:
        bounds = [bound_ms(meta_talker(size), BANDWIDTH[gpu]) for gpu in EXAMPLES]
        lines.append(f"| {' | '.join([size, *(f'{FRAME_MS / bound:.1f}' for bound in bounds)])} |")
    return lines


def meta_config(size: str) -> Qwen3TTSConfig:
    talker = TALKER | TALKER_SIZES[size] | voices_of("base") | dict(code_predictor_config=PREDICTOR)
    return Qwen3TTSConfig(
        tts_model_type="base", talker_config=talker, speaker_encoder_config=dict(enc_dim=talker["hidden_size"])
    )


def meta_talker(size: str):
    """A talker of the published size, without memory for its weights."""
    with torch.device("meta"):
        return Qwen3TTSTalkerForConditionalGeneration(meta_config(size).talker_config).to(torch.bfloat16)


@functools.cache
def download_bytes(size: str) -> int:
    """Of a Base model's weights in bfloat16, and its codec's in float32. Others have no speaker encoder: 1% less."""
    with torch.device("meta"):
        model = Qwen3TTSForConditionalGeneration(meta_config(size)).to(torch.bfloat16)
        codec = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**codec_config(size)))
    return sum(weight.nbytes for part in (model, codec) for weight in part.state_dict().values())


def bytes_per_frame(talker) -> int:
    predictor = talker.code_predictor
    config = talker.config
    element = talker.codec_head.weight.element_size()
    passes = config.num_code_groups - 1  # the first has two positions
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


def memory_bound(talker, frame_ms: float) -> dict[str, float]:
    """A row of the benchmark: the bound of this GPU, and the share of it that was reached. Empty if the bandwidth is
    unknown."""
    bandwidth = bandwidth_of(talker.device)
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
    """The name that torch gives, without the maker's."""
    return re.sub(r"^NVIDIA (GeForce )?", "", gpu)


def file_stem(gpu: str) -> str:
    """The name of a results file: rtx_4090 for NVIDIA GeForce RTX 4090"""
    return short_name(gpu).lower().replace(" ", "_")


def bandwidth_of(device: torch.device) -> float | None:
    """GB/s from the table, else from what the driver says of the memory, if it says so."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    name = short_name(gpu.name)
    if name == "Orin" and gpu.multi_processor_count >= 14:  # an NX and a Nano have 8 or fewer
        name = "Jetson AGX Orin"
    if name in BANDWIDTH:
        return BANDWIDTH[name]
    clock_khz = getattr(gpu, "memory_clock_rate", 0)
    bus_bits = getattr(gpu, "memory_bus_width", 0)
    return 2 * clock_khz * bus_bits / 8 / 1e6 or None  # two transfers per clock


def measured(gpu: str, bounds: dict[str, float]) -> str:
    """From the results file of this GPU: ms of a frame on the fastest path, and the share of the bound."""
    path = ROOT / "results" / f"{file_stem(gpu)}.json"
    if not path.is_file():
        return ""
    key = f"frame at position {POSITION}"
    cells = []
    for size, rows in json.loads(path.read_text())["models"].items():
        times = [row[key] for row in rows.values() if key in row]
        if times:
            cells.append(f"{min(times):.2f} ms, {bounds[size] / min(times):.0%} ({size})")
    return "; ".join(cells)


if __name__ == "__main__":
    main()
