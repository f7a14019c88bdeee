"""When each part of a script is heard, as subtitles (SRT, WebVTT) and as JSON.

A cue is as exact as its format allows: samples in JSON, milliseconds in the others. Imports nothing that takes time.
"""

import html
import json
from collections.abc import Iterable

from qwen3_tts_cuda_graphs.prompts.cut import sentences
from qwen3_tts_cuda_graphs.prompts.script import Cue

SUBTITLE_SUFFIXES = ".srt", ".vtt", ".json"


def format_subtitles(
    suffix: str, cues: Iterable[Cue], rate: int, language: str | None = None, file_rate: int | None = None
) -> str:
    """The content of a file with this suffix.

    rate: of the cues' positions
    file_rate: of the audio file, if it differs
    """
    parts = [cue_fields(cue, rate, language, file_rate) for cue in cues]
    if suffix == ".json":
        return json.dumps({"sample_rate": file_rate or rate, "parts": parts}, ensure_ascii=False, indent=2) + "\n"
    is_vtt = suffix == ".vtt"
    blocks = ["WEBVTT\n"] if is_vtt else []
    for number, part in enumerate(parts, 1):
        start, end = (timestamp(part[f"{place}_seconds"], "." if is_vtt else ",") for place in ("start", "end"))
        text = "\n".join(line for line in part["text"].splitlines() if line.strip())  # an empty line ends a cue
        text = html.escape(text, quote=False) if is_vtt else text.replace("-->", "->")  # SRT has no escapes
        blocks.append(f"{number}\n{start} --> {end}\n{text}\n")
    return "\n".join(blocks)


def cue_fields(cue: Cue, rate: int, language: str | None = None, file_rate: int | None = None) -> dict:
    """A part whose audio is complete, as in the JSON. Times are exact to the sample."""
    text = str(cue.part.text)
    scale = (file_rate or rate) / rate
    return {
        "text": text,
        "voice": cue.part.voice,
        "style": cue.part.style,
        "start_seconds": cue.start / rate,
        "end_seconds": cue.end / rate,
        "start_sample": round(cue.start * scale),
        "end_sample": round(cue.end * scale),
        "sentences": sum(bool(sentence.strip()) for sentence in sentences(text, language)),
    }


def timestamp(seconds: float, point: str) -> str:
    """A time as 01:02:03,456, or with a point in WebVTT."""
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
