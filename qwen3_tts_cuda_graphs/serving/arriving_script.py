"""A script whose text is still arriving. Each of its parts can be spoken before its text is complete."""

import asyncio
import bisect
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from qwen3_tts_cuda_graphs.prompts.cut import WORD, end_after_bytes
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon, LexiconReader
from qwen3_tts_cuda_graphs.prompts.notation import ENDS, Notation, Tag
from qwen3_tts_cuda_graphs.prompts.script import Part
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions


class ArrivingPart:
    """A part whose text is still arriving: `written` by the client, and as it is `said`, after applying the lexicon."""

    def __init__(self, part: Part, lexicon: Lexicon, is_stripped: bool = False):
        """is_stripped: whether spaces around the text are removed, as beside a tag"""
        self.part = part
        self.reader = LexiconReader(lexicon)
        self.is_stripped = is_stripped
        self.spaces = ""  # at the end of the text, held back until something follows them
        self.said = ""
        self.written = ""
        self.ends = [(0, 0)]  # the end of each piece: its positions in `said` and in `written`
        self.taken = 0  # how many characters of `said` have been given to the model
        self.is_complete = False
        self.begins_line = True  # no tag precedes it in its line
        self.is_line = False  # it consists of whole lines: then punctuation without a word is spoken, too
        self.hit_max_new_tokens = False  # the speech ended at the client's own limit before the end of the text

    def add(self, text: str, is_end: bool = False) -> None:
        text = self.spaces + text
        text = text.lstrip() if self.is_stripped and not (self.written or self.reader.text) else text
        self.spaces = text[len(text.rstrip()) :] if self.is_stripped or not is_end else ""
        text = text.removesuffix(self.spaces)
        for said, written in self.reader.read_pairs(text, is_end):
            self.said += said
            self.written += written
            self.ends.append((len(self.said), len(self.written)))
        self.is_complete = is_end

    def written_until(self, position: int) -> int:
        """The position in `written` of a position in `said`. Within a replaced word, it is the end of that word."""
        start = end = self.ends[-1]  # of the piece that contains it
        index = bisect.bisect_left(self.ends, (position, 0))
        if index < len(self.ends):
            start, end = self.ends[max(index - 1, 0)], self.ends[index]
        (said_start, written_start), (said_end, written_end) = start, end
        is_replaced = said_end - said_start != written_end - written_start
        return written_end if is_replaced else min(written_start + position - said_start, written_end)

    def taken_since(self, start: int) -> str:
        """The client's text from a position in `said` up to `taken`."""
        return self.written[self.written_until(start) : self.written_until(self.taken)]

    @property
    def rest(self) -> str:
        return self.said[self.taken :]

    def has_words(self) -> bool:
        return bool(WORD.search(self.rest))

    def is_spoken(self) -> bool:
        """Whether a complete part still has something to speak."""
        return self.has_words() or (self.is_line and self.taken == 0 and bool(self.rest.strip()))


class ArrivingScript:
    """The text of an utterance of a WebSocket, from its first words to input.done or input.cancel."""

    def __init__(self, options: SpeechOptions, lexicon: Lexicon):
        self.lexicon = lexicon
        self.is_play = options.script
        self.notation = Notation(options.script) if options.notation else None
        self.text = ""  # all text that has arrived
        self.half = ""  # the first half of a surrogate pair, if the second half has not arrived yet
        self.parts = [ArrivingPart(Part(""), lexicon)]
        self.begins_line = True  # the next text or tag begins a line
        self.mistake = None  # an ApiError about a wrong tag, before which the parts end
        self.is_complete = False
        self.early_end = {}  # {"cancelled": True}, {"error": True} or both, if nothing more is spoken
        self.changed = asyncio.Event()

    # ---- Adding text

    def add(self, text: str, is_end: bool = False) -> None:
        self.text += text
        try:
            if self.mistake is None:
                for item in self.notation.read(text, is_end) if self.notation else filter(None, [text]):
                    self.add_item(item)
        except ValueError as error:
            self.mistake = ApiError(str(error), param="input", code="invalid_value")
            self.parts[-1].is_stripped = True
        if is_end or self.mistake:
            self.end_part(ends_line=True)
        self.is_complete = is_end
        self.changed.set()

    def add_item(self, item: str | Tag) -> None:
        last = self.parts[-1]
        ends_line = self.begins_line
        self.begins_line = isinstance(item, str) and item[-1] in ENDS
        if isinstance(item, str):
            last.add(item)
            last.begins_line = last.begins_line or (self.begins_line and not last.said.strip())
            if not (self.is_play and self.begins_line):
                return
            ends_line = True
        last.is_stripped = True
        self.end_part(ends_line)
        if last.is_spoken() or last.taken:
            part = replace(last.part, pause=None)
        else:  # several tags before the first word of a part are combined
            part = self.parts.pop().part
        part = replace(part.after(item), line=item.line) if isinstance(item, Tag) else part
        self.parts.append(ArrivingPart(part, self.lexicon, is_stripped=True))
        self.parts[-1].begins_line = self.begins_line

    def end_part(self, ends_line: bool) -> None:
        self.parts[-1].add("", is_end=True)
        self.parts[-1].is_line = self.parts[-1].begins_line and ends_line

    def finish(self) -> None:
        self.add("", is_end=True)

    def stop(self, reason: str) -> None:
        """Stop speaking. reason: cancelled or error"""
        self.early_end[reason] = True
        self.changed.set()

    # ---- Speaking it

    async def wait_until(self, condition: Callable[..., bool], *arguments) -> None:
        while not condition(*arguments):
            self.changed.clear()
            await self.changed.wait()

    async def parts_to_speak(self) -> AsyncIterator[ArrivingPart]:
        """Yields each part when it has a word or is complete."""
        for number in itertools.count():
            await self.wait_until(self.is_settled, number)
            if self.early_end or number == len(self.parts):
                return
            yield self.parts[number]

    def is_settled(self, number: int) -> bool:
        """Whether speaking the part of this number can begin, or it is certain that there is none."""
        if self.early_end:
            return True
        if number == len(self.parts):
            return self.is_complete or self.mistake is not None
        return self.parts[number].is_complete or self.parts[number].has_words()

    async def has_more(self, part: ArrivingPart) -> bool:
        """Whether a part has something to speak. Waits for text until the part is complete."""
        await self.wait_until(lambda: part.is_complete or part.has_words() or part.hit_max_new_tokens or self.early_end)
        return part.is_spoken() and not (part.hit_max_new_tokens or self.early_end)

    async def pieces(self, part: ArrivingPart, max_bytes: int | None = None) -> AsyncIterator[str]:
        """Yields `said` as it arrives, until it is complete; with max_bytes, until a sentence end near that size.

        Yields nothing after an early end of the utterance: text that arrives then must not count as spoken.
        """
        start, end = part.taken, None
        while end is None and not (part.is_complete and not part.rest):
            await self.wait_until(lambda: part.is_complete or part.rest or self.early_end)
            if self.early_end:
                return
            end = max_bytes and end_after_bytes(part.said, start, max_bytes)
            piece = part.said[part.taken : end]
            part.taken += len(piece)
            if piece:
                yield piece

    def unspoken_characters(self) -> int:
        """How many characters were not spoken because of the client's max_new_tokens."""
        return sum(len(part.rest) for part in self.parts if part.hit_max_new_tokens and part.has_words())
