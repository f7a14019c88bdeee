"""Audio as bytes on the wire: speech encoded for clients, and their recordings decoded with limits."""

import base64
import binascii
import contextlib
import io
import re
from collections.abc import AsyncIterable, AsyncIterator

import anyio.to_thread
import numpy as np
import soundfile

from common import audio_files
from common.audio_files import Chunk, check_recording, wav_header
from common.output_files import FORMATS
from serving.errors import ApiError
from serving.settings import Settings

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}
STREAMABLE = {"wav", "pcm"}  # the others are sent when they are complete

READABLE = {"WAV", "WAVEX", "FLAC", "OGG", "MP3"}  # soundfile's names of the formats that clients may upload
MAX_CHANNELS = 2
SAMPLE_RATES = range(8000, 96001)


async def encode_stream(chunks: AsyncIterable[Chunk], name: str, whole: bool) -> AsyncIterator[bytes]:
    """Audio in the format `name`, as it is made or, if `whole`, in one piece."""
    async with contextlib.aclosing(aiter(chunks)) as chunks:  # closing this ends the speech, too
        if whole:
            pieces = [chunk async for chunk in chunks]
            yield await anyio.to_thread.run_sync(encode, *audio_files.join(pieces), name)
            return
        is_first = True
        async for samples, rate in chunks:
            data = samples.tobytes()  # int16
            if is_first and name == "wav":
                data = wav_header(rate, audio_files.UNKNOWN_LENGTH) + data
            is_first = False
            yield data


def encode(samples: np.ndarray, rate: int, name: str) -> bytes:
    """A complete file from int16 samples."""
    if name == "pcm":
        return samples.tobytes()
    sound_format, subtype = FORMATS[f".{name}"]
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=sound_format)
    return file.getvalue()


def decode_base64(text: str, settings: Settings) -> bytes:
    """The bytes of a data URL or of plain base64. Addresses and file names are refused."""
    if re.match(r"\s*(https?|file|ftp|s3):", text[:20], re.IGNORECASE):
        raise ValueError("ref_audio is an address, and this server fetches nothing: send the recording in base64")
    if text[:5].lower() == "data:":
        header, comma, text = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise ValueError("ref_audio is a data URL without base64: give data:audio/wav;base64,...")
    text = "".join(text.split())  # line breaks are usual
    if len(text) * 3 / 4 > settings.max_upload + 3:
        problem = f"ref_audio is longer than {settings.max_upload} bytes: give a shorter recording"
        raise ApiError(problem, 413, param="ref_audio")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("ref_audio is not base64: send the recording in base64, or as a data URL") from None


def decode_recording(data: bytes, settings: Settings, name: str) -> Chunk:
    """A client's recording as mono samples. No more is decoded than the limits allow, whatever its header says."""
    if len(data) > settings.max_upload:
        raise ValueError(
            f"{name} has {len(data)} bytes, at most {settings.max_upload} are possible: give a shorter one"
        )
    if not data:
        raise ValueError(f"{name} is empty: give a WAV, FLAC, OGG or MP3 file")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels = file.samplerate, file.channels
            if file.format not in READABLE:
                raise ValueError
            if rate not in SAMPLE_RATES or not 1 <= channels <= MAX_CHANNELS:
                problem = f"{name} has {channels} channels at {rate} Hz: give 1 or 2 channels at 8,000 to 96,000 Hz"
            else:
                problem = None
                max_samples = int(settings.max_reference_seconds * rate)
                audio = file.read(max_samples + 1, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, ValueError, OSError, MemoryError, RuntimeError):
        raise ValueError(f"{name} is not audio that can be read: give a WAV, FLAC, OGG or MP3 file") from None
    if problem:
        raise ValueError(problem)
    if len(audio) == 0:
        raise ValueError(f"{name} has no samples: give a recording of the voice")
    if len(audio) > max_samples:
        raise ValueError(f"{name} is longer than {settings.max_reference_seconds:g} s: give a shorter recording")
    audio = audio.mean(axis=1)
    check_recording(audio, rate, name)
    return audio / max(1.0, np.abs(audio).max()), rate  # floats may be beyond full scale
