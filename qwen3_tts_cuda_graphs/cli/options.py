"""The options of `qwen3-tts speak`, which is also `python generate.py`, and the checks that need
no package that is slow to import.

The checkpoint's config.json says what kind of model it is, which speakers and languages it has, and which numbers it
takes. speaking.py does the rest. A mistake ends the script with one line that says what to do, and exit code 2.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from qwen3_tts_cuda_graphs.cli.player import sound_device
from qwen3_tts_cuda_graphs.cli.text_files import Pipe
from qwen3_tts_cuda_graphs.common.checkpoints import (
    CLONING_MODEL,
    FRAME_RATE,
    KINDS,
    MODELS_OF_KIND,
    PRESET_MODEL,
    REFERENCE_SILENCE,
    check_number,
    check_speaker_file,
    language_name,
    languages,
    nearest,
    number_ranges,
    read_config,
)
from qwen3_tts_cuda_graphs.common.output_files import check_format, check_writable, is_special
from qwen3_tts_cuda_graphs.common.published import MODELS, SPEAKERS, model_name, published_config
from qwen3_tts_cuda_graphs.common.scripts import Parser, check_device_name, install_command
from qwen3_tts_cuda_graphs.prompts.cut import FRAMES_PER_TOKEN, MIN_FRAME_LIMIT, PAUSE

OUTPUT = Path("speech.wav")
PLAYED_ONLY = Path(os.devnull)
RECORDINGS = (
    ".wav",
    ".flac",
    ".ogg",
    ".oga",
    ".opus",
    ".mp3",
    ".m4a",
    ".aac",
    ".aif",
    ".aiff",
    ".webm",
    ".mp4",
    ".wma",
)
DESCRIPTION = "a warm, clear narrator"  # for a VoiceDesign model
EXAMPLES = """examples:
  qwen3-tts speak "Hello!"                                            a preset voice, to speech.wav
  qwen3-tts speak "Hello!" --voice ryan --speed 1.2 --play            another one, faster, heard at once
  qwen3-tts speak --text "Hello!" --ref-audio voice.wav               the voice of a recording
  qwen3-tts speak --text "Hello!" --model 1.7B-VoiceDesign --instruct "an old sailor"
  qwen3-tts speak --text-file book.txt --join --output book.mp3       a text of any length
  llm | qwen3-tts speak --text - --play                               a text that is still being written
