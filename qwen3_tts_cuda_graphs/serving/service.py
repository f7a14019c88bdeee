"""The models of the server, each in a worker of its own, and their voices. Checks requests and answers with audio.

Nothing here needs torch, and nothing blocks the event loop: the folder of voices is read in threads, and recordings
are decoded in helpers.
"""

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from qwen3_tts_cuda_graphs.common import model_config
from qwen3_tts_cuda_graphs.common.command import check_device_name
from qwen3_tts_cuda_graphs.common.samples import Chunk
from qwen3_tts_cuda_graphs.common.voice_files import check_speaker_file, read_mix
from qwen3_tts_cuda_graphs.prompts.checks import check_encodable, check_number
from qwen3_tts_cuda_graphs.prompts.lexicon import MAX_ENTRIES, Lexicon, load_lexicon
from qwen3_tts_cuda_graphs.prompts.script import Part, read_script
from qwen3_tts_cuda_graphs.serving.answer import voice_and_style
from qwen3_tts_cuda_graphs.serving.audio_formats import Encoder, av
from qwen3_tts_cuda_graphs.serving.child_process import Spare, start_module
from qwen3_tts_cuda_graphs.serving.encoders import Encoders
from qwen3_tts_cuda_graphs.serving.engine_process import EngineProcess
from qwen3_tts_cuda_graphs.serving.errors import ApiError, mistakes_in
from qwen3_tts_cuda_graphs.serving.metrics import Metrics
from qwen3_tts_cuda_graphs.serving.model import Model, named_models, unknown_voice
from qwen3_tts_cuda_graphs.serving.recordings import Decoders, check_base64, decode_base64
from qwen3_tts_cuda_graphs.serving.requests import MAX_OWN_ENTRIES, SpeechOptions, SpeechRequest
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.voice_folder import RegisteredVoice, VoiceFolder, as_stored, check_name
from qwen3_tts_cuda_graphs.serving.worker_connection import WorkerConnection

MAX_THREADS = 4
SECONDS_FOR_A_DISK = 10.0
SECONDS_BETWEEN_REFRESHES = 1.0  # of the list of registered voices


