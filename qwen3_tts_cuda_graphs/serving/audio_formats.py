"""Audio as bytes on the wire: speech encoded for clients, and their recordings decoded with limits.

PyAV, which brings FFmpeg's libraries, encodes and changes the tempo while the speech is made. wav and pcm need neither.
"""

import base64
import binascii
import contextlib
import io
import re
import wave
from collections.abc import AsyncIterator, Callable

import numpy as np
import soundfile

from qwen3_tts_cuda_graphs.common.audio_files import (
    RECORDINGS,
    UNKNOWN_LENGTH,
    Chunk,
    check_recording,
    decode_with_ffmpeg,
    demuxer_for,
    to_int16,
    wav_header,
)
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.requests import Style
from qwen3_tts_cuda_graphs.serving.settings import Settings

try:
    import av

    from qwen3_tts_cuda_graphs.common.tempo import Tempo, audio_frame
except ImportError:  # check_encoding says so
    av = None

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
# FFmpeg's container, codec, bits per second, options of the container, and options of the codec, which make it about
# twice as fast as its defaults. mp3 has frames only, so answers can be joined; a page of Ogg has one packet, as FFmpeg
# sends a page when the next one is full: the first 80 ms would give no audio otherwise.
COMPRESSED = {
    "flac": ("flac", "flac", None, {}, {}),
    "mp3": ("mp3", "libmp3lame", 96_000, {"write_xing": "0", "id3v2_version": "0"}, {"compression_level": "7"}),
    "opus": ("ogg", "libopus", 64_000, {"page_duration": "20000"}, {"compression_level": "5"}),
    "aac": ("adts", "aac", 96_000, {}, {"aac_coder": "fast"}),
}
FLAC_LENGTH = 18, 26  # these bytes end with 36 bits for the number of samples; 0: it is not known

READABLE = {"WAV", "WAVEX", "FLAC", "OGG", "MP3"}  # soundfile's names of the formats that clients may upload
MAX_CHANNELS = 2
SAMPLE_RATES = range(8000, 96001)
NOT_BASE64 = "ref_audio is not base64: send the recording in base64, or as a data URL"


def check_encoding(style: Style) -> None:
    """Whether this server can encode what is asked for."""
    if av is None and (style.response_format in COMPRESSED or style.speed != 1):
        what = style.response_format if style.response_format in COMPRESSED else "speed"
        raise ApiError(
            f"{what} needs PyAV, which this server lacks: run pip install av there, or ask for wav or pcm at speed 1",
            param="response_format" if what == style.response_format else "speed",
            code="not_installed",
        )


async def encode_stream(answer, style: Style, keep: Callable[[int], None] | None = None) -> AsyncIterator[bytes]:
    """Audio in the format and tempo of `style`, as it is made. Closing this ends the speech, too.

    keep: all of it comes at the end; this is told how many bytes are kept until then, and may raise an error
    """
    stream, pieces = None, []
    try:
        async with contextlib.aclosing(aiter(answer)) as chunks:
            async for samples, rate in chunks:
                stream = stream or answer.service.encoders.open(style.response_format, rate, style.speed)
                data = await stream.add(to_int16(samples))
                if keep:
                    keep(len(data))
                    pieces.append(data)
                elif data:
                    yield data
        if stream:
            rest = await stream.finish()
            if keep:
                keep(len(rest))
            data = b"".join([*pieces, rest])
            pieces.clear()  # a whole file may be long, and take long to send
            data = stream.whole(data) if keep else data
            if data:
                yield data
    finally:
        if stream:
            stream.close()


def convert(wav: bytes, name: str) -> bytes:
    """A WAV file, as the page makes them, in another format."""
    try:
        with wave.open(io.BytesIO(wav)) as file:
            rate = file.getframerate()
            if (file.getnchannels(), file.getsampwidth()) != (1, 2) or rate not in SAMPLE_RATES:
                raise wave.Error
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            if not len(samples):
                raise EOFError
    except Exception:  # wave has others, too
        raise ValueError("the body is not a WAV file of 16 bits and one channel, or has no samples: send one") from None
    try:
        encoder = Encoder(name, rate)
        return with_length(name, rate, len(samples), encoder.add(samples) + encoder.finish())
    except av.FFmpegError:
        raise ValueError(f"{name} cannot have {rate} Hz: send a WAV file of 24,000 Hz") from None


class Encoder:
    """One stream: `add` its samples as they come, then `finish`. An encoder that is not finished is just dropped."""

    def __init__(self, name: str, rate: int, speed: float = 1.0):
        self.name = name
        self.rate = rate
        self.tempo = None if speed == 1 else Tempo(rate, speed)
        self.file = CompressedFile(rate, *COMPRESSED[name]) if name in COMPRESSED else None
        self.header = wav_header(rate, UNKNOWN_LENGTH) if name == "wav" else b""

    @property
    def samples(self) -> int:
        """That were encoded, after a change of the tempo. Plain samples are not counted."""
        return self.file.samples if self.file else 0

    def add(self, samples: np.ndarray) -> bytes:
        return self.encode(self.tempo.add(samples) if self.tempo else samples)

    def encode(self, samples: np.ndarray) -> bytes:
        if self.file:
            return self.file.add(samples)
        header, self.header = self.header, b""
        return header + samples.tobytes()

    def finish(self) -> bytes:
        rest = self.encode(self.tempo.finish()) if self.tempo else b""
        return rest + (self.file.finish() if self.file else b"")


