#!/usr/bin/env python3
"""Turn a recording into a speaker.pt for generate.py: one bfloat16 vector of the talker's width.

    python extract_speaker.py --ref_audio voice.wav --output speaker.pt --model 0.6B

The vector belongs to the model that made it: 0.6B and 1.7B have different widths.
"""

import argparse
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__" and find_spec("qwen3_tts_cuda_graphs"):
    runpy.run_module("qwen3_tts_cuda_graphs.cli.clone", run_name="__main__")  # several recordings, all formats
    sys.exit()

import soundfile
import torch

from generate import MODELS, load_upstream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ref_audio", required=True, help="a recording of the voice")
    parser.add_argument("--output", default="speaker.pt")
    parser.add_argument("--model", default="0.6B", help=f"{', '.join(MODELS)}, a hub id or a folder of a Base model")
    args = parser.parse_args()
    if not Path(args.ref_audio).is_file():
        parser.error(f"there is no recording {args.ref_audio}")

    audio, rate = soundfile.read(args.ref_audio, dtype="float32", always_2d=True)
    tts = load_upstream(args.model)
    (prompt,) = tts.create_voice_clone_prompt((audio.mean(1), rate), x_vector_only_mode=True)
    torch.save(prompt.ref_spk_embedding.bfloat16().cpu(), args.output)
    print(f"{args.output}: {len(prompt.ref_spk_embedding)} numbers from {len(audio) / rate:.1f} s of audio")


if __name__ == "__main__":
    main()
