#!/usr/bin/env python3
"""Time Qwen3-TTS here: upstream as it is, the reference path, the fused layers, and faster-qwen3-tts if installed.

    python bench.py 0.6B 1.7B                    # the published weights
    python bench.py 0.6B 1.7B --random-weights   # random ones of the same shapes: as fast, no download, noise to hear
    python bench.py 0.6B --check                 # is it the same model, on this machine and with these weights?
    python bench.py --plot                       # the README's figure, from results/*.json; needs matplotlib

All rows speak the same text with the same voice and settings, through the public functions; the rows of parts look
inside. A whole call (tokenizing and codec included) is timed at two lengths; the difference gives its milliseconds a
frame. Medians; the JSON has spread and runs. Without a GPU a tiny model runs on the CPU: that shows that everything
works, and no speed.
"""
import argparse
import gc
import importlib.metadata
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers

from cudagraph_talker import capture, sample
from generate import accelerate, handed_over, load_upstream, stream
from parity import Forced, error, one_pass, verdict
from paths import why_not
from random_checkpoint import write_checkpoint
from voices import Parser, answered_mistakes, base_config, check_writable, load_speaker, speaker_prompt
from wav import write_wav

TEXT = ("Real time speech synthesis means that the first sound arrives before you notice the wait. A voice that "
        "answers at once seems present, and one that hesitates does not, however well it speaks. So we count the "
        "milliseconds from the last letter of the question to the first sound of the answer, and all that follow.")
SIZES = ["0.6B", "1.7B"]
FRAME_RATE = 12.5
ON_GPU = torch.cuda.is_available()
RAMP = "1, 1, 2, 4, 8, ..."
CHUNKS = {"1": 1, "8": 8, RAMP: None}
ROOT = Path(__file__).parent


# ---- clocks

def synchronize():
    if ON_GPU:
        torch.cuda.synchronize()


def clock(fn, *arguments):
    """Milliseconds, with the GPU idle before and after."""
    synchronize()
    start = time.perf_counter()
    fn(*arguments)
    synchronize()
    return (time.perf_counter() - start) * 1e3