"""


def parse_arguments() -> argparse.Namespace:
    """The options of generate.py. Adds `config`, `texts` (None: on stdin) and `voice`, a recording or None."""
    parser = Parser(
        prog="qwen3-tts speak",
        description="Speak with Qwen3-TTS.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    voice = parser.add_argument_group("voice")
    voice.add_argument(
        "--model",
        type=model_name,
        help=f"{', '.join(MODELS)}, a hub id or a folder; default: {PRESET_MODEL}, or {CLONING_MODEL} to clone a voice",
    )
    voice.add_argument(
        "--speaker",
        "--voice",
        help="Base: a speaker.pt, default: the one in the model's folder; CustomVoice: a name, default: the first of "
        "--list-speakers",
    )
    voice.add_argument("--ref-audio", "--ref_audio", type=Path, help="Base: a recording to clone")
    voice.add_argument("--ref-text", "--ref_text", help="its transcript: clones the manner of speaking, too")
    voice.add_argument(
        "--no-append-silence",
        action="store_true",
        help=f"do not add {REFERENCE_SILENCE} s of silence between the recording and the speech",
    )
    voice.add_argument("--instruct", help=f"CustomVoice: how to speak; VoiceDesign: the voice, default: {DESCRIPTION}")
    voice.add_argument("--list-speakers", action="store_true", help="print the names for --speaker, and end")
    voice.add_argument("--list-languages", action="store_true", help="print the names for --language, and end")

    text = parser.add_argument_group("text")
    text.add_argument("words", nargs="*", metavar="TEXT", help="the same as --text")
    text.add_argument(
        "--text", help="what to say, one utterance per line; - reads stdin, with --stream while it is being written"
    )
    text.add_argument("--text-file", type=Path, help="a text of any length; long lines are cut at sentence ends")
    text.add_argument(
        "--paragraphs", action="store_true", help="utterances end at empty lines, as in books with wrapped lines"
    )
    text.add_argument("--language", default="Auto", help="a name or a code like en; default: %(default)s")
    text.add_argument(
        "--non-streaming-mode",
        action=argparse.BooleanOptionalAction,
        help="put the whole text into the prompt, or feed it frame by frame; default: as upstream for this model",
    )

    audio = parser.add_argument_group("audio")
    audio.add_argument(
        "--output",
        "-o",
        type=Path,
        help=f"the file to write: .wav, .flac, .ogg, .opus or .mp3; - for stdout; default: {OUTPUT}, or if that is "
        "there speech-2.wav and so on; with --play none",
    )
    audio.add_argument("--join", action="store_true", help="several utterances in one file")
    audio.add_argument("--pause", type=float, help=f"seconds between them; default: {PAUSE}")
    audio.add_argument(
        "--speed", type=float, default=1.0, help="0.25 to 4, with the same pitch; needs PyAV; default: %(default)s"
    )
    audio.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run of the same command has spoken"
    )
    audio.add_argument(
        "--limit-speech",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"stop speech that does not end: after {MIN_FRAME_LIMIT} frames, or {FRAMES_PER_TOKEN} per token of text",
    )
    audio.add_argument(
        "--retry", type=int, default=0, help="speak it again, with another seed, at most so often; default: 0"
    )
    audio.add_argument("--stream", action="store_true", help="write the audio while it is generated")
    audio.add_argument("--play", action="store_true", help="play it, too, while it is generated; implies --stream")

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
        "--max-seq-len",
        default=2048,
        type=int,
        help="positions for prompt and speech, 12.5 per second; default: %(default)s",
    )
    machine.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
    machine.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, on a CPU float32"
    )
    machine.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        help="require or avoid the megakernel; default: use it where it runs",
    )

    args = parser.parse_args()
    take_words(args)
    args.model = default_model(args) if args.model is None else args.model
    if args.list_speakers or args.list_languages:
        args.config = published_config(args.model) or read_config(args.model)
        print_lists(args)
        sys.exit()
    check_device_name(args.device)
    check_output(args)
    check_text_source(args)
    check_pairs(args)
    args.texts = None if args.text == "-" else read_texts(args)
    if args.texts:
        check_number_of_files(args)

    args.config = published_config(args.model) or read_config(args.model)
    for name in number_ranges(args.config):
        check_number(args.config, name, getattr(args, name))
    if args.speed != 1 and find_spec("av") is None:
        raise ValueError(f"--speed needs PyAV: run {install_command('av')}, or leave it out")
    args.voice = None
    check_voice(args)
    args.config = read_config(args.model)  # of a published model only now: the hub may be slow
    return args


def default_model(args: argparse.Namespace) -> str:
    """Without a voice to clone, one that has voices of its own."""
    return CLONING_MODEL if is_file(args.speaker) or args.ref_audio or args.ref_text else PRESET_MODEL


def is_file(speaker: str | None) -> bool:
    """Whether --speaker is a file, or was meant to be one."""
    return bool(speaker) and (speaker.lower().endswith((".pt", *RECORDINGS)) or os.path.isfile(speaker))


def check_pairs(args: argparse.Namespace) -> None:
    """Options that mean something only beside another one."""
    if args.speaker and args.speaker.lower().endswith(RECORDINGS):
        raise ValueError(f"{args.speaker} is a recording, not a speaker: give it as --ref-audio {args.speaker}")
    if args.ref_text is not None and args.ref_audio is None:
        raise ValueError("--ref-text is the transcript of --ref-audio: give that recording, too, or leave it out")
    if args.ref_text is not None and not args.ref_text.strip():
        raise ValueError("--ref-text is empty: give the transcript of --ref-audio, or leave it out")
    if args.no_append_silence and args.ref_text is None:
        raise ValueError("--no-append-silence is for a recording with its transcript: give --ref-text, or leave it out")
    if args.retry and not args.limit_speech:
        raise ValueError("--retry speaks again what --limit-speech has stopped: leave out --no-limit-speech")
    is_pipe = args.text == "-" and args.stream
    if args.pause is not None and not (args.join or is_pipe):
        raise ValueError("--pause is the silence between utterances in one file: add --join")
    args.pause = PAUSE if args.pause is None else args.pause


def print_lists(args: argparse.Namespace) -> None:
    speakers = args.config["talker_config"]["spk_id"]
    if args.list_speakers and not speakers:
        models = " or ".join(MODELS_OF_KIND["custom_voice"])
        raise ValueError(f"{args.model} has no speakers of its own: use --model {models}")
    if args.list_speakers:
        print(*sorted(speakers), sep="\n")
    if args.list_languages:
        print(*sorted(languages(args.config)), sep="\n")


def check_voice(args: argparse.Namespace) -> None:
    """Whether the options describe a voice that this model can speak with."""
    kind = args.config["tts_model_type"]
    speakers = args.config["talker_config"]["spk_id"]
    check_kind(args, "--ref-audio", args.ref_audio, "base")
    check_kind(args, "--ref-text", args.ref_text, "base")
    check_kind(args, "--instruct", args.instruct, "custom_voice", "voice_design", size="1.7B")
    kinds = ["base", "custom_voice"]
    if str(args.speaker).lower() not in speakers and (is_file(args.speaker) or str(args.speaker).lower() in SPEAKERS):
        kinds = ["base"] if is_file(args.speaker) else ["custom_voice"]
    check_kind(args, f"--speaker {args.speaker}", args.speaker, *kinds)
    if kind == "base":
        check_cloning(args)
    elif kind == "custom_voice":
        args.speaker = min(speakers, default=None) if args.speaker is None else args.speaker
        check_choice("speaker", args.speaker, speakers)
        if args.instruct and args.config.get("tts_model_size") == "0b6":
            raise ValueError(
                f"--instruct is not for {args.model}, whose speakers take no instruction: use it with --model "
                "1.7B-CustomVoice"
            )
    else:
        args.instruct = args.instruct or DESCRIPTION
    args.language = language_name(args.language)
    check_choice("language", args.language, languages(args.config))


def check_kind(args: argparse.Namespace, option: str, value, *kinds: str, size: str = "") -> None:
    kind = args.config["tts_model_type"]
    if value and kind not in kinds:
        models = " or ".join(name for other in kinds for name in MODELS_OF_KIND[other] if size in name)
        raise ValueError(f"{option} is not for {args.model}, {KINDS[kind]}: use it with --model {models}")


def check_cloning(args: argparse.Namespace) -> None:
    own = Path(args.model) / "speaker.pt"
    if args.speaker is None and args.ref_audio is None and args.ref_text is None and own.is_file():
        args.speaker = str(own)
    if (args.speaker is None) == (args.ref_audio is None):
        raise ValueError(
            f"{args.model} clones a voice: give it --ref-audio voice.wav or --speaker speaker.pt (made "
            "with qwen3-tts clone), one of the two, or use --model 0.6B-CustomVoice, which has voices"
        )
    if args.ref_audio is None:
        check_speaker_file(args.speaker)
        return
    from qwen3_tts_cuda_graphs.common.audio_files import read_audio  # which imports numpy

    audio, rate = args.voice = read_audio(args.ref_audio)
    frames = int(len(audio) / rate * FRAME_RATE)
    if args.ref_text and frames >= args.max_seq_len:  # with a transcript it takes one position of the cache per frame
        raise ValueError(
            f"{args.ref_audio} takes {frames} positions, the cache has {args.max_seq_len}: give a shorter recording, "
            "or a larger --max-seq-len"
        )


def check_choice(what: str, word: str | None, known: Iterable[str]) -> None:
    """Refuse a word that is not known, and offer the nearest."""
    if str(word).lower() not in {name.lower() for name in known}:
        found = f"there is no {what} {word!r}" if word else f"no --{what} was given"
        raise ValueError(f"{found}: choose {nearest(word, known)} (--list-{what}s shows all)")


def take_words(args: argparse.Namespace) -> None:
    """A text without an option is --text."""
    words = vars(args).pop("words")
    if not words:
        return
    text = " ".join(words)
    if args.text is not None or args.text_file is not None:
        raise ValueError(f"{text[:40]!r} is a second text: give one, as --text or without an option")
    if os.path.isfile(text):
        raise ValueError(f"{text} is a file: give it as --text-file {text}, or as --text to speak its name")
    args.text = text


def check_text_source(args: argparse.Namespace) -> None:
    if (args.text is None) == (args.text_file is None):
        raise ValueError("give what to say as --text, --text-file, or --text - for stdin, one of them")
    if str(args.text_file) == "-":
        raise ValueError("--text-file - is no file: use --text - for stdin")
    if args.text == "-" and sys.stdin is None:
        raise ValueError("--text - reads stdin, which is closed: pipe a text into it")
    for option in ("paragraphs", "non_streaming_mode", "retry"):
        if args.text == "-" and args.stream and getattr(args, option):
            name = "--" + option.replace("_", "-")
            raise ValueError(f"{name} needs the whole text at once: leave it out, or leave out --stream")


def read_texts(args: argparse.Namespace) -> list[str] | Pipe:
    """The utterances, one per line."""
    if args.text == "-" and args.stream:
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


def check_output(args: argparse.Namespace) -> None:
    if args.play:
        sound_device()
        args.stream = True
        if args.output is None:
            args.output, args.join = PLAYED_ONLY, True
    if args.output is None and args.resume:
        raise ValueError("--resume needs the --output of the run that was interrupted: give it")
    if args.output is None:
        args.output = free_name(OUTPUT)
    if args.resume and (args.stream or not goes_to_file(args.output)):
        raise ValueError("--resume keeps the finished utterances of a file: leave it out with --stream and --output -")
    if str(args.output) == "-" and sys.stdout is None:
        raise ValueError("--output - writes to stdout, which is closed: pipe it into a player")
    if str(args.output) != "-":
        check_writable(args.output, args.ref_audio, args.speaker, args.text_file)
        check_format(args.output)


def free_name(path: Path) -> Path:
    """This name or, if there are files of it, one with a number: the file, its parts, or its numbered utterances."""

    def is_taken(name: Path) -> bool:
        return any([*path.parent.glob(f"{name.name}*"), *path.parent.glob(f"{name.stem}-[0-9][0-9][0-9]{name.suffix}")])

    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not is_taken(name))


def check_number_of_files(args: argparse.Namespace) -> None:
    """Whether --output and --join suit the number of utterances."""
    if len(args.texts) > 1 and not args.join and not goes_to_file(args.output):
        raise ValueError(f"{len(args.texts)} utterances cannot go to stdout one by one: add --join")


def has_parts(args: argparse.Namespace) -> bool:
    """Whether finished utterances are kept until all are spoken, for --resume."""
    return len(args.texts) > 1 and goes_to_file(args.output) and not args.stream


def goes_to_file(output: Path) -> bool:
    return str(output) != "-" and not is_special(output)
