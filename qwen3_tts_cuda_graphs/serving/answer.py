"""The audio of a request: the parts of its text are spoken one after another, each by the model that has its voice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from qwen3_tts_cuda_graphs.common import published
from qwen3_tts_cuda_graphs.prompts.cut import surely_fits
from qwen3_tts_cuda_graphs.prompts.lexicon import lower
from qwen3_tts_cuda_graphs.prompts.script import Cue, Part, cut_parts, nth_seed, silence_before
from qwen3_tts_cuda_graphs.serving.audio_formats import encoder_arguments, with_length
from qwen3_tts_cuda_graphs.serving.errors import ApiError, log
from qwen3_tts_cuda_graphs.serving.metrics import ChunkTimes
from qwen3_tts_cuda_graphs.serving.model import Model, sampling
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions
from qwen3_tts_cuda_graphs.serving.worker_connection import Call, WorkerConnection


@dataclass
class PreparedVoice:
    """What all parts with the same voice and style share: the worker that speaks them, and the voice in `speak`."""

    options: SpeechOptions
    model: Model
    connection: WorkerConnection
    voice: dict | None = None
    payload: bytes = b""


class Answer:
    """The audio of a script: `async for samples, part in answer`, or `async for data in answer.encode()`. `part` is the
    number of a part, or None for silence. The attributes say what has been sent so far.
    """

    def __init__(self, service, options: SpeechOptions, parts: list[Part], pieces: AsyncIterator[str] | None = None):
        """pieces: the text of the only part if it is still arriving; the lexicon has been applied to it"""
        self.service = service
        self.options = options
        self.model = service.model_for(options)
        self.parts = parts
        self.pieces = pieces
        self.lexicon = service.lexicon
        self.said = {}  # text -> text after the lexicon was applied
        self.silence_due = 0  # samples of silence before the next part or the end
        self.cues = []  # a Cue for each part whose audio has begun
        self.stopped = set()  # numbers of the parts that limit_speech has stopped
        self.samples = 0  # sent so far, at the requested speed
        self.spoken = 0  # samples of speech in complete parts, at the model's own speed
        self.encoded_samples = 0  # in a compressed format, once encoding has finished
        self.chunk_times = ChunkTimes(service.metrics)
        self.characters_read = None  # how much of an arriving text was spoken, once the speech has ended
        self.connections = {}  # Model in which this answer has a place -> WorkerConnection
        self.request_keys = []  # voices made for this answer only: (WorkerConnection, key)

    @property
    def rate(self) -> int:
        return self.model.engine.rate

    @property
    def sample_rate(self) -> int:
        """Of the encoded audio."""
        return self.options.sample_rate or self.rate

    @property
    def seconds(self) -> float:
        return self.samples / self.rate

    async def __aiter__(self) -> AsyncIterator[tuple[np.ndarray, int | None]]:
        """One generator rather than nested ones, each of which would cost time for every chunk of every listener."""
        with self.counted():
            voices = self.take_places()
            for prepared in voices.values():
                prepared.voice, prepared.payload = await self.voice_for(prepared)
            parts = await self.prepare(voices) if self.pieces is None else self.parts
            previous = None
            for part in parts:
                self.silence_due += round(silence_before(part, previous) * self.rate)
                previous = part
                if not self.is_spoken(part):
                    continue
                if self.cues:  # before the call: a stream whose audio stays unread for long loses its row
                    for chunk in self.silence():
                        yield chunk
                        await asyncio.sleep(0)  # let other tasks run, and notice a cancellation
                with self.call(part, voices[voice_and_style(part)]) as call:
                    header, payload = await call.receive()  # an error comes before any silence at the beginning
                    for chunk in self.silence():
                        yield chunk
                        await asyncio.sleep(0)
                    number, spoken, cue = len(self.cues), 0, Cue(part, self.samples)
                    self.cues.append(cue)
                    while header["type"] == "audio":
                        samples = np.frombuffer(payload, "<i2")
                        self.chunk_times.made(len(samples) / self.rate, before=self.seconds)
                        spoken += len(samples)
                        self.samples = cue.start + round(spoken / self.options.speed)
                        yield samples, number
                        self.chunk_times.read()
                        header, payload = await call.receive()
                cue.end = self.samples
                self.spoken += spoken
                self.characters_read = header.get("characters_read")
                if header.get("stopped"):
                    self.stopped.add(number)
                    self.service.metrics.stopped.inc()
                    log.warning("the speech of a part did not end: stopped after %.0f s", spoken / self.rate)
            for chunk in self.silence():
                yield chunk
                await asyncio.sleep(0)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the outcome in the metrics, and release places and voices."""
        outcome = "failed"
        try:
            yield
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
            for model in self.connections:
                model.engine.in_flight -= 1
            for connection, key in self.request_keys:
                connection.send(op="forget", keys=[key])
            self.service.metrics.requests.labels(outcome).inc()

    # ---- Before the first part

    def is_spoken(self, part: Part) -> bool:
        return bool(part.text) or self.pieces is not None

    def take_places(self) -> dict[tuple, PreparedVoice]:
        """Take a place in all models that are needed before the first part: no later part may find a full queue."""
        voices = {}
        for part in filter(self.is_spoken, self.parts):
            if voice_and_style(part) not in voices:
                options = self.options.for_part(part)
                model = self.service.model_for(options)
                if model not in self.connections:
                    model.engine.take_place(self.service.settings.max_waiting)
                    self.connections[model] = model.engine.connection
                voices[voice_and_style(part)] = PreparedVoice(options, model, self.connections[model])
        return voices

    async def voice_for(self, prepared: PreparedVoice) -> tuple[dict, bytes]:
        """Field `voice` and payload of the message `speak`."""
        service, options, model = self.service, prepared.options, prepared.model
        if not model.clones:
            return model.preset_voice(options), b""
        if options.speaker_embedding is not None:
            with np.errstate(over="ignore"):  # the worker refuses infinite values
                return {}, np.array(options.speaker_embedding, np.float32).tobytes()
        if options.ref_audio is not None:
            key = await service.cloned_voices.request_key(prepared.connection, options)
            self.request_keys.append((prepared.connection, key))
            return {"key": key}, b""
        if self.pieces is not None:  # the voice was checked when the session was configured
            await service.refresh_if_unknown(options.voice)
        if mix := model.resolve_mix(options.voice):
            return {"mix": [(await self.stored_voice(prepared, name), share) for name, share in mix]}, b""
        return await self.stored_voice(prepared, model.resolve_voice(options.voice)), b""

    async def stored_voice(self, prepared: PreparedVoice, name: str) -> dict:
        if name in prepared.model.file_voices:
            return {"file": name}
        return {"key": await self.service.cloned_voices.registered_key(prepared.connection, name)}

    async def prepare(self, voices: dict[tuple, PreparedVoice]) -> list[Part]:
        """Apply the lexicon, and cut parts that do not fit into a row. The parts of a script with tags are cut as
        `stream_script` cuts them, with room for limit_speech. A plain text is cut into as few parts as possible, as one
        utterance sounds best."""
        self.lexicon = await self.service.lexicon_for(self.options)
        await self.apply_lexicon(self.parts)
        if self.options.max_new_tokens is not None:
            return self.parts
        leaves_room = self.options.limit_speech or self.parts != [Part(self.parts[0].text)]
        positions = self.service.settings.max_seq_len // (2 if leaves_room else 1)
        long_texts, smaller = {}, {}
        for part in self.parts:
            if not surely_fits(self.said[part.text], positions):
                long_texts.setdefault(voice_and_style(part), []).append(part.text)
        for key, texts in long_texts.items():
            prepared = voices[key]
            request = dict(voice=prepared.voice, texts=texts, language=self.options.language, leaves_room=leaves_room)
            request["lexicon"] = self.entries_in(texts)
            answer = await prepared.connection.ask("split", prepared.payload, **request)
            smaller |= {(key, text): parts for text, parts in zip(texts, answer["texts"])}
        parts = cut_parts(self.parts, lambda part: smaller.get((voice_and_style(part), part.text), [part.text]))
        await self.apply_lexicon(parts)
        return parts

    async def apply_lexicon(self, parts: Iterable[Part]) -> None:
        texts = {part.text for part in parts} - self.said.keys()
        if self.lexicon.entries and texts:  # in a thread: a large lexicon takes a while
            self.said |= await asyncio.to_thread(lambda: {text: self.lexicon.replace(text) for text in texts})
        else:
            self.said |= {text: text for text in texts}

    def entries_in(self, texts: list[str]) -> dict[str, str]:
        """The entries of the lexicon that occur in these texts: all of them may be many."""
        together = lower("\n".join(texts))
        return {word: said for word, said in self.lexicon.entries.items() if lower(word) in together}

    # ---- While it is spoken

    @contextlib.contextmanager
    def call(self, part: Part, prepared: PreparedVoice) -> Iterator[Call]:
        """Have the worker speak a part, and send it arriving text."""
        request = dict(
            text=self.said[part.text] if self.pieces is None else None,
            voice=prepared.voice,
            options=sampling(self.options),
            limit_speech=self.options.limit_speech,
            seed=nth_seed(self.options.seed, len(self.cues)),
        )
        with prepared.connection.call("speak", prepared.payload, **request) as call:
            writer = asyncio.create_task(self.send_pieces(call)) if self.pieces is not None else None
            try:
                yield call
            finally:
                if writer:
                    writer.cancel()

    async def send_pieces(self, call: Call) -> None:
        try:
            async for piece in self.pieces:
                call.send("text", text=piece)
            call.send("text", text=None)  # the end
        except Exception as error:
            call.put(error)

    def silence(self) -> Iterator[tuple[np.ndarray, None]]:
        """The silence that is due, in pieces of at most a second."""
        while self.silence_due:
            size = min(self.rate, self.silence_due)
            self.silence_due -= size
            self.chunk_times.made(size / self.rate, before=self.seconds, is_speech=False)
            self.samples += size
            yield np.zeros(size, "<i2"), None
            self.chunk_times.read()

    # ---- Encoded

    async def encode(self) -> AsyncIterator[bytes]:
        """Speak, and encode the audio as the options say. Closing this generator ends the speech."""
        stream = None
        try:
            async with contextlib.aclosing(aiter(self)) as chunks:
                async for samples, part in chunks:
                    stream = stream or self.service.encoders.open(*encoder_arguments(self.options, self.rate))
                    if data := await stream.add(samples, part):
                        yield data
            if stream:
                data = await stream.finish()
                self.encoded_samples = stream.samples
                if data:
                    yield data
        finally:
            if stream:
                stream.close()

    async def encode_whole(self, keep: Callable[[int], None]) -> AsyncIterator[bytes]:
        """The same, but nothing is yielded before all of it is encoded, so that the file's header has its length.

        keep: is called with the size of each piece that is buffered until then, and may raise an error
        """
        pieces = []
        async with contextlib.aclosing(self.encode()) as stream:
            async for data in stream:
                keep(len(data))
                pieces.append(data)
        if pieces:
            for piece in with_length(self.options.response_format, self.sample_rate, self.encoded_samples, pieces):
                yield piece
                await asyncio.sleep(0)  # a file may be long: let other tasks run

    # ---- What clients are told about the parts

    def in_seconds(self, samples: int) -> float:
        return round(samples / self.rate, 6)

    def describe_part(self, number: int) -> dict:
        cue = self.cues[number]
        options = self.options.for_part(cue.part)
        about = dict(index=number, text=cue.part.text, voice=options.voice, style=options.instructions)
        return about | {"start_seconds": self.in_seconds(cue.start)}

    def times_of_part(self, number: int) -> dict:
        """Call this once the part is complete."""
        cue = self.cues[number]
        times = dict(index=number, start_seconds=self.in_seconds(cue.start), end_seconds=self.in_seconds(cue.end))
        return times | ({"stopped": True} if number in self.stopped else {})

    @property
    def frames(self) -> int:
        """How many frames of speech are in the complete parts."""
        return round(self.spoken / self.rate * published.FRAME_RATE)

    async def text_tokens(self) -> int:
        connection = next(iter(self.connections.values()))
        texts = [self.said[part.text] for part in self.parts if part.text]
        return (await connection.ask("count", text="\n".join(texts)))["tokens"]

    def hit_max_new_tokens(self) -> bool:
        """Whether the speech ended at the request's max_new_tokens."""
        return self.options.max_new_tokens is not None and self.frames == self.options.max_new_tokens - 1


def voice_and_style(part: Part) -> tuple:
    """The key of a part's PreparedVoice."""
    return part.voice, part.style
