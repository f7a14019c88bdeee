"""Compiled kernels on disk, with a stand-in for the compiler: what is found, what is not trusted, what is removed.

The tests must hold for root, too, whom no permission stops: they look at modes and owners, or make calls fail.
"""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from test_profiles import PROFILES, STACKS, sizes_of

from fast import batched, codec_kernels, kernel_cache, megakernel, nvrtc

SOURCE = "__global__ void kernel() {}"
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of an empty cache. It does not exist yet."""
    folder = tmp_path / "cache" / "kernels"
    monkeypatch.setenv(kernel_cache.VARIABLE, str(folder))
    monkeypatch.setattr(kernel_cache, "started", {})
    kernel_cache.log_not_kept.cache_clear()
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
    first = load_or_compile()
    assert load_or_compile() == first
    assert compiled == [(SOURCE, "sm_90")]
    assert not warnings_of(caplog)


def test_folder_and_files_are_for_this_user_only(folder, compiled):
    """Whatever the umask is."""
    umask = os.umask(0)
    try:
        load_or_compile()
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: dict(source=SOURCE + " "),
        lambda patch: dict(architecture="sm_120"),
        lambda patch: dict(architecture="compute_90"),
        lambda patch: patch.setattr(nvrtc, "version", lambda: (12, 9)),
        lambda patch: patch.setattr(nvrtc, "compiler_options", lambda architecture: ["-G"]),
        lambda patch: patch.setattr(torch, "__version__", "2.99"),
    ],
    ids=["source", "architecture", "PTX", "NVRTC", "options", "torch"],
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
        source = megakernel.complete_source(sizes_of(profile, stack))
        keys.add(kernel_cache.cache_key(source, f"sm_{PROFILES[profile][0]}"))
    assert len(keys) == len(cases)


def test_parts_of_the_key_do_not_run_together(compiled, monkeypatch):
    """Source and architecture joined are the same text in both."""
    monkeypatch.setattr(nvrtc, "compiler_options", lambda architecture: [])
    assert kernel_cache.cache_key("a b", "c") != kernel_cache.cache_key("a", " bc")


def test_a_failing_compiler_leaves_nothing(folder, compiled, monkeypatch):
    def refuse(source, architecture):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(nvrtc, "compile_source", refuse)
    with pytest.raises(RuntimeError, match="no such instruction"):
        load_or_compile()
    assert not list(folder.iterdir())


# ---- Damaged and foreign files


def cut(content):
    return content[:-1]


def cut_to_nothing(content):
    return b""


def cut_in_the_header(content):
    return content[:40]


def change_last_byte(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def change_checksum(content):
    start = len(kernel_cache.MAGIC) + kernel_cache.DIGEST_BYTES
    return content[:start] + bytes(kernel_cache.DIGEST_BYTES) + content[start + kernel_cache.DIGEST_BYTES :]


def change_format(content):
    return b"Q" + content[1:]


@pytest.mark.parametrize(
    "damage", [cut, cut_to_nothing, cut_in_the_header, change_last_byte, change_checksum, change_format]
)
def test_a_damaged_file_is_compiled_again(damage, folder, compiled, caplog):
    """A half-written file after a power cut must not reach the GPU. The new one takes its place."""
    load_or_compile()
    path = only_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    again = load_or_compile()
    assert len(compiled) == 2 and again.startswith(b"2:")
    assert load_or_compile() == again
    assert len(compiled) == 2
    (warning,) = warnings_of(caplog)
    assert "is damaged" in warning and str(path) in warning


def test_a_file_of_another_key_is_compiled_again(folder, compiled):
    """Intact, but it is another kernel's: renamed by hand, or copied from another machine."""
    load_or_compile()
    path = only_file(folder)
    other = load_or_compile("other")
    (other_path,) = set(folder.iterdir()) - {path}
    os.replace(path, other_path)
    assert load_or_compile("other") not in (other, load_or_compile())
    assert compiled[2] == ("other", "sm_90")


