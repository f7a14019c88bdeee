"""The scripts as a user runs them, on a tiny checkpoint."""

import contextlib
import functools
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import soundfile
import torch
from helpers import ROOT, assert_refused, run_program

from generate import MODELS
from qwen3_tts_cuda_graphs.bench import random_checkpoint
from qwen3_tts_cuda_graphs.cli import clone
from qwen3_tts_cuda_graphs.cli import options as cli_options
from qwen3_tts_cuda_graphs.cli.__main__ import main
from qwen3_tts_cuda_graphs.common import model_config
from qwen3_tts_cuda_graphs.common.command import install_command
from qwen3_tts_cuda_graphs.common.loading import load
from qwen3_tts_cuda_graphs.common.model_names import model_name
from qwen3_tts_cuda_graphs.common.published import KIND_OF, LANGUAGE_IDS, SPEAKERS, published_config
from qwen3_tts_cuda_graphs.common.recording_files import read_audio
from qwen3_tts_cuda_graphs.common.voices import clone_prompt, load_speaker
from qwen3_tts_cuda_graphs.prompts.cut import LANGUAGES


def options(folder, **change):
    chosen = dict(model=folder, speaker=folder / "speaker.pt", text="Hello!", output="out.wav", device="cpu") | change
    return [word for name, value in chosen.items() for word in (f"--{name}", value)]


def test_generate_writes_what_the_function_speaks(call, checkpoint):
    """An option that does not reach upstream's method would give other audio. test_wheel.py runs the real command."""
    sampling = "--temperature 0.8 --top-k 30 --top-p 0.9 --repetition-penalty 1.1"
    words = f"--language English --seed 2 {sampling} --max-seq-len 300 --dtype float32".split()
    code, stdout, stderr = call(main, *options(checkpoint()), *words)
    assert (code, stderr) == (0, "")
    assert re.fullmatch(r"out.wav: [\d.]+ s of audio in [\d.]+ s, [\d.]+ x real time; on the CPU\n", stdout)
    audio, rate = soundfile.read("out.wav", dtype="float32")
    info = soundfile.info("out.wav")
    assert (rate, info.channels, info.subtype, len(audio) % 1920) == (24000, 1, "PCM_16", 0)

    tts = load(str(checkpoint()), "cpu", max_seq_len=300)
    torch.manual_seed(2)
    sampling = dict(temperature=0.8, top_k=30, top_p=0.9, repetition_penalty=1.1)
    voice = load_speaker(checkpoint() / "speaker.pt", 64)
    (expected,), _ = tts.generate_voice_clone("Hello!", "English", voice_clone_prompt=voice, **sampling)
    np.testing.assert_allclose(audio, expected, rtol=0, atol=2 / 2**15)


def test_streamed_bytes_are_the_same(speak, call):
    """Written to a file, streamed to a file, and streamed to stdout, where the header cannot have the length."""
    for output, more in (("whole", ()), ("streamed", ["--stream"]), ("-", ["--stream"])):
        _, stdout, stderr = speak("base", "Hello!", "-o", output, *more)
        summary, other = (stderr, stdout) if output == "-" else (stdout, stderr)
        assert summary.startswith(f"{output}: ") and ("first audio after" in summary) == bool(more)
        assert output == "-" or other == ""
    whole, streamed = (Path(name).read_bytes() for name in ("whole", "streamed"))
    assert whole == streamed and len(whole) > 44 and call.audio[44:] == whole[44:]
    assert soundfile.info("whole").frames * 2 + 44 == len(whole)


def test_cut_off_speech_is_reported(speak):
    """If speech ends because the cache is full, there is one line on stderr for each utterance. By default Python shows
    the same warning only once."""
    arguments = "--max-seq-len", 32, "--join", "--seed", 26  # which would go on
    code, _, stderr = speak("base", "Hello!", *arguments)
    warning = "the speech was cut off after 23 frames, before its end: raise --max-seq-len"
    assert code == 0 and stderr == f"warning: {warning}\n"
    code, _, stderr = speak("base", "Hello!\nHello!", *arguments)
    assert code == 0 and stderr == f"warning: utterance 1: {warning}\nwarning: utterance 2: {warning}\n"


@pytest.fixture
def recording_file(recording, tmp_path):
    path = tmp_path / "voice.flac"
    soundfile.write(path, np.stack([recording[0]] * 2, axis=1), recording[1])
    return path


@pytest.fixture
def requests(call):
    """The requests that reach the model. It is not called: two short chunks are the answer to each text."""
    requests = []

    def answer(method, *, text, **request):
        requests.append(request | {"text": "".join(text)})
        yield from [(np.full(1920, len(requests) / 8), 24000)] * 2

    call.stand_ins["speak"] = answer
    return requests


def test_every_voice_reaches_the_model(speak, requests, checkpoint, recording_file):
    """No two requests are the same, as they would be if an option was ignored."""
    voices = {
        "x-vector": ("base", "--speaker", checkpoint() / "speaker.pt"),
        "recording": ("base", "--ref-audio", recording_file),
        "in-context": ("base", "--ref_audio", recording_file, "--ref_text", "what it says"),
        "no silence": ("base", "--ref-audio", recording_file, "--ref-text", "what it says", "--no-append-silence"),
        "preset": ("custom_voice", "--speaker", "Aiden", "--language", "english"),
        "instructed": ("custom_voice", "--speaker", "aiden", "--language", "English", "--instruct", "whisper"),
        "designed": ("voice_design", "--instruct", "warm narrator"),
        "text as it speaks": ("voice_design", "--instruct", "warm narrator", "--no-non-streaming-mode"),
    }
    for kind, *words in voices.values():
        assert speak(kind, "--text", "Hello!", *words)[0] == 0
    assert len({*map(pickle.dumps, requests)}) == len(voices)


