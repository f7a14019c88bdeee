#!/usr/bin/env python3
"""Time Qwen3-TTS on this machine: upstream, the three files alone, both paths of fast/, and faster-qwen3-tts.

    python bench.py 0.6B 1.7B                    # the published weights
    python bench.py 0.6B 1.7B --random-weights   # random weights of the same shapes: same speed, no download, noise
    python bench.py 0.6B --streams               # many listeners at once
    python bench.py 0.6B --ready                 # how long until a new process speaks
    python bench.py 0.6B --check                 # is it the same model? compares with upstream or float32
    python bench.py --plot                       # draws results/*.svg from results/*.json; needs matplotlib

All rows speak the same text with the same voice and settings through the public methods; only the rows "... parts in
ms" call internals. "x real time" is seconds of audio per second. A whole call includes tokenizer and codec; it is timed
at two lengths, and "ms per frame" is the slope between them. Figures are medians; the JSON has minimum, maximum and
number of runs. faster-qwen3-tts is timed in a process of its own, with .venv5 of `./setup.sh none --transformers5
--test`. With the published weights, the CustomVoice model of the
size is downloaded, too. Without a GPU a tiny model runs on the CPU, which shows that everything works, but no speed.
"""

import argparse
import gc
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from cli.audio_files import write_audio
from cli.checkpoints import FRAME_RATE, base_config, hub_name
from cli.loading import model_errors
from cli.output_files import check_writable
from cli.scripts import Parser, cli_errors
from cli.voices import load_speaker, speaker_prompt
from cudagraph_talker import capture, sample
from fast.paths import why_not
from fast.prompts import build_request, decoder_of
from fast.streaming import stream
from generate import Decoder, accelerate, load, load_upstream
from tools.arriving import time_arriving_text
from tools.bounds import POSITION, bandwidth_of, bound_ms, bytes_per_frame
from tools.check import check
from tools.listeners import time_streams
from tools.machine import machine_card
from tools.plot import plot
from tools.random_checkpoint import write_checkpoint
from tools.ready import time_ready

ROOT = Path(__file__).parent
ON_GPU = torch.cuda.is_available()
SIZES = ["0.6B", "1.7B"]
TEXT = (
    "Real time speech synthesis means that the first sound arrives before you notice the wait. A voice that "
    "answers at once seems present, and one that hesitates does not, however well it speaks. So we count the "
    "milliseconds from the last letter of the question to the first sound of the answer, and all that follow."
)
PEER = "faster-qwen3-tts"
PEER_PYTHON = ROOT / ".venv5" / "bin" / "python"
PEER_SECONDS = 1200  # more than ten times what it takes on an H200
THREE_FILES = "the three files alone"
GROWING = "1, 1, 2, 4, 8, ..."
CHUNKS = {"1": 1, "8": 8, GROWING: None}  # frames per chunk, in words -> chunk_frames of `stream`
COLUMNS = {  # of the printed table: key -> title, digits
    "ms_per_frame": ("ms/frame", 2),
    "x_real_time": ("x real time", 2),
    "first_audio_ms": ("first ms", 1),
    "first_audio_p95_ms": ("p95 ms", 1),
    "audio_seconds_per_second": ("audio s/s", 1),
    "peak_gib": ("peak GiB", 2),
    "seconds_to_capture": ("capture s", 1),
    "late_chunks": ("late", 0),
    "underruns": ("underruns", 0),
}

Row = dict[str, Any]
NamedRows = Iterator[tuple[str, Row]]


@dataclass(frozen=True)
class Effort:
    """How much is measured; lengths are in frames. The defaults are those of a full run on a GPU."""

    quick: bool = False
    short: int = 40
    long: int = 120
    upstream_short: int = 4
    upstream_long: int = 16
    runs: int = 3
    first_audio_runs: int = 20
    late_chunk_frames: int = 750  # length of the stream (60 s) that is checked for late chunks
    chunks: tuple[str, ...] = tuple(CHUNKS)
    lists: tuple[int, ...] = (4, 16)  # texts, with audio
    batches: tuple[int, ...] = (4, 16, 64)  # rows, without audio
    streams: tuple[int, ...] = (1, 4, 16, 64, 256)  # listeners at once
    poisson_seconds: float = 60
    held: tuple[int, ...] = (320, 400)  # listeners at once, for 60 s each
    processes: int = 5  # started by --ready


