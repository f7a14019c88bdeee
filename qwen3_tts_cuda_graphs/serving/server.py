"""The HTTP server: OpenAI's speech interface, voices to register, health and metrics; websocket.py is the other half.

    service = Service("0.6B")
    await service.start()  # in the server's event loop: see process.py
    app = create_app(service)

A speech request is read, checked against the model, and answered by a SpeechResponse, which speaks while it sends. The
first chunk of audio decides the status: whatever fails before it gets an error with a status of its own.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import anyio
import prometheus_client
from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from qwen3_tts_cuda_graphs.prompts.script import Part
from qwen3_tts_cuda_graphs.serving.answer import Answer
from qwen3_tts_cuda_graphs.serving.audio_formats import CONTENT_TYPES, check_encoding, convert, encode_stream
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error, log, to_json
from qwen3_tts_cuda_graphs.serving.guard import Guard, connection_of
from qwen3_tts_cuda_graphs.serving.page import FILES as PAGES
from qwen3_tts_cuda_graphs.serving.page import page_response
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions, SpeechRequest, parse, parse_json
from qwen3_tts_cuda_graphs.serving.service import Service
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.signed_addresses import AddressRequest, read_address, signed_address
from qwen3_tts_cuda_graphs.serving.websocket import Session

MAX_WRITE = 1 << 16  # bytes at a time: a client that reads them in time may take long for a whole file
MAX_EVENT = 24_000  # bytes of audio in a server-sent event: as base64 below 32 KB, and whole samples
MAX_REGISTRATIONS = 16  # voices that are being made or wait for a thread, each with its recording


class App(Starlette):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep uvicorn's own `send` in the scope: each middleware wraps another around it, which only the start of a
        response needs.

        Ignore doubled slashes: some programs add their route to an address that ends with a slash.
        """
        scope["send"] = send
        if "path" in scope:
            scope["path"] = "/" + "/".join(filter(None, scope["path"].split("/")))
        await super().__call__(scope, receive, send)