def test_several_lines(speak, requests):
    """One file per line, or one for all, from a file or from stdin; the first line is spoken as if it was alone. Byte
    order marks, which editors on Windows write at the beginning, must not be spoken."""
    Path("lines.txt").write_text("\ufeffOne.\n\n  \ufeffTwo, zwei, \u4e8c.\n", encoding="utf-8")  # two files, joined
    _, stdout, _ = speak("custom_voice", "--text-file", "lines.txt")
    assert [*map(str, sorted(Path().glob("*.wav")))] == ["out-001.wav", "out-002.wav"]
    assert stdout.count("out-00") == 2 and stdout.count("on the CPU") == 1  # the path is said once
    speak("custom_voice", "--text", "-", "--join", "--pause", 0, stdin=["One.\nTwo, zwei, \u4e8c.\n".encode()])
    assert soundfile.info("out.wav").frames == 4 * 1920
    speak("custom_voice", "One.")
    assert requests[:2] == requests[2:4] and requests[4] == requests[0]
    assert [request["text"] for request in requests[:2]] == ["One.", "Two, zwei, \u4e8c."]


@pytest.mark.parametrize(
    "data, more, message",
    [
        (b"", (), "the text is empty"),
        (b" \n\n", (), "the text is empty"),
        (b"caf\xe9 \n", (), "cannot read stdin: it is not UTF-8"),
        (b"Hi", ("--non-streaming-mode",), "leave out --stream"),
    ],
)
def test_mistakes_in_a_pipe(speak, data, more, message):
    """One line is printed, and no file is written."""
    assert_refused(speak("base", "--text", "-", "--stream", *more, stdin=[data]), message)
    assert not Path("out.wav").exists()


def test_nothing_but_audio_goes_to_stdout(speak, call):
    """Upstream prints warnings about a recording that is too loud, which must not get into the WAV."""
    loud = 2 * np.sign(np.sin(np.arange(2 * 24000) / 20)).astype(np.float32)
    soundfile.write("loud.wav", loud, 24000, subtype="FLOAT")
    _, _, stderr = speak("base", "Hello!", "--ref-audio", "loud.wav", "--output", "-")
    assert "WARNING" in stderr
    assert soundfile.info(io.BytesIO(call.audio)).frames * 2 + 44 == len(call.audio)


def test_a_full_disk_is_one_line(speak, requests):
    """Also if it is full only at the end: there is no traceback, and the device is not removed."""
    result = speak("base", "Hello!", "-o", "/dev/full")
    assert_refused(result, "error: cannot write /dev/full: No space left")
    assert result[1] == "" and Path("/dev/full").exists()


def test_nothing_but_a_text(call, checkpoint, requests, tmp_path):
    """Default voices: the first speaker, a description, or the folder's speaker.pt. The default file is a new one."""
    (tmp_path / "speech.wav").write_bytes(b"somebody's file")
    (tmp_path / "speech-2-001.wav").write_bytes(b"somebody's file")
    for number, kind in enumerate(("custom_voice", "voice_design", "base"), 3):
        words = "--model", checkpoint(kind), "--device", "cpu", "--max-seq-len", 300, "--text", "Hello!"
        code, stdout, _ = call(main, *words)
        assert code == 0 and stdout.startswith(f"speech-{number}.wav: 0.16 s of audio")
        assert soundfile.info(f"speech-{number}.wav").frames == 2 * 1920
    assert (tmp_path / "speech.wav").read_bytes() == b"somebody's file"
    preset, designed, cloned = requests
    assert preset["speaker"] == "aiden" and designed["instruct"] == cli_options.DESCRIPTION
    speaker = torch.load(checkpoint() / "speaker.pt", weights_only=True)
    assert torch.equal(cloned["voice_clone_prompt"]["ref_spk_embedding"][0], speaker)


@pytest.mark.parametrize(
    "voice, model",
    [
        ((), "0.6B-CustomVoice"),
        (("--voice", "ryan"), "0.6B-CustomVoice"),
        (("--speaker", "my.pt"), "0.6B"),
        (("--ref-audio", "voice.wav"), "0.6B"),
    ],
)
def test_the_model_follows_the_voice(call, voice, model):
    """The default is a Base model, which has no voice of its own, only if a voice is to be cloned."""
    code, stdout, stderr = call(main, *voice, "--list-speakers")
    assert (stdout.split() == sorted(SPEAKERS)) if "Custom" in model else f"{model} has no speakers" in stderr


def test_words_of_other_programs(speak, checkpoint, requests):
    """A text without an option, --voice and -o are accepted, because other programs have them."""
    config = checkpoint("custom_voice") / "config.json"
    for words in (("Hello,", "there!", "--voice", "Ryan"), ("--voice=Ryan", "Hello, there!")):
        code, stdout, stderr = speak("custom_voice", *words)
        assert (code, stderr) == (0, "") and stdout.startswith("out.wav: ")
        assert (requests[-1]["text"], requests[-1]["speaker"]) == ("Hello, there!", "Ryan")
    for words, message in (
        (("Hello!", "--text", "Hi!"), "'Hello!' is a second text"),
        (("Hello!", "--text-file", "book.txt"), "'Hello!' is a second text"),
        ((config,), f"is a file: give it as --text-file {config}"),
        (("",), "the text is empty"),
        (("x" * 5000, "--seed", -1), "from 0 to"),  # too long for the name of a file
    ):
        assert_refused(speak("custom_voice", *words), message)


