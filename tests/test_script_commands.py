"""Scripts on the command line: the audio, the subtitles, the voices, and the messages about mistakes."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from helpers import ROOT, assert_refused, frame_limits, slow, watched

from qwen3_tts_cuda_graphs.__main__ import main
from qwen3_tts_cuda_graphs.cli import speaking
from qwen3_tts_cuda_graphs.cli.finished_parts import FinishedParts
from qwen3_tts_cuda_graphs.common.output_files import write_bytes
from qwen3_tts_cuda_graphs.common.speech_files import write_audio
from qwen3_tts_cuda_graphs.common.subtitles import format_subtitles
from qwen3_tts_cuda_graphs.common.voices import load_speaker, mix_embeddings
from qwen3_tts_cuda_graphs.prompts.script import Cue, Part
from qwen3_tts_cuda_graphs.speech.long_text import stream_script

RATE = 24000


@pytest.fixture(autouse=True)
def short_speech():
    """Limit the speech of random models, which would not end soon."""
    with frame_limits(8, per_token=0):
        yield


@pytest.fixture
def spoken(speak):
    """spoken(kind, option, ...): the samples of the file that the command writes."""

    def spoken(kind, *words, **options):
        code, _, stderr = speak(kind, *words, **options)
        assert code == 0, stderr
        spoken.stderr = stderr
        return soundfile.read("out.wav", dtype="int16")[0]

    return spoken


def library(loaded, checkpoint, kind, **arguments):
    """The cues and the samples, as in a file, of the library's stream_script."""
    tts = loaded(str(checkpoint(kind)), torch.device("cpu"), None, max_seq_len=300, fused=None)
    name = {"custom_voice": "generate_custom_voice", "base": "generate_voice_clone"}[kind]
    cues, chunks = [], []
    for item in stream_script(getattr(tts, name), seed=3, language="Auto", **arguments):
        if isinstance(item, Cue):
            cues.append(item)
        else:
            chunks.append(item[0])
    return cues, np.rint(np.clip(np.concatenate(chunks), -1, 1) * 32767).astype(np.int16)


SCRIPT = """[pause 0.5] One, nginx.

[voice RYAN] Two. [pause 0.001] Three. <break time='250ms'/>
[voice][style: whispering]Four: it is.
"""


def test_a_script_is_that_of_the_library(spoken, loaded, checkpoint, tmp_path):
    """The audio is the same sample by sample, silences included, and the subtitles have the position of each part."""
    (tmp_path / "a.txt").write_text(SCRIPT)
    (tmp_path / "lexicon.txt").write_text("nginx\tengine x\n")
    words = "--text-file", "a.txt", "--lexicon", "lexicon.txt", "--speaker", "aiden", "--join", "--subtitles", "a.json"
    heard = spoken("custom_voice", *words)
    cues, expected = library(
        loaded, checkpoint, "custom_voice", text=SCRIPT, lexicon={"nginx": "engine x"}, speaker="aiden", instruct=None
    )
    np.testing.assert_array_equal(heard, expected)
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["sample_rate"] == RATE
    assert [part["text"] for part in written["parts"]] == ["One, nginx.", "Two.", "Three.", "Four: it is."]
    assert [(part["start_sample"], part["end_sample"]) for part in written["parts"]] == [
        (cue.start, cue.end) for cue in cues
    ]
    assert [part["voice"] for part in written["parts"]] == [None, "RYAN", "RYAN", None]
    assert [part["sentences"] for part in written["parts"]] == [1] * 4
    silences = [0.5, 0.4, 0.001, 0.25]
    ends = [0, *(part["end_sample"] for part in written["parts"])]
    for silence, end, part in zip(silences, ends, written["parts"]):
        assert part["start_sample"] - end == round(silence * RATE)
        assert not heard[end : part["start_sample"]].any()
        assert part["start_seconds"] == part["start_sample"] / RATE


