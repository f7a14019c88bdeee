"""The files in results/ name their GPU, versions and commit, and have the figures that the documentation states. The
bounds of other GPUs are computed from the models' weights."""

import json
import math
import re
import statistics
from types import SimpleNamespace

import pytest
from helpers import ROOT

from qwen3_tts_cuda_graphs.bench import SIZES, bounds, tables
from qwen3_tts_cuda_graphs.bench.calibrate import GAINS, SELF_TEST
from qwen3_tts_cuda_graphs.bench.parity import MARGIN
from qwen3_tts_cuda_graphs.bench.report import FIGURES, print_row
from qwen3_tts_cuda_graphs.common.loading import load_upstream

CALIBRATIONS = ("calibration_", "self_test_")
FILES = [path for path in sorted((ROOT / "results").glob("*.json")) if not path.name.startswith(CALIBRATIONS)]
VERSION = r"\d+\.\d+(\.\d+)?([.+-]\w+)*"
CARD = {  # what a card must say; `qwen-tts` may be `qwen-tts-hf`
    "gpu": r"NVIDIA .+|Orin",
    "driver": r"\d+(\.\d+)+",
    "dtype": "bfloat16",
    "python": VERSION,
    "torch": VERSION,
    "transformers": VERSION,
    "qwen-tts": VERSION,
    "commit": r"[0-9a-f]{7,40}|.+-g[0-9a-f]{7,40}",
    "weights": r"random|published.*",
}
ORINS = ("Jetson AGX Orin", "Jetson Orin Nano")  # torch calls all of them Orin
NEEDED = {  # kind of file -> rows that each model has
    "_streams": {"1 stream alone"},
    "_ready": {"ready"},
    "_server": {"64 at once"},
    "_formats": {"64 at once"},
}


def mistakes_of_card(results):
    card = {name.removesuffix("-hf"): str(value) for name, value in results.get("card", {}).items()}
    for name, pattern in CARD.items():
        if not re.fullmatch(pattern, card.get(name, "")) or card[name].endswith("-dirty"):
            yield f"card: {name} is {card.get(name)!r}"


def mistakes(stem, results):
    """What is wrong with a results file."""
    yield from mistakes_of_card(results)
    name_of_gpu = str(results.get("card", {}).get("gpu", ""))
    gpu, kind = re.fullmatch(r"(.*?)(_streams|_ready|_server|_formats)?", stem).groups()
    names = [bounds.file_stem(name) for name in (ORINS if name_of_gpu == "Orin" else [name_of_gpu])]
    if gpu not in names:
        yield f"the name of the file is {stem}, the GPU is {name_of_gpu}: call it {' or '.join(names)}"
    models = results.get("models") or {"": {}}
    for size, rows in models.items():
        if size.split(", ")[0] not in SIZES:
            yield f"a model is called {size!r}, it must be one of {SIZES}"
        needed = NEEDED.get(kind, {"upstream", "separate kernels"})
        if not needed <= rows.keys():
            yield f"{size}: no row {sorted(needed - rows.keys())}"
        for name, row in rows.items():
            for key, value in row.items():
                figures = value if isinstance(value, list) else [value]
                numbers = [figure for figure in figures if isinstance(figure, int | float)]
                if not all(map(math.isfinite, numbers)):
                    yield f"{size}: {name}: {key} is {value}"
                elif key in FIGURES and not all(number >= 0 for number in numbers):
                    yield f"{size}: {name}: {key} is {value}, below 0"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_say_where_they_come_from(path):
    assert [*mistakes(path.stem, json.loads(path.read_text()))] == []


# ---- Bounds


@pytest.mark.parametrize("size, gigabytes", [("0.6B", 3.33), ("1.7B", 5.28)])
def test_bytes_of_a_frame(size, gigabytes):
    """The expected number is calculated from the shapes: q, k, v, o, gate, up, down and four norms of each layer."""

    def layer(hidden, inner, heads=16, kv_heads=8, dim=128):
        return (2 * heads + 2 * kv_heads) * dim * hidden + 3 * hidden * inner + 2 * hidden + 2 * dim

    hidden, inner = {"0.6B": (1024, 3072), "1.7B": (2048, 6144)}[size]
    projection = 0 if hidden == 1024 else 2048 * 1024 + 1024
    weights = 28 * layer(hidden, inner) + 3072 * hidden + 15 * (5 * layer(1024, 3072) + 2048 * 1024) + projection
    key_values = 28 * 2 * 8 * 128 * 200
    expected = 2 * (weights + key_values)
    talker = bounds.meta_model(size).talker
    assert bounds.bytes_per_frame(talker) == expected
    assert round(expected / 1e9, 2) == gigabytes
    assert bounds.bound_ms(talker, 1000) == pytest.approx(expected / 1e9)


def test_bytes_of_a_loaded_model(checkpoint):
    """bench.py counts the weights of the loaded model."""
    talker = load_upstream(str(checkpoint())).model.talker
    element = 4  # float32
    predicted = talker.config.num_code_groups - 1
    layers = [*talker.model.layers, *predicted * [*talker.code_predictor.model.layers]]
    numbers = sum(weight.numel() for layer in layers for weight in layer.parameters())
    numbers += talker.codec_head.weight.numel() + sum(head.weight.numel() for head in talker.code_predictor.lm_head)
    numbers += sum(weight.numel() for weight in talker.code_predictor.small_to_mtp_projection.parameters())
    numbers += 2 * 2 * 2 * 16 * bounds.POSITION  # layers, keys and values, heads, dimensions
    assert bounds.bytes_per_frame(talker) == element * numbers


