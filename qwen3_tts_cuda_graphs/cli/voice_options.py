"""Check --speaker, --voice, --ref-audio and the other options that say whose voice it is, as far as possible without
torch."""

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from qwen3_tts_cuda_graphs.common.choices import nearest
from qwen3_tts_cuda_graphs.common.model_config import KINDS
from qwen3_tts_cuda_graphs.common.model_names import split_name
from qwen3_tts_cuda_graphs.common.parser import Once
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE, MODELS_OF_KIND, SPEAKERS
from qwen3_tts_cuda_graphs.common.voice_files import REFERENCE_SILENCE, check_speaker_file, normalized_weights, read_mix
from qwen3_tts_cuda_graphs.prompts.script import takes_instructions

RECORDING_SUFFIXES = tuple(".wav .flac .ogg .oga .opus .mp3 .m4a .aac .aif .aiff .webm .mp4 .wma".split())
DESCRIPTION = "a warm, clear narrator"  # for a VoiceDesign model


class Speakers(Once):
    """The value of --speaker: a name, speaker files, or NAME=FILE, which names a voice of the script and may be given
    several times. Further words are the text."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        first, *others = values
        name, file = split_name(first)
        if name:
            known = namespace.voices.setdefault(name.lower(), file)
            if known != file:
                raise ValueError(f"{option_string} {name} was given twice, {known} and {file}: give one")
            speakers = [first]
        else:
            speakers = [first, *itertools.takewhile(is_file, others)] if is_file(first) else [first]
            super().__call__(parser, namespace, " ".join(speakers), option_string)
            namespace.speaker = speakers
        namespace.more_words += values[len(speakers) :]


@dataclasses.dataclass(frozen=True)
class VoiceOption:
    """A voice: a speaker's name, speaker files or a recording; none of them for a VoiceDesign model."""

    speaker: str | None = None  # of a CustomVoice model
    files: tuple[str, ...] = ()  # speaker files, mixed
    weights: tuple[float, ...] = ()
    ref_audio: Path | None = None
    ref_text: str | None = None
    silence: float = REFERENCE_SILENCE  # seconds between the recording and the speech
    # Samples and rate of the recording; speaking.py puts the voice_clone_prompt of the files here.
    content: tuple | list | dict | None = dataclasses.field(default=None, repr=False)

    @property
    def paths(self) -> list[Path]:
        return [*map(Path, self.files), *([self.ref_audio] if self.ref_audio else [])]


def is_file(speaker: str | None) -> bool:
    """Whether a --speaker is a file, or by its name is meant to be one."""
    return bool(speaker) and (speaker.lower().endswith((".pt", *RECORDING_SUFFIXES)) or os.path.isfile(speaker))


def is_recording(name: str) -> bool:
    return name.lower().endswith(RECORDING_SUFFIXES)


def clones(args: argparse.Namespace) -> bool:
    """Whether the options ask for a cloned voice."""
    named = any(is_file(value) or read_mix(value) for value in args.voices.values())
    return bool(named or args.ref_audio or args.ref_text or any(map(is_file, args.speaker or [])))


def check_voice_pairs(args: argparse.Namespace) -> None:
    """Raise an error for options that need another one."""
    for speaker in args.speaker or []:
        if is_recording(speaker):
            raise ValueError(f"{speaker} is a recording, not a speaker: give it as --ref-audio {speaker}")
    if args.weights is not None and len(args.speaker or []) < 2:
        raise ValueError("--weights are those of several speaker files: give --speaker a.pt b.pt, or leave them out")
    if args.weights is not None:
        try:
            normalized_weights(args.weights, len(args.speaker))
        except ValueError as error:
            raise ValueError(f"--weights: {error}") from None
    if args.ref_text is not None and args.ref_audio is None:
        raise ValueError("--ref-text is the transcript of --ref-audio: give that recording, too, or leave it out")
    if args.ref_text is not None and not args.ref_text.strip():
        raise ValueError("--ref-text is empty: give the transcript of --ref-audio, or leave it out")
    if args.no_append_silence and args.ref_text is None:
        raise ValueError("--no-append-silence is for a recording with its transcript: give --ref-text, or leave it out")


