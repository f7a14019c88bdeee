"""`bench.py` without an option: one listener on upstream, the three files alone, each path of fast/ and a peer."""

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np

from qwen3_tts_cuda_graphs.bench import timing
from qwen3_tts_cuda_graphs.bench.arriving import time_arriving_text
from qwen3_tts_cuda_graphs.bench.bounds import POSITION, memory_bound
from qwen3_tts_cuda_graphs.bench.frame_times import first_audio_parts, frame_parts
from qwen3_tts_cuda_graphs.bench.listeners import listen
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.peer import PEER, run_peer
from qwen3_tts_cuda_graphs.bench.timing import (
    Effort,
    NamedRows,
    Row,
    clock,
    clone_arguments,
    load_alone,
    time_stream,
    time_whole_calls,
)
from qwen3_tts_cuda_graphs.common.audio_files import write_audio
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of
from qwen3_tts_cuda_graphs.speech import accelerate

THREE_FILES = "the three files alone"
SEPARATE = "separate kernels"
MEGAKERNEL = "megakernel"
CHUNKS = {"1": 1, "8": 8, "1, 1, 2, 4, 8, ...": None}  # frames per chunk, in words -> chunk_frames of `stream`
RATE = 24000


def time_one_listener(checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    rows = {}
    for name, row in time_all(checkpoint, effort):
        rows[name] = row
        yield name, row
    yield from times_as_fast(rows)


def time_all(checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    voice = dict(voice_clone_prompt=speaker_prompt(checkpoint.speaker))
    load_ms, tts = clock(lambda: load_alone(checkpoint.model))
    row = time_whole_calls(timing.whole_call(tts.generate_voice_clone, **voice), effort.upstream_frames, effort.runs)
    yield "upstream", row | dict(seconds_to_load=load_ms / 1e3)
    paths = [SEPARATE] if SOURCE.why_not(*stacks_of(tts.model.talker)) else [SEPARATE, MEGAKERNEL]
    del tts

    if not effort.is_quick and (three_files := import_three_files()):
        yield THREE_FILES, time_three_files(three_files, checkpoint, voice, effort)
    for path in paths:
        yield from time_path(checkpoint, voice, path, path == paths[-1], effort)
    if timing.ON_GPU and not effort.is_quick:
        yield from run_peer(checkpoint)


def import_three_files():
    """generate.py of this checkout. None: the package is installed, and a generate.py beside it is another one."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "setup.sh").is_file():
        return None
    spec = importlib.util.spec_from_file_location("generate", checkout / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_three_files(three_files, checkpoint: Checkpoint, voice: dict, effort: Effort) -> Row:
    """cudagraph_talker.py, cudagraph_predictor.py and generate.py without fast/: upstream's layers and codec."""
    tts = load_alone(checkpoint.model)
    capture_ms, _ = clock(lambda: three_files.accelerate(tts))
    row = time_whole_calls(timing.whole_call(tts.generate_voice_clone, **voice), effort.frames, effort.runs)
    return row | dict(seconds_to_capture=capture_ms / 1e3, peak_gib=timing.peak_gib())


def time_path(checkpoint: Checkpoint, voice: dict, path: str, is_fastest: bool, effort: Effort) -> NamedRows:
    """Whole calls, streams and where the time goes. The fastest path also has a long stream, arriving text, a sample
    to hear and every kind of voice."""
    tts = load_alone(checkpoint.model)
    capture_ms, _ = clock(lambda: accelerate(tts, fused=path == MEGAKERNEL))
    method = tts.generate_voice_clone
    frames = effort.frames[-1]

    row = time_whole_calls(timing.whole_call(method, **voice), effort.frames, effort.runs)
    yield path, row | dict(seconds_to_capture=capture_ms / 1e3, peak_gib=timing.peak_gib())
    if effort.is_quick and not is_fastest:
        return

    for name, size in CHUNKS.items():
        start_stream = timing.streamed_call(method, size, **voice)
        row = time_stream(start_stream, effort)
        if is_fastest:
            listener = listen(partial(start_stream, effort.late_chunk_frames))
            row |= dict(late_chunks=listener.underruns, seconds=listener.seconds)
        yield f"{path}, chunks of {name}", row

    arguments = clone_arguments(checkpoint.speaker, frames)
    parts = frame_parts(tts, arguments)
    yield f"{path}, a frame's parts in ms", parts
    if bound := memory_bound(tts.model.talker, parts[f"frame at position {POSITION}"]):
        yield f"{path}, memory bound", bound
    yield f"{path}, first audio's parts in ms", first_audio_parts(tts, arguments, effort.first_audio_runs)

    if is_fastest:
        row = time_arriving_text(method, effort.runs, **arguments)
        yield f"{path}, text at {row['tokens_per_second']} tokens per second", row
        (audio,), rate = method(**arguments)
        write_audio(Path(f"sample_{checkpoint.name}.wav"), [(audio, rate)])
    if is_fastest and not effort.is_quick:
        yield from time_voices(tts, voice, checkpoint.custom_voice, effort)


def time_voices(tts, x_vector: dict, custom_voice: str | None, effort: Effort) -> NamedRows:
    """Every kind of voice: whole calls and streams."""

    def time_voice(method, **voice) -> Row:
        whole = time_whole_calls(timing.whole_call(method, **voice), effort.frames, effort.runs)
        return whole | time_stream(timing.streamed_call(method, **voice), effort)

    def in_context() -> Row:
        recording = np.random.default_rng(0).normal(size=3 * RATE).astype(np.float32) * 0.1
        reference = tts.create_voice_clone_prompt((recording, RATE), "three seconds of something")
        return time_voice(tts.generate_voice_clone, voice_clone_prompt=reference)

    def preset() -> Row:
        """Its whole text is in the prompt, so the first audio is also timed with as many tokens as usual."""
        model = accelerate(load_alone(custom_voice))
        method, speaker = model.generate_custom_voice, model.get_supported_speakers()[0]
        usual = timing.streamed_call(method, speaker=speaker, text=timing.TEXT[: timing.PUBLISHED_TOKENS])
        usual_ms = time_stream(usual, effort)["first_audio_ms"]
        return time_voice(method, speaker=speaker) | {f"first_audio_{timing.PUBLISHED_TOKENS}_tokens_ms": usual_ms}

    voices = {"x-vector": partial(time_voice, tts.generate_voice_clone, **x_vector), "in-context": in_context}
    if custom_voice:
        voices["preset voice"] = preset
    for name, measure in voices.items():
        try:
            yield f"voice: {name}", measure()
        except (ValueError, OSError) as error:
            print(f"voice: {name} left out: {error}")


def times_as_fast(rows: dict[str, Row]) -> NamedRows:
    """Ratios of the ms per frame of whole calls."""
    others = [name for name in ("upstream", PEER) if name in rows]
    for path in (THREE_FILES, SEPARATE, MEGAKERNEL):
        if path in rows:
            ratios = {f"than {name}": rows[name]["ms_per_frame"] / rows[path]["ms_per_frame"] for name in others}
            yield f"{path}, times as fast", ratios
