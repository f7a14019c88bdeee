"""The token ids of a text that is still arriving which no further text can change.

The tokenizer itself does the work. This file decides how much of its result is final. Qwen's tokenizer has four steps,
and each is a reason to wait:

    added tokens    "<|im_e" may become <|im_end|>: wait from a "<" that may begin one
    NFC             "e" becomes "é" when a combining accent follows: wait from the last character that can change
    pre-tokens      words, digits, punctuation, whitespace: only the last one can grow. A run of whitespace is split
                    depending on what follows it.
    BPE             further text can change the tokens inside the last pre-token: see `stable_prefix`
"""

import bisect
import functools
import json
import os
import unicodedata

import tokenizers

# The pre-tokens that this file relies on, as transformers' PRETOKENIZE_REGEX defines them.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LONGEST_TAIL = 256  # characters; a shorter tail is encoded again with each piece
LONG_PRE_TOKEN = 64  # characters after which a pre-token is cut; words are shorter


def use_qwens_pre_tokens(tokenizer) -> None:
    """Restore Qwen's: upstream passes fix_mistral_regex=True, with which transformers 4.57 installs Mistral's."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer[0] = split


class IncrementalTokenizer:
    """`push` text, then read `ids`: a prefix of the ids that the whole text will have."""

    def __init__(self, tokenizer, text: str = ""):
        self.rules = rules_of(tokenizer)
        self.settled = []  # ids of the text before `tail`
        self.tail = ""
        self.wait_for = 0  # characters that the tail must have before it is encoded again
        self.ids = []
        self.push(text)

    def push(self, piece: str) -> None:
        self.tail += piece
        if len(self.tail) < self.wait_for:
            return
        before, inside, length = self.rules.final_ids(self.tail)
        self.ids = max(self.ids, self.settled + before + inside, key=len)  # both are final
        # Drop settled text from the tail, so that a long text takes no longer per piece than a short one.
        unsettled = self.tail
        start, rest = self.tail[:length], self.tail[length:]
        if start and not may_combine(rest[0]) and self.rules.encode(start).ids == before:
            self.settle(before, length)
        elif length == 0 and len(self.tail) > LONG_PRE_TOKEN:
            self.settle(*self.rules.cut_inside(self.tail, inside))
        # Endless accents or whitespace never settle. Try again when there is more of the tail, in growing steps.
        is_stuck = len(self.tail) > LONGEST_TAIL and self.tail == unsettled
        self.wait_for = len(self.tail) * 9 // 8 if is_stuck else 0

    def settle(self, ids: list[int], length: int) -> None:
        self.settled += ids
        self.tail = self.tail[length:]


@functools.lru_cache(maxsize=4)
def rules_of(tokenizer) -> "Rules":
    """The Rules of a tokenizer. Cached, as sorting a vocabulary takes 0.1 s."""
    return Rules(tokenizer.backend_tokenizer)


class Rules:
    """How much of a tokenizer's result is final."""

    def __init__(self, backend):
        check_tokenizer(backend)
        self.backend = backend
        self.added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self.starts_of_added = {content[:end] for content in self.added for end in range(1, len(content))}
        self.vocabulary = sorted(backend.get_vocab(with_added_tokens=False))
        self.longest = max(map(len, self.vocabulary))

    def encode(self, text: str):
        return self.backend.encode(text, add_special_tokens=False)

    def final_ids(self, text: str) -> tuple[list[int], list[int], int]:
        """The final ids of complete pre-tokens, those inside the next pre-token, and where that one begins."""
        start = text.rfind("<")
        if start >= 0 and text[start:] in self.starts_of_added:
            text = text[:start]
        if not text:
            return [], [], 0

        encoding = self.encode(text)
        starts, ids, symbols = [], [], []  # of each pre-token; it has one symbol per byte
        for token_id, token, word, (offset, _) in zip(
            encoding.ids, encoding.tokens, encoding.word_ids, encoding.offsets
        ):
            if word == len(starts):
                starts.append(offset)
                ids.append([])
                symbols.append("")
            ids[-1].append(token_id)
            symbols[-1] += token

        # Hold back the last pre-token, those that NFC can still change, and a run of whitespace at the end.
        changeable = len(self.symbols(text[last_nfc_boundary(text) :]))
        held = len(ids) - 1
        inside = symbols[held][:-changeable]
        while held > 0 and (changeable > len("".join(symbols[held:])) or text[starts[held - 1] :].isspace()):
            held -= 1
            inside = ""
        if text[starts[held] :].isspace() or symbols[held] in self.added:
            inside = ""
        before = [token_id for word in ids[:held] for token_id in word]
        return before, self.stable_prefix(inside), starts[held]

    def cut_inside(self, text: str, final: list[int]) -> tuple[list[int], int]:
        """Where to cut a pre-token between two of its final ids: the ids before the cut, and its place in the text.

        BPE has merged nothing across the cut, so both sides have the ids that they have alone. The right side must
        begin with the same kind of characters as the pre-token, or the text would be split differently from there on.
        """
        offsets = self.encode(text).offsets
        for count in range(min(len(final), len(offsets) - 1), 0, -1):
            end, place = offsets[count - 1][1], offsets[count][0]
            is_between_characters = end == place and not may_combine(text[place])
            if is_between_characters and is_inside_run(text, place):
                is_the_same = self.encode(text[:place]).ids == final[:count]
                return (final[:count], place) if is_the_same else ([], 0)
        return [], 0

    def symbols(self, text: str) -> str:
        """The text in the vocabulary's notation, one character per byte."""
        return "".join(self.encode(text).tokens)

    def stable_prefix(self, symbols: str) -> list[int]:
        """The first ids of a pre-token that begins with these symbols, whatever follows them in it.

        In the final ids one token reaches across the end of `symbols`, or begins there. BPE does not merge across the
        start of that token, so the symbols before it have the ids that they have alone. Each possible start of such a
        token gives one possible encoding. The prefix that all of them share is final.
        """
        stable = None
        for start in range(max(0, len(symbols) - self.longest), len(symbols) + 1):
            if self.begins_token(symbols[start:]):
                ids = [token.id for token in self.backend.model.tokenize(symbols[:start])]
                stable = ids if stable is None else os.path.commonprefix([stable, ids])  # works for any lists
                if not stable:
                    break
        return stable

    def begins_token(self, symbols: str) -> bool:
        """Whether the vocabulary has a longer token that begins with these symbols."""
        following = bisect.bisect_right(self.vocabulary, symbols)
        return following < len(self.vocabulary) and self.vocabulary[following].startswith(symbols)