def voices_of(args: argparse.Namespace) -> tuple[dict[str | None, VoiceOption], str | None]:
    """The `voices` and `instruct` of a Job. Raises an error if the model cannot speak with them."""
    model, config = args.model, args.config
    kind, speakers = config["tts_model_type"], config["talker_config"]["spk_id"]
    speaker = args.speaker[0] if args.speaker else None
    instruct = args.instruct

    def check_kind(option: str, value, *kinds: str, size: str = "") -> None:
        if value and kind not in kinds:
            models = " or ".join(name for other in kinds for name in MODELS_OF_KIND[other] if size in name)
            raise ValueError(f"{option} is not for {model}, {KINDS[kind]}: use it with --model {models}")

    def kinds_for(name: str | None) -> list[str]:
        """The kinds of models that may have this voice."""
        if str(name).lower() in speakers:
            return ["base", "custom_voice"]
        if is_file(name) or (name and read_mix(name)):
            return ["base"]
        return ["custom_voice"] if str(name).lower() in SPEAKERS else ["base", "custom_voice"]

    check_kind("--ref-audio", args.ref_audio, "base")
    check_kind("--ref-text", args.ref_text, "base")
    check_kind("--instruct", instruct, "custom_voice", "voice_design", size="1.7B")
    check_kind(f"--speaker {speaker}", speaker, *kinds_for(speaker))
    voices = {}
    for name, value in args.voices.items():
        check_kind(f"--voice {name}={value}", True, *kinds_for(value))
        if kind == "custom_voice":
            check_choice("speaker", value, speakers)
        voices[name] = VoiceOption(speaker=value) if kind == "custom_voice" else voice_in_file(value)
    if kind == "base":
        voices[None] = cloned_voice(args, voices)
    elif kind == "custom_voice":
        speaker = min(speakers, default=None) if speaker is None else speaker
        check_choice("speaker", speaker, speakers)
        if instruct and not takes_instructions(kind, config.get("tts_model_size")):
            raise ValueError(
                f"--instruct is not for {model}, whose speakers take no instruction: use it with --model "
                "1.7B-CustomVoice"
            )
        voices[None] = VoiceOption(speaker=speaker)
    else:
        instruct = instruct or DESCRIPTION
        voices[None] = VoiceOption()
    return voices, instruct


def cloned_voice(args: argparse.Namespace, voices: dict) -> VoiceOption:
    """The voice of parts that name none, for a Base model. voices: those of the script"""
    own = Path(args.model) / "speaker.pt"
    if args.speaker is None and args.ref_audio is None and args.ref_text is None:
        if own.is_file():
            return VoiceOption(files=(str(own),), weights=(1.0,))
        if voices:
            return next(iter(voices.values()))
    if (args.speaker is None) == (args.ref_audio is None):
        raise ValueError(
            f"{args.model} clones a voice: give it --ref-audio voice.wav or --speaker speaker.pt (made "
            "with qwen3-tts clone), one of the two, or use --model 0.6B-CustomVoice, which has voices"
        )
    if args.ref_audio is None:
        return voice_in_file(*args.speaker) if len(args.speaker) == 1 else mixed_voice(args.speaker, args.weights)
    recording = read_recording(args.ref_audio)
    frames = int(len(recording[0]) / recording[1] * FRAME_RATE)
    if args.ref_text and frames >= args.max_seq_len:  # each frame takes a position of the cache
        raise ValueError(
            f"{args.ref_audio} takes {frames} positions, the cache has {args.max_seq_len}: give a shorter recording, "
            "or a larger --max-seq-len"
        )
    silence = 0.0 if args.no_append_silence else REFERENCE_SILENCE
    return VoiceOption(ref_audio=args.ref_audio, ref_text=args.ref_text, silence=silence, content=recording)


def voice_in_file(value: str) -> VoiceOption:
    """The voice of a speaker file, of a recording, or of a mix such as a.pt:0.7,b.pt:0.3."""
    if is_recording(value):
        return VoiceOption(ref_audio=Path(value), content=read_recording(Path(value)))
    mix = [] if os.path.isfile(value) else read_mix(value)
    return mixed_voice(*zip(*mix)) if mix else mixed_voice([value])


def mixed_voice(files: Iterable[str], weights: Iterable[float] | None = None) -> VoiceOption:
    files = tuple(files)
    for file in files:
        check_speaker_file(file)
    return VoiceOption(files=files, weights=tuple(normalized_weights(weights, len(files))))


def read_recording(path: Path) -> tuple:
    from qwen3_tts_cuda_graphs.common.recording_files import read_audio  # imports numpy

    return read_audio(path)


def check_choice(what: str, word: str | None, known: Iterable[str]) -> None:
    """Raise an error for a word that is not known, and suggest similar ones."""
    if str(word).lower() not in {name.lower() for name in known}:
        found = f"there is no {what} {word!r}" if word else f"no --{what} was given"
        raise ValueError(f"{found}: choose {nearest(word, known)} (--list-{what}s shows all)")
