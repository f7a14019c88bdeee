"""Command-line parsing and validation: options -> the arguments of upstream's methods.

Everything that can be checked without the weights is checked before they are loaded: the checkpoint's config.json says
what kind of model it is, which speakers and languages it has, and how wide a speaker embedding must be. A mistake ends
a script with one line that says what to do, and exit code 2.
"""

import argparse
import contextlib
import datetime
import difflib
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from audio_files import Chunk, check_format, check_writable, is_special, read_audio, write_audio
from fast.long_text import FRAMES_PER_TOKEN, MIN_FRAME_LIMIT, PAUSE, speak, split_text, tokens_that_fit, with_pauses
from fast.paths import MegakernelStopped
from fast.prompts import decoder_of
from generate import MODELS, load, stream
from parts import Parts
from text_files import Line, Pipe

KINDS = {
    "base": "a Base model, which clones voices",
    "custom_voice": "a CustomVoice model, which has speakers of its own",
    "voice_design": "a VoiceDesign model, which makes voices from descriptions",
}
MODELS_OF_KIND = {"base": "0.6B or 1.7B", "custom_voice": "1.7B-CustomVoice", "voice_design": "1.7B-VoiceDesign"}
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "*.safetensors",
    "speech_tokenizer/config.json",
    "speech_tokenizer/preprocessor_config.json",
    "speech_tokenizer/*.safetensors",
)
TALKER_KEYS = {"hidden_size", "vocab_size", "max_position_embeddings", "spk_id", "codec_language_id"}
FRAME_RATE = 12.5  # of the 12 Hz models
PIPE_TIMEOUT = 600.0  # seconds that a line on stdin may stay unfinished
REFERENCE_SILENCE = 0.5  # seconds between an in-context reference and the speech
HUB_ERRORS = (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError)


def main() -> None:
    """The command line of generate.py."""
    with cli_errors():
        args = parse_arguments()
        tts = load(args.model, args.device, args.dtype, max_seq_len=args.max_seq_len, fused=args.fused)
        show_progress("")
        method, request = voice_request(args, tts)
        path = decoder_of(tts).path
        utterance = partial(speak if args.limit_speech else stream_seeded, method, **request)
        if args.retry:
            utterance = partial(utterance, retries=args.retry)

        progress = Progress(args)
        if args.parts:
            args.parts.open(args.resume)
        if args.parts and args.join:
            speak_parts(args, utterance, progress)
        for output, texts in args.outputs:
            if args.parts and not args.join and args.parts.mark(texts[0][0]).is_file():
                progress.skip(texts[0][1])
                continue
            start = time.perf_counter()
            if args.parts and args.join:
                start = progress.start
                spoken = (args.parts.read(number) for number, _ in texts)
            else:
                spoken = (progress.follow(utterance(text=text, seed=seed_of(args, n)), text) for n, text in texts)
            chunks = with_pauses(spoken, args.pause)
            first = next(chunks, None)
            if first is None:
                raise ValueError("the text is empty: give something to say")
            first_ms = (time.perf_counter() - start) * 1e3
            seconds = write_audio(output, itertools.chain([first], chunks), playable=args.stream)
            show_progress("")
            wall = time.perf_counter() - start
            summary = f"{output}: {seconds:.2f} s of audio in {wall:.2f} s, {seconds / wall:.2f} x real time"
            if args.stream and not isinstance(args.texts, Pipe):
                summary += f", first audio after {first_ms:.0f} ms"
            print(f"{summary}; {path}", file=sys.stderr if str(output) == "-" else sys.stdout)
            if args.parts and not args.join:
                args.parts.mark(texts[0][0]).touch()
        if args.parts:
            args.parts.remove()


def seed_of(args: argparse.Namespace, number: int) -> int | None:
    """Each utterance has a seed of its own, so that --resume gives what an uninterrupted run does."""
    return None if args.seed is None else args.seed + number


def stream_seeded(method: Callable, *, seed: int | None, **request) -> Iterator[Chunk]:
    if seed is not None:
        torch.manual_seed(seed)
    yield from stream(method, **request)


def speak_parts(args: argparse.Namespace, utterance: Callable, progress: "Progress") -> None:
    """Speak what is not there yet, each utterance into a file of its own."""
    ((_, texts),) = args.outputs
    for number, text in texts:
        part = args.parts.path(number)
        if part.is_file():
            progress.skip(text)
        else:
            write_audio(part, progress.follow(utterance(text=text, seed=seed_of(args, number)), text))


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(f"{message}: see --help")


