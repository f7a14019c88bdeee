"""What the project promises about its own files: a small core, imports in one direction, a quiet import."""

import ast
import functools
import inspect
import json
import re
import subprocess
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from helpers import ROOT, project_files, run_program

import generate
from qwen3_tts_cuda_graphs import load, upstream
from qwen3_tts_cuda_graphs.common import published
from qwen3_tts_cuda_graphs.prompts import incremental_tokenizer

PACKAGE = "qwen3_tts_cuda_graphs"
REFERENCE = ["cudagraph_talker", "cudagraph_predictor", "generate", "extract_speaker"]  # each knows those before it
CORE = REFERENCE[:3]
FLOORS = [  # a room imports its own modules and those of lower floors
    {"bench.py", PACKAGE, "__main__", "compat"},
    {"bench"},  # drives the server, too
    {"cli", "serving"},
    {"common"},
    {"speech"},
    {"prompts", "fast"},
    {"upstream"},
    {"cudagraph_talker", "cudagraph_predictor"},
]
SERVER_PACKAGES = "starlette uvicorn httptools websockets prometheus_client multipart anyio pydantic".split()
UNUSED_TOKENIZER = "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1"

parse = functools.cache(ast.parse)


def python_files():
    return [path for path in project_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(name, source, modules):
    """The project's modules that a module imports anywhere in it: at its top, in functions, in `if`."""
    names = []
    is_package = any(module.startswith(f"{name}.") for module in modules)
    folder = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [folder if node.level else "", node.module]))
            submodules = [f"{module}.{alias.name}" for alias in node.names]
            names += [it if it in modules else module for it in submodules]
    return set(names) & set(modules) - {name}


def room_of(module):
    """The package's folder or file that a module is in; bench.py is not the room bench."""
    top, *below = module.split(".")
    return (below or [top])[0] if top == PACKAGE else {"bench": "bench.py"}.get(top, top)


def upward_imports(sources):
    """`sources`: {module: its code}. -> (module, what it imports) for each import that does not run downward."""
    wrong = []
    for name, source in sources.items():
        room = room_of(name)
        floors = [floor for floor, rooms in enumerate(FLOORS) if room in rooms]
        below = {room}.union(*FLOORS[floors[0] + 1 :]) if floors else set()
        if room in REFERENCE:
            below = set(REFERENCE[: REFERENCE.index(room)])
        wrong += [(name, it) for it in imported_modules(name, source, sources) if room_of(it) not in below]
    return wrong


