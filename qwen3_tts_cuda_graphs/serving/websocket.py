"""The WebSocket: text comes in while it is written, audio goes out while it is made.

    client: session.config, input.text ..., input.done, input.cancel, session.close
    server: audio.start, binary audio ..., audio.done, session.done, error

Messages are read at all times, so that input.cancel takes effect at once. Utterances are spoken one after another by a
task beside the reader; the next may be written while the last is still spoken. session.done answers input.done or
input.cancel: an error or an early end of the speech does not end the utterance, whose text may still be arriving. Text
that the speech ended before, or that is too long for one utterance, is spoken as a further sentence.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen3_tts_cuda_graphs.prompts.cut import arriving_bytes, end_after_bytes
from qwen3_tts_cuda_graphs.serving.audio_formats import check_encoding, encode_stream
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error, to_json
from qwen3_tts_cuda_graphs.serving.guard import SUBPROTOCOL, connection_of
from qwen3_tts_cuda_graphs.serving.requests import Style, describe, parse, parse_json
from qwen3_tts_cuda_graphs.serving.service import Service

MAX_WAITING = 8  # utterances of one connection
MAX_MISTAKES = 32  # messages with errors, after which the connection is closed
MAX_MESSAGE = 32_000  # bytes: some clients, as Go's, take no more than 32 KB by default
MAX_SENTENCE_TEXT = 2_500  # characters in audio.start; as JSON each may take 12 bytes
NORMAL, GONE, POLICY_VIOLATION = 1000, 1006, 1008  # close codes


class Incoming:
    """An utterance whose text is still arriving. It ends with input.done or input.cancel, not before."""

    def __init__(self, index: int, style: Style):
        self.index = index
        self.style = style
        self.text = ""
        self.taken = 0  # characters that have been given to the model
        self.is_complete = False
        self.is_over = False  # nothing more of it is spoken
        self.early_end = {}  # {"cancelled": True} or {"error": True}
        self.changed = asyncio.Event()
        self.speaking = anyio.CancelScope()  # around the sentence that is being spoken

    def add(self, text: str) -> None:
        self.text += text
        self.changed.set()

    def finish(self) -> None:
        self.is_complete = True
        self.changed.set()

    def stop(self, reason: str) -> None:
        """Stop now, or do not begin."""
        self.is_over = True
        self.early_end[reason] = True
        self.speaking.cancel()
        self.changed.set()

    def cancel(self) -> None:
        self.stop("cancelled")
        self.finish()

    @property
    def rest(self) -> str:
        return self.text[self.taken :]

    def has_words(self) -> bool:
        return any(map(str.isalnum, self.rest))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def has_more(self) -> bool:
        """Whether there is something to speak. Waits for text until it is complete."""
        await self.wait_until(lambda: self.is_complete or self.is_over or self.has_words())
        return self.has_words() and not self.is_over

    async def pieces(self, room: int | None = None) -> AsyncIterator[str]:
        """The text as it arrives, until it is complete, or a sentence of it has ended after `room` bytes."""
        start, end = self.taken, None
        while end is None and not (self.is_complete and not self.rest):
            await self.wait_until(lambda: self.is_complete or self.rest)
            end = room and end_after_bytes(self.text, start, room)
            piece = self.text[self.taken : end]
            self.taken += len(piece)
            if piece:
                yield piece


def split_half_a_pair(text: str) -> tuple[str, str]:
    """A text with its surrogate pairs joined, and the first half of a pair if it ends with one.

    Programs that write UTF-16, like those in JavaScript, may cut a text within a pair.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if "\ud800" <= text[-1:] <= "\udbff":
        return text[:-1], text[-1]
    return text, ""


