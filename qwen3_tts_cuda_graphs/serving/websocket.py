"""The WebSocket: text comes in while it is written, audio goes out while it is made.

    client: session.config, input.text ..., input.done, input.cancel, session.close
    server: audio.start, binary audio ..., audio.done, session.done, error

An utterance here is an ArrivingScript: it begins with its first text and ends with input.done or input.cancel, which
session.done answers. An error or an early end of the speech does not end it, as its text may still be arriving. Each
Answer that speaks some of its text is called a sentence: a part has several where the model has ended the speech before
the text, or where its text is too long for one row.

Messages are read at all times, so that input.cancel takes effect at once. Beside the reader, each context has a task
that speaks its utterances one after another; the next may be written while the last is still spoken. Those of several
contexts are spoken at the same time.
"""

import asyncio
import base64
import collections
import contextlib
import math
from dataclasses import replace

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen3_tts_cuda_graphs.prompts.cut import arriving_bytes
from qwen3_tts_cuda_graphs.prompts.script import Part, nth_seed, silence_before
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.arriving_script import ArrivingPart, ArrivingScript, SpokenSentence
from qwen3_tts_cuda_graphs.serving.audio_formats import check_encoding, encode_stream
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error, to_json
from qwen3_tts_cuda_graphs.serving.guard import SUBPROTOCOL, connection_of
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions, describe, parse, parse_json
from qwen3_tts_cuda_graphs.serving.service import Service

MAX_WAITING = 8  # utterances of one connection
MAX_MISTAKES = 32  # messages with errors, after which the connection is closed
MAX_MESSAGE = 32_000  # bytes: some clients, as Go's, take no more than 32 KB by default
MAX_DELTA = 22_500  # bytes of audio in a message of JSON, as base64: whole samples
MAX_CONTEXT = 128  # characters of a context's name
MAX_SENTENCE_TEXT = 2_500  # characters in audio.start; as JSON each may take 12 bytes
NORMAL, GONE, POLICY_VIOLATION = 1000, 1006, 1008  # close codes


class Context:
    """Utterances that are spoken one after another. Those of other contexts are spoken at the same time."""

    def __init__(self, name: str | None):
        self.ids = {} if name is None else {"context_id": name}  # in each message about it
        self.name = name
        self.writing = None  # the ArrivingScript that input.text is added to
        self.unspoken = []  # those not spoken to their end yet, in order; the last may be `writing`


