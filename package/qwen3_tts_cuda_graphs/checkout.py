"""The project's flat files as submodules of this package: copied by setup.py into a wheel, or loaded from the checkout.

Imports nothing but the standard library: setup.py uses it where nothing is installed.
"""

import ast
from collections.abc import Iterator
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path

PACKAGE = "qwen3_tts_cuda_graphs"
CHECKOUT = Path(__file__).resolve().parents[2]
FILES = {"cudagraph_talker", "cudagraph_predictor", "generate", "extract_speaker", "bench"}
FOLDERS = {"benchmarks", "cli", "common", "fast", "serving", "speech", "tools"}


def as_submodule(source: bytes, path: str) -> bytes:
    """A file's source with its imports of the project's files changed to imports of this package's submodules.

    Only the words that must change are replaced, so lines keep their numbers.
    """
    lines = source.splitlines(keepends=True)
    edits = [edit for node in ast.walk(ast.parse(source, path)) for edit in edits_of(node, path)]
    for row, start, end, new in sorted(edits, reverse=True):  # an edit moves what is behind it
        line = lines[row - 1]
        lines[row - 1] = line[:start] + new.encode() + line[end:]
    return b"".join(lines)


def edits_of(node: ast.AST, path: str) -> Iterator[tuple[int, int, int, str]]:
    """What must change at a node: (line, first byte, byte after the last one, new text)."""
    match node:
        case ast.ImportFrom(level=0) if is_ours(node.module):
            yield node.lineno, node.col_offset, node.col_offset + len("from "), f"from {PACKAGE}."
        case ast.Import() if any(is_ours(name.name) for name in node.names):
            if len(node.names) > 1 or "." in node.names[0].name:
                raise SyntaxError(f"{path}:{node.lineno}: import the project's modules alone, or with `from`")
            yield node.lineno, node.col_offset, node.col_offset + len("import "), f"from {PACKAGE} import "
        case ast.Call(func=ast.Attribute(attr="run_module"), args=[ast.Constant() as name, *_]) if is_ours(name.value):
            yield name.lineno, name.col_offset, name.end_col_offset, repr(f"{PACKAGE}.{name.value}")
        case ast.Expr() if ast.unparse(node).startswith("sys.path.insert(0, str(Path(__file__)"):
            yield node.lineno, node.col_offset, node.end_col_offset, "pass"  # scripts find the checkout so


def is_ours(module: str) -> bool:
    return module.split(".")[0] in FILES | FOLDERS


def project_files() -> Iterator[Path]:
    """The checkout's files that belong into a wheel."""
    yield from (CHECKOUT / f"{name}.py" for name in sorted(FILES))
    for name in sorted(FOLDERS):
        paths = sorted((CHECKOUT / name).rglob("*"))
        yield from (path for path in paths if path.is_file() and path.parent.name != "__pycache__")


class ProjectLoader(SourceFileLoader):
    def get_code(self, name: str):
        return self.source_to_code(self.get_data(self.path), self.path)  # bypass the cached code of the plain module

    def source_to_code(self, data, path, **options):
        return super().source_to_code(as_submodule(data, path), path, **options)


class ProjectFinder:
    """Finds the submodules of this package that are files of the checkout."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != PACKAGE or not is_ours(module):
            return None
        folder = CHECKOUT.joinpath(*module.split(".")[:-1])
        return FileFinder(str(folder), (ProjectLoader, [".py"])).find_spec(name)
