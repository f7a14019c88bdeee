"""When each word is heard: Qwen3-ForcedAligner adds "words" to the parts in the JSON of `qwen3-tts speak --subtitles`.

    python -m venv aligner && aligner/bin/pip install qwen-asr      # of its own: it needs another transformers
    qwen3-tts speak --text-file book.txt --join --output book.wav --subtitles book.json
    aligner/bin/python examples/word_times.py book.wav book.json --language English

Run with qwen-asr 0.0.6 and an aligner of random weights: how exact the times are was not tried.
"""

import argparse
import json
import sys
from pathlib import Path

import soundfile
import torch
from qwen_asr import Qwen3ForcedAligner


def clipped(seconds: float, part: dict) -> float:
    """A time within a part, from the beginning of the sound."""
    return min(part["start_seconds"] + seconds, part["end_seconds"])


parser = argparse.ArgumentParser(description="Add the times of words to a JSON with the times of parts.")
parser.add_argument("audio", type=Path, help="what was spoken")
parser.add_argument("subtitles", type=Path, help="the JSON beside it, which is read and written")
parser.add_argument("--language", required=True, help="Chinese, English, French, German, Italian, Japanese, ...")
parser.add_argument("--model", default="Qwen/Qwen3-ForcedAligner-0.6B", help="a hub id or a folder")
args = parser.parse_args()
for path in (args.audio, args.subtitles):
    if not path.is_file():
        parser.error(f"there is no file {path}")
if args.subtitles.suffix != ".json":
    parser.error(f"{args.subtitles} is no JSON: write it with --subtitles {args.subtitles.with_suffix('.json')}")

content = json.loads(args.subtitles.read_text())
device = "cuda" if torch.cuda.is_available() else "cpu"
aligner = Qwen3ForcedAligner.from_pretrained(args.model, device_map=device, dtype="auto")
for number, part in enumerate(content["parts"], 1):
    start, end = part["start_sample"], part["end_sample"]
    audio, rate = soundfile.read(args.audio, start=start, stop=end, dtype="float32")
    is_spoken = any(map(str.isalnum, part["text"]))  # the aligner has no place for marks alone
    words = aligner.align((audio, rate), part["text"], args.language)[0] if is_spoken else []
    part["words"] = [
        {
            "text": word.text,
            "start_seconds": clipped(word.start_time, part),
            "end_seconds": clipped(word.end_time, part),
        }
        for word in words
    ]
    print(f"part {number} of {len(content['parts'])}", file=sys.stderr)

finished = args.subtitles.with_suffix(".json.new")
finished.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
finished.replace(args.subtitles)