def forget():
    """What went before does not count in the next row's memory."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak():
    return torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None


def median_of(name, values):
    return {name: statistics.median(values), f"{name}_spread": [min(values), max(values)], f"{name}_runs": len(values)}


class Effort:
    """How much of everything: lengths in frames, and how often."""

    def __init__(self, quick):
        little = quick or not ON_GPU
        self.short, self.long, self.runs, self.firsts = (8, 24, 1, 5) if little else (40, 120, 3, 20)
        self.upstream_short, self.upstream_long = (2, 6) if little else (4, 16)
        self.minute, self.quick = 0 if little else 750, quick
        self.chunks = ("1", RAMP) if quick and ON_GPU else CHUNKS
        self.batches = (2,) if not ON_GPU else () if quick else (4, 16, 64)


def whole_calls(speak, short, long, runs):
    """`speak(frames)` makes a whole call of that many frames and returns how many it really made."""
    speak(short), speak(long)                                     # warm-up
    rtfs, steps = [], []
    for _ in range(runs):
        made = []
        first, second = (clock(lambda: made.append(speak(frames))) for frames in (short, long))
        if made[1] <= made[0]:
            raise ValueError(f"the speech ends after {made[1]} frames: too soon to time")
        rtfs.append(made[1] / FRAME_RATE / (second / 1e3))
        steps.append((second - first) / (made[1] - made[0]))
    return dict(frames=made[1], **median_of("rtf", rtfs), **median_of("ms_a_frame", steps))


def streaming(start_stream, frames, firsts, runs):
    """`start_stream(frames)` -> chunks of (audio, rate, ...). First audio: from the call to samples on the host."""
    times, rtfs = [], []
    for _ in range(1 + firsts):
        synchronize()
        start = time.perf_counter()
        chunks = start_stream(frames)
        next(chunks)
        times.append((time.perf_counter() - start) * 1e3)
        chunks.close()
    for _ in range(1 + runs):
        seconds = []
        wall = clock(lambda: seconds.extend(len(audio) / rate for audio, rate, *_ in start_stream(frames))) / 1e3
        rtfs.append(sum(seconds) / wall)
    return median_of("first_audio_ms", times[1:]) | median_of("rtf", rtfs[1:])          # the first ones warm up


def late_chunks(start_stream, frames):
    """Chunks that come too late for a listener who starts to play with the first one."""
    late, played, begin = 0, 0.0, None
    for audio, rate, *_ in start_stream(frames):
        now = time.perf_counter()
        begin = begin or now
        late += now > begin + played
        played += len(audio) / rate
    return dict(late_chunks=late, seconds=played)


# ---- what is timed

def arguments(speaker, rows, frames):
    return asked(frames, rows, voice_clone_prompt=speaker_prompt(speaker, rows))


def asked(frames, rows=1, **voice):
    return dict(text=[TEXT] * rows, language="English", max_new_tokens=frames + 1, **voice)


def count_frames(wavs, rate):
    return round(len(wavs[0]) / rate * FRAME_RATE)


def speaking(method, **voice):
    """`speak` for whole_calls."""
    return lambda frames: count_frames(*method(**asked(frames, **voice)))


def one_path(tts, speaker, fused, effort, fastest):
    """Rows of one path: whole calls, memory, streams and where the time goes; of the fastest also a minute's stream."""
    voice = dict(voice_clone_prompt=speaker_prompt(speaker))
    for owner, name in ((tts.model.talker, "generate"), (tts.model.speech_tokenizer, "decode")):
        vars(owner).pop(name, None)                               # what the path before has put there
    forget()
    seconds = clock(lambda: accelerate(tts, max_batch=1, fused=fused)) / 1e3
    row = whole_calls(speaking(tts.generate_voice_clone, **voice), effort.short, effort.long, effort.runs)
    yield "", row | dict(seconds_to_capture=seconds, peak_gib=peak())
    if effort.quick and not fastest:
        return
    for name in effort.chunks:
        def start_stream(frames):
            return stream(tts.generate_voice_clone, chunk_frames=CHUNKS[name], **asked(frames, **voice))
        row = streaming(start_stream, effort.long, effort.firsts, effort.runs)
        gaps = late_chunks(start_stream, effort.minute) if fastest and effort.minute and name != "8" else {}
        yield f", chunks of {name}", row | gaps
    loop = decode_loop(tts, speaker, 1, effort.long, effort.runs)["ms_a_frame"]
    yield ", a frame's parts in ms", frame_parts(tts, speaker, fused, effort, loop)
    yield ", first audio's parts in ms", first_audio_parts(tts, speaker, effort)
    yield ", a whole call's parts in ms", whole_call_parts(tts, voice, effort, loop)


def start_frames(tts, speaker, rows, frames):
    decoder, request = handed_over(tts.generate_voice_clone, arguments(speaker, rows, frames))
    return decoder.frames(**request)


