"""Formats for telephones and players: sample rates, G.711, and the names that other programs use."""

import io

import numpy as np
import pytest
import soundfile
import soxr
from serving_helpers import SHORT

from qwen3_tts_cuda_graphs.cli.__main__ import main
from qwen3_tts_cuda_graphs.common.formats import RATES, format_and_rate, read_format
from qwen3_tts_cuda_graphs.common.samples import Resampler, at_rate
from qwen3_tts_cuda_graphs.common.speech_files import to_bytes, write_audio
from qwen3_tts_cuda_graphs.serving.audio_formats import Encoder

av = pytest.importorskip("av")

RATE = 24000
OTHER_RATES = [rate for rate in RATES if rate != RATE]


def noise(samples: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 9000, samples).clip(-32767, 32767).astype(np.int16)


def in_pieces(samples: np.ndarray, largest: int = 2500) -> list[np.ndarray]:
    """Split into odd sizes, some of them zero or one."""
    ends = np.cumsum(np.random.default_rng(1).integers(0, largest, len(samples)))
    return np.split(samples, [0, 1, 1, *ends[(ends > 1) & (ends < len(samples))]])


def by_soxr(samples: np.ndarray, rate: int) -> np.ndarray:
    """The whole resampled at once."""
    made = soxr.resample(samples.astype(np.float32), RATE, rate, quality="HQ")
    return np.rint(made.clip(-32767, 32767)).astype(np.int16)


def read_raw(data: bytes, name: str, rate: int = 8000) -> np.ndarray:
    """G.711 as FFmpeg decodes it."""
    with av.open(io.BytesIO(data), format=name, options={"sample_rate": str(rate)}) as file:
        return np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])


# ---- Rates


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("size", [1, 1919, 100_003])
def test_joined_chunks_are_the_whole_at_once(rate, size):
    """Resampling in chunks adds no click and no sample."""
    samples = noise(size)
    resampler = Resampler(RATE, rate)
    joined = np.concatenate([*map(resampler.add, in_pieces(samples)), resampler.finish()])
    np.testing.assert_array_equal(joined, by_soxr(samples, rate))
    assert abs(len(joined) - size * rate / RATE) <= 0.5
    if rate == RATE:
        np.testing.assert_array_equal(joined, samples)


@pytest.mark.parametrize("rate", OTHER_RATES)
def test_the_first_chunk_leaves_at_once(rate):
    """At most 20 of its 80 ms are buffered, and never more than 75 ms."""
    resampler, made = Resampler(RATE, rate), 0
    for number, chunk in enumerate(np.split(noise(100 * 1920), 100), 1):
        made += len(resampler.add(chunk))
        assert 0.08 * number - made / rate <= (0.02 if number == 1 else 0.075)


@pytest.mark.parametrize("speed", [1.0, 1.5])
@pytest.mark.parametrize("rate", OTHER_RATES)
def test_an_encoder_resamples_after_the_tempo(rate, speed):
    samples = noise(30_011)
    tempo, resampled = Encoder("pcm", RATE, speed), Encoder("pcm", RATE, speed, rate)
    in_tempo = tempo.add(samples) + tempo.finish()
    made = b"".join([*map(resampled.add, in_pieces(samples)), resampled.finish()])
    difference = np.frombuffer(made, "<i2") - by_soxr(np.frombuffer(in_tempo, "<i2"), rate).astype(int)
    assert not difference.any()


# ---- G.711


@pytest.mark.parametrize("name, subtype", [("mulaw", "ULAW"), ("alaw", "ALAW")])
def test_g711_is_what_another_decoder_reads(name, subtype):
    """The decoded sample differs by at most half a step: steps are 1/16 of the sample, at least 16."""
    samples = np.arange(-(1 << 15), 1 << 15).astype(np.int16)
    heard = read_raw(to_bytes(samples, subtype), name).astype(int)
    wanted = samples.astype(int).clip(heard.min(), heard.max())
    assert np.all(np.abs(heard - wanted) <= np.abs(wanted) / 32 + 9)
    np.testing.assert_array_equal(read_raw(to_bytes(heard.astype(np.int16), subtype), name), heard)
    assert len(np.unique(heard)) >= 255  # mu-law has two zeros
    file = soundfile.SoundFile(io.BytesIO(to_bytes(samples, subtype)), "r", 8000, 1, subtype, format="RAW")
    np.testing.assert_array_equal(file.read(dtype="int16"), heard)


# ---- Names


