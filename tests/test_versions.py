"""Versions of other packages: which pairs work, and what is said about the others."""

import re
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import ROOT

from fast.paths import check_torch
from generate import PAIRS


def run(program, *folders, cwd=ROOT):
    program = f"import sys\nsys.path[:0] = {[str(folder) for folder in folders]}\n" + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True)


WRONG_PAIRS = [("5.16.1", "qwen-tts"), ("4.57.3", "qwen-tts-hf"), ("5.17.0", "qwen-tts-hf"), ("5.0.0", "qwen-tts")]


def test_a_wrong_pair_is_named(tmp_path):
    """A TypeError in a decorator or a missing attribute of a config, deep in qwen_tts, tells nobody what to install.

    Without any qwen-tts, its absence is the error.
    """
    for package in ("qwen-tts", "qwen-tts-hf"):
        (tmp_path / package / "qwen_tts").mkdir(parents=True)
        (tmp_path / package / "qwen_tts" / "__init__.py").write_text("raise SystemError('imported')")
    (tmp_path / "qwen-tts-hf" / "qwen_tts" / "_transformers_compat.py").touch()
    program = f"""
        import importlib.util
        import transformers

        def print_error(version):
            transformers.__version__ = version
            try:
                import generate
            except ImportError as error:
                print(f"{{type(error).__name__}}: {{error}}")

        for version, package in {WRONG_PAIRS}:
            sys.path.insert(0, {str(tmp_path)!r} + "/" + package)
            print_error(version)
            del sys.path[0]

        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "qwen_tts" else find_spec(name)
        sys.modules["qwen_tts"] = None
        print_error("4.57.3")
    """
    result = run(program)
    *errors, last = result.stdout.splitlines()
    assert errors == [
        f"ImportError: transformers {version} does not work with {package}: {PAIRS}" for version, package in WRONG_PAIRS
    ], result.stderr
    assert last.startswith("ModuleNotFoundError") and "qwen_tts" in last


def test_the_pairs_are_those_that_setup_installs():
    """A message or a script that still names the release before."""
    installed = (ROOT / "setup.sh").read_text() + (ROOT / "requirements.txt").read_text()
    for name in re.findall(r"\S+==[\w.]+", PAIRS):
        assert name in installed
    assert transformers.__version__ in PAIRS


@pytest.mark.parametrize(
    "device, missing", [("cpu", "nn.functional.rms_norm"), ("cuda", "cuda.CUDAGraph.register_gen")]
)
def test_an_older_torch_is_named(device, missing):
    """JetPack's torch may be older than the graphs need: a sentence at load, not an AttributeError while capturing."""
    functional = SimpleNamespace() if device == "cpu" else SimpleNamespace(rms_norm=None)
    old = SimpleNamespace(__version__="2.3.1", nn=SimpleNamespace(functional=functional), cuda=SimpleNamespace())
    with pytest.raises(ValueError, match=rf"torch 2.3.1 has no torch.{missing}\w*: install torch 2.5 or newer"):
        check_torch(torch.device(device), old)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
@pytest.mark.slow
def test_a_torch_without_enable_gqa_gives_the_same_tokens(checkpoint, tmp_path):
    """JetPack's torch 2.5.0a0: its attention refuses an argument that transformers passes to any torch 2.5.

    It passes it where there is no mask, which upstream's own talker.generate does. Our graphs always pass one. This is
    about the three files alone, whose codec is upstream's, and in-context, where upstream encodes the reference.
    """
    for name in ("cudagraph_talker.py", "cudagraph_predictor.py", "generate.py"):
        shutil.copy(ROOT / name, tmp_path)
    program = f"""
        import numpy as np, torch
        import torch.nn.functional as F
        from generate import load
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
    result = run(program, tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
