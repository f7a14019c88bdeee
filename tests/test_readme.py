"""Every number in the README's tables is one that bench.py wrote."""
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUSED = "fused layers"
PARTS = "fused layers, first audio's parts in ms"
ROWS = {   # a row of the README's tables -> the row and the key in the results, and the digits shown
    "upstream qwen-tts": ("upstream", "ms_a_frame", 0),
    "faster-qwen3-tts": ("faster-qwen3-tts", "ms_a_frame", 1),
    "reference path": ("reference path", "ms_a_frame", 1),
    "**fused layers**": (FUSED, "ms_a_frame", 2),
    "times as fast as upstream": ("fused layers, times as fast", "than upstream", 0),
    "times as fast as faster-qwen3-tts": ("fused layers, times as fast", "than faster-qwen3-tts", 1),
    "a frame alone at position 200": ("fused layers, a frame's parts in ms", "frame at position 200", 2),
    "a frame alone at position 1500": ("fused layers, a frame's parts in ms", "frame at position 1500", 2),
    "RTF of a whole call": (FUSED, "rtf", 0),
    "RTF of a whole call, reference path": ("reference path", "rtf", 1),
    "RTF of a whole call, faster-qwen3-tts": ("faster-qwen3-tts", "rtf", 1),
    "RTF of a whole call, upstream": ("upstream", "rtf", 2),
    "first audio": ("fused layers, chunks of 1", "first_audio_ms", 1),
    "first audio, preset voice": ("voice: preset voice", "first_audio_ms", 1),
    "first audio, in-context": ("voice: in-context", "first_audio_ms", 1),
    "first audio, reference path": ("reference path, chunks of 1", "first_audio_ms", 1),
    "first audio, faster-qwen3-tts": ("faster-qwen3-tts, chunks of 1", "first_audio_ms", 0),
    "RTF of a stream in chunks of 1": ("fused layers, chunks of 1", "rtf", 1),
    "RTF of a stream in chunks of 1, 1, 2, 4, 8, ...": ("fused layers, chunks of 1, 1, 2, 4, 8, ...", "rtf", 0),
    "RTF of a stream in chunks of 1, faster-qwen3-tts": ("faster-qwen3-tts, chunks of 1", "rtf", 1),
    "RTF of a stream in chunks of 8": ("fused layers, chunks of 8", "rtf", 0),
    "RTF of a stream in chunks of 8, faster-qwen3-tts": ("faster-qwen3-tts, chunks of 8", "rtf", 1),
    "batch of 4": ("reference path, batch of 4", "audio_seconds_a_second", 0),
    "batch of 16": ("reference path, batch of 16", "audio_seconds_a_second", 0),
    "batch of 64": ("reference path, batch of 64", "audio_seconds_a_second", 0),
    "peak memory": (FUSED, "peak_gib", 1),
    "peak memory, batch of 16": ("reference path, batch of 16", "peak_gib", 1),
    "tokenizing and upstream's prompt": (PARTS, "tokenize and prompt", 1),
    "prefill": (PARTS, "prefill", 1),
    "the first frame's codes": (PARTS, "first codes", 1),
    "codec and copy to the host": (PARTS, "codec and copy", 1),
}


def test_the_tables_are_what_was_measured():
    results, readme = json.loads((ROOT / "results/h200.json").read_text()), (ROOT / "README.md").read_text()
    models, card, seen = results["models"], results["card"], set()
    for label, *cells in re.findall(r"^\| ([^|]+?) +\| +([\d.]+) +\| +([\d.]+) +\|$", readme, re.MULTILINE):
        label = re.sub(r" \([^)]*\)|, (ms|GiB)( a frame)?$", "", label)
        name, key, digits = ROWS[label]
        for size, cell in zip(("0.6B", "1.7B"), cells, strict=True):
            assert cell == f"{models[size][name][key]:.{digits}f}", (label, size)
        seen.add(label)
    assert seen == set(ROWS)
    text, apart = " ".join(readme.split()), []
    for size, model in models.items():
        low, high = model["upstream"]["ms_a_frame_spread"]
        assert f"{low:.0f} to {high:.0f} ms for {size}" in text
        firsts = [model[row]["first_audio_ms"] for row in (
            "fused layers, chunks of 1", "fused layers, chunks of 1, 1, 2, 4, 8, ...", "voice: x-vector")]
        apart.append(max(firsts) - min(firsts))
    assert f"differs by up to {max(apart):.1f} ms" in text
    assert f"{card['gpu']}, {card['dtype']}, **{card['weights']} weights**" in readme
    assert f"torch\n{card['torch'].split('+')[0]}, transformers {card['transformers']}" in readme
    assert f"upstream qwen-tts ({card['qwen-tts']})" in readme
    assert all(f"faster-qwen3-tts ({model['faster-qwen3-tts']['version']})" in readme for model in models.values())
    for chunks in ("1", "1, 1, 2, 4, 8, ..."):
        assert all(model[f"fused layers, chunks of {chunks}"]["late_chunks"] == 0 for model in models.values())
