"""Registered voices: one file per voice in a folder, which outlasts restarts.

A safetensors file, which cannot contain code, holds the samples of the recording, and its metadata the transcript. The
recording is stored rather than what a model makes of it, so that a voice works with every model that clones.
"""

import contextlib
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from qwen3_tts_cuda_graphs.common.output_files import replacement_for
from qwen3_tts_cuda_graphs.common.samples import Chunk, from_int16, to_int16
from qwen3_tts_cuda_graphs.serving.errors import ApiError, log
from qwen3_tts_cuda_graphs.serving.settings import Settings

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
SUFFIX = ".safetensors"
SECONDS_TO_WRITE = 60.0  # until a new file has its first byte


@dataclass(frozen=True)
class RegisteredVoice:
    name: str
    ref_text: str | None
    created: int  # Unix time
    seconds: float


def check_name(name: str) -> str:
    """The name in lower case. Raises if it is not safe as a file name on every system."""
    name = name.strip().lower()
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the name {name[:80]!r} cannot be used: give 1 to 64 letters a to z, digits, - or _, beginning with a "
            "letter or digit"
        )
    return name


def as_stored(recording: Chunk) -> Chunk:
    """The recording as VoiceFolder.read will return it, so that a voice is the same after a restart."""
    samples, rate = recording
    return from_int16(to_int16(samples)), rate


def time_of_change(path: Path) -> int | None:
    """In nanoseconds, None if the path does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors while writing into status 507: neither the request nor the server is wrong."""
    try:
        yield
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # replacement_for raises ValueError
        reason = getattr(cause, "strerror", None) or "the file is incomplete"
        log.warning("%s cannot be written or removed: %s", path, reason)
        problem = f"the folder of voices cannot be written to: {reason}: make room there, or choose another --voices"
        raise ApiError(problem, 507, code="disk") from None


class VoiceFolder:
    """The files of a folder. Thread-safe; all methods access the disk and may block."""

    def __init__(self, settings: Settings):
        self.folder = settings.voices
        self.max_voices = settings.max_voices
        self.lock = threading.RLock()
        self.files = {}  # name -> (time of its last change, RegisteredVoice or None if it cannot be read)
        self.by_name = {}
        self.scanned = None  # time of the last change of the folder that `files` reflects
        self.remove_unfinished()

    @property
    def voices(self) -> dict[str, RegisteredVoice]:
        """By name, oldest first. The folder is checked for changes, as other servers may share it."""
        with self.lock:
            if time_of_change(self.folder) != self.scanned:
                self.scan()
            return self.by_name

    def scan(self) -> None:
        changed = time_of_change(self.folder)
        known, self.files = self.files, {}
        for path in sorted(filter(Path.is_file, self.folder.glob(f"*{SUFFIX}"))):
            written = time_of_change(path)
            if path.stem in known and known[path.stem][0] == written:
                self.files[path.stem] = known[path.stem]
            else:
                self.files[path.stem] = written, self.try_to_read(path)
        found = [voice for _, voice in self.files.values() if voice]
        self.by_name = {voice.name: voice for voice in sorted(found, key=lambda voice: (voice.created, voice.name))}
        # With coarse timestamps a second change may have the same time: for 2 s after a change, scan each time.
        self.scanned = changed if changed and time.time_ns() - changed > 2_000_000_000 else None

    def try_to_read(self, path: Path) -> RegisteredVoice | None:
        try:
            voice, _ = self.read(path.stem)
        except ValueError as error:
            log.warning("%s is left out: %s", path, error)
            return None
        return voice

    def path(self, name: str) -> Path:
        return self.folder / f"{check_name(name)}{SUFFIX}"

    def read(self, name: str) -> tuple[RegisteredVoice, Chunk]:
        """A voice and its recording. Everything is checked, as others may have written the file."""
        path = self.path(name)
        try:
            data = path.read_bytes()  # not safe_open, which holds the interpreter's lock while a disk hangs
            samples = load(data)["samples"]  # also checks the header
            metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            rate = int(metadata["rate"])
            created = int(metadata["created"])
        except (SafetensorError, OSError, KeyError, ValueError, TypeError):
            raise ValueError(f"the file of the voice {name} is missing or broken: register it again") from None
        if samples.dtype != np.int16 or samples.ndim != 1 or not 8000 <= rate <= 96000 or len(samples) < rate:
            raise ValueError(f"the file of the voice {name} does not hold a recording: register it again")
        voice = RegisteredVoice(name, metadata.get("ref_text"), created, len(samples) / rate)
        return voice, (from_int16(samples), rate)

    def check_new(self, name: str) -> None:
        if name in self.voices:
            raise ValueError(f"there is a voice {name} already: remove it first, or choose another name")
        if len(self.voices) >= self.max_voices:
            raise ValueError(f"{len(self.voices)} voices are registered, that is the limit: remove one first")

    def add(self, name: str, recording: Chunk, ref_text: str | None) -> RegisteredVoice:
        samples, rate = recording
        voice = RegisteredVoice(name, ref_text, int(time.time()), len(samples) / rate)
        metadata = {"rate": str(rate), "created": str(voice.created)}
        if ref_text:
            metadata["ref_text"] = ref_text
        with self.lock:
            self.check_new(name)
            self.write(self.path(name), save({"samples": to_int16(samples)}, metadata))
        return voice

    def write(self, path: Path, content: bytes) -> None:
        """Write the whole file or nothing, readable for this user only. It is locked until it gets its name: see
        remove_unfinished."""
        with disk_errors(path), contextlib.ExitStack() as files:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            with replacement_for(path) as beside:
                beside.chmod(0o600)
                file = files.enter_context(open(beside, "wb"))
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                file.write(content)
                file.flush()

    def remove_unfinished(self) -> None:
        """Remove files that were left unfinished by a killed server. Those of running servers are locked once they have
        content."""
        for path in self.folder.glob(f".*{SUFFIX}.*"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                about = os.fstat(file.fileno())
                if about.st_size or time.time() - about.st_mtime > SECONDS_TO_WRITE:
                    path.unlink()

    def remove(self, name: str) -> None:
        """Raises KeyError if there is no such voice."""
        with self.lock:
            if name not in self.voices:
                raise KeyError(name)
            with disk_errors(self.path(name)):
                self.path(name).unlink(missing_ok=True)