@pytest.mark.parametrize(
    "text, is_plain",
    [("See [1] and x[0].\n...\nTwo.", False), ("See [1] and x[0].\n...\nTwo.", True), ("One [pause 1] two.", True)],
)
def test_text_without_tags_is_spoken_as_before(spoken, loaded, checkpoint, text, is_plain):
    """This includes brackets that are no tags, and lines of punctuation. With --plain, tags are spoken."""
    heard = spoken("custom_voice", "--text", text, "--join", "--speaker", "aiden", *["--plain"] * is_plain)
    _, expected = library(loaded, checkpoint, "custom_voice", text=text, notation=False, speaker="aiden", instruct=None)
    np.testing.assert_array_equal(heard, expected)


@pytest.fixture
def speakers(checkpoint, tmp_path):
    """Two speaker files, and a recording."""
    own = torch.load(checkpoint() / "speaker.pt", weights_only=True).float()
    torch.save(own, tmp_path / "a.pt")
    torch.save(own.flip(0), tmp_path / "b.pt")
    return own, own.flip(0)


PLAY = "Bea: Hello.\n\nCarl：Hi: you.\nYes.\nBea: Bye."


def test_a_play_of_two_voices(spoken, loaded, checkpoint, recording, speakers, tmp_path):
    """The voices are a speaker file and a recording; the text may have empty lines."""
    soundfile.write(tmp_path / "carl.wav", *recording, subtype="FLOAT")
    words = "--text", PLAY, "--script", "--voice", "bea=a.pt", "--voice", "Carl=carl.wav", "--join"
    heard = spoken("base", *words, "--subtitles", "out.srt")
    tts = loaded(str(checkpoint()), torch.device("cpu"), None, max_seq_len=300, fused=None)
    voices = {
        "Bea": {"voice_clone_prompt": load_speaker("a.pt", 64)},
        "carl": {"voice_clone_prompt": tts.create_voice_clone_prompt(recording, None, x_vector_only_mode=True)},
    }
    cues, expected = library(loaded, checkpoint, "base", text=PLAY, play=True, voices=voices)
    np.testing.assert_array_equal(heard, expected)
    blocks = (tmp_path / "out.srt").read_text().split("\n\n")
    assert [block.splitlines()[2] for block in blocks] == ["Hello.", "Hi: you.", "Yes.", "Bye."]
    for number, (block, cue) in enumerate(zip(blocks, cues), 1):
        times = re.fullmatch(rf"{number}\n00:00:(\d\d),(\d{{3}}) --> 00:00:(\d\d),(\d{{3}})\n.*\n?", block)
        start, start_ms, end, end_ms = map(int, times.groups())
        assert 1000 * start + start_ms == round(1000 * cue.start / RATE)
        assert 1000 * end + end_ms == round(1000 * cue.end / RATE)


@pytest.mark.parametrize("weights, shares", [((0.7, 0.3), (0.7, 0.3)), ((3, 1), (0.75, 0.25)), (None, (0.5, 0.5))])
def test_mixed_speakers(spoken, speakers, tmp_path, weights, shares):
    """A mix as --speaker, or as a voice of the script, is the same as a speaker.pt of the mixed embedding."""
    torch.save(shares[0] * speakers[0] + shares[1] * speakers[1], tmp_path / "mixed.pt")
    expected = spoken("base", "--text", "Hello!", "--speaker", "mixed.pt")
    options = ("--weights", *weights) if weights else ()
    mixed = spoken("base", "--text", "Hello!", "--speaker", "a.pt", "b.pt", *options)
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=2)
    named = f"--voice=Mix=a.pt:{shares[0]},b.pt:{shares[1]}"
    np.testing.assert_array_equal(spoken("base", "--text", "[voice mix] Hello!", named), mixed)


def test_the_words_after_a_speaker_are_the_text(spoken, speakers):
    np.testing.assert_array_equal(
        spoken("base", "--speaker", "a.pt", "b.pt", "Hello,", "you!"),
        spoken("base", "--text", "Hello, you!", "--speaker", "a.pt", "b.pt"),
    )