@pytest.mark.parametrize("speed", [1, 0.25, 0.8, 1.5, 4])
def test_speed(speak, call, requests, speed):
    """--speed changes files of every format, stdout and what is played; the silence of --pause keeps its length."""
    pytest.importorskip("av")
    words = "--speed", speed, "--text", "One.\nTwo.", "--join", "--pause", 0.5
    device, heard = FakeSoundDevice(), []
    for output in ("whole.wav", "whole.flac", "streamed.wav", "streamed.flac", "-", "played.wav"):
        more = ["--stream"] * output.startswith("streamed") + ["--play"] * output.startswith("played")
        speak("custom_voice", *words, *more, "-o", output, device=device)
        requests.clear()  # the fixture numbers its answers by them
        heard.append(soundfile.read(io.BytesIO(call.audio) if output == "-" else output, dtype="int16")[0])
    assert len(heard[0]) == 2 * round(2 * 1920 / speed) + 12000 and np.abs(heard[0]).max() > 1000
    for audio in (*heard, np.rint(np.concatenate(device.heard) * 32767)):
        np.testing.assert_array_equal(audio, heard[0])


def test_a_long_text_is_cut_wherever_it_comes_from(speak, requests, tmp_path):
    """It may be given as --text, too. One line is one file, even if it is cut into several utterances."""
    text = "This is a sentence. " * 10 + "x" * 500
    (tmp_path / "long.txt").write_text(text)
    heard = []
    for source in (("--text", text), ("--text-file", "long.txt"), (text,), ("--text", "-")):
        code, stdout, stderr = speak("custom_voice", *source, stdin=[text.encode()])
        assert (code, stderr) == (0, "") and stdout.startswith("out.wav: ")
        heard.append([request["text"] for request in requests])
        assert [path.name for path in tmp_path.glob("*.wav*")] == ["out.wav"]
        (tmp_path / "out.wav").unlink()
        requests.clear()
    assert heard == heard[:1] * 4 and "".join(heard[0]).replace(" ", "") == text.replace(" ", "")


class FakeSoundDevice:
    """Stands in for the package sounddevice."""

    class PortAudioError(Exception):
        pass

    def __init__(self, fails_after=None):
        self.heard = []
        self.calls = []
        self.fails_after = fails_after  # chunks

    def query_devices(self, kind):
        if self.fails_after == 0:
            raise self.PortAudioError("no default device")

    def OutputStream(self, samplerate, channels, dtype):
        self.calls.append((samplerate, channels, dtype))
        return self

    def write(self, audio):
        if len(self.heard) == self.fails_after:
            raise self.PortAudioError("unplugged")
        assert audio.dtype == np.float32 and audio.ndim == 1
        self.heard.append(audio)

    def __getattr__(self, name):  # start, stop, abort, close
        return lambda: self.calls.append(name)


def test_play(speak, requests, tmp_path):
    """Everything that is generated is played, also of text from a pipe; without --output no file is written."""
    (tmp_path / "lines.txt").write_text("One.\nTwo.\n")
    file = "--text-file", "lines.txt"
    for more in ((*file, "--join", "--output", "out.wav"), ("--text", "-"), file):
        words = "--play", "--pause", 0.1, *more
        code, stdout, stderr = speak(
            "custom_voice", *words, stdin=[b"One.\nTwo.\n"], device=(device := FakeSoundDevice())
        )
        assert (code, stderr) == (0, "") and stdout.startswith(f"{'out.wav' if '--join' in more else 'played'}: 0.42 s")
        assert device.calls == [(24000, 1, "float32"), "start", "stop", "abort", "close"]
        heard = np.concatenate(device.heard)
        np.testing.assert_allclose(heard, soundfile.read("out.wav")[0], rtol=0, atol=1e-4)
        requests.clear()
    assert [path.name for path in tmp_path.glob("*.wav")] == ["out.wav"]


@pytest.mark.parametrize(
    "device, words",
    [
        (None, install_command("sounddevice")),
        (FakeSoundDevice(fails_after=0), "finds no sound device"),
        (FakeSoundDevice(fails_after=1), "the sound device has stopped: unplugged"),
    ],
    ids=["no package", "no device", "unplugged"],
)
def test_play_without_a_device(speak, requests, device, words):
    """One line says so, if possible before the model is loaded."""
    loading = {} if device and device.fails_after else {"load": None}
    assert_refused(speak("base", "--text", "Hello!", "--play", device=device, **loading), words)


def test_text_as_it_is_written_with_a_transcript(speak, recording_file, requests):
    """With a transcript, nothing is spoken before the text is as long as the reference, and a note says so."""
    words = "--ref-audio", recording_file, "--text", "-", "--stream", "--ref-text", "what it says"
    code, _, stderr = speak("base", *words, stdin=[b"Hello!\n"])
    frames = 32  # of the recording and the silence behind it: 2.5 s
    tokens = 1 + frames + 1 - len("what it says")  # every byte is a token here
    assert code == 0 and f"once it has {tokens} tokens or has ended; without one" in stderr


def test_a_python_without_the_packages():
    """`python generate.py` outside of .venv ends with one line, not with a traceback."""
    for script, package in (("generate.py", "huggingface_hub"), ("extract_speaker.py", "soundfile")):
        program = f"""
            import runpy
            sys.modules["{package}"] = None
            runpy.run_path({str(ROOT / script)!r}, run_name="__main__")
        """
        result = run_program(program, ROOT)
        remedy = "in a checkout run ./setup.sh none and use .venv/bin/python, else install the package again"
        assert result.stderr == f"error: {package} is not installed in this Python: {remedy}\n"
        assert result.returncode == 2


