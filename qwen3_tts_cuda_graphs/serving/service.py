"""The models of the server, each in its own worker. Chooses the model for a request, and refuses what none supports.

Nothing here imports torch or blocks the event loop.
"""

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import anyio

from qwen3_tts_cuda_graphs.common import model_config
from qwen3_tts_cuda_graphs.common.command import check_device_name
from qwen3_tts_cuda_graphs.common.voice_files import check_speaker_file, read_mix
from qwen3_tts_cuda_graphs.prompts.checks import check_encodable, check_number
from qwen3_tts_cuda_graphs.prompts.lexicon import MAX_ENTRIES, Lexicon, load_lexicon
from qwen3_tts_cuda_graphs.prompts.script import Part, read_script
from qwen3_tts_cuda_graphs.serving.answer import voice_and_style
from qwen3_tts_cuda_graphs.serving.audio_formats import Encoder, av, check_encoding
from qwen3_tts_cuda_graphs.serving.child_process import start_module
from qwen3_tts_cuda_graphs.serving.cloned_voices import ClonedVoices
from qwen3_tts_cuda_graphs.serving.encoders import Encoders
from qwen3_tts_cuda_graphs.serving.engine_process import EngineProcess
from qwen3_tts_cuda_graphs.serving.errors import ApiError, mistakes_in
from qwen3_tts_cuda_graphs.serving.metrics import Metrics
from qwen3_tts_cuda_graphs.serving.model import Model, named_models, unknown_voice
from qwen3_tts_cuda_graphs.serving.recordings import check_base64
from qwen3_tts_cuda_graphs.serving.requests import MAX_REQUEST_ENTRIES, SpeechOptions, SpeechRequest
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.spare_worker import Spare
from qwen3_tts_cuda_graphs.serving.voice_folder import RegisteredVoice, check_name


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
        """Check everything that can be checked without loading the weights.

        models: each a folder, a hub id, a short name or name=folder
        speakers: name -> content of a speaker.pt; voices of the first Base model, beside those in the folder
        spawn, spare: passed on to EngineProcess
        """
        check_device_name(device)
        self.settings = settings or Settings()
        named = named_models([models] if isinstance(models, str) else models)
        sources = [*named.values()]
        cloning = [source for source in sources if model_config.read_config(source)["tts_model_type"] == "base"]
        speakers_of = {(cloning or sources)[0]: speakers or {}}  # without a Base model, base_config raises below
        engines = {}
        for id, source in named.items():
            check_number(model_config.read_config(source), "max_seq_len", self.settings.max_seq_len)
            files = speakers_of.get(source, {})
            if files:
                model_config.base_config(source)  # raises for a model that cannot clone
            spec = dict(model=source, device=device, dtype=dtype, max_seq_len=self.settings.max_seq_len)
            spec["speakers"] = {name: base64.b64encode(content).decode() for name, content in files.items()}
            engines[id] = EngineProcess(spec, self.settings.max_streams, spawn, spare)
        self.cloned_voices = ClonedVoices(self.settings, engines.values(), has_folder=bool(cloning))
        self.models = [
            Model(id, source, engines[id], speakers_of.get(source, ()), self.cloned_voices)
            for id, source in named.items()
        ]
        self.spare = spare
        self.lexicon = load_lexicon(self.settings.lexicon)
        self.responses = 0  # in progress, over HTTP or a WebSocket
        self.encoders = Encoders(self.settings.encoders)
        self.metrics = Metrics(self.models)
        self.is_draining = False

    # ---- Lifetime

    async def start(self) -> None:
        """Returns when all models can speak. All weights are loaded first, as the rows share the remaining memory."""
        await finish_imports()
        self.encoders.start()
        for model in self.models:
            await model.engine.load()
        for number, model in enumerate(self.models):
            await model.engine.begin(len(self.models) - number)
        self.cloned_voices.start()

    async def close(self) -> None:
        await self.cloned_voices.stop_refreshing()
        await asyncio.gather(*(model.engine.close() for model in self.models))
        if self.spare:
            self.spare.close()
        self.cloned_voices.close()
        self.encoders.close()

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

    async def refresh_if_unknown(self, voice: str | None) -> None:
        """Read the folder of voices again if this one is unknown. A request for a known voice does not wait for a
        thread and a disk, which takes milliseconds when the event loop is busy: a task of `cloned_voices` reads the
        folder regularly."""
        if not self.models_with_voice(voice):
            await self.cloned_voices.refresh()

    def voices(self) -> list[dict]:
        own = dict.fromkeys(name for model in self.models for name in model.own_voices)
        registered = map(describe_voice, self.cloned_voices.registered.values())
        return [*({"id": name, "name": name, "kind": "preset"} for name in own), *registered]

    def voice_names(self) -> list[str]:
        return [voice["name"] for voice in self.voices()]

    async def register(self, name: str, data: bytes, ref_text: str | None) -> dict:
        """Make a voice from a recording and store it."""
        model = next((model for model in self.models if model.clones), self.models[0])
        model.check_cloning("audio_sample")
        model.engine.check_ready()
        connection = model.engine.connection  # that of the worker which is ready: a later one may still be loading
        with mistakes_in("name"):
            name = check_name(name)
            if any(name in other.own_voices for other in self.models):
                raise ValueError(f"there is a voice {name} already: choose another name")
            await self.cloned_voices.check_new(name)
        self.check_field("ref_text", ref_text)
        return describe_voice(await self.cloned_voices.register(connection, name, data, ref_text))

    # ---- Requests

    def model_for(self, options: SpeechOptions) -> Model:
        """The model that the request names; for any other name, the first that supports the request."""
        if len(self.models) == 1:
            return self.models[0]
        named = self.models_named(options)
        able = [model for model in self.models if model.can_do(options)]
        with_voice = [model for model in able if model.has_voice(options.voice)]
        return [*named, *with_voice, *able, *self.models_with_voice(options.voice), *self.models][0]

    def models_named(self, options: SpeechOptions) -> list[Model]:
        name = (options.model or "").strip().lower()
        found = [model for model in self.models if name and model.is_named(name)]
        return sorted(found, key=lambda model: model.id.lower() != name)  # a name also matches another model's folder

    def models_with_voice(self, voice: str | None) -> list[Model]:
        return [model for model in self.models if model.knows_voice(voice)]

    async def check(self, options: SpeechOptions) -> None:
        """Refuse what is not supported, before any work starts."""
        await self.refresh_if_unknown(options.voice)
        for name in ("model", "instructions", "ref_text", "voice", "language"):
            self.check_field(name, getattr(options, name))
        check_base64(options.ref_audio or "")
        if options.script and not options.notation:
            raise ApiError("script is true and notation false: leave out one of them", param="script")
        if options.voice and not (options.has_reference or self.models_named(options)):
            for name in [name for name, _ in read_mix(options.voice)] or [options.voice]:
                if not (self.models_with_voice(name) or self.models_with_voice(options.voice)):
                    raise unknown_voice(name, self.voice_names())
        self.model_for(options).check(options)
        check_encoding(options)

    async def read_parts(self, speech_request: SpeechRequest) -> list[Part]:
        """Read the text of a checked request as a script, and check its tags, voices and styles."""
        text = speech_request.input
        self.check_field("input", text)
        if not text.strip():
            raise ApiError("the text is empty: give something to say", param="input", code="invalid_value")
        with mistakes_in("input"):
            parts = read_script(text, speech_request.script, speech_request.notation)
        for part in {voice_and_style(part): part for part in reversed(parts)}.values():  # the first part with each
            await self.options_for_part(speech_request, part)
        return parts

    async def options_for_part(self, options: SpeechOptions, part: Part) -> SpeechOptions:
        """Checked options with the voice and the style of a part. An error names its line."""
        changed = options.for_part(part)
        try:
            if changed is not options:
                await self.check(changed)
        except ApiError as error:
            raise ApiError(f"line {part.line}: {error.message}", error.status, "input", error.code) from None
        return changed

    async def lexicon_for(self, options: SpeechOptions) -> Lexicon:
        """The server's entries and the request's, which take precedence. In a thread: large lexicons take a while."""
        if not options.lexicon:
            return self.lexicon
        return await asyncio.to_thread(
            Lexicon, self.lexicon.entries | options.lexicon, MAX_ENTRIES + MAX_REQUEST_ENTRIES
        )

    def ignored(self, options: SpeechOptions, parts: Iterable[Part] = ()) -> tuple[str, ...]:
        """Fields of a request that have no effect: unknown ones, and instructions that its model does not support."""
        each = {voice_and_style(part): options.for_part(part) for part in parts} or {None: options}
        is_unused = any(own.instructions and not self.model_for(own).takes_instructions for own in each.values())
        return (("instructions",) if is_unused else ()) + options.unknown

    def check_field(self, name: str, text: str | None) -> None:
        """Raises if the text of a field is too long or cannot be tokenized."""
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
    """Use anyio and PyAV once: their first use imports more modules, which would block all streams for 20 to 90 ms."""
    await anyio.sleep(0)
    if av:
        Encoder("flac", 24000)  # a codec that every FFmpeg has


def describe_voice(voice: RegisteredVoice) -> dict:
    """A registered voice in the form of OpenAI's interface."""
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
    """speaker.pt files as voices, named after the files. Their content is checked by the worker."""
    speakers = {}
    for path in paths:
        check_speaker_file(path)
        name = check_name(path.stem)
        if name in speakers:
            raise ValueError(f"two --speaker files would be the voice {name}: rename {path}")
        speakers[name] = path.read_bytes()
    return speakers