def decode_loop(tts, speaker, rows, frames, runs):
    """Frames of a batch, codec apart."""
    times, made = [], []
    for _ in range(1 + runs):
        loop = start_frames(tts, speaker, rows, frames)
        for _ in itertools.islice(loop, frames // 4):             # the prompt is behind us then
            pass
        wall = clock(lambda: made.append(sum(1 for _ in loop)))
        if made[-1] == 0:
            raise ValueError("the speech ends too soon to time")
        times.append(wall / made[-1])
    row = median_of("ms_a_frame", times[1:])
    return row | dict(rows=rows, audio_seconds_a_second=rows / FRAME_RATE / (row["ms_a_frame"] / 1e3), peak_gib=peak())


@torch.no_grad()
def frame_parts(tts, speaker, fused, effort, loop, count=20):
    """Each graph replayed by itself, back to back; what the loop takes beyond them is glue. Sampling is inside the two:
    on the reference path it is also timed alone, as a graph of its own. Then both together, at two positions."""
    frames = start_frames(tts, speaker, 1, effort.long)
    next(frames)
    talker, predictor = tts.model.talker.generate.__self__.graphs_for(1)

    def of(graph):
        graph()
        return clock(lambda: [graph() for _ in range(count)]) / count
    parts = {"predictor": of(predictor.step), "talker": of(talker.step)}
    for position in (200, 1500):
        talker.frame.fill_(position - talker.start.item())
        parts[f"frame at position {position}"] = of(lambda: (predictor.step(), talker.step()))
    frames.close()
    if not fused:
        scores = torch.randn(1, predictor.sampling.vocab, device=talker.device)
        fifteen = capture(lambda: [sample(scores, predictor.sampling) for _ in predictor.heads], talker.device)
        parts["of these: sampling"] = of(fifteen) + of(capture(talker.choose, talker.device))
    return parts | {"the whole loop": loop, "glue": loop - parts["talker"] - parts["predictor"]}


@torch.no_grad()
def first_audio_parts(tts, speaker, effort):
    """Each part by itself; the first frame's sound needs no more of the frame than the predictor."""
    decoder, request = handed_over(tts.generate_voice_clone, arguments(speaker, 1, 10))
    codec, parts = tts.model.speech_tokenizer.decode.__self__, {}
    (talker, predictor), words = decoder.graphs_for(1), [f"<|im_start|>assistant\n{TEXT}<|im_end|>\n"]
    code, audio = predictor.codes[0, :1].clone(), codec.samples[:codec.samples_a_frame]
    for name, part in (
            ("tokenize", lambda: tts._tokenize_texts(words)),
            ("tokenize and prompt", lambda: handed_over(tts.generate_voice_clone, arguments(speaker, 1, 10))),
            ("prefill", lambda: talker.begin(request["inputs_embeds"], request["attention_mask"])),
            ("first codes", predictor.step),
            ("codec and copy", lambda: codec.feed(code)()),
            ("copy", audio.cpu)):
        codec.reset(), part()
        parts[name] = statistics.median(clock(part) for _ in range(effort.firsts))
    return parts


def whole_call_parts(tts, voice, effort, loop):
    frames = min(80, effort.long)
    speak = speaking(tts.generate_voice_clone, **voice)
    codec, codes = tts.model.speech_tokenizer.decode, torch.zeros(frames, 16, dtype=torch.long, device=tts.device)
    whole, sound = (statistics.median(clock(part) for _ in range(1 + effort.runs)) for part in (
        lambda: speak(frames), lambda: codec([{"audio_codes": codes}])))
    return {"frames": loop * frames, "codec": sound, "rest": whole - loop * frames - sound, "whole": whole,
            "rtf": frames / FRAME_RATE / (whole / 1e3)}


def voices(tts, speaker, custom, effort):
    """Every kind of voice on the fastest path: whole calls and the first audio."""
    recording = np.random.default_rng(0).normal(size=3 * 24000).astype(np.float32) * 0.1, 24000
    ways = {"x-vector": (tts.generate_voice_clone, dict(voice_clone_prompt=speaker_prompt(speaker))),
            "in-context": (tts.generate_voice_clone, dict(voice_clone_prompt=tts.create_voice_clone_prompt(
                recording, "three seconds of something")))}
    if custom:
        try:
            preset = accelerate(load_upstream(custom), max_batch=1)
            ways["preset voice"] = (preset.generate_custom_voice, dict(speaker=preset.get_supported_speakers()[0]))
        except ValueError as error:
            print(f"voice: preset voice left out: {error}")
    for name, (method, voice) in ways.items():
        try:
            yield f"voice: {name}", whole_calls(
                speaking(method, **voice), effort.short, effort.long, effort.runs) | streaming(
                    lambda frames: stream(method, **asked(frames, **voice)), effort.long, effort.firsts, 1)
        except ValueError as error:
            print(f"voice: {name} left out: {error}")


def peer(folder, speaker, effort):
    """faster-qwen3-tts on the same checkpoint, where it is installed."""
    try:
        from faster_qwen3_tts import FasterQwen3TTS
    except ImportError as error:
        print(f"faster-qwen3-tts left out: {error}")
        return {}
    tts = FasterQwen3TTS.from_pretrained(folder, device="cuda", dtype=torch.bfloat16)

    def request(frames):
        voice = {"ref_spk_embedding": [speaker.to("cuda", torch.bfloat16)]}
        return dict(text=TEXT, language="English", voice_clone_prompt=voice, max_new_tokens=frames,
                    min_new_tokens=frames)

    rows = {"faster-qwen3-tts": whole_calls(lambda frames: count_frames(*tts.generate_voice_clone(**request(frames))),
                                            effort.short, effort.long, effort.runs)}
    for chunk in (1, 8):
        rows[f"faster-qwen3-tts, chunks of {chunk}"] = streaming(
            lambda frames: tts.generate_voice_clone_streaming(**request(frames), chunk_size=chunk), effort.long,
            effort.firsts, effort.runs)
    rows["faster-qwen3-tts"]["version"] = importlib.metadata.version("faster-qwen3-tts")
    return rows


def bench(size, folder, custom, speaker, effort):
    """All rows of one checkpoint, one after another as they come."""
    start = time.perf_counter()
    tts = load_upstream(folder)
    seconds_to_load = time.perf_counter() - start
    speak = speaking(tts.generate_voice_clone, voice_clone_prompt=speaker_prompt(speaker))
    rows = {"upstream": whole_calls(speak, effort.upstream_short, effort.upstream_long, effort.runs)
            | dict(seconds_to_load=seconds_to_load)}
    yield from rows.items()
    paths = {"reference path": False} | ({} if why_not(tts.model.talker) else {"fused layers": True})
    for path, fused in paths.items():
        for name, row in one_path(tts, speaker, fused, effort, path == [*paths][-1]):
            rows[path + name] = row
            yield path + name, row
    (spoken,), rate = tts.generate_voice_clone(**arguments(speaker, 1, effort.long))
    write_wav(Path(f"sample_{size}.wav"), [(spoken, rate)])
    if not effort.quick:
        yield from voices(tts, speaker, custom, effort)
    for batch in effort.batches:
        accelerate(tts, max_batch=batch, fused=False)
        forget()
        yield f"reference path, batch of {batch}", decode_loop(tts, speaker, batch, effort.short, effort.runs)
    del tts, speak, spoken
    forget()
    if ON_GPU and not effort.quick:
        rows |= (peer_rows := peer(folder, speaker, effort))
        yield from peer_rows.items()
        forget()
    times = {path: {f"than {name}": rows[name]["ms_a_frame"] / rows[path]["ms_a_frame"] for name in (
        "upstream", "faster-qwen3-tts") if name in rows} for path in paths}
    yield from ((f"{path}, times as fast", row) for path, row in times.items())


# ---- is it the same model?

def check(folder, speaker, frames):
    """Yields a name, whether it is well, and figures."""
    tts = accelerate(load_upstream(folder))
    decoder, request = handed_over(tts.generate_voice_clone, arguments(speaker, 1, frames))
    talker, predictor = decoder.graphs_for(1)

    def tokens_of(take=lambda: None):
        torch.manual_seed(0)
        made = [(codes[0].clone(), take()) for codes, _ in decoder.frames(**request)]
        return torch.stack([codes for codes, _ in made]), [taken for _, taken in made]
    logits = (lambda: [graph.fused.logits().cpu() for graph in (predictor, talker)]) if decoder.fused else lambda: None
    tokens, taken = tokens_of(logits)
    yield "a seed reproduces", torch.equal(tokens, tokens_of()[0]), f"{len(tokens)} frames made twice, {decoder.path}"
    yield "the stream is the whole", *streamed_is_whole(tts, speaker, min(frames, 60))
    if not ON_GPU:
        yield from check_sound(tts, folder, speaker, min(frames, 60))
        return
    paths = {"reference path": Forced(tts.model.talker, decoder.max_seq_len).logits(tokens, **request)}
    if decoder.fused:                                             # after a frame's codes the talker has chosen the next
        paths["fused layers"] = [torch.cat([row[0] for row in taken]), torch.cat([row[1] for row in taken[1:]])]
    del tts, decoder, talker, predictor, logits
    forget()
    own, exact = ([*Forced(talker, 2048).logits(tokens, **request), one_pass(talker, tokens, **request)] for talker in (
        load_upstream(folder, dtype=dtype).model.talker for dtype in (torch.bfloat16, torch.float32)))
    apart = error(exact[1], exact[2], 0.99) / error(own[2], exact[2], 0.99)
    yield "float32 frame by frame is upstream's one pass", apart < 0.05, f"{apart:.1e} of bfloat16's error between them"
    for path, (codes, firsts) in paths.items():
        yield f"{path}: codes 1 to 15", *verdict(codes, own[0], exact[0])
        yield f"{path}: first codes", *verdict(firsts, *(logits[1][:len(firsts)] for logits in (own, exact)))


def streamed_is_whole(tts, speaker, frames):
    torch.manual_seed(0)
    (whole,), _ = tts.generate_voice_clone(**arguments(speaker, 1, frames))
    torch.manual_seed(0)
    joined = np.concatenate([audio for audio, _ in stream(tts.generate_voice_clone, **arguments(speaker, 1, frames))])
    if len(joined) != len(whole):
        return False, f"{len(joined)} samples streamed, {len(whole)} whole"
    difference, allowed = np.abs(joined - whole).max(), 0.02 if ON_GPU else 1e-5
    return difference <= allowed, f"largest difference {difference:.1e} of full scale, {allowed} allowed"


def check_sound(tts, folder, speaker, frames):
    """Without a GPU, in float32: what upstream makes of the same seed, which the same tokens alone can be."""
    upstream = load_upstream(folder)
    for name, settings in (("greedy", dict(do_sample=False, subtalker_dosample=False)), ("seeded", {}), (
            "seeded, other settings", dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3))):
        sounds = []
        for model in (upstream, tts):
            torch.manual_seed(0)
            sounds.append(model.generate_voice_clone(**arguments(speaker, 1, frames), **settings)[0][0])
        same = len(sounds[0]) == len(sounds[1]) and np.abs(sounds[0] - sounds[1]).max() < 1e-4
        yield f"upstream's sound, {name}", same, f"{len(sounds[0])} samples of upstream's, {len(sounds[1])} of ours"


