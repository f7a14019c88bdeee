"""Compiled kernels on disk, with a stand-in for the compiler: what is found, and what is not trusted.

The tests must hold for root, too, whom no permission stops: they look at modes and owners, or make calls fail.
"""

import errno
import logging
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megakernel_cases import PROFILES, STACKS, config, gpu_of, sizes_of

from qwen3_tts_cuda_graphs.fast import batched, cache_folder, kernel_cache, kernels, megakernel, nvrtc

SOURCE = "__global__ void kernel() {}"
posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows has no such modes")


class Cache:
    """An empty cache, whose folder does not exist yet, and a compiler whose machine code is different each time."""

    def __init__(self, folder, put, put_variable, log):
        """put: as setattr, until the test ends; put_variable: the same of the environment"""
        self.folder = folder
        self.put = put
        self.put_variable = put_variable
        self.log = log
        self.compiled = []  # what the compiler was asked for, in order
        put(kernel_cache, "started", {})
        put(nvrtc, "compile_source", self.compile)
        put(nvrtc, "version", lambda: (12, 8))
        put_variable(cache_folder.VARIABLE, str(folder))
        kernel_cache.warn_once.cache_clear()

    def compile(self, source, architecture):
        self.compiled.append((source, architecture))
        return f"{len(self.compiled)}: {source} for {architecture}".encode() * 100

    def get(self, source=SOURCE, architecture="sm_90"):
        """As another process would: nothing is remembered in this one."""
        return kernel_cache.load_or_compile(source, architecture)

    def only_file(self):
        (path,) = self.folder.iterdir()
        return path

    def warnings(self):
        return [record.getMessage() for record in self.log.records if record.levelno >= logging.WARNING]


@pytest.fixture
def cache(monkeypatch, tmp_path, caplog):
    for name in ("XDG_CACHE_HOME", cache_folder.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Cache(tmp_path / "cache" / "kernels", monkeypatch.setattr, monkeypatch.setenv, caplog)


# ---- Found or compiled


def test_the_second_process_does_not_compile(cache):
    """Folder and file are for this user only, whatever the umask is."""
    umask = os.umask(0)
    try:
        first = cache.get()
    finally:
        os.umask(umask)
    assert cache.get() == first
    assert cache.compiled == [(SOURCE, "sm_90")]
    assert not cache.warnings()
    if os.name == "posix":
        assert cache.folder.stat().st_mode & 0o777 == 0o700
        assert cache.only_file().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: dict(source=SOURCE + " "),
        lambda cache: dict(architecture="compute_90"),
        lambda cache: cache.put(nvrtc, "version", lambda: (12, 9)),
        lambda cache: cache.put(nvrtc, "compiler_options", lambda architecture: ["-G"]),
        lambda cache: cache.put(torch, "__version__", "2.99"),
    ],
    ids=["source", "architecture", "NVRTC", "options", "torch"],
)
def test_whatever_changes_the_code_changes_the_key(change, cache):
    """An upgrade must not run the kernels of the version before."""
    before = cache.get()
    assert cache.get(**change(cache) or {}) != before
    assert len(cache.compiled) == len(list(cache.folder.iterdir())) == 2


def test_every_gpu_has_kernels_of_its_own(cache):
    """One home directory may serve GPUs that differ only in their number of blocks or in their memory."""
    cases = [(profile, stack) for profile in PROFILES for stack in STACKS]
    keys = set()
    for profile, stack in cases:
        source = megakernel.SOURCE.complete(sizes_of(profile, stack))
        keys.add(kernel_cache.cache_key(source, f"sm_{PROFILES[profile][0]}"))
    assert len(keys) == len(cases)


# ---- Files and folders that are not used


def of_another_user(cache, path):
    status = SimpleNamespace(st_mode=0o100600, st_uid=os.getuid() + 1)
    cache.put(kernel_cache, "os", SimpleNamespace(**vars(os) | {"fstat": lambda descriptor: status}))


def of_another_key(cache, path):
    cache.get("other")
    (other,) = set(cache.folder.iterdir()) - {path}
    os.replace(other, path)
    cache.compiled.pop()


@pytest.mark.parametrize(
    "damage, word",
    [
        (lambda cache, path: path.write_bytes(path.read_bytes()[:-1]), "is damaged"),
        (lambda cache, path: path.write_bytes(path.read_bytes()[:20]), "is damaged"),
        (lambda cache, path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "is damaged"),
        (of_another_key, "is damaged"),
        pytest.param(lambda cache, path: path.chmod(0o620), "can be written by others", marks=posix_only),
        pytest.param(of_another_user, "belongs to user", marks=posix_only),
    ],
    ids=["cut", "cut in the checksum", "changed", "another kernel's", "writable by others", "another user's"],
)
def test_a_file_that_cannot_be_trusted_is_compiled_again(damage, word, cache):
    """Half-written after a power cut, renamed by hand, or left from a time when the folder was open to others: it must
    not reach the GPU. The new one takes its place."""
    cache.get()
    path = cache.only_file()
    damage(cache, path)
    again = cache.get()
    assert len(cache.compiled) == 2 and again.startswith(b"2:")
    (warning,) = cache.warnings()
    assert word in warning and str(path) in warning
    assert os.name != "posix" or cache.only_file().stat().st_mode & 0o777 == 0o600
    if damage is not of_another_user:
        assert cache.get() == again


def make_folder(cache, mode=0o700):
    if os.name != "posix":
        pytest.skip("Windows has no such modes")
    cache.folder.mkdir(parents=True)
    cache.folder.chmod(mode)


def make_folder_of_another_user(cache):
    make_folder(cache)
    owner = cache.folder.stat().st_uid
    cache.put(os, "getuid", lambda: owner + 1)


