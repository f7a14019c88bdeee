"""The notation of scripts: tags in a text that say how to speak it.

    [pause 0.8]   [pause:0.8s]   [pause 800ms]   <break time="800ms"/>    silence
    [voice aiden]          another voice from here on; [voice]: back to the request's voice
    [style: whispering]    another style from here on; [style]: back to the request's style
    Aiden: Hello!          in a play, a line of this voice

A wrong or unknown tag is an error, and is never spoken. This file imports quickly.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_PAUSE = 60.0  # seconds
MAX_VALUE = 200  # characters of a tag after its name
MAX_WORD = 50  # characters of a tag's name
MAX_TAG = MAX_WORD + MAX_VALUE
MAX_NAME = 64  # characters of a voice's name before a colon

TAGS = "pause", "voice", "style"
ELEMENTS = "break speak prosody emphasis say-as phoneme sub voice audio lang mark".split()  # of SSML

ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # line ends of str.splitlines
SPACES = rf"[^\S{ENDS}]{{0,99}}+"
COMPOUND = r"(?!['’-][a-z])"  # not the first half of a word such as [voice-over]

MARK = re.compile(rf"\[{SPACES}([a-z]{{1,{MAX_WORD}}}+){COMPOUND}([^\[\]{ENDS}]{{0,{MAX_VALUE}}}+)\]", re.IGNORECASE)
ELEMENT = re.compile(rf"<(/?)({'|'.join(ELEMENTS)})\b([^<>{ENDS}]{{0,{MAX_VALUE}}}+)>", re.IGNORECASE)
MAY_BECOME_TAG = re.compile(
    rf"\[{SPACES}(?:[a-z][^\[\]{ENDS}]{{0,{MAX_TAG}}}+\]?)?|</?(?:[a-z][^<>{ENDS}]{{0,{MAX_TAG}}}+)?", re.IGNORECASE
)
UNCLOSED = re.compile(rf"\[{SPACES}(?:{'|'.join(TAGS)})\b{COMPOUND}|</?(?:{'|'.join(ELEMENTS)})\b(?!-)", re.IGNORECASE)
TIME = re.compile(r"""\s*time\s*=\s*(["'])([^"']*)\1\s*/?""", re.IGNORECASE)
SECONDS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|)", re.IGNORECASE | re.ASCII)

SPEAKER = re.compile(rf"{SPACES}([^\W\d_][^:：\[\]<>{ENDS}]{{0,{MAX_NAME - 1}}}+)[:：]")
MAY_BECOME_SPEAKER = re.compile(rf"{SPACES}(?:[^\W\d_][^:：\[\]<>{ENDS}]{{0,{MAX_NAME - 1}}}+)?")
START_OR_LINE = re.compile(rf"[\[<]|(?<=[{ENDS}])")
LINE_END = re.compile(rf"(?!(?<=\r)\n)[{ENDS}]")


@dataclass(frozen=True)
class Tag:
    name: str
    value: float | str | None
    line: int
    ends_style: bool = False  # for a name that begins a line of a play, with no style tag before it in the line


class Notation:
    """Splits the pieces of a text into strings of words, none longer than a line, and tags. Each is yielded as soon as
    no further text can change what it is.

    play: lines may begin with a voice's name and a colon
    check_voice: raises ValueError if there is no voice of that name
    """

    def __init__(self, play: bool = False, line: int = 1, check_voice: Callable[[str], None] | None = None):
        self.play = play
        self.line = line  # number of the line in which the last item begins
        self.check_voice = check_voice
        self.text = ""
        self.place = 0  # the text from here on was not yielded yet: it may become a tag
        self.begins_line = True  # the line has nothing yet that a speaker's name could not follow
        self.has_style = False  # the line has a style tag

    def read(self, piece: str, is_end: bool = False) -> Iterator[str | Tag]:
        """Raises ValueError at a wrong tag, after it has yielded everything before it."""
        known = max(self.place - 1, 0)  # keeps the character before it, which may be the first half of \r\n
        self.text = self.text[known:] + piece
        self.place -= known
        while self.place < len(self.text):
            end, item = self.next_item(is_end)
            if item is None:
                return
            is_end_of_line = self.text[end - 1] in ENDS
            is_before_name = item.isspace() if isinstance(item, str) else item.name != "voice"
            self.begins_line = is_end_of_line or (self.begins_line and is_before_name)
            self.has_style = not is_end_of_line and (self.has_style or (isinstance(item, Tag) and item.name == "style"))
            line_ends = len(LINE_END.findall(self.text, self.place, end))
            self.place = end
            yield item
            self.line += line_ends

    def next_item(self, is_end: bool) -> tuple[int, str | Tag | None]:
        """Where the next item ends, and the item. None: that depends on text that has not come yet."""
        text, start = self.text, self.place
        if self.play and self.begins_line:
            if speaker := SPEAKER.match(text, start):
                return speaker.end(), self.voice(speaker[1].strip(), ends_style=not self.has_style)
            if not is_end and MAY_BECOME_SPEAKER.fullmatch(text, start):
                return start, None
        if text[start] in "[<":
            if not is_end and MAY_BECOME_TAG.fullmatch(text, start):
                return start, None
            if mark := MARK.match(text, start):
                return self.tag(mark)
            if element := ELEMENT.match(text, start):
                return element.end(), self.pause_of(element)
            if unclosed := UNCLOSED.match(text, start):
                raise self.mistake(
                    f"{unclosed[0]} ... does not end: close it in its line, within {MAX_VALUE} characters"
                )
            return start + 1, text[start]
        following = START_OR_LINE.search(text, start + 1)
        end = following.start() if following else len(text)
        return end, text[start:end]

    def tag(self, mark: re.Match) -> tuple[int, str | Tag]:
        name, value = mark[1].lower(), mark[2].strip()
        has_colon = value.startswith((":", "："))
        value = value[has_colon:].lstrip()
        if name == "voice":
            return mark.end(), self.voice(value or None)
        if name == "pause":
            return mark.end(), Tag(name, self.seconds(value, mark[0]), self.line)
        if name == "style":
            return mark.end(), Tag(name, value or None, self.line)
        meant = difflib.get_close_matches(name, TAGS, 1, 0.7)
        is_link = self.text.startswith("(", mark.end())  # of Markdown
        is_words = value and not (has_colon or value[0].isdigit() or meant)  # such as [as he said]
        if is_link or is_words:
            return mark.end(), mark[0]
        known = ", ".join(f"[{tag} ...]" for tag in TAGS)
        hint = f"did you mean [{meant[0]} ...]?" if meant else f"there are {known}"
        raise self.mistake(f"there is no tag {mark[0]}: {hint}")

    def voice(self, name: str | None, ends_style: bool = False) -> Tag:
        if name and self.check_voice:
            try:
                self.check_voice(name)
            except ValueError as error:
                raise ValueError(f"line {self.line}: {error}") from None
        return Tag("voice", name, self.line, ends_style)

    def pause_of(self, element: re.Match) -> Tag:
        if element[1] or element[2].lower() != "break":
            raise self.mistake(f'{element[0]} is not read here: of SSML there is <break time="800ms"/>; remove it')
        time = TIME.fullmatch(element[3])
        if not time:
            raise self.mistake(f'{element[0]} has no time: write <break time="800ms"/>')
        return Tag("pause", self.seconds(time[2].strip(), element[0]), self.line)

    def seconds(self, value: str, tag: str) -> float:
        found = SECONDS.fullmatch(value)
        if not found:
            raise self.mistake(f"{tag} has no seconds: write [pause 0.8]")
        seconds = float(found[1]) / (1000 if found[2].lower() == "ms" else 1)
        if seconds > MAX_PAUSE:
            raise self.mistake(f"{tag} is longer than {MAX_PAUSE:g} s: write several")
        return seconds

    def mistake(self, problem: str) -> ValueError:
        return ValueError(f'line {self.line}: {problem} (notation is off with --plain, or "notation": false)')
