"""Every number in the README's tables is one that bench.py wrote."""
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = {   # a row of the README's table -> the row and the key in the results, and the digits shown
    "upstream qwen-tts": ("upstream", "ms_a_frame", 0),
    "faster-qwen3-tts": ("faster-qwen3-tts", "ms_a_frame", 1),
    "**this**": ("accelerated", "ms_a_frame", 1),
    "times faster than upstream": ("accelerated", "times_upstream", 1),
    "times faster than faster-qwen3-tts": ("accelerated", "times_faster-qwen3-tts", 1),
    "kernels a frame": ("accelerated", "kernels_a_frame", 0),
    "RTF of a whole call": ("accelerated", "rtf", 1),
    "RTF of a whole call, faster-qwen3-tts": ("faster-qwen3-tts", "rtf", 1),
    "first audio": ("chunks of 1", "first_audio_ms", 0),
    "first audio, faster-qwen3-tts": ("faster-qwen3-tts, chunks of 1", "first_audio_ms", 0),
    "RTF of a stream": ("chunks of 1, 1, 2, 4, 8, ...", "rtf", 1),
    "batch of 4": ("frames, batch 4", "audio_seconds_a_second", 0),
    "batch of 16": ("frames, batch 16", "audio_seconds_a_second", 0),
    "batch of 64": ("frames, batch 64", "audio_seconds_a_second", 0),
    "seconds to capture": ("accelerated", "seconds_to_capture", 1),
    "peak memory": ("accelerated", "peak_gib", 1),
}


def test_the_table_is_what_was_measured():
    models = json.loads((ROOT / "results/reference_h200.json").read_text())["models"]
    seen = set()
    row = re.compile(r"^\| ([^|]+?) +\| +([\d.]+)[^|]*\| +([\d.]+)[^|]*\|$", re.MULTILINE)
    for label, *cells in row.findall((ROOT / "README.md").read_text()):
        label = label.split(" (")[0]
        name, key, digits = ROWS[label]
        for size, cell in zip(("0.6B", "1.7B"), cells, strict=True):
            assert cell == f"{models[size][name][key]:.{digits}f}", (label, size)
        seen.add(label)
    assert seen == set(ROWS)