def test_mixing_is_arithmetic(speakers, tmp_path):
    a, b = speakers
    prompts = [load_speaker(tmp_path / name, 64) for name in ("a.pt", "b.pt")]
    (mixed,) = mix_embeddings(prompts, [1, 3])["ref_spk_embedding"]
    torch.testing.assert_close(mixed, 0.25 * a + 0.75 * b)
    torch.testing.assert_close(mix_embeddings(prompts, [2, 0])["ref_spk_embedding"][0], a, rtol=0, atol=0)
    for weights, problem in (([0, 0], "all weights are 0"), ([1], "1 weights for 2 voices"), ([-1, 2], "is -1")):
        with pytest.raises(ValueError, match=problem):
            mix_embeddings(prompts, weights)


def test_each_line_is_a_file_and_a_voice_lasts(speak, spoken, tmp_path):
    """Subtitles are numbered as the audio files; a pause on a line of its own is added to the next line."""
    text = "[voice ryan]One. [pause 0.1] Two.\n[pause 0.5]\nThree."
    assert speak("custom_voice", "--text", text, "--subtitles", "out.vtt")[0] == 0
    assert sorted(os.listdir()) == ["out-001.vtt", "out-001.wav", "out-002.vtt", "out-002.wav"]
    first, second = ((tmp_path / f"out-00{number}.vtt").read_text() for number in (1, 2))
    assert first.startswith("WEBVTT\n\n1\n00:00:00.000 --> ") and "One." in first and "Two." in first
    assert second.startswith("WEBVTT\n\n1\n00:00:00.500 --> ")
    alone, _ = soundfile.read("out-002.wav", dtype="int16")
    assert not alone[:12000].any()
    joined = spoken("custom_voice", "--text", text, "--join", "--pause", 0)
    np.testing.assert_array_equal(joined[-len(alone) :], alone)


def test_speed_changes_the_times(spoken, tmp_path):
    """The subtitles have the times of the faster audio; silences keep their length."""
    pytest.importorskip("av")
    words = "--text", "One.\n[pause 0.5]Two.", "--join", "--subtitles", "a.json"
    lengths = []
    for speed in (1, 2):
        heard = spoken("custom_voice", *words, "--speed", speed)
        first, second = json.loads((tmp_path / "a.json").read_text())["parts"]
        assert second["start_sample"] - first["end_sample"] == 12000 and second["end_sample"] == len(heard)
        lengths.append(first["end_sample"])
    assert lengths[1] == round(lengths[0] / 2)


def test_a_style_is_ignored_with_one_warning(spoken):
    spoken("base", "--text", "[style: whispering] One.\n[style: loud] Two.", "--join")
    ignored = "warning: the style 'whispering' is ignored: this model takes no instructions"
    assert spoken.stderr.count("style") == 1 and ignored in spoken.stderr.splitlines()


MISTAKES = [
    ("One.\n\n[laugh] Two.", (), "line 3: there is no tag [laugh]"),
    ("a\nb\n\nc\nd [puase 1]", ("--paragraphs",), "line 5: there is no tag [puase 1]: did you mean [pause ...]?"),
    ("a\n\nb\n[voice nobody]\n", ("--paragraphs",), "line 4: there is no voice 'nobody'"),
    ("One.\n[voice rian] Two.", (), "line 2: there is no voice 'rian': choose ryan"),
    ("Ryan: Hi.\nBob: Hello.", ("--script",), "line 2: there is no voice 'Bob'"),
    ("你好[笑][voice 李雷]。", (), "line 1: there is no voice '李雷'"),
    ("[pause 1]\n[voice ryan]", (), "the script has no words"),
    ("Hi", ("--lexicon", "bad.txt"), "bad.txt, line 2: there is no tab"),
    ("Hi", ("--lexicon", "none.txt"), "the lexicon none.txt: No such file or directory: give another --lexicon"),
    ("Hi", ("--voice", "A=a.pt"), "--voice a=a.pt is not for"),
    ("Hi", ("--voice", "A=nobody"), "there is no speaker 'nobody'"),
    ("Hi", ("--voice", "A=ryan", "--voice", "a=aiden"), "--voice a was given twice, ryan and aiden"),
    ("Hi", ("--plain", "--script"), "give one of them"),
    ("Hi", ("--subtitles", "a.txt"), "subtitles end in one of .srt, .vtt, .json"),
    ("Hi", ("--subtitles", "nowhere/a.srt"), "no folder nowhere: choose another --subtitles"),
    ("Hi", ("--subtitles", "a.json", "--lexicon", "a.json"), "cannot write a.json: it is what is read"),
    ("Hi", ("--speaker", "a.pt", "b.pt"), "--speaker a.pt is not for"),
    ("Hi", ("--format", ""), "--format is '', which is not written here"),
    ("Hi", ("--weights", "1", "2"), "--weights are those of several speaker files"),
]
BASE_MISTAKES = [
    ("[voice x]Hi", (), "line 1: there is no voice 'x': give it as --voice x=FILE"),
    ("Hi", ("--voice", "A=none.pt"), "there is no speaker file none.pt"),
    ("Hi", ("--voice", "A=none.wav"), "there is no file none.wav"),
    ("Hi", ("--speaker", "a.pt", "none.pt"), "there is no speaker file none.pt"),
    ("Hi", ("--speaker", "a.pt", "b.pt", "--weights", "0", "0"), "--weights: all weights are 0"),
    ("Hi", ("--speaker", "a.pt", "b.pt", "--weights", "1"), "--weights: there are 1 weights for 2 voices"),
    ("Hi", ("--speaker", "a.pt", "b.pt", "--weights=-1", "--weights=nan"), "--weights"),
]