class Service:
    """The models, for many clients. `start` it before use, `close` it afterwards, both in the server's event loop."""

    def __init__(
        self,
        models: str | Sequence[str],
        device: str | None = None,
        dtype: str | None = None,
        settings: Settings | None = None,
        speakers: dict[str, bytes] | None = None,
        spawn: Callable = start_module,
        spare: Spare | None = None,
    ):
        """Check everything that can be checked without the weights.

        models: each a folder, a hub id or a short name, or name=folder
        speakers: name -> content of a speaker.pt, voices of the first Base model besides those in the folder
        spawn, spare: how workers are started, see EngineProcess
        """
        check_device_name(device)
        self.settings = settings or Settings()
        named = named_models([models] if isinstance(models, str) else models)
        sources = [*named.values()]
        cloning = [source for source in sources if model_config.read_config(source)["tts_model_type"] == "base"]
        self.spare = spare
        self.models = []
        for id, source in named.items():
            own_speakers = speakers if speakers and source == (cloning or sources)[0] else {}
            check_number(model_config.read_config(source), "max_seq_len", self.settings.max_seq_len)
            if own_speakers:
                model_config.base_config(source)  # no other takes them
            spec = dict(model=source, device=device, dtype=dtype, max_seq_len=self.settings.max_seq_len)
            spec["speakers"] = {name: base64.b64encode(content).decode() for name, content in own_speakers.items()}
            engine = EngineProcess(spec, self.settings.max_streams, spawn, spare)
            self.models.append(Model(id, source, engine, own_speakers))
        self.lexicon = load_lexicon(self.settings.lexicon)
        self.folder = VoiceFolder(self.settings) if cloning else None
        self.registered = self.folder.voices if cloning else {}  # what was in the folder when it was last read
        self.refreshing = None  # the task that reads it again and again
        self.responses = 0  # being sent, over HTTP or a WebSocket
        self.threads = ThreadPoolExecutor(MAX_THREADS, "recordings")
        self.decoders = Decoders()
        self.encoders = Encoders(self.settings.encoders)
        self.recording_slots = asyncio.Semaphore(MAX_THREADS)  # decoded recordings take memory
        self.disk_threads = ThreadPoolExecutor(MAX_THREADS, "voices")  # apart: a disk that hangs blocks them
        self.metrics = Metrics(self.models)
        self.is_draining = False

    # ---- Lifetime

    async def start(self) -> None:
        """Returns when all models can speak. All weights are loaded first: rows take the memory that is left."""
        await finish_imports()
        self.encoders.start()
        for model in self.models:
            await model.engine.load()
        for number, model in enumerate(self.models):
            await model.engine.begin(len(self.models) - number)
        if self.folder:
            self.refreshing = asyncio.create_task(self.keep_refreshing())

    async def close(self) -> None:
        if self.refreshing:
            self.refreshing.cancel()
        await asyncio.gather(*(model.engine.close() for model in self.models))
        if self.spare:
            self.spare.close()
        self.decoders.close()
        self.encoders.close()
        for threads in (self.threads, self.disk_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return sum(model.engine.in_flight for model in self.models)

    @property
    def has_given_up(self) -> bool:
        return any(model.engine.state == "gave up" for model in self.models)

    def check_ready(self) -> None:
        """Raises unless one of the models can speak."""
        if self.is_draining or not any(model.engine.is_ready for model in self.models):
            self.check_all_ready()

    def check_all_ready(self) -> None:
        """Raises unless all models can speak, for /health."""
        if self.is_draining:
            raise ApiError("the server is shutting down: ask another one", 503, code="shutting_down")
        for model in self.models:
            try:
                model.engine.check_ready()
            except ApiError as error:
                name = f"{model.id}: " if len(self.models) > 1 else ""
                raise ApiError(name + error.message, error.status, code=error.code) from None

    # ---- Voices

    async def refresh_if_unknown(self, *voices: str | None) -> None:
        """Read the folder of voices again if one of these is not known. A request for a known one does not wait for a
        disk and a thread, which takes milliseconds on a busy event loop: `keep_refreshing` finds what has changed."""
        if not all(map(self.models_with_voice, voices)):
            await self.refresh_voices()

    async def keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_REFRESHES)
            with contextlib.suppress(Exception):  # a client that asks for an unknown voice gets the error
                await self.refresh_voices()

    async def refresh_voices(self) -> None:
        """Read the folder of voices, which other servers may share. The workers forget those that were removed."""
        if self.folder is None:
            return
        self.registered = await self.on_disk(lambda: self.folder.voices)
        for connection in filter(None, [model.engine.connection for model in self.models]):
            for voice in connection.voice_keys.keys() - set(self.registered.values()):
                connection.voice_keys.pop(voice).add_done_callback(partial(forget, connection))

    def voices(self) -> list[dict]:
        presets = dict.fromkeys(name for model in self.models for name in model.voice_names(()))
        registered = map(describe_voice, self.registered.values())
        return [*({"id": name, "name": name, "kind": "preset"} for name in presets), *registered]

    def voice_names(self) -> list[str]:
        return [voice["name"] for voice in self.voices()]

    async def register(self, name: str, data: bytes, ref_text: str | None) -> dict:
        """Make a voice from a recording and keep it."""
        model = self.cloning_model("audio_sample")
        model.engine.check_ready()
        connection = model.engine.connection  # now: if this worker ends, the next one is still loading
        with mistakes_in("name"):
            name = check_name(name)
            if any(other.has_voice(name) for other in self.models):
                raise ValueError(f"there is a voice {name} already: choose another name")
            await self.on_disk(self.folder.check_new, name)
        self.check_field("ref_text", ref_text)
        async with self.recording_slots:
            decoded = await self.decoders.decode(data, self.settings, "audio_sample")
            recording = await self.in_thread(as_stored, decoded)
        key = asyncio.ensure_future(make_voice(connection, "audio_sample", recording, ref_text))
        try:
            await key
            voice = await self.on_disk(self.folder.add, name, recording, ref_text)
        except BaseException:
            key.add_done_callback(partial(forget, connection))
            raise
        if other := connection.voice_keys.get(voice):  # somebody has seen its file and asked for it
            other.add_done_callback(partial(forget, connection))
        connection.voice_keys[voice] = key
        await self.refresh_voices()
        return describe_voice(voice)

    async def registered_voice_key(self, connection: WorkerConnection, name: str) -> str:
        """The key of a registered voice in the worker, which makes the voice for the first request."""
        voice = self.registered[name]
        key = connection.voice_keys.get(voice)
        if key is None or key.done() and has_failed(key):
            key = connection.voice_keys[voice] = asyncio.ensure_future(self.make_registered_voice(connection, name))
            key.add_done_callback(has_failed)  # nobody may be left to be told
        return await asyncio.shield(key)  # others may wait for it, too

    async def make_registered_voice(self, connection: WorkerConnection, name: str) -> str:
        voice, recording = await self.on_disk(self.folder.read, name)
        return await make_voice(connection, "voice", recording, voice.ref_text)

    async def request_voice_key(self, connection: WorkerConnection, options: SpeechOptions) -> str:
        """The key of a voice that comes with a request."""
        ref_text = None if options.x_vector_only_mode else (options.ref_text or "").strip()
        async with self.recording_slots:
            data = await self.in_thread(decode_base64, options.ref_audio)
            recording = await self.decoders.decode(data, self.settings, "ref_audio")
            return await make_voice(connection, "ref_audio", recording, ref_text or None)

    async def unregister(self, name: str) -> None:
        name = name.lower()
        try:
            if self.folder is None:
                raise KeyError(name)
            await self.on_disk(self.folder.remove, name)
        except KeyError:
            raise ApiError(f"there is no registered voice {name!r}", 404, "name", "unknown_voice") from None
        await self.refresh_voices()

    def cloning_model(self, what: str) -> Model:
        for model in self.models:
            if model.clones:
                return model
        return self.models[0].check_cloning(what)

    async def in_thread(self, function: Callable, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    async def on_disk(self, function: Callable, *arguments):
        """In a thread, for at most SECONDS_FOR_A_DISK: a disk may hang."""
        work = asyncio.get_running_loop().run_in_executor(self.disk_threads, function, *arguments)
        try:
            return await asyncio.wait_for(work, SECONDS_FOR_A_DISK)
        except TimeoutError:
            raise ApiError("the folder of voices does not answer: try again later", 503, code="disk") from None

    # ---- Requests

    def model_for(self, options: SpeechOptions) -> Model:
        """The model with the request's name; for other names the first that can do what is asked."""
        if len(self.models) == 1:
            return self.models[0]
        named = self.models_named(options)
        able = [model for model in self.models if model.can_do(options, self.registered)]
        with_voice = [model for model in able if model.has_voice(options.voice, self.registered)]
        return [*named, *with_voice, *able, *self.models_with_voice(options.voice), *self.models][0]

    def models_named(self, options: SpeechOptions) -> list[Model]:
        name = (options.model or "").strip().lower()
        found = [model for model in self.models if name and model.is_named(name)]
        return sorted(found, key=lambda model: model.id.lower() != name)  # a folder may have the name of another model

    def models_with_voice(self, voice: str | None) -> list[Model]:
        """The models that can speak in this voice."""
        return [model for model in self.models if model.knows_voice(voice, self.registered)]

    def check(self, options: SpeechOptions) -> None:
        """Refuse what cannot be done, before any work starts. `refresh_if_unknown` its voice before."""
        for name in ("model", "instructions", "ref_text", "voice", "language"):
            self.check_field(name, getattr(options, name))
        check_base64(options.ref_audio or "")
        if options.script and not options.notation:
            raise ApiError("script is true and notation false: leave out one of them", param="script")
        if options.voice and not (options.has_reference or self.models_named(options)):
            for name in [name for name, _ in read_mix(options.voice)] or [options.voice]:
                if not (self.models_with_voice(name) or self.models_with_voice(options.voice)):
                    raise unknown_voice(name, self.voice_names())
        self.model_for(options).check(options, self.registered)

    async def read_parts(self, speech_request: SpeechRequest) -> list[Part]:
        """The text of a request as a script. Tags and voices are checked, before any work starts."""
        text = speech_request.input
        self.check_field("input", text)
        if not text.strip():
            raise ApiError("the text is empty: give something to say", param="input", code="invalid_value")
        with mistakes_in("input"):
            parts = read_script(text, speech_request.script, speech_request.notation)
        await self.refresh_if_unknown(*{part.voice for part in parts})
        for part in {voice_and_style(part): part for part in reversed(parts)}.values():  # the first line of each
            self.check_part(speech_request.for_part(part), part)
        return parts

    def check_part(self, options: SpeechOptions, part: Part) -> None:
        """options: those of the part"""
        try:
            self.check(options)
        except ApiError as error:
            raise ApiError(f"line {part.line}: {error.message}", error.status, "input", error.code) from None

    async def lexicon_for(self, options: SpeechOptions) -> Lexicon:
        """The server's entries and the request's, which come first. In a thread: a large lexicon takes a while."""
        if not options.lexicon:
            return self.lexicon
        return await asyncio.to_thread(Lexicon, self.lexicon.entries | options.lexicon, MAX_ENTRIES + MAX_OWN_ENTRIES)

    def ignored(self, options: SpeechOptions, parts: Iterable[Part] = ()) -> tuple[str, ...]:
        """Fields of a request that have no effect: unknown ones, and those its model cannot use."""
        each = {voice_and_style(part): options.for_part(part) for part in parts} or {None: options}
        is_unused = any(own.instructions and not self.model_for(own).takes_instructions for own in each.values())
        return (("instructions",) if is_unused else ()) + options.unknown

    def check_field(self, name: str, text: str | None) -> None:
        """Raises if a field is too long, or cannot be tokenized."""
        if text and len(text) > self.settings.max_text:
            raise ApiError(
                f"{name} has {len(text)} characters, at most {self.settings.max_text} are possible here (--max-text): "
                "shorten it",
                param=name,
                code="too_long",
            )
        with mistakes_in(name, "invalid_value"):
            check_encodable(text or "", name)


async def finish_imports() -> None:
    """anyio and PyAV import parts of themselves at their first use, which would stop all streams for 20 to 90 ms."""
    await anyio.sleep(0)
    if av:
        Encoder("flac", 24000)  # every FFmpeg has it


async def make_voice(connection: WorkerConnection, field: str, recording: Chunk, ref_text: str | None) -> str:
    """Have the worker make a voice from a recording. Returns its key there. field: which one a mistake is in"""
    samples, rate = recording
    payload = np.asarray(samples, np.float32).tobytes()
    key = secrets.token_hex(8)
    try:
        await connection.ask("voice", payload, key=key, name=field, rate=rate, ref_text=ref_text)
    except BaseException:  # it may have been made all the same
        connection.send(op="forget", keys=[key])
        raise
    return key


def has_failed(key: asyncio.Future) -> bool:
    return key.cancelled() or key.exception() is not None


def forget(connection: WorkerConnection, key: asyncio.Future) -> None:
    if not has_failed(key):
        connection.send(op="forget", keys=[key.result()])


def describe_voice(voice: RegisteredVoice) -> dict:
    """A voice with the fields of OpenAI's."""
    return {
        "id": voice.name,
        "object": "audio.voice",
        "name": voice.name,
        "type": "audio_sample",
        "kind": "registered",
        "ref_text": voice.ref_text,
        "created_at": voice.created,
        "seconds": round(voice.seconds, 2),
    }


def read_speakers(paths: Sequence[Path]) -> dict[str, bytes]:
    """speaker.pt files as voices; the file's name is the voice's. What is in them, the worker checks."""
    speakers = {}
    for path in paths:
        check_speaker_file(path)
        name = check_name(path.stem)
        if name in speakers:
            raise ValueError(f"two --speaker files would be the voice {name}: rename {path}")
        speakers[name] = path.read_bytes()
    return speakers
