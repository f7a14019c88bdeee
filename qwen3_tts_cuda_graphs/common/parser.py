"""The command lines' parser: a mistake is a ValueError that says what to do, and suggests an option for a mistyped one.

Imports nothing that takes time.
"""

import argparse
import difflib
import sys
from pathlib import Path

OPTION_ALIASES = {  # option -> its names in other speech programs
    "--speaker": "voice voice-name voice-id speaker-id speaker-idx speaker-name spk v",
    "--output": "out-path out-file output-file output-path write-media save w o",
    "--format": "response-format output-format codec encoding",
    "--sample-rate": "samplerate sampling-rate output-sample-rate sr hz",
    "--text": "input gen-text sentence message t",
    "--text-file": "file input-file gen-file f i",
    "--speed": "rate tempo speaking-rate length-scale r",
    "--ref-audio": "audio input wav speaker-wav reference reference-audio prompt-audio voice-file clone sample",
    "--ref-text": "prompt-text reference-text transcript",
    "--instruct": "instructions instruction style emotion prompt description",
    "--list-speakers": "list-voices voices speakers list-speaker-idxs",
    "--list-languages": "languages list-langs",
    "--language": "lang-code language-code language-idx locale l",
    "--pause": "silence sentence-silence gap",
    "--max-seq-len": "max-new-tokens max-tokens max-length",
    "--model": "model-name model-path model-id checkpoint ckpt m",
    "--device": "gpu cuda use-cuda cpu d",
    "--dtype": "precision half fp16 bf16",
    "--host": "bind listen address ip",
    "--port": "p",
    "--api-key": "key token password auth",
    "--cors-origin": "cors allow-origin origins",
    "--voices": "voice-dir voices-dir",
    "--max-streams": "workers concurrency batch-size max-batch-size",
}


class Once(argparse.Action):
    """An option that may be given once. argparse's own silently takes the last of several values."""

    given = None

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        if self.given not in (None, value):
            raise ValueError(f"{option_string} was given twice, {self.given} and {value}: give one")
        self.given = value
        setattr(namespace, self.dest, value)


def file_name(word: str) -> Path:
    if not word:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("its value is empty: give a name")
    return Path(word)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError. Options take one value only, and the name of a file is not empty."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register("action", None, Once)
        self.register("action", "store", Once)
        self.register("type", Path, file_name)

    def error(self, message: str):
        for word in sys.argv[1:]:
            option = self.option_like(word.partition("=")[0])
            if option:
                raise ValueError(f"there is no {word.partition('=')[0]}: did you mean {option}?")
        if message.endswith("expected one argument"):
            message += ", with = if it begins with -, as in --text=-5"
        raise ValueError(f"{message}: see --help")

    def option_like(self, word: str) -> str | None:
        """The option that an unknown one probably means, by its names in other programs or by a similar spelling."""
        known = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
        is_cut_short = self.allow_abbrev and any(option.startswith(word) for option in self._option_string_actions)
        if not word.startswith("-") or word in self._option_string_actions or is_cut_short:
            return None
        plain = word.lstrip("-").replace("_", "-").lower()
        others = [option for option, names in OPTION_ALIASES.items() if plain in names.split()]
        looks = difflib.get_close_matches(plain, known, 1, cutoff=0.7)
        return next((option for option in others if option in known.values()), known[looks[0]] if looks else None)
