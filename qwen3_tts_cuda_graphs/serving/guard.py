"""The middleware of all routes: checks the host, the API key and the origin of web pages, and limits memory.

Plain ASGI rather than BaseHTTPMiddleware, which would add a queue between the speech and the client.
"""

import base64
import hmac
import ipaddress
import secrets
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.page import page_response
from qwen3_tts_cuda_graphs.serving.settings import Settings
from qwen3_tts_cuda_graphs.serving.signed_addresses import PATH, is_address, is_signed

OPEN_TO_ALL = "/health", "/livez", "/docs", "/page.css", "/page.js"
LISTS = {"/v1/models", "/v1/audio/models", "/v1/audio/voices", "/v1/test"}
BROWSERS = "Mozilla/", "AppleCoreMedia/"  # the User-Agent of browsers, and of Safari's player, begins with one of them
SUBPROTOCOL = "speech"  # offered by WebSockets that send the key as a second subprotocol, "bearer." + base64url(KEY)


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings):
        self.app = app
        self.settings = settings
        self.key = settings.api_key and settings.api_key.strip().encode()  # stripped, as in `key_of`
        self.is_our_host = lru_cache(maxsize=256)(self.is_our_host)  # most requests name the same host
        self.open = 0  # requests and WebSockets in progress
        self.held = 0  # bytes that they hold in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        scope["request_id"] = secrets.token_hex(8)
        send = with_request_id(scope, send)
        try:
            self.check(scope)
        except ApiError as error:
            await self.refusal(scope, error)(scope, receive, send)
            return
        self.open += 1
        memory = scope["memory"] = RequestMemory(self, receive)
        try:
            await self.app(scope, memory.receive_http if scope["type"] == "http" else memory.receive_websocket, send)
        finally:
            self.open -= 1
            self.held -= memory.size

    def check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_TO_ALL:
            self.check_host(headers)
            if not is_signed(scope, self.settings):
                self.check_origin(scope, headers)
                self.check_key(scope, headers)
            connection = connection_of(scope)
            others = len(connection.connections) - 1 if connection else self.open
            if others >= self.settings.max_connections:
                raise ApiError(f"{others} connections are in use already: try again later", 503, code="too_many")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.settings.max_body:
            raise self.too_large()

    def check_host(self, headers: Headers) -> None:
        """Prevents DNS rebinding: a page whose host name resolves to this machine would have the server's origin."""
        host = headers.get("host", "localhost")
        if (self.settings.only_this_machine or self.settings.hosts) and not self.is_our_host(host):
            other = " or --api-key" if self.settings.only_this_machine and not self.settings.hosts else ""
            raise ApiError(
                f"the host is {host[:100]!r}, by which this server is not known: ask localhost, or start it with "
                f"--allow-host{other}",
                403,
                code="host",
            )

    def is_our_host(self, host: str) -> bool:
        """Whether a Host header names this machine, with any port: localhost, a loopback address or an allowed name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in ("localhost", *self.settings.hosts) or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def check_origin(self, scope: Scope, headers: Headers) -> None:
        """Browsers let any web page send requests to this server and open WebSockets: refuse those of other origins."""
        origin = origin_of_page(headers) if is_address(scope) else headers.get("origin")
        if origin is None or origin in self.settings.cors_origins or "*" in self.settings.cors_origins:
            return
        try:
            is_own_page = urlsplit(origin).netloc == headers.get("host")
        except ValueError:
            is_own_page = False
        if not is_own_page:
            signed = f", or ask POST {PATH}/url for an address" if is_address(scope) else ""
            raise ApiError(
                f"web pages of {origin[:100]!r} may not use this server: start it with --cors-origin, or let the "
                f"proxy in front of it keep the Host header{signed}",
                403,
                code="origin",
            )

    def check_key(self, scope: Scope, headers: Headers) -> None:
        is_list = scope["path"] in LISTS and scope.get("method") in ("GET", "HEAD")
        if self.key is None or (self.settings.open_lists and is_list):
            return
        given = key_of(headers.get("authorization", "")) or key_of_subprotocols(scope.get("subprotocols", ()))
        if not hmac.compare_digest(given, self.key):
            raise ApiError(
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", 401, code="invalid_api_key"
            )

    def refusal(self, scope: Scope, error: ApiError) -> Response:
        """A browser that requests `/` without the key gets the page with status 401: the page asks for the key."""
        is_browser = "text/html" in Headers(scope=scope).get("accept", "")
        if error.status == 401 and scope["path"] == "/" and is_browser:
            response = page_response(status=401)
        else:
            response = error.response()
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def too_large(self) -> ApiError:
        return ApiError(
            f"the request has more than {self.settings.max_body} bytes: send less", 413, code="request_too_large"
        )


class RequestMemory:
    """The memory of one request or WebSocket. That of all together is limited by max_held.

    Received data is counted as it arrives, since a body may have no Content-Length. An answer that is sent as a whole
    is counted, too.
    """

    def __init__(self, guard: Guard, receive: Receive):
        self.guard = guard
        self.receive = receive
        self.size = 0
        self.kept = 0  # bytes of earlier messages that the session of a WebSocket still uses

    async def receive_http(self) -> Message:
        message = await self.receive()
        if arrived := len(message.get("body", b"")):
            self.add(arrived)
            if self.size > self.guard.settings.max_body:
                raise self.guard.too_large()
        return message

    async def receive_websocket(self) -> Message:
        message = await self.receive()
        self.resize(self.kept + len(message.get("text") or ""))
        return message

    def keep(self, size: int) -> None:
        """size: of the earlier messages that the session of a WebSocket still uses"""
        self.kept = size
        self.resize(size)

    def add(self, size: int) -> None:
        self.resize(self.size + size)

    def resize(self, size: int) -> None:
        guard = self.guard
        if size > self.size and guard.held + size - self.size > guard.settings.max_held:
            raise ApiError("the server holds too many large requests: try again later", 503, code="too_many")
        guard.held += size - self.size
        self.size = size


def connection_of(scope: Scope):
    """The HttpConnection of a request. None if another server runs the application, as with Ray."""
    return scope.get("state", {}).get("connection")


def with_request_id(scope: Scope, send: Send) -> Send:
    """Adds X-Request-Id to every response. A response to `Expect: 100-continue` without reading the body closes the
    connection: the client may or may not send the body."""
    connection = connection_of(scope) if scope["type"] == "http" else None

    async def send_with_id(message: Message) -> None:
        if message["type"].endswith("http.response.start"):
            if connection and connection.cycle.waiting_for_100_continue:
                connection.cycle.keep_alive = False
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", scope["request_id"].encode())]
        await send(message)

    return send_with_id


def origin_of_page(headers: Headers) -> str | None:
    """The origin of the web page that loads a URL; None if it is not loaded by a page, or by our own.

    Browsers send no Origin for a tag like <audio>. A page can suppress the Referer, but not forge it. Sec-Fetch-Site is
    sent only over https and to this machine.
    """
    site = headers.get("sec-fetch-site")
    is_browser = site is not None or headers.get("user-agent", "").startswith(BROWSERS)
    if "origin" in headers or not is_browser or site in ("same-origin", "none"):
        return headers.get("origin")
    scheme, _, rest = headers.get("referer", "").partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if rest else "null"


def key_of(authorization: str) -> bytes:
    """From `Bearer KEY`, `Api-Key KEY` or, for browsers, `Basic base64(user:KEY)`."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() != "basic":
        return value.strip().encode("latin-1")  # the original bytes: Starlette decodes headers as Latin-1
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def key_of_subprotocols(offered: list[str]) -> bytes:
    """A browser cannot send an Authorization header with a WebSocket, but it can offer subprotocols."""
    value = next((name.removeprefix("bearer.") for name in offered if name.startswith("bearer.")), "")
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except ValueError:
        return b""
