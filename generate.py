#!/usr/bin/env python3
"""Qwen3-TTS with every frame captured as CUDA graphs: `tts = load("0.6B")` is upstream's model, accelerated.

Upstream builds the prompt of every voice, calls `talker.generate` once and decodes the codes to audio. `accelerate`
replaces `talker.generate` with `Decoder.generate`; `Decoder.frames` is the only loop. It uses fast/ where that is.
"""

import argparse
import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__" and Path(__file__).with_name("cli").is_dir():
    from cli.options import main  # all voices; checks the options, and then imports this file, torch and the rest

    sys.exit(main())

import soundfile
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import TalkerGraph, new_pool

PAIRS = "install transformers==4.57.3 with qwen-tts==0.1.1, or transformers==5.16.1 with qwen-tts-hf==0.1.1.post1"
upstream = find_spec("qwen_tts")
suffix = "-hf" if upstream and Path(upstream.origin).with_name("_transformers_compat.py").is_file() else ""
if not transformers.__version__.startswith(("5.15.", "5.16.") if suffix else "4.57."):
    raise ImportError(f"transformers {transformers.__version__} does not work with qwen-tts{suffix}: {PAIRS}")

try:
    if not all(map(find_spec, ("torchaudio", "sox", "onnxruntime", "einops"))):  # only the 25 Hz tokenizer needs them
        raise ImportError
    with contextlib.redirect_stdout(sys.stderr):  # it prints a warning, and stdout may be the audio
        from qwen_tts import Qwen3TTSModel
except (ImportError, OSError):  # import qwen_tts without that tokenizer, which the 12 Hz models never use
    unused = "qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1"
    sys.modules[unused] = type("unused", (), {"Qwen3TTSTokenizerV1Model": object})
    from qwen_tts import Qwen3TTSModel

    del sys.modules[unused]

FAST = Path(__file__).with_name("fast")
VARIANTS = "0.6B-Base", "1.7B-Base", "0.6B-CustomVoice", "1.7B-CustomVoice", "1.7B-VoiceDesign"
MODELS = {name.removesuffix("-Base"): f"Qwen/Qwen3-TTS-12Hz-{name}" for name in VARIANTS}  # short name -> hub id


