"""Qwen3-TTS with every frame captured as CUDA graphs, and all of the speed.

    from qwen3_tts_cuda_graphs import load, stream, astream, stream_long, stream_script, Engine, FasterQwen3TTS

cli/, serving/, bench/   programs: they ask, and show what comes back (__main__.py is the command qwen3-tts)
common/                  what programs share
compat.py                the interface of faster-qwen3-tts
speech/                  requests in, sound out: whole calls, streams, the engine
prompts/                 text and voice in, a request out
fast/                    the same frame and codec, faster
upstream.py              upstream's classes
"""

from importlib import import_module

HOMES = {  # a public name -> its module, imported when the name is used: the command must start without torch
    "FasterQwen3TTS": "compat",
    "GGMLQwen3TTS": "compat",
    "Qwen3TTSCudaGraphs": "compat",
    "load": "common.loading",
    "accelerate": "speech",
    "stream": "speech.streaming",
    "astream": "speech.streaming",
    "Engine": "speech.engine",
    "stream_long": "speech.long_text",
    "stream_script": "speech.long_text",
}
__all__ = [*HOMES]


def __getattr__(name: str):
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
