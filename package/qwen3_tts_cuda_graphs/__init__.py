"""The project as an installed package: the interface of faster-qwen3-tts, and the command qwen3-tts.

model.py      faster-qwen3-tts' class on this project's model
__main__.py   the command
checkout.py   the project's flat files as submodules of this package

The project's files import each other by plain names such as `generate` or `fast`, which would be visible to, and could
hide modules of, every other program in the environment. So they are submodules here: `qwen3_tts_cuda_graphs.generate`
is generate.py, with `from fast import x` read as `from qwen3_tts_cuda_graphs.fast import x`. A wheel has such copies
(setup.py makes them); after `pip install -e .` the checkout's own files are loaded that way.
"""

import sys
from importlib import import_module
from pathlib import Path

if not Path(__file__).with_name("generate.py").is_file():
    from qwen3_tts_cuda_graphs.checkout import ProjectFinder

    sys.meta_path.insert(0, ProjectFinder)

HOMES = {  # a public name -> its module, imported when the name is used: the command must start without torch
    "FasterQwen3TTS": "model",
    "GGMLQwen3TTS": "model",
    "Qwen3TTSCudaGraphs": "model",
    "load": "generate",
    "accelerate": "generate",
    "stream": "generate",
    "astream": "generate",
    "Engine": "speech.engine",
    "stream_long": "speech.long_text",
}
__all__ = [*HOMES]


def __getattr__(name: str):
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
