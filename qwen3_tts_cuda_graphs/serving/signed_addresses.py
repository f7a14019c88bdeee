"""Speech by URL, for clients that take nothing else: `<audio src>`, smart speakers, Twilio's `<Play>`.

The fields of the request are the parameters of a GET. A server with an API key requires the key or a signature, which
it gives to those who have the key. The signature covers all parameters and a time of expiry, so that a URL speaks one
text in one voice for a limited time. Messages and the documentation call such a URL an address.
"""

import hashlib
import hmac
import json
import secrets
import time
from typing import get_args
from urllib.parse import parse_qsl, urlencode

from pydantic import field_validator
from starlette.types import Scope

from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.requests import SpeechRequest, read_constant
from qwen3_tts_cuda_graphs.serving.settings import Settings

PATH = "/v1/audio/speech"
TOO_LARGE = "ref_audio", "speaker_embedding"  # fields that are refused in an address
MAX_ADDRESS = 60_000  # characters: the head of a request may have 64 KB
MAX_PARAMETERS = 100
MAX_SECONDS = 3600
JSON_TYPES = {int, float, bool, dict[str, str]}  # parameters of these types are parsed as JSON
RANDOM_KEY = secrets.token_bytes(32)  # for a server without --api-key

Parameters = list[tuple[str, str]]


class AddressRequest(SpeechRequest):
    """The body of POST /v1/audio/speech/url."""

    expires_in: int = 300  # seconds

    @field_validator("expires_in")
    @classmethod
    def possible_time(cls, value: int) -> int:
        if not 1 <= value <= MAX_SECONDS:
            raise ValueError(f"expires_in is {value}, it must be from 1 to {MAX_SECONDS} s")
        return value


def signed_address(wanted: AddressRequest, settings: Settings) -> dict:
    check_fields(wanted.model_dump(exclude_none=True))
    fields = wanted.model_dump(exclude_defaults=True, exclude={"expires_in"})
    expires = int(time.time()) + wanted.expires_in
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    parameters = [*texts.items(), ("expires", str(expires))]
    query = urlencode([*parameters, ("signature", signature(parameters, settings))])
    if len(query) > MAX_ADDRESS:
        problem = f"the address has {len(query)} characters, at most {MAX_ADDRESS} are possible: POST {PATH} instead"
        raise ApiError(problem, param="input", code="too_long")
    return {"url": f"{PATH}?{query}", "expires_at": expires}


def signature(parameters: Parameters, settings: Settings) -> str:
    """The signature of these parameters, in any order."""
    secret = settings.api_key.strip().encode() if settings.api_key else RANDOM_KEY
    key = hmac.digest(secret, b"signature of an address of speech", "sha256")  # signatures are public, the key is not
    message = urlencode(sorted(parameters), errors="surrogateescape").encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def is_address(scope: Scope) -> bool:
    """Whether this is a request for speech by GET."""
    return scope["path"] == PATH and scope.get("method") in ("GET", "HEAD")


def is_signed(scope: Scope, settings: Settings) -> bool:
    """Whether the request has a valid signature. A wrong or expired one is an error, even with the key."""
    if not is_address(scope):
        return False
    parameters = read_parameters(scope)
    given = [value for name, value in parameters if name == "signature"]
    if not given:
        return False
    rest = [(name, value) for name, value in parameters if name != "signature"]
    if not hmac.compare_digest(given[0].encode(errors="replace"), signature(rest, settings).encode()):
        problem = f"the signature is not one of this address: ask POST {PATH}/url for another one"
        raise ApiError(problem, 403, code="invalid_signature")
    if int(dict(rest)["expires"]) < time.time():
        raise ApiError(f"the address has expired: ask POST {PATH}/url for another one", 403, code="expired")
    return True


def read_parameters(scope: Scope) -> Parameters:
    query = scope["query_string"].decode(errors="surrogateescape")  # invalid UTF-8 is refused when its field is checked
    try:
        return parse_qsl(query, True, errors="surrogateescape", max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise ApiError(f"the address has more than {MAX_PARAMETERS} parameters: give fewer") from None


def read_address(scope: Scope) -> dict:
    """The fields of the request, as in the JSON of a POST."""
    parameters = [(name, text) for name, text in read_parameters(scope) if name not in ("expires", "signature")]
    fields = {name: read_value(name, text) for name, text in parameters}
    if len(fields) < len(parameters):
        names = [name for name, _ in parameters]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(f"{twice[:40]} is given twice: give it once", param=twice[:40], code="invalid_value")
    check_fields(fields)
    return fields


def check_fields(fields: dict) -> None:
    for name in TOO_LARGE:
        if name in fields:
            raise ApiError(f"{name} is too large for an address: POST {PATH}, or register a voice", param=name)


def read_value(name: str, text: str):
    """Numbers, booleans and objects are JSON. Invalid ones stay text, which the check of the field refuses."""
    field = SpeechRequest.model_fields.get(name)
    if field and not JSON_TYPES.isdisjoint([field.annotation, *get_args(field.annotation)]):
        return read_constant(text)
    return text
