"""Fast Qwen3-TTS: every frame is captured as CUDA graphs.

    from qwen3_tts_cuda_graphs import load, stream, astream, stream_long, stream_script, Engine, FasterQwen3TTS

cli/, serving/, bench/   the command line, the server, the benchmarks (__main__.py is the command qwen3-tts)
common/                  what these programs share
compat.py                the interface of faster-qwen3-tts
speech/                  requests in, audio out: whole calls, streams, the engine
prompts/                 text and voice in, a request out
fast/                    faster implementations of the frame and of the codec
upstream.py              upstream's classes
"""

from importlib import import_module

HOMES = {  # public name -> its module, which is imported when the name is used, because a command starts without torch
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
