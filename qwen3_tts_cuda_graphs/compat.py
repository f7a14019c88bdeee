"""A class with the public interface of faster-qwen3-tts 0.5: the same methods, arguments and defaults.

It calls `load` and the streams of speech/; its attribute `model` is upstream's model. Some arguments are accepted and
make no difference: `attn_implementation` and `parity_mode` (the kernels are the project's own), `prefill_len` (all
graphs are captured at load), and those of the GGML backend, which itself is refused.
"""

import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Generator, Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen3_tts_cuda_graphs.common.loading import choose_device, load
from qwen3_tts_cuda_graphs.common.recording_files import read_audio
from qwen3_tts_cuda_graphs.common.voice_files import REFERENCE_SILENCE
from qwen3_tts_cuda_graphs.common.voices import clone_prompt
from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.prompts.checks import check_counts
from qwen3_tts_cuda_graphs.speech.streaming import audio_chunks
from qwen3_tts_cuda_graphs.upstream import Qwen3TTSModel, VoiceClonePromptItem

MAX_VOICES = 64  # prompts of recordings that are cached
WHOLE_CALL_FRAMES = 64  # per chunk of a whole call
TORCH_ONLY = "this package runs on torch only; for GGML use faster-qwen3-tts"

Chunks = Generator[tuple[np.ndarray, int, dict], None, None]


