"""Fixtures: tiny checkpoints with random weights, a recording, and every kind of voice."""

import functools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's modules are not installed

from helpers import Voice

from tools.random_checkpoint import write_checkpoint

# Tiny tensors, and the other cores run other tests. The variable is for the tests' subprocesses.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """What the tests compile, wrong kernels among it, is not kept in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN3_TTS_KERNEL_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, size, gain) -> folder, written when first asked for."""

    @functools.cache
    def write(kind="base", size="tiny", gain=1.0):
        folder = tmp_path_factory.mktemp(f"{size}-{kind}")
        write_checkpoint(folder, size, kind, gain=gain)
        return folder

    return write


@pytest.fixture(scope="session")
def recording():
    """Two seconds of something with a pitch, at a rate that the models must resample."""
    time = np.arange(2 * 16000) / 16000
    noise = np.random.default_rng(0).normal(size=len(time))
    return (0.3 * np.sin(2 * np.pi * 180 * time) + 0.02 * noise).astype(np.float32), 16000


@pytest.fixture(scope="session")
def voices(checkpoint, recording):
    """voices(name) -> Voice"""
    return functools.cache(lambda name: Voice(name, checkpoint, recording))


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
