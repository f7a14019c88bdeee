"""Voices made from recordings: those that clients register, and those that are part of a request.

Recordings of registered voices are kept in a folder, which other servers may share. A worker makes a voice from its
recording when it is first used, and stores it under a key. Nothing here blocks the event loop: the folder is accessed
in threads, and recordings are decoded in helper processes.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from qwen3_tts_cuda_graphs.common.samples import Chunk
from qwen3_tts_cuda_graphs.serving.engine_process import EngineProcess
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.recordings import Decoders, decode_base64
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.voice_folder import RegisteredVoice, VoiceFolder, as_stored
from qwen3_tts_cuda_graphs.serving.worker_connection import WorkerConnection

MAX_THREADS = 4
MAX_RECORDINGS = 4  # decoded at the same time, as they take memory
SECONDS_FOR_A_DISK = 10.0
SECONDS_BETWEEN_REFRESHES = 1.0  # of `registered`


class ClonedVoices:
    def __init__(self, settings: Settings, engines: Collection[EngineProcess], has_folder: bool):
        """engines: those whose workers make the voices; has_folder: whether voices can be registered"""
        self.settings = settings
        self.engines = engines
        self.folder = VoiceFolder(settings) if has_folder else None
        self.registered = self.folder.voices if has_folder else {}  # assigned in the event loop only
        self.refreshing = None  # the task that reads it regularly
        self.decoders = Decoders()
        self.slots = asyncio.Semaphore(MAX_RECORDINGS)
        self.disk_threads = ThreadPoolExecutor(MAX_THREADS, "voices")  # separate, as a hanging disk blocks them

    def start(self) -> None:
        if self.folder:
            self.refreshing = asyncio.create_task(self.keep_refreshing())

    async def stop_refreshing(self) -> None:
        if self.refreshing:
            self.refreshing.cancel()
            await asyncio.wait([self.refreshing])

    def close(self) -> None:
        self.decoders.close()
        self.disk_threads.shutdown(wait=False, cancel_futures=True)

    async def keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_REFRESHES)
            with contextlib.suppress(Exception):  # a request for an unknown voice gets the error
                await self.refresh()

    async def refresh(self) -> None:
        """Read the folder, and have the workers forget removed voices."""
        if self.folder is None:
            return
        self.registered = await self.on_disk(lambda: self.folder.voices)
        for connection in filter(None, [engine.connection for engine in self.engines]):
            for voice in connection.voice_keys.keys() - set(self.registered.values()):
                connection.voice_keys.pop(voice).add_done_callback(partial(forget, connection))

    # ---- Registered voices

    async def check_new(self, name: str) -> None:
        """Raises ValueError if no voice of this name can be registered."""
        await self.on_disk(self.folder.check_new, name)

    async def register(
        self, connection: WorkerConnection, name: str, data: bytes, ref_text: str | None
    ) -> RegisteredVoice:
        """Make a voice from a recording and store it. Call `check_new` for its name first."""
        async with self.slots:
            decoded = await self.decoders.decode(data, self.settings, "audio_sample")
            recording = await asyncio.to_thread(as_stored, decoded)
        key = asyncio.ensure_future(make_voice(connection, "audio_sample", recording, ref_text))
        try:
            await key
            voice = await self.on_disk(self.folder.add, name, recording, ref_text)
        except BaseException:
            key.add_done_callback(partial(forget, connection))
            raise
        if other := connection.voice_keys.get(voice):  # a request has already found its file and made it, too
            other.add_done_callback(partial(forget, connection))
        connection.voice_keys[voice] = key
        await self.refresh()
        return voice

    async def remove(self, name: str) -> None:
        name = name.lower()
        try:
            if self.folder is None:
                raise KeyError(name)
            await self.on_disk(self.folder.remove, name)
        except KeyError:
            raise ApiError(f"there is no registered voice {name!r}", 404, "name", "unknown_voice") from None
        await self.refresh()

    async def registered_key(self, connection: WorkerConnection, name: str) -> str:
        """The key of a registered voice in the worker, which makes the voice for the first request that uses it."""
        voice = self.registered[name]
        key = connection.voice_keys.get(voice)
        if key is None or key.done() and has_failed(key):
            key = connection.voice_keys[voice] = asyncio.ensure_future(self.make_registered(connection, name))
            key.add_done_callback(has_failed)  # retrieve its exception, in case nothing awaits it any more
        return await asyncio.shield(key)  # other requests may wait for it, too

    async def make_registered(self, connection: WorkerConnection, name: str) -> str:
        voice, recording = await self.on_disk(self.folder.read, name)
        return await make_voice(connection, "voice", recording, voice.ref_text)

    async def on_disk(self, function: Callable, *arguments):
        """Call a function in a thread, for at most SECONDS_FOR_A_DISK, as a disk may hang."""
        work = asyncio.get_running_loop().run_in_executor(self.disk_threads, function, *arguments)
        try:
            return await asyncio.wait_for(work, SECONDS_FOR_A_DISK)
        except TimeoutError:
            raise ApiError("the folder of voices does not answer: try again later", 503, code="disk") from None

    # ---- Voices of one request

    async def request_key(self, connection: WorkerConnection, options: SpeechOptions) -> str:
        """Make the voice of a request's recording. Returns its key."""
        ref_text = None if options.x_vector_only_mode else (options.ref_text or "").strip()
        async with self.slots:
            data = await asyncio.to_thread(decode_base64, options.ref_audio)
            recording = await self.decoders.decode(data, self.settings, "ref_audio")
            return await make_voice(connection, "ref_audio", recording, ref_text or None)


async def make_voice(connection: WorkerConnection, field: str, recording: Chunk, ref_text: str | None) -> str:
    """Have the worker make a voice from a recording. Returns its key. field: for error messages"""
    samples, rate = recording
    payload = np.asarray(samples, np.float32).tobytes()
    key = secrets.token_hex(8)
    try:
        await connection.ask("voice", payload, key=key, name=field, rate=rate, ref_text=ref_text)
    except BaseException:  # the voice may have been made nevertheless
        connection.send(op="forget", keys=[key])
        raise
    return key


def has_failed(key: asyncio.Future) -> bool:
    return key.cancelled() or key.exception() is not None


def forget(connection: WorkerConnection, key: asyncio.Future) -> None:
    if not has_failed(key):
        connection.send(op="forget", keys=[key.result()])
