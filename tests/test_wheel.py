"""The wheel: what is in it, and that it works in a folder that has no checkout but modules with our files' names."""

import ast
import configparser
import email
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import urllib.request
import zipfile
from functools import partial
from pathlib import Path

import pytest
import soundfile
from helpers import ROOT, project_files

sys.path.append(str(ROOT / "package"))  # what `pip install -e .` does

from qwen3_tts_cuda_graphs.checkout import FILES, FOLDERS, as_submodule

LIMIT = 120  # seconds that a process may take
HOSTILE = [*FILES, *FOLDERS, "model", "checkout"]
HOSTILE += "torchaudio", "sox", "onnxruntime", "einops", "gradio"  # pip installs them for qwen-tts; they may be broken

# As an arbitrary user of a container: no name, no home, and nothing of the environment can be written. This one may
# read everything, as the tests' folders and Python may be root's own.
AS_ANYBODY = "setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=-all,+dac_read_search".split()
AS_ANYBODY += "--ambient-caps=-all,+dac_read_search env -i OMP_NUM_THREADS=1".split()
WITHOUT_HOME = pytest.mark.parametrize("user", [["env"], AS_ANYBODY], ids=["me", "anybody"], indirect=True)
WITH_HOME = pytest.mark.parametrize(
    "user", [["env"], [*AS_ANYBODY, "HOME=/nonexistent"]], ids=["me", "anybody"], indirect=True
)


@pytest.fixture
def user(request):
    """What a command begins with to be run by that user."""
    if shutil.which(request.param[0]) and not subprocess.run([*request.param, sys.executable, "-c", ""]).returncode:
        return request.param
    pytest.skip("only root can become another user, with setpriv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build writes beside the sources."""
    project = tmp_path_factory.mktemp("project")
    for folder in ["package", *FOLDERS]:
        shutil.copytree(ROOT / folder, project / folder)
    files = ["setup.py", "pyproject.toml", "README.md", "LICENSE", *(f"{name}.py" for name in FILES)]
    for path in [*(ROOT / name for name in files), *ROOT.glob("requirements*.txt")]:
        shutil.copy(path, project)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    result = subprocess.run([sys.executable, "-c", build], cwd=project, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stderr
    (path,) = project.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """installed(program, *arguments, user) -> a process among hostile modules, with the wheel on its path.

    The other packages are those of this environment, in which the project is not installed.
    """
    site, folder = tmp_path_factory.mktemp("site"), Path(tempfile.mkdtemp())  # pytest's own folders are this user's
    folder.chmod(0o777)
    wheel.extractall(site)
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"raise SystemExit('this is not the project: {name}')")

    def start(program, *arguments, user=("env",)):
        command = [*user, f"PYTHONPATH={site}", f"TMPDIR={folder}", sys.executable, "-c", textwrap.dedent(program)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen([*command, *map(str, arguments)], cwd=folder, **pipes)

    yield start
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def command(wheel, installed):
    """command(*arguments, user) -> the process of the wheel's one command."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["console_scripts"]).keys() == {"qwen3-tts"}
    module, function = entry_points["console_scripts"]["qwen3-tts"].split(":")
    return partial(installed, f"from {module} import {function}\n{function}()")


def ended(process):
    stdout, stderr = process.communicate(timeout=LIMIT)
    return process.returncode, stdout, stderr


# ---- What is in it


def test_one_name_at_the_top(wheel):
    """A module called `common` or `cli` in site-packages would be found by every program of the environment."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qwen3_tts_cuda_graphs"}


def test_every_file_is_in_it(wheel):
    """Kernel sources and the page are read at run time, from beside the module that reads them."""
    shipped = {name.removeprefix("qwen3_tts_cuda_graphs/") for name in wheel.namelist()}
    for folder in FOLDERS:
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {str(path.relative_to(ROOT)) for path in files} <= shipped
    assert {"fast/megakernel.cu", "fast/kernels.h", "serving/page/index.html", "generate.py"} <= shipped


def test_no_import_of_a_plain_name_is_left(wheel):
    """A folder that checkout.py does not list would be imported from wherever a program happens to run."""
    ours = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in project_files()} - {"setup"}
    for name in wheel.namelist():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(wheel.read(name))):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not {module.split(".")[0] for module in modules} & ours, name


