"""Compiled kernels on disk, with a stand-in for the compiler: what is found, and what is not trusted.

The tests must hold for root, too, whom no permission stops: they look at modes and owners, or make calls fail.
"""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from gpu_on_cpu import PretendedGpu
from helpers import ROOT
from megakernel_cases import config
from test_profiles import PROFILES, STACKS, sizes_of

from qwen3_tts_cuda_graphs.fast import batched, kernel_cache, kernels, megakernel, nvrtc

SOURCE = "__global__ void kernel() {}"
posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows has no such modes")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of an empty cache. It does not exist yet."""
    folder = tmp_path / "cache" / "kernels"
    monkeypatch.setenv(kernel_cache.VARIABLE, str(folder))
    monkeypatch.setattr(kernel_cache, "started", {})
    kernel_cache.warn_once.cache_clear()
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """What the compiler was asked for, in order. Its machine code is different each time."""
    calls = []

    def compile_source(source, architecture):
        calls.append((source, architecture))
        return f"{len(calls)}: {source} for {architecture}".encode() * 100

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 8))
    return calls


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def load_or_compile(source=SOURCE, architecture="sm_90"):
    """As another process would: nothing is remembered in this one."""
    return kernel_cache.load_or_compile(source, architecture)


# ---- Found or compiled


def test_the_second_process_does_not_compile(folder, compiled, caplog):
    """Folder and file are for this user only, whatever the umask is."""
    umask = os.umask(0)
    try:
        first = load_or_compile()
    finally:
        os.umask(umask)
    assert load_or_compile() == first
    assert compiled == [(SOURCE, "sm_90")]
    assert not warnings_of(caplog)
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o700
        assert only_file(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: dict(source=SOURCE + " "),
        lambda patch: dict(architecture="compute_90"),
        lambda patch: patch.setattr(nvrtc, "version", lambda: (12, 9)),
        lambda patch: patch.setattr(nvrtc, "compiler_options", lambda architecture: ["-G"]),
        lambda patch: patch.setattr(torch, "__version__", "2.99"),
    ],
    ids=["source", "architecture", "NVRTC", "options", "torch"],
)
def test_whatever_changes_the_code_changes_the_key(change, folder, compiled, monkeypatch):
    """An upgrade must not run the kernels of the version before."""
    before = load_or_compile()
    assert load_or_compile(**change(monkeypatch) or {}) != before
    assert len(compiled) == len(list(folder.iterdir())) == 2


def test_every_gpu_has_kernels_of_its_own(compiled):
    """One home directory may serve GPUs that differ only in their number of blocks or in their memory."""
    cases = [(profile, stack) for profile in PROFILES for stack in STACKS]
    keys = set()
    for profile, stack in cases:
        source = megakernel.SOURCE.complete(sizes_of(profile, stack))
        keys.add(kernel_cache.cache_key(source, f"sm_{PROFILES[profile][0]}"))
    assert len(keys) == len(cases)


# ---- Files and folders that are not used


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-1], lambda content: content[:20], lambda content: content[:-1] + b"?"],
    ids=["cut", "cut in the checksum", "changed"],
)
def test_a_damaged_file_is_compiled_again(damage, folder, compiled, caplog):
    """A half-written file after a power cut must not reach the GPU. The new one takes its place."""
    load_or_compile()
    path = only_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    again = load_or_compile()
    assert len(compiled) == 2 and again.startswith(b"2:")
    assert load_or_compile() == again
    (warning,) = warnings_of(caplog)
    assert "is damaged" in warning and str(path) in warning


def test_a_file_of_another_key_is_compiled_again(folder, compiled):
    """Complete, but it is another kernel's: renamed by hand."""
    load_or_compile()
    path = only_file(folder)
    load_or_compile("other")
    (other_path,) = set(folder.iterdir()) - {path}
    os.replace(path, other_path)
    assert load_or_compile("other").startswith(b"3: other")


def assert_not_kept(caplog, compiled, word):
    """Compiled each time, and the log says so once."""
    assert load_or_compile().startswith(b"1:")
    assert load_or_compile().startswith(b"2:")
    (warning,) = warnings_of(caplog)
    assert warning.startswith("compiled kernels are not kept: ") and kernel_cache.VARIABLE in warning
    assert word in warning


@posix_only
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(mode, folder, compiled, caplog):
    """Another user could plant a kernel there, such as in a folder of /tmp."""
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert_not_kept(caplog, compiled, f"{folder} can be written by others (mode {mode:o}")
    assert not list(folder.iterdir())


@posix_only
def test_a_folder_of_another_user_is_not_used(folder, compiled, caplog, monkeypatch):
    """Also when this user is root, who could write there."""
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert_not_kept(caplog, compiled, "belongs to user")
    assert not list(folder.iterdir())