def with_length(name: str, rate: int, samples: int, data: bytes) -> bytes:
    """All of a stream as a file: the header of a WAV or FLAC could not know its length when it was written."""
    if name == "wav":
        size = len(wav_header(0, 0))
        return wav_header(rate, len(data) - size) + data[size:]
    if name == "flac":
        start, stop = FLAC_LENGTH
        field = int.from_bytes(data[start:stop], "big") | samples
        return data[:start] + field.to_bytes(stop - start, "big") + data[stop:]
    return data


class Written(list):
    """What PyAV writes to. Not the CompressedFile itself: that would be a reference cycle."""

    def write(self, data: bytes) -> int:
        self.append(bytes(data))
        return len(data)


class CompressedFile:
    def __init__(self, rate: int, container: str, codec: str, bit_rate: int | None, options: dict, speed: dict):
        self.written = Written()
        self.rate = rate
        self.samples = 0
        self.container = av.open(self.written, "w", format=container, options={"flush_packets": "1", **options})
        self.stream = self.container.add_stream(codec, rate=rate, layout="mono")
        self.stream.codec_context.options = speed
        if bit_rate:
            self.stream.bit_rate = bit_rate
        self.container.start_encoding()  # now: it opens the codec, which takes a millisecond

    def __del__(self):
        """A client may leave early. A container and its stream refer to each other until it is closed, and hold MB."""
        with contextlib.suppress(av.FFmpegError):
            self.container.close()

    def add(self, samples: np.ndarray) -> bytes:
        if len(samples):
            self.container.mux(self.stream.encode(audio_frame(samples, self.rate, self.samples)))
            self.samples += len(samples)
        return self.take()

    def finish(self) -> bytes:
        self.container.mux(self.stream.encode(None))
        self.container.close()
        return self.take()

    def take(self) -> bytes:
        data = b"".join(self.written)
        self.written.clear()
        return data


def check_base64(text: str) -> None:
    """A quick look. One character of another kind would have Python keep four bytes for each."""
    if not text.isascii():
        raise ApiError(NOT_BASE64, param="ref_audio")


def decode_base64(text: str) -> bytes:
    """The bytes of a data URL or of plain base64. Addresses and file names are refused."""
    if re.match(r"\s*(https?|file|ftp|s3):", text[:20], re.IGNORECASE):
        problem = "ref_audio is an address, and this server fetches nothing: send the recording in base64"
        raise ApiError(problem, param="ref_audio")
    if text[:5].lower() == "data:":
        header, comma, text = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise ApiError("ref_audio is a data URL without base64: give data:audio/wav;base64,...", param="ref_audio")
    try:
        plain = text.encode("ascii").translate(None, b" \t\r\n\f\v")  # line breaks are usual
        return base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(NOT_BASE64, param="ref_audio") from None


def decode_recording(data: bytes, settings: Settings, name: str) -> Chunk:
    """A client's recording as mono samples. No more is decoded than the limits allow, whatever its header says."""
    if len(data) > settings.max_upload:
        problem = f"{name} has {len(data)} bytes, at most {settings.max_upload} are possible: give a shorter one"
        raise ApiError(problem, 413, param=name)
    if not data:
        raise ValueError(f"{name} is empty: give {RECORDINGS}")
    try:
        if demuxer := demuxer_for(data[:12]):
            audio, rate, channels = decode_with_ffmpeg(io.BytesIO(data), demuxer, settings.max_reference_seconds)
            check_layout(rate, channels, name)
        else:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                rate = file.samplerate
                if file.format not in READABLE:
                    raise ValueError
                check_layout(rate, file.channels, name)
                audio = file.read(int(settings.max_reference_seconds * rate) + 1, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, ValueError, OSError, MemoryError, RuntimeError):
        raise ValueError(f"{name} is not audio that can be read: give {RECORDINGS}") from None
    if len(audio) == 0:
        raise ValueError(f"{name} has no samples: give a recording of the voice")
    if len(audio) > int(settings.max_reference_seconds * rate):
        raise ValueError(f"{name} is longer than {settings.max_reference_seconds:g} s: give a shorter recording")
    with np.errstate(over="ignore"):  # what is infinite is refused
        audio = audio.mean(axis=1)
    check_recording(audio, rate, name)
    return audio / max(1.0, np.abs(audio).max()), rate  # floats may be beyond full scale


def check_layout(rate: int, channels: int, name: str) -> None:
    if rate not in SAMPLE_RATES or not 1 <= channels <= MAX_CHANNELS:
        have = f"{channels} channels at {rate} Hz"
        raise ApiError(f"{name} has {have}: give 1 or 2 channels at 8,000 to 96,000 Hz", param=name)