def parse_arguments() -> argparse.Namespace:
    """The options of generate.py, checked. Adds `config`, `texts`, `outputs` and, to clone a voice, `voice`."""
    parser = Parser(prog="generate.py", description="Speak with Qwen3-TTS.")
    voice = parser.add_argument_group("voice")
    voice.add_argument("--model", default="0.6B", help=", ".join(MODELS) + ", a hub id or a folder")
    voice.add_argument("--speaker", help="Base: a speaker.pt; CustomVoice: a name")
    voice.add_argument("--ref-audio", "--ref_audio", type=Path, help="Base: a recording to clone")
    voice.add_argument("--ref-text", "--ref_text", help="its transcript: clones the manner of speaking, too")
    voice.add_argument(
        "--no-append-silence",
        action="store_true",
        help=f"do not add {REFERENCE_SILENCE} s of silence between the recording and the speech",
    )
    voice.add_argument("--instruct", help="CustomVoice: how to speak; VoiceDesign: the voice")
    voice.add_argument("--list-speakers", action="store_true")
    voice.add_argument("--list-languages", action="store_true")

    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", help="what to say, one utterance per line; - reads stdin, with --stream while it is being written"
    )
    text.add_argument("--text-file", type=Path, help="a text of any length; long lines are cut at sentence ends")
    text.add_argument(
        "--paragraphs", action="store_true", help="utterances end at empty lines, as in books with wrapped lines"
    )
    text.add_argument("--language", default="Auto")
    text.add_argument(
        "--non-streaming-mode",
        action=argparse.BooleanOptionalAction,
        help="put the whole text into the prompt, or feed it frame by frame; default: as upstream for this model",
    )

    audio = parser.add_argument_group("audio")
    audio.add_argument("--output", type=Path, help="the file to write: .wav, .flac, .ogg, .opus or .mp3; - for stdout")
    audio.add_argument("--join", action="store_true", help="several utterances in one file")
    audio.add_argument("--pause", type=float, default=PAUSE, help="seconds between them; default: %(default)s")
    audio.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run of the same command has spoken"
    )
    audio.add_argument(
        "--limit-speech",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"stop speech that does not end: after {MIN_FRAME_LIMIT} frames, or {FRAMES_PER_TOKEN} per token of text",
    )
    audio.add_argument("--retry", type=int, default=0, help="speak it again, with another seed, at most so often")
    audio.add_argument("--stream", action="store_true", help="write the audio while it is generated")

    sampling = parser.add_argument_group(
        "sampling of the first code; the other 15 keep the model's settings (default: its generation_config.json)"
    )
    sampling.add_argument("--seed", type=int, help="the same seed gives the same speech")
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--repetition-penalty", type=float)

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--max-seq-len", default=2048, type=int, help="positions for prompt and speech, 12.5 per second"
    )
    machine.add_argument("--device", help="cuda, cuda:1, cpu")
    machine.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    machine.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        help="require or avoid the megakernel; default: use it where it runs",
    )

    args = parser.parse_args()
    args.dtype = args.dtype and getattr(torch, args.dtype)
    args.config = read_config(args.model)
    args.device = choose_device(args.device)
    if args.list_speakers or args.list_languages:
        print_lists(args)
        sys.exit()
    check_numbers(args)
    check_limits(args)
    check_voice(args)
    args.texts = read_texts(args)
    check_lengths(args)
    args.outputs = plan_outputs(args)
    return args


def print_lists(args: argparse.Namespace) -> None:
    speakers = args.config["talker_config"]["spk_id"]
    if args.list_speakers and not speakers:
        model = MODELS_OF_KIND["custom_voice"]
        raise ValueError(f"{args.model} has no speakers of its own: use --model {model}")
    if args.list_speakers:
        print(*sorted(speakers), sep="\n")
    if args.list_languages:
        print(*sorted(languages(args.config)), sep="\n")


