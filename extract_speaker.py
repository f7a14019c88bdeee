#!/usr/bin/env python3
"""Turn a recording into a speaker.pt for generate.py: one bfloat16 vector of the talker's width.

    python extract_speaker.py --ref_audio voice.wav --output speaker.pt --model 0.6B

The vector belongs to the model that made it: 0.6B and 1.7B have different widths.
"""
import argparse
from pathlib import Path

import librosa
import torch

from generate import load_upstream
from voices import answered_mistakes, read_audio, writable_file


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ref_audio", "--ref-audio", required=True, type=Path, help="a recording of the voice")
    parser.add_argument("--output", default="speaker.pt", type=Path)
    parser.add_argument("--model", default="0.6B", help="0.6B, 1.7B, a hub id or a folder of a Base model")
    parser.add_argument("--device", help="cuda, cuda:1, cpu")
    args = parser.parse_args()
    with answered_mistakes():
        audio, rate = read_audio(args.ref_audio)
        writable_file(args.output)
        model = load_upstream(args.model, args.device).model
        if model.speaker_encoder is None:
            raise ValueError(f"{args.model} has no speaker encoder: use a Base model, 0.6B or 1.7B")
        wanted = model.speaker_encoder_sample_rate
        speaker = model.extract_speaker_embedding(librosa.resample(audio, orig_sr=rate, target_sr=wanted), wanted)
        torch.save(speaker.bfloat16().cpu().clone(), args.output)
        print(f"{args.output}: {len(speaker)} numbers from {len(audio) / rate:.1f} s of {args.ref_audio}")


if __name__ == "__main__":
    main()