def put_a_file_in_its_place(cache):
    cache.folder.parent.write_text("")


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def take_home(cache):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    cache.put_variable(cache_folder.VARIABLE, "")
    cache.put(kernel_cache.Path, "home", no_home)


@pytest.mark.parametrize(
    "spoil, word",
    [
        *((partial(make_folder, mode=mode), f"by others (mode {mode:o}") for mode in (0o770, 0o702, 0o1777)),
        (make_folder_of_another_user, "belongs to user"),
        (put_a_file_in_its_place, "cache"),
        (lambda cache: cache.put(kernel_cache.tempfile, "mkstemp", fail), os.strerror(errno.ENOSPC)),
        (lambda cache: cache.put(os, "replace", fail), os.strerror(errno.ENOSPC)),
        (take_home, "home directory"),
    ],
)
def test_a_cache_that_cannot_be_used_is_no_error(spoil, word, cache):
    """Another user could plant a kernel in a folder such as one of /tmp, also for root. A full or read-only disk, a
    user id without an account. Kernels are compiled each time, the log says so once, and no temporary file is left."""
    spoil(cache)
    assert cache.get().startswith(b"1:") and cache.get().startswith(b"2:")
    (warning,) = cache.warnings()
    assert warning.startswith("compiled kernels are not kept: ") and cache_folder.VARIABLE in warning
    assert word in warning
    assert not cache.folder.is_dir() or not list(cache.folder.iterdir())


def test_the_cache_can_be_switched_off(cache, tmp_path):
    cache.put_variable(cache_folder.VARIABLE, "off")
    assert cache.get() != cache.get()
    assert not list(tmp_path.iterdir()) and not Path("off").exists() and not cache.warnings()


@posix_only
@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/qwen3-tts-cuda-graphs/kernels"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ({}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ({cache_folder.VARIABLE: "~/chosen", "XDG_CACHE_HOME": "/xdg"}, "/home/me/chosen"),
    ],
)
def test_where_the_folder_is(variables, expected, cache):
    for name, value in ({cache_folder.VARIABLE: "", "HOME": "/home/me"} | variables).items():
        cache.put_variable(name, value)
    assert str(cache_folder.choose_folder()) == expected


# ---- Threads


def test_what_was_started_ahead_is_not_compiled_again(cache):
    cache.put_variable(cache_folder.VARIABLE, "off")
    ahead = kernel_cache.start_compiling(SOURCE, "sm_90")
    assert kernel_cache.compile_source(SOURCE, "sm_90") == ahead.result()
    assert kernel_cache.compile_source(SOURCE, "sm_80") != ahead.result()
    assert len(cache.compiled) == 2


def test_kernels_are_compiled_at_once(cache):
    """One after another, the first would wait in vain for the others."""
    barrier = threading.Barrier(3)
    cache.put(nvrtc, "compile_source", lambda source, _: barrier.wait(timeout=20) * b"" + source.encode())
    for source in "abc":
        kernel_cache.start_compiling(source, "sm_90")
    assert [kernel_cache.compile_source(source, "sm_90") for source in "abc"] == [b"a", b"b", b"c"]


def test_a_failure_ahead_is_an_error_where_the_code_is_needed(cache):
    """It must not end the program earlier, leaves no file, and the next call tries again."""
    cache.put(nvrtc, "compile_source", fail)
    ahead = kernel_cache.start_compiling(SOURCE, "sm_90")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        ahead.result()
    assert not list(cache.folder.iterdir())
    cache.put(nvrtc, "compile_source", cache.compile)
    assert kernel_cache.compile_source(SOURCE, "sm_90").startswith(b"1:")


# ---- The callers. tests/test_codec_kernels.py has the codec's.


@pytest.mark.parametrize("caller", [megakernel, batched])
def test_kernels_compiled_ahead_are_the_ones_that_are_used(caller, cache):
    """Were the source or the architecture not the same, they would be compiled twice."""
    cache.put(torch.cuda, "get_device_properties", lambda device: gpu_of("H200"))
    cache.put(nvrtc, "Kernels", lambda cubin, *_: SimpleNamespace(launch=lambda *_, **__: cubin))
    cache.put(caller.SOURCE, "needs_of", lambda subject: {})
    model = SimpleNamespace(config=config(1024, 3072), device=torch.device("cuda", 0), layers=[None] * 28)
    model.config.vocab_size = 3072
    model.dtype = torch.bfloat16
    subject = megakernel.Stack(model, [SimpleNamespace(weight=range(3072))], 1024) if caller is megakernel else model
    kernels.load_kernels.cache_clear()
    try:
        caller.SOURCE.compile_ahead(subject)
        code = caller.SOURCE.compile(subject)[1].launch()
    finally:
        kernels.load_kernels.cache_clear()
    assert code.startswith(b"1:") and len(cache.compiled) == 1
    assert cache.get(*cache.compiled[0]) == code and len(cache.compiled) == 1  # and it is kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_from_the_cache_runs():
    """NVRTC's own code: kept, found without compiling, which would write the file again, and loaded by the driver."""
    source = 'extern "C" __global__ void put(long long* out) { *out = 42; }'
    device = torch.device("cuda", 0)
    architecture = nvrtc.architecture_of(device)
    code = kernel_cache.load_or_compile(source, architecture)
    path = cache_folder.choose_folder() / f"{kernel_cache.cache_key(source, architecture).hex()}.kernel"
    written = path.stat().st_mtime_ns
    assert kernel_cache.load_or_compile(source, architecture) == code and path.stat().st_mtime_ns == written
    out = torch.zeros(1, dtype=torch.long, device=device)
    nvrtc.Kernels(code, ["put"], device).launch("put", (1, 1), 1, [out.data_ptr()])
    assert out.item() == 42
