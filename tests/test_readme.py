"""Every number in the README's tables is one that bench.py wrote."""

import json
import re
from pathlib import Path

from tools.bounds import table

ROOT = Path(__file__).parents[1]
FUSED = "megakernel"
THREE_FILES = "the three files alone"
PEER = "faster-qwen3-tts"
FIRST_AUDIO = "megakernel, first audio's parts in ms"
GROWING = "1, 1, 2, 4, 8, ..."

# A row of the README's tables -> row and key of the results, and the digits shown. Labels are without what stands in
# brackets, without ** and without their unit at the end.
ROWS = {
    "upstream qwen-tts": ("upstream", "ms_per_frame", 0),
    "faster-qwen3-tts": (PEER, "ms_per_frame", 1),
    "the three files alone": (THREE_FILES, "ms_per_frame", 1),
    "separate kernels": ("separate kernels", "ms_per_frame", 1),
    "megakernel": (FUSED, "ms_per_frame", 2),
    "times as fast as upstream": (f"{FUSED}, times as fast", "than upstream", 0),
    "times as fast as faster-qwen3-tts": (f"{FUSED}, times as fast", f"than {PEER}", 1),
    "times as fast as upstream, the three files alone": (f"{THREE_FILES}, times as fast", "than upstream", 1),
    "times as fast as faster-qwen3-tts, the three files alone": (f"{THREE_FILES}, times as fast", f"than {PEER}", 1),
    "a frame alone at position 200": (f"{FUSED}, a frame's parts in ms", "frame at position 200", 2),
    "a frame alone at position 1500": (f"{FUSED}, a frame's parts in ms", "frame at position 1500", 2),
    "x real time, whole call": (FUSED, "x_real_time", 0),
    "x real time, whole call, the three files alone": (THREE_FILES, "x_real_time", 1),
    "x real time, whole call, separate kernels": ("separate kernels", "x_real_time", 1),
    "x real time, whole call, faster-qwen3-tts": (PEER, "x_real_time", 1),
    "x real time, whole call, upstream": ("upstream", "x_real_time", 2),
    "first audio": (f"{FUSED}, chunks of 1", "first_audio_ms", 1),
    "first audio, preset voice": ("voice: preset voice", "first_audio_ms", 1),
    "first audio, in-context": ("voice: in-context", "first_audio_ms", 1),
    "first audio, separate kernels": ("separate kernels, chunks of 1", "first_audio_ms", 1),
    "first audio, faster-qwen3-tts": (f"{PEER}, chunks of 1", "first_audio_ms", 0),
    "x real time, stream in chunks of 1": (f"{FUSED}, chunks of 1", "x_real_time", 1),
    "x real time, stream in chunks of 1, faster-qwen3-tts": (f"{PEER}, chunks of 1", "x_real_time", 1),
    "x real time, stream in chunks of 8": (f"{FUSED}, chunks of 8", "x_real_time", 0),
    "x real time, stream in chunks of 8, faster-qwen3-tts": (f"{PEER}, chunks of 8", "x_real_time", 1),
    f"x real time, stream in chunks of {GROWING}": (f"{FUSED}, chunks of {GROWING}", "x_real_time", 0),
    "list of 4 texts": ("list of 4 texts", "audio_seconds_per_second", 0),
    "list of 16 texts": ("list of 16 texts", "audio_seconds_per_second", 0),
    "list of 16 texts, max_batch=16": ("list of 16 texts, max_batch=16", "audio_seconds_per_second", 0),
    "batch of 4": ("separate kernels, batch of 4", "audio_seconds_per_second", 0),
    "batch of 16": ("separate kernels, batch of 16", "audio_seconds_per_second", 0),
    "batch of 64": ("separate kernels, batch of 64", "audio_seconds_per_second", 0),
    "peak memory": (FUSED, "peak_gib", 1),
    "peak memory, batch of 16": ("separate kernels, batch of 16", "peak_gib", 1),
    "tokenizing and upstream's prompt": (FIRST_AUDIO, "tokenize and prompt", 1),
    "prefill": (FIRST_AUDIO, "prefill", 1),
    "the first frame's codes": (FIRST_AUDIO, "first codes", 1),
    "codec and copy to the host": (FIRST_AUDIO, "codec and copy", 1),
}


def read() -> tuple[dict, str]:
    return json.loads((ROOT / "results/h200.json").read_text()), (ROOT / "README.md").read_text()


def plain(label: str) -> str:
    """Without bold, brackets and unit."""
    label = label.replace("*", "").replace("`", "")
    return re.sub(r" \([^)]*\)|, (ms|GiB)( per frame)?$|, audio seconds per second$", "", label)


