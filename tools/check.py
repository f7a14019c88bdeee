"""`bench.py --check`: is the accelerated model still the same model, on this machine and with these weights?

On a GPU the logits of every path are compared with float32, with forced tokens (parity.py). Without one, everything
runs in float32, and the audio must be upstream's.
"""

import gc
from collections.abc import Iterator

import numpy as np
import torch

from cli.voices import speaker_prompt
from fast.prompts import build_request, decoder_of, move_to
from fast.streaming import stream
from generate import Decoder, accelerate, load_upstream
from serving.batch import KernelFrameGraph
from serving.engine import Engine
from tools.parity import Forced, batch_logits, error, megakernel_logits, one_pass, verdict

TEXT = (
    "Two models with the same weights should say the same thing in the same voice. Whether they do is hard to hear, "
    "but easy to measure: give both the same tokens, frame by frame, and compare what they would have said next."
)
MAX_STREAMS = 64  # batches of up to that many rows are checked
MAX_STREAM_DIFFERENCE = {"cuda": 0.02, "cpu": 1e-5}  # of full scale; a GPU decodes chunks with other kernels

Result = tuple[str, bool, str]  # what was checked, whether it is right, and figures


def check(folder: str, speaker: torch.Tensor, frames: int) -> Iterator[Result]:
    """Check a Base checkpoint with a speech of that many frames."""
    tts = accelerate(load_upstream(folder))
    decoder = decoder_of(tts)
    request = move_to(
        decoder.talker.device, build_request(tts.generate_voice_clone, **clone_arguments(speaker, frames))
    )
    tokens, fused_logits = speak(decoder, request)
    again, _ = speak(decoder, request)

    yield "a seed reproduces", torch.equal(tokens, again), f"{len(tokens)} frames generated twice, {decoder.path}"
    yield check_stream(tts, clone_arguments(speaker, min(frames, 60)))
    if not decoder.on_gpu:
        yield from check_audio(tts, folder, clone_arguments(speaker, min(frames, 60)))
        return

    paths = {"separate kernels": Forced(tts.model.talker, decoder.max_seq_len).logits(tokens, **request)}
    if fused_logits:
        paths["megakernel"] = fused_logits
    with Engine(tts, max_streams=MAX_STREAMS) as engine:
        for rows, graph in engine.graphs.items():
            if isinstance(graph, KernelFrameGraph):
                paths[f"batch of {rows}"] = batch_logits(engine, rows, tokens, request)
        for rows in engine.megakernels:
            paths[f"megakernel for {rows} streams"] = megakernel_logits(engine, rows, tokens, request)
    del tts, decoder  # their GPU memory is needed for float32
    gc.collect()
    torch.cuda.empty_cache()
    yield from check_logits(folder, paths, tokens, request)


def clone_arguments(speaker: torch.Tensor, frames: int) -> dict:
    """Arguments of generate_voice_clone. Upstream's last token has no audio."""
    prompt = speaker_prompt(speaker)
    return dict(text=TEXT, language="English", voice_clone_prompt=prompt, max_new_tokens=frames + 1)


def speak(decoder: Decoder, request: dict) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The codes (T, 16) of a seeded speech and, of the megakernel, the logits it chose them from."""
    talker, predictor = decoder.graphs_for(1)
    is_megakernel = hasattr(talker.step, "logits")
    codes, predictor_logits, talker_logits = [], [], []
    torch.manual_seed(0)
    for frame, _ in decoder.frames(**request):
        codes.append(frame[0].clone())
        if is_megakernel:
            predictor_logits.append(predictor.step.logits().cpu())
            talker_logits.append(talker.step.logits().cpu())
    if not is_megakernel:
        return torch.stack(codes), None
    # The talker's logits here are those of this frame's first code; the prefill has chosen the first frame's.
    return torch.stack(codes), (torch.cat(predictor_logits), torch.cat(talker_logits[1:]))


def check_stream(tts, arguments: dict) -> Result:
    name = "the streamed audio is the whole call's"
    torch.manual_seed(0)
    (whole,), _ = tts.generate_voice_clone(**arguments)
    torch.manual_seed(0)
    streamed = np.concatenate([audio for audio, _ in stream(tts.generate_voice_clone, **arguments)])
    if len(streamed) != len(whole):
        return name, False, f"{len(streamed)} samples streamed, {len(whole)} in the whole call"
    difference = np.abs(streamed - whole).max()
    allowed = MAX_STREAM_DIFFERENCE[tts.device.type]
    return name, bool(difference <= allowed), f"largest difference {difference:.1e} of full scale, {allowed} allowed"


def check_audio(tts, folder: str, arguments: dict) -> Iterator[Result]:
    """In float32 the same seed must give upstream's audio, which only the same tokens do."""
    upstream = load_upstream(folder)
    for name, settings in {
        "greedy": dict(do_sample=False, subtalker_dosample=False),
        "seeded": dict(),
        "seeded, other settings": dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3),
    }.items():
        torch.manual_seed(0)
        (expected,), _ = upstream.generate_voice_clone(**arguments, **settings)
        torch.manual_seed(0)
        (audio,), _ = tts.generate_voice_clone(**arguments, **settings)
        same = len(audio) == len(expected) and bool(np.abs(audio - expected).max() < 1e-4)
        yield f"upstream's audio, {name}", same, f"{len(expected)} samples of upstream's, {len(audio)} of ours"


def check_logits(folder: str, paths: dict, tokens: torch.Tensor, request: dict) -> Iterator[Result]:
    """`paths` has the logits of predictor and talker by the name of the path."""
    own = Forced(load_talker(folder, torch.bfloat16), 2048).logits(tokens, **request)
    talker = load_talker(folder, torch.float32)
    exact = Forced(talker, 2048).logits(tokens, **request)
    passed = one_pass(talker, tokens, **request)

    ratio = max(error(e, p, 0.99) / error(o, p, 0.99) for o, e, p in zip(own, exact, passed))
    name = "float32 frame by frame is upstream's one pass"
    yield name, ratio < 0.05, f"they differ by {ratio:.1e} of bfloat16's error"
    for path, (codes, first) in paths.items():
        frames = len(first)
        yield f"{path}: codes 1 to 15", *verdict(codes, own[0], exact[0])
        yield f"{path}: first codes", *verdict(first, own[1][:frames], exact[1][:frames])


def load_talker(folder: str, dtype: torch.dtype):
    return load_upstream(folder, dtype=dtype).model.talker
