"""The options of `qwen3-tts speak`, which is also `python generate.py`, checked as far as no package is needed that is
slow to import.

The checkpoint's config.json says what kind of model it is, which speakers and languages it has, and which numbers it
takes. A mistake ends the script with one line that says what to do, and exit code 2. What is left is a Job for
speaking.py.
"""

import argparse
import dataclasses
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
RECORDING_SUFFIXES = tuple(".wav .flac .ogg .oga .opus .mp3 .m4a .aac .aif .aiff .webm .mp4 .wma".split())
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
DESCRIPTION = "a warm, clear narrator"  # for a VoiceDesign model
EXAMPLES = """examples:
  qwen3-tts speak "Hello!"                                            a preset voice, to speech.wav
  qwen3-tts speak "Hello!" --voice ryan --speed 1.2 --play            another one, faster, heard at once
  qwen3-tts speak --text "Hello!" --ref-audio voice.wav               the voice of a recording
  qwen3-tts speak --text "Hello!" --model 1.7B-VoiceDesign --instruct "an old sailor"
  qwen3-tts speak --text-file book.txt --join --output book.mp3       a text of any length
  llm | qwen3-tts speak --text - --play                               a text that is still being written
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be spoken, how, and where it goes: the options, checked, with their defaults."""

    model: str
    config: dict
    device: str | None  # speaking.py makes it a torch.device
    dtype: str | None  # speaking.py makes it a torch.dtype
    max_seq_len: int
    fused: bool | None

    speaker: str | None  # a file or a name
    ref_audio: Path | None
    ref_text: str | None
    silence: float  # seconds between them and the speech
    instruct: str | None
    voice: tuple | list | dict | None  # samples and rate of the recording, or the voice in the speaker's file

    texts: list[str] | Pipe | None  # None: still to be read from stdin
    text_file: Path | None
    paragraphs: bool
    language: str
    non_streaming_mode: bool | None

    output: Path
    join: bool
    pause: float
    speed: float
    resume: bool
    stream: bool
    play: bool

    limit_speech: bool
    retry: int
    seed: int | None
    sampling: dict[str, float | None]

    @property
    def kind(self) -> str:
        return self.config["tts_model_type"]


def read_job() -> Job:
    """The command line's job. Cheap checks come first."""
    asked = make_parser().parse_args()
    text = text_of(asked)
    model = default_model(asked) if asked.model is None else asked.model
    if asked.list_speakers or asked.list_languages:
        print_lists(asked, model)
        sys.exit()
    check_device_name(asked.device)
    output = output_of(asked)
    stream = asked.stream or asked.play
    join = asked.join or (asked.play and asked.output is None)
    check_text_source(asked, text, stream)
    check_pairs(asked, goes_to_one_file=join or (text == "-" and stream))
    texts = None if text == "-" else read_texts(text, asked.text_file, asked.paragraphs)
    if texts:
        check_number_of_files(texts, join, output)

    config = published_config(model) or read_config(model)
    for name in number_ranges(config):
        check_number(config, name, getattr(asked, name))
    if asked.speed != 1 and find_spec("av") is None:
        raise ValueError(f"--speed needs PyAV: run {install_command('av')}, or leave it out")
    decided = dict(model=model, texts=texts, output=output, join=join, stream=stream, **voice_of(asked, model, config))
    decided["pause"] = PAUSE if asked.pause is None else asked.pause
    decided["silence"] = 0.0 if asked.no_append_silence else REFERENCE_SILENCE
    decided["sampling"] = {name: getattr(asked, name) for name in SAMPLING}
    decided["config"] = read_config(model)  # a published model's own only now: the hub may be slow
    names = {field.name for field in dataclasses.fields(Job)}
    return Job(**{name: value for name, value in vars(asked).items() if name in names} | decided)


def make_parser() -> Parser:
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

    return parser


def text_of(asked: argparse.Namespace) -> str | None:
    """--text, or the words without an option."""
    if not asked.words:
        return asked.text
    text = " ".join(asked.words)
    if asked.text is not None or asked.text_file is not None:
        raise ValueError(f"{text[:40]!r} is a second text: give one, as --text or without an option")
    if os.path.isfile(text):
        raise ValueError(f"{text} is a file: give it as --text-file {text}, or as --text to speak its name")
    return text


