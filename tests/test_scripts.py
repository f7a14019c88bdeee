"""Scripts: tags, plays and lexicons, in complete texts and in texts that arrive letter by letter."""

import random
import time

import numpy as np
import pytest

from qwen3_tts_cuda_graphs.prompts.cut import PAUSE, cut
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon, LexiconReader, read_lexicon
from qwen3_tts_cuda_graphs.prompts.notation import Notation, Tag
from qwen3_tts_cuda_graphs.prompts.script import Cue, Part, cut_parts, read_lines, read_script, silence_before
from qwen3_tts_cuda_graphs.speech.long_text import stream_script
from qwen3_tts_cuda_graphs.speech.streaming import stream


def in_letters(reader, text):
    """The items that a reader yields for a text that comes letter by letter, with adjacent strings joined."""
    items = [item for letter in text for item in reader.read(letter)] + [*reader.read("", is_end=True)]
    return joined(items)


def joined(items):
    result = []
    for item in items:
        if isinstance(item, str) and result and isinstance(result[-1], str):
            result[-1] += item
        else:
            result.append(item)
    return result


PLAIN = [
    "Hello there.",
    "See [1] and [2, 3], a < b, <3, <b>bold</b>, x[0] = 2 [as the king said], [link](http://a.b), [] and [",
    "a [broken bracket, and [another",
    "[他说] 你好。",
    "two\nlines\n",
    "< break time",
    "[\npause 1]",
    "[voice-over] and [style-wise], 【pause 1】",
]


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_tags_is_one_part_as_it_is(text):
    assert read_script(text) == [Part(text)]
    assert "".join(in_letters(Notation(), text)) == text


@pytest.mark.parametrize(
    "tag, seconds",
    [
        ("[pause 0.8]", 0.8),
        ("[pause:0.8s]", 0.8),
        ("[pause: 800 ms]", 0.8),
        ("[ PAUSE .8 ]", 0.8),
        ("[pause0.8]", 0.8),
        ("[pause：0.8]", 0.8),
        ('<break time="800ms"/>', 0.8),
        ("<Break Time='0.8s' >", 0.8),
        ("[pause 60]", 60),
        ("[pause 0]", 0),
    ],
)
@pytest.mark.parametrize("before, after", [("Hello. ", " World."), ("Hel", "lo"), ("你好", "世界")])
def test_pauses(before, tag, seconds, after):
    expected = [Part(before.strip()), Part(after.strip(), pause=seconds)]
    assert read_script(before + tag + after) == expected
    assert in_letters(Notation(), before + tag + after) == [before, Tag("pause", seconds, 1), after]


def test_what_a_script_says():
    text = "[pause 1]One.\n[voice aiden][style: whispering] Two.[pause 1] [pause 0.5] Three.\n\n"
    text += "[voice] Four. [pause 2]\nFive."
    assert read_script(text) == [
        Part("One.", pause=1),
        Part("Two.", "aiden", "whispering", line=2),
        Part("Three.", "aiden", "whispering", 1.5, 2),
        Part("Four.", None, "whispering", line=4),
        Part("", None, "whispering", 2, 4),
        Part("Five.", None, "whispering", line=5),
    ]
    parts = read_script(text)
    silences = [silence_before(part, previous) for previous, part in zip([None, *parts], parts)]
    assert silences == [1, PAUSE, 1.5, PAUSE, 2, 0]


def test_punctuation_between_tags_is_not_a_part():
    assert [part.text for part in read_script("One[pause 1]. [voice ryan] Two!")] == ["One", "Two!"]


PLAY = (
    "Aiden: Hello, Bea.\n  Bea : [style: glad] Hi!\nHow are you?\n旁白：他们走了。\n10:30 at night.\nAiden: Bye: now."
)


