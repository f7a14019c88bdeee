"""What a WebSocket sends: the utterances of its contexts.

An utterance is a SpokenScript, and its text an ArrivingScript. It begins with its first text and ends with input.done
or input.cancel, which session.done answers. It does not end with an error, or when the speech ends early, as more of
its text may arrive. Each Answer that speaks some of its text is called a sentence. A part has several sentences if the
model ended the speech before the end of the text, or if the text is too long for one row.
"""

import base64
import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen3_tts_cuda_graphs.prompts.cut import arriving_bytes
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon
from qwen3_tts_cuda_graphs.prompts.script import Part, nth_seed, silence_before
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.arriving_script import ArrivingPart, ArrivingScript
from qwen3_tts_cuda_graphs.serving.audio_formats import slices
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error, to_json
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions
from qwen3_tts_cuda_graphs.serving.service import Service

MAX_MESSAGE = 32_000  # bytes: some libraries, such as Go's, accept at most 32 KB by default
MAX_DELTA = 22_500  # bytes of audio in a JSON message: below 32 KB as base64, and whole samples
MAX_SENTENCE_TEXT = 2_500  # characters in audio.start: in JSON each may take 12 bytes
GONE = 1006  # close code
LAST_WORD = re.compile(r"\w+$")


class Context:
    """Utterances that are spoken one after another. Those of different contexts are spoken at the same time."""

    def __init__(self, websocket: WebSocket, name: str | None):
        self.websocket = websocket
        self.name = name
        self.writing = None  # the SpokenScript to which input.text is added
        self.unspoken = []  # each SpokenScript that is not completely spoken, in order; the last may be `writing`

    async def send(self, **message) -> None:
        about = {} if self.name is None else {"context_id": self.name}
        try:
            await self.websocket.send_text(to_json(message | about))
        except RuntimeError:  # from Starlette: the client has disconnected
            raise WebSocketDisconnect(GONE) from None

    async def send_error(self, error: ApiError, **about) -> None:
        await self.send(type="error", message=error.message, code=error.code, param=error.param, **about)

    async def send_audio(self, data: bytes) -> None:
        """Send binary messages, bypassing the middlewares as speech_response.py does. In a context with a name, audio
        is sent as JSON with that name."""
        if self.name is not None:
            for piece in slices(data, MAX_DELTA):
                await self.send(type="audio.delta", audio=base64.b64encode(piece).decode())
            return
        try:
            for piece in slices(data, MAX_MESSAGE):
                await self.websocket.scope["send"]({"type": "websocket.send", "bytes": piece})
        except OSError:
            raise WebSocketDisconnect(GONE) from None


@dataclass
class SpokenSentence:
    """Spoken text and its times, in seconds of the utterance's audio."""

    index: int
    part: ArrivingPart
    first: int  # where it begins in `part.said`
    start: float
    end: float | None = None  # set if all of it was sent
    text: str = ""  # set when it ends
    total_bytes: int = 0  # sent so far

    def text_so_far(self) -> str:
        return self.part.taken_since(self.first)[:MAX_SENTENCE_TEXT]