def default_model(asked: argparse.Namespace) -> str:
    """Without a voice to clone, one that has voices of its own."""
    return CLONING_MODEL if is_file(asked.speaker) or asked.ref_audio or asked.ref_text else PRESET_MODEL


def is_file(speaker: str | None) -> bool:
    """Whether --speaker is a file, or was meant to be one."""
    return bool(speaker) and (speaker.lower().endswith((".pt", *RECORDING_SUFFIXES)) or os.path.isfile(speaker))


def check_pairs(asked: argparse.Namespace, goes_to_one_file: bool) -> None:
    """Options that mean something only beside another one."""
    if asked.speaker and asked.speaker.lower().endswith(RECORDING_SUFFIXES):
        raise ValueError(f"{asked.speaker} is a recording, not a speaker: give it as --ref-audio {asked.speaker}")
    if asked.ref_text is not None and asked.ref_audio is None:
        raise ValueError("--ref-text is the transcript of --ref-audio: give that recording, too, or leave it out")
    if asked.ref_text is not None and not asked.ref_text.strip():
        raise ValueError("--ref-text is empty: give the transcript of --ref-audio, or leave it out")
    if asked.no_append_silence and asked.ref_text is None:
        raise ValueError("--no-append-silence is for a recording with its transcript: give --ref-text, or leave it out")
    if asked.retry and not asked.limit_speech:
        raise ValueError("--retry speaks again what --limit-speech has stopped: leave out --no-limit-speech")
    if asked.pause is not None and not goes_to_one_file:
        raise ValueError("--pause is the silence between utterances in one file: add --join")


def print_lists(asked: argparse.Namespace, model: str) -> None:
    config = published_config(model) or read_config(model)
    speakers = config["talker_config"]["spk_id"]
    if asked.list_speakers and not speakers:
        models = " or ".join(MODELS_OF_KIND["custom_voice"])
        raise ValueError(f"{model} has no speakers of its own: use --model {models}")
    if asked.list_speakers:
        print(*sorted(speakers), sep="\n")
    if asked.list_languages:
        print(*sorted(languages(config)), sep="\n")


def voice_of(asked: argparse.Namespace, model: str, config: dict) -> dict:
    """The voice and language that the options describe, as fields of a Job, if this model can speak with them."""
    kind, speakers = config["tts_model_type"], config["talker_config"]["spk_id"]
    speaker, instruct, recording = asked.speaker, asked.instruct, None

    def check_kind(option: str, value, *kinds: str, size: str = "") -> None:
        if value and kind not in kinds:
            models = " or ".join(name for other in kinds for name in MODELS_OF_KIND[other] if size in name)
            raise ValueError(f"{option} is not for {model}, {KINDS[kind]}: use it with --model {models}")

    check_kind("--ref-audio", asked.ref_audio, "base")
    check_kind("--ref-text", asked.ref_text, "base")
    check_kind("--instruct", instruct, "custom_voice", "voice_design", size="1.7B")
    kinds = ["base", "custom_voice"]
    if str(speaker).lower() not in speakers and (is_file(speaker) or str(speaker).lower() in SPEAKERS):
        kinds = ["base"] if is_file(speaker) else ["custom_voice"]
    check_kind(f"--speaker {speaker}", speaker, *kinds)
    if kind == "base":
        speaker, recording = cloned_voice(asked, model)
    elif kind == "custom_voice":
        speaker = min(speakers, default=None) if speaker is None else speaker
        check_choice("speaker", speaker, speakers)
        if instruct and config.get("tts_model_size") == "0b6":
            raise ValueError(
                f"--instruct is not for {model}, whose speakers take no instruction: use it with --model "
                "1.7B-CustomVoice"
            )
    else:
        instruct = instruct or DESCRIPTION
    language = language_name(asked.language)
    check_choice("language", language, languages(config))
    return dict(speaker=speaker, instruct=instruct, voice=recording, language=language)