def test_a_play():
    assert read_script(PLAY, play=True) == [
        Part("Hello, Bea.", "Aiden"),
        Part("Hi!", "Bea", "glad", line=2),
        Part("How are you?", "Bea", "glad", line=3),
        Part("他们走了。", "旁白", line=4),
        Part("10:30 at night.", "旁白", line=5),
        Part("Bye: now.", "Aiden", line=6),
    ]
    assert read_script("Aiden: Hi.\n  [pause 1] Bea: Hello.", play=True)[1] == Part("Hello.", "Bea", None, 1, 2)
    styled = "Bea: [style: glad] Hi.\n[style: sad] [pause 1] Aiden: No.\nWhy?\nBea: So."
    assert [(part.voice, part.style) for part in read_script(styled, play=True)] == [
        ("Bea", "glad"),
        ("Aiden", "sad"),
        ("Aiden", "sad"),
        ("Bea", None),
    ]
    assert read_script(PLAY)[0] == Part("Aiden: Hello, Bea.")  # elsewhere these are words


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[puase 0.8]", "there is no tag [puase 0.8]: did you mean [pause ...]?"),
        ("[voise aiden]", "did you mean [voice ...]?"),
        ("[laugh]", "there is no tag [laugh]: there are [pause ...], [voice ...], [style ...]"),
        ("[emotion: sad]", "there is no tag [emotion: sad]"),
        ("[speed 2]", "there is no tag [speed 2]"),
        ("[pause]", "[pause] has no seconds: write [pause 0.8]"),
        ("[pause soon]", "[pause soon] has no seconds"),
        ("[pause -1]", "[pause -1] has no seconds"),
        ("[pause 1e3]", "[pause 1e3] has no seconds"),
        ("[pause nan]", "[pause nan] has no seconds"),
        ("[pause 61]", "[pause 61] is longer than 60 s: write several"),
        ("[pause 123456789012345]", "is longer than 60 s"),
        ("[pause 0.8", "[pause ... does not end: close it"),
        ("[pause [voice aiden]]", "[pause ... does not end: close it"),
        ("[voice aiden\n]", "[voice ... does not end"),
        ("<break/>", '<break/> has no time: write <break time="800ms"/>'),
        ("<break time=1s/>", "has no time"),
        ("<break time='1s'", "does not end"),
        ("<speak>Hi</speak>", "<speak> is not read here"),
        ("</prosody>", "</prosody> is not read here"),
    ],
)
def test_wrong_tags_are_named_with_their_line(text, problem):
    with pytest.raises(ValueError) as whole:
        read_script(f"One.\nTwo. {text} Three.")
    assert str(whole.value).startswith("line 2: ") and problem in str(whole.value)
    with pytest.raises(ValueError) as arriving:
        in_letters(Notation(), f"One.\nTwo. {text} Three.")
    assert str(arriving.value) == str(whole.value)


@pytest.mark.parametrize("size", [190, 199, 200, 201, 250, 300])
@pytest.mark.parametrize(
    "before, after", [("[style: ", "]"), ("[pause", "]"), ("[x", "]"), ("<break ", ">"), ("[", "")]
)
def test_long_tags_arrive_as_they_are_read(before, after, size):
    for letter in "x ":
        text = f"a {before}{letter * size}{after} b"
        results = []
        for read in (in_letters, lambda reader, text: joined(reader.read(text, is_end=True))):
            try:
                results.append(read(Notation(), text))
            except ValueError as error:
                results.append(str(error))
        assert results[0] == results[1]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0c", "\u2028"])
def test_all_line_ends_count(end):
    """All line ends of str.splitlines count, also if they come in pieces."""
    text = f"Aiden: Hi.{end}{end}Bea: Hello.{end}[voice"
    for read in (in_letters, lambda reader, text: joined(reader.read(text, is_end=True))):
        notation = Notation(play=True)
        with pytest.raises(ValueError, match=r"^line 4: \[voice ... does not end"):
            read(notation, text)
    assert [part.voice for part in read_script(text.removesuffix("[voice"), play=True)] == ["Aiden", "Bea"]


@pytest.mark.parametrize(
    "text",
    [
        *("[1] " * 100_000, "<" * 200_000, "[" + "a" * 200_000, "[a" + " " * 200_000),
        *("[" * 60_000 + "[pause 1] a", "[pause 1]" + "word\n" * 60_000),
    ],
)
def test_long_texts_take_no_longer_than_their_length(text):
    start = time.thread_time()
    read_script(text)
    parts = [*read_lines([(1, text)])]  # a paragraph
    assert len(parts) == 1 and time.thread_time() - start < 5


def test_what_may_become_a_tag_is_not_kept_back_for_ever():
    notation = Notation()
    assert len("".join(notation.read("[" + " " * 1000))) > 900


def test_notation_can_be_off_and_must_have_words():
    assert read_script("[pause 1] and [laugh]", notation=False) == [Part("[pause 1] and [laugh]")]
    with pytest.raises(ValueError, match="leave notation=True"):
        read_script("Aiden: Hi.", play=True, notation=False)
    with pytest.raises(ValueError, match="no words"):
        read_script("[pause 1] ... [voice aiden]")


