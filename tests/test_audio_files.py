"""Audio files are written completely or not at all, in the format of their extension; streamed files can be played
while they grow."""

import os
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers import ROOT, phone_recording

from qwen3_tts_cuda_graphs.common import recording_files, speech_files
from qwen3_tts_cuda_graphs.common.formats import check_format
from qwen3_tts_cuda_graphs.common.output_files import write_bytes
from qwen3_tts_cuda_graphs.common.recording_files import read_audio
from qwen3_tts_cuda_graphs.common.samples import resample
from qwen3_tts_cuda_graphs.common.speech_files import write_audio

RATE = 24000
FRAME = 1920


def tone(frames, loudness=0.5):
    """Chunks of one frame each, as a stream yields them."""
    time = np.arange(frames * FRAME) / RATE
    samples = (loudness * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    return [(chunk, RATE) for chunk in samples.reshape(frames, FRAME)]


def run(program, shell='"$0" -c "$1"', **options):
    """Run a Python program in a shell command, in which it is "$0" -c "$1"."""
    program = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(program)
    return subprocess.run(["bash", "-c", shell, sys.executable, program], capture_output=True, **options)


@pytest.mark.parametrize("playable", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("extension", ["", ".wav", ".WAV", ".flac", ".ogg", ".opus", ".mp3"])
def test_the_extension_chooses_the_format(tmp_path, extension, playable):
    """The format is that of the extension. WAV and FLAC have the same clipped 16-bit samples."""
    lossy = {".ogg": "OGG", ".opus": "OGG", ".mp3": "MP3"}
    path, chunks = tmp_path / f"speech{extension}", tone(25, loudness=0.5 if extension in lossy else 1.2)
    assert write_audio(path, iter(chunks), playable) == pytest.approx(2.0)
    expected = np.concatenate([audio for audio, _ in chunks])
    info = soundfile.info(path)
    assert info.format == {".flac": "FLAC", **lossy}.get(extension, "WAV")
    assert (info.subtype == "OPUS") == (extension == ".opus")
    audio, rate = soundfile.read(path, dtype="float32" if extension in lossy else "int16")
    assert (rate, audio.ndim) == (RATE, 1)
    if extension in lossy:
        assert 0 <= len(audio) - len(expected) <= 3 * 1152  # encoders fill their last block
        assert abs(np.sqrt((audio[: len(expected)] ** 2).mean()) / np.sqrt((expected**2).mean()) - 1) < 0.05
    else:
        np.testing.assert_array_equal(audio, np.rint(np.clip(expected, -1, 1) * 32767))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_more_than_4_gib(tmp_path, monkeypatch):
    """The sizes in a WAV's header have 32 bits, so a longer file becomes RF64."""
    monkeypatch.setattr(speech_files, "MAX_WAV_BYTES", 3 * FRAME)
    write_audio(tmp_path / "whole.wav", tone(4), samples=4 * FRAME)
    assert soundfile.info(tmp_path / "whole.wav").format == "RF64"
    with pytest.warns(UserWarning, match="4 GiB") as warned:
        write_audio(tmp_path / "streamed.wav", tone(4), playable=True)
    assert len(warned) == 1
    whole, _ = soundfile.read(tmp_path / "whole.wav", dtype="int16")
    assert (tmp_path / "streamed.wav").read_bytes()[44:] == whole.tobytes()
    assert speech_files.wav_header(RATE, 2**40) == speech_files.wav_header(RATE, 3 * FRAME)


@pytest.mark.parametrize(
    "name", ["http://x.org/a.wav", "HTTPS://x.org/a", "s3://bucket/a.wav", "data:audio/wav;base64,A"]
)
def test_names_that_are_refused(name):
    with pytest.raises(ValueError, match="is an address: download the recording, and give its file"):
        read_audio(Path(name))


def test_streamed_file_can_be_played_at_every_moment(tmp_path):
    """The header has the current length after every chunk, and after an interrupt."""

    def chunks():
        for count in range(1, 4):
            yield np.full(FRAME, count / 4, dtype=np.float32), RATE
            audio, rate = soundfile.read(tmp_path / "out.wav")
            assert (len(audio), rate) == (FRAME * count, RATE) and abs(audio[-1] - count / 4) < 1e-4
            with wave.open(str(tmp_path / "out.wav")) as file:  # believes the header, unlike soundfile
                assert file.getnframes() == FRAME * count
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_audio(tmp_path / "out.wav", chunks(), playable=True)
    assert soundfile.info(tmp_path / "out.wav").frames == 3 * FRAME


@pytest.mark.parametrize("name", ["out.wav", "out.flac", "out.mp3"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_speech_that_fails_leaves_the_old_file(tmp_path, name, error):
    """After an error or an interrupt, the file of the last run is neither replaced nor removed."""
    path = tmp_path / name
    path.write_bytes(b"the file of the last run")

    def chunks():
        yield from tone(3)
        assert path.read_bytes() == b"the file of the last run"  # also while the new one is being written
        raise error("no more")

    with pytest.raises(error, match="no more"):
        write_audio(path, chunks())
    assert path.read_bytes() == b"the file of the last run"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_terminated_process_leaves_nothing_unfinished(tmp_path):
    """SIGTERM, which timeout and docker stop send, leaves no hidden files beside the output."""
    program = """
        from pathlib import Path
        import time
        import numpy as np
        from qwen3_tts_cuda_graphs.common.speech_files import write_audio
        from qwen3_tts_cuda_graphs.common.command import cli_errors
        def chunks():
            yield np.zeros(1920), 24000
            print("writing", flush=True)
            time.sleep(60)
        with cli_errors():
            write_audio(Path("out.wav"), chunks())
    """
    shell = '"$0" -c "$1" > started & until [ -s started ]; do sleep 0.05; done; ls -A; kill $!; wait $!'
    result = run(program, shell, text=True, cwd=tmp_path, timeout=60)
    assert (result.returncode, result.stderr) == (143, "stopped\n") and ".out.wav." in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["started"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """If the disk is full, the old file stays; a streamed file can be played as far as it goes."""
    old = {name: f"the old {name}".encode() for name in ("whole.wav", "whole.flac", "whole.mp3", "speaker.pt")}
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    program = """
        from pathlib import Path
        import numpy as np
        from qwen3_tts_cuda_graphs.common.speech_files import write_audio
        from qwen3_tts_cuda_graphs.common.output_files import write_bytes
        noise = np.random.default_rng(0).normal(scale=0.3, size=(200, 1920))
        chunks = [(chunk, 24000) for chunk in noise]
        for name, playable in (
            ("new.wav", False), ("whole.wav", False), ("whole.flac", False), ("whole.mp3", False),
            ("streamed.wav", True), ("/dev/full", False), ("/dev/full", True),
        ):
            try:
                write_audio(Path(name), iter(chunks), playable)
            except ValueError as error:
                print(error)
        try:
            write_bytes(Path("speaker.pt"), bytes(100_000))
        except ValueError as error:
            print(error)
    """
    result = run(program, 'ulimit -f 8 && "$0" -c "$1"', text=True, cwd=tmp_path)
    paths = "new.wav", "whole.wav", "whole.flac", "whole.mp3", "streamed.wav", "/dev/full", "/dev/full", "speaker.pt"
    lines = result.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"cannot write {path}" for path in paths], result.stderr
    assert all(line.endswith("choose another --output") for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {*old, "streamed.wav"}
    assert {name: (tmp_path / name).read_bytes() for name in old} == old
    assert soundfile.info(tmp_path / "streamed.wav").frames == 2 * FRAME
    assert os.path.exists("/dev/full")


def test_a_read_only_folder_is_refused_before_the_work(tmp_path):
    """A new file is written beside the old one, so the folder must be writable, which is checked first."""
    (tmp_path / "out.wav").write_bytes(b"old")
    (tmp_path / "out.wav").chmod(0o666)
    tmp_path.chmod(0o555)
    program = """
        import os
        from pathlib import Path
        import numpy as np
        from qwen3_tts_cuda_graphs.common.speech_files import write_audio
        from qwen3_tts_cuda_graphs.common.output_files import check_writable
        if os.geteuid() == 0:  # root may write everywhere: become nobody
            os.setgid(65534)
            os.setuid(65534)
        for name in ("out.wav", "new.wav"):
            for write in (check_writable, lambda path: write_audio(path, [(np.zeros(1920), 24000)])):
                try:
                    write(Path(name))
                except ValueError as error:
                    print(error)
    """
    try:
        result = run(program, text=True, cwd=tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == [
        f"cannot write {name}" for name in ("out.wav", "out.wav", "new.wav", "new.wav")
    ], result.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"out.wav": b"old"}


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("playable", [False, True], ids=["whole", "streamed"])
def test_a_player_that_was_closed(tmp_path, playable, unbuffered):
    """If the reader of the pipe ends, the exit code is 141, as for other programs, and there is no traceback. A file
    named - stays. With PYTHONUNBUFFERED=1 all of the audio is written, too."""
    (tmp_path / "-").write_bytes(b"somebody's file")
    program = f"""
        from pathlib import Path
        import numpy as np
        from qwen3_tts_cuda_graphs.common.speech_files import write_audio
        from qwen3_tts_cuda_graphs.common.command import cli_errors
        with cli_errors():
            write_audio(Path("-"), iter([(np.zeros(1920), 24000)] * 1000), {playable})
    """
    shell = '"$0" -c "$1" | head -c 100 > audio; exit ${PIPESTATUS[0]}'
    result = run(program, shell, cwd=tmp_path, env=os.environ | dict(PYTHONUNBUFFERED=unbuffered))
    assert (result.returncode, result.stderr) == (141, b"")
    assert (tmp_path / "audio").read_bytes()[:4] == b"RIFF" and (tmp_path / "audio").stat().st_size == 100
    assert (tmp_path / "-").read_bytes() == b"somebody's file"


@pytest.mark.parametrize("playable", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_symbolic_link_stays_one(tmp_path, playable, is_there):
    """The file that the link points to is made or replaced, not the link."""
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder/speech.wav", tmp_path / "latest.wav"
    if is_there:
        target.write_bytes(b"old")
    link.symlink_to("folder/speech.wav")
    write_audio(link, tone(2), playable)
    assert link.is_symlink() and soundfile.info(target).frames == 2 * FRAME
    assert [file.name for file in target.parent.iterdir()] == ["speech.wav"]


def test_the_mode_of_a_file_is_kept(tmp_path):
    """A private file stays private when it is replaced, and a shared one shared."""
    for name, mode in (("private.wav", 0o600), ("shared.flac", 0o664), ("speaker.pt", 0o640)):
        path = tmp_path / name
        path.touch()
        path.chmod(mode)
        write_bytes(path, b"content") if path.suffix == ".pt" else write_audio(path, tone(2))
        assert stat.S_IMODE(path.stat().st_mode) == mode, name
    mask = os.umask(0)
    os.umask(mask)
    write_audio(tmp_path / "new.wav", tone(2))
    assert stat.S_IMODE((tmp_path / "new.wav").stat().st_mode) == 0o666 & ~mask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_file_that_cannot_be_replaced():
    """A file that is mounted, as into a container, or another user's file in /tmp is overwritten in place."""
    program = """
        import os
        from pathlib import Path
        from qwen3_tts_cuda_graphs.common.output_files import write_bytes
        os.setgid(65534)
        os.setuid(65534)
        write_bytes(Path("speaker.pt"), b"content")
    """
    with tempfile.TemporaryDirectory() as name:  # tmp_path is in a folder that only root may enter
        folder = Path(name)
        folder.chmod(0o1777)
        (folder / "speaker.pt").write_bytes(bytes(100))
        (folder / "speaker.pt").chmod(0o666)
        result = run(program, cwd=folder)
        assert result.returncode == 0, result.stderr
        assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("speaker.pt", b"content")]


def test_a_named_pipe_stays_one(tmp_path):
    """A file must not replace a named pipe, whose reader would wait forever. Only WAV is written without seeking."""
    pipe = tmp_path / "pipe.wav"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    assert write_audio(pipe, tone(2)) == pytest.approx(2 * FRAME / RATE)
    content = reader.communicate(timeout=30)[0]
    assert content[:4] == b"RIFF" and len(content) == 44 + 2 * 2 * FRAME
    pipe = pipe.rename(tmp_path / "pipe.flac")
    with pytest.raises(ValueError, match="cannot write"):
        check_format(pipe)
    assert pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


def test_bytes_to_a_file_and_to_stdout(tmp_path):
    """extract_speaker.py --output - must neither make a file named - nor stop halfway without an error."""
    write_bytes(tmp_path / "speaker.pt", b"content")
    assert (tmp_path / "speaker.pt").read_bytes() == b"content"
    program = """
        from pathlib import Path
        from qwen3_tts_cuda_graphs.common.output_files import write_bytes
        write_bytes(Path("-"), bytes(200_000))
    """
    result = run(program, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, bytes(200_000), b"")
    result = run(program, '"$0" -c "$1" > /dev/full', cwd=tmp_path, env=os.environ | dict(PYTHONUNBUFFERED="1"))
    assert result.returncode != 0 and b"cannot write -" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["speaker.pt"]


@pytest.mark.slow  # librosa may compile for half a minute
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000, 24000])
def test_recordings_are_resampled_as_upstream_does(rate):
    import librosa

    audio = np.random.default_rng(0).normal(0, 0.1, 2 * rate + 7).astype(np.float32)
    ours = resample(audio, rate, 24000)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, librosa.resample(audio, orig_sr=rate, target_sr=24000))


# ---- Recordings of phones


PHONES = {  # container, codec, rate, channels
    "memo.m4a": ("ipod", "aac", 44100, "mono"),
    "lossless.m4a": ("ipod", "alac", 48000, "stereo"),
    "film.mp4": ("mp4", "aac", 48000, "stereo"),
    "film.mov": ("mov", "pcm_s16le", 24000, "mono"),
    "memo.3gp": ("3gp", "aac", 16000, "mono"),
    "memo.aac": ("adts", "aac", 22050, "mono"),
    "page.webm": ("webm", "libopus", 48000, "mono"),
    "page.mkv": ("matroska", "aac", 44100, "stereo"),
}


def sine(rate, seconds=3.0):
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)


@pytest.mark.parametrize("name", PHONES)
def test_a_phones_recording_is_read(tmp_path, name):
    """soundfile reads none of these formats. The extension of the file does not matter."""
    container, codec, rate, layout = PHONES[name]
    path = tmp_path / f"{name}.wav"
    path.write_bytes(phone_recording(sine(rate), rate, container, codec, layout))
    audio, found = read_audio(path)
    assert found == rate and audio.ndim == 1 and audio.dtype == np.float32
    assert 0 <= len(audio) / rate - 3.0 < 0.1  # encoders fill their last block
    assert np.sqrt((audio**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    spectrum = np.abs(np.fft.rfft(audio[: 2 * rate]))
    assert spectrum.argmax() == 2 * 440


def with_counts(data, count):
    """An MP4 whose tables have this number of samples of one byte."""
    data = bytearray(data)
    for box, offset, values in ((b"stsz", 8, (1, count)), (b"stsc", 16, (count,)), (b"stts", 12, (count, 1))):
        struct.pack_into(f">{len(values)}I", data, data.find(box) + offset, *values)
    return bytes(data)


@pytest.mark.parametrize("what", ["cut", "noise", "only a header", "40 million samples", "2**31 samples", "no frames"])
def test_a_phones_recording_that_is_broken(tmp_path, what):
    """Whatever the header says, the error comes within seconds, needs little memory, and is one sentence."""
    good = phone_recording(sine(44100), 44100, "ipod", "alac")
    content = {
        "cut": good[:-100],  # what says where the samples are is at the end
        "noise": good[:12] + np.random.default_rng(0).bytes(20_000),
        "only a header": good[:12],
        "40 million samples": with_counts(good, 40_000_000),
        "2**31 samples": with_counts(good, 2**31 - 1),
        "no frames": bytes([0xFF, 0xF1, 0x50, 0x80]) + bytes(500),
    }
    path = tmp_path / "memo.m4a"
    path.write_bytes(content[what])
    start = time.perf_counter()
    with pytest.raises(ValueError, match="memo.m4a is not audio that can be read: give a WAV, .*M4A"):
        read_audio(path)
    assert time.perf_counter() - start < 25


def test_a_phones_recording_is_not_read_for_hours(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_files, "MAX_SECONDS", 2.0)
    (tmp_path / "memo.m4a").write_bytes(phone_recording(sine(24000), 24000, "ipod", "aac"))
    with pytest.raises(ValueError, match="memo.m4a is longer than 2 s: give a shorter recording"):
        read_audio(tmp_path / "memo.m4a")


def test_without_pyav_a_phones_recording_says_what_to_install(tmp_path):
    (tmp_path / "memo.m4a").write_bytes(b"\0\0\0\x20ftypM4A ")
    program = """
        sys.modules["av"] = None
        from pathlib import Path
        from qwen3_tts_cuda_graphs.common.recording_files import read_audio
        try:
            read_audio(Path("memo.m4a"))
        except ValueError as error:
            print(error)
    """
    assert "MP3 file, or run pip install av, which reads M4A" in run(program, text=True, cwd=tmp_path).stdout