def cloned_voice(asked: argparse.Namespace, model: str) -> tuple[str | None, tuple | None]:
    """A speaker's file or a recording, which is read here."""
    speaker, own = asked.speaker, Path(model) / "speaker.pt"
    if speaker is None and asked.ref_audio is None and asked.ref_text is None and own.is_file():
        speaker = str(own)
    if (speaker is None) == (asked.ref_audio is None):
        raise ValueError(
            f"{model} clones a voice: give it --ref-audio voice.wav or --speaker speaker.pt (made "
            "with qwen3-tts clone), one of the two, or use --model 0.6B-CustomVoice, which has voices"
        )
    if asked.ref_audio is None:
        check_speaker_file(speaker)
        return speaker, None
    from qwen3_tts_cuda_graphs.common.audio_files import read_audio  # imports numpy

    audio, rate = read_audio(asked.ref_audio)
    frames = int(len(audio) / rate * FRAME_RATE)
    if asked.ref_text and frames >= asked.max_seq_len:  # with a transcript it takes one position of the cache per frame
        raise ValueError(
            f"{asked.ref_audio} takes {frames} positions, the cache has {asked.max_seq_len}: give a shorter recording, "
            "or a larger --max-seq-len"
        )
    return None, (audio, rate)


def check_choice(what: str, word: str | None, known: Iterable[str]) -> None:
    """Refuse a word that is not known, and offer the nearest."""
    if str(word).lower() not in {name.lower() for name in known}:
        found = f"there is no {what} {word!r}" if word else f"no --{what} was given"
        raise ValueError(f"{found}: choose {nearest(word, known)} (--list-{what}s shows all)")


def check_text_source(asked: argparse.Namespace, text: str | None, stream: bool) -> None:
    if (text is None) == (asked.text_file is None):
        raise ValueError("give what to say as --text, --text-file, or --text - for stdin, one of them")
    if str(asked.text_file) == "-":
        raise ValueError("--text-file - is no file: use --text - for stdin")
    if text == "-" and sys.stdin is None:
        raise ValueError("--text - reads stdin, which is closed: pipe a text into it")
    for option in ("paragraphs", "non_streaming_mode", "retry"):
        if text == "-" and stream and getattr(asked, option):
            name = "--" + option.replace("_", "-")
            raise ValueError(f"{name} needs the whole text at once: leave it out, or leave out --stream")


def read_texts(text: str | None, file: Path | None, paragraphs: bool) -> list[str]:
    """The utterances, one per line. text: - for stdin"""
    source = file or ("stdin" if text == "-" else "--text")
    try:
        if file:
            text = file.read_text(encoding="utf-8")
        elif text == "-":
            text = sys.stdin.read()
        text.encode()  # bytes on the command line that are not UTF-8 fail here
    except (OSError, UnicodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise ValueError(f"cannot read {source}: {reason}: give a text") from None
    lines = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]  # without a byte order mark
    if paragraphs:
        blocks = itertools.groupby(lines, key=bool)
        lines = [" ".join(block) for is_text, block in blocks if is_text]
    texts = [line for line in lines if line]
    if not texts:
        raise ValueError("the text is empty: give something to say")
    return texts


def output_of(asked: argparse.Namespace) -> Path:
    """The file to write, PLAYED_ONLY, or - for stdout."""
    output = asked.output
    if asked.play:
        sound_device()
        output = output or PLAYED_ONLY
    if output is None and asked.resume:
        raise ValueError("--resume needs the --output of the run that was interrupted: give it")
    if output is None:
        output = free_name(OUTPUT)
    if asked.resume and (asked.stream or asked.play or not goes_to_file(output)):
        raise ValueError("--resume keeps the finished utterances of a file: leave it out with --stream and --output -")
    if str(output) == "-" and sys.stdout is None:
        raise ValueError("--output - writes to stdout, which is closed: pipe it into a player")
    if str(output) != "-":
        check_writable(output, asked.ref_audio, asked.speaker, asked.text_file)
        check_format(output)
    return output


def free_name(path: Path) -> Path:
    """This name or, if there are files of it, one with a number: the file, its parts, or its numbered utterances."""

    def is_taken(name: Path) -> bool:
        return any([*path.parent.glob(f"{name.name}*"), *path.parent.glob(f"{name.stem}-[0-9][0-9][0-9]{name.suffix}")])

    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not is_taken(name))


def check_number_of_files(texts: list[str], join: bool, output: Path) -> None:
    if len(texts) > 1 and not join and not goes_to_file(output):
        raise ValueError(f"{len(texts)} utterances cannot go to stdout one by one: add --join")


def goes_to_file(output: Path) -> bool:
    return str(output) != "-" and not is_special(output)
