#!/usr/bin/env python3
"""Time Qwen3-TTS on this GPU: upstream as it is, accelerated, in batches, and faster-qwen3-tts where it is installed.

    python random_checkpoint.py 0.6B random/0.6B && python bench.py random/0.6B --weights random

All rows speak the same text with the same voice and settings. A whole call (tokenizing and codec included) is timed at
two lengths; the difference gives its milliseconds a frame. `frames` rows time the decode loop alone. Medians; the JSON
has the spread.
"""
import argparse
import importlib.metadata
import json
import statistics
import subprocess
import time
import warnings
from pathlib import Path

import torch

from generate import accelerate, handed_over, load_upstream, stream
from voices import speaker_prompt

TEXT = "Real time speech synthesis means that the first sound arrives before you notice the wait."
FRAME_RATE = 12.5


def clock(fn, *arguments):
    """Milliseconds, with the GPU idle before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn(*arguments)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def median_of(values, name):
    return {name: statistics.median(values), f"{name}_spread": [min(values), max(values)], f"{name}_runs": len(values)}


def whole_calls(speak, short=40, long=120, runs=3):
    """`speak(frames)` makes a whole call of that many frames."""
    speak(short), speak(long)                                     # warm-up
    times = [(clock(speak, short), clock(speak, long)) for _ in range(runs)]
    return dict(frames=long, rtf=statistics.median(long / FRAME_RATE / (b / 1e3) for _, b in times),
                **median_of([(b - a) / (long - short) for a, b in times], "ms_a_frame"))


def decode_loop(tts, speaker, rows, first=20, count=100, runs=3):
    """The frames from `first` on, codec apart."""
    times = []
    for _ in range(1 + runs):
        frames = start_frames(tts, speaker, rows, first + count)
        for _ in range(first):
            next(frames)
        times.append(clock(lambda: [next(frames) for _ in range(count)]) / count)
    row = median_of(times[1:], "ms_a_frame")                      # the first one warms up
    return row | dict(rows=rows, audio_seconds_a_second=rows / FRAME_RATE / (row["ms_a_frame"] / 1e3))


def streaming(start_stream, frames=120, runs=3):
    """`start_stream(frames)` -> chunks of (audio, rate, ...). First audio: from the call to samples on the host."""
    firsts, rtfs = [], []
    for _ in range(1 + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        chunks = start_stream(frames)
        next(chunks)
        firsts.append((time.perf_counter() - start) * 1e3)
        chunks.close()
    for _ in range(1 + runs):
        rtfs.append(frames / FRAME_RATE / (clock(lambda: [chunk for chunk in start_stream(frames)]) / 1e3))
    return median_of(firsts[1:], "first_audio_ms") | median_of(rtfs[1:], "rtf")


def late_chunks(start_stream, frames=750):
    """Chunks that come too late for a listener who starts to play with the first one. 60 s of sound."""
    late = played = 0
    for audio, rate, *_ in start_stream(frames):
        now = time.perf_counter()
        begin = now if played == 0 else begin
        late += now > begin + played
        played += len(audio) / rate
    return dict(late_chunks=late, seconds=played)


def first_audio_parts(tts, speaker, runs=20):
    """Where the time to the first audio goes, each part by itself."""
    decoder, request = handed_over(tts.generate_voice_clone, arguments(speaker, 1, 10))
    codec, parts = tts.model.speech_tokenizer.decode.__self__, {}
    (talker, predictor), words = decoder.graphs_for(1), [f"<|im_start|>assistant\n{TEXT}<|im_end|>\n"]
    code = predictor.codes[0, :1].clone()
    for name, part in (
            ("tokenize", lambda: tts._tokenize_texts(words)),
            ("tokenize and prompt", lambda: handed_over(tts.generate_voice_clone, arguments(speaker, 1, 10))),
            ("prefill", lambda: talker.begin(request["inputs_embeds"], request["attention_mask"])),
            ("frame", lambda: (predictor.step(), talker.step())),
            ("codec and copy", lambda: codec.feed(code)())):
        codec.reset(), part()
        parts[name] = statistics.median(clock(part) for _ in range(runs))
    return parts


def kernels_a_frame(tts, speaker, count=10):
    frames = start_frames(tts, speaker, 1, 2 * count)
    next(frames)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(count):
            next(frames)
        torch.cuda.synchronize()
    frames.close()
    return sum(event.device_type == torch.profiler.DeviceType.CUDA for event in profile.events()) / count


def start_frames(tts, speaker, rows, frames):
    decoder, request = handed_over(tts.generate_voice_clone, arguments(speaker, rows, frames))
    return decoder.frames(**request)


def arguments(speaker, rows, frames):
    return dict(text=[TEXT] * rows, language="English", voice_clone_prompt=speaker_prompt(speaker, rows),
                max_new_tokens=frames + 1)


def peer(folder, speaker):
    """faster-qwen3-tts on the same checkpoint, where it is installed."""
    try:
        from faster_qwen3_tts import FasterQwen3TTS
    except ImportError:
        return {}
    tts = FasterQwen3TTS.from_pretrained(folder, device="cuda", dtype=torch.bfloat16)
    voice = {"ref_spk_embedding": [speaker.to("cuda", torch.bfloat16)]}

    def request(frames):
        return dict(text=TEXT, language="English", voice_clone_prompt=voice, max_new_tokens=frames,
                    min_new_tokens=frames)
    rows = {"faster-qwen3-tts": whole_calls(lambda frames: tts.generate_voice_clone(**request(frames)))}
    for chunk in (1, 8):
        rows[f"faster-qwen3-tts, chunks of {chunk}"] = streaming(
            lambda frames: tts.generate_voice_clone_streaming(**request(frames), chunk_size=chunk), runs=1)
    rows["faster-qwen3-tts"]["version"] = importlib.metadata.version("faster-qwen3-tts")
    return rows


def bench(folder, batches):
    """All rows of one checkpoint."""
    gib, rows, start = 2**30, {}, time.perf_counter()
    tts = load_upstream(folder)
    seconds_to_load = time.perf_counter() - start
    speaker = torch.randn(tts.model.config.talker_config.hidden_size)

    def speak(frames):
        tts.generate_voice_clone(**arguments(speaker, 1, frames))
    rows["upstream"] = whole_calls(speak, short=4, long=16, runs=3)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds_to_capture = clock(lambda: accelerate(tts, max_batch=max(batches, default=1))) / 1e3
    rows["accelerated"] = whole_calls(speak) | dict(
        seconds_to_load=seconds_to_load, seconds_to_capture=seconds_to_capture,
        peak_gib=torch.cuda.max_memory_allocated() / gib, kernels_a_frame=kernels_a_frame(tts, speaker))
    for name, chunk in (("chunks of 1", 1), ("chunks of 8", 8), ("chunks of 1, 1, 2, 4, 8, ...", None)):
        def start_stream(frames):
            return stream(tts.generate_voice_clone, chunk_frames=chunk, **arguments(speaker, 1, frames))
        rows[name] = streaming(start_stream) | (late_chunks(start_stream) if chunk != 8 else {})
    rows["first audio, its parts"] = first_audio_parts(tts, speaker)
    for batch in (1, *batches):
        rows[f"frames, batch {batch}"] = decode_loop(tts, speaker, batch)
        rows[f"frames, batch {batch}"]["peak_gib"] = torch.cuda.max_memory_allocated() / gib
    del tts, speak, start_stream
    torch.cuda.empty_cache()
    rows |= peer(folder, speaker)
    for name in ("upstream", "faster-qwen3-tts"):
        if name in rows:
            rows["accelerated"][f"times_{name}"] = rows[name]["ms_a_frame"] / rows["accelerated"]["ms_a_frame"]
    return rows


def card():
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.strip()
    return dict(gpu=torch.cuda.get_device_name(), driver=driver, torch=torch.__version__, **{
        name: importlib.metadata.version(name) for name in ("transformers", "qwen-tts")})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder, a hub id, 0.6B or 1.7B")
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--weights", default="not stated", choices=["random", "published"], help="noted in the results")
    parser.add_argument("--output", type=Path, default=Path("bench_results.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here: this measures nothing else")
    warnings.filterwarnings("ignore", message="the speech was cut off")
    results = dict(card=card() | dict(weights=args.weights, dtype="bfloat16"), models={})
    print("  ".join(f"{name}: {value}" for name, value in results["card"].items()))
    for folder in args.checkpoints:
        results["models"][Path(folder).name] = rows = bench(folder, args.batches)
        print(f"\n{Path(folder).name:34}{'ms a frame':>12}{'RTF':>8}{'first ms':>10}{'audio s/s':>11}{'peak GiB':>10}")
        for name, row in rows.items():
            values = (row.get(key) for key in ("ms_a_frame", "rtf", "first_audio_ms", "audio_seconds_a_second",
                                               "peak_gib"))
            print(f"{name:34}" + "".join(f"{value:>{width}.{digits}f}" if value else " " * width
                                         for value, width, digits in zip(values, (12, 8, 10, 11, 10), (2, 2, 1, 1, 2))))
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{args.output}")


if __name__ == "__main__":
    main()