@pytest.mark.parametrize(
    "name, meant",
    {
        "pcm_16000": ("pcm", 16000, None),
        "PCM_44100": ("pcm", 44100, None),
        "pcm16": ("pcm", None, None),
        "ulaw_8000": ("mulaw", 8000, None),
        "alaw_8000": ("alaw", 8000, None),
        "g711_ulaw": ("mulaw", None, None),
        "mp3_44100_128": ("mp3", 44100, 128),
        "opus_48000_64": ("opus", 48000, 64),
        "ogg": ("opus", None, None),
        "ogg_opus": ("opus", None, None),
        "wav": ("wav", None, None),
        "_16000": ("_16000", None, None),
    }.items(),
)
def test_names_of_other_programs(name, meant):
    assert read_format(name) == meant


@pytest.mark.parametrize(
    "fields, name, rate",
    [
        ({"response_format": "pcm_16000"}, "pcm", 16000),
        ({"response_format": "pcm", "sample_rate": 24000}, "pcm", 24000),
        ({"response_format": "pcm", "sample_rate": None, "speed": 1}, "pcm", 24000),
        ({"response_format": "wav", "sample_rate": 44100}, "wav", 44100),
        ({"response_format": "flac", "sample_rate": 22050}, "flac", 22050),
        ({"response_format": "ulaw_8000"}, "mulaw", 8000),
        ({"response_format": "alaw"}, "alaw", 8000),
        ({"response_format": "mulaw", "sample_rate": 24000}, "mulaw", 24000),
    ],
)
def test_lossless_answers(server, fields, name, rate):
    """Streamed, whole and over a WebSocket: the model's samples at another rate, and the rate is reported."""
    plain = np.frombuffer(server.pcm(), "<i2")
    expected = by_soxr(plain, rate) if rate != RATE else plain
    streamed, whole = (server.speak(**fields, **more) for more in ({}, {"stream": False}))
    with server.talk(SHORT | fields) as session:
        (start, *_), sent = session.say("Hello there.")
    assert (start["type"], start["sample_rate"], start["format"]) == ("audio.start", rate, name)
    types = {"mulaw": "audio/ulaw", "alaw": "audio/alaw", "flac": "audio/flac"}
    for answer in (streamed, whole):
        assert answer.status == 200 and answer.headers["X-Sample-Rate"] == str(rate)
        assert answer.headers["Content-Type"] == types.get(name, f"audio/{name}")
        assert "X-Ignored" not in answer.headers
    for data in (streamed.body, whole.body, sent):
        if name in ("mulaw", "alaw"):
            assert data == to_bytes(expected, {"mulaw": "ULAW", "alaw": "ALAW"}[name])
        elif name == "pcm":
            assert data == expected.tobytes()
        else:
            with av.open(io.BytesIO(data)) as file:
                assert file.streams.audio[0].rate == rate
                audio = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
            np.testing.assert_array_equal(np.concatenate(audio), expected)


@pytest.mark.parametrize("name", ["mp3_44100_128", "mp3_22050_32", "aac_16000", "ogg_48000", "opus_8000_32"])
def test_compressed_answers(server, name):
    """A decoder finds the rate (Opus is always decoded to 48 kHz), and nearly as much audio as was generated."""
    answer = server.speak(response_format=name, stream=False)
    kind, rate, kilobits = read_format(name)
    assert answer.status == 200 and answer.headers["X-Sample-Rate"] == str(rate)
    with av.open(io.BytesIO(answer.body)) as file:
        assert file.streams.audio[0].rate == (48000 if kind == "opus" else rate)
        frames = [*file.decode(audio=0)]
    seconds = sum(frame.samples / frame.sample_rate for frame in frames)
    assert 0.39 < seconds < 0.65  # five frames, and the padding of the encoder's last block
    if kind == "mp3":
        assert len(answer.body) * 8 / seconds == pytest.approx(1000 * kilobits, rel=0.05)


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"sample_rate": 11025}, "sample_rate", "is 11025: choose 8000, 16000, 22050, 24000, 44100 or 48000"),
        ({"sample_rate": "8000"}, "sample_rate", 'is "8000": it must be a valid integer'),
        ({"response_format": "pcm_12345"}, "sample_rate", "is 12345: choose 8000"),
        ({"response_format": "pcm_0"}, "sample_rate", "is 0: choose 8000"),
        ({"response_format": "mp3_44100_0"}, "bit_rate", "is 0, it must be from 32"),
        ({"response_format": "opus_22050"}, "sample_rate", "22050 with opus: choose 8000, 16000, 24000 or 48000"),
        ({"response_format": "opus", "sample_rate": 44100}, "sample_rate", "choose 8000, 16000, 24000 or 48000"),
        ({"response_format": "pcm_8000", "sample_rate": 16000}, None, "pcm_8000 and sample_rate 16000: leave out one"),
        ({"response_format": "pcm_8000_64"}, "bit_rate", "pcm has none: leave it out"),
        ({"response_format": "mp3_44100_999"}, "bit_rate", "must be from 32 to 192"),
        ({"response_format": "g722"}, "response_format", "it must be 'wav', 'pcm'"),
        ({"response_format": ["pcm"]}, "response_format", "is a list: it must be 'wav'"),
    ],
)
def test_impossible_formats(server, fields, param, words):
    answer = server.speak(**fields)
    assert answer.status == 400 and words in answer.error["message"] and answer.error["param"] == param