@functools.cache
def read_config(model: str) -> dict:
    """The config.json of a Qwen3-TTS 12 Hz checkpoint: a folder, a hub id or a short name."""
    folder = Path(model)
    if folder.is_dir():
        missing = [file for file in CHECKPOINT_FILES if not any(folder.glob(file))]
        if missing:
            raise ValueError(
                f"{folder} is not a complete checkpoint, {', '.join(missing)} is missing: download it again"
            )
    else:
        folder = download_config(model)
    try:
        config = json.loads((folder / "config.json").read_text())
        kind, tokenizer = config["tts_model_type"], config["tokenizer_type"]
        if TALKER_KEYS - set(config["talker_config"]):
            raise KeyError
    except (ValueError, KeyError, TypeError, OSError):
        raise ValueError(f"the config.json of {model} does not describe a Qwen3-TTS model: give another one") from None
    if tokenizer != "qwen3_tts_tokenizer_12hz" or kind not in KINDS:
        raise ValueError(
            f"{model} is a {kind} model with the tokenizer {tokenizer}: only the 12 Hz models run here, "
            f"{', '.join(MODELS)}"
        )
    return config


def download_config(model: str) -> Path:
    """Fetch config.json from the hub and return its folder."""
    name = MODELS.get(model, model)
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name):
        known = ", ".join(MODELS)
        raise ValueError(f"there is no folder {model}: give a folder, a hub id like owner/name, or one of {known}")
    show_progress(f"fetching {name} from the model hub")
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json")).parent
    except HUB_ERRORS:
        raise ValueError(
            f"{name} cannot be downloaded from the model hub: check the name and the network, or give --model a folder"
        ) from None
    finally:
        show_progress("")


def base_config(model: str) -> dict:
    """The config of a model that clones voices."""
    config = read_config(model)
    if config["tts_model_type"] != "base":
        raise ValueError(f"{model} has no speaker encoder to clone a voice with: give a Base model, 0.6B or 1.7B")
    return config


def download(model: str) -> None:
    """For setup.sh: all files of a model, with the hub's own progress bars."""
    try:
        huggingface_hub.snapshot_download(MODELS[model])
    except HUB_ERRORS:
        sys.exit(f"error: {MODELS[model]} cannot be downloaded from the model hub: check the network")


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name; without one, CUDA where there is CUDA, else the CPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or (device.type != "cuda" and (device.type, device.index or 0) != ("cpu", 0)):
        raise ValueError(f"there is no device {name!r} here: choose cuda, cuda:1 and so on, or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"this torch finds {torch.cuda.device_count()} CUDA devices, not {name}: choose another device, for "
            "example cpu, or install a CUDA build of torch"
        )
    return device


def number_ranges(config: dict) -> dict[str, tuple[Callable, str]]:
    """Numbers that a user may set -> whether a value is good, and what it must be in words."""
    talker = config["talker_config"]
    vocab, positions = talker["vocab_size"], talker["max_position_embeddings"]
    return {
        "temperature": (lambda x: 0 < x <= 1e6, "above 0 and at most 1e6"),  # larger ones overflow float32
        "top_k": (lambda x: 1 <= x <= vocab, f"from 1 to {vocab}"),
        "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "repetition_penalty": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6, 1.0 for none"),
        "max_seq_len": (lambda x: 32 <= x <= positions, f"from 32 to {positions}"),
        "pause": (lambda x: 0 <= x <= 60, "from 0 to 60"),
        "retry": (lambda x: 0 <= x <= 100, "from 0 to 100"),
        "seed": (lambda x: 0 <= x < 2**63, "from 0 to 2**63 - 1"),
    }


def check_numbers(args: argparse.Namespace) -> None:
    for name, (is_good, wanted) in number_ranges(args.config).items():
        value = getattr(args, name)
        if value is not None and not is_good(value):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {value}, it must be {wanted}")


def check_limits(args: argparse.Namespace) -> None:
    if args.retry and not args.limit_speech:
        raise ValueError("--retry speaks again what --limit-speech has stopped: leave out --no-limit-speech")
    if args.retry and args.text == "-" and args.stream:
        raise ValueError("--retry needs the whole text: leave it out, or leave out --stream")


