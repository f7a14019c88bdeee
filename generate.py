#!/usr/bin/env python3
"""Qwen3-TTS with every frame captured as CUDA graphs: `tts = load("0.6B")` is upstream's model, accelerated.

Upstream builds every prompt, calls `talker.generate` once and decodes the codes to audio. `accelerate` puts
`FrameLoop.generate` in its place, whose loop is `FrameLoop.frames`. The package qwen3_tts_cuda_graphs adds faster
kernels, streams and a server; where it can be imported, `python generate.py` is its command line.
"""

import argparse
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__" and find_spec("qwen3_tts_cuda_graphs"):
    runpy.run_module("qwen3_tts_cuda_graphs.cli", run_name="__main__")  # imports torch when the options are checked
    sys.exit()

import soundfile
import torch
import transformers
from huggingface_hub import snapshot_download
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import GraphPool, Rows, TalkerGraph, draw_noise, round_up, static_cache

VARIANTS = "0.6B-Base", "1.7B-Base", "0.6B-CustomVoice", "1.7B-CustomVoice", "1.7B-VoiceDesign"
MODELS = {name.removesuffix("-Base"): f"Qwen/Qwen3-TTS-12Hz-{name}" for name in VARIANTS}  # -> hub id


def load(model: str, device=None, dtype: torch.dtype | None = None, **options):
    """Load and accelerate a model. Default: CUDA and bfloat16, without CUDA CPU and float32."""
    return accelerate(load_upstream(model, device, dtype), **options)