def load_upstream(model: str, device=None, dtype: torch.dtype | None = None) -> Qwen3TTSModel:
    """Upstream's model as it is. `model` is a folder, a hub id or a short name from MODELS."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    name = model if Path(model).is_dir() else MODELS.get(model, model)
    return Qwen3TTSModel.from_pretrained(name, device_map=device, dtype=dtype)


def load(model: str, device=None, dtype: torch.dtype | None = None, **options) -> Qwen3TTSModel:
    """Load and accelerate a model. Default: CUDA and bfloat16, without CUDA CPU and float32."""
    return accelerate(load_upstream(model, device, dtype), **options)


def accelerate(tts, max_seq_len: int = 2048, max_batch: int | None = None, fused: bool | None = None) -> Qwen3TTSModel:
    """Make a model's methods fast, in place. If this fails, load it again. Meanwhile no other thread may use the GPU.

    max_seq_len: positions for prompt and speech together, one per frame (12.5 per second).
    max_batch: texts of a list that are decoded together. Default: all on a CPU, one on a GPU, where more take memory.
    fused: the megakernel of fast/. True requires it, False avoids it, None uses it where it runs.
    """
    decoder = Decoder(tts.model.talker, max_seq_len, max_batch)
    if FAST.is_dir():
        from fast import plug_in

        plug_in(tts, decoder, fused)
    elif fused:
        raise ValueError(f"fused=True needs the folder {FAST}")
    decoder.graphs_for(1)
    if decoder.on_gpu:
        decoder.graphs_for(decoder.max_batch)
        torch._C._cuda_clearCublasWorkspaces()  # torch would keep those of the graphs' pools longer than the graphs
    tts.model.talker.generate = decoder.generate
    return tts


def __getattr__(name: str):
    """`stream` and `astream` are in fast/, whose codec keeps its state between chunks."""
    if name not in ("stream", "astream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fast import streaming

    return getattr(streaming, name)


class Decoder:
    """Replaces `talker.generate`: a prompt goes in, codes and hidden states come out."""

    def __init__(self, talker, max_seq_len: int, max_batch: int | None):
        self.talker = talker
        self.max_seq_len = max_seq_len
        self.on_gpu = talker.device.type == "cuda"
        self.max_batch = max_batch or (1 if self.on_gpu else sys.maxsize)
        self.batch_sizes = lambda rows: self.max_batch  # for torch.split: one size or a list; fast/ may replace it
        self.replace_steps = lambda talker, predictor: None  # fast/ may change here what is captured
        self.path = "upstream's layers"  # what is captured, in words
        self.graphs = {}  # rows -> (TalkerGraph, PredictorGraph)
        self.pool = new_pool(talker.device) if self.on_gpu else None  # shared: nothing in it outlives a replay
        self.lock = threading.Lock()  # one request at a time
        self.last_stream = None  # the CUDA stream of the last request

    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    @torch.no_grad()
    def graphs_for(self, rows: int) -> tuple[TalkerGraph, PredictorGraph]:
        """Build and capture graphs. On a GPU there are two sets, for one row and for `max_batch` rows."""
        rows = self.max_batch if self.on_gpu and rows > 1 else rows
        if rows in self.graphs:
            return self.graphs[rows]

        talker = TalkerGraph(self.talker, rows, self.max_seq_len)
        predictor = PredictorGraph(self.talker, talker)
        self.replace_steps(talker, predictor)
        talker.capture(self.pool)
        predictor.capture(self.pool)
        self.graphs = {key: self.graphs[key] for key in self.graphs if key == 1}  # caches are large: keep two
        return self.graphs.setdefault(rows, (talker, predictor))

    def frame_limit(self, attention_mask, max_new_tokens, repetition_penalty, **_) -> int:
        """The most frames that a request can have. Raises an error if it cannot have any."""
        used = attention_mask.shape[1]
        if used >= self.max_seq_len:
            raise ValueError(f"the prompt takes {used} of {self.max_seq_len} positions: raise max_seq_len")
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 2: the end token has no audio")
        if not repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {repetition_penalty}, it must be above 0: 1.0 for none")
        return min(max_new_tokens - 1, self.max_seq_len - used)

    @torch.no_grad()
    def frames(self, **request) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each frame's codes (B, 16) and hidden state (B, H), views of static tensors, until all rows ended."""
        limit = self.frame_limit(**request)
        if not request["inputs_embeds"].isfinite().all():
            raise ValueError("the prompt has NaN or infinite values: extract the speaker or the reference again")
        rows = len(request["inputs_embeds"])
        talker, predictor = self.graphs_for(rows)
        generator = talker.generator or torch.default_generator
        if self.on_gpu:
            stream = torch.cuda.current_stream(self.talker.device)
            stream.wait_stream(self.last_stream or stream)  # all that the last request has launched
            self.last_stream = stream
            # A generator of its own: other threads may draw from torch's default one meanwhile.
            generator.manual_seed(int(torch.randint(1 << 62, (), device=self.talker.device)))
        talker.configure(**request)
        predictor.configure(**request)
        predictor.begin(**request)
        talker.begin(**request)
        for frame in range(limit):
            # The host learns one frame late that all rows have ended: the GPU never waits. That frame is dropped.
            token_chosen = self.record_event()
            rng_state = generator.get_state()
            predictor.replay()
            if frame >= request["min_new_tokens"] and talker.all_ended(rows, token_chosen):
                generator.set_state(rng_state)
                return
            yield predictor.codes[:rows, frame], predictor.hiddens[:rows, frame]
            talker.replay()

        if not talker.all_ended(rows, self.record_event()):
            name = "max_seq_len" if limit + 1 < request["max_new_tokens"] else "max_new_tokens"
            warning = f"the speech was cut off after {limit} frames, before its end: raise {name}"
            warnings.warn_explicit(warning, UserWarning, __file__, 1)  # each time; `warn` shows the same text once

    def record_event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.talker.device).record_event() if self.on_gpu else None

    def generate(self, **request) -> transformers.generation.GenerateDecoderOnlyOutput:
        """Decode a list of texts and return what upstream reads of its talker.generate's output."""
        codes, hiddens = [], []
        per_row = "inputs_embeds", "attention_mask", "trailing_text_hidden"
        sizes = self.batch_sizes(len(request["inputs_embeds"]))
        with self.lock:
            for batch in zip(*(request[name].split(sizes) for name in per_row)):
                frames = [*self.frames(**(request | dict(zip(per_row, batch))))]
                codes.extend(torch.stack([code for code, _ in frames], dim=1))
                hiddens.extend(torch.stack([hidden for _, hidden in frames], dim=1))
        codes = pad_sequence(codes, batch_first=True, padding_value=self.talker.config.codec_eos_token_id)  # (B, T, 16)
        hiddens = pad_sequence(hiddens, batch_first=True)
        # Upstream reads pairs: a frame's hidden state, the codes of the frame before. It ignores the last hidden state.
        steps = zip(hiddens.roll(-1, dims=1).split(1, dim=1), codes.unbind(1))
        hidden_states = ((hiddens[:, :1],), None), *(((hidden,), frame) for hidden, frame in steps)
        return transformers.generation.GenerateDecoderOnlyOutput(sequences=codes[..., 0], hidden_states=hidden_states)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak a text with the voice of a speaker.pt.")
    parser.add_argument("--model", default="0.6B", help=f"{', '.join(MODELS)}, a hub id or a folder")
    parser.add_argument("--speaker", required=True, help="a speaker embedding from extract_speaker.py")
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", required=True, help="the audio file to write")
    args = parser.parse_args()

    speaker = torch.load(args.speaker, map_location="cpu", weights_only=True)
    voice = {"ref_code": [None], "ref_spk_embedding": [speaker], "x_vector_only_mode": [True], "icl_mode": [False]}
    (audio,), rate = load(args.model).generate_voice_clone(args.text, voice_clone_prompt=voice)
    soundfile.write(args.output, audio, rate)
    print(f"{args.output}: {len(audio) / rate:.2f} s of audio")


if __name__ == "__main__":
    main()
