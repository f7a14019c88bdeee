"""A person's words -> upstream's arguments, every mistake answered in one line.

All that can be checked without the weights is checked before they are loaded: the checkpoint's config.json says what
kind of model it is, which speakers and languages it has, and how wide a speaker embedding must be.
"""
import argparse
import contextlib
import difflib
import functools
import json
import math
import os
import re
import sys
import time
import warnings
from pathlib import Path

import huggingface_hub
import numpy as np
import soundfile
import torch
import transformers
from safetensors import SafetensorError

MODELS = {name: f"Qwen/Qwen3-TTS-12Hz-{name if '-' in name else name + '-Base'}" for name in (
    "0.6B", "1.7B", "0.6B-CustomVoice", "1.7B-CustomVoice", "1.7B-VoiceDesign")}
KINDS = {"base": "a Base model, which clones voices",
         "custom_voice": "a CustomVoice model, which has voices of its own",
         "voice_design": "a VoiceDesign model, which makes voices from descriptions"}
WHERE = {"base": "0.6B or 1.7B", "custom_voice": "1.7B-CustomVoice", "voice_design": "1.7B-VoiceDesign"}
SILENCE = 0.5                                                     # seconds between a reference and the speech
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "*.safetensors",
         *(f"speech_tokenizer/{name}" for name in ("config.json", "preprocessor_config.json", "*.safetensors")))

NO_HUB = (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError)                  # what an unreachable one raises


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}: see --help")


def parse_arguments():
    """The command line of generate.py, checked."""
    parser = Parser(description="Speak with Qwen3-TTS.")
    voice = parser.add_argument_group("voice")
    voice.add_argument("--model", default="0.6B", help=", ".join(MODELS) + ", a hub id or a folder")
    voice.add_argument("--speaker", help="Base: a speaker.pt; CustomVoice: a name")
    voice.add_argument("--ref-audio", "--ref_audio", type=Path, help="Base: a recording to clone")
    voice.add_argument("--ref-text", "--ref_text", help="what it says: cloned with its manner of speaking")
    voice.add_argument("--no-append-silence", action="store_true",
                       help=f"do not put {SILENCE} s of silence between the recording and the speech")
    voice.add_argument("--instruct", help="CustomVoice: how to speak; VoiceDesign: the voice")
    voice.add_argument("--list-speakers", action="store_true")
    voice.add_argument("--list-languages", action="store_true")
    words = parser.add_argument_group("words")
    words.add_argument("--text", help="what to say, one utterance a line; - reads stdin")
    words.add_argument("--text-file", type=Path)
    words.add_argument("--language", default="Auto")
    words.add_argument("--non-streaming-mode", action=argparse.BooleanOptionalAction,
                       help="give the model the text at once, or as it speaks; each kind of model has its default")
    sound = parser.add_argument_group("sound")
    sound.add_argument("--output", type=Path, help="WAV file to write; - for stdout")
    sound.add_argument("--join", action="store_true", help="several utterances in one file")
    sound.add_argument("--stream", action="store_true", help="write the sound while it is made")
    choice = parser.add_argument_group("choice of sounds (left out: as the model's generation_config.json says)")
    choice.add_argument("--seed", type=int, help="the same seed gives the same speech")
    choice.add_argument("--temperature", type=float)
    choice.add_argument("--top-k", type=int)
    choice.add_argument("--top-p", type=float)
    choice.add_argument("--repetition-penalty", type=float)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--max-seq-len", default=2048, type=int, help="room for prompt and speech, 12.5 a second")
    machine.add_argument("--device", help="cuda, cuda:1, cpu")
    machine.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    machine.add_argument("--fused", action=argparse.BooleanOptionalAction,
                         help="insist on the fused layers, or never use them; left out: where they run")
    args = parser.parse_args()
    args.dtype = args.dtype and getattr(torch, args.dtype)
    args.config = read_config(args.model)
    choose_device(args.device)
    if args.list_speakers and not args.config["talker_config"]["spk_id"]:
        raise ValueError(f"{args.model} has no speakers of its own: use --model {WHERE['custom_voice']}")
    if args.list_speakers or args.list_languages:
        known = languages(args.config) if args.list_languages else args.config["talker_config"]["spk_id"]
        print(*sorted(known), sep="\n")
        sys.exit()
    check_numbers(args)
    check_voice(args)
    args.texts = read_texts(args)
    check_lengths(args)
    check_outputs(args)
    return args


