"""Audio formats: their names, also those of other programs, their sample rates and bit rates, and the format of a file.

Imports nothing that takes time, so that a mistake in --format is answered at once.
"""

import re
from pathlib import Path

from qwen3_tts_cuda_graphs.common.choices import one_of
from qwen3_tts_cuda_graphs.common.output_files import is_special

RATES = 8000, 16000, 22050, 24000, 44100, 48000  # Hz
RATES_OF = {"opus": (8000, 16000, 24000, 48000)}  # formats that take fewer rates
TELEPHONE_RATE = 8000  # the default of G.711; the default of all others is the model's rate
SUBTYPES = {"pcm": "PCM_16", "mulaw": "ULAW", "alaw": "ALAW"}  # formats without a header -> soundfile's subtype
BIT_RATES = range(32, 193)  # kbit/s
WITH_BIT_RATE = "mp3", "opus", "aac"
FORMATS = {  # file name extension -> soundfile's format and subtype, and the name that --format takes
    "": ("WAV", "PCM_16", "wav"),
    ".wav": ("WAV", "PCM_16", "wav"),
    ".flac": ("FLAC", "PCM_16", "flac"),
    ".ogg": ("OGG", "VORBIS", None),
    ".opus": ("OGG", "OPUS", "opus"),
    ".mp3": ("MP3", "MPEG_LAYER_III", "mp3"),
    ".pcm": ("RAW", "PCM_16", "pcm"),
    ".ul": ("RAW", "ULAW", "mulaw"),
    ".ulaw": ("RAW", "ULAW", "mulaw"),
    ".al": ("RAW", "ALAW", "alaw"),
    ".alaw": ("RAW", "ALAW", "alaw"),
}
EXTENSIONS = {name: extension for extension, (_, _, name) in FORMATS.items() if name}  # the last of several
FORMAT_ALIASES = {
    "ulaw": "mulaw",
    "pcmu": "mulaw",
    "g711_ulaw": "mulaw",
    "pcma": "alaw",
    "g711_alaw": "alaw",
    "pcm16": "pcm",
    "ogg": "opus",
    "ogg_opus": "opus",
}


def read_format(name: str) -> tuple[str, int | None, int | None]:
    """Read a name such as `mp3_44100_128`: the format, and the sample rate and kbit/s or None."""
    name = name.strip().lower()
    if numbers := re.fullmatch(r"(.+?)_([0-9]{1,6})(?:_([0-9]{1,6}))?", name):
        name, rate, kilobits = numbers.groups()
        return FORMAT_ALIASES.get(name, name), int(rate), kilobits and int(kilobits)
    return FORMAT_ALIASES.get(name, name), None, None


def rate_for(name: str | None, rate: int | None, what: str = "sample_rate") -> int | None:
    """Check and return the sample rate of a format; None is the model's own. what: the field or option to name"""
    if rate is None:
        return TELEPHONE_RATE if name in ("mulaw", "alaw") else None
    possible = RATES_OF.get(name, RATES)
    if rate not in possible:
        of_format = f" with {name}" if name in RATES_OF else ""
        raise ValueError(f"{what} is {rate}{of_format}: choose {one_of(possible)}")
    return rate


def check_bit_rate(name: str | None, kilobits: int | None) -> int | None:
    if kilobits is None:
        return None
    if name not in WITH_BIT_RATE:
        raise ValueError(
            f"bit_rate is {kilobits}, and {name} has none: leave it out, or choose {one_of(WITH_BIT_RATE)}"
        )
    if kilobits not in BIT_RATES:
        raise ValueError(f"bit_rate is {kilobits}, it must be from {BIT_RATES[0]} to {BIT_RATES[-1]} (kbit/s)")
    return kilobits


# ---- Files


def check_format(path: Path, name: str | None = None) -> None:
    """Raise an error if a file cannot be written in the format that --format or its extension names."""
    suffix = path.suffix.lower()
    if name is not None and name not in EXTENSIONS:
        raise ValueError(f"--format is {name or repr(name)}, which is not written here: choose {one_of(EXTENSIONS)}")
    if name is None and suffix not in FORMATS:
        known = ", ".join(extension for extension in FORMATS if extension)
        raise ValueError(f"cannot write {path}: {path.suffix} is not an audio format: choose one of {known}")
    container = format_of(path, name)[0]
    if suffix in FORMATS and suffix and FORMATS[suffix][0] != container:
        raise ValueError(
            f"cannot write {path}: it would not be {suffix} but {name}: call it {path.stem}{EXTENSIONS[name]}"
        )
    if (str(path) == "-" or is_special(path)) and container not in ("WAV", "RAW"):
        raise ValueError(
            f"cannot write {path}: stdout, a pipe or a device takes wav, pcm, mulaw and alaw only: choose another "
            "--output"
        )


def format_of(path: Path, name: str | None = None) -> tuple[str, str]:
    """soundfile's format and subtype of a file. pcm, mulaw and alaw have no header, except in a file named .wav."""
    suffix = path.suffix.lower()
    if suffix == ".wav" and name in SUBTYPES:
        return "WAV", SUBTYPES[name]
    return FORMATS[EXTENSIONS[name] if name else suffix][:2]


def suffix_of(name: str | None) -> str:
    """The extension of the default output file: .wav, unless --format names what a WAV cannot hold."""
    kind = read_format(name)[0] if name else "wav"
    return ".wav" if kind in SUBTYPES else EXTENSIONS.get(kind, ".wav")


def format_and_rate(path: Path, name: str | None, rate: int | None) -> tuple[str | None, int | None]:
    """Check --output, --format and --sample-rate together. Returns the format if --format names one, and the rate if it
    is not the model's."""
    named, own_rate, kilobits = (None, None, None) if name is None else read_format(name)
    if kilobits is not None:
        raise ValueError(f"--format {name} has a bit rate, which only the server takes: give {named}_{own_rate}")
    if None not in (own_rate, rate) and own_rate != rate:
        raise ValueError(f"--format {name} and --sample-rate {rate} are two rates: leave out one of them")
    check_format(path, named)
    kind = named or FORMATS[path.suffix.lower()][2]
    return named, rate_for(kind, own_rate if rate is None else rate, "--sample-rate")