class Session:
    """One connection."""

    def __init__(self, websocket: WebSocket, service: Service):
        self.websocket = websocket
        self.service = service
        self.settings = service.settings
        self.style = None  # the last session.config
        self.writing = None  # the Incoming that input.text is added to
        self.half = ""  # the first half of a surrogate pair: the other comes with the next text
        self.unspoken = []  # all utterances that have not been spoken to their end, in order
        self.queue = asyncio.Queue()  # the same, for the task that speaks; None after the last
        self.is_closing = False
        self.utterances = 0

    async def run(self) -> None:
        offered = self.websocket.scope.get("subprotocols", ())
        await self.websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        error = None
        try:
            self.service.check_ready()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.speak_all, tasks.cancel_scope)
                error = await self.read_all()
                tasks.cancel_scope.cancel()
        except ApiError as refused:
            error = refused
        finally:
            self.style = None
            for incoming in self.unspoken:  # they are garbage that is collected later, their recordings are freed now
                incoming.style = None
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client may be gone
            if error:
                await self.send_error(error)
            await self.websocket.close(POLICY_VIOLATION if error else NORMAL)

    # ---- What the client sends

    async def read_all(self) -> ApiError | None:
        """Read messages until the session ends. Returns an error if that is why."""
        mistakes = 0
        while True:
            try:
                message = await self.read()
                if self.is_closing:
                    continue
                if self.style is None and message["type"] not in ("session.config", "session.close"):
                    raise ApiError(f"{message['type']} came first: begin with session.config", code="not_configured")
                await self.HANDLERS[message["type"]](self, message)
            except WebSocketDisconnect:
                return None
            except ApiError as error:
                mistakes += 1
                if error.code == "timeout" or self.style is None or mistakes == MAX_MISTAKES:
                    return error
                with contextlib.suppress(WebSocketDisconnect):  # the next read notices, too
                    await self.send_error(error)

    async def read(self) -> dict:
        """The next message."""
        seconds = self.settings.config_seconds if self.style is None else self.settings.idle_seconds
        wait = seconds
        while True:
            try:
                with anyio.fail_after(wait):
                    received = await self.websocket.receive()
                break
            except TimeoutError:
                wait = self.patience(seconds)
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

    def patience(self, seconds: float) -> float:
        """How much longer to wait. Who listens has nothing to send, and pings are signs of life."""
        if self.writing is None and self.unspoken:
            return seconds
        connection = connection_of(self.websocket.scope)
        if self.style is None or connection is None:
            return 0.0
        return connection.heartbeat + seconds - asyncio.get_running_loop().time()

    async def configure(self, message: dict) -> None:
        if self.writing:
            raise ApiError("session.config came within an utterance: send input.done or input.cancel first")
        style = parse(Style, message)
        await self.service.look_for(style.voice)
        self.service.check(style)
        check_encoding(style)
        self.style = style
        self.count_recordings()

    def count_recordings(self) -> None:
        """Each utterance keeps the configuration that it began with; all else that a session keeps is small."""
        styles = {id(style): style for style in [self.style, *(incoming.style for incoming in self.unspoken)]}
        size = sum(len(style.ref_audio or "") for style in styles.values())
        self.websocket.scope["received"].keep(size)

    async def add_text(self, message: dict) -> None:
        text = message.get("text")
        if not isinstance(text, str):
            raise ApiError(f"text is {describe(text)}: it must be a string", param="text", code="invalid_value")
        text, self.half = split_half_a_pair(self.half + text)
        self.take(text)

    def take(self, text: str) -> None:
        if self.writing is None and not text.strip():
            return  # an utterance begins with its first word
        if self.writing and "error" in self.writing.early_end:
            return  # the rest of a text whose speech has failed
        try:
            self.service.check_text((self.writing.text if self.writing else "") + text)
            if self.writing is None:
                self.check_place()
        except ApiError:  # the rest of this text must not begin another utterance
            self.begin()
            self.writing.stop("error")
            raise
        self.begin()
        self.writing.add(text)

    def check_place(self) -> None:
        self.service.check_ready()
        if len(self.unspoken) >= MAX_WAITING:
            raise ApiError(f"{MAX_WAITING} utterances wait to be spoken already: send less at once", 429)

    def begin(self) -> None:
        if self.writing is None:
            self.writing = Incoming(self.utterances, self.style)
            self.utterances += 1
            self.unspoken.append(self.writing)
            self.queue.put_nowait(self.writing)

    async def finish(self, message: dict) -> None:
        half, self.half = self.half, ""
        try:
            self.take(half)  # an error if there is one: the other half never came
        finally:
            await self.end_utterance()

    async def end_utterance(self) -> None:
        if self.writing:
            self.writing.finish()
            self.writing = None
        else:  # a keep-alive
            await self.send(type="session.done", utterance_index=self.utterances, total_sentences=0)

    async def cancel(self, message: dict) -> None:
        """The listener has interrupted: stop what is spoken, and drop what waits. Each gets its session.done."""
        self.writing = None
        self.half = ""
        if not self.unspoken:
            done = dict(utterance_index=self.utterances, total_sentences=0, cancelled=True)
            await self.send(type="session.done", **done)
        for incoming in self.unspoken:
            incoming.cancel()

    async def close(self, message: dict) -> None:
        """Speak the utterances that are complete, then end the session."""
        self.is_closing = True
        if self.writing:
            self.writing.cancel()
            self.writing = None
        self.queue.put_nowait(None)

    HANDLERS = {
        "session.config": configure,
        "input.text": add_text,
        "input.done": finish,
        "input.cancel": cancel,
        "session.close": close,
    }

    # ---- What the server sends

    async def speak_all(self, session: anyio.CancelScope) -> None:
        while incoming := await self.queue.get():
            self.service.responses += 1
            try:
                with contextlib.suppress(WebSocketDisconnect):  # the reader notices, too
                    await self.speak(incoming)
            finally:
                self.service.responses -= 1
            self.unspoken.remove(incoming)
            self.count_recordings()
        session.cancel()

    async def speak(self, incoming: Incoming) -> None:
        """One utterance. Text that arrives after the speech has ended is spoken as a further sentence."""
        sentences = 0
        if not incoming.is_over:
            sentences += await self.speak_sentence(incoming, sentences)
        while await incoming.has_more():
            sentences += await self.speak_sentence(incoming, sentences)
        await incoming.wait_until(lambda: incoming.is_complete)
        end = incoming.early_end
        if incoming.has_words() and not end:  # the client's own max_new_tokens has ended the speech
            end = {"unspoken_characters": len(incoming.rest)}
        await self.send(type="session.done", utterance_index=incoming.index, total_sentences=sentences, **end)

    async def speak_sentence(self, incoming: Incoming, index: int) -> int:
        """Returns how many sentences there were: one, or none."""
        place = dict(utterance_index=incoming.index, sentence_index=index)
        total_bytes = 0
        start = incoming.taken
        error = None
        with anyio.CancelScope() as incoming.speaking:
            try:
                with anyio.fail_after(self.settings.request_seconds):
                    answer = self.service.say(incoming.style, incoming.pieces(self.room(incoming.style)))
                    pieces = encode_stream(answer, incoming.style)
                    async with contextlib.aclosing(pieces):
                        async for data in pieces:
                            if total_bytes == 0:
                                about = dict(sample_rate=answer.rate) | self.described(incoming.style)
                                text = incoming.text[start : incoming.taken][:MAX_SENTENCE_TEXT]
                                await self.send(type="audio.start", **place, sentence_text=text, **about)
                            await self.send_audio(data)
                            total_bytes += len(data)
                incoming.taken = start + answer.characters_read
                if answer.was_asked_to_end():
                    incoming.is_over = True
            except WebSocketDisconnect:
                raise
            except Exception as failure:
                error = as_api_error(failure, self.websocket.scope["request_id"])
        if error:
            incoming.stop("error")
            await self.send_error(error, utterance_index=incoming.index)
        if total_bytes:
            await self.send(type="audio.done", **place, total_bytes=total_bytes, **incoming.early_end)
        return 1 if total_bytes else 0

    def room(self, style: Style) -> int | None:
        """Bytes of text for one utterance, unless its length is the client's own choice."""
        return arriving_bytes(self.settings.max_seq_len) if style.max_new_tokens is None else None

    def described(self, style: Style) -> dict:
        """The format, and fields that the model cannot use."""
        ignored = self.service.ignored(style)
        return {"format": style.response_format} | ({"ignored": ignored} if ignored else {})

    async def send_error(self, error: ApiError, **about) -> None:
        await self.send(type="error", message=error.message, code=error.code, param=error.param, **about)

    async def send(self, **message) -> None:
        try:
            await self.websocket.send_text(to_json(message))
        except RuntimeError:  # Starlette's, when the client has gone
            raise WebSocketDisconnect(GONE) from None

    async def send_audio(self, data: bytes) -> None:
        """Bypass the middlewares, as server.py does."""
        try:
            for start in range(0, len(data), MAX_MESSAGE):
                piece = data[start : start + MAX_MESSAGE]
                await self.websocket.scope["send"]({"type": "websocket.send", "bytes": piece})
        except OSError:
            raise WebSocketDisconnect(GONE) from None
