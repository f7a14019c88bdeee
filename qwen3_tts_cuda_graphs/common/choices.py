"""The names that a message offers to choose from. Imports nothing that takes time."""

import difflib
from collections.abc import Iterable


def nearest(word: str | None, known: Iterable[str]) -> str:
    """The known words that look like this one; if there are none, all."""
    return ", ".join(difflib.get_close_matches(str(word).lower(), known) or sorted(known))


def one_of(names: Iterable) -> str:
    *names, last = map(str, names)
    return f"{', '.join(names)} or {last}"