class Session:
    """One connection."""

    def __init__(self, websocket: WebSocket, service: Service):
        self.websocket = websocket
        self.service = service
        self.settings = service.settings
        self.options = None  # the last session.config
        self.contexts = {}  # name -> Context with something to speak; messages without a context_id have the name None
        self.spoken = collections.deque(maxlen=MAX_WAITING)  # the last ones: (name of the context, ArrivingScript)
        self.is_closing = False
        self.utterances = 0

    @property
    def unspoken(self) -> list[ArrivingScript]:
        return [script for context in self.contexts.values() for script in context.unspoken]

    async def run(self) -> None:
        offered = self.websocket.scope.get("subprotocols", ())
        await self.websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        error = None
        try:
            self.service.check_ready()
            async with anyio.create_task_group() as self.tasks:
                error = await self.read_all()
                self.tasks.cancel_scope.cancel()
        except ApiError as refused:
            error = refused
        finally:
            self.options = None
            for script in self.unspoken:  # they are garbage that is collected later, their recordings are freed now
                script.options = None
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client may be gone
            if error:
                await self.send_error(error)
            await self.websocket.close(POLICY_VIOLATION if error else NORMAL)

    # ---- What the client sends

    async def read_all(self) -> ApiError | None:
        """Read messages until the session ends. Returns an error if that is why."""
        mistakes = 0
        while True:
            context = Context(None)
            try:
                message = await self.read()
                if self.is_closing:
                    continue
                context = self.context_of(message)
                if self.options is None and message["type"] not in ("session.config", "session.close"):
                    raise ApiError(f"{message['type']} came first: begin with session.config", code="not_configured")
                await self.HANDLERS[message["type"]](self, message, context)
            except WebSocketDisconnect:
                return None
            except ApiError as error:
                mistakes += 1
                if error.code == "timeout" or self.options is None or mistakes == MAX_MISTAKES:
                    return error
                with contextlib.suppress(WebSocketDisconnect):  # the next read notices, too
                    await self.send_error(error, **context.ids)

    async def read(self) -> dict:
        """The next message."""
        seconds = self.settings.config_seconds if self.options is None else self.settings.idle_seconds
        wait = seconds
        while True:
            try:
                with anyio.fail_after(wait):
                    received = await self.websocket.receive()
                break
            except TimeoutError:
                wait = self.seconds_left(seconds)
                if wait <= 0:
                    raise ApiError(
                        f"no message came within {seconds:g} s: open a new connection", code="timeout"
                    ) from None
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        if received.get("text") is None:
            raise ApiError("a binary message came: send JSON as text", code="invalid_json")
        message = parse_json(received["text"])
        kind = message.get("type")
        if not isinstance(kind, str) or kind not in self.HANDLERS:
            raise ApiError(f"the type is {describe(kind)}: send one of {', '.join(self.HANDLERS)}", param="type")
        return message

    def seconds_left(self, seconds: float) -> float:
        """How much longer to wait for a message. Who listens has nothing to send, and pings are signs of life."""
        if self.unspoken and not any(context.writing for context in self.contexts.values()):
            return seconds
        connection = connection_of(self.websocket.scope)
        if self.options is None or connection is None:
            return 0.0
        return connection.heartbeat + seconds - asyncio.get_running_loop().time()

    def context_of(self, message: dict) -> Context:
        """The context of a message. A new one is kept in `contexts` once it has something to speak."""
        name = message.get("context_id")
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_CONTEXT):
            problem = f"context_id is {describe(name)}: give a string of at most {MAX_CONTEXT} characters"
            raise ApiError(problem, param="context_id", code="invalid_value")
        return self.contexts.get(name) or Context(name)

    async def configure(self, message: dict, context: Context) -> None:
        if None in self.contexts and self.contexts[None].writing:
            raise ApiError("session.config came within an utterance: send input.done or input.cancel first")
        options = parse(SpeechOptions, message)
        await self.service.refresh_if_unknown(options.voice)
        self.service.check(options)
        check_encoding(options)
        self.lexicon = await self.service.lexicon_for(options)
        self.options = options
        self.count_recordings()

    def count_recordings(self) -> None:
        """Each utterance keeps the configuration that it began with; all else that a session keeps is small."""
        in_use = {id(options): options for options in [self.options, *(script.options for script in self.unspoken)]}
        size = sum(len(options.ref_audio or "") for options in in_use.values())
        self.websocket.scope["memory"].keep(size)

    async def add_text(self, message: dict, context: Context) -> None:
        text = message.get("text")
        if not isinstance(text, str):
            raise ApiError(f"text is {describe(text)}: it must be a string", param="text", code="invalid_value")
        self.append_text(context, text)

    def append_text(self, context: Context, text: str, is_end: bool = False) -> None:
        writing = context.writing
        if writing is None and not text.strip():
            return  # an utterance begins with its first word
        if writing and "error" in writing.early_end:
            return  # the rest of a text whose speech has failed
        text, half = split_half_a_pair((writing.half if writing else "") + text)
        try:
            self.service.check_field("input", (writing.text if writing else "") + text + (half if is_end else ""))
            if writing is None:
                self.service.check_ready()
                if len(self.unspoken) >= MAX_WAITING:
                    raise ApiError(f"{MAX_WAITING} utterances wait to be spoken already: send less at once", 429)
        except ApiError:  # the rest of this text must not begin another utterance
            self.begin(context)
            context.writing.stop("error")
            raise
        self.begin(context)
        context.writing.half = half
        context.writing.add(text)

    def begin(self, context: Context) -> None:
        if context.writing is not None:
            return
        context.writing = ArrivingScript(self.utterances, self.options, self.lexicon)
        self.utterances += 1
        context.unspoken.append(context.writing)
        if len(context.unspoken) == 1:  # nobody speaks for it
            self.contexts[context.name] = context
            self.tasks.start_soon(self.speak_all, context)

    async def finish(self, message: dict, context: Context) -> None:
        try:
            self.append_text(context, "", is_end=True)  # an error if half a character is left: the other never came
        finally:
            if context.writing:
                context.writing.finish()
                context.writing = None
            else:  # a keep-alive
                done = dict(utterance_index=self.utterances, total_sentences=0)
                await self.send(type="session.done", **done, **context.ids)

    async def cancel(self, message: dict, context: Context) -> None:
        """The listener has interrupted: stop what is spoken, and drop what waits, in one context or in all. Each gets
        its session.done, which tells what was sent and, if the client says how much it has played, what was heard."""
        played, index = (check_number(message, name) for name in ("played_seconds", "utterance_index"))
        interrupted = [*self.contexts.values()] if context.name is None else [context]
        cancelled = [script for other in interrupted for script in other.unspoken]
        spoken = [script for name, script in self.spoken if context.name in (None, name)]
        heard = [script for script in spoken + cancelled if script.sent and index in (None, script.index)]
        if played is not None and heard:
            heard[-1].played = played
        for other in interrupted:
            other.writing = None
        if not cancelled:
            done = dict(utterance_index=self.utterances, total_sentences=0, cancelled=True)
            done |= {"utterance_index": heard[-1].index} | heard[-1].report() if played is not None and heard else {}
            await self.send(type="session.done", **done, **context.ids)
        for script in cancelled:
            script.cancel()

    async def close(self, message: dict, context: Context) -> None:
        """Speak the utterances that are complete, then end the session."""
        self.is_closing = True
        for context in self.contexts.values():
            if context.writing:
                context.writing.cancel()
                context.writing = None
        self.end_if_closing()

    def end_if_closing(self) -> None:
        if self.is_closing and not self.unspoken:
            self.tasks.cancel_scope.cancel()

    HANDLERS = {
        "session.config": configure,
        "input.text": add_text,
        "input.done": finish,
        "input.cancel": cancel,
        "session.close": close,
    }

    # ---- What the server sends

    async def speak_all(self, context: Context) -> None:
        """Speak for a context until nothing is left."""
        while context.unspoken:
            script = context.unspoken[0]
            self.service.responses += 1
            try:
                with contextlib.suppress(WebSocketDisconnect):  # the reader notices, too
                    await self.speak(context, script)
            finally:
                self.service.responses -= 1
            context.unspoken.remove(script)
            self.count_recordings()
            script.options = None
            self.spoken.append((context.name, script))
        del self.contexts[context.name]
        self.end_if_closing()

    async def speak(self, context: Context, script: ArrivingScript) -> None:
        """One utterance. Text that arrives after the speech of its part has ended is spoken as a further sentence."""
        ids = {"utterance_index": script.index} | context.ids
        previous = None
        async for part in script.parts_to_speak():
            known = replace(part.part, text=part.said.strip())  # so far
            pause = silence_before(known, previous)
            previous = known
            while (await script.has_more(part) or pause) and not script.ended_early:
                await self.speak_sentence(context, script, part, pause)
                pause = 0.0
        if script.mistake and not script.ended_early:
            script.stop("error")
            await self.send_error(script.mistake, **ids)
        await script.wait_until(lambda: script.is_complete)
        end = dict(script.early_end)
        if "cancelled" in end:
            end |= script.report()
        elif script.unspoken_characters() and not end:
            end = {"unspoken_characters": script.unspoken_characters()}
        await self.send(type="session.done", **ids, total_sentences=len(script.sentences), **end)

    async def speak_sentence(self, context: Context, script: ArrivingScript, part: ArrivingPart, pause: float) -> None:
        """Silence, and then the next text of a part, as much as one row can speak."""
        ids = {"utterance_index": script.index, "sentence_index": len(script.sentences)} | context.ids
        sentence = SpokenSentence("", script.sent + pause)
        start, total_bytes, error = part.taken, 0, None

        def written() -> str:
            return part.written[part.written_until(start) : part.written_until(part.taken)][:MAX_SENTENCE_TEXT]

        with anyio.CancelScope() as script.speaking:
            try:
                with anyio.fail_after(self.settings.request_seconds):
                    options = await self.options_of(script, part)
                    answer = self.answer_for(script, part, options, pause)
                    pieces = encode_stream(answer)
                    async with contextlib.aclosing(pieces):
                        async for data in pieces:
                            if total_bytes == 0:
                                script.sentences.append(sentence)
                                about = dict(
                                    format=options.response_format, sample_rate=options.sample_rate or answer.rate
                                )
                                if ignored := self.service.ignored(options):
                                    about["ignored"] = ignored
                                about |= dict(sentence_text=written(), start_seconds=round(sentence.start, 4))
                                await self.send(type="audio.start", **ids, **about)
                            await self.send_audio(data, context)
                            total_bytes += len(data)
                            script.sent = sentence.start - pause + answer.seconds
                part.taken = start + (answer.characters_read or 0)
                part.hit_max_new_tokens = answer.hit_max_new_tokens()
                sentence.end = script.sent
            except WebSocketDisconnect:
                raise
            except Exception as failure:
                error = as_api_error(failure, self.websocket.scope["request_id"])
        sentence.text = written()
        if error:
            script.stop("error")
            await self.send_error(error, utterance_index=script.index, **context.ids)
        if total_bytes:
            about = dict(start_seconds=round(sentence.start, 4), end_seconds=round(script.sent, 4))
            about |= dict(total_bytes=total_bytes, sentence_text=sentence.text) | script.early_end
            await self.send(type="audio.done", **ids, **about)

    def answer_for(self, script: ArrivingScript, part: ArrivingPart, options: SpeechOptions, pause: float) -> Answer:
        """Speaks the text of a part as it arrives, after its pause; or only the pause, if no text is left."""
        has_text = not part.is_complete or part.rest.strip()
        pieces = script.pieces(part, self.max_bytes(options)) if has_text else None
        return Answer(self.service, options, [Part("", pause=pause)], pieces)

    async def options_of(self, script: ArrivingScript, part: ArrivingPart) -> SpeechOptions:
        """The options of a part, with its voice and style."""
        options = script.options.for_part(part.part)
        if options is not script.options:
            await self.service.refresh_if_unknown(options.voice)
            self.service.check_part(options, part.part)
        number = sum(spoken.taken > 0 for spoken in script.parts[: script.parts.index(part)])
        return options.model_copy(update={"seed": nth_seed(options.seed, number)})

    def max_bytes(self, options: SpeechOptions) -> int | None:
        """How much text one row can speak. None: the length is the client's own choice."""
        return arriving_bytes(self.settings.max_seq_len) if options.max_new_tokens is None else None

    async def send_error(self, error: ApiError, **about) -> None:
        await self.send(type="error", message=error.message, code=error.code, param=error.param, **about)

    async def send(self, **message) -> None:
        try:
            await self.websocket.send_text(to_json(message))
        except RuntimeError:  # Starlette's, when the client has gone
            raise WebSocketDisconnect(GONE) from None

    async def send_audio(self, data: bytes, context: Context) -> None:
        """Past the middlewares, as HTTP. In a context with a name, audio goes as JSON that has the name."""
        if context.name is not None:
            for start in range(0, len(data), MAX_DELTA):
                audio = base64.b64encode(data[start : start + MAX_DELTA]).decode()
                await self.send(type="audio.delta", audio=audio, **context.ids)
            return
        try:
            for start in range(0, len(data), MAX_MESSAGE):
                piece = data[start : start + MAX_MESSAGE]
                await self.websocket.scope["send"]({"type": "websocket.send", "bytes": piece})
        except OSError:
            raise WebSocketDisconnect(GONE) from None


def split_half_a_pair(text: str) -> tuple[str, str]:
    """A text with its surrogate pairs joined, and the first half of a pair if it ends with one.

    Programs that write UTF-16, like those in JavaScript, may cut a text within a pair.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if "\ud800" <= text[-1:] <= "\udbff":
        return text[:-1], text[-1]
    return text, ""


def check_number(message: dict, name: str) -> float | None:
    value = message.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < math.inf):
        raise ApiError(f"{name} is {describe(value)}: give a number from 0 on", param=name, code="invalid_value")
    return value
