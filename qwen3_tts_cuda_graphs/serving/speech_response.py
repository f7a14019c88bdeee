"""Speech as an HTTP response: streamed audio, server-sent events, or JSON with the times of its parts.

The response starts with the first audio, so that a failure before it still gets an error status.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.audio_formats import CONTENT_TYPES, slices
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error, log, to_json
from qwen3_tts_cuda_graphs.serving.guard import connection_of

MAX_WRITE = 1 << 16  # bytes per write: a client may take long for a whole file as long as it keeps reading
MAX_EVENT = 24_000  # bytes of audio per server-sent event: below 32 KB as base64, and whole samples


class SpeechResponse(Response):
    """Speech that is sent as it is generated. It stops when the client disconnects."""

    def __init__(self, answer: Answer, ignored: tuple[str, ...] = ()):
        """ignored: names of fields that have no effect"""
        self.answer = answer
        self.ignored = ignored
        self.settings = answer.service.settings
        self.speech_request = speech_request = answer.options
        self.is_sse = speech_request.stream_format == "sse"
        self.is_json = speech_request.timestamps and not self.is_sse
        self.is_whole = self.is_json or (speech_request.stream is False and not self.is_sse)
        self.size = 0  # bytes of a response that is sent as a whole
        self.described_parts = 0  # how many parts the events have described
        self.has_begun = False
        self.task = None  # the task that speaks
        self.why_stopped = None  # an exception; after ClientDisconnect no error is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":  # only the headers, without speaking
            await send(self.start_message(None))
            await send(body(b"", more=False))
            return
        self.task = asyncio.current_task()
        limit = asyncio.get_running_loop().call_later(self.settings.request_seconds, self.stop, TimeoutError())
        watcher = asyncio.create_task(self.watch(receive))
        self.answer.service.responses += 1
        try:
            is_complete = await self.respond(scope, receive, send)
            if not is_complete and (connection := connection_of(scope)):
                connection.break_off()
                await watcher  # ends when the connection is closed
        finally:
            self.answer.service.responses -= 1
            limit.cancel()
            watcher.cancel()

    async def watch(self, receive: Receive) -> None:
        """Stop when the client disconnects."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.stop(ClientDisconnect())
        except Exception as error:
            self.stop(error)

    def stop(self, why: Exception) -> None:
        if self.task:
            self.why_stopped = why
            self.task.cancel()

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Send the response. Returns False if it has begun and cannot be completed."""
        try:
            await self.send_speech(scope, send)
            return True
        except asyncio.CancelledError:
            if not self.why_stopped:  # the server is shutting down
                if self.has_begun and (connection := connection_of(scope)):
                    connection.break_off()
                raise
            error = self.why_stopped
        except Exception as failure:
            error = failure
        finally:
            self.task = None  # sending the error must not be cancelled
        if isinstance(error, ClientDisconnect):
            return True
        error = as_api_error(error, scope["request_id"])
        if not self.has_begun:
            await error.response()(scope, receive, send)
            return True
        # The connection is closed before the response is complete, so that the client sees an error rather than a short
        # file: HTTP has no other way. The same for server-sent events: some clients ignore those of an unknown type.
        log.warning("request %s was broken off: %s", scope["request_id"], error.message)
        if self.is_sse:
            with contextlib.suppress(TimeoutError):
                event_of_error = body(event({"type": "error", **error.content()}))
                await asyncio.wait_for(past_middlewares(scope, send)(event_of_error), self.settings.send_seconds)
        return False

    async def send_speech(self, scope: Scope, send: Send) -> None:
        connection = connection_of(scope)
        is_unchunked = connection and scope["http_version"] == "1.0" and not self.is_whole
        keep = partial(self.keep, scope)
        pieces = self.answer.encode_whole(keep) if self.is_whole else self.answer.encode()
        if self.is_json:
            pieces = self.with_times(pieces)
        async with contextlib.aclosing(pieces):
            async for data in pieces:
                if self.why_stopped:  # before Python 3.12 asyncio.wait_for may lose a cancellation
                    raise asyncio.CancelledError
                if not self.has_begun:
                    if is_unchunked:
                        connection.send_unchunked()
                    await send(self.start_message(self.size if self.is_whole else None))
                    self.has_begun = True
                    send = past_middlewares(scope, send)
                for piece in self.delta_events(data) if self.is_sse else slices(data, MAX_WRITE):
                    await send(body(piece))
        if not self.has_begun:
            raise ApiError("the model said nothing: change the text or the seed", 500)
        if self.is_sse:
            await send(body(await self.done_event()))
        if is_unchunked:
            connection.send_unchunked(is_over=True)
        await send(body(b"", more=False))

    def start_message(self, length: int | None) -> dict:
        content_type = "text/event-stream" if self.is_sse else CONTENT_TYPES[self.speech_request.response_format]
        content_type = "application/json" if self.is_json else content_type
        headers = {
            "content-type": content_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # nginx would buffer the stream
            "x-sample-rate": str(self.answer.sample_rate),
        }
        if length is not None:
            headers["content-length"] = str(length)
        if self.ignored:
            headers["x-ignored"] = ", ".join(self.ignored)
        return {"type": "http.response.start", "status": 200, "headers": Headers(headers).raw}

    def delta_events(self, data: bytes) -> Iterator[bytes]:
        """Events with the audio. The first event of a part describes the part; it has no audio if the encoder still
        buffers all of that part."""
        new = [self.answer.describe_part(number) for number in range(self.described_parts, len(self.answer.cues))]
        self.described_parts += len(new)
        audio = [b""] * (len(new) - 1) + [*slices(data, MAX_EVENT)]
        for number, piece in enumerate(audio):
            about = {"part": new[number]} if number < len(new) else {}
            yield event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode(), **about})

    async def done_event(self) -> bytes:
        text, audio = await self.answer.text_tokens(), self.answer.frames
        usage = {"input_tokens": text, "output_tokens": audio, "total_tokens": text + audio}
        parts = [self.answer.times_of_part(number) for number in range(len(self.answer.cues))]
        return event({"type": "speech.audio.done", "usage": usage, "parts": parts})

    def keep(self, scope: Scope, size: int) -> None:
        """Count the memory of audio that is buffered to be sent as a whole."""
        self.size += size
        scope["memory"].add(size)

    async def with_times(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """JSON with the audio in base64, encoded piece by piece: all of it at once may take seconds."""
        before, after = b'{"audio": "', b""
        rest = b""  # base64 encodes three bytes at a time; these remain
        async with contextlib.aclosing(pieces):
            async for data in pieces:
                if not after:  # the first piece arrives when all audio has been generated
                    after = b'", ' + to_json(self.times()).encode().removeprefix(b"{")
                    self.size = len(before) + (self.size + 2) // 3 * 4 + len(after)
                    yield before
                data = rest + data
                rest = data[len(data) // 3 * 3 :]
                yield base64.b64encode(data[: len(data) - len(rest)])
        if after:
            yield base64.b64encode(rest) + after

    def times(self) -> dict:
        answer = self.answer
        numbers = range(len(answer.cues))
        return {
            "format": self.speech_request.response_format,
            "sample_rate": answer.sample_rate,
            "duration_seconds": answer.in_seconds(answer.samples),
            "parts": [answer.describe_part(number) | answer.times_of_part(number) for number in numbers],
        }


def body(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


def event(content: dict) -> bytes:
    """A server-sent event."""
    return f"data: {to_json(content)}\n\n".encode()


def past_middlewares(scope: Scope, send: Send) -> Send:
    """uvicorn's `send`, without the wrapper that each middleware adds: only the start of a response needs them."""
    return scope.get("send", send)
