"""Versions of other packages: the pairs that work, and the error messages for others."""

import re
import shutil
import warnings
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import ROOT, run_program
from packaging.specifiers import SpecifierSet

from qwen3_tts_cuda_graphs.common import loading
from qwen3_tts_cuda_graphs.fast import paths

PAIRS = "transformers==4.57.3 with qwen-tts==0.1.1, or transformers==5.16.1 with qwen-tts-hf==0.1.1.post1"


@pytest.mark.parametrize(
    "version, package",
    [("5.16.1", "qwen-tts"), ("4.57.3", "qwen-tts-hf"), ("5.17.0", "qwen-tts-hf"), ("5.0.0", "qwen-tts")],
)
def test_a_wrong_pair_is_named(version, package, tmp_path):
    """Without this check, the error is a TypeError or a missing attribute deep in qwen_tts."""
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}")
    (tmp_path / "torch.py").write_text("backends = None")
    (tmp_path / "qwen_tts").mkdir()
    for name in ("__init__.py", *(["_transformers_compat.py"] if package == "qwen-tts-hf" else [])):
        (tmp_path / "qwen_tts" / name).touch()
    result = run_program("import qwen3_tts_cuda_graphs.upstream", tmp_path)
    wanted = f"ImportError: transformers {version} is not for {package}: install {PAIRS}"
    assert result.stderr.splitlines()[-1] == wanted


def test_without_qwen_tts_its_absence_is_the_error(tmp_path):
    (tmp_path / "transformers.py").write_text("__version__ = '4.57.3'")
    (tmp_path / "torch.py").write_text("backends = None")
    (tmp_path / "librosa").mkdir()
    (tmp_path / "librosa" / "filters.py").touch()
    program = "sys.path = [path for path in sys.path if 'site-packages' not in path]\n"
    result = run_program(f"{program}import qwen3_tts_cuda_graphs.upstream", tmp_path)
    assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'qwen_tts'"


def test_the_pairs_are_those_that_setup_installs():
    """No message and no script names an older release."""
    installed = (ROOT / "setup.sh").read_text() + (ROOT / "requirements.txt").read_text()
    for name in re.findall(r"\S+==[\w.]+\w", PAIRS):
        assert name in installed
    assert transformers.__version__ in PAIRS


def test_the_promised_python_can_install_all_that_is_pinned():
    """A newer release of a pinned package may have dropped a version of Python that this project supports."""
    promised = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    files = (ROOT / "setup.sh").read_text() + "".join(path.read_text() for path in ROOT.glob("requirements*.txt"))
    names = set(re.findall(r"^(?:qwen_tts=\")?([\w-]+)(?:\[\w+\])?==", files, re.M)) - {"qwen-tts-hf"}
    needed = {found.name: found.metadata["Requires-Python"] for found in distributions() if found.name in names}
    assert {"torch", "starlette", "av", "pytest"} <= needed.keys() <= names
    assert {name: python for name, python in needed.items() if promised not in SpecifierSet(python or "")} == {}
    for file in ("README.md", "docs/install.md", "setup.sh"):
        assert re.findall(r"Python (3[.\d]+) or newer", (ROOT / file).read_text()) == [promised], file
    major, minor = promised.split(".")
    assert f"sys.version_info < ({major}, {minor})" in files and f"older than {promised}:" in files


def test_an_older_torch_is_named(monkeypatch):
    """JetPack's torch may be older than the graphs need. `load` says so, before capturing fails."""
    old = SimpleNamespace(__version__="2.3.1", nn=SimpleNamespace(functional=SimpleNamespace()))
    monkeypatch.setattr(paths, "torch", old)
    with pytest.raises(ValueError, match="torch 2.3.1 has no torch.nn.functional.rms_norm: install torch 2.5 or newer"):
        paths.check_torch()


@pytest.mark.slow
def test_a_torch_without_enable_gqa_gives_the_same_tokens(checkpoint, tmp_path):
    """The attention of JetPack's torch 2.5.0a0 refuses an argument that transformers passes to any torch 2.5.

    transformers passes it where there is no mask. Our graphs always have a mask, but upstream's codec, which the three
    files alone use, and upstream's encoder of in-context references have none.
    """
    for name in ("cudagraph_talker.py", "cudagraph_predictor.py", "generate.py"):
        shutil.copy(ROOT / name, tmp_path)
    program = f"""
        import numpy as np, torch
        import torch.nn.functional as F
        from qwen3_tts_cuda_graphs.common.loading import load
        torch.set_num_threads(1)
        attention = F.scaled_dot_product_attention

        def speak():
            tts = load({str(checkpoint())!r}, "cpu", max_seq_len=256)
            reference = np.sin(np.arange(24000) / 20).astype(np.float32), 24000
            torch.manual_seed(0)
            prompt = tts.create_voice_clone_prompt(reference, "what it says")
            wavs, _ = tts.generate_voice_clone("Hello.", voice_clone_prompt=prompt, max_new_tokens=20)
            return prompt[0].ref_code, wavs[0]

        def without_gqa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)

        codes, audio = speak()
        F.scaled_dot_product_attention = without_gqa
        codes_without, audio_without = speak()
        assert torch.equal(codes, codes_without) and len(audio) > 0 and (audio == audio_without).all()
    """
    result = run_program(program, tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch, tmp_path):
    """pip's torch has no CUDA on Windows and Jetson, and a container may lack --gpus. A warning says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(loading, "SIGNS_OF_A_GPU", [tmp_path])
    with pytest.warns(UserWarning, match="cannot use this machine's GPU, so the CPU speaks"):
        assert loading.choose_device().type == "cpu"

    with warnings.catch_warnings(action="error"):  # it was asked for, or hidden, or there is none
        loading.choose_device("cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        loading.choose_device()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr(loading, "SIGNS_OF_A_GPU", [tmp_path / "none"])
        monkeypatch.setattr(loading.shutil, "which", lambda name: None)
        loading.choose_device()