@pytest.mark.parametrize(
    "source, expected",
    [
        ("from fast import nvrtc\n", "from PACKAGE.fast import nvrtc\n"),
        ("if x:\n    from fast.codec import (  # y\n        a,\n    )\n", None),
        (
            "é = 'from fast import x'; from generate import load\n",
            "é = 'from fast import x'; from PACKAGE.generate import load\n",
        ),
        ("import generate  # noqa\n", "from PACKAGE import generate  # noqa\n"),
        ("import cli as c; import common\n", "from PACKAGE import cli as c; from PACKAGE import common\n"),
        (
            "from . import codec\nfrom faster import x\nimport torch.fast\n",
            "from . import codec\nfrom faster import x\nimport torch.fast\n",
        ),
        ('runpy.run_module("cli", run_name="x")  # y\n', "runpy.run_module('PACKAGE.cli', run_name=\"x\")  # y\n"),
        ("sys.path.insert(0, str(Path(__file__).parents[1]))  # y\n", "pass  # y\n"),
    ],
)
def test_imports_become_the_packages(source, expected):
    """Only in code, not in strings, after any indentation, and several on a line."""
    expected = expected or source.replace("fast", "PACKAGE.fast")
    changed = as_submodule(source.encode(), "x.py").decode()
    assert changed == expected.replace("PACKAGE", "qwen3_tts_cuda_graphs")


@pytest.mark.parametrize("source", ["import fast.codec", "import sys, generate"])
def test_an_import_that_cannot_be_changed_stops_the_build(source):
    with pytest.raises(SyntaxError, match=r"x\.py:1: import the project's modules alone, or with `from`"):
        as_submodule(source.encode(), "x.py")


def test_dependencies_and_extras(metadata):
    """All that setup.sh installs, from the tested version on, and the pair of qwen-tts and transformers that works."""
    declared = metadata.get_all("Requires-Dist")
    assert metadata.get_all("Provides-Extra") == ["server", "ray"]
    for file, extra in (("requirements", ""), ("requirements-server", "server"), ("requirements-ray", "ray")):
        for name, tested in re.findall(r"^([\w\[\]-]+)==(.+)$", (ROOT / f"{file}.txt").read_text(), re.M):
            wanted = "torch>=2.5" if name == "torch" else f"{name}>={tested}"
            if name in ("uvicorn", "httptools", "websockets"):  # whose private parts the server uses
                wanted = f"{name}=={tested}"
            assert wanted + f'; extra == "{extra}"' * bool(extra) in declared
    (qwen_tts,) = re.findall(r"\bqwen-tts==[\w.]+\b", (ROOT / "setup.sh").read_text())
    assert qwen_tts in declared
    assert f"pip install --no-deps {qwen_tts}" in (ROOT / "Dockerfile").read_text()


def test_the_changelog_begins_with_this_version(metadata):
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == metadata["Version"]


# ---- What it does


ANSWERS = """
    import contextlib, io, json, sys

    from qwen3_tts_cuda_graphs.__main__ import main

    sys.modules["websockets"] = sys.modules["sounddevice"] = None  # not installed
    for words in json.loads(sys.argv[1]):
        output, errors, status = io.StringIO(), io.StringIO(), 0
        sys.argv = ["qwen3-tts", *words]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                main()
            except SystemExit as end:
                status = end.code or 0
        print(json.dumps([status, output.getvalue(), errors.getvalue()]))
    assert "torch" not in sys.modules
"""


def test_the_command_answers_without_torch(installed, metadata, checkpoint):
    """Names of a checkout's scripts in a help text or an error would send the wheel's user to files it has not."""
    voice = ["--model", str(checkpoint()), "--speaker", "no.pt"]
    questions = [
        ["--version"],
        [],
        ["speak", "--help"],
        ["clone", "--help"],
        ["serve", "--help"],
        ["bench", "--help"],
        ["spek"],
        ["clone", "--ref_audio", "nowhere.wav"],
        ["serve"],
        ["bench", "7B"],
        ["speak", "Hi", "--voice", "ryan", "--model", "1.7b"],
        ["speak", "Hi", "--play"],
        ["serve", "--voice", "ryan"],
        ["speak", *voice, "--text", "Hi", "--output", "x.wav"],
    ]
    status, output, errors = ended(installed(ANSWERS, json.dumps(questions)))
    assert (status, errors) == (0, "")
    version, *others = map(json.loads, output.splitlines())
    assert version == [0, f"qwen3-tts {metadata['Version']}\n", ""]
    for words, (status, output, errors) in zip(questions[1:6], others):
        assert (status, errors) == (0, "") and output.startswith(f"usage: qwen3-tts {''.join(words[:1])}")
        assert not re.search(r"python |generate\.py|extract_speaker\.py", output), output
    for status, output, errors in others[5:]:
        assert (status, output, errors.count("\n")) == (2, "", 1) and errors.startswith("error: ")
    missing = 'run pip install "qwen3-tts-cuda-graphs[server]"'
    assert others[7][2] == f"error: the server needs websockets, which is not installed: {missing}\n"
    assert others[-1][2] == "error: there is no speaker file no.pt: make one with qwen3-tts clone\n"


