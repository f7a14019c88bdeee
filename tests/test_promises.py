"""What the project promises about its own files: a small core, imports in one direction, a quiet import."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter

import pytest
from helpers import ROOT, project_files

import generate

REFERENCE = {"cudagraph_talker", "cudagraph_predictor", "generate"}
COMMANDS = {"cli", "extract_speaker"}
SPEECH = REFERENCE | {"fast", "speech"}
ANYTHING = SPEECH | COMMANDS | {"common", "tools", "bench", "benchmarks", "serving"}
SERVER_PACKAGES = "starlette uvicorn httptools websockets prometheus_client multipart anyio pydantic".split()
UNUSED_TOKENIZER = "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1"

# What a part of the project may import of the project. Nothing imports extract_speaker or bench.
ALLOWED = {
    "reference": REFERENCE,
    "fast": REFERENCE - {"generate"} | {"fast"},
    "speech": SPEECH - {"generate"},
    "common": SPEECH | {"common"},
    "commands": SPEECH | {"common", "cli"},
    "tools": SPEECH | {"common", "tools", "benchmarks", "serving"},
    "benchmarks": SPEECH | {"common", "tools", "benchmarks"},
    "bench": SPEECH | {"common", "tools", "benchmarks"},
    "serving": SPEECH | {"common", "serving"},
    "examples": set(),  # programs that talk to the server from outside
    "package": SPEECH | {"common"},
    "setup": set(),
}


def part_of(path):
    """The part of the project that a Python file belongs to. A file in a new place needs a rule first."""
    name = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "reference" if name in REFERENCE else "commands" if name in COMMANDS else name


def python_files():
    return [path for path in project_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]


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


@pytest.mark.parametrize("has_git", [True, False])
def test_a_users_own_script_is_not_tested(tmp_path, has_git):
    """It lies beside generate.py, imports what it likes, and made five tests fail. An unpacked archive has no git."""
    for name in ("generate.py", "my_script.py", "fast/layers.py", "fast/my_notes.py", "fast/__pycache__/layers.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if has_git:
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "generate.py", "fast/layers.py"], cwd=tmp_path, check=True)
    found = [str(path.relative_to(tmp_path)) for path in project_files(tmp_path)]
    own = [] if has_git else ["fast/my_notes.py", "my_script.py"]
    assert found == sorted(["fast/layers.py", "generate.py", *own])


def test_the_core_is_short():
    """The three files that explain the idea must not grow into a framework."""
    assert sum(len((ROOT / f"{name}.py").read_text().splitlines()) for name in REFERENCE) <= 500


def test_every_part_of_the_project_is_there():
    """The next test must not pass because it looks at nothing."""
    assert {part_of(path) for path in python_files()} >= {"reference", "fast", "speech", "commands", "tools", "bench"}


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    """serving -> fast -> reference. Inside its functions, generate.py may look for speech/, cli/ and common/."""
    part, tree = part_of(path), ast.parse(path.read_text())
    assert set(imports_of(tree, path, only_at_import=part == "reference")) & ANYTHING <= ALLOWED[part]
    if part == "reference":
        inside_functions = {"speech", "cli", "common"} if path.name == "generate.py" else set()
        assert set(imports_of(tree, path, only_at_import=False)) & ANYTHING <= REFERENCE | inside_functions


@pytest.mark.parametrize(
    "source, at_import, anywhere",
    [
        ("import bench", {"bench"}, {"bench"}),
        ("def f():\n    from fast.codec import CodecGraph", set(), {"fast"}),
        ("class A:\n    import tools.calibrate", {"tools"}, {"tools"}),
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


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "package" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(name, tree, modules):
    """The project's modules that a module imports anywhere in it: at its top, in functions, in `if`."""
    names = []
    is_package = any(module.startswith(f"{name}.") for module in modules)
    folder = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [folder if node.level else "", node.module]))
            submodules = [f"{module}.{alias.name}" for alias in node.names]
            names += [it if without_package(it) in modules else module for it in submodules]
    return {without_package(it) for it in names} & set(modules)


def without_package(name):
    """The package has another name for each of the project's files."""
    plain = name.removeprefix("qwen3_tts_cuda_graphs.")
    return name if plain == "model" else plain


def circle_in(sources):
    """`sources`: {module: its code}. -> a list of modules that import each other in a circle, or []"""
    graph = {name: imported_modules(name, ast.parse(source), sources) - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_imports():
    """Files that import each other cannot be read one after another. An import in a function counts, too."""
    assert circle_in({module_name(path): path.read_text() for path in python_files()}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"qwen3_tts_cuda_graphs.fast.layers": "import speech.engine"},
        {"qwen3_tts_cuda_graphs.fast.layers": "def f():\n    from speech import engine"},
        {"fast": "from .engine import x", "qwen3_tts_cuda_graphs.fast.engine": "from fast import y"},
        {"generate": "if __name__ == '__main__':\n    from fast.layers import z"},
        {
            "qwen3_tts_cuda_graphs.compat": "from qwen3_tts_cuda_graphs.speech.engine import Engine",
            "generate": "import qwen3_tts_cuda_graphs.compat",
        },
    ],
)
def test_every_kind_of_circle_is_found(changes):
    sources = {
        "generate": "",
        "fast": "",
        "qwen3_tts_cuda_graphs.fast.layers": "import generate",
        "qwen3_tts_cuda_graphs.speech.engine": "from fast import layers",
    }
    assert circle_in(sources) == []
    assert circle_in(sources | changes) != []


