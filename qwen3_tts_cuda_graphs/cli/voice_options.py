"""--speaker, --voice, --ref-audio and the others that say whose voice it is, checked as far as torch is not needed."""

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
    """A name, speaker files, or NAME=FILE, which names a voice of the script and may be given again. Words that follow
    are the text."""

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
class OneVoice:
    """Whose voice it is: one of these, or none of them for a VoiceDesign model."""

    speaker: str | None = None  # of a CustomVoice model
    files: tuple[str, ...] = ()  # speaker files, mixed
    weights: tuple[float, ...] = ()
    ref_audio: Path | None = None
    ref_text: str | None = None
    silence: float = REFERENCE_SILENCE  # seconds between them and the speech
    # Samples and rate of the recording. speaking.py puts the voice of the files here.
    content: tuple | list | dict | None = dataclasses.field(default=None, repr=False)

    @property
    def paths(self) -> list[Path]:
        """What is read."""
        return [*map(Path, self.files), *([self.ref_audio] if self.ref_audio else [])]


def is_file(speaker: str | None) -> bool:
    """Whether --speaker is a file, or was meant to be one."""
    return bool(speaker) and (speaker.lower().endswith((".pt", *RECORDING_SUFFIXES)) or os.path.isfile(speaker))


def is_recording(name: str) -> bool:
    return name.lower().endswith(RECORDING_SUFFIXES)


def clones(asked: argparse.Namespace) -> bool:
    """Whether a voice is to be cloned."""
    named = any(is_file(value) or read_mix(value) for value in asked.voices.values())
    return bool(named or asked.ref_audio or asked.ref_text or any(map(is_file, asked.speaker or [])))


def check_voice_pairs(asked: argparse.Namespace) -> None:
    """Options that mean something only beside another one."""
    for speaker in asked.speaker or []:
        if is_recording(speaker):
            raise ValueError(f"{speaker} is a recording, not a speaker: give it as --ref-audio {speaker}")
    if asked.weights is not None and len(asked.speaker or []) < 2:
        raise ValueError("--weights are those of several speaker files: give --speaker a.pt b.pt, or leave them out")
    if asked.weights is not None:
        try:
            normalized_weights(asked.weights, len(asked.speaker))
        except ValueError as error:
            raise ValueError(f"--weights: {error}") from None
    if asked.ref_text is not None and asked.ref_audio is None:
        raise ValueError("--ref-text is the transcript of --ref-audio: give that recording, too, or leave it out")
    if asked.ref_text is not None and not asked.ref_text.strip():
        raise ValueError("--ref-text is empty: give the transcript of --ref-audio, or leave it out")
    if asked.no_append_silence and asked.ref_text is None:
        raise ValueError("--no-append-silence is for a recording with its transcript: give --ref-text, or leave it out")