def check_voice(args: argparse.Namespace) -> None:
    """Whether the options describe a voice that this model can speak with."""
    kind = args.config["tts_model_type"]
    check_kind(args, "--ref-audio", args.ref_audio, "base")
    check_kind(args, "--ref-text", args.ref_text, "base")
    check_kind(args, "--instruct", args.instruct, "custom_voice", "voice_design")
    check_kind(args, "--speaker", args.speaker, "base", "custom_voice")
    if kind == "base":
        check_cloning(args)
    elif kind == "custom_voice":
        check_choice("speaker", args.speaker, args.config["talker_config"]["spk_id"])
        if args.instruct and args.config.get("tts_model_size") == "0b6":
            raise ValueError(
                f"--instruct is not for {args.model}, whose speakers take no instruction: use it with --model "
                "1.7B-CustomVoice"
            )
    elif not args.instruct:
        raise ValueError(f'{args.model} makes a voice from a description: give it --instruct "a warm narrator"')
    check_choice("language", args.language, languages(args.config))


def check_kind(args: argparse.Namespace, option: str, value, *kinds: str) -> None:
    kind = args.config["tts_model_type"]
    if value and kind not in kinds:
        models = " or ".join(MODELS_OF_KIND[other] for other in kinds)
        raise ValueError(f"{option} is not for {args.model}, {KINDS[kind]}: use it with --model {models}")


def check_cloning(args: argparse.Namespace) -> None:
    if (args.speaker is None) == (args.ref_audio is None):
        raise ValueError(
            f"{args.model} clones a voice: give it --speaker speaker.pt or --ref-audio voice.wav, one of the two"
        )
    if args.ref_text is not None and args.ref_audio is None:
        raise ValueError("--ref-text is the transcript of --ref-audio: give both, or neither with --speaker")
    if args.ref_text is not None and not args.ref_text.strip():
        raise ValueError("--ref-text is empty: give the transcript of --ref-audio, or leave it out")
    if args.ref_audio:
        args.voice = read_audio(args.ref_audio)
    else:
        args.voice = load_speaker(args.speaker, args.config["talker_config"]["hidden_size"])


def check_choice(what: str, word: str | None, known: Iterable[str]) -> None:
    """Refuse a word that is not known, and offer the nearest."""
    if str(word).lower() not in known:
        found = f"there is no {what} {word!r}" if word else f"no --{what} was given"
        raise ValueError(f"{found}: choose {nearest(word, known)} (--list-{what}s shows all)")


def nearest(word: str | None, known: Iterable[str]) -> str:
    """The known words that look like this one; if there are none, all."""
    return ", ".join(difflib.get_close_matches(str(word).lower(), known) or sorted(known))


def languages(config: dict) -> list[str]:
    return ["auto", *(name for name in config["talker_config"]["codec_language_id"] if "dialect" not in name)]


def read_texts(args: argparse.Namespace) -> list[str] | Pipe:
    """The utterances, one per line."""
    if (args.text is None) == (args.text_file is None):
        raise ValueError("give what to say as --text, --text-file, or --text - for stdin, one of them")
    if args.text == "-" and args.stream:
        if args.non_streaming_mode:
            raise ValueError("--non-streaming-mode needs the whole text at once: leave it out, or leave out --stream")
        return Pipe(sys.stdin.buffer)
    try:
        if args.text_file:
            text = args.text_file.read_text(encoding="utf-8")
        else:
            text = sys.stdin.read() if args.text == "-" else args.text
        text.encode()  # bytes on the command line that are not UTF-8 fail here
    except (OSError, UnicodeError) as error:
        source = args.text_file or ("stdin" if args.text == "-" else "--text")
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise ValueError(f"cannot read {source}: {reason}: give a text") from None
    lines = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]  # without a byte order mark
    if args.paragraphs:
        blocks = itertools.groupby(lines, key=bool)
        lines = [" ".join(block) for is_text, block in blocks if is_text]
    texts = [line for line in lines if line]
    if not texts:
        raise ValueError("the text is empty: give something to say")
    return texts


def check_lengths(args: argparse.Namespace) -> None:
    """A text takes one position per token, and a reference with its transcript one per frame."""
    room = args.max_seq_len
    if args.ref_text:
        audio, rate = args.voice
        frames = int(len(audio) / rate * FRAME_RATE)
        if frames >= room:
            raise ValueError(
                f"{args.ref_audio} takes {frames} positions, the cache has {room}: give a shorter recording, or a "
                "larger --max-seq-len"
            )
    if isinstance(args.texts, Pipe):
        return
    if args.text_file or args.text == "-":
        args.texts = split_texts(args)
        return
    long = [text for text in args.texts if len(text.encode()) >= room]  # a text has at most a token per byte
    for text in long:
        tokens = count_tokens(args.model, text)
        if tokens >= room:
            raise ValueError(
                f"the text {text[:20]!r}... takes {tokens} positions, the cache has {room}: put it on several lines, "
                "or give a larger --max-seq-len"
            )


