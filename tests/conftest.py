"""Fixtures: tiny checkpoints with random weights, a recording, and every kind of voice.

Tests may run in any order, and on several workers: random numbers begin anew in each test, and nothing that one leaves
behind is seen by the next.
"""

import functools
import gc
import os
import re
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's modules are not installed

# torch and the project are imported in functions: the process that only starts the workers needs neither.

# Names the folder that all workers share. Set by the caller, it is kept for the next run.
SHARED_FOLDER = "QWEN3_TTS_TESTS"


def pytest_configure(config):
    """Checkpoints of the published sizes take 15 GB, so one set is shared by all workers, and removed at the end."""
    config.shared_folder = None
    if SHARED_FOLDER not in os.environ:
        config.shared_folder = tempfile.TemporaryDirectory(prefix="qwen3-tts-tests-", ignore_cleanup_errors=True)
        os.environ[SHARED_FOLDER] = config.shared_folder.name


def pytest_unconfigure(config):
    if config.shared_folder:
        config.shared_folder.cleanup()
        del os.environ[SHARED_FOLDER]


def pytest_sessionstart(session):
    """Each worker imports what a command imports. tests/test_promises.py imports the rest, too, in other processes."""
    gc.disable()
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        from qwen3_tts_cuda_graphs.common.skipped_imports import skipping_unused

        with skipping_unused():
            import qwen3_tts_cuda_graphs.upstream  # noqa: F401


def pytest_collection_finish(session):
    """To look through all that was imported and collected would take a tenth of the tests' time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run on one worker: its servers, kernels and Chromium are made once. Those of large models run on a
    worker for each model: a size, or a size and a gain."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModel(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, name = nodeid.partition("::")
            return file, *re.findall(r"\('[01]\.\dB', [\d.]+\)|[01]\.\dB", name)[:1]

    return ByModel(config, log)


def seed(name):
    import torch

    torch.manual_seed(zlib.crc32(name.encode()))


def pytest_fixture_setup(fixturedef):
    if fixturedef.scope != "function":
        seed(fixturedef.argname)


@pytest.fixture(autouse=True)
def own_state(request):
    """A test has random numbers of its own, whatever ran before, and leaves torch's defaults as they were. A
    GPU's memory is given back: other workers need it."""
    import torch

    seed(request.node.nodeid)
    yield
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device().type == "cpu"
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module", autouse=True)
def no_engine_is_left():
    """An engine that a module's tests did not close would go on beside those of the next."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("speech engine")] == []


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors are tiny, and the other cores run other tests. The variable is for the tests' subprocesses."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache():
    """What the tests compile, wrong kernels among it, is not kept in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN3_TTS_KERNEL_CACHE", str(Path(os.environ[SHARED_FOLDER]) / "kernels"))
        yield


@pytest.fixture(scope="session")
def checkpoint():
    """checkpoint(kind, size, gain) -> folder, written by the first worker that asks for it. Nobody may change it."""
    import torch

    from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint

    @functools.cache
    def write(kind="base", size="tiny", gain=1.0):
        name = f"{size}-{kind}" if gain == 1 else f"{size}-{kind}-{gain}"
        folder = Path(os.environ[SHARED_FOLDER]) / name
        with FileLock(f"{folder}.lock"), torch.random.fork_rng():
            if not folder.exists():
                unfinished = folder.with_name(f"{name}-unfinished")
                write_checkpoint(unfinished, size, kind, gain=gain)
                unfinished.rename(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def recording_at_another_rate():
    """Two seconds of something with a pitch."""
    import numpy as np

    time = np.arange(2 * 16000) / 16000
    noise = np.random.default_rng(0).normal(size=len(time))
    return (0.3 * np.sin(2 * np.pi * 180 * time) + 0.02 * noise).astype(np.float32), 16000


@pytest.fixture(scope="session")
def recording(recording_at_another_rate):
    """The same at the models' own rate."""
    from qwen3_tts_cuda_graphs.common.samples import resample

    return resample(*recording_at_another_rate, 24000), 24000


@pytest.fixture(scope="session")
def wav(recording_at_another_rate):
    """That recording as a file."""
    from helpers import wav_bytes

    return wav_bytes(*recording_at_another_rate)


@pytest.fixture(scope="session")
def voices(checkpoint, recording):
    """voices(name) -> Voice"""
    import torch
    from helpers import Voice

    @functools.cache
    def load(name):
        with torch.random.fork_rng():
            return Voice(name, checkpoint, recording)

    return load


@pytest.fixture
def voice(voices):
    """A voice whose speech ends by itself."""
    return voices("x-vector").end_comes_up(True)


@pytest.fixture
def endless(voices):
    """The same, which goes on until it is stopped."""
    return voices("x-vector").end_comes_up(False)


@pytest.fixture(scope="module")
def speech(checkpoint, tmp_path_factory):
    """The server's model. It never ends by itself."""
    from serving_helpers import load_speech, never_end  # the other tests do without the server's packages

    speech = load_speech(checkpoint(), tmp_path_factory.mktemp("server") / "voices")
    never_end(speech)
    yield speech
    speech.close()


@pytest.fixture(scope="module")
def server(speech):
    from serving_helpers import RunningServer

    with RunningServer(speech) as server:
        yield server


@pytest.fixture(scope="module")
def loaded():
    """Stands in for `load`: a model that is loaded again is the same one."""
    from qwen3_tts_cuda_graphs.common.loading import load

    return functools.cache(lambda model, device, dtype=None, **options: load(model, device, dtype, **options))


@pytest.fixture
def call(monkeypatch, capfdbinary, loaded, tmp_path):
    """call(main, word, ...) -> exit code, stdout and stderr of a program, in this process and in tmp_path"""
    from helpers import Command

    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capfdbinary, load=loaded)


@pytest.fixture
def speak(call, checkpoint):
    """speak(kind, word, ...) -> that of `qwen3-tts speak` with a tiny model, to out.wav if not elsewhere"""
    from qwen3_tts_cuda_graphs.cli.__main__ import main

    def speak(kind, *words, **options):
        defaults = {"--max-seq-len": 300, "--seed": 3, "--output": "out.wav"}
        if "-o" in words or "--play" in words:
            del defaults["--output"]
        given = [word for option in defaults.items() if option[0] not in words for word in option]
        return call(main, "--model", checkpoint(kind), "--device", "cpu", *given, *words, **options)

    return speak
