"""A lexicon: replaces whole words of a text by how to say them, also while the text is still arriving."""

import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from qwen3_tts_cuda_graphs.prompts.checks import check_encodable

MAX_ENTRIES = 10_000
MAX_WORD = 100  # characters
MAX_REPLACEMENT = 500
WITHOUT_SPACES = "CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"  # scripts without word spaces


class Lexicon:
    """Where several entries match, the longest is replaced. An entry in lower case matches any case, and its
    replacement takes the case of the text. Any other entry matches itself alone. ' and ’ are equal."""

    def __init__(self, entries: dict[str, str], max_entries: int = MAX_ENTRIES):
        self.entries = {straight(word): said for word, said in check_entries(entries, max_entries).items()}
        self.longest = max(map(len, self.entries), default=0)
        self.beginnings = {word[:size] for word in map(lower, self.entries) for size in range(1, len(word) + 1)}

    def replace(self, text: str) -> str:
        return "".join(LexiconReader(self).read(text, is_end=True)) if self.entries else text

    def follow(self, pieces: Iterable[str]) -> Iterator[str]:
        """`replace` for a text that is still arriving, in pieces."""
        reader = LexiconReader(self)
        for piece in pieces:
            yield from reader.read(piece)
        yield from reader.read("", is_end=True)

    def find(self, text: str, lowered: str, start: int) -> tuple[int, str] | None:
        """The longest entry that begins at `start`: where it ends in the text, and its replacement."""
        found, end = None, start + 1
        while end <= len(text) and lowered[start:end] in self.beginnings:
            word = straight(text[start:end])
            said = self.entries.get(word) or self.entries.get(lowered[start:end])
            if said and not is_within_word(text, end):
                found = end, said if word in self.entries else in_case_of(word, said)
            end += 1
        return found


def load_lexicon(path: Path | None) -> Lexicon:
    """The lexicon in a file, or an empty one without a file."""
    if path is None:
        return Lexicon({})
    try:
        return read_lexicon(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise ValueError(f"cannot read the lexicon {path}: {reason}: give another --lexicon") from None


def read_lexicon(text: str, name: str) -> Lexicon:
    """A lexicon of lines with a word, a tab and how to say it. Empty lines and those that begin with # are skipped.

    name: of the file, for errors
    """
    entries = {}
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        word, tab, said = line.strip().partition("\t")
        if not word or word.startswith("#"):
            continue
        try:
            if not tab:
                raise ValueError("there is no tab between the word and how to say it")
            entries |= check_entries({word: said}, max_entries=1)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}: write word<TAB>how to say it") from None
    try:
        return Lexicon(entries)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class LexiconReader:
    """Replaces words in pieces of a text. A word is yielded once no further text can make it longer."""

    def __init__(self, lexicon: Lexicon):
        self.lexicon = lexicon
        self.before = ""  # the last character that was yielded
        self.text = ""  # not yielded yet

    def read(self, piece: str, is_end: bool = False) -> Iterator[str]:
        return (said for said, _ in self.read_pairs(piece, is_end))

    def read_pairs(self, piece: str, is_end: bool = False) -> Iterator[tuple[str, str]]:
        """Pairs of the text to speak and the text as it was written."""
        text = self.before + self.text + piece
        lowered = lower(text)
        place, given = len(self.before), len(self.before)
        while place < len(text):
            if is_within_word(text, place):
                place += 1
                continue
            may_grow = not is_end and len(text) - place <= self.lexicon.longest
            if may_grow and lowered[place:] in self.lexicon.beginnings:
                break
            if found := self.lexicon.find(text, lowered, place):
                if given < place:
                    yield text[given:place], text[given:place]
                yield found[1], text[place : found[0]]
                place = given = found[0]
            else:
                place += 1
        if given < place:
            yield text[given:place], text[given:place]
        self.before, self.text = text[place - 1 : place] if place else "", text[place:]


def check_entries(entries: dict[str, str], max_entries: int) -> dict[str, str]:
    """The entries without the spaces around them, if all of them are good."""
    if len(entries) > max_entries:
        raise ValueError(f"the lexicon has {len(entries)} entries, at most {max_entries} are possible: remove some")
    checked = {}
    for word, said in entries.items():
        checked[check_entry("word", word, MAX_WORD)] = check_entry("replacement", said, MAX_REPLACEMENT)
    return checked


def check_entry(what: str, text: str, max_length: int) -> str:
    text = text.strip()
    if not text:
        raise ValueError(f"a {what} is empty")
    check_encodable(text, f"a {what}")
    if len(text) > max_length:
        raise ValueError(f"the {what} {text[:20]!r}... has {len(text)} characters, at most {max_length} are possible")
    return text


def is_within_word(text: str, place: int) -> bool:
    """Whether the characters before and after a place belong to one word."""
    return 0 < place < len(text) and belongs_to_word(text[place - 1]) and belongs_to_word(text[place])


@lru_cache(1 << 16)
def belongs_to_word(character: str) -> bool:
    """Whether it is a letter, digit or mark of a script with spaces between words."""
    if not (character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"):
        return False
    return not unicodedata.name(character, "").startswith(WITHOUT_SPACES)


def straight(text: str) -> str:
    return text.replace("’", "'")


def lower(text: str) -> str:
    """The text in lower case, of the same length: a character whose lower case has two stays as it is."""
    return "".join(small if len(small := character.lower()) == 1 else character for character in straight(text))


def in_case_of(word: str, said: str) -> str:
    """The replacement in the case of the word: all capitals, a capital first, or unchanged."""
    if sum(map(str.isalpha, word)) > 1 and word.isupper():
        return said.upper()
    return said[0].upper() + said[1:] if word[0].isupper() else said