# ---- Files


@pytest.mark.parametrize("playable", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "file, name, container, subtype, rate",
    [
        ("call.ulaw", None, "RAW", "ULAW", 8000),
        ("call.AL", None, "RAW", "ALAW", 8000),
        ("call.wav", "mulaw", "WAV", "ULAW", 8000),
        ("call.wav", "alaw_16000", "WAV", "ALAW", 16000),
        ("call.wav", "pcm_22050", "WAV", "PCM_16", 22050),
        ("call.pcm", None, "RAW", "PCM_16", None),
        ("call.sln16", "pcm_16000", "RAW", "PCM_16", 16000),
        ("call.ogg", "opus_48000", "OGG", "OPUS", 48000),
        ("call.ogg", None, "OGG", "VORBIS", None),
        ("call", "mp3_44100", "MP3", "MPEG_LAYER_III", 44100),
    ],
)
def test_files(tmp_path, file, name, container, subtype, rate, playable):
    """soundfile detects the format given by --output and --format, and FFmpeg decodes the same samples from a WAV with
    G.711."""
    path, samples = tmp_path / file, noise(48_000)
    named, file_rate = format_and_rate(path, name, None)
    assert file_rate == rate
    chunks = at_rate([(samples / np.float32(32767), RATE)], rate or RATE)
    assert write_audio(path, chunks, playable, name=named) == pytest.approx(2.0)
    raw = dict(channels=1, samplerate=rate or RATE, subtype=subtype, format="RAW") if container == "RAW" else {}
    with soundfile.SoundFile(path, **raw) as sound:
        assert (sound.format, sound.subtype) == (container, subtype)
        assert sound.samplerate == (rate or RATE)
        audio = sound.read(dtype="int16")
    assert len(audio) == pytest.approx(2 * (rate or RATE), abs=0 if container in ("WAV", "RAW") else 3 * 1152)
    if (container, subtype) == ("WAV", "ULAW"):
        with av.open(str(path)) as wav:
            np.testing.assert_array_equal(np.concatenate([f.to_ndarray()[0] for f in wav.decode(audio=0)]), audio)
        assert path.read_bytes()[-16000:] == to_bytes(by_soxr(samples, 8000), "ULAW")


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--output x.opus --sample-rate 44100", "44100 with opus: choose 8000, 16000, 24000 or 48000"),
        ("--output x.wav --sample-rate 11025", "--sample-rate is 11025: choose 8000, 16000"),
        ("--sample-rate 0", "--sample-rate is 0: choose 8000"),
        ("--output x.mp3 --format wav", "it would not be .mp3 but wav: call it x.wav"),
        ("--output x.wav --format aac", "--format is aac, which is not written here: choose wav, flac"),
        ("--format pcm_8000 --sample-rate 16000", "are two rates: leave out one of them"),
        ("--output - --format mp3", "takes wav, pcm, mulaw and alaw only"),
        ("--format mp3_44100_128", "has a bit rate, which only the server takes: give mp3_44100"),
    ],
)
def test_mistakes_on_the_command_line(call, tmp_path, words, problem):
    code, _, error = call(main, "Hello!", *words.split())
    assert code == 2 and problem in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_the_command_line_writes_them(call, checkpoint, tmp_path):
    """An announcement for a telephone, also streamed to stdout, and the same speech without conversion."""
    model = ["--model", checkpoint(), "--speaker", checkpoint() / "speaker.pt", "--device", "cpu"]

    for file in ("plain.wav", "call.ulaw"):
        assert call(main, "Hello!", "--seed", 1, *model, "--output", file)[0] == 0
    plain, rate = soundfile.read(tmp_path / "plain.wav", dtype="int16")
    expected = to_bytes(by_soxr(plain, 8000), "ULAW")
    assert rate == RATE and (tmp_path / "call.ulaw").read_bytes() == expected
    words = "--output - --format ulaw_8000 --stream".split()
    assert call(main, "Hello!", "--seed", 1, *model, *words)[0] == 0 and call.audio == expected