def choose_effort(quick: bool) -> Effort:
    if ON_GPU and not quick:
        return Effort()
    less = Effort(
        quick, short=8, long=24, upstream_short=2, upstream_long=6, runs=1, first_audio_runs=5, late_chunk_frames=0
    )
    less = replace(less, streams=(1, 2, 4), poisson_seconds=0, held=(), processes=1)
    if quick:
        less = replace(less, lists=())
    if not ON_GPU:
        return replace(less, batches=(2,))
    return replace(less, chunks=("1", GROWING), batches=())


@dataclass(frozen=True)
class Checkpoint:
    name: str
    model: str  # a folder or a short name
    custom_voice: str | None  # the same with preset voices, where there is one


# ---- The program


def main() -> None:
    args = parse_arguments()
    if args.plot:
        print(*plot(ROOT / "results"), sep="\n")
        return

    warnings.filterwarnings("ignore", message="the speech was cut off")
    transformers.logging.set_verbosity_error()
    card = machine_card("random" if args.random_weights else "published, or of the folder given")
    device = card["gpu"] if ON_GPU else "CPU"
    kind = "_streams" if args.streams else "_ready" if args.ready else ""
    output = args.output or Path(f"bench_results_{device.replace(' ', '_')}{kind}.json")
    if not args.check:
        check_writable(output)
    print("  ".join(f"{name}: {value}" for name, value in card.items()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = find_checkpoints(args, Path(folder))
        if args.check:
            wrong = check_all(checkpoints, args)
            sys.exit(f"{wrong} wrong" if wrong else 0)
        time_all(checkpoints, args, card, output)
    print(f"\n{output}")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="0.6B, 1.7B or a folder; default: both sizes, with --quick 0.6B"
    )
    parser.add_argument("--random-weights", action="store_true", help="of the published shapes, made here")
    parser.add_argument("--speaker", type=Path, help="a speaker.pt for the voice; default: a random one")
    parser.add_argument("--quick", action="store_true", help="fewer rows and runs: within a minute on an H200 (0.6B)")
    parser.add_argument("--streams", action="store_true", help="time many listeners at once, and nothing else")
    parser.add_argument("--ready", action="store_true", help="time how long a new process takes to speak, nothing else")
    parser.add_argument("--check", action="store_true", help="compare, do not time; exit code 1 if anything is wrong")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help=f"python that has {PEER}")
    parser.add_argument("--only-peer", action="store_true", help=f"time {PEER} with this python, and nothing else")
    parser.add_argument("--plot", action="store_true", help="draw results/*.svg, do not time")
    parser.add_argument(
        "--output",
        type=Path,
        help="the JSON file; default: bench_results_<GPU>.json, ..._streams.json or ..._ready.json",
    )
    args = parser.parse_args()

    args.models = args.models or (SIZES[:1] if args.quick else SIZES)
    if args.speaker and len(args.models) > 1:
        parser.error("a speaker belongs to one size: give one model with --speaker")
    for name in args.models:
        if name not in [*SIZES, "tiny"] and not Path(name).is_dir():
            parser.error(f"{name} is neither 0.6B, 1.7B nor a folder")
    if not ON_GPU and not args.plot and set(args.models) <= {*SIZES, "tiny"}:
        print(
            "No GPU here: a tiny model with random weights runs on the CPU. It shows that everything works, and\n"
            "--check that the audio is upstream's. Its times say nothing about the real models on a GPU.\n"
        )
        args.models = ["tiny"]
    args.random_weights = args.random_weights or args.models == ["tiny"]
    return args


def find_checkpoints(args: argparse.Namespace, folder: Path) -> Iterator[Checkpoint]:
    """The checkpoints that were asked for. Random ones are written into `folder`, each when its turn comes."""
    with_custom_voice = not (args.check or args.quick or args.streams or args.ready or args.only_peer)
    for name in args.models:
        if name == "tiny" or (args.random_weights and name in SIZES):
            base = folder / f"{name}-base"
            custom_voice = folder / f"{name}-custom_voice"
            write_checkpoint(base, name, "base", ends=False)
            if with_custom_voice:
                write_checkpoint(custom_voice, name, "custom_voice", ends=False)
            yield Checkpoint(name, str(base), str(custom_voice) if with_custom_voice else None)
        elif Path(name).is_dir():
            yield Checkpoint(Path(name).name, name, None)
        else:
            yield Checkpoint(name, name, f"{name}-CustomVoice")


