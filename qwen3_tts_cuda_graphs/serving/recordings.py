"""Decodes clients' recordings in helper processes with limits, as a native decoder may crash, hang or write to stderr.
Run as a module, this is such a helper.
"""

import base64
import io
import re
import resource
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import soundfile

from qwen3_tts_cuda_graphs.common.recording_files import RECORDINGS, check_recording, decode_with_ffmpeg, demuxer_for
from qwen3_tts_cuda_graphs.common.samples import Chunk
from qwen3_tts_cuda_graphs.serving.audio_formats import SAMPLE_RATES
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error
from qwen3_tts_cuda_graphs.serving.helper import Helper, HelperEnded, answer_questions, start_helper
from qwen3_tts_cuda_graphs.serving.messages import pack
from qwen3_tts_cuda_graphs.serving.settings import Settings

SECONDS_TO_DECODE = 30  # including the start of a helper
MAX_MEMORY = (
    1 << 30
)  # bytes of address space: the libraries take a quarter, and a file may make them allocate any amount
READABLE = {"WAV", "WAVEX", "FLAC", "OGG", "MP3"}  # formats that are decoded with soundfile, by its names
MAX_CHANNELS = 2
NOT_BASE64 = "ref_audio is not base64: send the recording in base64, or as a data URL"


async def start_decoder(seconds: float = SECONDS_TO_DECODE) -> Helper:
    return await start_helper("recordings", seconds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Decoders:
    """Helpers, each of which decodes one recording at a time. Idle ones are kept for the next recordings."""

    def __init__(self, start: Callable[[], Awaitable[Helper]] = start_decoder):
        self.start = start
        self.idle = []

    async def decode(self, data: bytes, settings: Settings, name: str) -> Chunk:
        """Decode a client's recording to mono samples. name: its field, for error messages"""
        helper = await self.take()
        limits = dict(max_upload=settings.max_upload, max_reference_seconds=settings.max_reference_seconds)
        try:
            answer, samples = await helper.ask(dict(name=name, limits=limits), data)
        except HelperEnded:
            problem = f"{name} cannot be decoded: give another recording, {RECORDINGS}"
            raise ApiError(problem, param=name) from None
        except BaseException:  # cancelled: the helper is still busy with this recording
            helper.close()
            raise
        self.idle.append(helper)
        if "error" in answer:
            raise ApiError(answer["error"], answer["status"], name)
        return np.frombuffer(samples, np.float32), answer["rate"]

    async def take(self) -> Helper:
        while self.idle:
            helper = self.idle.pop()
            if not helper.is_over:
                return helper
        try:
            return await self.start()
        except OSError:  # no free file descriptors or memory
            raise ApiError("no recording can be decoded now: try again later", 503, code="too_many") from None

    def close(self) -> None:
        for helper in self.idle:
            helper.close()


def check_base64(text: str) -> None:
    """A quick check: with other characters, Python stores up to four bytes for each character of the text."""
    if not text.isascii():
        raise ApiError(NOT_BASE64, param="ref_audio")


def decode_base64(text: str) -> bytes:
    """The bytes of a data URL or of plain base64. Other URLs and file names are refused."""
    if re.match(r"\s*(https?|file|ftp|s3):", text[:20], re.IGNORECASE):
        problem = "ref_audio is an address, and this server fetches nothing: send the recording in base64"
        raise ApiError(problem, param="ref_audio")
    if text[:5].lower() == "data:":
        header, comma, text = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise ApiError("ref_audio is a data URL without base64: give data:audio/wav;base64,...", param="ref_audio")
    try:
        plain = text.encode("ascii").translate(None, b" \t\r\n\f\v")  # line breaks are common
        return base64.b64decode(plain, validate=True)
    except ValueError:
        raise ApiError(NOT_BASE64, param="ref_audio") from None


def decode_recording(data: bytes, settings: Settings, name: str) -> Chunk:
    """Decode a recording to mono samples, never more than the limits allow, whatever the file's header says."""
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
    except (ValueError, OSError, MemoryError, RuntimeError):  # soundfile raises RuntimeErrors
        raise ValueError(f"{name} is not audio that can be read: give {RECORDINGS}") from None
    if len(audio) == 0:
        raise ValueError(f"{name} has no samples: give a recording of the voice")
    if len(audio) > int(settings.max_reference_seconds * rate):
        raise ValueError(f"{name} is longer than {settings.max_reference_seconds:g} s: give a shorter recording")
    with np.errstate(over="ignore"):  # check_recording refuses infinite samples
        audio = audio.mean(axis=1)
    check_recording(audio, rate, name)
    return audio / max(1.0, np.abs(audio).max()), rate  # float samples may exceed full scale


def check_layout(rate: int, channels: int, name: str) -> None:
    if rate not in SAMPLE_RATES or not 1 <= channels <= MAX_CHANNELS:
        have = f"{channels} channels at {rate} Hz"
        raise ApiError(f"{name} has {have}: give 1 or 2 channels at 8,000 to 96,000 Hz", param=name)


# ---- The helper


def answers_to(header: dict, data: bytes) -> Iterator[bytes]:
    signal.alarm(SECONDS_TO_DECODE)  # kills this process even while it runs native code
    try:
        samples, rate = decode_recording(data, Settings(**header["limits"]), header["name"])
        yield pack(dict(rate=rate), samples.astype(np.float32).tobytes())
    except (ApiError, ValueError) as problem:  # any other exception ends this process
        error = as_api_error(problem)
        yield pack(dict(error=error.message, status=error.status))
    signal.alarm(0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    answer_questions(answers_to)