@pytest.mark.parametrize(
    "name, bandwidth, properties",
    [
        ("NVIDIA GeForce RTX 4060", 272, {}),
        ("NVIDIA GeForce RTX 4060 Ti", 288, dict(memory_clock_rate=9_001_000, memory_bus_width=128)),
        ("NVIDIA H200", 4800, dict(memory_clock_rate=1, memory_bus_width=1)),
        ("Orin", None, dict(memory_clock_rate=0, memory_bus_width=256, multi_processor_count=8)),
        ("Orin", 205, dict(memory_clock_rate=0, memory_bus_width=256, multi_processor_count=16)),
        ("NVIDIA of another year", None, {}),
    ],
)
def test_bandwidths(name, bandwidth, properties):
    """A GPU is looked up by its whole name: an RTX 4060 Ti is not an RTX 4060. For others, the driver is asked."""
    found = bounds.bandwidth_of(SimpleNamespace(name=name, **properties))
    assert found == (bandwidth and pytest.approx(bandwidth, rel=0.01))


def test_the_benchmark_says_what_share_it_reached(capsys):
    """The row has the figures, and is printed as text. Without a GPU there is no such row."""
    talker = bounds.meta_model("0.6B").talker
    assert bounds.memory_bound(talker, 10.0) == {}
    row = bounds.memory_bound(talker, 10.0, bandwidth=1000)
    assert row["bound in ms"] == pytest.approx(row["GB per frame"]) == pytest.approx(3.33, abs=0.01)
    assert row["share of the bound"] == row["bound in ms"] / 10
    print_row("megakernel, memory bound", row, ["ms_per_frame"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "bound in ms 3.33, measured in ms 10.00, share of the bound 0.33" in printed


def test_the_table_names_every_gpu():
    """Each line has the bounds of both sizes; the line of the H200 also has the measured figures."""
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in tables.by_gpu().splitlines()[2:]}
    assert len(lines) == len(bounds.BANDWIDTH) and tables.PUBLISHED.keys() <= bounds.BANDWIDTH.keys()
    assert "| 1,008 | 3.31 ms | 5.24 ms |" in lines["RTX 4090"] and "16 / 19 ms per step" in lines["RTX 4090"]
    for size in SIZES:
        measured = tables.rows_of(size)["megakernel, a frame's parts in ms"]["frame at position 200"]
        assert re.search(rf"{measured:.2f} ms, \d\d% \({size}\)", lines["H200"])


def mcnemar_spread(name: str, runs: list[dict]) -> float:
    """The spread over the runs of the difference between best tokens that only the model's own forward has and those
    that only the megakernel has, in standard deviations of McNemar's test. It is 1 if the cases are independent."""
    pairs = [(run[name]["only_own"], run[name]["only_megakernel"]) for run in runs]
    return statistics.stdev((own - megakernel) / math.sqrt(max(1, own + megakernel)) for own, megakernel in pairs)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_said_of_the_calibration(size):
    """The figures in CONTRIBUTING.md and in `verdict` of bench/parity.py are those of the file."""
    said = r"were (\S+) to (\S+) times the model's own, with a standard deviation of at\s+most (\S+),"
    low, high, deviation = map(float, re.search(said, (ROOT / "CONTRIBUTING.md").read_text()).groups())
    results = json.loads((ROOT / f"results/calibration_{size}.json").read_text())
    runs = results["runs"]
    assert (results["size"], results["frames"], len(runs)) == (size, 200, 50)
    for name in runs[0].keys() - {SELF_TEST}:
        assert 0.8 < mcnemar_spread(name, runs) < 1.21
        for figure in ("median", "high"):
            for first in range(len(GAINS)):
                ratios = [run[name][figure] for run in runs[first :: len(GAINS)]]
                spread = statistics.stdev(ratios)
                assert low - 5e-4 < min(ratios) and max(ratios) < high + 5e-4 and spread < deviation + 5e-5
                assert statistics.mean(ratios) + 8 * spread < MARGIN


@pytest.mark.parametrize("size", SIZES)
def test_what_is_said_of_the_self_test(size):
    """The figures in CONTRIBUTING.md and in fast/self_test.py are those of the file."""
    results = json.loads((ROOT / f"results/self_test_{size}.json").read_text())
    runs = [run[SELF_TEST] for run in results["runs"]]
    assert (results["size"], len(runs)) == (size, 50)
    assert not [*mistakes_of_card(results)]
    ranges = dict.fromkeys(runs[0], (0, 0.01))
    ranges |= {name: (0, 0) for name in runs[0] if "chosen otherwise" in name}
    ranges |= {name: (0.92, 1.09) for name in runs[0] if name.startswith("error")}
    ranges |= {name: (0.8, 1.19) for name in runs[0] if "first predicted code" in name or "hidden" in name}
    ranges |= {name: (0, 0.1) for name in runs[0] if name.endswith(", at most")}
    for name, (low, high) in ranges.items():
        for first in range(len(GAINS)):
            values, limits = zip(*(run[name] for run in runs[first :: len(GAINS)]))
            assert low <= min(values) and max(values) <= high
            assert statistics.mean(values) + 16 * statistics.stdev(values) < limits[0]