@pytest.mark.parametrize(
    "kind, text, words, problem",
    [("custom_voice", *mistake) for mistake in MISTAKES]
    + [("base", *mistake) for mistake in BASE_MISTAKES]
    + [("voice_design", "[voice x]Hi", (), "there is no voice 'x': this model makes voices from descriptions")],
)
def test_mistakes_get_one_line_before_the_model_is_loaded(speak, speakers, tmp_path, kind, text, words, problem):
    (tmp_path / "bad.txt").write_text("a\tb\nnginx engine\n")
    (tmp_path / "a.json").write_text("a\tb\n")
    (tmp_path / "text.txt").write_text(text)
    files = sorted(os.listdir())
    assert_refused(speak(kind, "--text-file", "text.txt", *words, load=None), problem)
    assert sorted(os.listdir()) == files


def test_a_mistake_on_stdin_comes_before_the_model(speak):
    result = speak("custom_voice", "--text", "-", load=None, stdin=[b"One.\n[laugh]\n"])
    assert_refused(result, "error: line 2: there is no tag [laugh]")


ARRIVING = "\ufeff[pause 0.1]One, nginx. [voice ryan] [pause 0.2]Two <3\r\n...\n"
ARRIVING += "[1] Thr[pause 0.05]ee! [voice]你好。\n[pause 1]"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_script_that_arrives(spoken, tmp_path, size):
    """A text that arrives byte by byte, so that characters are cut, gives the audio and subtitles of the whole text.
    The audio begins before the text ends."""
    (tmp_path / "a.txt").write_text(ARRIVING)
    (tmp_path / "lexicon.txt").write_text("nginx\tengine x\n")
    words = "--lexicon", "lexicon.txt", "--no-non-streaming-mode", "--subtitles", "a.json", "--speaker", "aiden"
    whole = spoken("custom_voice", *words, "--text-file", "a.txt", "--join")
    subtitles = (tmp_path / "a.json").read_text()
    os.remove("out.wav")

    def pieces():
        data, end = ARRIVING.encode(), time.monotonic() + 60
        for place in range(0, len(data), size):
            yield data[place : place + size]
            while b"voice" in data[:place] and not (tmp_path / "out.wav").exists() and time.monotonic() < end:
                time.sleep(0.01)
        arrived.append((tmp_path / "out.wav").exists() or size > 100)

    arrived = []
    heard = spoken("custom_voice", *words, "--text", "-", "--stream", stdin=pieces())
    assert arrived == [True]
    assert len(heard) == len(whole) and np.abs(heard.astype(int) - whole).max() <= 1  # decoded in other chunks
    assert (tmp_path / "a.json").read_text() == subtitles


