"""Many short utterances in one process: memory must not grow, and every tenth must be what a fresh process makes of it.

    python tests/soak.py CHECKPOINT [--utterances 1000]

x-vector and in-context voices, whole and streamed, alone and in lists, with mixed lengths and settings.
"""

import argparse
import gc
import hashlib
import json
import random
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from qwen3_tts_cuda_graphs.common.loading import load
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.speech.streaming import stream

WORDS = "the first sound of a voice arrives before you notice that anything was asked".split()


def speak(tts, number, prompts):
    """Speak utterance `number`, which is the same in every process. Returns a digest of its samples."""
    rng = random.Random(number)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 8))) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    rows = len(texts)
    settings = dict(
        language="English",
        max_new_tokens=rng.randint(3, 12),
        temperature=rng.choice([0.6, 0.9]),
        top_k=rng.choice([20, 50]),
        top_p=rng.choice([0.8, 1.0]),
        do_sample=rng.random() < 0.8,
        repetition_penalty=rng.choice([1.0, 1.05, 1.2]),
    )
    prompt = rng.choice(prompts)(rows)
    torch.manual_seed(number)
    if rows == 1 and rng.random() < 0.5:
        chunks = stream(
            tts.generate_voice_clone,
            chunk_frames=rng.choice([None, 1, 3]),
            text=texts[0],
            voice_clone_prompt=prompt,
            **settings,
        )
        audios = [np.concatenate([audio for audio, _ in chunks])]
    else:
        audios, _ = tts.generate_voice_clone(text=texts, voice_clone_prompt=prompt, **settings)
    return hashlib.sha256(b"".join(audio.tobytes() for audio in audios)).hexdigest()


def memory():
    """MiB: the process's peak; on a GPU also what is allocated, and the peak of what was reserved."""
    gc.collect()
    figures = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    if torch.cuda.is_available():
        figures += [torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20]
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--utterances", type=int, default=1000)
    parser.add_argument("--only", type=json.loads, help="a list of numbers: print their digests")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="the speech was cut off")
    tts = load(args.checkpoint, max_seq_len=256, rows=4)
    generator = torch.Generator().manual_seed(0)
    recording = torch.randn(48000, generator=generator).numpy() * 0.1, 24000
    speaker = torch.load(Path(args.checkpoint) / "speaker.pt", weights_only=True)
    in_context = tts.create_voice_clone_prompt(recording, "two seconds of noise")
    prompts = [lambda rows: speaker_prompt(speaker, rows), lambda rows: in_context * rows]
    if args.only is not None:
        print(json.dumps({number: speak(tts, number, prompts) for number in args.only}))
        return
    digests, usage = {}, []
    for number in range(args.utterances):
        digests[number] = speak(tts, number, prompts)
        if number in (0, 9, 49) or number % 100 == 99:
            figures = memory()
            print(f"after {number + 1:5} utterances, MiB:", *(round(figure) for figure in figures), flush=True)
            usage += [figures] if number >= 99 else []
    assert not usage or all(last <= 1.01 * first for first, last in zip(usage[0], usage[-1])), "memory grew"
    tenths = [*range(9, args.utterances, 10)][::-1]  # in another order, too
    fresh = json.loads(
        subprocess.run(
            [sys.executable, __file__, args.checkpoint, "--only", json.dumps(tenths)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()[-1]
    )
    differ = [number for number in tenths if fresh[str(number)] != digests[number]]
    print(f"{len(tenths)} compared with a fresh process, {len(differ)} differ {differ}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
