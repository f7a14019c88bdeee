"""A person's words -> upstream's arguments, every mistake answered in one line."""
import argparse
import contextlib
import sys
import warnings
from pathlib import Path

import huggingface_hub
import soundfile
import torch
import transformers


def parse_arguments():
    parser = argparse.ArgumentParser(description="Speak a text with Qwen3-TTS.")
    parser.add_argument("--text", required=True)
    parser.add_argument("--speaker", required=True, type=Path, help="speaker.pt made by extract_speaker.py")
    parser.add_argument("--output", required=True, type=Path, help="WAV file to write; - for stdout")
    parser.add_argument("--stream", action="store_true", help="write the sound as it is made")
    parser.add_argument("--language", default="Auto")
    parser.add_argument("--model", default="0.6B", help="0.6B, 1.7B, a hub id or a folder")
    parser.add_argument("--seed", type=int, help="the same seed gives the same speech")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--max-seq-len", type=int, default=2048, help="room for prompt and speech, 12.5 a second")
    parser.add_argument("--device", help="cuda, cuda:1, cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args()
    if not args.text.strip():
        raise ValueError("the text is empty: say something")
    if not args.speaker.is_file():
        raise ValueError(f"there is no file {args.speaker}: make one with extract_speaker.py")
    writable_file(args.output)
    return args


def writable_file(path):
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ValueError(f"cannot write {path}: it {problem}: choose another --output")


def read_audio(path):
    """A recording as mono float32 samples, and its rate."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a recording of the voice")
    try:
        audio, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        raise ValueError(f"{path} is not audio that can be read: give a WAV, FLAC, OGG or MP3 file") from None
    if len(audio) < rate:
        raise ValueError(f"{path} holds {len(audio) / rate:.2f} s of audio: give at least 1 s, better 3 s or more")
    return audio.mean(axis=1), rate


def load_speaker(path, width):
    """A speaker.pt as a prompt for generate_voice_clone. Nothing in the file is executed."""
    try:
        speaker = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise ValueError(f"{path} is not a speaker file: make one with extract_speaker.py") from None
    if not isinstance(speaker, torch.Tensor) or not speaker.is_floating_point() or speaker.dim() != 1:
        raise ValueError(f"{path} does not hold a speaker embedding: make one with extract_speaker.py")
    if len(speaker) != width:
        raise ValueError(f"{path} holds {len(speaker)} numbers, this model takes {width}: extract it again with the "
                         "--model you speak with")
    return dict(ref_code=None, ref_spk_embedding=[speaker], x_vector_only_mode=[True], icl_mode=[False])


@contextlib.contextmanager
def answered_mistakes():
    """Around a script: a mistake of its user ends it with one line and exit code 2, a warning is one line as well."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    for library in (transformers.utils, huggingface_hub.utils):   # their notes on arguments and retries
        library.logging.set_verbosity_error()
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