def choose_speaker(checkpoint: Checkpoint, path: Path | None) -> torch.Tensor:
    """The speaker embedding of a file, or a random one."""
    hidden_size = base_config(checkpoint.model)["talker_config"]["hidden_size"]
    if path is None:
        return torch.randn(hidden_size, generator=torch.Generator().manual_seed(0))
    (speaker,) = load_speaker(path, hidden_size)["ref_spk_embedding"]
    return speaker


def check_all(checkpoints: Iterable[Checkpoint], args: argparse.Namespace) -> int:
    """Returns how many checks have failed."""
    frames = 200 if ON_GPU else 60  # with fewer, `verdict` of parity.py might call a correct kernel wrong
    wrong = 0
    for checkpoint in checkpoints:
        speaker = choose_speaker(checkpoint, args.speaker)
        print(f"\n{checkpoint.name}")
        for name, good, figures in check(checkpoint.model, speaker, frames):
            print(f"{'ok' if good else 'WRONG':6}{name}: {figures}", flush=True)
            wrong += not good
    return wrong


def time_all(checkpoints: Iterable[Checkpoint], args: argparse.Namespace, card: dict, output: Path) -> None:
    """Print every row when it is measured, and write all of them to `output`."""
    results = dict(card=card, models={})
    effort = choose_effort(args.quick)
    for checkpoint in checkpoints:
        speaker = choose_speaker(checkpoint, args.speaker)
        print(f"\n{checkpoint.name:44}" + "".join(f"{title:>12}" for title, _ in COLUMNS.values()))
        rows = results["models"][checkpoint.name] = {}
        if args.streams:
            measured = time_listeners(checkpoint, speaker, effort)
        elif args.ready:
            measured = time_new_processes(checkpoint, speaker, effort)
        elif args.only_peer:
            measured = time_peer(checkpoint.model, speaker, effort)
        else:
            measured = itertools.chain(
                time_model(checkpoint, speaker, effort),
                run_peer(checkpoint.model, speaker, args.peer_python) if ON_GPU and not effort.quick else (),
                times_as_fast(rows),
            )
        for name, row in measured:
            rows[name] = row
            print_row(name, row)
            output.write_text(json.dumps(results, indent=1) + "\n")


# ---- The rows of one model, in the order in which they are measured


def time_model(checkpoint: Checkpoint, speaker: torch.Tensor, effort: Effort) -> NamedRows:
    load_ms, tts = clock(lambda: load_upstream(checkpoint.model))
    speak = whole_call(tts.generate_voice_clone, voice_clone_prompt=speaker_prompt(speaker))
    row = time_whole_calls(speak, effort.upstream_short, effort.upstream_long, effort.runs)
    yield "upstream", row | dict(seconds_to_load=load_ms / 1e3)

    if not effort.quick:  # before fast/ changes the layers
        yield THREE_FILES, time_three_files(tts, speak, effort)

    paths = {"separate kernels": False}
    if not why_not(tts.model.talker):
        paths["megakernel"] = True
    for path, fused in paths.items():
        is_fastest = path == [*paths][-1]
        for part, row in time_path(tts, speaker, fused, is_fastest, effort):
            yield path + part, row

    # The fastest path, as a model is loaded by default
    (audio,), rate = tts.generate_voice_clone(**clone_arguments(speaker, effort.long))
    write_audio(Path(f"sample_{checkpoint.name}.wav"), [(audio, rate)])
    if not effort.quick:
        yield from time_voices(tts, speaker, checkpoint.custom_voice, effort)
    yield from time_lists(tts, speaker, effort)

    for rows in effort.batches:
        accelerate(tts, max_batch=rows, fused=False)
        free_memory()
        yield f"separate kernels, batch of {rows}", time_frames(tts, speaker, rows, effort.short, effort.runs)

    del tts, speak, audio
    free_memory()


def time_listeners(checkpoint: Checkpoint, speaker: torch.Tensor, effort: Effort) -> NamedRows:
    tts = load(checkpoint.model)
    arguments = clone_arguments(speaker, effort.long)
    yield from time_streams(tts, arguments, effort.streams, effort.poisson_seconds, effort.held)
    del tts
    free_memory()