def test_arriving_words_are_given_at_once():
    """Only text that may become a tag, or a name at the beginning of a line of a play, is held back."""
    notation = Notation()
    assert [*notation.read("3 < 4 and a")] == ["3 ", "<", " 4 and a"]
    assert [*notation.read(" [pau")] == [" "]
    assert [*notation.read("se 1] b")] == [Tag("pause", 1.0, 1), " b"]
    assert joined(notation.read("[as " + "x" * 300)) == ["[as " + "x" * 300]
    play = Notation(play=True)
    assert [*play.read("Aid")] == []
    assert [*play.read("en: Hel")] == [Tag("voice", "Aiden", 1, True), " Hel"]
    assert [*play.read("lo: you\nBut ")] == ["lo: you\n"]


def test_random_texts_arrive_as_they_are_read():
    choices = ["[pause 1]", "[", "]", "<break time='1s'/>", "<", ">", "(", "a", " b", "\n", "Bea:", "你", "[x y]"]
    choices.append("[voice z]")
    generator = random.Random(0)
    for _ in range(500):
        text = "".join(generator.choices(choices, k=12))
        for play in (False, True):
            results = []
            for read in (in_letters, lambda reader, text: joined(reader.read(text, is_end=True))):
                try:
                    results.append(read(Notation(play), text))
                except ValueError as error:
                    results.append(str(error))
            assert results[0] == results[1], text


def test_parts_are_cut():
    parts = [Part("a b", "v", pause=2), Part("", pause=1), Part("c")]
    smaller = cut_parts(parts, lambda part: part.text.split())
    assert smaller == [Part("a", "v", pause=2), Part("b", "v"), Part("", pause=1), Part("c")]


def test_paragraphs_have_the_lines_of_the_text():
    """A part begins at its first word. Punctuation without a word is spoken only if the line has nothing else."""
    lines = [(3, "One\ntwo.\n[pause 1]\nThree."), (9, "..."), (10, "[voice] ...")]
    first, marks, nothing = read_lines(lines)
    assert first == [Part("One two.", line=3), Part("Three.", pause=1, line=6)]
    assert marks == [Part("...", line=9)] and nothing == []


def test_an_unknown_voice_is_named_where_it_stands():
    """The error has the line of an unknown voice, also at the end of a text, in a play, and in arriving text."""

    def check(name):
        if name != "bea":
            raise ValueError(f"there is no voice {name!r}")

    for text, play in (("[voice bea] Hi.\n[voice bob]\n", False), ("bea: Hi.\nbob: Bye.", True)):
        with pytest.raises(ValueError, match="^line 2: there is no voice 'bob'"):
            read_script(text, play, check_voice=check)
        with pytest.raises(ValueError, match="^line 2: there is no voice 'bob'"):
            in_letters(Notation(play, check_voice=check), text)


def test_what_is_said_must_fit():
    """A lexicon can make a text longer. The bytes of the written text were counted, not of the spoken text."""
    lexicon = Lexicon({"a": "x x x x"})
    parts = cut(["a b. a c. d e."], 10, lambda said: len(said.replace(" ", "")), None, lexicon.replace)
    assert " ".join(parts) == "a b. a c. d e." and len(parts) > 1
    assert all(len(lexicon.replace(part).replace(" ", "")) <= 10 for part in parts)


LEXICON = {
    "nginx": "engine x",
    "SQL": "sequel",
    "new york": "the big apple",
    "new": "old",
    "重庆": "崇庆",
    "c++": "see plus plus",
    "o’reilly": "oh rye lee",
    "Qur'an": "Koran",
}


@pytest.mark.parametrize(
    "text, said",
    [
        ("nginx Nginx NGINX nginx's nginxes", "engine x Engine x ENGINE X engine x's nginxes"),
        ("SQL sql MySQL", "sequel sql MySQL"),
        ("new york, New yorker. new", "the big apple, Old yorker. old"),
        ("我在重庆用nginx。", "我在崇庆用engine x。"),
        ("c++, C++ and c+", "see plus plus, See plus plus and c+"),
        ("O'Reilly, o’reilly, Qur’an", "Oh rye lee, oh rye lee, Koran"),
        ("", ""),
    ],
)
def test_lexicon(text, said):
    assert Lexicon(LEXICON).replace(text) == said
    assert "".join(in_letters(LexiconReader(Lexicon(LEXICON)), text)) == said