def check_tokenizer(backend) -> None:
    """Refuse a tokenizer with other steps."""
    normalizer, pre_tokenizer = (
        json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer)
    )
    steps = pre_tokenizer.get("pretokenizers", [{}])
    model = backend.model
    tokens = backend.get_added_tokens_decoder().values()
    is_known = (
        normalizer == {"type": "NFC"}
        and [step.get("type") for step in steps] == ["Split", "ByteLevel"]
        and steps[0]["pattern"] == {"Regex": QWEN_PATTERN}
        and isinstance(model, tokenizers.models.BPE)
        and not (model.dropout or model.ignore_merges or model.byte_fallback)
        and all(token.content.rfind("<") == 0 for token in tokens)
        and not any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in tokens)
    )
    if not is_known:
        raise ValueError("this model's tokenizer is not Qwen3-TTS's own: give the whole text at once")


def last_nfc_boundary(text: str) -> int:
    """The place of the last character that cannot combine with an earlier one. What precedes it is final in NFC."""
    boundary = len(text) - 1
    while boundary > 0 and may_combine(text[boundary]):
        boundary -= 1
    return boundary


def may_combine(character: str) -> bool:
    """Whether NFC may combine this character with an earlier one. An unassigned one may become a mark in Unicode."""
    is_mark = unicodedata.category(character) in ("Mn", "Mc", "Me", "Cn")
    is_hangul = "\u1160" <= character <= "\u11ff"  # vowels and final consonants
    is_kirat_rai = character in "\U00016d63\U00016d67"  # vowel signs that are letters
    return is_mark or is_hangul or is_kirat_rai


def is_inside_run(text: str, place: int) -> bool:
    """Whether there are letters on both sides of a place, or punctuation: one mark before it and two behind, as a
    single mark may become one pre-token with a letter that follows."""
    kinds = [unicodedata.category(character)[0] for character in text[place - 1 : place + 2]]
    return kinds[:2] == ["L", "L"] or (len(kinds) == 3 and set(kinds) <= {"P", "S"})
