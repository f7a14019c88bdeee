"""The project as an installed package, with the interface of faster-qwen3-tts (model.py): `pip install -e .` in a
checkout.

The project's files are flat and import each other by plain names such as `generate` or `fast`, which would be visible
to, and could hide modules of, every other program in the environment. So only this folder is put on the path. It loads
the checkout's files as its own submodules: `qwen3_tts_cuda_graphs.generate` is generate.py, with `from fast import x`
read as `from qwen3_tts_cuda_graphs.fast import x`.
"""

import ast
import sys
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
if not (CHECKOUT / "generate.py").is_file():
    raise ImportError(f"{CHECKOUT} has no generate.py: install this package from a checkout with `pip install -e .`")

PROJECT_MODULES = {"cudagraph_talker", "cudagraph_predictor", "generate", "common", "fast", "speech", "serving"}


class ProjectLoader(SourceFileLoader):
    """Loads a file with its imports of other files of the project changed to imports of this package's submodules."""

    def get_code(self, name: str):
        return self.source_to_code(self.get_data(self.path), self.path)  # bypass the cached code of the plain module

    def source_to_code(self, data, path, **options):
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] in PROJECT_MODULES:
                node.module = f"{__name__}.{node.module}"
        return super().source_to_code(tree, path, **options)


class ProjectFinder:
    """Finds the submodules of this package that are files of the project."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != __name__ or module.split(".")[0] not in PROJECT_MODULES:
            return None
        folder = CHECKOUT.joinpath(*module.split(".")[:-1])
        return FileFinder(str(folder), (ProjectLoader, [".py"])).find_spec(name)


sys.meta_path.insert(0, ProjectFinder)

from qwen3_tts_cuda_graphs.model import FasterQwen3TTS, GGMLQwen3TTS  # noqa: E402  the finder must be there first

Qwen3TTSCudaGraphs = FasterQwen3TTS  # the name in the first CUDA-graph handler of speech-to-speech

__all__ = ["FasterQwen3TTS", "GGMLQwen3TTS", "Qwen3TTSCudaGraphs"]