def address(model):
    """Where a model is: a folder, or its id on the hub."""
    return model if Path(model).is_dir() else MODELS.get(model, model)


@functools.cache                                                  # asked for by the command line and again by load
def read_config(model):
    """The config.json of a checkpoint of the right kind, and nothing more of it yet."""
    folder, name = Path(model), address(model)
    if not folder.is_dir() and not re.fullmatch(r"[\w-]+/[\w.-]+", str(name)):
        raise ValueError(f"there is no folder {model}: give a folder, a hub id like owner/name, or one of "
                         f"{', '.join(MODELS)}")
    if not folder.is_dir():
        progress(f"asking the model hub for {name}")
        try:
            folder = Path(huggingface_hub.hf_hub_download(name, "config.json")).parent
        except NO_HUB:
            raise ValueError(f"{name} cannot be had from the model hub: check the name and the network, or give "
                             "--model a folder") from None
        finally:
            progress("")
    elif missing := [file for file in FILES if not any(folder.glob(file))]:
        raise ValueError(f"{folder} is no complete checkpoint, it lacks {', '.join(missing)}: download it again")
    try:
        config = json.loads((folder / "config.json").read_text())
        kind, tokenizer, talker = config["tts_model_type"], config["tokenizer_type"], config["talker_config"]
        if {"hidden_size", "vocab_size", "max_position_embeddings", "spk_id", "codec_language_id"} - set(talker):
            raise KeyError
    except (ValueError, KeyError, TypeError, OSError):
        raise ValueError(f"the config.json of {model} does not describe a Qwen3-TTS model: give another one") from None
    if tokenizer != "qwen3_tts_tokenizer_12hz" or kind not in KINDS:
        raise ValueError(f"{model} is a {kind} model with the tokenizer {tokenizer}: only the 12 Hz models run here, "
                         f"{', '.join(MODELS)}")
    return config


def base_config(model):
    """The same of a model that clones voices."""
    config = read_config(model)
    if config["tts_model_type"] != "base":
        raise ValueError(f"{model} has no speaker encoder to clone a voice with: give a Base model, 0.6B or 1.7B")
    return config


def download(model):
    """For setup.sh: all files of a model, with the hub's own progress bars."""
    try:
        huggingface_hub.snapshot_download(MODELS[model])
    except NO_HUB:
        sys.exit(f"error: the model hub did not give {MODELS[model]}: check the network")