def time_new_processes(checkpoint: Checkpoint, speaker: torch.Tensor, effort: Effort) -> NamedRows:
    with tempfile.TemporaryDirectory() as folder:
        speaker_file = Path(folder, "speaker.pt")
        torch.save(speaker, speaker_file)
        yield from time_ready(checkpoint.model, speaker_file, effort.processes)


def time_three_files(tts, speak: Callable[[int], int], effort: Effort) -> Row:
    """cudagraph_talker.py, cudagraph_predictor.py and generate.py without fast/: upstream's layers and codec."""
    free_memory()
    decoder = Decoder(tts.model.talker, max_seq_len=2048, max_batch=None)
    capture_ms, _ = clock(lambda: decoder.graphs_for(1))
    tts.model.talker.generate = decoder.generate
    row = time_whole_calls(speak, effort.short, effort.long, effort.runs)
    return row | dict(seconds_to_capture=capture_ms / 1e3, peak_gib=peak_gib())


def time_path(tts, speaker: torch.Tensor, fused: bool, is_fastest: bool, effort: Effort) -> NamedRows:
    """Whole calls, streams and where the time goes; on the fastest path also a stream of a minute."""
    vars(tts.model.talker).pop("generate", None)  # release the path before this one
    vars(tts.model.speech_tokenizer).pop("decode", None)
    free_memory()
    capture_ms, _ = clock(lambda: accelerate(tts, fused=fused))
    method = tts.generate_voice_clone
    voice = dict(voice_clone_prompt=speaker_prompt(speaker))

    row = time_whole_calls(whole_call(method, **voice), effort.short, effort.long, effort.runs)
    yield "", row | dict(seconds_to_capture=capture_ms / 1e3, peak_gib=peak_gib())
    if effort.quick and not is_fastest:
        return

    for chunks in effort.chunks:
        start_stream = streamed_call(method, CHUNKS[chunks], **voice)
        row = time_stream(start_stream, effort.long, effort.first_audio_runs, effort.runs)
        if is_fastest and effort.late_chunk_frames and chunks != "8":
            row |= count_late_chunks(start_stream, effort.late_chunk_frames)
        yield f", chunks of {chunks}", row
    if is_fastest:
        row = time_arriving_text(method, TEXT, effort.runs, max_new_tokens=effort.long + 1, language="English", **voice)
        yield f", text at {row['tokens_per_second']} tokens per second", row

    frame_ms = time_frames(tts, speaker, 1, effort.long, effort.runs)["ms_per_frame"]
    parts = frame_parts(tts, speaker, effort, frame_ms)
    yield ", a frame's parts in ms", parts
    if bound := memory_bound(tts.model.talker, parts[f"frame at position {POSITION}"]):
        yield ", memory bound", bound
    yield ", first audio's parts in ms", first_audio_parts(tts, speaker, effort)
    yield ", a whole call's parts in ms", whole_call_parts(tts, voice, effort, frame_ms)


def time_voices(tts, speaker: torch.Tensor, custom_voice: str | None, effort: Effort) -> NamedRows:
    """Every kind of voice: whole calls and streams."""
    rate = 24000
    recording = np.random.default_rng(0).normal(size=3 * rate).astype(np.float32) * 0.1
    reference = tts.create_voice_clone_prompt((recording, rate), "three seconds of something")
    voices = {
        "x-vector": (tts.generate_voice_clone, dict(voice_clone_prompt=speaker_prompt(speaker))),
        "in-context": (tts.generate_voice_clone, dict(voice_clone_prompt=reference)),
    }
    if custom_voice:
        try:
            preset = accelerate(load_upstream(custom_voice))
            voices["preset voice"] = preset.generate_custom_voice, dict(speaker=preset.get_supported_speakers()[0])
        except (ValueError, OSError) as error:
            print(f"voice: preset voice left out: {error}")
    for name, (method, voice) in voices.items():
        try:
            whole = time_whole_calls(whole_call(method, **voice), effort.short, effort.long, effort.runs)
            streamed = time_stream(streamed_call(method, **voice), effort.long, effort.first_audio_runs, 1)
        except (ValueError, OSError) as error:
            print(f"voice: {name} left out: {error}")
            continue
        yield f"voice: {name}", whole | streamed


