"""What the server speaks with: one or several models, each in a worker of its own, and their voices. A checked request
goes in, audio comes out.

Nothing here needs torch, and nothing blocks the event loop: the folder of voices is read, and recordings are decoded,
in threads.
"""

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from qwen3_tts_cuda_graphs.common import checkpoints
from qwen3_tts_cuda_graphs.common.audio_files import Chunk
from qwen3_tts_cuda_graphs.common.scripts import check_device_name
from qwen3_tts_cuda_graphs.prompts.cut import PAUSE, surely_fits
from qwen3_tts_cuda_graphs.prompts.pieces import aread_pieces, done_future
from qwen3_tts_cuda_graphs.serving.audio_formats import Encoder, av, check_base64, decode_base64
from qwen3_tts_cuda_graphs.serving.encoders import Encoders
from qwen3_tts_cuda_graphs.serving.engine_process import Call, EngineProcess, WorkerConnection, start_worker
from qwen3_tts_cuda_graphs.serving.errors import ApiError, mistakes_in
from qwen3_tts_cuda_graphs.serving.metrics import Metrics
from qwen3_tts_cuda_graphs.serving.model import Model, named_models, sampling, unknown_voice
from qwen3_tts_cuda_graphs.serving.recordings import Decoders
from qwen3_tts_cuda_graphs.serving.requests import Style
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.voice_folder import RegisteredVoice, VoiceFolder, as_stored, check_name

MAX_THREADS = 4
SECONDS_FOR_A_DISK = 10.0
SECONDS_BETWEEN_LOOKS = 1.0  # how often the folder of voices is read

Text = str | AsyncIterator[str]


