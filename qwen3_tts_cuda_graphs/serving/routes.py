"""The HTTP routes: OpenAI's speech interface, voices, models, health and metrics. websocket.py has the WebSocket.

    service = Service("0.6B")
    await service.start()  # in the server's event loop: see server.py
    app = create_app(service)

A speech request is parsed and checked; then a SpeechResponse speaks it and sends the audio as it is generated.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import prometheus_client
from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
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
from qwen3_tts_cuda_graphs.serving.audio_formats import CONTENT_TYPES, check_encoding, convert, slices
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error
from qwen3_tts_cuda_graphs.serving.guard import Guard, connection_of
from qwen3_tts_cuda_graphs.serving.page import FILES as PAGES
from qwen3_tts_cuda_graphs.serving.page import page_response
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions, SpeechRequest, parse, parse_json
from qwen3_tts_cuda_graphs.serving.service import Service
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.signed_addresses import AddressRequest, read_address, signed_address
from qwen3_tts_cuda_graphs.serving.speech_response import MAX_WRITE, SpeechResponse
from qwen3_tts_cuda_graphs.serving.websocket import Session

MAX_REGISTRATIONS = 16  # concurrent, each with its recording in memory
MAX_CONVERSIONS = 4  # concurrent


class App(Starlette):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep uvicorn's own `send` for `past_middlewares`, and collapse repeated slashes in the path: some programs
        append their route to a base URL that ends with a slash."""
        scope["send"] = send
        if "path" in scope:
            scope["path"] = "/" + "/".join(filter(None, scope["path"].split("/")))
        await super().__call__(scope, receive, send)


def create_app(service: Service) -> Starlette:
    """The application. Until `service.start` has returned, requests get 503."""
    handlers = Handlers(service)
    routes = [
        WebSocketRoute("/v1/audio/speech/stream", lambda websocket: Session(websocket, service).run()),
        Route("/v1/audio/speech", handlers.create_speech, methods=["GET", "POST"]),
        Route("/v1/audio/speech/url", handlers.sign_address, methods=["POST"]),
        Route("/v1/audio/voices", handlers.list_voices),
        Route("/v1/audio/voices", handlers.register_voice, methods=["POST"]),
        Route("/v1/audio/voices/{name}", handlers.remove_voice, methods=["DELETE"]),
        Route("/v1/audio/convert", handlers.convert_speech, methods=["POST"]),
        Route("/v1/models", handlers.list_models),
        Route("/v1/models/{name}", handlers.find_model),
        Route("/v1/audio/models", handlers.list_audio_models),
        Route("/health", handlers.health),
        Route("/livez", live),
        Route("/v1/test", live),  # wyoming-openai requests this to find out whether it can list the voices
        Route("/metrics", handlers.metrics),
        *(Route(path, page) for path in PAGES),
        NO_SUCH_WEBSOCKET,
    ]
    middleware = [Middleware(Guard, settings=service.settings)]
    if service.settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client sends its own
            expose_headers=["X-Sample-Rate", "X-Request-Id", "X-Ignored"],
            allow_private_network=True,  # Chromium requires it when a public page calls this machine
        )
        middleware.insert(0, cors)
    errors = {
        ApiError: refuse,
        ValueError: refuse,
        HTTPException: not_found,
        ClientDisconnect: client_has_left,
        Exception: fail,
    }
    app = App(routes=routes, middleware=middleware, exception_handlers=errors)
    app.router.redirect_slashes = False
    return app