def choose_device(name=None):
    """The device of that name; without one, CUDA where there is CUDA, else the CPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type != "cuda" and (device.type, device.index or 0) != ("cpu", 0):
            raise RuntimeError
    except RuntimeError:
        raise ValueError(f"there is no device {name!r} here: choose cuda, cuda:1 and so on, or cpu") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"this torch finds {torch.cuda.device_count()} CUDA devices, not {name}: choose another "
                         "device, cpu for instance, or install a CUDA build of torch")
    return device


def check_numbers(args):
    vocab, positions = (args.config["talker_config"][key] for key in ("vocab_size", "max_position_embeddings"))
    for name, value, good, wanted in (
            ("--temperature", args.temperature, lambda x: 0 < x < math.inf, "above 0"),
            ("--top-k", args.top_k, lambda x: 1 <= x <= vocab, f"from 1 to {vocab}"),
            ("--top-p", args.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("--repetition-penalty", args.repetition_penalty, lambda x: 0 < x < math.inf, "above 0, 1.0 for none"),
            ("--max-seq-len", args.max_seq_len, lambda x: 32 <= x <= positions, f"from 32 to {positions}"),
            ("--seed", args.seed, lambda x: 0 <= x < 2**63, "from 0 to 2**63 - 1")):
        if value is not None and not good(value):
            raise ValueError(f"{name} is {value}, it must be {wanted}")


def check_voice(args):
    """Whether the options make a voice, and this model can speak with it."""
    kind, talker = args.config["tts_model_type"], args.config["talker_config"]

    def only(option, value, *kinds):
        if value and kind not in kinds:
            raise ValueError(f"{option} is not for {args.model}, {KINDS[kind]}: use it with --model "
                             f"{' or '.join(WHERE[other] for other in kinds)}")
    only("--ref-audio", args.ref_audio, "base")
    only("--ref-text", args.ref_text, "base")
    only("--instruct", args.instruct, "custom_voice", "voice_design")
    only("--speaker", args.speaker, "base", "custom_voice")
    if kind == "custom_voice" and args.config["tts_model_size"] == "0b6" and args.instruct:
        raise ValueError(f"--instruct is not for {args.model}, whose speakers take no instruction: use it with --model "
                         "1.7B-CustomVoice")
    if kind == "base":
        if (args.speaker is None) == (args.ref_audio is None):
            raise ValueError(f"{args.model} clones a voice: give it --speaker speaker.pt or --ref-audio voice.wav, "
                             "one of the two")
        if args.ref_text is not None and args.ref_audio is None:
            raise ValueError("--ref-text says what --ref-audio says: give both, or neither with --speaker")
        if args.ref_text is not None and not args.ref_text.strip():
            raise ValueError("--ref-text is empty: give what --ref-audio says, or leave it out")
        args.voice = read_audio(args.ref_audio) if args.ref_audio else load_speaker(args.speaker, talker["hidden_size"])
    elif kind == "custom_voice":
        one_of("speaker", args.speaker, talker["spk_id"])
    elif not args.instruct:
        raise ValueError(f'{args.model} makes a voice from a description: give it --instruct "a warm narrator"')
    one_of("language", args.language, languages(args.config))


def one_of(what, word, known):
    """Refuses a word that is not known, and offers the nearest."""
    if str(word).lower() not in known:
        near = difflib.get_close_matches(str(word).lower(), known) or sorted(known)
        found = f"there is no {what} {word!r}" if word else f"no --{what} was given"
        raise ValueError(f"{found}: choose {', '.join(near)} (--list-{what}s shows all)")


def languages(config):
    return ["auto", *(name for name in config["talker_config"]["codec_language_id"] if "dialect" not in name)]


def read_texts(args):
    """The utterances, one a line."""
    if (args.text is None) == (args.text_file is None):
        raise ValueError("give what to say as --text, --text-file, or --text - for stdin, one of them")
    try:
        if args.text_file:
            text = args.text_file.read_text(encoding="utf-8")
        else:
            text = sys.stdin.read() if args.text == "-" else args.text
        text.encode()                                             # other bytes on the command line fail here
    except (OSError, UnicodeError) as error:
        source = args.text_file or ("stdin" if args.text == "-" else "--text")
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise ValueError(f"cannot read {source}: {reason}: give a text") from None
    texts = [line.strip() for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
    if not texts:
        raise ValueError("the text is empty: give something to say")
    return texts


def check_lengths(args):
    """A text takes a position of the cache for each of its tokens, and no more tokens than it has bytes. A reference
    that comes with its text takes one for each frame."""
    if args.ref_text and (frames := int(len(args.voice[0]) / args.voice[1] * 12.5)) >= args.max_seq_len:
        raise ValueError(f"{args.ref_audio} takes {frames} positions, the cache has {args.max_seq_len}: give a shorter "
                         "recording, or a larger --max-seq-len")
    long = [text for text in args.texts if len(text.encode()) >= args.max_seq_len]
    tokenizer = long and transformers.AutoTokenizer.from_pretrained(address(args.model))
    for text in long:
        if (tokens := len(tokenizer(text).input_ids)) >= args.max_seq_len:
            raise ValueError(f"the text {text[:20]!r}... takes {tokens} positions, the cache has {args.max_seq_len}: "
                             "put it on several lines, or give a larger --max-seq-len")


def check_outputs(args):
    """Turns --output into (file, utterances) pairs: one, or one for each line."""
    if args.output is None:
        raise ValueError("give --output, a WAV file to write, or - for stdout")
    if len(args.texts) == 1 or args.join:
        args.outputs = [(args.output, args.texts)]
    elif str(args.output) == "-":
        raise ValueError(f"{len(args.texts)} utterances cannot go to stdout one by one: add --join")
    else:
        check_writable(args.output)                               # a folder is no name to number
        args.outputs = [(args.output.with_stem(f"{args.output.stem}-{number:03}"), [text])
                        for number, text in enumerate(args.texts, 1)]
    for path, _ in args.outputs:
        check_writable(path)


def check_writable(path):
    if str(path) == "-":
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = ("it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
                   if not path.parent.is_dir() else "permission denied")
        raise ValueError(f"cannot write {path}: {problem}: choose another --output")


def read_audio(path):
    """A recording as mono float32 samples, and its rate."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a recording of the voice")
    try:
        audio, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError, ValueError, MemoryError):
        raise ValueError(f"{path} is not audio that can be read: give a WAV, FLAC, OGG or MP3 file") from None
    audio = audio.mean(axis=1)
    if not np.isfinite(audio).all() or np.abs(audio).max(initial=0) < 1e-4:
        raise ValueError(f"{path} is silent or broken: give a recording of the voice")
    if len(audio) < rate:
        raise ValueError(f"{path} holds {len(audio) / rate:.2f} s of sound: give at least 1 s, better 3 to 30 s")
    if not 3 <= len(audio) / rate <= 30:
        warnings.warn(f"{path} holds {len(audio) / rate:.1f} s of sound, 3 to 30 s make a better voice")
    return audio, rate


