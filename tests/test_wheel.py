"""The wheel: what is in it, and that it works in a folder that has no checkout but modules with our folders' names."""

import configparser
import email
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
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

PACKAGE = "qwen3_tts_cuda_graphs"
TOPS = {PACKAGE, "cudagraph_talker.py", "cudagraph_predictor.py"}
LIMIT = 120  # seconds that a process may take
HOSTILE = "generate extract_speaker bench fast speech prompts common cli serving model upstream".split()
HOSTILE += "torchaudio", "sox", "onnxruntime", "einops", "gradio"  # pip installs them for qwen-tts; they may be broken

# As an arbitrary user of a container: no name, no home, and nothing of the environment can be written. This one may
# read everything, as the tests' folders and Python may be root's own.
AS_ANYBODY = "setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=-all,+dac_read_search".split()
AS_ANYBODY += "--ambient-caps=-all,+dac_read_search env -i OMP_NUM_THREADS=1".split()


@pytest.fixture(scope="module")
def user():
    """What a command begins with to be run by that user; where only root can become another one, by this one."""
    is_possible = shutil.which(AS_ANYBODY[0]) and not subprocess.run([*AS_ANYBODY, sys.executable, "-c", ""]).returncode
    return AS_ANYBODY if is_possible else ["env"]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """build(kind, folder) -> the archive that is built from the folder, by default from a copy of the project: a build
    writes beside the sources."""
    project = tmp_path_factory.mktemp("project")
    for path in project_files():
        (project / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, project / path.relative_to(ROOT))

    def build(kind, folder=project):
        program = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        assert result.returncode == 0, result.stderr
        return folder / result.stdout.splitlines()[-1]

    return build


@pytest.fixture(scope="module")
def wheel(build, tmp_path_factory):
    """As a package index makes it: from the source archive."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build("sdist")) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return zipfile.ZipFile(build("wheel", source))


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """installed(program, *arguments, user) -> a process among hostile modules, with the wheel on its path, before the
    packages of this environment."""
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


def test_it_is_the_package_as_it_lies_here(wheel):
    """Every file unchanged: kernel sources and the page are read at run time. A module called `generate` or `common` in
    site-packages would be found by every program of the environment."""
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in project_files()}
    assert shipped == {name for name in expected if name.split("/")[0] in TOPS}
    assert all(wheel.read(name) == (ROOT / name).read_bytes() for name in shipped)
    assert {Path(name).suffix for name in shipped} == {".py", ".cu", ".h", ".html", ".css", ".js", ".tsv"}


def test_an_editable_install_shows_the_same_names(build, tmp_path):
    """With the checkout itself on the path, `import generate` or `import tests` in any program of the environment would
    find ours. As setup.sh installs it."""
    zipfile.ZipFile(build("editable")).extractall(tmp_path)
    program = f"""
        import site
        from importlib.util import find_spec
        site.addsitedir({str(tmp_path)!r})
        names = "{PACKAGE}.fast.paths cudagraph_talker cudagraph_predictor generate bench tests common"
        print([bool(find_spec(name)) for name in names.split()])
    """
    command = [sys.executable, "-IS", "-c", textwrap.dedent(program)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert result.stdout == f"{[True] * 3 + [False] * 4}\n", result.stderr


def test_dependencies_and_extras(metadata):
    """All that setup.sh installs, from the tested version on, and the pair of qwen-tts and transformers that works."""
    declared = metadata.get_all("Requires-Dist")
    assert metadata.get_all("Provides-Extra") == ["server", "ray"]
    sections = re.split(r"^# (\w+)\n", (ROOT / "requirements.txt").read_text(), flags=re.M)
    sections = dict(zip(sections[1::2], sections[2::2]))
    assert list(sections) == ["base", "server", "ray", "test"]
    (qwen_tts,) = re.findall(r"\bqwen-tts==[\w.]+\b", (ROOT / "setup.sh").read_text())
    wanted = [qwen_tts, 'qwen3-tts-cuda-graphs[server]; extra == "ray"']
    for section, extra in (("base", ""), ("server", '; extra == "server"'), ("ray", '; extra == "ray"')):
        for name, tested in re.findall(r"^([\w\[\]-]+)==(.+)$", sections[section], re.M):
            is_private = name in ("uvicorn", "httptools", "websockets")  # whose private parts the server uses
            version = ">=2.5" if name == "torch" else f"=={tested}" if is_private else f">={tested}"
            wanted.append(name + version + extra)
    assert sorted(declared) == sorted(wanted)
    assert f"pip install --no-deps {qwen_tts}" in (ROOT / "Dockerfile").read_text()


def test_the_changelog_begins_with_this_version(metadata):
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == metadata["Version"]


# ---- What it does


ANSWERS = """
    import contextlib, io, json, sys

    from qwen3_tts_cuda_graphs.__main__ import main

    sys.modules |= dict.fromkeys(["websockets", "sounddevice", "matplotlib"])  # not installed
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
    helps = ["", "speak --help", "clone --help", "serve --help", "bench --help"]
    mistakes = {  # -> how the line ends
        "spek": "see --help",
        "clone --ref_audio nowhere.wav": "",
        "serve": " 'qwen3-tts-cuda-graphs[server]'",
        "bench 7B": "see --help",
        "bench --plot": "pip install matplotlib",
        "bench --tables": "run it in a checkout",
        "speak Hi --voice ryan --model 1.7b": "",
        "speak Hi --play": "",
        "serve --voice ryan": "",
        f"speak --model {checkpoint()} --speaker no.pt --text Hi --output x.wav": (
            "error: there is no speaker file no.pt: make one with qwen3-tts clone"
        ),
    }
    questions = [words.split() for words in ("--version", *helps, *mistakes)]
    status, output, errors = ended(installed(ANSWERS, json.dumps(questions)))
    assert (status, errors) == (0, "")
    version, *answers = map(json.loads, output.splitlines())
    assert version == [0, f"qwen3-tts {metadata['Version']}\n", ""]
    for words, (status, output, errors) in zip(helps, answers):
        assert (status, errors) == (0, "") and output.startswith(f"usage: qwen3-tts {words.partition(' ')[0]}")
        assert not re.search(r"python |generate\.py|extract_speaker\.py", output), output
    for end, (status, output, errors) in zip(mistakes.values(), answers[len(helps) :], strict=True):
        assert (status, output, errors.count("\n")) == (2, "", 1) and errors.startswith("error: ")
        assert errors.rstrip().endswith(end), errors
    needed = (
        "error: the server needs websockets, which is not installed: in a checkout run ./setup.sh none --server, else "
    )
    assert any(errors.startswith(needed) for _, _, errors in answers)