def test_two_recordings_at_once():
    """sys.stdout must not be redirected meanwhile: two threads that do so may leave it redirected."""
    inside, first_has_left = threading.Barrier(2), threading.Event()

    def create(recording, *_, **__):
        inside.wait(10)
        if len(recording[0]) == 2:
            assert first_has_left.wait(10)

    model = type("Model", (), {"speaker_encoder_sample_rate": 24000})()
    tts = types.SimpleNamespace(model=model, create_voice_clone_prompt=create)
    stdout = sys.stdout
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(clone_prompt, tts, np.zeros(length), 24000, None) for length in (1, 2))
        first.result(10)
        first_has_left.set()
        second.result(10)
    assert sys.stdout is stdout


def test_lists(call, checkpoint):
    """The values for --speaker and --language, sorted, and without the dialects, which depend on the speaker."""
    code, speakers, _ = call(main, "--model", checkpoint("custom_voice"), "--list-speakers")
    assert code == 0 and speakers.split() == sorted(speakers.split()) and "ono_anna" in speakers.split()
    code, languages, _ = call(main, "--model", checkpoint("base"), "--list-languages")
    assert code == 0 and "auto" in languages.split() and "beijing_dialect" not in languages
    assert {model_config.language_name(code) for code in LANGUAGES} <= {*languages.split()}


@pytest.fixture
def no_hub(monkeypatch):
    """The hub cannot be reached: its functions raise what huggingface_hub raises."""

    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    for function in ("model_info", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, function, unreachable)


def test_published_models_are_known_without_a_hub(call, tmp_path, no_hub):
    """Lists and mistakes need no download. What is known about a published model is also in random checkpoints."""
    tokenizer = random_checkpoint.byte_tokenizer(tmp_path, 0)
    for name, hub_id in MODELS.items():
        size, kind = hub_id.split("-")[-2:]
        written = random_checkpoint.main_config(size, KIND_OF[kind], tokenizer)
        for spelling in (name, name.lower(), f"{size}-{kind}".upper(), hub_id, hub_id.lower(), hub_id.split("/")[1]):
            config = published_config(model_name(spelling))
            talker = config.pop("talker_config")
            assert written | config == written and written["talker_config"] | talker == written["talker_config"]
            code, languages, _ = call(main, "--model", spelling, "--list-languages")
            assert code == 0 and languages.split() == sorted(["auto", *LANGUAGE_IDS])
    assert len(SPEAKERS) == 9 and len(LANGUAGE_IDS) == 10
    code, speakers, _ = call(main, "--model", "1.7b-customvoice", "--list-speakers")
    assert code == 0 and speakers.split() == sorted(SPEAKERS)
    cloning = "--speaker Ryan is not for 1.7B, a Base model, which clones voices: use"
    for words, message in (
        (("--model", "1.7b", "--voice", "Ryan"), cloning),
        (("--voice", "rian"), "choose ryan, vivian"),
        (("--language", "klingon"), "no language 'klingon'"),
        (("--top-k", 5000), "from 1 to 3072"),
        ((), "cannot be downloaded from the model hub"),
    ):
        assert_refused(call(main, "Hello!", "-o", "out.wav", *words, load=load), message)


def test_codes_of_languages(speak, requests):
    """Codes such as `en`, which other services take, name a language."""
    assert speak("base", "Hello!", "--language", "de")[0] == 0 and requests[0]["language"] == "german"
    names = {word: model_config.language_name(word) for word in ("EN-us", "zh_CN", "Auto", "xx")}
    assert names == {"EN-us": "english", "zh_CN": "chinese", "Auto": "Auto", "xx": "xx"}


class Boom:
    def __reduce__(self):
        return Path.touch, (Path("boom"),)


@pytest.fixture(scope="session")
def wrong_files(tmp_path_factory, checkpoint):
    """A folder with files and checkpoints, each of which is wrong in one way."""
    folder = tmp_path_factory.mktemp("wrong")
    torch.save(torch.zeros(128), folder / "wide.pt")
    torch.save(torch.full((64,), torch.nan), folder / "nan.pt")
    torch.save(torch.ones(64).to_sparse(), folder / "sparse.pt")
    torch.save(torch.ones(64).to(torch.float8_e4m3fn), folder / "float8.pt")
    torch.save(Boom(), folder / "code.pt")
    (folder / "pickle.pt").write_bytes(pickle.dumps([1.0] * 64, protocol=4))
    (folder / "text.pt").write_text("not a tensor")
    (folder / "text.wav").write_text("not audio")
    (folder / "binary.txt").write_bytes(bytes(range(128, 256)))
    (folder / "utf16.txt").write_text("Hello!", encoding="utf-16-le")
    (folder / "empty.txt").write_text(" \n\n")
    soundfile.write(folder / "short.wav", np.ones(1000) / 2, 16000)
    soundfile.write(folder / "long.wav", np.ones(25 * 8000) / 2, 8000)
    soundfile.write(folder / "silent.wav", np.zeros(32000), 16000)
    soundfile.write(folder / "loud.wav", np.full(48000, 3e38), 24000, subtype="FLOAT")
    soundfile.write(folder / "slow.wav", np.ones(4000) / 2, 1000)
    for name, change in {
        "voiceless": lambda copy: (copy / "speaker.pt").unlink(),
        "lacks": lambda copy: (copy / "speech_tokenizer/config.json").unlink(),
        "truncated": lambda copy: os.truncate(copy / "model.safetensors", 100000),
        "25hz": lambda copy: replace(copy / "config.json", "tokenizer_12hz", "tokenizer_25hz"),
        "other": lambda copy: (copy / "config.json").write_text('{"model_type": "llama"}'),
        "hollow": lambda copy: replace(copy / "config.json", '"vocab_size"', '"vocabulary"'),
        "garbled": lambda copy: (copy / "config.json").write_text("{"),
    }.items():
        change(Path(shutil.copytree(checkpoint(), folder / name)))
    return folder