def split_texts(args: argparse.Namespace) -> list[str]:
    """Cut lines that may not fit into the cache."""
    reference_positions = 0
    if args.ref_text:
        audio, rate = args.voice
        reference_positions = int((len(audio) / rate + REFERENCE_SILENCE) * FRAME_RATE) + len(args.ref_text.encode())
    most = tokens_that_fit(args.max_seq_len, {"instruct": args.instruct}, reference_positions)

    def fits(text: str) -> bool:
        return len(text.encode()) <= most or count_tokens(args.model, text) <= most

    return split_text(args.texts, fits, args.language)


def count_tokens(model: str, text: str) -> int:
    return len(text_tokenizer(model)(text).input_ids)


@functools.cache
def text_tokenizer(model: str):
    return transformers.AutoTokenizer.from_pretrained(hub_name(model))


def hub_name(model: str) -> str:
    return model if Path(model).is_dir() else MODELS.get(model, model)


def plan_outputs(args: argparse.Namespace) -> list[tuple[Path, Iterable[tuple[int, str | Line]]]]:
    """(file, its numbered utterances): one file, or one for each line. All lines of a pipe go to one file."""
    output, texts = args.output, args.texts
    args.parts = None
    if output is None:
        raise ValueError("give --output, an audio file to write, or - for stdout")
    if str(output) != "-":
        check_writable(output)
        check_format(output)
    if isinstance(texts, Pipe):
        return [(output, enumerate(texts.lines()))]
    numbered = [*enumerate(texts)]
    is_file = str(output) != "-" and not is_special(output)
    if len(texts) > 1 and is_file and not args.stream:
        args.parts = Parts(output, fingerprint(args))
        args.parts.check(args.resume)
    if args.resume and not args.parts:
        raise ValueError("--resume is for files with several utterances: leave it out, or leave out --stream")
    if len(texts) == 1 or args.join:
        return [(output, numbered)]
    if not is_file:
        raise ValueError(f"{len(texts)} utterances cannot go to stdout one by one: add --join")
    outputs = [(output.with_stem(f"{output.stem}-{number + 1:03}"), [(number, text)]) for number, text in numbered]
    for path, _ in outputs:
        check_writable(path)
    return outputs


def fingerprint(args: argparse.Namespace) -> str:
    """Of everything that decides what is spoken."""
    options = vars(args) | {"config": None, "voice": None, "resume": None, "device": str(args.device)}
    digest = hashlib.sha256(repr(sorted(options.items())).encode())
    for path in (args.ref_audio, args.speaker):
        if path and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def load_speaker(path: str | Path, hidden_size: int) -> dict:
    """A speaker.pt as a voice_clone_prompt. Nothing in the file is executed."""
    if not Path(path).is_file():
        raise ValueError(f"there is no speaker file {path}: make one with extract_speaker.py")
    try:
        speaker = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise ValueError(f"{path} is not a speaker file: make one with extract_speaker.py") from None
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float64
    is_vector = isinstance(speaker, torch.Tensor) and speaker.dtype in dtypes and speaker.dim() == 1
    if not is_vector or speaker.is_sparse:
        raise ValueError(f"{path} does not hold a speaker embedding: make one with extract_speaker.py")
    if len(speaker) != hidden_size:
        raise ValueError(
            f"{path} holds {len(speaker)} numbers, this model takes {hidden_size}: extract it again with the --model "
            "you speak with"
        )
    if not speaker.isfinite().all():
        raise ValueError(f"{path} has NaN or infinite values: make it again with extract_speaker.py")
    return speaker_prompt(speaker)


def speaker_prompt(speaker: torch.Tensor, rows: int = 1) -> dict:
    """Upstream's voice_clone_prompt for `rows` texts with one speaker embedding."""
    return {
        "ref_code": None,
        "ref_spk_embedding": [speaker] * rows,
        "x_vector_only_mode": [True] * rows,
        "icl_mode": [False] * rows,
    }


