"""Check the options of `qwen3-tts speak` as far as possible without slow imports, and make a Job for speaking.py.

The checkpoint's config.json says what kind of model it is, which speakers and languages it has, and which ranges of
numbers it takes. A mistake ends the command with one line that says what to do, and exit code 2.
"""

import argparse
import dataclasses
import itertools
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from qwen3_tts_cuda_graphs.cli.options import OUTPUT, make_parser
from qwen3_tts_cuda_graphs.cli.player import sound_device
from qwen3_tts_cuda_graphs.cli.text_files import Pipe, read_text_lines
from qwen3_tts_cuda_graphs.cli.voice_options import VoiceOption, check_choice, check_voice_pairs, clones, voices_of
from qwen3_tts_cuda_graphs.common.choices import nearest
from qwen3_tts_cuda_graphs.common.command import check_device_name, install_command
from qwen3_tts_cuda_graphs.common.formats import format_and_rate, suffix_of
from qwen3_tts_cuda_graphs.common.model_config import language_name, languages, quick_config, read_config
from qwen3_tts_cuda_graphs.common.output_files import check_writable, is_special
from qwen3_tts_cuda_graphs.common.published import CLONING_MODEL, MODELS_OF_KIND, PRESET_MODEL
from qwen3_tts_cuda_graphs.common.subtitles import SUBTITLE_SUFFIXES
from qwen3_tts_cuda_graphs.prompts.checks import check_number, number_ranges
from qwen3_tts_cuda_graphs.prompts.cut import PAUSE
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon, load_lexicon
from qwen3_tts_cuda_graphs.prompts.script import Part, read_lines

PLAYED_ONLY = Path(os.devnull)
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Job:
    """The options, checked and with their defaults. A field without a comment is the option of that name."""

    model: str
    config: dict  # the model's config.json
    device: str | None  # speaking.py makes it a torch.device
    dtype: str | None  # speaking.py makes it a torch.dtype
    max_seq_len: int
    fused: bool | None

    voices: dict[str | None, VoiceOption]  # by the names in the script; None: the voice of parts that name none
    instruct: str | None

    lines: list[list[Part]] | Pipe | None  # the parts of each line; None: stdin has still to be read
    inputs: list[str | Path | None]  # files that are read, and must not be overwritten
    paragraphs: bool
    plain: bool
    script: bool  # lines may begin with the name of a voice
    lexicon: Lexicon
    language: str
    non_streaming_mode: bool | None

    output: Path
    format: str | None  # None: by the file's extension
    sample_rate: int | None  # None: the model's
    subtitles: Path | None
    join: bool
    pause: float
    speed: float
    resume: bool
    stream: bool
    play: bool  # on the sound device

    limit_speech: bool
    retry: int
    seed: int | None
    sampling: dict[str, float | None]

    @property
    def kind(self) -> str:
        return self.config["tts_model_type"]

    @property
    def pipe(self) -> Pipe | None:
        """The text if it is still being written, otherwise None."""
        return self.lines if isinstance(self.lines, Pipe) else None

    def check_voice(self, name: str) -> None:
        """Raise an error if a script names an unknown voice."""
        known = [*filter(None, self.voices), *self.config["talker_config"]["spk_id"]]
        if name.lower() not in map(str.lower, known):
            choice = f"choose {nearest(name, known)}, or " if known else ""
            give = f"give it as --voice {name}=FILE" if self.kind == "base" else f"name one: --voice {name}=SPEAKER"
            if self.kind == "voice_design":
                give = "this model makes voices from descriptions: use [style: ...], or another --model"
            raise ValueError(f"there is no voice {name!r}: {choice}{give}")


def read_job() -> Job:
    """The job of sys.argv. Cheap checks come first."""
    args = make_parser().parse_args()
    args.text = text_of(args)
    if args.model is None:
        args.model = CLONING_MODEL if clones(args) else PRESET_MODEL
    if args.list_speakers or args.list_languages:
        print_lists(args)
        sys.exit()
    check_device_name(args.device)
    check_voice_pairs(args)
    args.inputs = [args.ref_audio, args.text_file, args.lexicon, *(args.speaker or []), *args.voices.values()]
    args.stream = args.stream or args.play
    args.join = args.join or (args.play and args.output is None)
    args.output, args.format, args.sample_rate = output_of(args)
    check_subtitles(args)
    check_text_source(args)
    check_pairs(args)
    numbered = None if args.text == "-" else read_text_lines(args.text, args.text_file, args.paragraphs)
    args.lexicon = load_lexicon(args.lexicon)
    args.config = quick_config(args.model)
    for name in number_ranges(args.config):
        check_number(args.config, name, getattr(args, name))
    if args.speed != 1 and find_spec("av") is None:
        raise ValueError(f"--speed needs PyAV: run {install_command('av')}, or leave it out")
    args.voices, args.instruct = voices_of(args)
    args.language = language_name(args.language)
    check_choice("language", args.language, languages(args.config))
    args.pause = PAUSE if args.pause is None else args.pause
    args.sampling = {name: getattr(args, name) for name in SAMPLING}
    args.lines = None
    job = Job(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Job)})
    if numbered:
        job = with_lines(job, numbered)
    return dataclasses.replace(job, config=read_config(args.model))  # last, because the hub may be slow


