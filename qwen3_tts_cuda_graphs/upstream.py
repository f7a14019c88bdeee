"""Upstream's classes, imported without what only its 25 Hz models need. Weights that are missing in a checkpoint are an
error, instead of being initialized at random.

Import them from here, not from qwen_tts. generate.py has a copy of both functions, because it runs without the package;
a test compares the copies.
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers


def load_weights(cls, folder, *args, **options):
    """Replaces transformers' from_pretrained, which initializes missing weights at random and only warns."""
    options |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
    model, found = transformers.PreTrainedModel.from_pretrained.__func__(cls, folder, *args, **options)
    found["NaN_keys"] = [name for name, x in model.state_dict().items() if not x.sum(dtype=torch.float32).isfinite()]
    for problem in ("missing", "mismatched", "NaN"):
        if names := sorted(map(str, found[f"{problem}_keys"])):
            raise ValueError(f"{folder} has {len(names)} {problem} weights: {', '.join(names[:3])}: give another model")
    return model


def import_upstream():
    """Upstream's model class, without its 25 Hz tokenizer, whose packages (torchaudio, sox) may be broken."""
    spec = find_spec("qwen_tts")
    suffix = "-hf" if spec and Path(spec.origin).with_name("_transformers_compat.py").is_file() else ""
    if not transformers.__version__.startswith(("5.15.", "5.16.") if suffix else "4.57."):
        pairs = "transformers==4.57.3 with qwen-tts==0.1.1, or transformers==5.16.1 with qwen-tts-hf==0.1.1.post1"
        raise ImportError(f"transformers {transformers.__version__} is not for qwen-tts{suffix}: install {pairs}")
    if hasattr(torch.backends, "python_native"):  # torch 2.13 would compile RoPE's product, with a C compiler
        torch.backends.python_native.disable_operations("bmm")
    try:
        import librosa.filters  # noqa: F401
    except RuntimeError:  # numba can write compiled functions neither beside librosa nor into the home
        import_upstream.folder = tempfile.TemporaryDirectory()  # until the process ends
        os.environ["XDG_CACHE_HOME"] = import_upstream.folder.name
    tokenizer = "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1"
    sys.modules.setdefault(tokenizer, type("unused", (), {"Qwen3TTSTokenizerV1Model": object}))
    from qwen_tts import Qwen3TTSModel

    if isinstance(sys.modules[tokenizer], type):  # not the module, which the program may have imported before
        del sys.modules[tokenizer]
    return Qwen3TTSModel


Qwen3TTSModel = import_upstream()
for base in transformers.PreTrainedModel.__subclasses__():
    if base.__module__.startswith("qwen_tts."):
        base.from_pretrained = classmethod(load_weights)

# After import_upstream:
from qwen_tts import VoiceClonePromptItem  # noqa: E402, F401
from qwen_tts.core import Qwen3TTSTokenizerV2Config, Qwen3TTSTokenizerV2Model  # noqa: E402, F401
from qwen_tts.core.models import (  # noqa: E402, F401
    Qwen3TTSConfig,
    Qwen3TTSForConditionalGeneration,
    Qwen3TTSProcessor,
)
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration  # noqa: E402, F401
