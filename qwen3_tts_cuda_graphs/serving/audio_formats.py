"""Encodes speech in the format, speed and sample rate that a client requests.

PyAV, which includes FFmpeg's libraries, encodes and changes the tempo as the speech is generated; soxr resamples it.
lameenc encodes mp3: its LAME is three times as fast as the one in PyAV's wheels. Plain samples need none of them.
"""

import contextlib
import io
import wave
from collections.abc import Iterator
from functools import partial

import numpy as np

from qwen3_tts_cuda_graphs.common.formats import SUBTYPES
from qwen3_tts_cuda_graphs.common.samples import Resampler
from qwen3_tts_cuda_graphs.common.speech_files import UNKNOWN_LENGTH, to_bytes, wav_header
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions

try:
    import av

    from qwen3_tts_cuda_graphs.common.tempo import Tempo, audio_frame
except ImportError:  # reported by check_encoding
    av = None
try:
    import lameenc
except ImportError:
    lameenc = None

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "mulaw": "audio/ulaw",  # Twilio's <Play> accepts this name and not audio/basic
    "alaw": "audio/alaw",
}
# For each format of PyAV: FFmpeg's container, codec, kbit/s, options of the container, options of the codec. With the
# latter a codec is about twice as fast as with its defaults. A page of Ogg has only one packet: FFmpeg sends a page
# when the next one is full, and the first 80 ms would give none.
CONTAINERS = {
    "flac": ("flac", "flac", None, {}, {}),
    "opus": ("ogg", "libopus", 64, {"page_duration": "20000"}, {"compression_level": "3"}),
    "aac": ("adts", "aac", 96, {}, {"aac_coder": "fast"}),
}
COMPRESSED = (*CONTAINERS, "mp3")
ENCODER_ERRORS = (RuntimeError, av.FFmpegError) if av else RuntimeError  # lameenc raises a RuntimeError
MP3_KILOBITS = 96
MP3_QUALITY = 7  # LAME's, from 0, the best, to 9
FLAC_LENGTH = 18, 26  # range of bytes whose last 36 bits are the number of samples, 0 if unknown
SAMPLE_RATES = range(8000, 96001)  # of clients' files
NOTHING = np.empty(0, np.int16)


def check_encoding(options: SpeechOptions) -> None:
    """Raises if this server lacks the library for the format or the speed."""
    name = options.response_format
    if name == "mp3" and lameenc is None:
        raise not_installed(name, "response_format", "lameenc", "lameenc")
    if name in CONTAINERS and av is None:
        raise not_installed(name, "response_format", "PyAV", "av")
    if options.speed != 1 and av is None:
        raise not_installed("speed", "speed", "PyAV", "av")


def not_installed(what: str, field: str, library: str, package: str) -> ApiError:
    problem = f"{what} needs {library}, which this server lacks: run pip install {package} there"
    return ApiError(f"{problem}, or ask for wav or pcm at speed 1", param=field, code="not_installed")


def encoder_arguments(options: SpeechOptions, rate: int) -> tuple:
    """The arguments of an Encoder. rate: that of the speech"""
    return options.response_format, rate, options.speed, options.sample_rate or rate, options.bit_rate


def convert(wav: bytes, options: SpeechOptions) -> bytes:
    """Encode a WAV file of the page in another format."""
    try:
        with wave.open(io.BytesIO(wav)) as file:
            rate = file.getframerate()
            if (file.getnchannels(), file.getsampwidth()) != (1, 2) or rate not in SAMPLE_RATES:
                raise wave.Error
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            if not len(samples):
                raise EOFError
    except Exception:  # wave raises several
        raise ValueError("the body is not a WAV file of 16 bits and one channel, or has no samples: send one") from None
    try:
        encoder = Encoder(*encoder_arguments(options, rate))
        pieces = [encoder.add(samples), encoder.finish()]
        return b"".join(with_length(options.response_format, encoder.rate, encoder.samples, pieces))
    except ENCODER_ERRORS:
        raise ValueError(f"{options.response_format} cannot have {rate} Hz: send a WAV file of 24,000 Hz") from None


