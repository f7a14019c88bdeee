#!/usr/bin/env python3
"""Time Qwen3-TTS here: upstream as it is, accelerated, in batches, and faster-qwen3-tts where it is installed.

    python bench.py CHECKPOINT [CHECKPOINT ...] [--output results.json]

All rows speak the same text with the same voice and settings. Whole calls, codec included, are timed at two lengths;
their difference gives the milliseconds a frame. `frames` rows time the decode loop alone.
"""
import argparse
import importlib.metadata
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch

from generate import accelerate, handed_over, load_upstream

TEXT = "Real time speech synthesis means that the first sound arrives before you notice the wait."
SHORT, LONG, RUNS = 40, 120, 5


def clock(fn, *args):
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn(*args)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def whole_calls(speak, short=SHORT, long=LONG, runs=RUNS):
    """`speak(frames)` makes a whole call of that many frames."""
    speak(short), speak(long)
    times = [(clock(speak, short), clock(speak, long)) for _ in range(runs)]
    per_frame = [(b - a) / (long - short) for a, b in times]
    rtf = [long / 12.5 / (b / 1e3) for _, b in times]
    return dict(ms_a_frame=statistics.median(per_frame), spread=[min(per_frame), max(per_frame)],
                rtf=statistics.median(rtf), frames=long, runs=runs)


def request_for(tts, speaker, rows, frames):
    voice = dict(ref_code=None, ref_spk_embedding=[speaker] * rows, x_vector_only_mode=[True] * rows,
                 icl_mode=[False] * rows)
    return dict(text=[TEXT] * rows, language="English", voice_clone_prompt=voice, max_new_tokens=frames + 1)


def frames_only(tts, speaker, rows, first=20, count=100, runs=RUNS):
    """The decode loop between two frames, codec apart."""
    times = []
    for _ in range(runs + 1):
        decoder, request = handed_over(tts.generate_voice_clone, request_for(tts, speaker, rows, first + count))
        frames = decoder.frames(**request)
        for _ in range(first):
            next(frames)
        times.append(clock(lambda: [next(frames) for _ in range(count)]) / count)
    times = times[1:]
    ms = statistics.median(times)
    return dict(ms_a_frame=ms, spread=[min(times), max(times)], audio_seconds_a_second=rows * 80 / ms, rows=rows,
                runs=runs)


def kernels_a_frame(tts, speaker):
    decoder, request = handed_over(tts.generate_voice_clone, request_for(tts, speaker, 1, 20))
    frames = decoder.frames(**request)
    next(frames)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            next(frames)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    frames.close()
    return len(events) / 10


def card():
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "qwen-tts")}
    return dict(gpu=torch.cuda.get_device_name(), driver=driver, torch=torch.__version__, **versions)


def bench(folder, batches):
    import warnings
    warnings.filterwarnings("ignore", message="the speech was cut off")
    rows = {}
    start = time.perf_counter()
    tts = load_upstream(folder)
    loading = time.perf_counter() - start
    speaker = torch.randn(tts.model.config.talker_config.hidden_size)

    def speak(frames):
        tts.generate_voice_clone(**request_for(tts, speaker, 1, frames))
    rows["upstream"] = whole_calls(speak, 8, 40, 3)
    torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    capturing = clock(lambda: accelerate(tts, max_batch=max(batches))) / 1e3
    rows["accelerated"] = whole_calls(speak)
    rows["accelerated"] |= dict(seconds_to_load=loading, seconds_to_capture=capturing,
                                peak_gib=torch.cuda.max_memory_allocated() / 2**30,
                                reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
                                kernels_a_frame=kernels_a_frame(tts, speaker))
    for batch in (1, *batches):
        rows[f"frames, batch {batch}"] = frames_only(tts, speaker, batch)
        rows[f"frames, batch {batch}"]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del tts
    torch.cuda.empty_cache()
    try:
        from faster_qwen3_tts import FasterQwen3TTS
    except ImportError:
        return rows
    peer = FasterQwen3TTS.from_pretrained(folder, device="cuda", dtype=torch.bfloat16)
    voice = {"ref_spk_embedding": [speaker.to("cuda", torch.bfloat16)]}
    rows["faster-qwen3-tts"] = whole_calls(lambda frames: peer.generate_voice_clone(
        text=TEXT, language="English", voice_clone_prompt=voice, max_new_tokens=frames, min_new_tokens=frames))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--output", type=Path, default=Path("bench_results.json"))
    args = parser.parse_args()
    results = dict(card=card(), models={})
    print(" | ".join(f"{key} {value}" for key, value in results["card"].items()))
    for folder in args.checkpoints:
        results["models"][Path(folder).name] = rows = bench(folder, args.batches)
        for name, row in rows.items():
            print(f"{Path(folder).name:12} {name:20} {json.dumps({k: v for k, v in row.items()})}")
    args.output.write_text(json.dumps(results, indent=1))
    print(args.output)


if __name__ == "__main__":
    main()