# ---- words

def answer(*command):
    """The first line of what a program says; unknown without the program."""
    try:
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        lines = []
    return lines[0] if lines else "unknown"


def card(weights):
    if ON_GPU:
        driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine = dict(gpu=torch.cuda.get_device_name(), driver=driver, dtype="bfloat16")
    else:
        machine = dict(gpu="none", cpu=platform.processor() or platform.machine(), threads=torch.get_num_threads(),
                       dtype="float32")
    return machine | dict(python=platform.python_version(), torch=torch.__version__, **{
        name: importlib.metadata.version(name) for name in ("transformers", "qwen-tts")},
        commit=answer("git", "describe", "--always", "--dirty"), weights=weights)


COLUMNS = {"ms_a_frame": ("ms/frame", 2), "rtf": ("RTF", 2), "first_audio_ms": ("first ms", 1),
           "audio_seconds_a_second": ("audio s/s", 1), "peak_gib": ("GiB", 2), "seconds_to_capture": ("capture s", 1),
           "late_chunks": ("late", 0)}


def print_row(name, row):
    if not COLUMNS.keys() & row.keys() or "whole" in row:         # parts
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
        return
    cells = [f"{row[key]:.{digits}f}" if row.get(key) is not None else "" for key, (_, digits) in COLUMNS.items()]
    print(f"{name:44}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def plot(output):
    """Milliseconds a frame and to the first audio, of every results file with a GPU's figures."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: install it with pip install matplotlib") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "results").glob("*.json"))]
    gray, rows = "#808080", ("upstream", "faster-qwen3-tts", "reference path", "fused layers")
    colors = dict(zip(rows, ("#9aa0a6", "#c58a2b", "#4f8fd0", "#2f9e62")))
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.6 + 1.5 * sum(len(result["models"]) for result in results)))
    for axis, title, pick in (
            (axes[0], "milliseconds a frame (80 ms of sound)", lambda model, row: model.get(row, {}).get("ms_a_frame")),
            (axes[1], "milliseconds to the first audio", lambda model, row: model.get(
                f"{row}, chunks of 1", {}).get("first_audio_ms"))):
        bars = [(f"{row}, {size}" + f", {result['card']['gpu']}" * (len(results) > 1), value, colors[row])
                for result in results for size, model in result["models"].items() for row in rows
                if (value := pick(model, row))]
        axis.barh([name for name, *_ in bars], [value for _, value, _ in bars], color=[color for *_, color in bars])
        for place, (_, value, _) in enumerate(bars):
            axis.annotate(f" {value:.3g}", (value, place), va="center", color=gray)
        axis.set_xscale("log")
        axis.set_title(title, color=gray)
        axis.tick_params(colors=gray)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_xlim(left=1)
        for spine in axis.spines.values():
            spine.set_visible(False)
    words = "; ".join(dict.fromkeys("{gpu}, {dtype}, {weights} weights, torch {torch}".format(**result["card"])
                                    for result in results))
    figure.text(0.01, 0.01, words, color=gray)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(output, transparent=True)
    print(output)


def checkpoints(names, random_weights, folder, with_custom):
    """(name, checkpoint, CustomVoice checkpoint) of each; random ones are written into the folder."""
    for name in names:
        if name == "tiny" or (random_weights and name in SIZES):
            for kind in ("base", "custom_voice")[:1 + with_custom]:
                write_checkpoint(folder / f"{name}-{kind}", name, kind, ends=False)
            yield name, str(folder / f"{name}-base"), str(folder / f"{name}-custom_voice") if with_custom else None
        elif Path(name).is_dir():
            yield Path(name).name, name, None
        else:
            yield name, name, f"{name}-CustomVoice"


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL",
                        help="0.6B, 1.7B, or a folder; default both sizes, with --quick 0.6B")
    parser.add_argument("--random-weights", action="store_true", help="of the published shapes, made here")
    parser.add_argument("--speaker", type=Path, help="a speaker.pt for the voice; without it a random one")
    parser.add_argument("--quick", action="store_true", help="less of everything: within a minute on an H200 (0.6B)")
    parser.add_argument("--check", action="store_true", help="compare, do not time; exit code 1 if anything is wrong")
    parser.add_argument("--plot", action="store_true", help="draw results/speed.svg, do not time")
    parser.add_argument("--output", type=Path, help="the JSON; default bench_results_<GPU>.json")
    args = parser.parse_args()
    if args.plot:
        return plot(ROOT / "results" / "speed.svg")
    args.models = args.models or (SIZES[:1] if args.quick else SIZES)
    if args.speaker and len(args.models) > 1:
        parser.error("a speaker belongs to one size: give one model with --speaker")
    if unknown := [name for name in args.models if name not in [*SIZES, "tiny"] and not Path(name).is_dir()]:
        parser.error(f"{unknown[0]} is neither 0.6B, 1.7B nor a folder")
    if not ON_GPU and set(args.models) <= {*SIZES, "tiny"}:
        print("No GPU here: a tiny model with random weights runs on the CPU. It shows that everything works, and\n"
              "--check that the sound is upstream's. Its times say nothing about the real models on a GPU.\n")
        args.models = ["tiny"]
    warnings.filterwarnings("ignore", message="the speech was cut off")
    transformers.logging.set_verbosity_error()
    random = args.random_weights or args.models == ["tiny"]
    results = dict(card=card("random" if random else "published, or of the folder given"), models={})
    print("  ".join(f"{name}: {value}" for name, value in results["card"].items()), flush=True)
    device = results["card"]["gpu"] if ON_GPU else "CPU"
    output = args.output or Path(f"bench_results_{device.replace(' ', '_')}.json")
    if not args.check:
        check_writable(output)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for size, checkpoint, custom in checkpoints(args.models, random, Path(folder), not (args.check or args.quick)):
            width = base_config(checkpoint)["talker_config"]["hidden_size"]
            speaker = torch.randn(width, generator=torch.Generator().manual_seed(0))
            if args.speaker:
                speaker, = load_speaker(args.speaker, width)["ref_spk_embedding"]
            if args.check:
                print(f"\n{size}")
                for name, good, figures in check(checkpoint, speaker, 60 if args.quick or not ON_GPU else 200):
                    print(f"{'ok' if good else 'WRONG':6}{name}: {figures}", flush=True)
                    wrong += not good
                continue
            print(f"\n{size:44}" + "".join(f"{title:>11}" for title, _ in COLUMNS.values()))
            rows = results["models"][size] = {}
            for name, row in bench(size, checkpoint, custom, speaker, Effort(args.quick)):
                rows[name] = row
                print_row(name, row)
                output.write_text(json.dumps(results, indent=1) + "\n")
    if args.check:
        sys.exit(f"{wrong} wrong" if wrong else 0)
    print(f"\n{output}")


if __name__ == "__main__":
    with answered_mistakes():
        main()