def whole(streaming: Callable) -> Callable:
    """Make the method that returns a streaming method's audio in one piece: ([float32 samples], sample rate)."""
    signature = inspect.signature(streaming)
    kept = [item for name, item in signature.parameters.items() if name not in ("chunk_size", "parity_mode")]
    signature = signature.replace(parameters=kept, return_annotation=tuple[list, int])

    def speak(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        chunks = [audio for audio, _, _ in streaming(**arguments, chunk_size=WHOLE_CALL_FRAMES)]
        audio = np.concatenate(chunks) if chunks else np.zeros(1, dtype=np.float32)
        return [audio], arguments["self"].sample_rate

    speak.__name__ = streaming.__name__.removesuffix("_streaming")
    speak.__doc__ = f"`{streaming.__name__}` in one piece: returns ([float32 samples], sample rate)."
    speak.__signature__ = signature
    return speak


class FasterQwen3TTS:
    """Qwen3-TTS in real time. Make it with `from_pretrained`."""

    def __init__(self, model: Qwen3TTSModel, device: str, dtype: torch.dtype, max_seq_len: int):
        self.model = model
        self.device = device
        self.dtype = dtype
        self.max_seq_len = max_seq_len
        self.sample_rate = int(model.model.speech_tokenizer.get_output_sample_rate())
        self.encode = functools.lru_cache(MAX_VOICES)(functools.partial(encode_recording, model))

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        device: str = "cuda",
        dtype: str | torch.dtype = torch.bfloat16,
        attn_implementation: str = "sdpa",
        max_seq_len: int = 2048,
        backend: str = "torch",
        quant: str = "BF16",
        gguf_talker_path: str | Path | None = None,
        gguf_codec_path: str | Path | None = None,
        qwentts_library_path: str | Path | None = None,
        qwentts_use_fa: bool = True,
        qwentts_clamp_fp16: bool = False,
        qwentts_ref_cache_dir: str | Path | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        qwentts_log_level: str = "warning",
    ) -> "FasterQwen3TTS":
        """Load a model and capture its graphs.

        model_name: a folder, a hub id or a short name such as 0.6B.
        device, dtype: "cpu" runs as well, slowly; dtype may be a name such as "bfloat16".
        max_seq_len: positions for prompt and speech together, one per frame (12.5 per second).
        backend: "torch". attn_implementation makes no difference, and the other arguments are for the GGML backend,
            which is not part of this project.
        """
        if isinstance(attn_implementation, Integral):  # Qwen3TTSCudaGraphs' fourth argument
            max_seq_len = attn_implementation
        if backend != "torch":
            raise ValueError(f"backend={backend!r}: {TORCH_ONLY}")
        if not isinstance(max_seq_len, Integral) or max_seq_len < 16:
            raise ValueError(f"max_seq_len is {max_seq_len}, it must be a whole number of at least 16")
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={dtype!r} is not a type of torch: try bfloat16")
        model = load(str(model_name), choose_device(str(device)), dtype, max_seq_len=max_seq_len)
        return cls(model, device, dtype, max_seq_len)

    @property
    def speech_tokenizer(self):
        return self.model.model.speech_tokenizer

    def warmup(self, prefill_len: int = 100) -> None:
        """Nothing is left to do: all graphs are captured at load."""

    def generate(
        self,
        text: str,
        language: str = "English",
        max_new_tokens: int = 2048,
        temperature: float = 0.9,
        top_k: int = 50,
        do_sample: bool = True,
        repetition_penalty: float = 1.05,
    ) -> tuple[list, int]:
        raise NotImplementedError("the models have no default voice: use generate_voice_clone with ref_audio")

    def generate_voice_clone_streaming(
        self,
        text: str,
        language: str,
        ref_audio: str | Path | None = None,
        ref_text: str = "",
        max_new_tokens: int = 2048,
        min_new_tokens: int = 2,
        temperature: float = 0.9,
        top_k: int = 50,
        top_p: float = 1.0,
        do_sample: bool = True,
        repetition_penalty: float = 1.05,
        chunk_size: int = 12,
        xvec_only: bool = False,
        non_streaming_mode: bool | None = None,
        append_silence: bool = True,
        parity_mode: bool = False,
        instruct: str | None = None,
        ref_spk: str | Path | None = None,
        ref_rvq: str | Path | None = None,
        ref_spk_emb: np.ndarray | None = None,
        ref_codes: np.ndarray | None = None,
        voice_clone_prompt: dict[str, Any] | list[Any] | None = None,
    ) -> Chunks:
        """Speak with the voice of a recording. Yields (float32 samples, sample rate, timing).

        ref_audio, ref_text: the recording and what it says.
        max_new_tokens, min_new_tokens: limits for the number of frames.
        chunk_size: frames of a chunk.
        xvec_only: take the speaker's embedding only, without the recording in the prompt.
        non_streaming_mode: True puts the whole text into the prompt; None is upstream's default.
        append_silence: add silence after a recording that is in the prompt.
        instruct: how to speak.
        voice_clone_prompt: from upstream's create_voice_clone_prompt, or a dict with ref_spk_embedding. Replaces
            ref_audio and xvec_only; ref_text is needed for a dict with ref_code.
        """
        return self.stream(**self.clone_request(**without_self(locals())))

    def generate_custom_voice_streaming(
        self,
        text: str,
        speaker: str,
        language: str,
        instruct: str | None = None,
        non_streaming_mode: bool | None = None,
        max_new_tokens: int = 2048,
        min_new_tokens: int = 2,
        temperature: float = 0.9,
        top_k: int = 50,
        top_p: float = 1.0,
        do_sample: bool = True,
        repetition_penalty: float = 1.05,
        chunk_size: int = 12,
    ) -> Chunks:
        """Speak with a voice of a CustomVoice model. Yields (float32 samples, sample rate, timing)."""
        return self.stream(self.model.generate_custom_voice, **without_self(locals()))

    def generate_voice_design_streaming(
        self,
        text: str,
        instruct: str,
        language: str,
        non_streaming_mode: bool | None = None,
        max_new_tokens: int = 2048,
        min_new_tokens: int = 2,
        temperature: float = 0.9,
        top_k: int = 50,
        top_p: float = 1.0,
        do_sample: bool = True,
        repetition_penalty: float = 1.05,
        chunk_size: int = 12,
    ) -> Chunks:
        """Speak with a voice that `instruct` describes. Yields (float32 samples, sample rate, timing)."""
        return self.stream(self.model.generate_voice_design, **without_self(locals()))

    generate_voice_clone = whole(generate_voice_clone_streaming)
    generate_custom_voice = whole(generate_custom_voice_streaming)
    generate_voice_design = whole(generate_voice_design_streaming)

    def stream(
        self, method, text: str, chunk_size: int, max_new_tokens: int, min_new_tokens: int, **arguments
    ) -> Chunks:
        """Check and build a request of upstream's `method` now, so that mistakes raise an error here. The audio is
        generated while the result is read."""
        check_counts(chunk_size=chunk_size, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
        start = time.perf_counter()
        if arguments["non_streaming_mode"] is None:
            del arguments["non_streaming_mode"]  # upstream's default
        speech = self.model.speech
        speech.turns.check_process()
        # Upstream's last token has no frame, so it gets one more.
        request = prepare_request(method, text, max_new_tokens=max_new_tokens + 1, **arguments)
        settings = request.settings | {"min_new_tokens": min_new_tokens}
        chunks = audio_chunks(speech, dataclasses.replace(request, settings=settings), itertools.repeat(chunk_size))
        prompt_ms = (time.perf_counter() - start) * 1000
        return self.timed(chunks, chunk_size, prompt_ms)

    def timed(self, chunks: Iterable[tuple[np.ndarray, int]], chunk_size: int, prompt_ms: float) -> Chunks:
        """Add the timing of faster-qwen3-tts. prefill_ms is the time to build the prompt; the first decode_ms includes
        the prefill. As there, is_final is True for a last chunk only if it is not full.
        """
        samples_per_frame = self.speech_tokenizer.get_decode_upsample_rate()
        frames = 0
        start = time.perf_counter()
        for index, (audio, rate) in enumerate(chunks):
            decode_ms = (time.perf_counter() - start) * 1000
            steps = len(audio) // samples_per_frame
            frames += steps
            timing = {
                "chunk_index": index,
                "chunk_steps": steps,
                "prefill_ms": prompt_ms if index == 0 else 0,
                "decode_ms": decode_ms,
                "total_steps_so_far": frames,
                "is_final": steps < chunk_size,
            }
            yield audio, rate, timing
            start = time.perf_counter()

    def clone_request(
        self, ref_audio, ref_text, xvec_only, append_silence, voice_clone_prompt, instruct, parity_mode, **request
    ) -> dict:
        """The arguments of a clone method -> those of `stream`."""
        for name in ("ref_spk", "ref_rvq", "ref_spk_emb", "ref_codes"):
            if request.pop(name) is not None:
                raise ValueError(f"{name} is for the GGML backend: pass voice_clone_prompt instead")
        if voice_clone_prompt is None:
            prompt = self.voice_of_recording(ref_audio, ref_text, xvec_only, append_silence)
        else:
            prompt = [prompt_item(voice_clone_prompt, ref_text)]
        if instruct:
            text = self.model._build_instruct_text(instruct)
            request["instruct_ids"] = self.model._tokenize_texts([text])
        return request | {"method": self.model.generate_voice_clone, "voice_clone_prompt": prompt}

    def voice_of_recording(self, ref_audio, ref_text: str, xvec_only: bool, append_silence: bool) -> list:
        """The prompt of a recording, which is encoded once for each file."""
        if ref_audio is None:
            raise ValueError("ref_audio is missing: give a recording of the voice, or voice_clone_prompt")
        if not isinstance(ref_audio, str | Path):
            raise ValueError(f"ref_audio is a {type(ref_audio).__name__}, it must be the path of a recording")
        if not (ref_text or xvec_only):
            raise ValueError("ref_text is missing: give what the recording says, or xvec_only=True")
        path = Path(ref_audio)
        version = path.is_file() and (path.stat().st_mtime_ns, path.stat().st_size)
        return self.encode(path, version, None if xvec_only else ref_text, REFERENCE_SILENCE if append_silence else 0)


class GGMLQwen3TTS:
    """faster-qwen3-tts' other class, for programs that import both."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        raise ValueError(f"GGMLQwen3TTS: {TORCH_ONLY}")


def encode_recording(model: Qwen3TTSModel, path: Path, version, ref_text: str | None, silence: float) -> list:
    """The prompt of a recording. `version` is not used: it makes the cache encode a file again that has changed."""
    return clone_prompt(model, *read_audio(path), ref_text, silence)


def without_self(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if name != "self"}


def prompt_item(prompt: dict | list, ref_text: str) -> VoiceClonePromptItem:
    """Convert a prompt for one text, in any of the forms that faster-qwen3-tts takes, to upstream's class."""
    if isinstance(prompt, list | tuple):
        if len(prompt) != 1:
            raise ValueError(f"voice_clone_prompt has {len(prompt)} entries, it must have one, as there is one text")
        (item,) = prompt
        if not isinstance(item, VoiceClonePromptItem):
            raise ValueError(
                f"voice_clone_prompt has a {type(item).__name__}: use create_voice_clone_prompt, or a dict"
            )
        item = dataclasses.replace(item, ref_text=item.ref_text or ref_text)
    else:
        if not isinstance(prompt, dict) or "ref_spk_embedding" not in prompt:
            raise ValueError("voice_clone_prompt has no ref_spk_embedding: give a dict that has one")
        for name in ("ref_spk_embedding", "ref_code", "x_vector_only_mode", "icl_mode"):
            values = prompt.get(name)
            if values is not None and (not isinstance(values, list) or len(values) != 1):
                raise ValueError(f"voice_clone_prompt[{name!r}] must be a list with one entry, as there is one text")
        embedding_only = bool((prompt.get("x_vector_only_mode") or [True])[0])
        in_context = bool((prompt.get("icl_mode") or [not embedding_only])[0])
        item = VoiceClonePromptItem(
            ref_code=(prompt.get("ref_code") or [None])[0],
            ref_spk_embedding=prompt["ref_spk_embedding"][0],
            x_vector_only_mode=embedding_only,
            icl_mode=in_context,
            ref_text=ref_text,
        )
    if item.x_vector_only_mode == item.icl_mode:
        raise ValueError("voice_clone_prompt: x_vector_only_mode and icl_mode must be opposites")
    if item.icl_mode != (item.ref_code is not None):
        raise ValueError("voice_clone_prompt: ref_code is needed with icl_mode, and must be None without")
    if item.icl_mode and not item.ref_text:
        raise ValueError("ref_text is missing: give what the recording says")
    return item


Qwen3TTSCudaGraphs = FasterQwen3TTS  # the name in the first CUDA-graph handler of speech-to-speech