def circle_in(sources):
    """-> a list of modules that import each other in a circle, or []"""
    graph = {name: imported_modules(name, source, sources) for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def sources():
    """{module: its code} of all but the tests"""
    return {module_name(path): path.read_text() for path in python_files()}


def test_imports_run_downward(sources):
    """Programs -> common -> speech -> prompts and fast -> the talker and the predictor. examples/ are outside."""
    assert {room_of(name) for name in sources} == {*REFERENCE, "examples"}.union(*FLOORS)
    assert upward_imports(sources) == []


def names_in(source):
    """What a module defines or imports, wherever it does."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def test_what_functions_import_exists(sources):
    """An import in a function fails only when it is called. `load_test --compare` imported a function that had gone."""
    names = {module: {*names_in(source)} for module, source in sources.items()}
    missing = []
    for module, source in sources.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module in names and "__getattr__" not in names[node.module]:
                wanted = {alias.name for alias in node.names} - names[node.module]
                missing += [(module, name) for name in wanted if f"{node.module}.{name}" not in names]
    assert missing == []


def test_no_circle_of_imports(sources):
    """Files that import each other cannot be read one after another. An import in a function counts, too."""
    assert circle_in(sources) == []


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_one_door_to_the_package(sources, name):
    """As a script where the package can be imported it is the full command line. Nothing else may depend on it."""
    module = ast.parse(sources[name])
    docstring, *statements = module.body
    assert ast.get_docstring(module)
    doors = [node for node in statements if PACKAGE in ast.unparse(node)]
    condition = f"__name__ == '__main__' and find_spec('{PACKAGE}')"
    assert [ast.unparse(door.test) for door in doors] == [condition] * (name in ("generate", "extract_speaker"))


def test_what_is_written_twice_is_the_same():
    """The package does not import generate.py, so both have this."""
    assert generate.MODELS == published.MODELS and generate.PRETOKENIZE_REGEX == incremental_tokenizer.QWEN_PATTERN
    for name in ("load_weights", "import_upstream"):
        first, second = (inspect.getsource(getattr(module, name)) for module in (generate, upstream))
        assert first == second


def test_upstream_is_imported_in_one_place(sources):
    """Before it, a tokenizer that needs packages which are not there must be out of the way."""
    statements = [(name, line) for name, source in sources.items() for line in source.splitlines()]
    imports = {name for name, line in statements if re.match(r"\s*(from|import) qwen_tts\b", line)}
    assert imports == {"generate", f"{PACKAGE}.upstream"}


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


def test_the_core_is_short(sources):
    """The three files that explain the idea must not grow into a framework, in length or in width."""
    lines = [line for name in CORE for line in sources[name].splitlines()]
    assert len(lines) <= 500 and sum(len(line) > 110 for line in lines) <= 25


def test_no_file_is_long(sources):
    lengths = {name: len(source.splitlines()) for name, source in sources.items()}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_no_name_twice(sources):
    """Two classes or files of one name are two things that a reader must keep apart."""
    nodes = [node for name in sources if room_of(name) != "examples" for node in ast.walk(parse(sources[name]))]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    paths = [path for path in project_files() if path.is_relative_to(ROOT / PACKAGE)]
    files = Counter(path.name for path in paths if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in (classes + files).items() if count > 1] == []


def test_tests_import_no_tests():
    """What several use is in a module of helpers; else a test moves only with all that import it."""
    tests = {path.stem: path.read_text() for path in project_files() if path.parent == ROOT / "tests"}
    imports = {(name, it) for name, source in tests.items() for it in imported_modules(name, source, tests)}
    assert [(name, it) for name, it in imports if it.startswith("test_")] == []


FOLDERS = sorted({path.parent for path in python_files() if path.name == "__init__.py"})


def wrong_names(docstring, folder, paths):
    """Files of the folder that its description does not name, and names in it that are no files."""
    described = set(re.findall(r"[\w/]+(?:\.(?:py|cu|h|html|css|js|tsv)\b|/(?!\w))", docstring))
    inside = [path.relative_to(folder).parts for path in paths if path.is_relative_to(folder)]
    files = {parts[0] + "/" * (len(parts) > 1) for parts in inside} - {"__init__.py"}
    elsewhere = {it for it in described if (ROOT / it).exists() or (ROOT / PACKAGE / it).exists()}
    return sorted(files - described), sorted(described - files - elsewhere)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_lists_what_is_in_it(folder):
    """Every file, by its name, and none that is not there. It may name files of other folders, with the folder."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    missing, gone = wrong_names(docstring, folder, project_files())
    assert not missing and not gone, f"{folder.name}/__init__.py leaves out {missing}, and names {gone}"


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


def test_importing_and_loading_are_silent(checkpoint, tmp_path):
    """A library must not print: what it has to say while it loads are log records. Nor must it touch the garbage
    collector, as a script does while it imports.

    None of the 25 Hz tokenizer's packages is loaded, which may be broken: pip installs a torchaudio for another torch.
    No module stands in their place afterwards. The engine is for programs that have none of the server's packages.
    Nothing needs a compiler, also if the program has imported torch before.
    """
    write_packages(tmp_path, BROKEN)
    program = f"""
        import no_compiler
        import gc, logging, sys
        sys.modules.update(dict.fromkeys({SERVER_PACKAGES!r}))  # cannot be imported
        frozen = gc.get_freeze_count()
        import bench, generate
        import qwen3_tts_cuda_graphs.bench.listeners, qwen3_tts_cuda_graphs.bench.load_test
        import qwen3_tts_cuda_graphs.cli.speaking, qwen3_tts_cuda_graphs.compat
        from qwen3_tts_cuda_graphs import Engine, load
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
        load({str(checkpoint())!r}, "cpu", max_seq_len=64)
        assert any("captur" in record.getMessage() for record in records)
    """
    run = run_program(program, tmp_path, ROOT, ROOT / "tests")
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
        from qwen3_tts_cuda_graphs.upstream import Qwen3TTSModel
        Qwen3TTSModel.from_pretrained({str(checkpoint())!r})
        if not {bool(broken)}:
            from qwen_tts.core import Qwen3TTSTokenizerV1Model
            assert hasattr(Qwen3TTSTokenizerV1Model, "decode")
            assert sys.modules[{UNUSED_TOKENIZER!r}].Qwen3TTSTokenizerV1Model is Qwen3TTSTokenizerV1Model
    """
    run = run_program(program, tmp_path, ROOT)
    assert run.returncode == 0, run.stderr


def test_a_25_hz_model_is_named(checkpoint, tmp_path):
    """Before its weights are read: it would fail deep in transformers."""
    for path in checkpoint().iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((checkpoint() / "config.json").read_text()) | {"tokenizer_type": "qwen3_tts_tokenizer_25hz"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="the tokenizer qwen3_tts_tokenizer_25hz: only the 12 Hz models run here, 0.6B, "
    ):
        load(str(tmp_path), "cpu")