@pytest.mark.parametrize("name", ["out.wav", *slow("out.flac")])
def test_a_mistake_in_arriving_text_comes_at_its_place(speak, tmp_path, name):
    """Everything before the mistake is spoken and kept."""
    words = "--no-non-streaming-mode", "--speaker", "aiden", "--text"
    for mistake, problem in (("[laugh]", "there is no tag [laugh]"), ("[voice nobody]", "there is no voice 'nobody'")):
        pieces = [b"One.\n", b"Two. ", mistake.encode(), b" Three."]
        code, stdout, stderr = speak(
            "custom_voice", *words, "-", "--stream", "-o", name, "--subtitles", "a.json", stdin=pieces
        )
        assert code == 2 and f"line 2: {problem}" in stderr.splitlines()[-1] and stdout.startswith(f"{name}: ")
        heard, _ = soundfile.read(name, dtype="int16")
        assert [part["text"] for part in json.loads((tmp_path / "a.json").read_text())["parts"]] == ["One.", "Two."]
        assert speak("custom_voice", *words, "One.\nTwo.", "--join")[0] == 0
        assert len(heard) == soundfile.info("out.wav").frames
    os.remove(name)
    assert speak("custom_voice", *words, "-", "--stream", "-o", name, stdin=[b"[laugh]"])[0] == 2
    assert not os.path.exists(name)


@pytest.mark.parametrize("join", [True, False], ids=["joined", "numbered"])
def test_resume(speak, speakers, tmp_path, join):
    """What an interrupted run has spoken is not spoken again, and the result is that of an uninterrupted run. With
    another text, lexicon or voice, --resume is refused."""
    (tmp_path / "lexicon.txt").write_text("two\tzwei\n")
    words = ["--voice", "b=b.pt", "--lexicon", "lexicon.txt", "--subtitles", "out.json", *["--join"] * join]
    text = "[pause 0.2]One. [voice b] Two.\n[pause 0.3]Three.\nFour."
    spoken = []

    def interrupted(*args, text, **kwargs):
        spoken.append(text)
        if len(spoken) == 3:
            raise KeyboardInterrupt
        return speak_of(*args, text=text, **kwargs)

    def run(*more, text=text, **options):
        return speak("base", "--text", text, *words, *more, **options)

    def files():
        return {name: (tmp_path / name).read_bytes() for name in os.listdir() if re.match(r"out.*\.(wav|json)$", name)}

    speak_of = speaking.speak
    assert run()[0] == 0
    whole = files()
    for name in whole:
        os.remove(name)
    code, _, stderr = run(speak=interrupted)
    kept = "stopped: 2 of 4 utterances are kept; the same command with --output out.wav --resume continues"
    assert code == 130 and stderr.splitlines()[-1] == kept
    for name, change in (("lexicon.txt", b"two\tdeux\n"), ("b.pt", (tmp_path / "a.pt").read_bytes())):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(change)
        assert "from another text or other options" in run("--resume")[2]
        (tmp_path / name).write_bytes(before)
    assert "from another text or other options" in run("--resume", text="Another.\nText.")[2]
    (tmp_path / "out.wav.parts/.000002.wav.0123abcd").touch()  # a killed process leaves it
    if not join:
        os.remove("out-001.wav")  # a finished file that is gone is written again
    code, line, _ = run("--resume", speak=interrupted)
    assert code == 0 and files() == whole and not (tmp_path / "out.wav.parts").exists()
    assert spoken == ["One.", "Zwei.", "Three.", "Three.", "Four."]
    if join:  # the speed is that of what was spoken now
        found = re.search(r"([\d.]+) s of audio, ([\d.]+) s of it now in ([\d.]+) s, ([\d.]+) x real time", line)
        all_of_it, now, wall, speed = map(float, found.groups())
        assert 0 < now < all_of_it and speed == pytest.approx(now / wall, rel=0.2)


def test_parts_of_a_machine_that_lost_power(tmp_path):
    """After a power failure a file may be empty, and is then no finished part. Names and options need not be UTF-8."""
    finished = FinishedParts(tmp_path / os.fsdecode(b"caf\xe9.wav"), "caf\xe9\r\n")
    finished.open(resume=False)
    assert finished.belong_to_this_run() and not finished.has(1)
    finished.path(1).touch()
    assert not finished.has(1)
    write_audio(finished.path(1), [(np.full(100, 0.5), RATE)])
    ((samples, rate),) = finished.read(1)
    assert finished.has(1) and (len(samples), rate) == (100, RATE)
    assert finished.samples([1], silence=0.1, rate=None) == 2500