def voice_request(args: argparse.Namespace, tts) -> tuple[Callable, dict]:
    """Upstream's method for this voice, and its arguments except the text."""
    kind = args.config["tts_model_type"]
    request = {
        "language": args.language,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "repetition_penalty": args.repetition_penalty,
    }
    if args.non_streaming_mode is not None:
        request["non_streaming_mode"] = args.non_streaming_mode
    if isinstance(args.texts, Pipe):
        request["text_timeout"] = PIPE_TIMEOUT
    if kind == "custom_voice":
        return tts.generate_custom_voice, request | {"speaker": args.speaker, "instruct": args.instruct}
    if kind == "voice_design":
        return tts.generate_voice_design, request | {"instruct": args.instruct}

    prompt = args.voice
    if args.ref_audio:
        prompt = clone_prompt(
            tts, *args.voice, args.ref_text, silence=0 if args.no_append_silence else REFERENCE_SILENCE
        )
    return tts.generate_voice_clone, request | {"voice_clone_prompt": prompt}


def clone_prompt(tts, audio: np.ndarray, rate: int, ref_text: str | None, silence: float = REFERENCE_SILENCE) -> list:
    """Upstream's voice_clone_prompt for a recording: in-context with a transcript, else its speaker embedding alone."""
    if ref_text:  # silence keeps the last phoneme of the recording out of the speech
        audio = np.append(audio, np.zeros(int(silence * rate), dtype=audio.dtype))
    with contextlib.redirect_stdout(sys.stderr):  # upstream prints warnings, and stdout may be the audio
        return tts.create_voice_clone_prompt((audio, rate), ref_text, x_vector_only_mode=not ref_text)


def show_progress(line: str) -> None:
    """Replace the last line of a terminal. A pipe gets nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


class ProgressHandler(logging.Handler):
    """Shows what the library logs while it loads."""

    def emit(self, record: logging.LogRecord) -> None:
        show_progress(record.getMessage())


class Progress:
    """How far the speech is, and how long the rest will take, on a terminal."""

    def __init__(self, args: argparse.Namespace):
        self.texts = [] if isinstance(args.texts, Pipe) else args.texts
        self.start = time.perf_counter()
        self.seconds = 0.0  # of audio
        self.spoken = 0  # characters of finished utterances
        self.skipped = 0
        self.finished = 0  # utterances

    def skip(self, text: str) -> None:
        self.skipped += len(text)
        self.finished += 1

    def follow(self, chunks: Iterable[Chunk], text: str | Line) -> Iterator[Chunk]:
        for audio, rate in chunks:
            self.seconds += len(audio) / rate
            show_progress(self.line())
            yield audio, rate
        if self.texts:
            self.spoken += len(text)
        self.finished += 1

    def line(self) -> str:
        elapsed = time.perf_counter() - self.start
        line = f"{self.seconds:.1f} s of audio, {self.seconds / elapsed:.2f} x real time"
        if len(self.texts) > 1:
            line = f"utterance {self.finished + 1} of {len(self.texts)}, {line}"
        if self.spoken:
            rest = sum(map(len, self.texts)) - self.skipped - self.spoken
            line += f", {datetime.timedelta(seconds=round(elapsed * rest / self.spoken))} left"
        return line


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Around a script's main: a user's mistake is one line and exit code 2, a warning is one line."""
    warnings.showwarning = lambda message, *_: print(f"warning: {str(message).splitlines()[0]}", file=sys.stderr)
    for library in (transformers.utils, huggingface_hub.utils):
        library.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # of transformers 5, one for each part of the model
    huggingface_hub.utils.enable_progress_bars()  # of downloads
    log = logging.getLogger("qwen3_tts_cudagraphs")
    log.setLevel(logging.INFO)
    log.handlers = [ProgressHandler()]
    try:
        yield
    except KeyboardInterrupt:
        show_progress("")
        sys.exit(130)
    except BrokenPipeError:  # the player was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        sys.exit(141)
    except torch.OutOfMemoryError:
        mistake = "the GPU's memory is full: use a smaller model or --max-seq-len, or free some"
    except MegakernelStopped as error:
        mistake = str(error)
    except SafetensorError as error:
        mistake = f"the checkpoint's weights cannot be read ({error}): download it again"
    except (ValueError, OSError) as error:
        mistake = str(error)
    else:
        return
    print(f"error: {' '.join(mistake.split())}", file=sys.stderr)
    sys.exit(2)