class Encoder:
    """Encodes one stream: `add` its samples as they arrive, then `finish`. It may be dropped unfinished."""

    def __init__(
        self,
        name: str,
        rate: int,
        speed: float = 1.0,
        sample_rate: int | None = None,
        bit_rate: int | None = None,
    ):
        """rate: of the samples that are added; sample_rate: of the encoded audio; bit_rate: in kbit/s"""
        self.name = name
        self.rate = sample_rate or rate
        self.part = 0
        self.new_tempo = partial(Tempo, rate, speed) if speed != 1 else lambda: None
        self.tempo = self.new_tempo()
        self.resampler = Resampler(rate, self.rate) if self.rate != rate else None
        self.file = None
        if name == "mp3":
            self.file = Mp3File(self.rate, bit_rate)
        elif name in CONTAINERS:
            self.file = CompressedFile(name, self.rate, bit_rate)
        self.header = wav_header(self.rate, UNKNOWN_LENGTH) if name == "wav" else b""

    @property
    def samples(self) -> int:
        """How many samples of a compressed format have been encoded, after the change of speed and rate."""
        return self.file.samples if self.file else 0

    def add(self, samples: np.ndarray, part: int | None = 0) -> bytes:
        """part: its number, or None for silence, which keeps its length at any speed. Each part has its own Tempo, so
        that the next one begins exactly where it should."""
        rest = NOTHING
        if part != self.part:
            rest = self.rest_of_part()
            self.part, self.tempo = part, None if part is None else self.new_tempo()
        if self.tempo and len(samples):
            samples = self.tempo.add(samples)
        return self.encode(np.concatenate([rest, samples]) if len(rest) else samples)

    def rest_of_part(self) -> np.ndarray:
        return self.tempo.finish() if self.tempo else NOTHING

    def encode(self, samples: np.ndarray) -> bytes:
        return self.write(self.resampler.add(samples) if self.resampler and len(samples) else samples)

    def write(self, samples: np.ndarray) -> bytes:
        if self.file:
            return self.file.add(samples)
        header, self.header = self.header, b""
        return header + to_bytes(samples, SUBTYPES.get(self.name, "PCM_16"))

    def finish(self) -> bytes:
        data = self.encode(self.rest_of_part())
        if self.resampler:
            data += self.write(self.resampler.finish())
        return data + (self.file.finish() if self.file else b"")


def with_length(name: str, rate: int, samples: int, pieces: list[bytes]) -> list[bytes]:
    """The pieces of a stream, with the length in the header of a WAV or FLAC, which was written before it was known.
    They are not joined, as that may take long."""
    first, *others = [piece for piece in pieces if piece] or [b""]
    if name == "wav":
        size = len(wav_header(0, 0))
        first = wav_header(rate, sum(map(len, pieces)) - size) + first[size:]
    if name == "flac":
        start, stop = FLAC_LENGTH
        field = int.from_bytes(first[start:stop], "big") | samples
        first = first[:start] + field.to_bytes(stop - start, "big") + first[stop:]
    return [first, *others]


def slices(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


class Mp3File:
    """It consists of frames only, so that answers can be concatenated."""

    def __init__(self, rate: int, kilobits: int | None):
        """kilobits: per second; None: MP3_KILOBITS"""
        self.samples = 0
        self.lame = lameenc.Encoder()
        self.lame.silence()  # no messages
        self.lame.set_channels(1)
        self.lame.set_in_sample_rate(rate)
        self.lame.set_out_sample_rate(rate)
        self.lame.set_bit_rate(kilobits or MP3_KILOBITS)
        self.lame.set_quality(MP3_QUALITY)
        self.lame.encode(b"")  # opens LAME, which takes a millisecond, before the first samples

    def add(self, samples: np.ndarray) -> bytes:
        self.samples += len(samples)
        return bytes(self.lame.encode(samples.tobytes()))

    def finish(self) -> bytes:
        return bytes(self.lame.flush())


class Written(list):
    """The file object that PyAV writes to. Not the CompressedFile itself, which would be a reference cycle."""

    def write(self, data: bytes) -> int:
        self.append(bytes(data))
        return len(data)


class CompressedFile:
    def __init__(self, name: str, rate: int, kilobits: int | None):
        """kilobits: per second; None: that of CONTAINERS"""
        container, codec, own_kilobits, container_options, codec_options = CONTAINERS[name]
        self.written = Written()
        self.rate = rate
        self.samples = 0
        self.container = av.open(
            self.written, "w", format=container, options={"flush_packets": "1", **container_options}
        )
        self.stream = self.container.add_stream(codec, rate=rate, layout="mono")
        self.stream.codec_context.options = codec_options
        if kilobits or own_kilobits:
            self.stream.bit_rate = 1000 * (kilobits or own_kilobits)
        self.container.start_encoding()  # opens the codec, which takes a millisecond, before the first samples

    def __del__(self):
        """A container and its stream refer to each other until it is closed, and hold megabytes; a client may leave
        before the end."""
        with contextlib.suppress(av.FFmpegError):
            self.container.close()

    def add(self, samples: np.ndarray) -> bytes:
        if len(samples):
            self.container.mux(self.stream.encode(audio_frame(samples, self.rate, self.samples)))
            self.samples += len(samples)
        return self.take_written()

    def finish(self) -> bytes:
        self.container.mux(self.stream.encode(None))
        self.container.close()
        return self.take_written()

    def take_written(self) -> bytes:
        data = b"".join(self.written)
        self.written.clear()
        return data
