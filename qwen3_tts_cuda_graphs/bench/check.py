"""`bench.py --check`: is the accelerated model still the same model, on this machine and with these weights?

On a GPU the logits of every path are compared with float32, with forced tokens (parity.py). Without one, everything
runs in float32, and the audio must be upstream's.
"""

import copy
import functools
import gc
from collections.abc import Callable, Iterator

import numpy as np
import torch

from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.parity import TeacherForced, error, one_pass, verdict
from qwen3_tts_cuda_graphs.bench.timing import speech_arguments
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.fast.frame_graphs import KernelGraphs, MegakernelGraphs, PlainGraphs, has_kernels
from qwen3_tts_cuda_graphs.fast.graph_set import MEGAKERNEL_ROWS
from qwen3_tts_cuda_graphs.fast.paths import MEGAKERNEL
from qwen3_tts_cuda_graphs.fast.rows import batch_sizes
from qwen3_tts_cuda_graphs.prompts.build import talker_arguments
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.streaming import stream

MAX_ROWS = 64  # the graphs for up to so many rows are checked
MAX_GPU_DIFFERENCE = 0.02  # of full scale, between streamed and whole audio: a GPU decodes chunks with other kernels
ROUNDING_MARGIN = 4  # times the codec's own error in float32 is allowed; correct audio differed by 0.8 to 1.6 times

Result = tuple[str, bool, str]  # what was checked, whether it passed, and the figures


def check(checkpoint: Checkpoint, frames: int) -> Iterator[Result]:
    """Check a Base model with an utterance of `frames` frames."""
    tts = accelerate(load_upstream(checkpoint.model))
    on_gpu = tts.speech.on_gpu
    voice = checkpoint.voice()
    arguments = speech_arguments(min(frames, 60), **voice)
    first, again = (speak_seeded(tts, arguments) for _ in range(2))
    yield "a seed reproduces", np.array_equal(first, again), f"{len(first)} samples, twice, {tts.speech.path}"
    allowed = MAX_GPU_DIFFERENCE if on_gpu else ROUNDING_MARGIN * codec_error(tts)
    yield check_stream(tts, arguments, first, allowed)
    if not on_gpu:
        yield from check_audio(tts, checkpoint.model, arguments, allowed)
        return

    request = talker_arguments(tts.generate_voice_clone, **speech_arguments(frames, **voice))
    request = {name: value.to(tts.device) if torch.is_tensor(value) else value for name, value in request.items()}
    vocabulary = tts.model.talker.config.code_predictor_config.vocab_size
    tokens = torch.randint(vocabulary, (frames, tts.model.talker.config.num_code_groups), device=tts.device)
    paths = {
        name: TeacherForced(tts.model.talker, row_count=row_count, make_graphs=make_graphs).logits(tokens, **request)
        for name, row_count, make_graphs in checked_graphs(tts)
    }
    del tts  # its GPU memory is needed for float32
    gc.collect()
    torch.cuda.empty_cache()
    yield from check_logits(checkpoint.model, paths, tokens, request)


def checked_graphs(tts) -> Iterator[tuple[str, int, Callable[..., PlainGraphs]]]:
    """The graphs that are checked on a GPU: a name, the number of rows, and the class or function that makes them."""
    yield "upstream's modules with layers.py", 1, PlainGraphs
    kernel_graphs = functools.partial(KernelGraphs, like=tts.speech.runner.graphs.of(1))  # as an engine makes them
    for count in batch_sizes(MAX_ROWS):
        if has_kernels(tts.model.talker):
            yield f"batch of {count}", count, kernel_graphs
        if count in MEGAKERNEL_ROWS and tts.speech.path == MEGAKERNEL:
            yield f"megakernel for {count} {'row' if count == 1 else 'rows'}", count, MegakernelGraphs


def speak_seeded(tts, arguments: dict) -> np.ndarray:
    torch.manual_seed(0)
    (audio,), _ = tts.generate_voice_clone(**arguments)
    return audio


def check_stream(tts, arguments: dict, whole: np.ndarray, allowed: float) -> Result:
    name = "the streamed audio is the whole call's"
    torch.manual_seed(0)
    streamed = np.concatenate([audio for audio, _ in stream(tts.generate_voice_clone, **arguments)])
    if len(streamed) != len(whole):
        return name, False, f"{len(streamed)} samples streamed, {len(whole)} in the whole call"
    difference = np.abs(streamed - whole).max()
    figures = f"largest difference {difference:.1e} of full scale, {allowed:.1e} allowed"
    return name, bool(difference <= allowed), figures


@torch.no_grad()
def codec_error(tts) -> float:
    """The codec's rounding error in float32 on random codes, of full scale. It depends on the weights."""
    codec = tts.model.speech_tokenizer.model.decoder
    shape = 1, codec.config.num_quantizers, 60
    codes = torch.randint(codec.config.codebook_size, shape, generator=torch.Generator().manual_seed(0))
    return (codec(codes) - copy.deepcopy(codec).double()(codes)).abs().max().item()


def check_audio(tts, model: str, arguments: dict, allowed: float) -> Iterator[Result]:
    """In float32 the same seed must give upstream's audio. Other tokens would give other audio."""
    upstream = load_upstream(model)
    for name, settings in {
        "greedy": dict(do_sample=False, subtalker_dosample=False),
        "seeded": dict(),
        "seeded, other settings": dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3),
    }.items():
        expected, audio = (speak_seeded(each, arguments | settings) for each in (upstream, tts))
        same = len(audio) == len(expected) and bool(np.abs(audio - expected).max() <= allowed)
        yield f"upstream's audio, {name}", same, f"{len(expected)} samples of upstream's, {len(audio)} of ours"


def check_logits(model: str, paths: dict, tokens: torch.Tensor, request: dict) -> Iterator[Result]:
    """Compare logits with float32. paths: name -> logits of the predictor and of the talker"""
    own = TeacherForced(load_upstream(model, dtype=torch.bfloat16).model.talker).logits(tokens, **request)
    talker = load_upstream(model, dtype=torch.float32).model.talker
    exact = TeacherForced(talker).logits(tokens, **request)
    passed = one_pass(talker, tokens, **request)

    ratio = max(error(e, p, 0.99) / error(o, p, 0.99) for o, e, p in zip(own, exact, passed))
    name = "float32 frame by frame is upstream's one pass"
    yield name, ratio < 0.05, f"they differ by {ratio:.1e} of bfloat16's error"
    for path, (codes, first) in paths.items():
        frames = len(first)
        yield f"{path}: codes 1 to 15", *verdict(codes, own[0], exact[0])
        yield f"{path}: first codes", *verdict(first, own[1][:frames], exact[1][:frames])