class Handlers:
    """The routes that use the service, one method each."""

    def __init__(self, service: Service):
        self.service = service
        self.settings = service.settings
        self.registering = asyncio.Semaphore(MAX_REGISTRATIONS)
        self.converters = ThreadPoolExecutor(MAX_CONVERSIONS, "convert")

    async def read_speech_request(self, kind: type[SpeechRequest], content: dict) -> tuple[SpeechRequest, list[Part]]:
        """Parse and check a request, and read its text as a script."""
        speech_request = parse(kind, content)
        await self.service.check(speech_request)
        return speech_request, await self.service.read_parts(speech_request)

    async def create_speech(self, request: Request) -> Response:
        try:
            self.service.check_ready()
            is_post = request.method == "POST"
            content = await json_content(request, self.settings) if is_post else read_address(request.scope)
            speech_request, parts = await self.read_speech_request(SpeechRequest, content)
        except ApiError as error:
            self.service.metrics.requests.labels(error.outcome).inc()
            raise
        ignored = self.service.ignored(speech_request, parts)
        return SpeechResponse(Answer(self.service, speech_request, parts), ignored)

    async def sign_address(self, request: Request) -> Response:
        """A signed URL of this request, for clients that do not have the key."""
        self.service.check_ready()
        content = await json_content(request, self.settings)
        speech_request, _ = await self.read_speech_request(AddressRequest, content)
        return JSONResponse(signed_address(speech_request, self.settings))

    async def list_voices(self, _: Request) -> Response:
        await self.service.cloned_voices.refresh()
        return JSONResponse({"voices": self.service.voices()})

    async def register_voice(self, request: Request) -> Response:
        self.service.check_ready()
        if self.registering.locked():
            raise ApiError(f"{MAX_REGISTRATIONS} voices are being registered already: try again later", 429)
        async with self.registering:
            name, data, ref_text = await read_voice(request, self.settings)
            return JSONResponse(await self.service.register(name, data, ref_text))

    async def remove_voice(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self.service.cloned_voices.remove(name)
        return JSONResponse({"id": name.lower(), "object": "audio.voice.deleted", "deleted": True})

    async def convert_speech(self, request: Request) -> Response:
        """Encode a WAV file. The page uses it to save speech as MP3."""
        options = parse(SpeechOptions, {"response_format": request.query_params.get("response_format") or "mp3"})
        check_encoding(options)
        with time_limit(request, self.settings):
            wav = await request.body()
        data = await asyncio.get_running_loop().run_in_executor(self.converters, convert, wav, options)
        request.scope["memory"].add(len(data))
        length = {"content-length": str(len(data))}
        return StreamingResponse(stream_slices(data), headers=length, media_type=CONTENT_TYPES[options.response_format])

    async def describe_models(self) -> list[dict]:
        await self.service.cloned_voices.refresh()
        limits = {name: getattr(self.settings, name) for name in ("max_text", "max_reference_seconds")}  # for the page
        return [model.describe() | limits for model in self.service.models]

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self.describe_models()})

    async def list_audio_models(self, _: Request) -> Response:
        """The models in the form that Open WebUI reads."""
        return JSONResponse({"models": await self.describe_models()})

    async def find_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        models = {model["id"]: model for model in await self.describe_models()}
        if name not in models:
            raise ApiError(f"there is no model {name!r} here: choose {', '.join(map(repr, models))}", 404)
        return JSONResponse(models[name])

    async def health(self, _: Request) -> Response:
        self.service.check_all_ready()
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        text = prometheus_client.generate_latest(self.service.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


async def live(_: Request) -> Response:
    """Whether this process responds, whatever the state of its engines."""
    return JSONResponse({"status": "ok"})


async def page(request: Request) -> Response:
    path = request.scope["path"]
    if path == "/docs" and request.scope.get("raw_path", b"").endswith(b"/"):  # its links are relative
        return Response(status_code=307, headers={"Location": "../docs"})
    return page_response(path, known=request.headers.get("if-none-match", ""))


async def refuse(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def client_has_left(_: Request, error: Exception) -> Response:
    return Response(status_code=400)


async def not_found(request: Request, error: HTTPException) -> Response:
    routes = [route for route in request.app.routes if route is not NO_SUCH_WEBSOCKET]
    problem = f"{request.method[:20]} {request.url.path[:80]}: {error.detail}"
    if error.status_code == 404:
        problem += f": there are {', '.join(sorted({route.path for route in routes}))}"
    response = ApiError(problem, error.status_code).response()
    if error.status_code == 405:
        here = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
        response.headers["Allow"] = ", ".join(sorted(set().union(*(route.methods for route in here))))
    return response


async def fail(request: Request, error: Exception) -> Response:
    request_id = request.scope["request_id"]
    response = as_api_error(error, request_id).response()
    response.headers["X-Request-Id"] = request_id  # Starlette sends this response outside the guard
    return response


async def no_such_websocket(websocket: WebSocket) -> None:
    problem = "there is no WebSocket at this path: use /v1/audio/speech/stream"
    await websocket.send_denial_response(ApiError(problem, 404, code="not_found").response())


NO_SUCH_WEBSOCKET = WebSocketRoute("/{path:path}", no_such_websocket)


async def json_content(request: Request, settings: Settings) -> dict:
    """The body as JSON. No other content type is accepted: browsers send some of them for pages of any origin without a
    preflight request."""
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
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):  # decoding punycode may take a minute
        raise ApiError("the form's charset must be utf-8", 415)
    with time_limit(request, settings):
        try:
            parser = MultiPartParser(request.headers, request.stream(), max_files=1, max_fields=10)
            parser.spool_max_size = settings.max_body  # in memory, where the guard counts it: a disk may be full
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
    """Limit the time until the body has arrived. Most bodies are small and arrive with the head."""
    connection = connection_of(request.scope)
    if connection and connection.has_whole_request():
        yield
        return
    try:
        with anyio.fail_after(settings.body_seconds):
            yield
    except TimeoutError:
        raise ApiError(f"the request did not arrive within {settings.body_seconds:g} s", 408) from None


async def stream_slices(data: bytes) -> AsyncIterator[bytes]:
    for piece in slices(data, MAX_WRITE):
        yield piece