def time_lists(tts, speaker: torch.Tensor, effort: Effort) -> NamedRows:
    """Lists of texts, with audio: as the model is loaded by default, then with graphs for the longest list."""
    for texts in effort.lists:
        yield f"list of {texts} texts", time_list(tts, speaker, texts, effort)
    if effort.lists:
        longest = max(effort.lists)
        accelerate(tts, max_batch=longest)
        yield f"list of {longest} texts, max_batch={longest}", time_list(tts, speaker, longest, effort)


def time_list(tts, speaker: torch.Tensor, texts: int, effort: Effort) -> Row:
    def speak() -> float:
        audios, rate = tts.generate_voice_clone(**clone_arguments(speaker, effort.short, texts))
        return sum(len(audio) for audio in audios) / rate

    free_memory()
    speak()  # warm-up
    speeds = []
    for _ in range(effort.runs):
        ms, seconds = clock(speak)
        speeds.append(seconds / (ms / 1e3))
    return dict(texts=texts, **median_of("audio_seconds_per_second", speeds), peak_gib=peak_gib())


def run_peer(model: str, speaker: torch.Tensor, python: Path) -> NamedRows:
    """The rows of `time_peer`, from a process whose python has faster-qwen3-tts and the packages that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(speaker, Path(folder, "speaker.pt"))
        output = Path(folder, "peer.json")
        options = ["--only-peer", "--speaker", f"{folder}/speaker.pt", "--output", output]
        environment = os.environ | {"PYTHONPATH": str(python.parents[1] / "peers")}
        try:
            command = [python, ROOT / "bench.py", model, *options]
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=PEER_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            print(f"{PEER} left out: {lines[-1]}")
            return
        (rows,) = json.loads(output.read_text())["models"].values()
    yield from rows.items()


def time_peer(model: str, speaker: torch.Tensor, effort: Effort) -> NamedRows:
    """faster-qwen3-tts on the same checkpoint."""
    try:
        from faster_qwen3_tts import FasterQwen3TTS
    except ImportError as error:
        raise ValueError(f"{PEER} cannot be imported: {error}") from None
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    tts = FasterQwen3TTS.from_pretrained(hub_name(model), device=device, dtype=dtype)
    voice = {"ref_spk_embedding": [speaker.to(device, dtype)]}

    def arguments(frames: int) -> dict:
        length = dict(max_new_tokens=frames, min_new_tokens=frames)
        return dict(text=TEXT, language="English", voice_clone_prompt=voice, **length)

    def speak(frames: int) -> int:
        return count_frames(*tts.generate_voice_clone(**arguments(frames)))

    def start_stream(chunk_size: int, frames: int) -> Iterator:
        return tts.generate_voice_clone_streaming(**arguments(frames), chunk_size=chunk_size)

    row = time_whole_calls(speak, effort.short, effort.long, effort.runs)
    yield PEER, row | dict(version=importlib.metadata.version(PEER), transformers=transformers.__version__)
    for size in (1, 8):
        row = time_stream(partial(start_stream, size), effort.long, effort.first_audio_runs, effort.runs)
        yield f"{PEER}, chunks of {size}", row


def times_as_fast(rows: dict[str, Row]) -> NamedRows:
    """Ratios of the ms per frame of whole calls, from all rows before."""
    for path in (THREE_FILES, "separate kernels", "megakernel"):
        if path not in rows:
            continue
        frame_ms = rows[path]["ms_per_frame"]
        others = [name for name in ("upstream", PEER) if name in rows]
        yield f"{path}, times as fast", {f"than {name}": rows[name]["ms_per_frame"] / frame_ms for name in others}


# ---- Speaking


def speech_arguments(frames: int, texts: int = 1, **voice) -> dict:
    """Arguments of upstream's methods for a list of texts, all the same. Upstream's last token has no audio."""
    return dict(text=[TEXT] * texts, language="English", max_new_tokens=frames + 1, **voice)


def clone_arguments(speaker: torch.Tensor, frames: int, texts: int = 1) -> dict:
    return speech_arguments(frames, texts, voice_clone_prompt=speaker_prompt(speaker, texts))


def count_frames(audios: list[np.ndarray], rate: int) -> int:
    return round(len(audios[0]) / rate * FRAME_RATE)


def whole_call(method: Callable, **voice) -> Callable[[int], int]:
    """A function that speaks that many frames and returns how many it has spoken."""
    return lambda frames: count_frames(*method(**speech_arguments(frames, **voice)))


def streamed_call(method: Callable, chunk_frames: int | None = None, **voice) -> Callable[[int], Iterator]:
    """A function that starts a stream of that many frames."""
    return lambda frames: stream(method, chunk_frames=chunk_frames, **speech_arguments(frames, **voice))


def start_frames(tts, speaker: torch.Tensor, rows: int, frames: int) -> Iterator:
    """The decoder's own loop, without the codec."""
    request = build_request(tts.generate_voice_clone, **clone_arguments(speaker, frames, rows))
    return decoder_of(tts).frames(**request)