def load_upstream(model: str, device=None, dtype: torch.dtype | None = None):
    """Upstream's model, with Qwen's pattern. `model` is a folder, a hub id or a short name from MODELS."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    hub_id = MODELS.get(model, model)
    if not Path(model).is_dir() and "/" not in hub_id:
        raise ValueError(f"there is no folder {model}: give another, a hub id, or one of {', '.join(MODELS)}")
    # Given an id, transformers 4.57 would ask the hub for tags, even offline.
    folder = model if Path(model).is_dir() else snapshot_download(hub_id)
    tts = Qwen3TTSModel.from_pretrained(folder, device_map=device, dtype=dtype)
    # Upstream passes fix_mistral_regex=True, and transformers 4.57 then installs Mistral's: put Qwen's back.
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    tts.processor.tokenizer.backend_tokenizer.pre_tokenizer[0] = split
    return tts


def accelerate(tts, max_seq_len: int = 2048):
    """Make a model's methods fast, in place. No other thread may use the GPU during it. `max_seq_len` positions are
    for prompt and speech together, one per frame (12.5 per second)."""
    tts.model.talker.generate = FrameLoop(tts.model.talker, max_seq_len).generate
    return tts


class FrameGraphs:
    """Rows, one for each text, and the two graphs that decode a frame of them."""

    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    @torch.no_grad()
    def __init__(self, talker, row_count: int, length: int):
        config = talker.config
        kind = talker.dtype, talker.device
        self.rows = Rows(config, row_count, length, *kind)
        code_cache = static_cache(config.code_predictor_config, row_count, round_up(config.num_code_groups), *kind)
        self.predictor = PredictorGraph(talker, self.rows, *code_cache)
        self.talker = TalkerGraph(talker, self.rows, *static_cache(config, row_count, length, *kind))
        pool = GraphPool(talker.device)
        self.predict = pool.capture(self.predictor.step)
        self.step = pool.capture(self.talker.step)


class FrameLoop:
    """Stands in for talker.generate: prompts in, codes and hidden states out. Call it from one thread at a time."""

    def __init__(self, talker, max_seq_len: int):
        self.talker = talker
        self.max_seq_len = max_seq_len
        self.graphs = FrameGraphs(talker, 1, round_up(max_seq_len))  # of the last request

    def graphs_for(self, row_count: int) -> FrameGraphs:
        if self.graphs is None or len(self.graphs.rows.token) != row_count:
            self.graphs = None  # free its memory first
            self.graphs = FrameGraphs(self.talker, row_count, round_up(self.max_seq_len))
        return self.graphs

    def frame_limit(self, attention_mask, max_new_tokens, repetition_penalty, **_) -> int:
        """The most frames that a request can have. Raises an error if it cannot have any."""
        used = attention_mask.shape[1]
        if used >= self.max_seq_len:
            raise ValueError(f"the prompt takes {used} of {self.max_seq_len} positions: raise max_seq_len")
        if max_new_tokens is None:  # transformers then makes 20, in version 4 less the prompt's length
            max_new_tokens = 20 - used * transformers.__version__.startswith("4.")
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 2: the last has no audio")
        if repetition_penalty is not None and not repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {repetition_penalty}, it must be above 0: 1.0 for none")
        return min(max_new_tokens - 1, self.max_seq_len - used)

    @torch.no_grad()
    def frames(self, **request) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each frame's codes (B, 16) and hidden state (B, H) until all texts have ended."""
        limit = self.frame_limit(**request)
        graphs = self.graphs_for(len(request["inputs_embeds"]))
        rows = graphs.rows
        self.read_prompts(graphs, **request)
        for frame in range(limit):
            if rows.ended.all():  # here the host waits for the GPU
                return
            if request["subtalker_dosample"]:
                draw_noise(rows.code_noise)
            graphs.predict()
            yield rows.codes[:, frame], rows.hidden[:, 0].clone()
            if request["do_sample"]:
                draw_noise(rows.noise)
            graphs.step()

        if not rows.ended.all():
            name = "max_seq_len" if limit + 1 < (request["max_new_tokens"] or 0) else "max_new_tokens"
            warning = f"the speech was cut off after {limit} frames, before its end: raise {name}"
            warnings.warn_explicit(warning, UserWarning, __file__, 1)  # each time; `warn` shows it once

    def read_prompts(
        self, graphs: FrameGraphs, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **settings
    ) -> None:
        """Upstream pads prompts (B, L, H) on the left. Here they begin at position 0 of their rows."""
        rows = graphs.rows
        lengths = attention_mask.sum(-1).tolist()
        prompts = inputs_embeds.new_zeros(len(lengths), round_up(max(lengths)), inputs_embeds.shape[-1])
        for row, length in enumerate(lengths):
            rows.prompt_length[row] = length
            prompts[row, :length] = inputs_embeds[row, -length:]
            rows.set_text(row, trailing_text_hidden[row], tts_pad_embed[0])
        rows.configure(**settings)
        if settings["do_sample"]:
            draw_noise(rows.noise)
        graphs.talker.prefill(prompts)

    def generate(self, **request) -> transformers.generation.GenerateDecoderOnlyOutput:
        """Decode a list of texts and return what upstream reads of its talker.generate's output, one entry
        per forward: first the prompt's, whose codes are None, then one for each frame, with its codes."""
        codes, hiddens = zip(*self.frames(**request))
        steps = zip([*hiddens, hiddens[-1]], [None, *codes])  # the last hidden state is not read
        return transformers.generation.GenerateDecoderOnlyOutput(
            sequences=torch.stack(codes, dim=1)[..., 0],  # (B, T)
            hidden_states=tuple(((hidden[:, None],), frame) for hidden, frame in steps),
        )


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak a text with the voice of a speaker.pt.")
    parser.add_argument("--model", default="0.6B", help=f"{', '.join(MODELS)}, a hub id or a folder")
    parser.add_argument("--speaker", required=True, help="a speaker embedding from extract_speaker.py")
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", required=True, help="the audio file to write")
    args = parser.parse_args()
    if not Path(args.speaker).is_file():
        parser.error(f"there is no speaker file {args.speaker}: make one with extract_speaker.py")

    speaker = torch.load(args.speaker, map_location="cpu", weights_only=True)
    voice = dict(ref_code=[None], ref_spk_embedding=[speaker], x_vector_only_mode=[True], icl_mode=[False])
    (audio,), rate = load(args.model).generate_voice_clone(args.text, voice_clone_prompt=voice)
    soundfile.write(args.output, audio, rate)
    print(f"{args.output}: {len(audio) / rate:.2f} s of audio")


if __name__ == "__main__":
    main()