def replace(path, old, new):
    path.write_text(path.read_text().replace(old, new))


MISTAKES = [  # options that differ from a good call (None: left out), words of the error
    (dict(speaker="missing.pt"), "no speaker file missing.pt"),
    (dict(speaker="."), "no speaker file"),
    ({"speaker": None, "speaker=": ""}, "no speaker file"),
    (dict(model="voiceless", speaker=None), "give it --ref-audio voice.wav or --speaker speaker.pt"),
    (dict(ref_audio="short.wav"), "one of the two"),
    (dict(ref_text="words"), "--ref-text is the transcript of --ref-audio"),
    (dict(speaker=None, model=None, ref_text="words"), "--ref-text is the transcript of --ref-audio"),
    (dict(no_append_silence=""), "give --ref-text"),
    (dict(speaker="voice.wav"), "voice.wav is a recording, not a speaker: give it as --ref-audio voice.wav"),
    (dict(speaker="VOICE.M4A", model="custom_voice"), "give it as --ref-audio VOICE.M4A"),
    (dict(speaker="voice.wav", model=None), "give it as --ref-audio voice.wav"),
    (dict(speaker="binary.txt"), "if it is a recording, make one with qwen3-tts clone --ref-audio binary.txt"),
    (dict(speaker="text.pt"), "not a speaker file"),
    (dict(speaker="x" * 300), "no speaker file"),
    (dict(speaker="Ryan"), "use it with --model 0.6B-CustomVoice or 1.7B-CustomVoice"),
    (dict(speaker="ryan", model="voice_design"), "use it with --model 0.6B-CustomVoice or 1.7B-CustomVoice"),
    (dict(speaker="wide.pt", model="custom_voice"), "use it with --model 0.6B or 1.7B"),
    (dict(voice="other.pt"), "--voice was given twice"),
    (dict(speed=0.2), "--speed is 0.2, it must be from 0.25 to 4"),
    (dict(speed="nan"), "from 0.25 to 4"),
    (dict(pause=1), "--pause is the silence between utterances in one file: add --join"),
    ({"output": None, "output=": ""}, "its value is empty"),
    (dict(text="-x"), "as in --text=-5"),
    (dict(speaker=None, ref_audio="missing.wav"), "no file missing.wav"),
    (dict(speaker=None, ref_audio="long.wav", ref_text=" "), "--ref-text is empty"),
    (dict(speaker=None, ref_audio="long.wav", ref_text="words"), "312 positions, the cache has 300: give a sh"),
    (dict(speaker=None, ref_audio="text.wav"), "not audio"),
    (dict(speaker=None, ref_audio="short.wav"), "0.06 s"),
    (dict(speaker=None, ref_audio="silent.wav"), "silent"),
    (dict(speaker=None, ref_audio="slow.wav"), "slow.wav has 1000 Hz: give a recording with 4000 to 192000"),
    (dict(instruct="whisper"), "use it with --model 1.7B-CustomVoice or 1.7B-VoiceDesign"),
    (dict(model="custom_voice", speaker="aidan"), "choose aiden"),
    ({"model": "custom_voice", "speaker": None, "speaker=": ""}, "no --speaker was given: choose aiden"),
    (dict(model="custom_voice", speaker="aiden", ref_audio="a.wav"), "use it with --model 0.6B or 1.7B"),
    (dict(model="voice_design", instruct="warm"), "speaker.pt is not for"),
    (dict(list_speakers=""), "no speakers of its own"),
    (dict(language="Klingon"), "no language 'Klingon'"),
    (dict(language="germn"), "choose german"),
    (dict(text=None), "give what to say"),
    (dict(text=" \n"), "text is empty"),
    (dict(text_file="empty.txt"), "one of them"),
    (dict(text=None, text_file="empty.txt"), "text is empty"),
    (dict(text=None, text_file="missing.txt"), "cannot read missing.txt"),
    (dict(text=None, text_file="binary.txt"), "not UTF-8"),
    (dict(text="caf\udce9"), "cannot read --text: it is not UTF-8"),
    (dict(text=None, text_file="utf16.txt"), "utf16.txt: it has NUL characters, as UTF-16 has: give a text in UTF-8"),
    (dict(output="nowhere/out.wav"), "no folder nowhere"),
    (dict(output="."), "it is a folder"),
    (dict(text=None, text_file="text.wav", output="text.wav"), "cannot write text.wav: it is what is read"),
    (dict(speaker="wide.pt", output="./wide.pt"), "it is what is read"),
    (dict(text="a\nb", output="-"), "add --join"),
    (dict(output=None, resume=""), "--resume needs the --output"),
    (dict(output="out.m4a"), ".m4a is not an audio format: choose one of .wav, .flac, .ogg, .opus, .mp3"),
    (dict(output="out.m4a", stream=""), ".m4a is not an audio format"),
    (dict(temperature=0), "--temperature is 0.0"),
    (dict(temperature=-1), "above 0"),
    (dict(repetition_penalty=1e-9), "from 1e-6 to 1e6"),
    (dict(temperature="nan"), "nan"),
    (dict(temperature="warm"), "invalid float value"),
    (dict(top_k=0), "from 1 to 3072"),
    (dict(top_k=4000), "from 1 to 3072"),
    (dict(top_p=0), "above 0 and at most 1"),
    (dict(repetition_penalty=0), "1.0 for none"),
    (dict(max_seq_len=4), "from 32 to 32768"),
    (dict(pause=-1, join=""), "--pause is -1.0, it must be from 0 to 60"),
    (dict(retry=-1), "--retry is -1"),
    (dict(retry=2, no_limit_speech=""), "leave out --no-limit-speech"),
    (dict(resume="", stream=""), "leave it out with --stream"),
    (dict(resume="", output="-"), "leave it out with --stream and --output -"),
    (dict(text="-", stream="", paragraphs=""), "--paragraphs needs the whole text"),
    (dict(text=None, text_file="-"), "use --text - for stdin"),
    (dict(model="wide.pt"), "wide.pt is a file: give --model the folder"),
    (dict(seed=-1), "from 0 to"),
    (dict(device="abacus"), "no device 'abacus'"),
    (dict(device="cpu:7"), "no device 'cpu:7'"),
    (dict(dtype="int3"), "int3"),
    (dict(model="./nowhere"), "no folder ./nowhere"),
    (dict(model="lacks"), "it has no speech_tokenizer/config.json"),
    (dict(model="25hz"), "only the 12 Hz models"),
    (dict(model="other"), "does not describe a Qwen3-TTS"),
    (dict(model="garbled"), "config.json cannot be read as a JSON object"),
    (dict(model="hollow"), "does not describe"),
    (dict(unknown="x"), "unrecognized arguments"),
    (dict(ouput="x"), "there is no --ouput: did you mean --output?"),
    (dict(pitch=2), "unrecognized arguments: --pitch"),  # not: did you mean
    *(
        ({word: "x"}, f"there is no --{word}: did you mean {option}?")
        for words, option in (
            ("rate length-scale tempo", "--speed"),
            ("speaker-wav reference-audio", "--ref-audio"),
            ("list-voices voices", "--list-speakers"),
            ("input gen-text", "--text"),
            ("out-path output-file", "--output"),
            ("response-format output-format", "--format"),
            ("sampling-rate", "--sample-rate"),
            ("style instructions", "--instruct"),
            ("cuda", "--device"),
        )
        for word in words.split()
    ),
]
LATE_MISTAKES = [  # those that take torch, the tokenizer or the model to find
    (dict(speaker="wide.pt"), "holds 128 numbers, this model takes 64"),
    (dict(speaker="nan.pt"), "NaN or infinite"),
    (dict(speaker="sparse.pt"), "does not hold a speaker"),
    (dict(speaker="float8.pt"), "does not hold a speaker"),
    (dict(speaker="code.pt"), "not a speaker file"),
    (dict(speaker="pickle.pt"), "not a speaker file"),
    (
        dict(max_seq_len=64, text="x" * 64),
        "the prompt takes 16 of 64 positions, too little is left for speech: raise --max-seq-len",
    ),
    (dict(fused=""), "the megakernel cannot run here: the model is not on an NVIDIA GPU"),
    (dict(model="truncated"), "download it again"),
    pytest.param(
        dict(device="cuda"),
        "finds 0 CUDA devices",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    ),
]


