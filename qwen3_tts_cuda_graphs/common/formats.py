"""Names of audio formats, those of other programs included, and the sample rates and bit rates that they take.

Imports nothing that takes time: a mistake in --format is answered at once.
"""

import re

from qwen3_tts_cuda_graphs.common.choices import one_of

RATES = 8000, 16000, 22050, 24000, 44100, 48000  # Hz
RATES_OF = {"opus": (8000, 16000, 24000, 48000)}  # for formats that take fewer
TELEPHONE_RATE = 8000  # the default of G.711; all others have the model's rate
SUBTYPES = {"pcm": "PCM_16", "mulaw": "ULAW", "alaw": "ALAW"}  # plain samples -> soundfile's name
BIT_RATES = range(32, 193)  # kbit/s
WITH_BIT_RATE = "mp3", "opus", "aac"
OTHER_NAMES = {
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
    """The format that a name means, its rate, and kbit/s: `mp3_44100_128` has all of them."""
    name = name.strip().lower()
    if numbers := re.fullmatch(r"(.+?)_([0-9]{1,6})(?:_([0-9]{1,6}))?", name):
        name, rate, kilobits = numbers.groups()
        return OTHER_NAMES.get(name, name), int(rate), kilobits and int(kilobits)
    return OTHER_NAMES.get(name, name), None, None


def rate_for(name: str | None, rate: int | None, what: str = "sample_rate") -> int | None:
    """The rate of a format, if it is possible. None: the model's own. what: the field or option that it is from"""
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
