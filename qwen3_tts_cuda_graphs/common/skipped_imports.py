"""Imports that a command skips: half of the modules that torch, transformers and librosa import are never called here.

Imports nothing that takes time.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

# Optional dependencies of transformers.
PACKAGES = ("hqq", "jax", "sklearn", "tensorflow", "torchvision")
# Modules from which transformers and librosa import names, for training, compiling, several GPUs, and music.
MODULES = ("numba", "scipy.ndimage", "scipy.optimize", "scipy.signal", "scipy.sparse")
MODULES += ("torch._dynamo", "torch.distributed.tensor")


@contextlib.contextmanager
def skipping_unused() -> Iterator[None]:
    """Imports inside this context find no such PACKAGES, and stand-ins for the MODULES. Later imports find the real
    ones."""
    packages = [name for name in PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(packages))
    finder = StandInFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [*packages, *finder.made]:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:  # the import has added an attribute to the parent
                vars(sys.modules[parent]).pop(child, None)


class StandInFinder:
    """Finds a StandIn for each of the MODULES and their submodules. Modules that are already imported stay."""

    def __init__(self):
        self.made = []

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if any(name == unused or name.startswith(f"{unused}.") for unused in MODULES):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        self.made.append(spec.name)
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class StandIn(types.ModuleType):
    """A module that has every name. Each is a class without instances, as for isinstance(tensor, DTensor), and a
    decorator that changes nothing, as for @jit(nopython=True)."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "TransformGetItemToIndex":  # transformers really uses it, for masks
            return indexing_mode()
        return UnusedClass(name, (), {})


class UnusedClass(type):
    def __call__(cls, *args, **_):
        return args[0] if args and callable(args[0]) else cls


def indexing_mode() -> type:
    """A class in place of torch's TransformGetItemToIndex: a context in which x[i, j], where i and j are tensors of one
    number each, is a lookup also inside vmap."""
    import torch
    from torch.overrides import TorchFunctionMode

    class IndexingMode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.__getitem__:
                indices = args[1] if isinstance(args[1], tuple) else (args[1],)
                if all(map(torch.is_tensor, indices)):
                    return torch.ops.aten.index(args[0], indices)
            return function(*args, **(kwargs or {}))

    return IndexingMode