class Service:
    """The models, for many clients. `start` it before use, `close` it afterwards, both in the server's event loop."""

    def __init__(
        self,
        models: str | Sequence[str],
        device: str | None = None,
        dtype: str | None = None,
        settings: Settings | None = None,
        speakers: dict[str, bytes] | None = None,
        spawn: Callable = start_worker,
    ):
        """Check everything that can be checked without the weights.

        models: each a folder, a hub id or a short name, or name=folder
        speakers: name -> content of a speaker.pt, voices of the first Base model besides those in the folder
        spawn: starts a worker, see EngineProcess
        """
        check_device_name(device)
        self.settings = settings or Settings()
        named = named_models([models] if isinstance(models, str) else models)
        names = [*named.values()]
        cloning = [name for name in names if checkpoints.read_config(name)["tts_model_type"] == "base"]
        self.models = []
        for id, name in named.items():
            files = speakers if speakers and name == (cloning or names)[0] else {}
            checkpoints.check_number(checkpoints.read_config(name), "max_seq_len", self.settings.max_seq_len)
            if files:
                checkpoints.base_config(name)  # no other takes them
            spec = dict(model=name, device=device, dtype=dtype, max_seq_len=self.settings.max_seq_len)
            spec["speakers"] = {file: base64.b64encode(content).decode() for file, content in files.items()}
            engine = EngineProcess(spec, self.settings.max_streams, spawn)
            self.models.append(Model(id, name, engine, files))
        self.folder = VoiceFolder(self.settings) if cloning else None
        self.registered = self.folder.voices if cloning else {}  # the folder when it was last read
        self.looking = None  # the task that looks at it
        self.responses = 0  # being sent, over HTTP or a WebSocket
        self.threads = ThreadPoolExecutor(MAX_THREADS, "recordings")
        self.decoders = Decoders()
        self.encoders = Encoders(self.settings.encoders)
        self.recordings = asyncio.Semaphore(MAX_THREADS)  # decoded, in the memory of requests
        self.disk_threads = ThreadPoolExecutor(MAX_THREADS, "voices")  # a disk that hangs keeps them
        self.metrics = Metrics(self.models)
        self.is_draining = False

    # ---- Lifetime

    async def start(self) -> None:
        """Returns when all models speak. Weights are loaded first: rows take the memory that is left."""
        await load_all()
        self.encoders.start()
        for model in self.models:
            await model.engine.load()
        for number, model in enumerate(self.models):
            await model.engine.begin(len(self.models) - number)
        if self.folder:
            self.looking = asyncio.create_task(self.keep_looking())

    async def close(self) -> None:
        if self.looking:
            self.looking.cancel()
        await asyncio.gather(*(model.engine.close() for model in self.models))
        self.decoders.close()
        self.encoders.close()
        for threads in (self.threads, self.disk_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return sum(model.in_flight for model in self.models)

    @property
    def has_given_up(self) -> bool:
        return any(model.engine.state == "gave up" for model in self.models)

    def check_ready(self) -> None:
        """Whether any of the models speaks."""
        if self.is_draining or not any(model.engine.is_ready for model in self.models):
            self.check_all_ready()

    def check_all_ready(self) -> None:
        """For /health."""
        if self.is_draining:
            raise ApiError("the server is shutting down: ask another one", 503, code="shutting_down")
        for model in self.models:
            try:
                model.engine.check_ready()
            except ApiError as error:
                name = f"{model.id}: " if len(self.models) > 1 else ""
                raise ApiError(name + error.message, error.status, code=error.code) from None

    # ---- Voices

    async def look_for(self, voice: str | None) -> None:
        """Look at the folder of voices if this one is not known. Who wants a known one does not wait for a disk and a
        thread: that takes milliseconds while a crowd keeps the event loop busy. `keep_looking` finds what has changed.
        """
        if not self.speaking(voice):
            await self.refresh()

    async def keep_looking(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            with contextlib.suppress(Exception):  # a client that asks for an unknown voice gets the error
                await self.refresh()

    async def refresh(self) -> None:
        """Look at the folder of voices, which other servers may share."""
        if self.folder is None:
            return
        registered = await self.on_disk(lambda: self.folder.voices)
        if registered is not self.registered:
            self.registered = registered
            self.forget_removed_voices()

    def forget_removed_voices(self) -> None:
        there = set(self.registered.values())
        for model in self.models:
            connection = model.engine.connection
            for voice in connection.kept.keys() - there if connection else ():
                connection.kept.pop(voice).add_done_callback(partial(forget, connection))

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
        with mistakes_in("audio_sample"):
            recording = await self.run(lambda: as_stored(self.decoders.decode(data, self.settings, "audio_sample")))
        key = asyncio.ensure_future(keep_voice(connection, "audio_sample", recording, ref_text))
        try:
            await key
            voice = await self.on_disk(self.folder.add, name, recording, ref_text)
        except BaseException:
            key.add_done_callback(partial(forget, connection))
            raise
        if other := connection.kept.get(voice):  # somebody has seen its file and asked for it
            other.add_done_callback(partial(forget, connection))
        connection.kept[voice] = key
        await self.refresh()
        return describe_voice(voice)

    async def registered_voice(self, connection: WorkerConnection, name: str) -> str:
        """The key of a registered voice in the worker, which makes it for the first who asks."""
        voice = self.registered[name]
        key = connection.kept.get(voice)
        if key is None or key.done() and has_failed(key):
            key = connection.kept[voice] = asyncio.ensure_future(self.make_voice(connection, name))
            key.add_done_callback(has_failed)  # nobody may be left to be told
        return await asyncio.shield(key)  # others may wait for it, too

    async def make_voice(self, connection: WorkerConnection, name: str) -> str:
        voice, recording = await self.on_disk(self.folder.read, name)
        return await keep_voice(connection, "voice", recording, voice.ref_text)

    async def unregister(self, name: str) -> None:
        name = name.lower()
        try:
            if self.folder is None:
                raise KeyError(name)
            await self.on_disk(self.folder.remove, name)
        except KeyError:
            raise ApiError(f"there is no registered voice {name!r}", 404, "name", "unknown_voice") from None
        await self.refresh()

    def cloning_model(self, what: str) -> Model:
        for model in self.models:
            if model.clones:
                return model
        return self.models[0].check_cloning(what)

    async def run(self, function: Callable, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    async def on_disk(self, function: Callable, *arguments):
        """In a thread, for at most SECONDS_FOR_A_DISK: a disk may hang."""
        work = asyncio.get_running_loop().run_in_executor(self.disk_threads, function, *arguments)
        try:
            return await asyncio.wait_for(work, SECONDS_FOR_A_DISK)
        except TimeoutError:
            raise ApiError("the folder of voices does not answer: try again later", 503, code="disk") from None

    # ---- Requests

    def model_for(self, style: Style) -> Model:
        """The model with the request's name; for other names the first that can do what is asked."""
        if len(self.models) == 1:
            return self.models[0]
        named = self.named(style)
        able = [model for model in self.models if model.can_do(style, self.registered)]
        with_voice = [model for model in able if model.has_voice(style.voice, self.registered)]
        return [*named, *with_voice, *able, *self.speaking(style.voice), *self.models][0]

    def named(self, style: Style) -> list[Model]:
        name = (style.model or "").strip().lower()
        found = [model for model in self.models if name and model.is_named(name)]
        return sorted(found, key=lambda model: model.id.lower() != name)  # a folder may have the name of another model

    def speaking(self, voice: str | None) -> list[Model]:
        """The models that can speak in this voice."""
        return [model for model in self.models if model.knows_voice(voice, self.registered)]

    def check(self, style: Style) -> None:
        """Refuse what cannot be done, before any work starts. `look_for` its voice before."""
        for name in ("model", "instructions", "ref_text", "voice", "language"):
            self.check_field(name, getattr(style, name))
        check_base64(style.ref_audio or "")
        if style.voice and not (style.has_reference or self.named(style) or self.speaking(style.voice)):
            raise unknown_voice(style.voice, self.voice_names())
        self.model_for(style).check(style, self.registered)

    def ignored(self, style: Style) -> tuple[str, ...]:
        """Fields that nobody uses, or this model cannot. Programs send them to any model."""
        unused = ("instructions",) if style.instructions and not self.model_for(style).takes_instructions else ()
        return unused + style.unknown

    def check_field(self, name: str, text: str | None) -> None:
        """Whether a field can be tokenized, and is not too long."""
        if text and len(text) > self.settings.max_text:
            raise ApiError(
                f"{name} has {len(text)} characters, at most {self.settings.max_text} are possible here (--max-text): "
                "shorten it",
                param=name,
                code="too_long",
            )
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            problem = f"{name} has a character that UTF-8 cannot encode: {text[error.start]!r}"
            raise ApiError(problem, param=name, code="invalid_value") from None

    def check_text(self, text: str) -> str:
        self.check_field("input", text)
        if not text.strip():
            raise ApiError("the text is empty: give something to say", param="input", code="invalid_value")
        return text

    def say(self, style: Style, text: Text) -> "Answer":
        """Speak a text, or one that is still being written."""
        return Answer(self, self.model_for(style), style, text)


class Answer:
    """A text that is being spoken: `async for samples, rate in answer`. Then it knows how long it was."""

    def __init__(self, service: Service, model: Model, style: Style, text: Text):
        self.service = service
        self.model = model
        self.style = style
        self.text = text
        self.asked = time.perf_counter()
        self.seconds = 0.0  # audio so far
        self.blocked = 0.0  # seconds that the client took to read it
        self.characters_read = None  # how much of an arriving text was spoken, once the speech has ended
        self.own_key = None  # the key of a voice that was made for this answer only

    @property
    def rate(self) -> int:
        return self.model.engine.rate

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """One generator, not one in another: each costs time with every chunk of every listener."""
        outcome, connection, call = "failed", None, None
        try:
            connection = self.connection = self.take_place()
            voice, payload = await self.voice(connection)
            parts = await self.parts(voice, payload)
            for number, text in enumerate(parts):
                seed = None if self.style.seed is None else self.style.seed + number
                silence = bytes(2 * round(PAUSE * self.rate)) if number else b""
                request = dict(text=text, options=sampling(self.style), seed=seed)
                place = dict(after=call and call.number, is_last=number == len(parts) - 1)
                with connection.call("speak", payload, voice=voice, **request, **place) as call:
                    writer = asyncio.create_task(self.send_pieces(call)) if text is None else None
                    try:
                        while (answer := await call.answer())[0]["type"] == "audio":
                            samples = np.frombuffer(silence + answer[1], "<i2")
                            silence = b""
                            self.measure(len(samples) / self.rate)
                            yield samples, self.rate
                            self.blocked += time.perf_counter() - self.last_chunk
                    finally:
                        if writer:
                            writer.cancel()
            self.characters_read = answer[0].get("characters_read")
            outcome = "complete"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except ValueError:
            outcome = "invalid"
            raise
        except ApiError as error:
            outcome = error.outcome
            raise
        finally:
            if connection:
                self.model.in_flight -= 1
            if call and outcome != "complete":  # no other part follows
                call.send("cancel")
            if self.own_key:
                connection.send(op="forget", keys=[self.own_key])
            self.service.metrics.requests.labels(outcome).inc()

    def take_place(self) -> WorkerConnection:
        """Take a place among the requests that are spoken or wait."""
        model = self.model
        model.engine.check_ready()
        if model.in_flight >= model.engine.rows + self.service.settings.max_waiting:
            problem = f"{model.in_flight} requests are in flight already: try again later"
            raise ApiError(problem, 429, code="queue_full")
        model.in_flight += 1
        return model.engine.connection

    async def voice(self, connection: WorkerConnection) -> tuple[dict, bytes]:
        """The voice as the worker takes it, and the bytes that belong to it."""
        service, style = self.service, self.style
        if not self.model.clones:
            return self.model.preset_voice(style), b""
        if style.speaker_embedding is not None:
            with np.errstate(over="ignore"):  # the worker refuses what is infinite
                return {}, np.array(style.speaker_embedding, np.float32).tobytes()
        if style.ref_audio is not None:
            settings = service.settings
            ref_text = None if style.x_vector_only_mode else (style.ref_text or "").strip()
            async with service.recordings:
                recording = await service.run(
                    lambda: service.decoders.decode(decode_base64(style.ref_audio), settings, "ref_audio")
                )
                self.own_key = await keep_voice(connection, "ref_audio", recording, ref_text or None)
            return {"key": self.own_key}, b""
        if not isinstance(self.text, str):  # the session has looked at the folder long ago
            await service.look_for(style.voice)
        name = self.model.resolve_voice(style.voice, service.registered)
        if name in self.model.speakers:
            return {"file": name}, b""
        return {"key": await service.registered_voice(connection, name)}, b""

    async def parts(self, voice: dict, payload: bytes) -> list[str | None]:
        """The text, cut at sentence ends if it may be too long for one utterance. None: it comes in pieces."""
        if not isinstance(self.text, str):
            return [None]
        if self.style.max_new_tokens is not None or surely_fits(self.text, self.service.settings.max_seq_len):
            return [self.text]
        request = dict(voice=voice, text=self.text, language=self.style.language)
        return (await self.connection.ask("split", payload, **request))["texts"]

    async def send_pieces(self, call: Call) -> None:
        def push(piece: str | BaseException | None) -> Future:
            if isinstance(piece, BaseException):
                call.put(piece)
            else:
                call.send("text", text=piece)  # None: END
            return done_future(True)

        await aread_pieces(self.text, push)

    def measure(self, seconds: float) -> None:
        """Record a chunk of audio: when it came, and whether a player had to wait for it."""
        metrics, now = self.service.metrics, time.perf_counter()
        made = now - self.blocked  # a clock that stands still while the client reads
        if self.seconds == 0:
            metrics.first_audio.observe(now - self.asked)
            self.playback_began = made
        else:
            metrics.frame.observe((made - self.last_made) / (seconds * checkpoints.FRAME_RATE))
            if made > self.playback_began + self.seconds:
                metrics.underruns.inc()
        self.last_chunk, self.last_made = now, made
        self.seconds += seconds
        metrics.audio.inc(seconds)

    @property
    def frames(self) -> int:
        return round(self.seconds * checkpoints.FRAME_RATE)

    async def text_tokens(self) -> int:
        return (await self.connection.ask("count", text=self.text))["tokens"]

    def was_asked_to_end(self) -> bool:
        """Whether the client's own max_new_tokens has ended the speech."""
        return self.style.max_new_tokens is not None and self.frames == self.style.max_new_tokens - 1


async def load_all() -> None:
    """anyio and PyAV import parts of themselves at their first use, which would stop all streams for 20 to 90 ms."""
    await anyio.sleep(0)
    if av:
        Encoder("flac", 24000)  # every FFmpeg has it


async def keep_voice(connection: WorkerConnection, name: str, recording: Chunk, ref_text: str | None) -> str:
    """Have the worker make a voice. Returns its key there. name: the field that a mistake is in"""
    samples, rate = recording
    payload = np.asarray(samples, np.float32).tobytes()
    key = secrets.token_hex(8)
    try:
        await connection.ask("voice", payload, key=key, name=name, rate=rate, ref_text=ref_text)
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
        checkpoints.check_speaker_file(path)
        name = check_name(path.stem)
        if name in speakers:
            raise ValueError(f"two --speaker files would be the voice {name}: rename {path}")
        speakers[name] = path.read_bytes()
    return speakers