@pytest.fixture
def mistaken(checkpoint, wrong_files, tmp_path):
    """mistaken(change): the options of a correct call with a change, in the folder of the wrong files."""

    def mistaken(change):
        good = dict(model="base", speaker=checkpoint() / "speaker.pt", text="Hello!", output=tmp_path / "out.wav")
        good |= dict(device="cpu", max_seq_len=300) | change
        if good["model"] in ("base", "custom_voice", "voice_design"):
            good["model"] = checkpoint(good["model"])
        given = [("--" + name.replace("_", "-"), value) for name, value in good.items() if value is not None]
        return [str(word) for pair in given for word in pair if word != ""]

    with contextlib.chdir(wrong_files):
        yield mistaken


@pytest.mark.parametrize("change, words", MISTAKES + LATE_MISTAKES, ids=lambda value: str(value)[:50])
def test_mistakes_get_one_line(call, mistaken, wrong_files, tmp_path, change, words):
    """The line says what is wrong and what to do. Nothing is written, and no code in a file is executed."""
    files = sorted(wrong_files.iterdir())
    refused = call(main, *mistaken(change))
    assert_refused(refused, words)
    assert refused[1] == "" and refused[2].startswith("error: ")
    assert not list(tmp_path.iterdir()) and sorted(wrong_files.iterdir()) == files


SLOW = ["torch", "transformers", "qwen_tts", "librosa"]
FOR_RECORDINGS = ["numpy", "soundfile"]


@pytest.mark.parametrize("with_recording", [False, True], ids=["without numpy", "with numpy"])
def test_mistakes_are_found_without_slow_imports(mistaken, with_recording):
    """A mistyped option is answered before torch and transformers are imported, which takes 5 to 15 s."""
    mistakes = [(change, words) for change, words in MISTAKES if bool(change.get("ref_audio")) == with_recording]
    program = f"""
        import json
        sys.modules.update(dict.fromkeys({SLOW if with_recording else SLOW + FOR_RECORDINGS}))  # cannot be imported
        from qwen3_tts_cuda_graphs.cli.__main__ import main
        for words in json.load(sys.stdin):
            sys.argv[1:] = words
            try:
                main()
            except SystemExit as exit:
                assert exit.code == 2
    """
    result = run_program(program, ROOT, input=json.dumps([mistaken(change) for change, _ in mistakes]))
    assert result.returncode == 0, result.stderr
    for error, (_, words) in zip(result.stderr.splitlines(), mistakes, strict=True):
        assert words in error