def test_paragraphs_and_pauses(spoken, tmp_path):
    """Wrapped lines of a book are one utterance; joined utterances have silence between them."""
    texts = []
    (tmp_path / "book.txt").write_text("One\ntwo.\n\n\nThree.\n")
    with watched(speaking, "speak", lambda *_, text, **__: texts.append(text)):
        audio = spoken("base", "--text-file", "book.txt", "--paragraphs", "--join", "--pause", 1)
    assert texts == ["One two.", "Three."]
    zeros = np.cumsum(audio == 0)
    assert (zeros[RATE:] - zeros[:-RATE]).max() == RATE  # a second of silence


def test_formats_of_subtitles():
    cues = [
        Cue(Part("A < b & c.\n\nD.", "Bea"), 12, 24000 * 3661 + 36),
        Cue(Part("Yes. No."), 24000 * 3662, 24000 * 3663),
    ]
    assert format_subtitles(".vtt", cues, RATE).split("\n\n") == [
        "WEBVTT",
        "1\n00:00:00.000 --> 01:01:01.002\nA &lt; b &amp; c.\nD.",
        "2\n01:01:02.000 --> 01:01:03.000\nYes. No.\n",
    ]
    assert "1\n00:00:00,000 --> 01:01:01,002\nA < b & c.\nD.\n\n2\n" in format_subtitles(".srt", cues, RATE)
    written = json.loads(format_subtitles(".json", cues, RATE, file_rate=8000))
    assert written["sample_rate"] == 8000 and written["parts"][0]["start_sample"] == 4
    assert written["parts"][1] == {
        "text": "Yes. No.",
        "voice": None,
        "style": None,
        "start_seconds": 3662.0,
        "end_seconds": 3663.0,
        "start_sample": 8000 * 3662,
        "end_sample": 8000 * 3663,
        "sentences": 2,
    }


@pytest.mark.parametrize(
    "name, sound, texts",
    [
        ("dialogue.sh", "dialogue.wav", ["Did you hear that?", "There it is again.", "It is only the wind, Mia."]),
        *slow(("audiobook.sh", "chapter.mp3", ["Chapter one.", "The letter came on a Tuesday, in a grey envelope"])),
    ],
)
def test_the_examples(call, checkpoint, tmp_path, name, sound, texts):
    """A fake qwen3-tts prints the options that the example passes to it, and the real command is run with them here."""
    (tmp_path / "qwen3-tts").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "qwen3-tts").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    options = "--model", checkpoint("custom_voice"), "--device", "cpu"  # a byte is a token, so the cache must be large
    command = ["bash", ROOT / "examples" / name, *options]
    words = subprocess.check_output(command, env=environment, text=True, timeout=60).splitlines()
    code, _, stderr = call(main, *words)
    assert code == 0, stderr
    assert soundfile.info(tmp_path / sound).duration > 1
    subtitles = (tmp_path / sound).with_suffix(".srt").read_text()
    places = [subtitles.index(text) for text in texts]
    assert places == sorted(places)


@pytest.mark.parametrize("text", [b"[pause 0.1]\n", b"[voice ryan]", b"[pause 0.1] ...[voice]"])
def test_a_script_that_arrives_must_have_words(speak, text):
    code, _, stderr = speak("custom_voice", "--text", "-", "--stream", stdin=[text])
    assert code == 2 and stderr == "error: the script has no words: give something to say\n"


def test_subtitles_that_cannot_be_written_are_named_by_their_option():
    with pytest.raises(ValueError, match="cannot write /dev/full: .*: choose another --subtitles"):
        write_bytes(Path("/dev/full"), b"x", "--subtitles")


def test_a_text_with_an_arrow_is_one_cue():
    """Parsers of SRT look for `-->`, which cannot be escaped in a text."""
    cue = Cue(Part("00:00:05,000 --> 00:00:06,000"), 0, 24000)
    assert format_subtitles(".srt", [cue], 24000).count("-->") == 1
    assert format_subtitles(".vtt", [cue], 24000).count("-->") == 1
