"""The WebSocket: receives text while it is written, and sends audio as it is generated.

    client: session.config, input.text ..., input.done, input.cancel, session.close
    server: audio.start, binary audio ..., audio.done, session.done, error (context.py)

    input.text -> Session.append_text -> ArrivingScript, whose Notation finds the parts
    its ArrivingParts -> SpokenScript.speak -> an Answer for each sentence -> Context.send_audio

Messages are read while speech is sent, so that input.cancel takes effect immediately. Each context has its own task,
which speaks its utterances one after another; the text of the next one may arrive while one is still spoken.
"""

import asyncio
import collections
import contextlib
import math

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen3_tts_cuda_graphs.serving.context import Context, SpokenScript
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.guard import SUBPROTOCOL, connection_of
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions, describe, parse, parse_json
from qwen3_tts_cuda_graphs.serving.service import Service

MAX_WAITING = 8  # unspoken utterances per connection
MAX_MISTAKES = 32  # invalid messages, after which the connection is closed
MAX_CONTEXT = 128  # characters in the name of a context
NORMAL, POLICY_VIOLATION = 1000, 1008  # close codes


class Session:
    """One connection."""

    def __init__(self, websocket: WebSocket, service: Service):
        self.websocket = websocket
        self.service = service
        self.settings = service.settings
        self.options = None  # the last session.config
        self.contexts = {}  # name -> Context with something to speak; the name is None for messages without context_id
        self.spoken = collections.deque(maxlen=MAX_WAITING)  # the last utterances that were completely spoken
        self.is_closing = False
        self.utterances = 0  # how many have begun

    @property
    def unspoken(self) -> list[SpokenScript]:
        return [utterance for context in self.contexts.values() for utterance in context.unspoken]

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
            for utterance in self.unspoken:  # frees the recordings before the garbage collection
                utterance.options = None
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client may have disconnected
            if error:
                await Context(self.websocket, None).send_error(error)
            await self.websocket.close(POLICY_VIOLATION if error else NORMAL)

    # ---- Messages of the client

    async def read_all(self) -> ApiError | None:
        """Handle messages until the session ends. Returns the error that ended it, if any."""
        mistakes = 0
        while True:
            context = Context(self.websocket, None)
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
                with contextlib.suppress(WebSocketDisconnect):  # the next read raises it again
                    await context.send_error(error)

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
        """How much longer to wait for a message. A client that listens to speech, or sends pings, may stay silent."""
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
        return self.contexts.get(name) or Context(self.websocket, name)

    async def configure(self, message: dict, context: Context) -> None:
        if None in self.contexts and self.contexts[None].writing:
            raise ApiError("session.config came within an utterance: send input.done or input.cancel first")
        options = parse(SpeechOptions, message)
        await self.service.check(options)
        self.lexicon = await self.service.lexicon_for(options)
        self.options = options
        self.count_recordings()

    def count_recordings(self) -> None:
        """Count the memory of recordings. Each utterance keeps the configuration with which it began; everything else
        in a session is small."""
        in_use = {id(options): options for options in [self.options, *(one.options for one in self.unspoken)]}
        size = sum(len(options.ref_audio or "") for options in in_use.values())
        self.websocket.scope["memory"].keep(size)

    async def add_text(self, message: dict, context: Context) -> None:
        text = message.get("text")
        if not isinstance(text, str):
            raise ApiError(f"text is {describe(text)}: it must be a string", param="text", code="invalid_value")
        self.append_text(context, text)

    def append_text(self, context: Context, text: str, is_end: bool = False) -> None:
        is_first = context.writing is None
        if is_first and not text.strip():
            return  # white space does not begin an utterance
        utterance = context.writing or self.begin(context)
        script = utterance.script
        if "error" in script.early_end:
            return  # the speech has failed: ignore the rest of its text
        text, half = split_half_a_pair(script.half + text)
        try:
            self.service.check_field("input", script.text + text + (half if is_end else ""))
            if is_first:
                self.service.check_ready()
                if len(self.unspoken) > MAX_WAITING:
                    raise ApiError(f"{MAX_WAITING} utterances wait to be spoken already: send less at once", 429)
        except ApiError:  # the rest of this text must not begin another utterance
            utterance.stop("error")
            raise
        script.half = half
        script.add(text)

    def begin(self, context: Context) -> SpokenScript:
        context.writing = SpokenScript(context, self.service, self.utterances, self.options, self.lexicon)
        self.utterances += 1
        context.unspoken.append(context.writing)
        if len(context.unspoken) == 1:  # no task speaks for this context yet
            self.contexts[context.name] = context
            self.tasks.start_soon(self.speak_all, context)
        return context.writing

    async def speak_all(self, context: Context) -> None:
        """Speak the utterances of a context until none is left."""
        while context.unspoken:
            utterance = context.unspoken[0]
            self.service.responses += 1
            try:
                with contextlib.suppress(WebSocketDisconnect):  # the reader ends the session
                    await utterance.speak()
            finally:
                self.service.responses -= 1
            context.unspoken.remove(utterance)
            self.count_recordings()
            utterance.options = None
            self.spoken.append(utterance)
        del self.contexts[context.name]
        self.end_if_closing()

    async def finish(self, message: dict, context: Context) -> None:
        try:
            self.append_text(context, "", is_end=True)  # raises if half of a surrogate pair is left
        finally:
            if context.writing:
                context.writing.script.finish()
                context.writing = None
            else:  # a keep-alive
                await context.send(type="session.done", utterance_index=self.utterances, total_sentences=0)

    async def cancel(self, message: dict, context: Context) -> None:
        """The listener has interrupted: stop speaking and drop waiting utterances, in one context or all. Each gets a
        session.done with what was sent and, if the client tells how much it has played, what was heard."""
        played, index = (number_from(message, name) for name in ("played_seconds", "utterance_index"))
        interrupted = [*self.contexts.values()] if context.name is None else [context]
        cancelled = [utterance for other in interrupted for utterance in other.unspoken]
        spoken = [utterance for utterance in self.spoken if context.name in (None, utterance.context.name)]
        heard = [one for one in spoken + cancelled if one.sent and index in (None, one.index)]
        last_heard = heard[-1] if heard and played is not None else None
        if last_heard:
            last_heard.played = played
        for other in interrupted:
            other.writing = None
        if not cancelled:
            index, report = (last_heard.index, last_heard.report()) if last_heard else (self.utterances, {})
            done = dict(utterance_index=index, total_sentences=0, cancelled=True)
            await context.send(type="session.done", **done, **report)
        for utterance in cancelled:
            utterance.cancel()

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


def split_half_a_pair(text: str) -> tuple[str, str]:
    """A text with its surrogate pairs combined, and the first half of a pair if the text ends with one.

    Programs that use UTF-16, such as those in JavaScript, may split a text within a pair.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if "\ud800" <= text[-1:] <= "\udbff":
        return text[:-1], text[-1]
    return text, ""


def number_from(message: dict, name: str) -> float | None:
    value = message.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < math.inf):
        raise ApiError(f"{name} is {describe(value)}: give a number from 0 on", param=name, code="invalid_value")
    return value