def text_of(args: argparse.Namespace) -> str | None:
    """The value of --text, or the words that belong to no option."""
    words = [*args.words, *args.more_words]
    if not words:
        return args.text
    text = " ".join(words)
    if args.text is not None or args.text_file is not None:
        raise ValueError(f"{text[:40]!r} is a second text: give one, as --text or without an option")
    if os.path.isfile(text):
        raise ValueError(f"{text} is a file: give it as --text-file {text}, or as --text to speak its name")
    return text


def check_pairs(args: argparse.Namespace) -> None:
    """Raise an error for options that need another one, or exclude each other."""
    if args.plain and args.script:
        raise ValueError("--plain says that names and tags are words, --script that they are not: give one of them")
    if args.retry and not args.limit_speech:
        raise ValueError("--retry speaks again what --limit-speech has stopped: leave out --no-limit-speech")
    goes_to_one_file = args.join or (args.text == "-" and args.stream)
    if args.pause is not None and not goes_to_one_file:
        raise ValueError("--pause is the silence between utterances in one file: add --join")


def print_lists(args: argparse.Namespace) -> None:
    config = quick_config(args.model)
    speakers = config["talker_config"]["spk_id"]
    if args.list_speakers and not speakers:
        models = " or ".join(MODELS_OF_KIND["custom_voice"])
        raise ValueError(f"{args.model} has no speakers of its own: use --model {models}")
    if args.list_speakers:
        print(*sorted(speakers), sep="\n")
    if args.list_languages:
        print(*sorted(languages(config)), sep="\n")


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


def with_lines(job: Job, numbered: list[tuple[int, str]]) -> Job:
    """The job with the numbered lines of a complete text."""
    job = dataclasses.replace(job, lines=script_lines(job, numbered))
    if len(job.lines) > 1 and not job.join and not goes_to_file(job.output):
        raise ValueError(f"{len(job.lines)} utterances cannot go to stdout one by one: add --join")
    return job


def script_lines(job: Job, numbered: list[tuple[int, str]]) -> list[list[Part]]:
    """The parts of each line that has words. A pause on a line of its own is added to the next line."""
    if job.plain:
        return [[Part(line.replace("\n", " "), line=number)] for number, line in numbered]
    lines, pending = [], []
    for parts in read_lines(numbered, job.script, job.check_voice):
        pending += parts
        if any(part.text for part in parts):
            lines.append(pending)
            pending = []
    if not lines:
        raise ValueError("the script has no words: give something to say")
    lines[-1] += pending
    return lines


def output_of(args: argparse.Namespace) -> tuple[Path, str | None, int | None]:
    """The file to write, - for stdout or PLAYED_ONLY; its format, if --format names one; and its sample rate, if it is
    not the model's."""
    output = args.output
    if args.play:
        sound_device()
        if output is None and (args.format or args.sample_rate is not None):
            raise ValueError("--format and --sample-rate are for a file: give --output, too, or leave them out")
        output = output or PLAYED_ONLY
    if output is None and args.resume:
        raise ValueError("--resume needs the --output of the run that was interrupted: give it")
    if output is None:
        output = free_name(OUTPUT.with_suffix(suffix_of(args.format)))
    if args.resume and (args.stream or not goes_to_file(output)):
        raise ValueError("--resume keeps the finished utterances of a file: leave it out with --stream and --output -")
    if str(output) == "-" and sys.stdout is None:
        raise ValueError("--output - writes to stdout, which is closed: pipe it into a player")
    check_writable(output, *args.inputs)
    return output, *format_and_rate(output, args.format, args.sample_rate)


def check_subtitles(args: argparse.Namespace) -> None:
    path = args.subtitles
    if path is None:
        return
    if path.suffix.lower() not in SUBTITLE_SUFFIXES:
        raise ValueError(
            f"cannot write {path}: subtitles end in one of {', '.join(SUBTITLE_SUFFIXES)}: choose another name"
        )
    if os.path.realpath(path) == os.path.realpath(args.output):
        raise ValueError(f"cannot write {path}: it is the --output: choose another --subtitles")
    check_writable(path, *args.inputs, option="--subtitles")


def free_name(path: Path) -> Path:
    """This name, or one with a number if the file, its folder of parts or its numbered utterances exist."""

    def is_taken(name: Path) -> bool:
        return any([*path.parent.glob(f"{name.name}*"), *path.parent.glob(f"{name.stem}-[0-9][0-9][0-9]{name.suffix}")])

    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not is_taken(name))


def goes_to_file(output: Path) -> bool:
    return str(output) != "-" and not is_special(output)