FOLDERS = sorted({path.parent for path in python_files() if path.name == "__init__.py"})


def wrong_names(docstring, folder, paths):
    """Files of the folder that its description does not name, and names in it that are no files."""
    described = set(re.findall(r"[\w/]+(?:\.(?:py|cu|h|html|css|js|tsv)\b|/(?!\w))", docstring))
    inside = [path.relative_to(folder).parts for path in paths if path.is_relative_to(folder)]
    files = {parts[0] + "/" * (len(parts) > 1) for parts in inside} - {"__init__.py"}
    return sorted(files - described), sorted(it for it in described - files if not (ROOT / it).exists())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_lists_what_is_in_it(folder):
    """Every file, by its name, and none that is not there. It may name files of other folders, from the root on."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    missing, gone = wrong_names(docstring, folder, project_files())
    assert not missing and not gone, f"{folder.name}/__init__.py leaves out {missing}, and names {gone}"


def test_a_stale_list_is_found(tmp_path):
    paths = [tmp_path / name for name in ("one.py", "two.py", "three.cu", "__init__.py", "page/index.html")]

    def wrong(docstring):
        return wrong_names(docstring, tmp_path, paths)

    assert wrong("one.py and two.py (three.cu); page/ for generate.py and tools/load.py") == ([], [])
    assert wrong("one.py, twelve.py, three.cu; page/") == (["two.py"], ["twelve.py"])
    assert wrong("one.py, two.py, tools/nothing.py") == (["page/", "three.cu"], ["tools/nothing.py"])


def test_no_file_is_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


# What only the 25 Hz tokenizer imports, of upstream's dependencies.
PACKAGES_25HZ = {
    "torchaudio/__init__.py": "",
    "torchaudio/compliance/__init__.py": "",
    "torchaudio/compliance/kaldi.py": "",
    "sox.py": "",
    "onnxruntime.py": "",
    "einops.py": "rearrange = repeat = None",
    "flash_attn.py": "",
}
BROKEN = "raise SystemExit('compiled for another CUDA')"  # not even an Exception


def write_packages(folder, broken=""):
    for name, source in PACKAGES_25HZ.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(broken or source)


def run_here(program, first_on_path):
    environment = os.environ | {"PYTHONPATH": str(first_on_path)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_importing_and_loading_are_silent(checkpoint, tmp_path):
    """A library must not print: what it has to say while it loads are log records. Nor must it touch the garbage
    collector, as a script does while it imports.

    None of the 25 Hz tokenizer's packages is loaded, which may be broken: pip installs a torchaudio for another torch.
    No module stands in their place afterwards. The engine is for programs that have none of the server's packages.
    """
    write_packages(tmp_path, BROKEN)
    program = f"""
        import gc, logging, sys
        sys.modules.update(dict.fromkeys({SERVER_PACKAGES!r}))  # cannot be imported
        frozen = gc.get_freeze_count()
        import bench, benchmarks.listeners, cli.speaking, common.voices, generate, speech.engine, tools.load
        assert gc.isenabled() and gc.get_freeze_count() == frozen

        unwanted = {{"torchaudio", "sox", "onnxruntime", "gradio", "flash_attn", {UNUSED_TOKENIZER!r}}}
        assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        log = logging.getLogger("qwen3_tts_cuda_graphs")
        assert not log.handlers and log.level == logging.NOTSET
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        generate.load({str(checkpoint())!r}, "cpu", max_seq_len=64)
        assert any("captur" in record.getMessage() for record in records)
    """
    run = run_here(program, tmp_path)
    ours = [line for line in run.stderr.splitlines() if line and "Loading weights:" not in line]  # transformers 5's
    assert (run.returncode, run.stdout, ours) == (0, "", [])


@pytest.mark.parametrize("broken", ["", BROKEN], ids=["whole", "broken"])
def test_a_program_that_imports_upstream_first(checkpoint, tmp_path, broken):
    """One that also uses the 25 Hz tokenizer must not find an empty class in its place. One that could not import it is
    left with half of upstream's modules, and can still load."""
    write_packages(tmp_path, broken)
    program = f"""
        import sys
        try:
            import qwen_tts
        except SystemExit:
            assert {bool(broken)}
        import generate
        if not {bool(broken)}:
            from qwen_tts.core import Qwen3TTSTokenizerV1Model
            assert hasattr(Qwen3TTSTokenizerV1Model, "decode")
            assert sys.modules[{UNUSED_TOKENIZER!r}].Qwen3TTSTokenizerV1Model is Qwen3TTSTokenizerV1Model
        generate.load({str(checkpoint())!r}, "cpu", max_seq_len=64)
    """
    run = run_here(program, tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_25_hz_model_is_named(checkpoint, tmp_path):
    """Before its weights are read: it would fail deep in transformers."""
    config = json.loads((checkpoint() / "config.json").read_text()) | {"tokenizer_type": "qwen3_tts_tokenizer_25hz"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is a 25 Hz model: only the 12 Hz models run here, 0.6B, "):
        generate.load(str(tmp_path), "cpu")