@posix_only
@pytest.mark.parametrize("fault", ["mode", "owner"])
def test_a_file_that_another_user_can_have_written_is_not_used(fault, folder, compiled, caplog, monkeypatch):
    """Left from a time when the folder was open to others. It is replaced."""
    load_or_compile()
    path = only_file(folder)
    if fault == "mode":
        path.chmod(0o620)
    else:
        status = SimpleNamespace(st_mode=0o100600, st_uid=os.getuid() + 1)
        patched = vars(os) | {"fstat": lambda descriptor: status}
        monkeypatch.setattr(kernel_cache, "os", SimpleNamespace(**patched))
    assert load_or_compile().startswith(b"2:")
    assert ("can be written by others" if fault == "mode" else "belongs to user") in warnings_of(caplog)[0]
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("problem", ["a file in its place", "no temporary file", "no rename", "no home"])
def test_a_cache_that_cannot_be_used_is_no_error(problem, folder, compiled, caplog, monkeypatch):
    """A full or read-only disk, a user id without an account. No temporary file is left."""
    word = os.strerror(errno.ENOSPC)
    if problem == "a file in its place":
        folder.parent.write_text("")
        word = str(folder.parent)
    elif problem == "no temporary file":
        monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", fail)
    elif problem == "no rename":
        monkeypatch.setattr(os, "replace", fail)
    else:
        monkeypatch.delenv(kernel_cache.VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(kernel_cache.Path, "home", no_home)
        word = "home directory"
    assert_not_kept(caplog, compiled, word)
    assert not folder.is_dir() or not list(folder.iterdir())


def test_the_cache_can_be_switched_off(folder, compiled, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, "off")
    monkeypatch.chdir(tmp_path)
    assert load_or_compile() != load_or_compile()
    assert not list(tmp_path.iterdir()) and not warnings_of(caplog)


@posix_only
@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/qwen3-tts-cuda-graphs/kernels"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ({}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ({kernel_cache.VARIABLE: "~/chosen", "XDG_CACHE_HOME": "/xdg"}, "/home/me/chosen"),
    ],
)
def test_where_the_folder_is(variables, expected, monkeypatch):
    for name in (kernel_cache.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    assert str(kernel_cache.choose_folder()) == expected


PROCESS = """
    import sys, time
    from qwen3_tts_cuda_graphs.fast import kernel_cache, nvrtc

    nvrtc.version = lambda: (12, 8)
    nvrtc.compile_source = lambda source, architecture: f"{source} for {architecture}, ".encode() * 100_000
    warnings = []
    kernel_cache.log.warning = lambda message, *args: warnings.append(message % args)

    sys.stdin.readline()  # all processes begin at once
    for number in range(50):
        source = f"kernel {number}"
        for _ in range(2):
            assert kernel_cache.load_or_compile(source, "sm_90") == nvrtc.compile_source(source, "sm_90")
    assert not warnings, warnings
"""


@pytest.mark.slow
def test_processes_write_and_read_at_once(folder):
    """Each always has the right code, and none ever sees half a file."""
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    pipes = dict(stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert not list(folder.glob("*.tmp"))


# ---- Threads


def test_what_was_started_ahead_is_not_compiled_again(folder, compiled, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, "off")
    ahead = kernel_cache.compile_ahead(SOURCE, "sm_90")
    assert kernel_cache.compile_source(SOURCE, "sm_90") == ahead.result()
    assert kernel_cache.compile_source(SOURCE, "sm_80") != ahead.result()
    assert len(compiled) == 2


def test_kernels_are_compiled_at_once(folder, compiled, monkeypatch):
    """One after another, the first would wait in vain for the others."""
    barrier = threading.Barrier(3)

    def compile_source(source, architecture):
        barrier.wait(timeout=20)
        return source.encode()

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for source in "abc":
        kernel_cache.compile_ahead(source, "sm_90")
    assert [kernel_cache.compile_source(source, "sm_90") for source in "abc"] == [b"a", b"b", b"c"]


def test_a_failure_ahead_is_an_error_where_the_code_is_needed(folder, compiled, monkeypatch):
    """It must not end the program earlier, leaves no file, and the next call tries again."""
    answers = [OSError("no NVRTC"), b"code"]

    def compile_source(source, architecture):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    ahead = kernel_cache.compile_ahead(SOURCE, "sm_90")
    with pytest.raises(OSError, match="no NVRTC"):
        ahead.result()
    assert not list(folder.iterdir())
    assert kernel_cache.compile_source(SOURCE, "sm_90") == b"code"


# ---- The callers. tests/test_codec_kernels.py has the codec's.


@pytest.fixture
def pretended_gpu(monkeypatch):
    gpu = PretendedGpu()
    gpu.name, gpu.minor = "GPU", 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(nvrtc, "Kernels", lambda cubin, *_: SimpleNamespace(launch=lambda *_, **__: cubin))
    kernels.load.cache_clear()
    yield
    kernels.load.cache_clear()


@pytest.mark.parametrize("caller", [megakernel, batched])
def test_kernels_compiled_ahead_are_the_ones_that_are_used(caller, folder, compiled, pretended_gpu, monkeypatch):
    """Were the source or the architecture not the same, they would be compiled twice."""
    model = SimpleNamespace(config=config(1024, 3072), device=torch.device("cuda", 0), layers=[None] * 28)
    model.config.vocab_size = 3072
    model.dtype = torch.bfloat16
    subject = megakernel.Stack(model, [SimpleNamespace(weight=range(3072))], 1024) if caller is megakernel else model
    monkeypatch.setattr(caller.SOURCE, "needs_of", lambda subject: {})
    caller.SOURCE.compile_ahead(subject)
    code = caller.SOURCE.compile(subject)[1].launch()
    assert code.startswith(b"1:") and len(compiled) == 1
    assert load_or_compile(*compiled[0]) == code and len(compiled) == 1  # and it is kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_from_the_cache_runs(folder, monkeypatch):
    """NVRTC's own code: kept, found without compiling, loaded by the driver."""
    source = 'extern "C" __global__ void put(long long* out) { *out = 42; }'
    device = torch.device("cuda", 0)
    architecture = nvrtc.architecture_of(device)
    code = load_or_compile(source, architecture)

    monkeypatch.setattr(nvrtc, "compile_source", None)
    assert load_or_compile(source, architecture) == code
    out = torch.zeros(1, dtype=torch.long, device=device)
    nvrtc.Kernels(load_or_compile(source, architecture), ["put"], device).launch("put", (1, 1), 1, [out.data_ptr()])
    assert out.item() == 42
