"""What the project promises about its own files: a small core, imports in one direction, a quiet import."""

import ast
import subprocess
import sys
import textwrap

import pytest
from helpers import ROOT

REFERENCE = {"cudagraph_talker", "cudagraph_predictor", "generate"}
COMMANDS = {"cli", "extract_speaker"}
ANYTHING = REFERENCE | COMMANDS | {"fast", "tools", "bench", "serving"}
UNUSED_TOKENIZER = "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1"

# What a part of the project may import of the project. Nothing imports extract_speaker or bench.
ALLOWED = {
    "reference": REFERENCE,
    "fast": REFERENCE | {"fast"},
    "commands": (REFERENCE | COMMANDS | {"fast"}) - {"extract_speaker"},
    "tools": ANYTHING - {"extract_speaker", "bench"},
    "bench": ANYTHING - {"extract_speaker", "bench"},
    "serving": ANYTHING - {"extract_speaker", "bench"},
    "examples": set(),  # programs that talk to the server from outside
    "package": REFERENCE | {"fast", "serving"},
}


def part_of(path):
    """The part of the project that a Python file belongs to. A file in a new place needs a rule first."""
    name = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "reference" if name in REFERENCE else "commands" if name in COMMANDS else name


def python_files():
    for path in sorted(ROOT.iterdir()):
        if path.name == "tests" or path.name.startswith("."):
            continue
        yield from [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def imports_of(node, path, only_at_import):
    """The top-level names that a file imports: everywhere in it, or only what an import of the file executes."""
    if isinstance(node, ast.Import):
        yield from (name.name.split(".")[0] for name in node.names)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qwen3_tts_cuda_graphs."):
        yield node.module.split(".")[1]  # the package's name for a file of the project
    elif isinstance(node, ast.ImportFrom):
        yield node.module.split(".")[0] if node.level == 0 else path.relative_to(ROOT).parts[0]
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    is_script = isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ == '__main__'")
    if not (only_at_import and (is_function or is_script)):
        for child in ast.iter_child_nodes(node):
            yield from imports_of(child, path, only_at_import)


def test_the_core_is_short():
    """The three files that explain the idea must not grow into a framework."""
    assert sum(len((ROOT / f"{name}.py").read_text().splitlines()) for name in REFERENCE) <= 500


def test_every_part_of_the_project_is_there():
    """The next test must not pass because it looks at nothing."""
    assert {part_of(path) for path in python_files()} >= {"reference", "fast", "commands", "tools", "bench"}


@pytest.mark.parametrize("path", [*python_files()], ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    """serving -> fast -> reference. Inside its functions, generate.py may look for fast/ and cli/."""
    part, tree = part_of(path), ast.parse(path.read_text())
    assert set(imports_of(tree, path, only_at_import=part == "reference")) & ANYTHING <= ALLOWED[part]
    if part == "reference":
        inside_functions = {"fast", "cli"} if path.name == "generate.py" else set()
        assert set(imports_of(tree, path, only_at_import=False)) & ANYTHING <= REFERENCE | inside_functions


@pytest.mark.parametrize(
    "source, at_import, anywhere",
    [
        ("import bench", {"bench"}, {"bench"}),
        ("def f():\n    from fast.codec import CodecGraph", set(), {"fast"}),
        ("class A:\n    import tools.parity", {"tools"}, {"tools"}),
        ("try:\n    import cli\nexcept ImportError:\n    pass", {"cli"}, {"cli"}),
        ("if __name__ == '__main__' and is_there:\n    from cli.options import main", set(), {"cli"}),
        ("from . import codec", {"fast"}, {"fast"}),
        ("from qwen3_tts_cuda_graphs.cli import main", {"cli"}, {"cli"}),
    ],
)
def test_the_import_test_sees_every_kind_of_import(source, at_import, anywhere):
    """An import in a function, a class, a try, or relative to the package must not be missed."""
    path = ROOT / "fast/example.py"
    assert set(imports_of(ast.parse(source), path, only_at_import=True)) == at_import
    assert set(imports_of(ast.parse(source), path, only_at_import=False)) == anywhere


def test_importing_and_loading_are_silent(checkpoint):
    """A library must not print: what it has to say while it loads are log records. Nor must it touch the garbage
    collector, as a script does while it imports.

    Without the 25 Hz tokenizer's packages, none of them is loaded, and no module stands in their place afterwards.
    """
    program = f"""
        import gc, logging, sys
        frozen = gc.get_freeze_count()
        import cli.speaking, generate
        assert gc.isenabled() and gc.get_freeze_count() == frozen

        unwanted = {{"torchaudio", "sox", "onnxruntime", "gradio", "flash_attn", {UNUSED_TOKENIZER!r}}}
        assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        log = logging.getLogger("qwen3_tts_cudagraphs")
        assert not log.handlers and log.level == logging.NOTSET
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        generate.load({str(checkpoint())!r}, "cpu", max_seq_len=64)
        assert any("captur" in record.getMessage() for record in records)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)
    ours = [line for line in run.stderr.splitlines() if line and "Loading weights:" not in line]  # transformers 5's
    assert (run.returncode, run.stdout, ours) == (0, "", [])


@pytest.mark.slow
def test_the_25_hz_tokenizer_is_the_real_one_where_its_packages_are(tmp_path):
    """A program that also uses the 25 Hz tokenizer must not find an empty class in its place.

    Upstream's module prints a warning, which must not go to stdout, where the audio may go.
    """
    packages = {
        "torchaudio/__init__.py": "",
        "torchaudio/compliance/__init__.py": "",
        "torchaudio/compliance/kaldi.py": "",
        "sox.py": "",
        "onnxruntime.py": "",
        "einops.py": "rearrange = repeat = None",
    }
    for name, source in packages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import generate
        from qwen_tts.core import Qwen3TTSTokenizerV1Model
        print(Qwen3TTSTokenizerV1Model.__module__, hasattr(Qwen3TTSTokenizerV1Model, "decode"), end="")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"{UNUSED_TOKENIZER} True"), run.stderr
