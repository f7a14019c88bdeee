"""Errors as OpenAI's clients expect them, without paths or tracebacks; and the log."""

import contextlib
import json
import logging

from starlette.responses import Response

log = logging.getLogger("qwen3_tts_cuda_graphs")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    507: "server_error",
}
MAX_MESSAGE = 500  # characters


class ApiError(Exception):
    """The error response to a request: one sentence for people, a status for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = " ".join(message.split())[:MAX_MESSAGE]
        self.status = status
        self.param = param
        self.code = code

    @property
    def outcome(self) -> str:
        """Its label in the metrics."""
        if self.status == 429 or self.code == "too_many":
            return "refused"
        return "invalid" if self.status < 500 else "failed"

    def content(self) -> dict:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return Response(to_json(self.content()), self.status, headers, "application/json")


@contextlib.contextmanager
def mistakes_in(field: str, code: str | None = None):
    """Turn a ValueError into an error about this field."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), param=field, code=code) from None


def engine_failed() -> ApiError:
    return ApiError("the engine has failed and is started again: try again in a moment", 503, code="restarting")


def to_json(content: dict) -> str:
    """As ASCII, since a message may quote half of a surrogate pair, which UTF-8 cannot encode."""
    return json.dumps(content, ensure_ascii=True)


def with_remedy_for_clients(message: str) -> str:
    """The engine's messages name options of its Python interface, such as max_seq_len, which clients cannot set."""
    message = message.replace("raise max_new_tokens", "raise max_new_tokens, or give a shorter text")
    return message.replace("raise max_seq_len", "shorten input, instructions or ref_text")


def as_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """What a client is told about an exception. Unexpected ones are logged, and clients do not get their text."""
    if isinstance(error, ApiError):
        if error.status == 500:  # the worker has logged why
            log.error("request %s failed: %s", request_id, error.message)
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took too long: give a shorter text, or read the audio sooner", 503, code="timeout")
    if isinstance(error, ValueError):
        return ApiError(with_remedy_for_clients(str(error)))
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError("the server failed on this request: its log says why", 500)


def log_to_stderr() -> None:
    """Log warnings and errors with tracebacks, beside the progress that cli_errors prints."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
