#!/usr/bin/env python3
"""Qwen3-TTS with every frame captured as CUDA graphs: `tts = load("0.6B")` is upstream's model, accelerated.

Upstream builds every prompt, calls `talker.generate` once and decodes the codes to audio. `accelerate` puts
`Decoder.generate` in its place, whose loop is `Decoder.frames`. If speech/ and fast/ lie beside this file, their
faster runner makes the frames on a GPU, and this loop is the reference that it is compared with.
"""

import argparse
import contextlib
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__" and all(Path(__file__).resolve().with_name(name).is_dir() for name in ("cli", "common")):
    runpy.run_module("cli", run_name="__main__")  # all voices and options, checked before torch is imported
    sys.exit()

import soundfile
import torch
import transformers
from huggingface_hub import snapshot_download
from tokenizers import Regex, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import RowCache, Rows, TalkerGraph, capture, draw_noise, round_up

HAS_SPEECH = all(Path(__file__).resolve().with_name(folder).is_dir() for folder in ("speech", "fast"))
VARIANTS = "0.6B-Base", "1.7B-Base", "0.6B-CustomVoice", "1.7B-CustomVoice", "1.7B-VoiceDesign"
MODELS = {name.removesuffix("-Base"): f"Qwen/Qwen3-TTS-12Hz-{name}" for name in VARIANTS}  # -> hub id
QWEN_PATTERN = (  # the tokenizer cuts a text into these; byte pairs are merged within them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_upstream(model: str, device=None, dtype: torch.dtype | None = None):
    """Upstream's model, with Qwen's pattern. `model` is a folder, a hub id or a short name from MODELS."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    with contextlib.ExitStack() as errors:  # that say which file is missing or broken
        if Path(__file__).resolve().with_name("common").is_dir():
            from common.checkpoints import complete_folder

            model = errors.enter_context(complete_folder(model))
        elif not Path(model).is_dir():  # given an id, transformers 4.57 would ask the hub for tags, even offline
            model = snapshot_download(MODELS.get(model, model))
        tts = Qwen3TTSModel.from_pretrained(model, device_map=device, dtype=dtype)
    # Upstream passes fix_mistral_regex=True, and transformers 4.57 then installs Mistral's: put Qwen's back.
    tts.processor.tokenizer.backend_tokenizer.pre_tokenizer[0] = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated")
    return tts


def load_weights(cls, folder, *args, **options):
    """In place of transformers' from_pretrained, which makes up weights that are missing, and only warns."""
    options |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
    model, found = transformers.PreTrainedModel.from_pretrained.__func__(cls, folder, *args, **options)
    sums = {name: weight.sum(dtype=torch.float32) for name, weight in model.state_dict().items()}
    found["NaN_keys"] = [name for name, total in sums.items() if not total.isfinite()]
    for problem in ("missing", "mismatched", "NaN"):
        if names := sorted(map(str, found[f"{problem}_keys"])):
            raise ValueError(f"{folder} has {len(names)} {problem} weights: {', '.join(names[:3])}: give another model")
    return model


def load(model: str, device=None, dtype: torch.dtype | None = None, **options):
    """Load and accelerate a model. Default: CUDA and bfloat16, without CUDA CPU and float32."""
    return accelerate(load_upstream(model, device, dtype), **options)


def accelerate(tts, max_seq_len: int = 2048, rows: int = 1, fused: bool | None = None):
    """Make a model's methods fast, in place. No other thread may use the GPU during it. After an error, load it again.

    max_seq_len: positions for prompt and speech together, one per frame (12.5 per second).
    rows: texts of a list, or streams of an engine, that are spoken together. Each takes memory on a GPU.
    fused: the megakernel of fast/. True requires it, False avoids it, None uses it where it runs.
    """
    decoder = Decoder(tts.model.talker, max_seq_len)
    tts.model.talker.generate = decoder.generate
    if HAS_SPEECH:
        from speech import plug_in

        plug_in(tts, decoder, rows, fused)
    elif fused:
        raise ValueError("fused=True needs the folders speech and fast beside generate.py: copy them, too")
    else:
        decoder.graphs_for(1)
    return tts


class Decoder:
    """In place of `talker.generate`: prompts go in, codes and hidden states come out. For one thread at a time."""

    def __init__(self, talker, max_seq_len: int):
        self.talker = talker
        self.max_seq_len = max_seq_len
        self.graphs = None

    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    @torch.no_grad()
    def graphs_for(self, texts: int) -> tuple[Rows, TalkerGraph, Callable, Callable, PredictorGraph]:
        """Rows for this many texts, and what decodes a frame of them. Those of the last request are kept."""
        if self.graphs is None or len(self.graphs[0].token) != texts:
            self.graphs = None  # free its memory first
            rows = Rows(self.talker.config, texts, round_up(self.max_seq_len), self.talker.dtype, self.talker.device)
            predictor, talker = PredictorGraph(self.talker, rows), TalkerGraph(self.talker, rows)
            steps = [capture(graph.step, self.talker.device) for graph in (predictor, talker)]
            self.graphs = rows, talker, *steps, predictor  # kept alive: its graph reads its tensors
        return self.graphs

    def frame_limit(self, attention_mask, max_new_tokens, repetition_penalty, **_) -> int:
        """The most frames that a request can have. Raises an error if it cannot have any."""
        used = attention_mask.shape[1]
        if used >= self.max_seq_len:
            raise ValueError(f"the prompt takes {used} of {self.max_seq_len} positions: raise max_seq_len")
        max_new_tokens = 20 - used if max_new_tokens is None else max_new_tokens  # as transformers: its max_length
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 2: the last has no audio")
        if repetition_penalty is not None and not repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {repetition_penalty}, it must be above 0: 1.0 for none")
        return min(max_new_tokens - 1, self.max_seq_len - used)

    @torch.no_grad()
    def frames(self, **request) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each frame's codes (B, 16) and hidden state (B, H) until all texts have ended."""
        limit = self.frame_limit(**request)
        rows, talker, predict, step, _ = self.graphs_for(len(request["inputs_embeds"]))
        self.read_prompts(rows, talker, **request)
        for frame in range(limit):
            if rows.ended.all():  # here the host waits for the GPU
                return
            if request["subtalker_dosample"]:
                draw_noise(rows.code_noise)
            predict()
            yield rows.codes[:, frame], rows.hidden[:, 0].clone()
            if request["do_sample"]:
                draw_noise(rows.noise)
            step()

        if not rows.ended.all():
            name = "max_seq_len" if limit + 1 < (request["max_new_tokens"] or 0) else "max_new_tokens"
            warning = f"the speech was cut off after {limit} frames, before its end: raise {name}"
            warnings.warn_explicit(warning, UserWarning, __file__, 1)  # each time; `warn` shows it once

    def read_prompts(self, rows, talker, inputs_embeds, attention_mask, trailing_text_hidden, tts_pad_embed, **request):
        """Upstream pads prompts (B, L, H) on the left. Here they begin at position 0 of their rows."""
        lengths = attention_mask.sum(-1).tolist()
        prompts = inputs_embeds.new_zeros(len(lengths), round_up(max(lengths)), inputs_embeds.shape[-1])
        for row, length in enumerate(lengths):
            rows.prompt_length[row] = length
            prompts[row, :length] = inputs_embeds[row, -length:]
            rows.set_text(row, trailing_text_hidden[row], tts_pad_embed[0])
        rows.configure(**request)
        rows.clear_cache()
        if request["do_sample"]:
            draw_noise(rows.noise)
        indices = torch.arange(len(prompts), device=prompts.device)
        talker.prefill(prompts, RowCache(rows.keys, rows.values, None, indices))

    def generate(self, **request) -> transformers.generation.GenerateDecoderOnlyOutput:
        """Decode a list of texts and return what upstream reads of its talker.generate's output."""
        codes, hiddens = zip(*self.frames(**request))
        return self.output(list(torch.stack(codes, dim=1)), list(torch.stack(hiddens, dim=1)))

    def output(self, codes: list, hiddens: list) -> transformers.generation.GenerateDecoderOnlyOutput:
        """Codes (T, 16) and hidden states (T, H) of each text, one entry per forward: the prompt's has no codes."""
        codes = pad_sequence(codes, True, padding_value=self.talker.config.codec_eos_token_id)  # (B, T, 16)
        hiddens = pad_sequence(hiddens, batch_first=True).split(1, dim=1)  # T x (B, 1, H)
        steps = zip([*hiddens, hiddens[-1]], [None, *codes.unbind(1)])  # the last hidden state is not read
        hidden_states = tuple(((hidden,), frame) for hidden, frame in steps)
        return transformers.generation.GenerateDecoderOnlyOutput(sequences=codes[..., 0], hidden_states=hidden_states)


def import_upstream():
    """Upstream's model class, without its 25 Hz tokenizer, whose packages (torchaudio, sox, ...) may be broken."""
    spec = find_spec("qwen_tts")
    suffix = "-hf" if spec and Path(spec.origin).with_name("_transformers_compat.py").is_file() else ""
    if not transformers.__version__.startswith(("5.15.", "5.16.") if suffix else "4.57."):
        pairs = "transformers==4.57.3 with qwen-tts==0.1.1, or transformers==5.16.1 with qwen-tts-hf==0.1.1.post1"
        raise ImportError(f"transformers {transformers.__version__} is not for qwen-tts{suffix}: install {pairs}")
    try:
        import librosa.filters  # noqa: F401
    except RuntimeError:  # numba keeps compiled functions beside librosa or in the home, and can write to neither
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


def __getattr__(name: str):
    """`stream` and `astream` are in speech/."""
    if name not in ("stream", "astream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not HAS_SPEECH:
        raise ImportError(f"{name} needs the folders speech and fast beside generate.py: copy them, too")
    from speech import streaming

    return getattr(streaming, name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak a text with the voice of a speaker.pt.")
    parser.add_argument("--model", default="0.6B", help=f"{', '.join(MODELS)}, a hub id or a folder")
    for name in ("--speaker", "--text", "--output"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    speaker = torch.load(args.speaker, map_location="cpu", weights_only=True)
    voice = {"ref_code": [None], "ref_spk_embedding": [speaker], "x_vector_only_mode": [True], "icl_mode": [False]}
    (audio,), rate = load(args.model).generate_voice_clone(args.text, voice_clone_prompt=voice)
    soundfile.write(args.output, audio, rate)
    print(f"{args.output}: {len(audio) / rate:.2f} s of audio")


if __name__ == "__main__":
    main()