PROGRAM = """
    import os, sys

    path = sys.path[:]
    from qwen3_tts_cuda_graphs.__main__ import main

    assert "torch" not in sys.modules  # the first command imports it, as in a shell
    folder, recording = sys.argv[1:]
    short = ["--max-seq-len", "64"]
    for words in (
        ["clone", "--model", folder, "--ref_audio", recording, "--output", "me.pt"],
        ["speak", "--model", folder, "--speaker", "me.pt", "--text", "Hi.", "--output", "hi.wav", *short],
    ):
        sys.argv = ["qwen3-tts", *words]
        main()

    import torch
    from qwen3_tts_cuda_graphs import FasterQwen3TTS

    model = FasterQwen3TTS.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=64)
    voice = dict(ref_spk_embedding=[torch.load("me.pt", weights_only=True)])
    [audio], rate = model.generate_voice_clone("Hello.", "English", voice_clone_prompt=voice, max_new_tokens=4)
    assert len(audio) > 0 and rate == 24000

    import qwen3_tts_cuda_graphs.bench, qwen3_tts_cuda_graphs.bench.ready, qwen3_tts_cuda_graphs.bench.load_test

    assert sys.path == path  # what scripts of a checkout insert is left out
    unwanted = {"generate", "common", "fast", "speech", "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1"}
    assert not unwanted & set(sys.modules)
    os.remove("me.pt")  # another user is next
    os.remove("hi.wav")
"""


@WITHOUT_HOME
def test_it_speaks(installed, checkpoint, recording, user, tmp_path):
    """`clone`, `speak` and the class of faster-qwen3-tts, where a module named `generate` lies in wait."""
    soundfile.write(tmp_path / "voice.wav", *recording)
    status, output, errors = ended(installed(PROGRAM, checkpoint(), tmp_path / "voice.wav", user=user))
    assert status == 0, errors
    cloned, spoken = output.splitlines()
    assert cloned == "me.pt: 64 numbers from 2.0 s of audio" and spoken.startswith("hi.wav: ")


@WITH_HOME
def test_it_serves(command, checkpoint, user, tmp_path):
    """From the start to SIGTERM: /health, one request, the page."""
    folder = checkpoint()
    options = [
        "--device",
        "cpu",
        "--port",
        0,
        "--max-streams",
        2,
        "--max-seq-len",
        128,
        "--voices",
        tmp_path.name,
    ]
    process = command("serve", "--model", folder, "--speaker", folder / "speaker.pt", *options, user=user)
    killer = threading.Timer(LIMIT, process.kill)
    killer.start()
    try:
        address = process.stdout.readline().split()[2].rstrip(",")
        assert process.stdout.readline().startswith("ready: ")
        request = json.dumps(dict(input="Hi.", voice="speaker", response_format="pcm", max_new_tokens=4)).encode()
        headers = {"Content-Type": "application/json"}
        pages = [f"{address}/health", f"{address}/"]
        pages.append(urllib.request.Request(f"{address}/v1/audio/speech", request, headers))
        health, page, audio = (urllib.request.urlopen(page, timeout=LIMIT).read() for page in pages)
        assert json.loads(health) == {"status": "ok"} and page.startswith(b"<!doctype html>") and len(audio) >= 3840
        process.send_signal(signal.SIGTERM)
        status, _, errors = ended(process)
        assert (status, errors) == (0, "shutting down\n")
    finally:
        killer.cancel()
        process.kill()
        process.wait()


@pytest.mark.slow  # downloads gigabytes
def test_an_unpinned_install(wheel, checkpoint, tmp_path):
    """pip takes the newest torch, and a torchaudio that may be for another one; the newest triton lists what is not
    freed at the end."""
    (tmp_path / "generate.py").write_text("raise SystemExit('this is not the project')")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv/bin/pip", "install", "--quiet", wheel.filename], check=True)
    load = f"from qwen3_tts_cuda_graphs import FasterQwen3TTS, load\nload({str(checkpoint())!r}, max_seq_len=64)"
    voice = ["--model", checkpoint(), "--speaker", checkpoint() / "speaker.pt"]
    speak = [*voice, "--text", "Hi.", "--max-seq-len", "64", "--device", "cpu", "--output", "hi.wav"]
    for words in (["python", "-c", load], ["qwen3-tts", "speak", *speak], ["qwen3-tts", "bench", "--help"]):
        command = [tmp_path / "venv/bin" / words[0], *words[1:]]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
        assert run.returncode == 0 and "leaked" not in run.stderr, run.stderr