@pytest.mark.parametrize(
    "script, slow",
    [
        ("generate.py", SLOW + FOR_RECORDINGS),
        ("extract_speaker.py", SLOW),
        ("qwen3_tts_cuda_graphs/serving/__main__.py", SLOW + FOR_RECORDINGS),
    ],
)
def test_the_scripts_themselves_import_nothing_slow_first(script, slow):
    """The test above does not include what generate.py imports before it calls cli/."""
    command = [sys.executable, "-X", "importtime", ROOT / script, "--hlep"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # for serving/, which is run with -m
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert result.returncode == 2 and "argparse" in imported
    assert not imported & set(slow)


@pytest.mark.parametrize(
    "device, init, started",
    [
        ("cuda", "calls.append('in a daemon' * threading.current_thread().daemon)", ["in a daemon"]),
        ("cuda", "raise RuntimeError('no driver')", []),
        ("cpu", "calls.append('on a CPU')", []),
    ],
)
def test_the_garbage_collector_rests_during_imports_only(mistaken, tmp_path, device, init, started):
    """The garbage collector is on again after the imports. CUDA is initialized during the imports, if it will be used.
    At exit everything is freed; otherwise triton's bindings (nanobind) print a list of 30 lines."""
    (tmp_path / "torch.py").write_text(f"""if True:
        import threading
        class Bound:
            def __init__(self):
                self.itself = self
            def __del__(self, print=print):
                print("freed")
        bound = Bound()
        calls, bfloat16 = [], None
        ones = mm = lambda *_, **__: None
        class cuda:
            def init():
                {init}
    """)
    (tmp_path / "speaking.py").write_text("""if True:
        import gc, torch
        print("imports", gc.isenabled())
        def run(args):
            print("speech", gc.isenabled(), gc.get_freeze_count() > 0, torch.calls)
    """)
    program = f"""
        from qwen3_tts_cuda_graphs import cli
        cli.__path__.insert(0, {str(tmp_path)!r})  # this speaking.py instead of the real one
        from qwen3_tts_cuda_graphs.cli.__main__ import main
        sys.argv[1:] = {mistaken(dict(device=device))}
        main()
    """
    result = run_program(program, tmp_path, ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"imports False\nspeech True True {started}\nfreed\n"


def test_ctrl_c_during_imports(mistaken, tmp_path):
    """The program ends, although some packages would take the exception for a missing module and continue."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    program = "from qwen3_tts_cuda_graphs.cli.__main__ import main\nmain()"
    command = [sys.executable, "-c", program, *mistaken({})]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        killer = threading.Timer(30, process.kill)
        killer.start()
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        killer.cancel()
    assert process.returncode == -signal.SIGINT


def test_what_nobody_calls_is_not_imported(tmp_path):
    """transformers would import these packages if they are installed."""
    names = ("jax", "sklearn", "tensorflow")
    for name in names:
        (tmp_path / f"{name}.py").write_text("print('imported', __name__)")
    look = f"from importlib.util import find_spec\nprint([*map(find_spec, {names})])"
    (tmp_path / "torch.py").write_text(look)
    program = """
        from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports
        with heavy_imports("cpu"):
            import torch
        import sklearn
    """
    result = run_program(program, tmp_path, ROOT)
    assert result.stdout == "[None, None, None]\nimported sklearn\n", result.stderr


@pytest.mark.parametrize(
    "closed, words", [("stdin", "--text - reads stdin"), ("stdout", "--output - writes to stdout")]
)
def test_closed_streams(mistaken, closed, words):
    """A service may be started without stdin, stdout or stderr, which Python then sets to None."""
    program = f"""
        sys.argv[1:] = {mistaken(dict(text="-") if closed == "stdin" else dict(output="-"))}
        sys.{closed} = None
        from qwen3_tts_cuda_graphs.cli.__main__ import main
        main()
    """
    result = run_program(program, ROOT)
    assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_lines_where_they_belong():
    """Messages never get into audio on stdout, and a terminal that cannot show a character shows its code."""
    program = """
        from pathlib import Path
        from qwen3_tts_cuda_graphs.common.command import cli_errors, show_note
        from qwen3_tts_cuda_graphs.common.output_files import is_stdout
        with cli_errors():
            stderr, sys.stderr = sys.stderr, None
            show_note("a note")
            sys.stderr = stderr
            print("\\xfc", [is_stdout(Path(name)) for name in ("-", "/dev/stdout", "/dev/null")])
            raise MemoryError
    """
    result = run_program(program, ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stdout) == (2, "\\xfc [True, True, False]\n"), result.stderr
    assert result.stderr == "error: the memory is full: free some, or give less at once\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_starts_beside_the_imports():
    """start_cuda hides its errors, so this test would be the only one to notice that it fails."""
    program = """
        from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports
        with heavy_imports(None):
            import torch
        print(torch.cuda.is_initialized(), torch.cuda.memory_stats()["allocation.all.allocated"] >= 2)
    """
    result = run_program(program, ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True True\n", "")


def test_out_of_gpu_memory(speak):
    """torch's message of many lines, which does not say what to do, is replaced by one line."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert_refused(speak("base", "Hello!", load=full), "memory is full")


def test_interrupted_stream_stays_a_valid_file(speak):
    """After Ctrl-C the audio so far can be played, and the exit code is that of an interrupted program."""

    def interrupted(method, **kwargs):
        yield from [(np.zeros(1920), 24000)] * 2
        raise KeyboardInterrupt

    code, _, stderr = speak("base", "Hello!", "--stream", speak=interrupted)
    assert code == 130 and soundfile.info("out.wav").frames == 2 * 1920
    assert stderr == "stopped: the first 0.16 s of audio are kept\n"


def test_broken_files_are_read_or_refused(checkpoint, recording, tmp_path):
    """Files with changed bytes make torch and soundfile raise many types of errors, all of which become one line."""
    soundfile.write(tmp_path / "voice.wav", *recording)
    random, path, outcomes = np.random.default_rng(0), tmp_path / "fuzzed", {"read": 0, "refused": 0}
    sources = [
        ((checkpoint() / "speaker.pt").read_bytes(), lambda: load_speaker(path, 64)),
        ((tmp_path / "voice.wav").read_bytes(), lambda: read_audio(path)),
    ]
    for content, read in sources * 100:
        mutated = bytearray(content)
        for _ in range(random.integers(1, 8)):
            position = random.integers(min(len(mutated), random.choice([64, 1024, len(mutated)])))
            mutated[position] = random.integers(256)
        if random.random() < 0.3:
            del mutated[random.integers(len(mutated)) :]
        path.write_bytes(mutated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read()
                outcomes["read"] += 1
            except ValueError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 15


def test_extract_speaker_mistakes(call, checkpoint, wrong_files):
    """The recordings are checked before the model is loaded."""
    for arguments, words in (
        (["missing.wav"], "no file"),
        (["text.wav"], "not audio"),
        (["silent.wav"], "silent"),
        (["short.wav"], "0.06 s"),
        (["silent.wav", "-o", wrong_files / "silent.wav"], "it is what is read"),
        (["long.wav", "--model", "1.7b-customvoice"], "1.7B-CustomVoice has no speaker encoder"),  # asks no hub
        (["long.wav", "--model", checkpoint("voice_design")], "has no speaker encoder"),
        (["long.wav", "-o", "a.pt", "--output", "b.pt"], "--output was given twice, a.pt and b.pt: give one"),
        ([""], "its value is empty"),
        ([], "expected at least one argument"),
    ):
        with contextlib.chdir(wrong_files):
            assert_refused(call(clone.main, "--ref_audio", *arguments), words)
    loud = wrong_files / "loud.wav"
    code, _, stderr = call(clone.main, "--ref_audio", loud, "--model", checkpoint(), "--device", "cpu")
    assert code == 2 and stderr.splitlines()[-1].endswith("they may be too loud: give others")
    assert not Path("speaker.pt").exists()


def test_extract_speaker(call, checkpoint, recording_at_another_rate, recording_file):
    """The file holds the vector alone, not the storage that it is a view of. All of several recordings count, and a
    short one gets a warning."""
    audio, rate = recording_at_another_rate
    soundfile.write("other.wav", audio[::-1], rate)

    def extract(*files):
        words = "--model", checkpoint(), "--device", "cpu", "--output", "speaker.pt"
        code, stdout, stderr = call(clone.main, "--ref_audio", *files, *words)
        assert code == 0 and f"64 numbers from {2.0 * len(files)} s" in stdout
        assert "2.0 s of audio: 3 to 30 s give a better voice" in stderr
        return torch.load("speaker.pt", weights_only=True)

    one, other, both = extract(recording_file), extract("other.wav"), extract(recording_file, "other.wav")
    assert one.shape == (64,) and one.dtype == torch.bfloat16 and Path("speaker.pt").stat().st_size < 4096
    torch.testing.assert_close(both.float(), (one.float() + other.float()) / 2, rtol=0.02, atol=0.01)


def test_random_checkpoint_of_each_type(call, tmp_path):
    """Upstream's from_pretrained loads what the script writes: model, codec, processor, and the right type."""
    code, stdout, _ = call(random_checkpoint.main, "tiny", "model", "--type", "voice_design")
    assert code == 0 and "noise" in stdout
    assert not (tmp_path / "model/speaker.pt").exists()
    assert load(str(tmp_path / "model"), "cpu", max_seq_len=64).model.tts_model_type == "voice_design"


def test_setup_downloads_the_weights(tmp_path):
    """setup.sh calls a function of the project, which no other test runs in this way."""
    (module,) = re.findall(r'bin/python -m (\S+) "\$model"', (ROOT / "setup.sh").read_text())
    (tmp_path / "huggingface_hub.py").write_text("snapshot_download = print")
    command = [sys.executable, "-m", module, "0.6B"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "Qwen/Qwen3-TTS-12Hz-0.6B-Base\n"), result.stderr


def test_setup_says_what_it_knows():
    """A mistyped word must not start an installation. The help names every model, and setup.sh accepts all of them."""
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    result = run(["bash", ROOT / "setup.sh", "0.6B", "7B"])
    message = "error: setup.sh does not know 7B: see ./setup.sh --help\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    result = run(
        ["bash", ROOT / "setup.sh", *MODELS, *map(str.lower, MODELS), "both", "none", "demo", "test", "--help"]
    )
    assert (result.returncode, result.stderr) == (0, "") and all(name in result.stdout for name in MODELS)


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_setup_shows_how_far_it_is(tmp_path, on_a_terminal):
    """setup.sh prints each step, and a terminal shows the progress of the downloads."""
    for path in (ROOT / "setup.sh", ROOT / "requirements.txt"):
        shutil.copy(path, tmp_path)
    uv = tmp_path / "uv"  # stands in for the real one: notes its arguments, and makes an environment without anything
    uv.write_text("#!/bin/sh\necho $@ >> log\nmkdir -p .venv/bin\nln -sf /bin/true .venv/bin/python\n")
    uv.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    stdout, terminal = os.openpty() if on_a_terminal else os.pipe()
    result = subprocess.run(["bash", tmp_path / "setup.sh", "demo"], stdout=terminal, env=environment, timeout=60)
    shown = os.read(stdout, 1 << 16).decode()
    os.close(stdout)
    os.close(terminal)
    steps = re.findall(r"^\[\d+:\d\d\] (\w+)", shown, re.M)
    assert result.returncode == 0
    assert steps == ["making", "installing", "importing", "environment", "making", "speaking"], shown
    installs = re.findall(r"^pip install.*", (tmp_path / "log").read_text(), re.M)
    assert len(installs) == 3 and all(("--quiet" in line) != on_a_terminal for line in installs)
