"""`bench.py` without a mode: one listener on upstream, the three files alone, each path of fast/, faster-qwen3-tts."""

import runpy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from qwen3_tts_cuda_graphs.bench import MEGAKERNEL, PEER, ROOT, SEPARATE, THREE_FILES, UPSTREAM, timing
from qwen3_tts_cuda_graphs.bench.bounds import POSITION, memory_bound
from qwen3_tts_cuda_graphs.bench.frame_times import first_audio_parts, frame_parts
from qwen3_tts_cuda_graphs.bench.listeners import listen
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.peer import run_peer
from qwen3_tts_cuda_graphs.bench.timing import Effort, NamedRows, Row, clock, load_measured
from qwen3_tts_cuda_graphs.common.speech_files import write_audio
from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.streaming import stream

CHUNKS = {"1": 1, "8": 8, "1, 1, 2, 4, 8, ...": None}  # frames per chunk as in a row's name -> chunk_frames of `stream`
RATE = 24000
TOKENS_PER_SECOND = 50
CHARACTERS_PER_TOKEN = 4  # English text, in a usual language model
COLUMNS = "ms_per_frame x_real_time first_audio_ms late_chunks underruns peak_gib seconds_to_capture".split()


def measure(checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    rows = {}
    for name, row in time_all(checkpoint, effort):
        rows[name] = row
        yield name, row
    yield from times_as_fast(rows)


def time_all(checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    """No variable here may hold a model: it would stay in memory and count in the `peak_gib` of later rows."""
    row, paths = time_upstream(checkpoint, effort)
    yield UPSTREAM, row
    if not effort.is_quick and (accelerate_alone := accelerate_of_three_files()):
        yield THREE_FILES, time_captured(checkpoint, effort, accelerate_alone)[1]
    for path in paths:
        yield from time_path(checkpoint, path, path == paths[-1], effort)
    if timing.ON_GPU and not effort.is_quick:
        yield from run_peer(checkpoint)


def time_upstream(checkpoint: Checkpoint, effort: Effort) -> tuple[Row, list[str]]:
    """Time whole calls of upstream's model. Also returns the paths that can replace it."""
    load_ms, tts = clock(lambda: load_measured(checkpoint.model))
    speak = timing.whole_call(tts.generate_voice_clone, **checkpoint.voice())
    row = timing.time_whole_calls(speak, effort.upstream_frames, effort)
    return row | dict(seconds_to_load=load_ms / 1e3), timing.available_paths(tts)


def accelerate_of_three_files() -> Callable | None:
    """`accelerate` of this checkout's generate.py: upstream's layers and codec, without fast/.

    None where the package is installed: a generate.py beside it would belong to another program.
    """
    if not (ROOT / "setup.sh").is_file():
        return None
    return runpy.run_path(str(ROOT / "generate.py"), run_name="generate")["accelerate"]


def time_captured(checkpoint: Checkpoint, effort: Effort, accelerate: Callable) -> tuple[object, Row]:
    """Accelerate a model, and time the captures and whole calls."""
    tts = load_measured(checkpoint.model)
    capture_ms, _ = clock(lambda: accelerate(tts))
    speak = timing.whole_call(tts.generate_voice_clone, **checkpoint.voice())
    row = timing.time_whole_calls(speak, effort.frames, effort)
    return tts, row | dict(seconds_to_capture=capture_ms / 1e3, peak_gib=timing.peak_gib())


def time_path(checkpoint: Checkpoint, path: str, is_fastest: bool, effort: Effort) -> NamedRows:
    """Time whole calls, streams, and the parts of a frame and of the first audio.

    The fastest path is also timed with a long stream, arriving text and every kind of voice, and writes a sample.
    """
    voice = checkpoint.voice()
    tts, row = time_captured(checkpoint, effort, partial(accelerate, fused=path == MEGAKERNEL))
    yield path, row
    if effort.is_quick and not is_fastest:
        return

    method = tts.generate_voice_clone
    for name, size in CHUNKS.items():
        start_stream = timing.streamed_call(method, size, **voice)
        row = timing.time_stream(start_stream, effort)
        if is_fastest:
            heard = listen(partial(start_stream, effort.late_chunk_frames))
            row |= dict(late_chunks=heard.underruns, seconds=heard.seconds)
        yield f"{path}, chunks of {name}", row

    arguments = timing.speech_arguments(effort.frames[-1], **voice)
    parts = frame_parts(tts, arguments)
    yield f"{path}, a frame's parts in ms", parts
    if bound := memory_bound(tts.model.talker, parts[f"frame at position {POSITION}"]):
        yield f"{path}, memory bound", bound
    yield f"{path}, first audio's parts in ms", first_audio_parts(tts, arguments, effort.first_audio_runs)

    if is_fastest:
        yield f"{path}, text at {TOKENS_PER_SECOND} tokens per second", time_arriving_text(method, effort, **arguments)
        (audio,), rate = method(**arguments)
        write_audio(Path(f"sample_{checkpoint.name}.wav"), [(audio, rate)])
    if is_fastest and not effort.is_quick:
        yield from time_voices(tts, checkpoint, effort)


def time_arriving_text(method: Callable, effort: Effort, text: list[str], **arguments) -> Row:
    """Time text from a simulated language model that writes a piece every 20 ms.

    First audio is counted from the moment at which the text that it needs has arrived. `text` and `arguments` are
    those of the method.
    """
    starts = range(0, len(text[0]), CHARACTERS_PER_TOKEN)
    pieces = [text[0][start : start + CHARACTERS_PER_TOKEN] for start in starts]
    arriving = ArrivingText(method, **arguments)
    needed = 0  # pieces before the first audio
    while needed < len(pieces) and not arriving.can_begin:
        arriving.push(pieces[needed])
        needed += 1

    def language_model(times: list[float]) -> Iterator[str]:
        """Yield the pieces, and append to `times` when each was written."""
        start = time.perf_counter()
        for number, piece in enumerate(pieces, 1):
            time.sleep(max(0.0, start + number / TOKENS_PER_SECOND - time.perf_counter()))
            times.append(time.perf_counter())
            yield piece

    def run() -> tuple[float, int]:
        times = []
        heard = listen(partial(stream, method, text=language_model(times), **arguments))
        return heard.first_audio_ms - (times[needed - 1] - heard.asked) * 1e3, heard.underruns

    first_audio, underruns = zip(*timing.repeat(run, effort.runs))
    return dict(
        first_audio_ms=statistics.median(first_audio),
        first_audio_max_ms=max(first_audio),
        underruns=sum(underruns),
        pieces_to_begin=needed,
        tokens_per_second=TOKENS_PER_SECOND,
        runs=effort.runs,
    )


def time_voices(tts, checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    """Time whole calls and streams of every kind of voice."""

    def in_context() -> tuple[Callable, dict]:
        recording = np.random.default_rng(0).normal(size=3 * RATE).astype(np.float32) * 0.1
        reference = tts.create_voice_clone_prompt((recording, RATE), "three seconds of something")
        return tts.generate_voice_clone, dict(voice_clone_prompt=reference)

    def preset() -> tuple[Callable, dict]:
        model = accelerate(load_measured(checkpoint.custom_voice))
        return model.generate_custom_voice, dict(speaker=model.get_supported_speakers()[0])

    voices = {"x-vector": lambda: (tts.generate_voice_clone, checkpoint.voice()), "in-context": in_context}
    voices |= {"preset voice": preset} if checkpoint.custom_voice else {}
    for name, prepare in voices.items():
        try:
            method, voice = prepare()
            row = timing.time_whole_calls(timing.whole_call(method, **voice), effort.frames, effort)
            row |= timing.time_stream(timing.streamed_call(method, **voice), effort)
            if prepare is preset:  # its whole text is in the prompt, so a text of as many tokens as usual is timed, too
                usual = timing.streamed_call(method, text=timing.TEXT[: timing.PUBLISHED_TOKENS], **voice)
                usual_ms = timing.time_stream(usual, effort)["first_audio_ms"]
                row[f"first_audio_{timing.PUBLISHED_TOKENS}_tokens_ms"] = usual_ms
            yield f"voice: {name}", row
        except (ValueError, OSError) as error:
            print(f"voice: {name} left out: {error}")


def times_as_fast(rows: dict[str, Row]) -> NamedRows:
    """How many times as fast as the others each path is, by the ms per frame of whole calls."""
    others = [name for name in (UPSTREAM, PEER) if name in rows]
    for path in (THREE_FILES, SEPARATE, MEGAKERNEL):
        if path in rows:
            ratios = {f"than {name}": rows[name]["ms_per_frame"] / rows[path]["ms_per_frame"] for name in others}
            yield f"{path}, times as fast", ratios