class SpokenScript:
    """One utterance: its arriving text, and what of it was sent."""

    def __init__(self, context: Context, service: Service, index: int, options: SpeechOptions, lexicon: Lexicon):
        self.context = context
        self.service = service
        self.index = index
        self.options = options
        self.script = ArrivingScript(options, lexicon)
        self.sentences = []  # each SpokenSentence so far
        self.sent = 0.0  # seconds of audio
        self.played = None  # seconds that the client had played when it sent input.cancel
        self.speaking = anyio.CancelScope()  # that of the current sentence

    async def send(self, kind: str, **about) -> None:
        await self.context.send(type=kind, utterance_index=self.index, **about)

    def stop(self, reason: str) -> None:
        """Stop speaking. reason: cancelled or error"""
        self.script.stop(reason)
        self.speaking.cancel()

    def cancel(self) -> None:
        self.stop("cancelled")
        self.script.finish()

    async def speak(self) -> None:
        """Speak all of it. Text that arrives after the speech of its part has ended is spoken as another sentence."""
        script, previous = self.script, None
        async for part in script.parts_to_speak():
            known = replace(part.part, text=part.said.strip())  # the text so far
            pause = silence_before(known, previous)
            previous = known
            while (await script.has_more(part) or pause) and not script.early_end:
                await self.speak_sentence(part, pause)
                pause = 0.0
        if script.mistake and not script.early_end:
            await self.fail(script.mistake)
        await script.wait_until(lambda: script.is_complete)
        end = dict(script.early_end)
        if "cancelled" in end:
            end |= self.report()
        elif script.unspoken_characters() and not end:
            end = {"unspoken_characters": script.unspoken_characters()}
        await self.send("session.done", total_sentences=len(self.sentences), **end)

    async def fail(self, error: ApiError) -> None:
        self.stop("error")
        await self.context.send_error(error, utterance_index=self.index)

    async def speak_sentence(self, part: ArrivingPart, pause: float) -> None:
        """Speak the pause, then the next text of a part, as much as fits into a row."""
        sentence = SpokenSentence(len(self.sentences), part, part.taken, self.sent + pause)
        try:
            with anyio.CancelScope() as self.speaking, anyio.fail_after(self.service.settings.request_seconds):
                await self.send_sentence(sentence, pause)
        except WebSocketDisconnect:
            raise
        except Exception as failure:
            await self.fail(as_api_error(failure, self.context.websocket.scope["request_id"]))
        sentence.text = sentence.text_so_far()
        if sentence.total_bytes:
            about = dict(start_seconds=round(sentence.start, 4), end_seconds=round(self.sent, 4))
            about |= dict(total_bytes=sentence.total_bytes, sentence_text=sentence.text) | self.script.early_end
            await self.send("audio.done", sentence_index=sentence.index, **about)

    async def send_sentence(self, sentence: SpokenSentence, pause: float) -> None:
        part, before = sentence.part, self.sent
        options = await self.options_of(part)
        answer = self.answer_for(part, options, pause)
        async with contextlib.aclosing(answer.encode()) as pieces:
            async for data in pieces:
                if sentence.total_bytes == 0:
                    self.sentences.append(sentence)
                    about = dict(format=options.response_format, sample_rate=answer.sample_rate)
                    if ignored := self.service.ignored(options):
                        about["ignored"] = ignored
                    about |= dict(sentence_text=sentence.text_so_far(), start_seconds=round(sentence.start, 4))
                    await self.send("audio.start", sentence_index=sentence.index, **about)
                await self.context.send_audio(data)
                sentence.total_bytes += len(data)
                self.sent = before + answer.seconds
        part.taken = sentence.first + (answer.characters_read or 0)
        part.hit_max_new_tokens = answer.hit_max_new_tokens()
        sentence.end = self.sent

    def answer_for(self, part: ArrivingPart, options: SpeechOptions, pause: float) -> Answer:
        """The pause, then the text of a part as it arrives; only the pause if no text is left."""
        room = arriving_bytes(self.service.settings.max_seq_len)  # in a row
        max_bytes = room if options.max_new_tokens is None else None  # with max_new_tokens the client limits the length
        has_text = not part.is_complete or part.rest.strip()
        pieces = self.script.pieces(part, max_bytes) if has_text else None
        return Answer(self.service, options, [Part("", pause=pause)], pieces)

    async def options_of(self, part: ArrivingPart) -> SpeechOptions:
        """The options of a part, with its voice, style and seed."""
        options = await self.service.options_for_part(self.options, part.part)
        parts = self.script.parts
        number = sum(spoken.taken > 0 for spoken in parts[: parts.index(part)])
        return options.model_copy(update={"seed": nth_seed(options.seed, number)})

    def report(self) -> dict:
        """What was sent before an interruption, and what was heard, if the client has sent `played_seconds`."""
        sent = {"sent_seconds": round(self.sent, 3), "sent_text": joined(it.text for it in self.sentences)}
        return sent if self.played is None else sent | {"heard_text": heard_text(self.sentences, self.played)}


def heard_text(sentences: list[SpokenSentence], played: float) -> str:
    """The text up to a time: exact between sentences, estimated within a sentence by its share of the audio, in whole
    words."""
    heard = []
    for sentence in sentences:
        if sentence.end is not None and sentence.end <= played:
            heard.append(sentence.text)
        elif sentence.end is not None and sentence.start < played:
            share = (played - sentence.start) / (sentence.end - sentence.start)
            begun = sentence.text[: int(share * len(sentence.text))]
            heard.append(LAST_WORD.sub("", begun) if begun.isascii() else begun)
    return joined(heard)


def joined(texts: Iterable[str]) -> str:
    return " ".join(filter(None, map(str.strip, texts)))