PROGRAM = """
    import runpy, sys

    path = sys.path[:]
    from qwen3_tts_cuda_graphs.__main__ import main

    assert "torch" not in sys.modules  # the first command imports it, as in a shell
    folder, recording = sys.argv[1:]
    sys.argv = ["qwen3-tts", "clone", "--model", folder, "--ref_audio", recording, "--output", "me.pt"]
    main()
    voice = ["--model", folder, "--speaker", "me.pt"]
    sys.argv = ["qwen3-tts", "speak", *voice, "--text", "Hi.", "--output", "hi.wav", "--max-seq-len", "64"]
    runpy.run_module("qwen3_tts_cuda_graphs", run_name="__main__")  # python -m qwen3_tts_cuda_graphs

    import torch
    from qwen3_tts_cuda_graphs import FasterQwen3TTS

    model = FasterQwen3TTS.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=64)
    voice = dict(ref_spk_embedding=[torch.load("me.pt", weights_only=True)])
    [audio], rate = model.generate_voice_clone("Hello.", "English", voice_clone_prompt=voice, max_new_tokens=4)
    assert len(audio) > 0 and rate == 24000

    from qwen3_tts_cuda_graphs.bench import load_test, peer, ready

    assert sys.path == path
    assert "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1" not in sys.modules
"""


def test_it_speaks(installed, checkpoint, recording, user, tmp_path):
    """`clone`, `python -m` with `speak`, and the class of faster-qwen3-tts, where a module named `generate` lies in
    wait."""
    soundfile.write(tmp_path / "voice.wav", *recording)
    status, output, errors = ended(installed(PROGRAM, checkpoint(), tmp_path / "voice.wav", user=user))
    assert status == 0, errors
    cloned, spoken = output.splitlines()
    assert cloned == "me.pt: 64 numbers from 2.0 s of audio" and spoken.startswith("hi.wav: ")


def test_it_serves(command, checkpoint, user, tmp_path):
    """From the start to SIGTERM: /health, one request, the page."""
    folder = checkpoint()
    options = f"--device cpu --port 0 --max-streams 2 --max-seq-len 128 --voices {tmp_path.name}".split()
    options += ["--model", folder, "--speaker", folder / "speaker.pt"]
    process = command("serve", *options, user=[*user, "HOME=/nonexistent"])
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