def create_app(service: Service) -> Starlette:
    """The application. Until `service.start` has returned, requests get 503."""
    settings = service.settings
    registering = asyncio.Semaphore(MAX_REGISTRATIONS)
    routes = [WebSocketRoute("/v1/audio/speech/stream", lambda websocket: Session(websocket, service).run())]

    def route(method: str, path: str) -> Callable:
        def add(endpoint: Callable) -> Callable:
            routes.append(Route(path, endpoint, methods=[method]))
            return endpoint

        return add

    async def read_speech_request(kind: type[SpeechRequest], content: dict) -> tuple[SpeechRequest, list[Part]]:
        """Parse and check it, and read its text as a script."""
        speech_request = parse(kind, content)
        await service.refresh_if_unknown(speech_request.voice)
        service.check(speech_request)
        check_encoding(speech_request)
        return speech_request, await service.read_parts(speech_request)

    @route("GET", "/v1/audio/speech")
    @route("POST", "/v1/audio/speech")
    async def create_speech(request: Request) -> Response:
        try:
            service.check_ready()
            is_post = request.method == "POST"
            content = await read_json(request, settings) if is_post else read_address(request.scope)
            speech_request, parts = await read_speech_request(SpeechRequest, content)
        except ApiError as error:
            service.metrics.requests.labels(error.outcome).inc()
            raise
        ignored = service.ignored(speech_request, parts)
        return SpeechResponse(Answer(service, speech_request, parts), ignored)

    @route("POST", "/v1/audio/speech/url")
    async def sign_address(request: Request) -> Response:
        """An address for whoever is to hear the speech without having the key."""
        service.check_ready()
        content = await read_json(request, settings)
        speech_request, _ = await read_speech_request(AddressRequest, content)
        return JSONResponse(signed_address(speech_request, settings))

    @route("GET", "/v1/audio/voices")
    async def list_voices(_: Request) -> Response:
        await service.refresh_voices()
        return JSONResponse({"voices": service.voices()})

    @route("POST", "/v1/audio/voices")
    async def register_voice(request: Request) -> Response:
        service.check_ready()
        if registering.locked():
            raise ApiError(f"{MAX_REGISTRATIONS} voices are being registered already: try again later", 429)
        async with registering:
            name, data, ref_text = await read_voice(request, settings)
            return JSONResponse(await service.register(name, data, ref_text))

    @route("DELETE", "/v1/audio/voices/{name}")
    async def remove_voice(request: Request) -> Response:
        name = request.path_params["name"]
        await service.unregister(name)
        return JSONResponse({"id": name.lower(), "object": "audio.voice.deleted", "deleted": True})

    @route("POST", "/v1/audio/convert")
    async def convert_speech(request: Request) -> Response:
        """Encode a WAV file: the page saves as mp3 what it has played."""
        options = parse(SpeechOptions, {"response_format": request.query_params.get("response_format") or "mp3"})
        check_encoding(options)
        with time_limit(request, settings):
            wav = await request.body()
        data = await service.in_thread(convert, wav, options)
        request.scope["memory"].add(len(data))
        length = {"content-length": str(len(data))}
        return StreamingResponse(stream_slices(data), headers=length, media_type=CONTENT_TYPES[options.response_format])

    async def describe_models() -> list[dict]:
        await service.refresh_voices()
        limits = dict(max_text=settings.max_text, max_reference_seconds=settings.max_reference_seconds)  # for the page
        return [model.describe(service.registered) | limits for model in service.models]

    @route("GET", "/v1/models")
    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": await describe_models()})

    @route("GET", "/v1/audio/models")
    async def list_audio_models(_: Request) -> Response:
        """The list in the form that Open WebUI reads."""
        return JSONResponse({"models": await describe_models()})

    @route("GET", "/v1/models/{name}")
    async def find_model(request: Request) -> Response:
        name = request.path_params["name"]
        models = {model["id"]: model for model in await describe_models()}
        if name not in models:
            raise ApiError(f"there is no model {name!r} here: choose {', '.join(map(repr, models))}", 404)
        return JSONResponse(models[name])

    @route("GET", "/health")
    async def health(_: Request) -> Response:
        service.check_all_ready()
        return JSONResponse({"status": "ok"})

    @route("GET", "/livez")
    @route("GET", "/v1/test")  # wyoming-openai asks this to learn whether it may list our voices
    async def live(_: Request) -> Response:
        """Whether this process serves, whatever its engines do."""
        return JSONResponse({"status": "ok"})

    @route("GET", "/metrics")
    async def metrics(_: Request) -> Response:
        text = prometheus_client.generate_latest(service.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def page(request: Request) -> Response:
        path = request.scope["path"]
        if path == "/docs" and request.scope.get("raw_path", b"").endswith(b"/"):  # its addresses are relative
            return Response(status_code=307, headers={"Location": "../docs"})
        return page_response(path, known=request.headers.get("if-none-match", ""))

    for path in PAGES:
        route("GET", path)(page)

    async def refuse(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def client_has_left(_: Request, error: Exception) -> Response:
        return Response(status_code=400)

    async def not_found(request: Request, error: HTTPException) -> Response:
        problem = f"{request.method[:20]} {request.url.path[:80]}: {error.detail}"
        if error.status_code == 404:
            problem += f": there are {', '.join(sorted({route.path for route in routes[:-1]}))}"
        response = ApiError(problem, error.status_code).response()
        if error.status_code == 405:
            here = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
            response.headers["Allow"] = ", ".join(sorted(set().union(*(route.methods for route in here))))
        return response

    async def fail(request: Request, error: Exception) -> Response:
        request_id = request.scope["request_id"]
        response = as_api_error(error, request_id).response()
        response.headers["X-Request-Id"] = request_id  # this response does not pass the guard
        return response

    middleware = [Middleware(Guard, settings=settings)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client sends headers of its own
            expose_headers=["X-Sample-Rate", "X-Request-Id", "X-Ignored"],
            allow_private_network=True,  # Chromium asks for it where a public page calls this machine
        )
        middleware.insert(0, cors)
    handlers = {ApiError: refuse, ValueError: refuse, HTTPException: not_found, Exception: fail}
    handlers[ClientDisconnect] = client_has_left
    routes.append(WebSocketRoute("/{path:path}", no_such_websocket))
    app = App(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def read_json(request: Request, settings: Settings) -> dict:
    """Only JSON: web pages of other hosts can send any other content type without asking the server first."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(f"the content type is {content_type[:80]!r}, it must be application/json", 415)
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(f"the content encoding is {encoding[:80]!r}: send the JSON as it is", 415)
    with time_limit(request, settings):
        return parse_json(await request.body())


async def read_voice(request: Request, settings: Settings) -> tuple[str, bytes, str | None]:
    """The fields of a multipart form: name, recording, transcript."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError("a voice is sent as multipart/form-data: name, audio_sample and, if known, ref_text", 415)
    _, options = parse_options_header(request.headers["content-type"])
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):  # punycode, say, would take a minute
        raise ApiError("the form's charset must be utf-8", 415)
    with time_limit(request, settings):
        try:
            parser = MultiPartParser(request.headers, request.stream(), max_files=1, max_fields=10)
            parser.spool_max_size = settings.max_body  # in memory, where it is counted: a disk may be full
            form = await parser.parse()
        except MultiPartException as error:
            raise ApiError(f"the form cannot be read: {error.message}") from None
    try:
        name, sample, ref_text = (form.get(field) for field in ("name", "audio_sample", "ref_text"))
        if not isinstance(name, str):
            raise ApiError("name is missing: give the voice a name", param="name")
        if not isinstance(sample, UploadFile):
            raise ApiError("audio_sample is missing: give a recording of the voice", param="audio_sample")
        if isinstance(ref_text, UploadFile):
            raise ApiError("ref_text is a file, it must be text", param="ref_text")
        return name, await sample.read(), (ref_text or "").strip() or None
    finally:
        await form.close()


@contextlib.contextmanager
def time_limit(request: Request, settings: Settings):
    """Limit the time for the body. Most bodies are small and come with the head."""
    connection = connection_of(request.scope)
    if connection and connection.has_whole_request():
        yield
        return
    try:
        with anyio.fail_after(settings.body_seconds):
            yield
    except TimeoutError:
        raise ApiError(f"the request did not arrive within {settings.body_seconds:g} s", 408) from None


class SpeechResponse(Response):
    """Speech that is sent while it is made. It stops when the client goes away."""

    def __init__(self, answer: Answer, ignored: tuple[str, ...] = ()):
        """ignored: fields that this model cannot use"""
        self.answer = answer
        self.ignored = ignored
        self.settings = answer.service.settings
        self.speech_request = speech_request = answer.options
        self.is_sse = speech_request.stream_format == "sse"
        self.is_json = speech_request.timestamps and not self.is_sse
        self.is_whole = self.is_json or (speech_request.stream is False and not self.is_sse)
        self.size = 0  # bytes of a response that is sent as a whole
        self.described_parts = 0  # events have described so many
        self.task = None  # the task that speaks
        self.why_stopped = None  # an error; ClientDisconnect: there is nobody to tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":  # nothing is to be spoken yet
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
        """Stop when the client goes away."""
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
        """Send the response. Returns whether it is complete, or the client has left."""
        has_begun = False
        connection = connection_of(scope)
        is_unchunked = connection and scope["http_version"] == "1.0" and not self.is_whole
        try:
            pieces = encode_stream(self.answer, partial(self.keep, scope) if self.is_whole else None)
            if self.is_json:
                pieces = self.with_times(pieces)
            async with contextlib.aclosing(pieces):
                async for data in pieces:
                    if self.why_stopped:  # asyncio.wait_for may lose a cancellation, before Python 3.12
                        raise asyncio.CancelledError
                    if not has_begun:
                        if is_unchunked:
                            connection.send_unchunked()
                        await send(self.start_message(self.size if self.is_whole else None))
                        has_begun = True
                        send = scope.get("send", send)
                    for piece in self.delta_events(data) if self.is_sse else slices(data, MAX_WRITE):
                        await send(body(piece))
            if not has_begun:
                raise ApiError("the model said nothing: change the text or the seed", 500)
            if self.is_sse:
                await send(body(await self.done_event()))
            if is_unchunked:
                connection.send_unchunked(is_over=True)
            await send(body(b"", more=False))
            return True
        except asyncio.CancelledError:
            if not self.why_stopped:  # the server ends
                if has_begun and connection:
                    connection.break_off()
                raise
            error = self.why_stopped
        except Exception as failure:
            error = failure
        finally:
            self.task = None  # what follows ends by itself
        if isinstance(error, ClientDisconnect):
            return True
        error = as_api_error(error, scope["request_id"])
        if not has_begun:
            await error.response()(scope, receive, send)
            return True
        # The response stays incomplete and the connection is closed, so that the client sees an error and not a short
        # file: HTTP has no other sign. Events are no exception: some clients ignore those of an unknown type.
        log.warning("request %s was broken off: %s", scope["request_id"], error.message)
        if self.is_sse:
            with contextlib.suppress(asyncio.TimeoutError):
                event_of_error = event({"type": "error", **error.content()})
                await asyncio.wait_for(send(body(event_of_error)), self.settings.send_seconds)
        return False

    def start_message(self, length: int | None) -> dict:
        content_type = "text/event-stream" if self.is_sse else CONTENT_TYPES[self.speech_request.response_format]
        content_type = "application/json" if self.is_json else content_type
        headers = {
            "content-type": content_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # nginx must not collect the stream
            "x-sample-rate": str(self.speech_request.sample_rate or self.answer.rate),
        }
        if length is not None:
            headers["content-length"] = str(length)
        if self.ignored:
            headers["x-ignored"] = ", ".join(self.ignored)
        return {"type": "http.response.start", "status": 200, "headers": Headers(headers).raw}

    def delta_events(self, data: bytes) -> Iterator[bytes]:
        """Events with the audio. The first event of a part describes it; it has no audio while the encoder still holds
        that part's."""
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
        """Count the memory of audio that is kept to be sent as a whole."""
        self.size += size
        scope["memory"].add(size)

    async def with_times(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """JSON with the audio in base64, in pieces, as all of it at once may take seconds."""
        before, after = b'{"audio": "', b""
        rest = b""  # of the audio: base64 takes three bytes at a time
        async with contextlib.aclosing(pieces):
            async for data in pieces:
                if not after:  # now all of it was made
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
            "sample_rate": self.speech_request.sample_rate or answer.rate,
            "duration_seconds": answer.in_seconds(answer.samples),
            "parts": [answer.describe_part(number) | answer.times_of_part(number) for number in numbers],
        }


def slices(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


async def stream_slices(data: bytes) -> AsyncIterator[bytes]:
    for piece in slices(data, MAX_WRITE):
        yield piece


async def no_such_websocket(websocket: WebSocket) -> None:
    problem = "there is no WebSocket at this path: use /v1/audio/speech/stream"
    await websocket.send_denial_response(ApiError(problem, 404, code="not_found").response())


def body(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


def event(content: dict) -> bytes:
    """A server-sent event."""
    return f"data: {to_json(content)}\n\n".encode()