def voices_of(asked: argparse.Namespace, model: str, config: dict) -> dict:
    """The voices that the options describe, as fields of a Job, if this model can speak with them."""
    kind, speakers = config["tts_model_type"], config["talker_config"]["spk_id"]
    speaker = asked.speaker[0] if asked.speaker else None
    instruct = asked.instruct

    def check_kind(option: str, value, *kinds: str, size: str = "") -> None:
        if value and kind not in kinds:
            models = " or ".join(name for other in kinds for name in MODELS_OF_KIND[other] if size in name)
            raise ValueError(f"{option} is not for {model}, {KINDS[kind]}: use it with --model {models}")

    def kinds_for(name: str | None) -> list[str]:
        """Kinds of models that may know this voice."""
        if str(name).lower() in speakers:
            return ["base", "custom_voice"]
        if is_file(name) or (name and read_mix(name)):
            return ["base"]
        return ["custom_voice"] if str(name).lower() in SPEAKERS else ["base", "custom_voice"]

    check_kind("--ref-audio", asked.ref_audio, "base")
    check_kind("--ref-text", asked.ref_text, "base")
    check_kind("--instruct", instruct, "custom_voice", "voice_design", size="1.7B")
    check_kind(f"--speaker {speaker}", speaker, *kinds_for(speaker))
    voices = {}
    for name, value in asked.voices.items():
        check_kind(f"--voice {name}={value}", True, *kinds_for(value))
        if kind == "custom_voice":
            check_choice("speaker", value, speakers)
        voices[name] = OneVoice(speaker=value) if kind == "custom_voice" else voice_in_file(value)
    if kind == "base":
        voices[None] = cloned_voice(asked, model, voices)
    elif kind == "custom_voice":
        speaker = min(speakers, default=None) if speaker is None else speaker
        check_choice("speaker", speaker, speakers)
        if instruct and not takes_instructions(kind, config.get("tts_model_size")):
            raise ValueError(
                f"--instruct is not for {model}, whose speakers take no instruction: use it with --model "
                "1.7B-CustomVoice"
            )
        voices[None] = OneVoice(speaker=speaker)
    else:
        instruct = instruct or DESCRIPTION
        voices[None] = OneVoice()
    return dict(voices=voices, instruct=instruct)


def cloned_voice(asked: argparse.Namespace, model: str, voices: dict) -> OneVoice:
    """The voice of all that has none of its own."""
    own = Path(model) / "speaker.pt"
    if asked.speaker is None and asked.ref_audio is None and asked.ref_text is None:
        if own.is_file():
            return OneVoice(files=(str(own),), weights=(1.0,))
        if voices:
            return next(iter(voices.values()))
    if (asked.speaker is None) == (asked.ref_audio is None):
        raise ValueError(
            f"{model} clones a voice: give it --ref-audio voice.wav or --speaker speaker.pt (made "
            "with qwen3-tts clone), one of the two, or use --model 0.6B-CustomVoice, which has voices"
        )
    if asked.ref_audio is None:
        weights = asked.weights or [1.0] * len(asked.speaker)
        return voice_in_file(*asked.speaker) if len(weights) == 1 else mixed_voice(asked.speaker, weights)
    recording = read_recording(asked.ref_audio)
    frames = int(len(recording[0]) / recording[1] * FRAME_RATE)
    if asked.ref_text and frames >= asked.max_seq_len:  # with a transcript it takes one position of the cache per frame
        raise ValueError(
            f"{asked.ref_audio} takes {frames} positions, the cache has {asked.max_seq_len}: give a shorter recording, "
            "or a larger --max-seq-len"
        )
    silence = 0.0 if asked.no_append_silence else REFERENCE_SILENCE
    return OneVoice(ref_audio=asked.ref_audio, ref_text=asked.ref_text, silence=silence, content=recording)


def voice_in_file(value: str) -> OneVoice:
    """A speaker file, a recording, or speaker files with weights, as in a.pt:0.7,b.pt:0.3."""
    if is_recording(value):
        return OneVoice(ref_audio=Path(value), content=read_recording(Path(value)))
    mix = [] if os.path.isfile(value) else read_mix(value)
    return mixed_voice(*zip(*mix)) if mix else mixed_voice([value], [1.0])


def mixed_voice(files: Iterable[str], weights: Iterable[float]) -> OneVoice:
    files = tuple(files)
    for file in files:
        check_speaker_file(file)
    return OneVoice(files=files, weights=tuple(normalized_weights(weights, len(files))))


def read_recording(path: Path) -> tuple:
    from qwen3_tts_cuda_graphs.common.recording_files import read_audio  # imports numpy

    return read_audio(path)


def check_choice(what: str, word: str | None, known: Iterable[str]) -> None:
    """Refuse a word that is not known, and offer the nearest."""
    if str(word).lower() not in {name.lower() for name in known}:
        found = f"there is no {what} {word!r}" if word else f"no --{what} was given"
        raise ValueError(f"{found}: choose {nearest(word, known)} (--list-{what}s shows all)")
