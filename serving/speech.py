"""The model, its voices and the engine, as the server uses them: a checked request goes in, audio comes out.

Nothing here blocks the event loop: recordings are decoded and encoded to prompts in threads of their own, prompts are
built and frames run in the engine's threads.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common import checkpoints
from common.audio_files import Chunk
from common.loading import choose_device
from common.voices import clone_prompt, load_speaker, speaker_prompt
from generate import load
from serving.audio_formats import decode_base64, decode_recording
from serving.errors import ApiError
from serving.metrics import Metrics
from serving.requests import Style
from serving.settings import Settings, check_model
from serving.voices import RegisteredVoice, VoiceFolder, as_stored, check_name
from speech.arriving_text import characters_read, tokens_to_begin
from speech.engine import Engine
from speech.prompts import check_encodable, check_text, reference_codes
from speech.request import QueueFull
from speech.utterance import CutOff

# Names that OpenAI's clients send, whatever the server has.
OPENAI_VOICES = "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()
DESIGNED_VOICES = {"narrator": "a warm and clear narrator"}  # for a VoiceDesign model without `instructions`
NUMBERS = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")
MAX_REFERENCE_THREADS = 2

Text = str | AsyncIterator[str]


class Speech:
    """One model that speaks for many clients. `load` it before use, `close` it afterwards."""

    def __init__(
        self,
        model: str,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        settings: Settings | None = None,
        speakers: dict[str, dict] | None = None,
    ):
        """Check everything that can be checked without the weights.

        speakers: name -> voice_clone_prompt, voices besides those in the folder
        """
        self.model = model
        self.settings = settings or Settings()
        self.config = checkpoints.read_config(model)
        self.kind = self.config["tts_model_type"]
        self.device = choose_device(device)
        self.dtype = dtype
        self.ranges = checkpoints.number_ranges(self.config)
        positions = self.config["talker_config"]["max_position_embeddings"]
        self.ranges["max_new_tokens"] = (lambda x: 2 <= x <= positions, f"from 2 to {positions}")
        check_model(self.settings, model, bool(speakers))

        self.presets = []
        if self.kind == "custom_voice":
            self.presets = sorted(map(str.lower, self.config["talker_config"]["spk_id"]))
        if self.kind == "voice_design":
            self.presets = list(DESIGNED_VOICES)
        self.speakers = speakers or {}
        self.folder = VoiceFolder(self.settings) if self.kind == "base" else None
        self.prompts = dict(self.speakers)  # name or RegisteredVoice -> its prompt, made when first needed

        self.threads = ThreadPoolExecutor(MAX_REFERENCE_THREADS, "references")
        self.metrics = Metrics(lambda: self.engine.counts() if self.engine else (0, 0))
        self.tts = None
        self.engine = None
        self.in_flight = 0  # utterances that have a place or wait for one
        self.max_in_flight = self.settings.max_streams + self.settings.max_waiting
        self.is_draining = False

    # ---- Lifetime

    def load(self) -> None:
        """Load the weights, capture all graphs and speak once, so that the first client need not wait."""
        limits = self.settings
        self.tts = load(self.model, self.device, self.dtype, max_seq_len=limits.max_seq_len, rows=limits.max_streams)
        # Requests are counted in Utterance.speak: the engine's own limit is out of reach.
        engine = Engine(self.tts, max_waiting=self.max_in_flight, cut_off_is_error=True)
        self.warm_up(engine)
        self.engine = engine

    def warm_up(self, engine: Engine) -> None:
        style = Style(max_new_tokens=5)
        if self.kind == "base":
            noise = np.random.default_rng(0).normal(0, 0.1, 24000).astype(np.float32)
            prompt = clone_prompt(self.tts, noise, 24000, "warm up")
            method, arguments = self.tts.generate_voice_clone, {"voice_clone_prompt": prompt}
        else:
            method, arguments = self.preset_arguments(style)
        with contextlib.suppress(CutOff):
            for _ in engine.stream(method, text="Warm up.", **arguments, **self.sampling(style)):
                pass

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.is_running

    def check_ready(self) -> None:
        if self.is_draining:
            raise ApiError("the server is shutting down: ask another one", 503, code="shutting_down")
        if self.engine and not self.engine.is_running:
            raise ApiError("the engine has stopped: restart the server, its log says why", 503, code="stopped")
        if not self.is_ready:
            raise ApiError("the server is starting: try again in a moment", 503, code="starting")

    def close(self) -> None:
        if self.engine:
            self.engine.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    # ---- Voices

    def voices(self) -> list[dict]:
        presets = [{"id": name, "name": name, "kind": "preset"} for name in (*self.presets, *self.speakers)]
        return presets + [describe_voice(voice) for voice in (self.folder.voices.values() if self.folder else ())]

    def voice_names(self) -> list[str]:
        return [voice["name"] for voice in self.voices()]

    def resolve_voice(self, name: str | None) -> str:
        """The voice for a name. Without one, and for OpenAI's names, one that exists, the same each time."""
        wanted = (name or OPENAI_VOICES[0]).strip().lower()
        if wanted in (*self.presets, *self.speakers):  # the folder of voices may be on a slow disk
            return wanted
        names = self.voice_names()
        if wanted in names:
            return wanted
        if wanted in OPENAI_VOICES and self.presets:
            return self.presets[OPENAI_VOICES.index(wanted) % len(self.presets)]
        if wanted in OPENAI_VOICES and names:
            return names[0]  # the oldest: it stays the same when voices are added
        if not names:
            raise ApiError(
                "this model clones voices and none is registered: POST a recording to /v1/audio/voices, or send "
                "ref_audio with the request",
                param="voice",
                code="unknown_voice",
            )
        nearest = checkpoints.nearest(wanted, names)
        raise ApiError(f"there is no voice {name!r}: choose {nearest}", param="voice", code="unknown_voice")

    async def register(self, name: str, data: bytes, ref_text: str | None) -> dict:
        """Make a voice from a recording and keep it."""
        self.check_cloning("audio_sample")
        name = check_name(name)
        if name in self.speakers:
            raise ApiError(f"there is a voice {name} already: choose another name", param="name")
        self.check_field("ref_text", ref_text)
        self.folder.check_new(name)

        def make() -> RegisteredVoice:
            recording = as_stored(decode_recording(data, self.settings, "audio_sample"))
            prompt = self.make_prompt("audio_sample", recording, ref_text)
            voice = self.folder.add(name, recording, ref_text)
            self.prompts[voice] = prompt
            return voice

        return describe_voice(await self.run(make))

    async def unregister(self, name: str) -> None:
        name = name.lower()
        try:
            if self.folder is None:
                raise KeyError(name)
            await self.run(self.folder.remove, name)
        except KeyError:
            raise ApiError(f"there is no registered voice {name!r}", 404, "name", "unknown_voice") from None
        self.forget_removed_voices()

    async def run(self, function: Callable, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    # ---- Requests

    def check(self, style: Style) -> None:
        """Refuse what this model cannot do, before any work starts."""
        for name in (*NUMBERS, "seed"):
            self.check_number(name, getattr(style, name))
        for name in ("instructions", "ref_text", "voice", "language"):
            self.check_field(name, getattr(style, name))
        languages = checkpoints.languages(self.config)
        if style.language and style.language.lower() not in languages:
            nearest = checkpoints.nearest(style.language, languages)
            raise ApiError(f"there is no language {style.language!r}: choose {nearest}", param="language")
        self.check_reference(style)

    def ignored(self, style: Style) -> tuple[str, ...]:
        """Fields that this model cannot use. Programs send them to any model."""
        is_small = self.kind == "custom_voice" and self.config.get("tts_model_size") == "0b6"
        return ("instructions",) if style.instructions and (self.kind == "base" or is_small) else ()

    def check_number(self, name: str, value: float | None) -> None:
        is_good, wanted = self.ranges[name]
        if value is not None and not is_good(value):
            raise ApiError(f"{name} is {value}, it must be {wanted}", param=name, code="invalid_value")

    def check_field(self, name: str, text: str | None) -> None:
        """Whether a field can be tokenized, and is not too long."""
        if text and len(text) > self.settings.max_text:
            raise ApiError(
                f"{name} has {len(text)} characters, at most {self.settings.max_text} are possible: shorten it",
                param=name,
                code="too_long",
            )
        try:
            check_encodable(text or "", name)
        except ValueError as error:
            raise ApiError(str(error), param=name, code="invalid_value") from None

    def check_reference(self, style: Style) -> None:
        """Whether the fields describe one voice."""
        if style.ref_audio is not None and style.speaker_embedding is not None:
            raise ApiError("ref_audio and speaker_embedding are two voices: give one of them", param="ref_audio")
        if style.ref_audio is None:
            self.check_no_reference(style)
        if style.ref_audio is None and style.speaker_embedding is None:
            self.resolve_voice(style.voice)
            return
        self.check_cloning("ref_audio" if style.ref_audio is not None else "speaker_embedding")
        has_text = bool(style.ref_text and style.ref_text.strip())
        if style.x_vector_only_mode is False and style.ref_audio is not None and not has_text:
            raise ApiError("ref_text is missing: give what the recording says", param="ref_text")
        width = self.config["talker_config"]["hidden_size"]
        if style.speaker_embedding is not None and len(style.speaker_embedding) != width:
            raise ApiError(
                f"speaker_embedding has {len(style.speaker_embedding)} numbers, this model takes {width}: extract it "
                "with the model you speak with",
                param="speaker_embedding",
            )

    def check_no_reference(self, style: Style) -> None:
        """A registered voice has its own transcript."""
        if style.ref_text:
            name, meaning = "ref_text", "what ref_audio says"
        elif style.x_vector_only_mode and style.speaker_embedding is None:
            name, meaning = "x_vector_only_mode", "how ref_audio is used"
        else:
            return
        raise ApiError(f"{name} is {meaning}, which is missing: send ref_audio, or leave {name} out", param=name)

    def check_cloning(self, what: str) -> None:
        if self.kind != "base":
            raise ApiError(f"{what} is not for {checkpoints.KINDS[self.kind]}: choose one of its voices", param=what)

    def check_text(self, text: str) -> str:
        self.check_field("input", text)
        try:
            return check_text(text)
        except ValueError as error:
            raise ApiError(str(error), param="input", code="invalid_value") from None

    async def arguments(self, style: Style) -> tuple[Callable, dict]:
        """Upstream's method for this voice, and its arguments except the text."""
        if self.kind != "base":
            return self.preset_arguments(style)
        if style.speaker_embedding is not None:
            embedding = torch.tensor(style.speaker_embedding)
            self.check_embedding("speaker_embedding", embedding)
            prompt = speaker_prompt(embedding)
        elif style.ref_audio is not None:
            prompt = await self.run(self.prompt_of_recording, style)
        else:
            name = self.resolve_voice(style.voice)
            voice = name if name in self.speakers else self.folder.voices.get(name)
            prompt = self.prompts.get(voice) or await self.run(self.prompt_of_voice, name)
        return self.tts.generate_voice_clone, {"voice_clone_prompt": prompt}

    def preset_arguments(self, style: Style) -> tuple[Callable, dict]:
        name = self.resolve_voice(style.voice)
        if self.kind == "custom_voice":
            instruct = None if self.ignored(style) else style.instructions
            return self.tts.generate_custom_voice, {"speaker": name, "instruct": instruct}
        return self.tts.generate_voice_design, {"instruct": style.instructions or DESIGNED_VOICES[name]}

    def make_prompt(self, name: str, recording: Chunk, ref_text: str | None) -> list:
        prompt = clone_prompt(self.tts, *recording, ref_text)
        self.check_embedding(name, prompt[0].ref_spk_embedding)
        return prompt

    def check_embedding(self, name: str, embedding: torch.Tensor) -> None:
        if not embedding.to(self.tts.model.talker.dtype).isfinite().all():
            raise ApiError(
                f"{name} makes a speaker embedding with NaN or infinite values: give another one", param=name
            )

    def prompt_of_recording(self, style: Style) -> list:
        recording = decode_recording(decode_base64(style.ref_audio, self.settings), self.settings, "ref_audio")
        ref_text = None if style.x_vector_only_mode else (style.ref_text or "").strip()
        return self.make_prompt("ref_audio", recording, ref_text or None)

    def prompt_of_voice(self, name: str) -> list:
        voice, recording = self.folder.read(name)
        prompt = self.make_prompt("voice", recording, voice.ref_text)
        self.prompts[voice] = prompt
        self.forget_removed_voices()
        return prompt

    def forget_removed_voices(self) -> None:
        """Voices may also be removed by another server that shares the folder."""
        there = {*self.speakers, *self.folder.voices.values()}
        self.prompts = {voice: prompt for voice, prompt in [*self.prompts.items()] if voice in there}

    def sampling(self, style: Style) -> dict:
        """Settings as upstream's arguments; what was not given is the model's own."""
        arguments = {name: getattr(style, name) for name in NUMBERS}
        arguments["language"] = style.language or "Auto"
        if style.non_streaming_mode is not None:
            arguments["non_streaming_mode"] = style.non_streaming_mode
        return arguments

    def say(self, style: Style, text: Text) -> "Utterance":
        """Speak a text, or one that is still being written."""
        return Utterance(self, style, text)


class Utterance:
    """A text that is being spoken: `async for samples, rate in utterance`. Then it knows how long it was."""

    def __init__(self, speech: Speech, style: Style, text: Text):
        self.speech = speech
        self.style = style
        self.text = text
        self.asked = time.perf_counter()
        self.seconds = 0.0  # of audio so far
        self.blocked = 0.0  # seconds that the client took to read it
        self.prompt_tokens = 1  # of the text, before the first frame

    @property
    def rate(self) -> int:
        return self.speech.engine.rate

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        outcome = "failed"
        try:
            async with contextlib.aclosing(self.speak()) as chunks:
                async for chunk in chunks:
                    yield chunk
            outcome = "complete"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except QueueFull:
            outcome = "refused"
            raise
        except ValueError:
            outcome = "invalid"
            raise
        finally:
            self.speech.metrics.requests.labels(outcome).inc()

    async def speak(self) -> AsyncIterator[Chunk]:
        speech = self.speech
        if speech.in_flight >= speech.max_in_flight:
            raise QueueFull(f"{speech.in_flight} requests are in flight already: try again later")
        speech.in_flight += 1
        try:
            method, arguments = await speech.arguments(self.style)
            if not isinstance(self.text, str) and (prompt := arguments.get("voice_clone_prompt")):
                self.prompt_tokens = tokens_to_begin(speech.tts, prompt, reference_codes(prompt)) - 1
            arguments |= speech.sampling(self.style)
            stream = speech.engine.astream(method, text=self.text, seed=self.style.seed, **arguments)
            async with contextlib.aclosing(stream) as chunks:
                async for samples, rate in chunks:
                    self.measure(len(samples) / rate)
                    yield samples, rate
                    self.blocked += time.perf_counter() - self.last_chunk
        except CutOff:
            if not self.was_asked_to_end():
                raise
        finally:
            speech.in_flight -= 1

    def measure(self, seconds: float) -> None:
        """Record a chunk of audio: when it came, and whether a player had to wait for it."""
        metrics, now = self.speech.metrics, time.perf_counter()
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

    def text_tokens(self) -> int:
        return len(self.speech.tts.processor.tokenizer(self.text).input_ids)

    def characters_read(self, text: str) -> int:
        """Of a text that came in pieces: the speech may end before its frames, a token each, have read all of it."""
        return characters_read(self.speech.tts, text, self.prompt_tokens + self.frames)

    def was_asked_to_end(self) -> bool:
        """Whether the client's own max_new_tokens has ended the speech."""
        return self.style.max_new_tokens is not None and self.frames == self.style.max_new_tokens - 1


def describe_voice(voice: RegisteredVoice) -> dict:
    """With the fields of OpenAI's Voice."""
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


def load_speakers(paths: list[Path], model: str) -> dict[str, dict]:
    """speaker.pt files as voices; the file's name is the voice's."""
    width = checkpoints.base_config(model)["talker_config"]["hidden_size"] if paths else 0
    speakers = {}
    for path in paths:
        name = check_name(path.stem)
        if name in speakers:
            raise ValueError(f"two --speaker files would be the voice {name}: rename {path}")
        speakers[name] = load_speaker(path, width)
    return speakers
