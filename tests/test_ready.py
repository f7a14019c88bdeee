"""Ready, and healed: what is not imported, workers that are started before they are needed."""

import contextlib
import os
import py_compile
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import ROOT
from serving_helpers import LIMIT, is_running, wait_until

from qwen3_tts_cuda_graphs.serving import child_process, spare_worker
from qwen3_tts_cuda_graphs.serving.child_process import start_module, with_socket
from qwen3_tts_cuda_graphs.serving.spare_worker import Spare


def run_python(program: str, *path: str, **variables: str) -> str:
    """In a process of its own: this one has imported most of it already."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])} | variables
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_nobody_calls_is_not_imported(tmp_path, checkpoint):
    """Half of the modules, and seconds of each start. A package may be installed that needs what is left out; and what
    is left out must not change what the model hears."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("from torch._dynamo.utils import is_compile_supported\n1 / 0")
    program = f"""
        import sys
        import numpy as np
        from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports

        with heavy_imports("cpu"):
            import torch
            from qwen3_tts_cuda_graphs.common.loading import load
            from qwen3_tts_cuda_graphs.common.voices import clone_prompt

        tts = load({str(checkpoint())!r}, rows=2)
        noise = np.random.default_rng(0).normal(0, 0.1, 24000).astype(np.float32)

        def voice():
            (item,) = clone_prompt(tts, noise, 24000, "Hello.")
            return item.ref_spk_embedding, item.ref_code

        def masks():
            from transformers import PretrainedConfig, masking_utils

            config = PretrainedConfig(attn_implementation="sdpa", sliding_window=3)
            padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
            where = dict(cache_position=torch.arange(6), past_key_values=None)
            make = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
            return [one(config, torch.zeros(2, 6, 4), padding, **where) for one in make]

        before = [*voice(), *masks()]
        speaker = clone_prompt(tts, noise, 24000, None)
        tts.generate_voice_clone(["Hi.", "Hello there."], voice_clone_prompt=speaker * 2, max_new_tokens=4)
        unused = ("torch._dynamo", "torch.distributed.tensor", "numba", "scipy.signal", "scipy.optimize", "torchvision")
        print([name for name in unused if name in sys.modules])

        import librosa.filters, numba, scipy.signal  # the real ones
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
        from transformers import masking_utils
        from qwen_tts.core.models import modeling_qwen3_tts

        for name in [name for name in sys.modules if name.startswith("librosa")]:
            del sys.modules[name]
        import librosa.filters

        assert masking_utils.TransformGetItemToIndex is not TransformGetItemToIndex
        assert modeling_qwen3_tts.librosa_mel_fn is not librosa.filters.mel
        masking_utils.TransformGetItemToIndex = TransformGetItemToIndex
        modeling_qwen3_tts.librosa_mel_fn = librosa.filters.mel
        print(all(map(torch.equal, before, [*voice(), *masks()])), numba.njit(lambda x: x + 1)(1))
    """
    assert run_python(program, str(tmp_path)).splitlines() == ["[]", "True 2"]


# ---- A spare


@pytest.fixture
def waiting(monkeypatch):
    """A spare whose process does what `program` does with its socket."""
    spares = []

    def start(program: str) -> Spare:
        def start_module(theirs, *arguments, module="worker"):
            code = f"import socket, sys, time; s = socket.socket(fileno={theirs.fileno()}); {program}"
            return subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])

        monkeypatch.setattr(spare_worker, "start_module", start_module)
        spares.append(Spare())
        spares[-1].prepare()
        return spares[-1]

    yield start
    for one in spares:
        one.close()


IMPORTED = "s.send(b'x'); s.recv(1)"
IMPORTS = "s.recv(1)"


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such modes")
@pytest.mark.parametrize(
    "situation, kept",
    [
        ("forbidden", True),
        ("packages are read-only", True),
        ("allowed", False),  # Python keeps it beside the packages
        ("compiled", False),
        ("the user has a place", False),
        ("off", False),
        ("cache is read-only", False),
        ("cache is open to others", False),
    ],
)
def test_what_python_compiles_is_kept(situation, kept, tmp_path):
    """An image forbids it, and each process would compile torch again. A worker finds it; nobody else may write it."""
    (tmp_path / "torch").mkdir()
    source = tmp_path / "torch" / "__init__.py"
    source.write_text("")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    if situation == "compiled":
        py_compile.compile(str(source))
    if situation == "cache is open to others":
        cache.chmod(0o777)
    program = f"""
        import os, socket, subprocess, sys, types

        situation = {situation!r}
        read_only = {{"packages are read-only": "torch", "cache is read-only": "bytecode"}}.get(situation, "/")
        os.access = lambda path, _: not str(path).endswith(read_only)  # root may write everywhere
        os.umask(0)

        from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports
        from qwen3_tts_cuda_graphs.serving import child_process

        with heavy_imports("cpu"):
            pass

        def start(command, env, **_):
            program = "import torch; print(torch.__cached__)"
            subprocess.run([sys.executable, "-c", program], env=env, check=True)

        child_process.subprocess = types.SimpleNamespace(Popen=start, DEVNULL=None)
        child_process.start_module(socket.socket())
    """
    variables = {
        "PYTHONDONTWRITEBYTECODE": "" if situation in ("allowed", "packages are read-only") else "1",
        "PYTHONPYCACHEPREFIX": "/nowhere" * (situation == "the user has a place"),
        "QWEN3_TTS_KERNEL_CACHE": "off" if situation == "off" else str(cache),
    }
    path = Path(run_python(program, str(tmp_path), **variables).strip())
    assert path.is_relative_to(cache) == kept
    assert path.exists() == (kept or situation in ("allowed", "compiled"))
    if kept:
        assert (cache / "bytecode").stat().st_mode & 0o777 == 0o700


def test_a_spare_is_taken_once(waiting):
    one = waiting(IMPORTED)
    process = one.process
    one.prepare()
    assert one.process is process  # one is enough
    ours, taken = one.take()
    assert taken is process and one.take() is None
    ours.close()  # whoever has taken it ends it by that
    taken.wait(LIMIT)


@pytest.mark.parametrize("what", ["has ended", "is stopped", "is stuck", "still imports"])
def test_a_spare_that_cannot_be_used_is_not(waiting, monkeypatch, what):
    """Whatever has become of it, the next worker must not wait for it."""
    one = waiting({"has ended": "pass"}.get(what, IMPORTS))
    process = one.process
    if what == "has ended":
        process.wait(LIMIT)
    if what == "is stopped":
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: child_process.is_stopped(process))
    if what == "is stuck":
        monkeypatch.setattr(spare_worker, "SECONDS_TO_IMPORT", 0.0)
    if what == "still imports":
        ours, taken = one.take()
        ours.close()
        taken.wait(LIMIT)
    else:
        assert one.take() is None and one.process is None
        assert not is_running(process.pid)


def test_no_spare_where_memory_is_short(waiting, monkeypatch):
    monkeypatch.setattr(spare_worker, "MIN_MEMORY", 1 << 60)
    one = waiting(IMPORTED)
    assert one.process is None and one.take() is None


@pytest.mark.parametrize("module", ["worker", "spare_worker"])
def test_a_worker_ends_with_its_server_also_while_it_imports(module):
    ours, process = with_socket(start_module, module=module)
    ours.close()
    with contextlib.closing(ours):
        assert process.wait(LIMIT) == 0