@posix_only
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_used(mode, folder, compiled, caplog):
    load_or_compile()
    path = only_file(folder)
    path.chmod(mode)
    assert load_or_compile().startswith(b"2:")
    assert "can be written by others" in warnings_of(caplog)[0]
    assert path.stat().st_mode & 0o777 == 0o600  # it was replaced


@posix_only
def test_links_are_not_followed(folder, compiled, tmp_path, caplog):
    """The file behind the link has the right content, but it is elsewhere."""
    load_or_compile()
    path = only_file(folder)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    content = elsewhere.read_bytes()
    assert load_or_compile().startswith(b"2:")
    assert "cannot be read" in warnings_of(caplog)[0]
    assert not path.is_symlink() and elsewhere.read_bytes() == content


@posix_only
def test_a_pipe_in_place_of_a_file_does_not_wait(folder, compiled):
    """Opening a pipe waits until somebody writes to it."""
    load_or_compile()
    path = only_file(folder)
    path.unlink()
    os.mkfifo(path, 0o600)
    future = kernel_cache.compiling.submit(load_or_compile)
    try:
        assert future.result(timeout=20).startswith(b"2:")
    finally:
        if not future.done():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # so that the thread can end


def test_a_folder_in_place_of_a_file_is_no_error(folder, compiled, caplog):
    load_or_compile()
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    assert load_or_compile().startswith(b"2:")
    assert only_file(folder) == path  # no temporary file is left
    assert warnings_of(caplog)


# ---- Folders that are not used


def assert_not_used(caplog, compiled, *words):
    """Compiled each time, the same; and the log says so once."""
    assert load_or_compile().startswith(b"1:")
    assert load_or_compile().startswith(b"2:")
    (warning,) = warnings_of(caplog)
    assert warning.startswith("compiled kernels are not kept: ") and kernel_cache.VARIABLE in warning
    for word in words:
        assert word in warning


@posix_only
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(mode, folder, compiled, caplog):
    """Another user could plant a kernel there, such as in a folder of /tmp."""
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert_not_used(caplog, compiled, str(folder), "can be written by others", f"mode {mode:o}")
    assert not list(folder.iterdir())


@posix_only
def test_a_kernel_in_a_folder_that_others_can_write_is_not_run(folder, compiled):
    load_or_compile()
    folder.chmod(0o777)
    assert load_or_compile().startswith(b"2:")


@posix_only
def test_a_folder_of_another_user_is_not_used(folder, compiled, caplog, monkeypatch):
    """Also when this user is root, who could write there."""
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert_not_used(caplog, compiled, "belongs to user")
    assert not list(folder.iterdir())


@posix_only
def test_a_file_of_another_user_is_not_used(folder, compiled, caplog, monkeypatch):
    """Left from a time when the folder was open to others. Only the file is another user's."""
    load_or_compile()
    real_fstat = os.fstat

    def of_another_user(descriptor):
        status = real_fstat(descriptor)
        return SimpleNamespace(st_mode=status.st_mode, st_uid=status.st_uid + 1)

    monkeypatch.setattr(kernel_cache, "os", SimpleNamespace(**vars(os) | {"fstat": of_another_user}))
    assert load_or_compile().startswith(b"2:")
    assert "belongs to user" in warnings_of(caplog)[0]