# ---- Timing


def time_whole_calls(speak: Callable[[int], int], short: int, long: int, runs: int) -> Row:
    """x real time of the longer call; ms per frame from the difference of the two."""
    speak(short)  # warm-up
    speak(long)
    x_real_time, ms_per_frame = [], []
    for _ in range(runs):
        short_ms, short_frames = clock(lambda: speak(short))
        long_ms, long_frames = clock(lambda: speak(long))
        if long_frames <= short_frames:
            raise ValueError(f"the speech ends after {long_frames} frames: too soon to time")
        x_real_time.append(long_frames / FRAME_RATE / (long_ms / 1e3))
        ms_per_frame.append((long_ms - short_ms) / (long_frames - short_frames))
    medians = median_of("x_real_time", x_real_time) | median_of("ms_per_frame", ms_per_frame)
    return dict(frames=long_frames, **medians)


def time_stream(start_stream: Callable[[int], Iterator], frames: int, first_audio_runs: int, runs: int) -> Row:
    """First audio: from the call to samples on the host. The first run of each kind warms up and is not counted."""
    first_audio_ms = []
    for _ in range(1 + first_audio_runs):
        synchronize()
        start = time.perf_counter()
        chunks = start_stream(frames)
        next(chunks)
        first_audio_ms.append((time.perf_counter() - start) * 1e3)
        chunks.close()

    x_real_time = []
    for _ in range(1 + runs):
        ms, seconds = clock(lambda: sum(len(audio) / rate for audio, rate, *_ in start_stream(frames)))
        x_real_time.append(seconds / (ms / 1e3))
    return median_of("first_audio_ms", first_audio_ms[1:]) | median_of("x_real_time", x_real_time[1:])


def count_late_chunks(start_stream: Callable[[int], Iterator], frames: int) -> Row:
    """Chunks that come too late for a listener who starts to play with the first one."""
    late = 0
    played = 0.0
    begin = None
    for audio, rate, *_ in start_stream(frames):
        now = time.perf_counter()
        begin = begin or now
        late += now > begin + played
        played += len(audio) / rate
    return dict(late_chunks=late, seconds=played)