def test_the_tables_are_what_was_measured():
    """Every row shows the measured figure, and every row of ROWS that was measured is shown."""
    results, readme = read()
    models = results["models"]
    seen = set()
    for label, *cells in re.findall(r"^\| ([^|]+?) +\| +\**([\d.]+)\** +\| +\**([\d.]+)\** +\|$", readme, re.MULTILINE):
        label = plain(label)
        name, key, digits = ROWS[label]
        for size, cell in zip(("0.6B", "1.7B"), cells, strict=True):
            assert cell == f"{models[size][name][key]:.{digits}f}", (label, size)
        seen.add(label)
    measured = {label for label, (name, _, _) in ROWS.items() if all(name in rows for rows in models.values())}
    assert seen == measured
    assert models.keys() == {"0.6B", "1.7B"}
    assert {"upstream", PEER, "separate kernels", FUSED} <= models["0.6B"].keys()


def test_the_text_is_what_was_measured():
    results, readme = read()
    models, card = results["models"], results["card"]
    text = " ".join(readme.split())
    differences = []
    for size, model in models.items():
        low, high = model["upstream"]["ms_per_frame_spread"]
        assert f"{low:.0f} to {high:.0f} ms for {size}" in text
        same_stream = (f"{FUSED}, chunks of 1", f"{FUSED}, chunks of {GROWING}", "voice: x-vector")
        first_audio = [model[row]["first_audio_ms"] for row in same_stream]
        differences.append(max(first_audio) - min(first_audio))
        assert f"{PEER} ({model[PEER]['version']})" in text
        for chunks in ("1", GROWING):
            assert model[f"{FUSED}, chunks of {chunks}"]["late_chunks"] == 0
    assert f"differs by up to {max(differences):.1f} ms" in text
    assert f"{card['gpu']}, {card['dtype']}, **{card['weights']} weights**" in text
    assert f"torch {card['torch'].split('+')[0]}, transformers {card['transformers']}" in text
    assert f"upstream qwen-tts ({card['qwen-tts']})" in text


def test_the_table_of_listeners_is_what_was_measured():
    _, readme = read()
    results = json.loads((ROOT / "results/h200_streams.json").read_text())["models"]
    for name, row in results["0.6B"].items():
        cells = [name]
        for measured in (row, results["1.7B"][name]):
            cells.append(f"{measured['audio_seconds_per_second']:.0f}")
            cells.append(f"{measured['first_audio_ms']:.0f} / {measured['first_audio_p95_ms']:.0f}")
        assert f"| {' | '.join(cells)} |" in readme
    underruns = sum(row["underruns"] for rows in results.values() for row in rows.values())
    few, many = (results["1.7B"][f"{count} listeners for 60 s"]["underruns"] for count in (320, 400))
    text = " ".join(readme.split())
    assert f"had {underruns} underruns (chunks that came too late) in this run" in text
    assert f"all of them with 1.7B: {few} with 320 listeners and {many} with 400" in text
    assert f"with 1.7B, 320 had {few} underruns" in text
    assert results["0.6B"]["400 listeners for 60 s"]["underruns"] == 0


def test_the_times_of_a_new_process_are_what_was_measured():
    _, readme = read()
    row = json.loads((ROOT / "results/h200_ready.json").read_text())["models"]["0.6B"]["ready"]
    text = " ".join(readme.split())
    assert f"medians of {row['runs']}, in [results/h200_ready.json]" in text
    assert f"takes {row['accelerate_s']:.1f} s, {row['accelerate_empty_cache_s']:.1f} s where no kernels" in text
    assert f"after {row['first_request_ms']:.1f} ms, the tenth after {row['tenth_request_ms']:.1f} ms" in text
    assert f"`generate.py` takes {row['shell_to_first_audio_s']:.1f} s" in text
    assert f"alone take {row['upstream_imported_and_loaded_s']:.1f} s" in text


def test_the_text_of_arriving_text_is_what_was_measured():
    results, readme = read()
    rows = [model[f"{FUSED}, text at 50 tokens per second"] for model in results["models"].values()]
    small, large = (f"{row['first_audio_ms']:.1f} ms" for row in rows)
    assert f"(medians of {rows[0]['runs']}): the first audio comes {small} (1.7B: {large})" in " ".join(readme.split())
    assert not any(row["underruns"] for row in rows)


def test_the_table_of_bounds_is_what_the_command_prints():
    _, readme = read()
    assert "\n".join(table()) in readme