@posix_only
def test_a_link_in_place_of_the_folder_is_not_used(folder, compiled, caplog, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    assert_not_used(caplog, compiled, "is a link")
    assert not list(elsewhere.iterdir())


def test_a_file_in_place_of_the_folder_is_no_error(folder, compiled, caplog):
    folder.parent.mkdir()
    folder.write_text("")
    assert_not_used(caplog, compiled, str(folder))


def test_a_folder_that_cannot_be_made_is_no_error(folder, compiled, caplog):
    """A read-only disk; here a file where a folder above it should be."""
    folder.parent.write_text("")
    assert_not_used(caplog, compiled, str(folder.parent))


@pytest.mark.parametrize("call", ["mkstemp", "write", "replace"])
def test_a_full_disk_is_no_error(call, folder, compiled, caplog, monkeypatch):
    """Wherever it is noticed. No temporary file is left."""

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "mkstemp":
        monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", fail)
    elif call == "write":
        monkeypatch.setattr(kernel_cache, "with_header", fail)
    else:
        monkeypatch.setattr(os, "replace", fail)
    assert_not_used(caplog, compiled, os.strerror(errno.ENOSPC))
    assert not list(folder.iterdir())


def test_a_read_only_disk_is_read(folder, compiled, caplog, monkeypatch):
    """Such as a container's image that has the kernels: marking a file as used fails there."""

    def fail(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    first = load_or_compile()
    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", fail)
    assert load_or_compile() == first
    assert len(compiled) == 1 and not warnings_of(caplog)


def test_a_user_without_a_home_is_no_error(folder, compiled, caplog, monkeypatch):
    """A container that runs as a user id of no account."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(kernel_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kernel_cache.Path, "home", no_home)
    assert_not_used(caplog, compiled, "home directory")


@pytest.mark.parametrize("value", ["off", "OFF "])
def test_the_cache_can_be_switched_off(value, folder, compiled, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, value)
    monkeypatch.chdir(tmp_path)
    assert load_or_compile() != load_or_compile()
    assert not list(tmp_path.iterdir()) and not warnings_of(caplog)


@pytest.mark.parametrize(
    "platform, variables, expected",
    [
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/qwen3-tts-cuda-graphs/kernels"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ("linux", {"LOCALAPPDATA": "/local"}, "/home/me/.cache/qwen3-tts-cuda-graphs/kernels"),
        ("win32", {"LOCALAPPDATA": "/local", "XDG_CACHE_HOME": "/xdg"}, "/local/qwen3-tts-cuda-graphs/kernels"),
        ("win32", {}, "/home/me/AppData/Local/qwen3-tts-cuda-graphs/kernels"),
        ("linux", {kernel_cache.VARIABLE: "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ("linux", {kernel_cache.VARIABLE: "~/chosen"}, "/home/me/chosen"),
    ],
)
@posix_only
def test_where_the_folder_is(platform, variables, expected, monkeypatch):
    for name in (kernel_cache.VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert str(kernel_cache.choose_folder()) == expected


# ---- Many files, many processes


def set_age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_old_files_are_removed(folder, compiled, monkeypatch):
    """The folder must not grow with every change of a kernel. What is used stays, however old it is."""
    monkeypatch.setattr(kernel_cache, "MAX_FILES", 3)
    paths = []
    for number in range(3):
        load_or_compile(f"kernel {number}")
        (path,) = set(folder.iterdir()) - set(paths)
        paths.append(path)
        set_age(path, 1000 - number)
    load_or_compile("kernel 0")  # the oldest, used again
    assert len(compiled) == 3

    load_or_compile("kernel 3")
    assert len(list(folder.iterdir())) == 3
    assert paths[0].exists() and not paths[1].exists() and paths[2].exists()


def test_temporary_files_of_killed_processes_are_removed(folder, compiled):
    """Those of a process that may still be writing are not."""
    load_or_compile()
    left_behind = folder / "left-behind.tmp"
    being_written = folder / "being-written.tmp"
    for path in (left_behind, being_written):
        path.write_bytes(b"half a ke")
    set_age(left_behind, 2 * kernel_cache.MAX_TEMPORARY_AGE_S)
    load_or_compile("another")
    assert not left_behind.exists() and being_written.exists()


def test_files_that_are_not_ours_stay(folder, compiled, monkeypatch):
    """The user may have named a folder that has other files."""
    monkeypatch.setattr(kernel_cache, "MAX_FILES", 1)
    folder.mkdir(parents=True, mode=0o700)
    other = folder / "thesis.txt"
    other.write_text("years of work")
    set_age(other, 10**8)
    load_or_compile("a")
    load_or_compile("b")
    assert other.read_text() == "years of work"
    assert len(list(folder.iterdir())) == 2


PROCESS = """
    import sys, time
    from fast import kernel_cache, nvrtc

    nvrtc.version = lambda: (12, 8)
    nvrtc.compile_source = lambda source, architecture: f"{source} for {architecture}, ".encode() * 100_000
    kernel_cache.MAX_FILES = 3
    damaged = []
    kernel_cache.log.warning = lambda message, *args: damaged.append(message % args)

    sys.stdin.readline()  # all processes begin at once
    end = time.monotonic() + 1
    rounds = 0
    while time.monotonic() < end:
        for number in range(5):
            source = f"kernel {number}"
            assert kernel_cache.load_or_compile(source, "sm_90") == nvrtc.compile_source(source, "sm_90")
        rounds += 1
    assert not damaged, damaged
    assert rounds > 1
"""


@pytest.mark.slow
def test_processes_write_read_and_remove_at_once(folder):
    """Each always has the right code, and none ever sees half a file. Five kernels, room for three."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
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
    assert kernel_cache.compile_source(SOURCE, "sm_90") == ahead.result()
    assert len(compiled) == 1
    assert kernel_cache.compile_source(SOURCE, "sm_80") != ahead.result()


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
    """It must not end the program earlier, and the next call tries again."""
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
    assert kernel_cache.compile_source(SOURCE, "sm_90") == b"code"


# ---- The callers


@pytest.fixture
def pretended_gpu(monkeypatch):
    gpu = SimpleNamespace(
        name="GPU",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
        L2_cache_size=50 << 20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(nvrtc, "Kernel", lambda cubin, *_: cubin)
    monkeypatch.setattr(nvrtc, "Kernels", lambda cubin, *_: cubin)
    caches = (megakernel.compile_once, batched.compile_for, codec_kernels.compile_for)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_the_megakernel_compiled_ahead_is_the_one_that_is_used(folder, compiled, pretended_gpu):
    """Were the source or the architecture not the same, it would be compiled twice."""
    config = SimpleNamespace(
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
    )
    model = SimpleNamespace(config=config, device=torch.device("cuda", 0), layers=[None] * 28)
    heads = [SimpleNamespace(weight=torch.empty(3072, 1024, device="meta"))]
    megakernel.compile_ahead(model, heads, 1024)
    _, kernel = megakernel.compile_for(model, heads, 1024)
    assert kernel.startswith(b"1:") and len(compiled) == 1
    assert load_or_compile(*compiled[0]) == kernel and len(compiled) == 1  # and it is kept


def test_batched_kernels_compiled_ahead_are_the_ones_that_are_used(folder, compiled, pretended_gpu):
    config = SimpleNamespace(
        hidden_size=1024,
        intermediate_size=3072,
        vocab_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
    )
    device = torch.device("cuda", 0)
    batched.compile_ahead(SimpleNamespace(config=config, device=device))
    kernels = batched.compile_for(device, batched.kernel_sizes(config))
    assert kernels.startswith(b"1:") and len(compiled) == 1
    assert load_or_compile(*compiled[0]) == kernels and len(compiled) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_from_the_cache_runs(folder, monkeypatch):
    """NVRTC's own code: kept, found without compiling, loaded by the driver."""
    source = 'extern "C" __global__ void put(long long* out) { *out = 42; }'
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}"
    code = load_or_compile(source, architecture)

    monkeypatch.setattr(nvrtc, "compile_source", None)
    assert load_or_compile(source, architecture) == code
    device = torch.device("cuda", 0)
    out = torch.zeros(1, dtype=torch.long, device=device)
    nvrtc.Kernels(load_or_compile(source, architecture), ["put"], device).launch("put", (1, 1), 1, [out.data_ptr()])
    assert out.item() == 42