def load_speaker(path, width):
    """A speaker.pt as a prompt for generate_voice_clone. Nothing in the file is executed."""
    if not Path(path).is_file():
        raise ValueError(f"there is no speaker file {path}: make one with extract_speaker.py")
    try:
        speaker = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise ValueError(f"{path} is not a speaker file: make one with extract_speaker.py") from None
    kinds = torch.float32, torch.bfloat16, torch.float16, torch.float64
    if not (isinstance(speaker, torch.Tensor) and speaker.dtype in kinds and speaker.dim() == 1) or speaker.is_sparse:
        raise ValueError(f"{path} does not hold a speaker embedding: make one with extract_speaker.py")
    if len(speaker) != width:
        raise ValueError(f"{path} holds {len(speaker)} numbers, this model takes {width}: extract it again with the "
                         "--model you speak with")
    if not speaker.isfinite().all():
        raise ValueError(f"{path} holds numbers that are not finite: make it again with extract_speaker.py")
    return speaker_prompt(speaker)


def speaker_prompt(speaker, rows=1):
    """The voice_clone_prompt of upstream that speaks so many texts with one speaker embedding."""
    return dict(ref_code=None, ref_spk_embedding=[speaker] * rows, x_vector_only_mode=[True] * rows,
                icl_mode=[False] * rows)


def voice_request(args, tts):
    """Upstream's method for this voice, and its arguments but for the text."""
    kind = args.config["tts_model_type"]
    request = dict(language=args.language, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
                   repetition_penalty=args.repetition_penalty)
    if args.non_streaming_mode is not None:
        request["non_streaming_mode"] = args.non_streaming_mode
    if kind == "custom_voice":
        return tts.generate_custom_voice, request | dict(speaker=args.speaker, instruct=args.instruct)
    if kind == "voice_design":
        return tts.generate_voice_design, request | dict(instruct=args.instruct)
    prompt = args.voice
    if args.ref_audio:
        audio, rate = prompt
        if args.ref_text and not args.no_append_silence:          # or its last phoneme would run into the speech
            audio = np.append(audio, np.zeros(int(SILENCE * rate), dtype=audio.dtype))
        with contextlib.redirect_stdout(sys.stderr):              # upstream prints warnings, the sound may go there
            prompt = tts.create_voice_clone_prompt((audio, rate), args.ref_text, x_vector_only_mode=not args.ref_text)
    return tts.generate_voice_clone, request | dict(voice_clone_prompt=prompt)


def progress(line):
    """Shows a line to a person who is watching, in place of the last; a pipe gets none of it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def with_progress(chunks, start):
    seconds = 0.0
    for audio, rate in chunks:
        seconds += len(audio) / rate
        progress(f"{seconds:.1f} s of audio, RTF {seconds / (time.perf_counter() - start):.2f}")
        yield audio, rate
    progress("")


@contextlib.contextmanager
def answered_mistakes():
    """Around a script: a mistake of its user ends it with one line and exit code 2; a warning is one line as well."""
    warnings.showwarning = lambda message, *_: print(f"warning: {str(message).splitlines()[0]}", file=sys.stderr)
    for library in (transformers.utils, huggingface_hub.utils):   # their notes on arguments and retries
        library.logging.set_verbosity_error()
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                                       # whoever listened to stdout has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())                 # for what Python has left to say
        sys.exit(141)
    except torch.OutOfMemoryError:
        mistake = "the GPU's memory is full: use a smaller model or --max-seq-len, or free some"
    except SafetensorError as error:
        mistake = f"the checkpoint's weights cannot be read ({error}): download it again"
    except (ValueError, OSError) as error:
        mistake = str(error)
    else:
        return
    print(f"error: {' '.join(mistake.split())}", file=sys.stderr)
    sys.exit(2)
