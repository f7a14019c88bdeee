"""The scripts as a person runs them, on a tiny checkpoint."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from generate import load
from voices import load_speaker

ROOT = Path(__file__).parents[1]


def run(script, *arguments):
    return subprocess.run([sys.executable, ROOT / script, *map(str, arguments)], capture_output=True, text=True)


def generate(folder, output, *more, text="Hello!", speaker=None):
    return run("generate.py", "--model", folder, "--speaker", speaker or folder / "speaker.pt", "--text", text,
               "--output", output, "--device", "cpu", *more)


def test_generate_writes_what_the_function_speaks(checkpoint, tmp_path):
    out = tmp_path / "out.wav"
    result = generate(checkpoint(), out, "--language", "English", "--seed", 2, "--temperature", 0.8, "--top-k", 30,
                      "--top-p", 0.9, "--repetition-penalty", 1.1, "--max-seq-len", 300, "--dtype", "float32")
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


def test_cut_off_speech_is_said(checkpoint, tmp_path):
    result = generate(checkpoint(), tmp_path / "out.wav", "--max-seq-len", 12)
    assert result.returncode == 0 and result.stderr.startswith("warning: the speech was cut off after 2 frames")
    assert len(result.stderr.splitlines()) == 1


def test_extract_speaker(checkpoint, recording, tmp_path):
    soundfile.write(tmp_path / "voice.wav", *recording)
    for option in ("--ref_audio", "--ref-audio"):
        result = run("extract_speaker.py", option, tmp_path / "voice.wav", "--output", tmp_path / "speaker.pt",
                     "--model", checkpoint(), "--device", "cpu")
        assert result.returncode == 0, result.stderr
    speaker = torch.load(tmp_path / "speaker.pt", weights_only=True)
    assert speaker.shape == (64,) and speaker.dtype == torch.bfloat16
    assert (tmp_path / "speaker.pt").stat().st_size < 4096
    assert generate(checkpoint(), tmp_path / "out.wav", speaker=tmp_path / "speaker.pt").returncode == 0


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
    (dict(output="nowhere/out.wav"), "folder that does not exist"), (dict(model="nowhere/model"), "nowhere/model"),
    (dict(language="Klingon"), "klingon"), (dict(temperature=0), "temperature 0.0"),
], ids=str)
def test_mistakes_get_one_line(checkpoint, tmp_path, change, words):
    bad_speakers(tmp_path)
    options = dict(model=checkpoint(), speaker=checkpoint() / "speaker.pt", text="Hello!", output="out.wav",
                   device="cpu") | change
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    result = subprocess.run([sys.executable, ROOT / "generate.py", *arguments], capture_output=True, text=True,
                            cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert words.lower() in result.stderr.lower()
    assert not (tmp_path / "out.wav").exists() and not (tmp_path / "boom").exists()


def test_extract_speaker_mistakes(tmp_path):
    (tmp_path / "text.wav").write_text("not audio")
    soundfile.write(tmp_path / "short.wav", np.zeros(1000), 16000)
    for name, words in (("missing.wav", "no file"), ("text.wav", "not audio"), ("short.wav", "0.06 s")):
        result = run("extract_speaker.py", "--ref_audio", tmp_path / name)
        assert result.returncode == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1


def test_random_checkpoint_of_each_type(tmp_path):
    """What the script writes, upstream's from_pretrained loads: model, codec, processor, and the right type."""
    for kind in ("custom_voice", "voice_design"):
        result = run("random_checkpoint.py", "tiny", tmp_path / kind, "--type", kind)
        assert result.returncode == 0 and "noise" in result.stdout
        assert not (tmp_path / kind / "speaker.pt").exists()
        assert load(str(tmp_path / kind), "cpu", max_seq_len=64).model.tts_model_type == kind


def test_setup_refuses_what_it_does_not_know():
    result = subprocess.run(["bash", ROOT / "setup.sh", "7B"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage" in result.stderr
