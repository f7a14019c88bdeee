"""The names that an error message suggests. Imports nothing that takes time."""

import difflib
from collections.abc import Iterable


def nearest(word: str | None, known: Iterable[str]) -> str:
    """The known words that are similar to this one, or all of them if none is."""
    return ", ".join(difflib.get_close_matches(str(word).lower(), known) or sorted(known))


def one_of(names: Iterable) -> str:
    """A list such as "8000, 16000 or 24000"."""
    *names, last = map(str, names)
    return f"{', '.join(names)} or {last}"
