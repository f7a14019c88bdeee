"""The scripts as a person runs them, on a tiny checkpoint."""
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import extract_speaker
import generate
import random_checkpoint
from generate import load
from voices import load_speaker
from wav import write_wav

ROOT = Path(__file__).parents[1]


def run(script, *arguments):
    return subprocess.run([sys.executable, ROOT / script, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a script's main in this process, which is quicker. -> exit code, stdout, stderr"""
    def call(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)      # put back what main changes
        try:
            main()
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()
    return call


def options(folder, **change):
    chosen = dict(model=folder, speaker=folder / "speaker.pt", text="Hello!", output="out.wav", device="cpu") | change
    return [word for name, value in chosen.items() for word in (f"--{name}", value)]


def test_generate_writes_what_the_function_speaks(checkpoint, tmp_path):
    out = tmp_path / "out.wav"
    result = run("generate.py", *options(checkpoint(), output=out), "--language", "English", "--seed", 2,
                 "--temperature", 0.8, "--top-k", 30, "--top-p", 0.9, "--repetition-penalty", 1.1, "--max-seq-len", 300,
                 "--dtype", "float32")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith(f"{out}: ") and "s of audio in" in result.stdout and "RTF" in result.stdout
    audio, rate = soundfile.read(out, dtype="float32")
    info = soundfile.info(out)
    assert (rate, info.channels, info.subtype, len(audio) % 1920) == (24000, 1, "PCM_16", 0)

    tts = load(str(checkpoint()), "cpu", max_seq_len=300)
    torch.manual_seed(2)
    (expected,), _ = tts.generate_voice_clone(
        "Hello!", "English", voice_clone_prompt=load_speaker(checkpoint() / "speaker.pt", 64), temperature=0.8,
        top_k=30, top_p=0.9, repetition_penalty=1.1)
    np.testing.assert_allclose(audio, expected, rtol=0, atol=2 / 2**15)


def test_streamed_bytes_are_the_same(call, checkpoint, tmp_path):
    """To a file, streamed to a file, and streamed to stdout, whose header cannot know the length."""
    arguments = "--max-seq-len", 300, "--seed", 2
    for name, more in (("whole", ()), ("streamed", ("--stream",))):
        code, stdout, stderr = call(generate.main, *options(checkpoint(), output=tmp_path / name), *arguments, *more)
        assert code == 0 and stderr == "" and ("first audio after" in stdout) == bool(more)
    result = subprocess.run([sys.executable, ROOT / "generate.py", *map(str, options(checkpoint(), output="-")),
                             *map(str, arguments), "--stream"], capture_output=True)
    whole, streamed = ((tmp_path / name).read_bytes() for name in ("whole", "streamed"))
    assert whole == streamed and len(whole) > 44 and result.stdout[44:] == whole[44:]
    assert result.stderr.startswith(b"-: ")
    assert soundfile.info(tmp_path / "whole").frames * 2 + 44 == len(whole)


def test_streamed_file_can_be_played_at_every_moment(tmp_path):
    def chunks():
        for count in range(1, 4):
            yield np.full(1920, count / 4, dtype=np.float32), 24000
            audio, rate = soundfile.read(tmp_path / "out.wav")
            assert (len(audio), rate) == (1920 * count, 24000) and abs(audio[-1] - count / 4) < 1e-4
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        write_wav(tmp_path / "out.wav", chunks())
    assert soundfile.info(tmp_path / "out.wav").frames == 3 * 1920


def test_cut_off_speech_is_said(call, checkpoint, tmp_path):
    code, _, stderr = call(generate.main, *options(checkpoint(), output=tmp_path / "out.wav"), "--max-seq-len", 12)
    assert code == 0 and stderr.startswith("warning: the speech was cut off after 3 frames")
    assert len(stderr.splitlines()) == 1


def test_extract_speaker(call, checkpoint, recording, tmp_path):
    soundfile.write(tmp_path / "voice.wav", *recording)
    arguments = ["--output", tmp_path / "speaker.pt", "--model", checkpoint(), "--device", "cpu"]
    assert run("extract_speaker.py", "--ref_audio", tmp_path / "voice.wav", *arguments).returncode == 0
    code, stdout, _ = call(extract_speaker.main, "--ref-audio", tmp_path / "voice.wav", *arguments)
    assert code == 0 and "64 numbers from 2.0 s" in stdout
    speaker = torch.load(tmp_path / "speaker.pt", weights_only=True)
    assert speaker.shape == (64,) and speaker.dtype == torch.bfloat16
    assert (tmp_path / "speaker.pt").stat().st_size < 4096
    spoken = options(checkpoint(), speaker=tmp_path / "speaker.pt", output=tmp_path / "out.wav")
    assert call(generate.main, *spoken, "--max-seq-len", 300)[0] == 0


class Boom:
    def __reduce__(self):
        return Path.touch, (Path("boom"),)


def bad_speakers(folder):
    torch.save(torch.zeros(128), folder / "wide.pt")
    torch.save({"a": 1}, folder / "dict.pt")
    torch.save(Boom(), folder / "code.pt")
    (folder / "text.pt").write_text("not a tensor")


@pytest.mark.parametrize("change, words", [
    (dict(speaker="missing.pt"), "no file"), (dict(speaker="wide.pt"), "holds 128 numbers, this model takes 64"),
    (dict(speaker="dict.pt"), "does not hold a speaker"), (dict(speaker="code.pt"), "not a speaker file"),
    (dict(speaker="text.pt"), "not a speaker file"), (dict(text=" \n"), "text is empty"),
    (dict(output="nowhere/out.wav"), "folder that does not exist"), (dict(model="./nowhere"), "no folder ./nowhere"),
    (dict(language="Klingon"), "klingon"), (dict(temperature=0), "temperature 0.0"),
], ids=str)
def test_mistakes_get_one_line(call, checkpoint, tmp_path, monkeypatch, change, words):
    bad_speakers(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, stderr = call(generate.main, *options(checkpoint(), **change), "--max-seq-len", 300)
    assert code == 2 and stderr.startswith("error: ") and len(stderr.splitlines()) == 1
    assert words.lower() in stderr.lower()
    assert not (tmp_path / "out.wav").exists() and not (tmp_path / "boom").exists()


def test_extract_speaker_mistakes(call, tmp_path):
    (tmp_path / "text.wav").write_text("not audio")
    soundfile.write(tmp_path / "short.wav", np.zeros(1000), 16000)
    for name, words in (("missing.wav", "no file"), ("text.wav", "not audio"), ("short.wav", "0.06 s")):
        code, _, stderr = call(extract_speaker.main, "--ref_audio", tmp_path / name)
        assert code == 2 and words in stderr and len(stderr.splitlines()) == 1


def test_random_checkpoint_of_each_type(call, tmp_path):
    """What the script writes, upstream's from_pretrained loads: model, codec, processor, and the right type."""
    for kind in ("custom_voice", "voice_design"):
        code, stdout, _ = call(random_checkpoint.main, "tiny", tmp_path / kind, "--type", kind)
        assert code == 0 and "noise" in stdout
        assert not (tmp_path / kind / "speaker.pt").exists()
        assert load(str(tmp_path / kind), "cpu", max_seq_len=64).model.tts_model_type == kind


def test_setup_refuses_what_it_does_not_know():
    result = subprocess.run(["bash", ROOT / "setup.sh", "7B"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage" in result.stderr