def test_a_word_is_replaced_when_it_can_no_longer_grow():
    reader = LexiconReader(Lexicon(LEXICON))
    assert [*reader.read("The ngi")] == ["The "]
    assert [*reader.read("nx")] == []
    assert [*reader.read(" new y")] == ["engine x", " "]
    assert [*reader.read("ear")] == ["old", " year"]


def test_random_words_arrive_as_they_are_replaced():
    generator = random.Random(0)
    words = ["nginx", "new", " york", " ", "SQL", "sql", "重庆", "重", "x", "c+", "+", ",", "New", "İ"]
    lexicon = Lexicon(LEXICON)
    for _ in range(500):
        text = "".join(generator.choices(words, k=10))
        assert "".join(in_letters(LexiconReader(lexicon), text)) == lexicon.replace(text), text


def test_entries_that_contain_each_other_take_no_longer():
    """A text of 100,000 characters takes less than 5 s with any lexicon."""
    start = time.thread_time()
    lexicon = Lexicon({"a" * size: "b" for size in range(1, 101)})
    assert lexicon.replace("a " * 50_000 + "a" * 100) == "b " * 50_000 + "b"
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    "text, problem",
    [
        ("nginx engine", "lexicon.txt, line 1: there is no tab"),
        ("\n# a comment\na\t", "lexicon.txt, line 3: there is no tab"),
        ("x" * 101 + "\ty", "line 1: the word 'xxxxxxxxxxxxxxxxxxxx'... has 101 characters, at most 100 are possible"),
        (
            "\n".join(f"a{number}\tb" for number in range(10_001)),
            "lexicon.txt: the lexicon has 10001 entries, at most 10000",
        ),
    ],
)
def test_wrong_lexicons(text, problem):
    with pytest.raises(ValueError) as error:
        read_lexicon(text, "lexicon.txt")
    assert problem in str(error.value)
    assert read_lexicon("\ufeffnginx\tengine x\n\n# b\n", "l").entries == {"nginx": "engine x"}


# ---- Spoken


def spoken(method, **arguments):
    """(cues, all samples) of a script."""
    cues, chunks = [], []
    for item in stream_script(method, max_new_tokens=4, **arguments):
        if isinstance(item, Cue):
            assert item.start == sum(map(len, chunks)) and item.end is None
            cues.append(item)
        else:
            chunks.append(item[0])
    return cues, np.concatenate(chunks)


def test_a_script_is_its_parts_and_silence(voices):
    """Pauses are exact to the sample, and each part is the utterance that it would be alone."""
    voice = voices("preset")
    method, arguments = voice.fast.generate_custom_voice, voice.arguments
    others = [name for name in voice.fast.get_supported_speakers() if name != arguments["speaker"]]
    text = f"[pause 0.5]One.\n[voice {others[0].upper()}]Two nginx. [pause 0.001][voice]Three.[pause 0.25]"
    cues, audio = spoken(method, text=text, seed=5, lexicon={"nginx": "engine x"}, **arguments)
    assert [cue.part.text for cue in cues] == ["One.", "Two nginx.", "Three."]

    def alone(text, seed, **own):
        chunks = stream(method, text=text, seed=seed, max_new_tokens=4, **arguments | own)
        return np.concatenate([audio for audio, _ in chunks])

    speech = [alone("One.", 5), alone("Two engine x.", 6, speaker=others[0]), alone("Three.", 7)]
    silences = [np.zeros(round(seconds * 24000), np.float32) for seconds in (0.5, PAUSE, 0.001, 0.25)]
    pieces = [silences[0], speech[0], silences[1], speech[1], silences[2], speech[2], silences[3]]
    np.testing.assert_array_equal(audio, np.concatenate(pieces))
    for cue, part in zip(cues, speech):
        np.testing.assert_array_equal(audio[cue.start : cue.end], part)


def test_mistakes_in_a_script_come_before_any_work(voices):
    voice = voices("preset")
    method = voice.fast.generate_custom_voice
    with pytest.raises(ValueError, match="line 2: there is no voice 'nobody': there are "):
        stream_script(method, text="One.\n[voice nobody] Two.", **voice.arguments)
    with pytest.raises(ValueError, match="line 1: there is no tag"):
        stream_script(method, text="[laugh]", **voice.arguments)