def time_frames(tts, speaker: torch.Tensor, rows: int, frames: int, runs: int) -> Row:
    """Frames of a batch, without prompt and codec. The first run warms up."""
    ms_per_frame = []
    for _ in range(1 + runs):
        loop = start_frames(tts, speaker, rows, frames)
        for _ in itertools.islice(loop, frames // 4):  # by then the prompt's work is done
            pass
        ms, rest = clock(partial(list, loop))
        if not rest:
            raise ValueError("the speech ends too soon to time")
        ms_per_frame.append(ms / len(rest))
    row = median_of("ms_per_frame", ms_per_frame[1:])
    speed = rows / FRAME_RATE / (row["ms_per_frame"] / 1e3)
    return row | dict(rows=rows, audio_seconds_per_second=speed, peak_gib=peak_gib())


@torch.no_grad()
def frame_parts(tts, speaker: torch.Tensor, effort: Effort, frame_ms: float) -> Row:
    """Each graph replayed alone, back to back; then both together, at two positions of the cache.

    What the loop takes beyond the two is overhead. Sampling is inside the graphs; where it is not part of the
    megakernel, it is also timed as graphs of its own.
    """
    frames = start_frames(tts, speaker, 1, effort.long)
    next(frames)
    talker, predictor = decoder_of(tts).graphs_for(1)

    def replay_both() -> None:
        predictor.replay()
        talker.replay()

    parts = {"predictor": time_replays(predictor.replay), "talker": time_replays(talker.replay)}
    for position in (POSITION, 1500):
        talker.frame.fill_(position - talker.prompt_length.item())
        parts[f"frame at position {position}"] = time_replays(replay_both)
    frames.close()

    if not hasattr(talker.step, "logits"):
        scores = torch.randn(1, predictor.sampling.vocab_size, device=talker.device)

        def choose_codes() -> None:
            for _ in predictor.heads:
                sample(scores, predictor.sampling)

        choose_codes = capture(choose_codes, talker.device, generator=talker.generator)
        choose_token = capture(talker.choose_token, talker.device, generator=talker.generator)
        parts["of these: sampling"] = time_replays(choose_codes) + time_replays(choose_token)
    overhead = frame_ms - parts["talker"] - parts["predictor"]
    return parts | {"the whole loop": frame_ms, "overhead": overhead}


def memory_bound(talker, frame_ms: float) -> Row:
    """The bytes of a frame over the GPU's memory bandwidth, and the share of that speed which was reached. Empty if the
    bandwidth is unknown."""
    bandwidth = bandwidth_of(talker.device) if ON_GPU else None
    if bandwidth is None:
        return {}
    bound = bound_ms(talker, bandwidth)
    return {
        "GB per frame": bytes_per_frame(talker) / 1e9,
        "GB per second": bandwidth,
        "bound in ms": bound,
        "measured in ms": frame_ms,
        "share of the bound": bound / frame_ms,
    }


def time_replays(replay: Callable[[], Any], count: int = 20) -> float:
    """Milliseconds of one replay."""
    replay()  # warm-up
    ms, _ = clock(lambda: [replay() for _ in range(count)])
    return ms / count


@torch.no_grad()
def first_audio_parts(tts, speaker: torch.Tensor, effort: Effort) -> Row:
    """Each part alone. The audio of the first frame needs prefill and predictor, but no step of the talker."""
    method = tts.generate_voice_clone
    arguments = clone_arguments(speaker, 10)
    request = build_request(method, **arguments)
    talker, predictor = decoder_of(tts).graphs_for(1)
    codec = tts.model.speech_tokenizer.decode.__self__
    prompt_text = [f"<|im_start|>assistant\n{TEXT}<|im_end|>\n"]
    codes = predictor.codes[0, :1].clone()
    samples = codec.samples[0, : codec.samples_per_frame]
    parts = {
        "tokenize": lambda: tts._tokenize_texts(prompt_text),
        "tokenize and prompt": lambda: build_request(method, **arguments),
        "prefill": lambda: talker.begin(request["inputs_embeds"], request["attention_mask"]),
        "first codes": predictor.replay,
        "codec and copy": lambda: codec.feed(codes)(),
        "copy": samples.cpu,
    }
    medians = {}
    for name, part in parts.items():
        codec.reset()
        part()  # warm-up
        medians[name] = statistics.median(clock(part)[0] for _ in range(effort.first_audio_runs))
    return medians


def whole_call_parts(tts, voice: dict, effort: Effort, frame_ms: float) -> Row:
    frames = min(80, effort.long)
    speak = whole_call(tts.generate_voice_clone, **voice)
    codes = torch.zeros(frames, 16, dtype=torch.long, device=tts.device)
    decode = partial(tts.model.speech_tokenizer.decode, [{"audio_codes": codes}])
    runs = 1 + effort.runs
    whole_ms = statistics.median(clock(lambda: speak(frames))[0] for _ in range(runs))
    codec_ms = statistics.median(clock(decode)[0] for _ in range(runs))
    return {
        "frames": frame_ms * frames,
        "codec": codec_ms,
        "rest": whole_ms - frame_ms * frames - codec_ms,
        "whole": whole_ms,
        "x_real_time": frames / FRAME_RATE / (whole_ms / 1e3),
    }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def clock(fn: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, with the GPU idle before and after, and what `fn` returns."""
    synchronize()
    start = time.perf_counter()
    result = fn()
    synchronize()
    return (time.perf_counter() - start) * 1e3, result


def median_of(name: str, values: list[float]) -> Row:
    return {name: statistics.median(values), f"{name}_spread": [min(values), max(values)], f"{name}_runs": len(values)}


def free_memory() -> None:
    """So that the peak of the next row does not include the row before."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None


# ---- Printing


def print_row(name: str, row: Row) -> None:
    if name.endswith(("parts in ms", "times as fast", "memory bound", "ready")):
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
        return
    cells = ["" if row.get(key) is None else f"{row[key]:.{digits}f}" for key, (_, digits) in COLUMNS.items()]
    print(f"{name:44}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


if __name__ == "__main__":
    with cli_errors(), model_errors():
        main()
