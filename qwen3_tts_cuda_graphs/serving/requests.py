"""The fields of a request: those of OpenAI's speech requests, and fields of our own."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from qwen3_tts_cuda_graphs.common.formats import check_bit_rate, rate_for, read_format
from qwen3_tts_cuda_graphs.common.model_config import language_name
from qwen3_tts_cuda_graphs.prompts.checks import FASTEST, SLOWEST
from qwen3_tts_cuda_graphs.prompts.lexicon import check_entries
from qwen3_tts_cuda_graphs.prompts.script import Part
from qwen3_tts_cuda_graphs.serving.errors import ApiError

MAX_VALUES = 50_000  # per JSON body
MAX_DIGITS = 1000  # per number
MAX_UNKNOWN = 20  # unknown fields that are reported to the client
MAX_REQUEST_ENTRIES = 1000  # of the lexicon in a request
FIELD_ALIASES = {  # another server's name of a field -> our name
    "text": "input",
    "prompt": "input",
    "format": "response_format",
    "output_format": "response_format",
}

Format = Literal["wav", "pcm", "flac", "mp3", "opus", "aac", "mulaw", "alaw"]
SWITCHES = "notation", "script", "limit_speech", "timestamps"


class SpeechOptions(BaseModel):
    """Voice, sampling and format: everything except the text. These are the fields of a WebSocket's session.config."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None  # any string; the name of a served model selects it
    voice: str | None = None  # or `speaker`
    instructions: str | None = None
    language: str | None = None
    response_format: Format = "wav"  # may have another name and include a rate: see common/formats.py
    sample_rate: int | None = Field(None, validate_default=True)  # None: the model's
    bit_rate: int | None = None  # kbit/s
    speed: float = 1.0

    # How the text is read, see prompts/script.py
    notation: bool = True  # False: tags in brackets are ordinary text
    script: bool = False  # True: a play, whose lines begin with the name of a voice
    lexicon: dict[str, str] | None = None  # word -> how to pronounce it
    limit_speech: bool = False  # stop an utterance that does not end

    # Cloning within the request
    ref_audio: str | None = None  # base64 or a data URL
    ref_text: str | None = None
    x_vector_only_mode: bool | None = None
    speaker_embedding: list[float] | None = None

    # Upstream's arguments. None stands for the model's own default.
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    non_streaming_mode: bool | None = None

    _unknown: tuple[str, ...] = ()  # names of other fields that were sent

    @property
    def unknown(self) -> tuple[str, ...]:
        return self._unknown

    @property
    def has_reference(self) -> bool:
        """Whether the request contains a voice to clone."""
        return self.ref_audio is not None or self.speaker_embedding is not None

    def for_part(self, part: Part) -> "SpeechOptions":
        """These options with the voice and the style of a part of a script."""
        changes = {}
        if part.voice is not None:
            changes = dict.fromkeys(("ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding"))
            changes["voice"] = part.voice
        if part.style is not None:
            changes["instructions"] = part.style
        return self.model_copy(update=changes) if changes else self

    @model_validator(mode="before")
    @classmethod
    def speaker_is_voice(cls, content: dict) -> dict:
        has_voice = content.get("voice") not in (None, "")
        return content if has_voice else content | {"voice": content.get("speaker")}

    @model_validator(mode="before")
    @classmethod
    def numbers_in_the_format(cls, content: dict) -> dict:
        """mp3_44100_128 means mp3, 44100 Hz and 128 kbit/s."""
        name = content.get("response_format")
        if not isinstance(name, str):
            return content
        kind, *numbers = read_format(name)
        for field, number in zip(("sample_rate", "bit_rate"), numbers):
            given = content.get(field)
            if number is None:
                continue
            if given is not None and given != number:
                raise ValueError(f"response_format is {name[:40]} and {field} {describe(given)}: leave out one of them")
            content = content | {field: number}
        return content | {"response_format": kind}

    @field_validator("voice", mode="before")
    @classmethod
    def id_of_voice(cls, value: Any) -> Any:
        """OpenAI's clients may send {"id": name}."""
        return value["id"] if isinstance(value, dict) and "id" in value else value

    @field_validator("language")
    @classmethod
    def name_of_language(cls, value: str | None) -> str | None:
        return value and language_name(value.strip())

    @field_validator("response_format", "speed", "stream_format", *SWITCHES, mode="before", check_fields=False)
    @classmethod
    def default_for_null(cls, value: Any, info: ValidationInfo) -> Any:
        """null and an empty string mean the default, and upper case is accepted."""
        value = value.strip().lower() if isinstance(value, str) else value
        return cls.model_fields[info.field_name].default if value in (None, "") else value

    @field_validator("lexicon")
    @classmethod
    def possible_lexicon(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return value and check_entries(value, MAX_REQUEST_ENTRIES)

    @field_validator("sample_rate")
    @classmethod
    def possible_rate(cls, value: int | None, info: ValidationInfo) -> int | None:
        return rate_for(info.data.get("response_format"), value)

    @field_validator("bit_rate")
    @classmethod
    def possible_bit_rate(cls, value: int | None, info: ValidationInfo) -> int | None:
        return check_bit_rate(info.data.get("response_format"), value)

    @field_validator("speed")
    @classmethod
    def possible_speed(cls, value: float) -> float:
        if not SLOWEST <= value <= FASTEST:
            raise ValueError(f"speed is {value:g}, it must be from {SLOWEST:g} to {FASTEST:g}")
        return value


class SpeechRequest(SpeechOptions):
    """The body of POST /v1/audio/speech."""

    input: str
    response_format: Format = "mp3"  # OpenAI's default, which some programs rely on
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    timestamps: bool = False  # True: the response is JSON with the audio and the times of its parts


Fields = TypeVar("Fields", bound=BaseModel)


def parse_json(data: bytes | str) -> dict:
    """Parse a JSON object, without NaN and Infinity. The number of values is limited, as parsing many takes long."""
    separators = (b"[", b"{", b",") if isinstance(data, bytes) else ("[", "{", ",")
    if sum(map(data.count, separators)) > MAX_VALUES:
        raise ApiError(f"the request has more than {MAX_VALUES} values: send less", code="invalid_json")
    try:
        content = json.loads(data, parse_constant=refuse_constant, parse_int=read_integer)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the request is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(f"the request is {describe(content)}, it must be a JSON object", code="invalid_json")
    return content


def refuse_constant(name: str):
    raise ValueError(f"{name} is not a number of JSON")


def read_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def read_constant(text: str) -> Any:
    """The value of a URL parameter: parsed if it is JSON, None if it is empty, else the text itself."""
    try:
        return json.loads(text or "null", parse_constant=str, parse_int=read_integer)
    except (ValueError, RecursionError):
        return text


def parse(kind: type[Fields], content: dict) -> Fields:
    unknown = unknown_fields(kind, content)
    try:
        parsed = kind.model_validate(content)
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_context=False)[0], unknown) from None
    parsed._unknown = unknown
    return parsed


def unknown_fields(kind: type[Fields], content: dict) -> tuple[str, ...]:
    """Unknown fields with a value, escaped for a header, each with a known field that may be meant."""
    known = {*kind.model_fields, "speaker"} | ({"type"} if kind is SpeechOptions else set())  # `type`: session.config
    names = [name for name, value in content.items() if name not in known and value is not None]
    named = [re.sub(r"[^\w.-]", "?", name[:40], flags=re.ASCII) + hint(name, known) for name in names[:MAX_UNKNOWN]]
    if content.get("voice") and content.get("speaker"):
        named.append("speaker")
    if len(names) > MAX_UNKNOWN:
        named.append(f"{len(names) - MAX_UNKNOWN} more")
    return tuple(named)


def hint(name: str, known: Iterable[str]) -> str:
    name = name[:40].lower()
    alias = FIELD_ALIASES.get(name)
    meant = [alias] if alias in known else difflib.get_close_matches(name, known, 1, 0.7)
    return f" (did you mean {meant[0]}?)" if meant else ""


def explain(problem: dict, unknown: Iterable[str]) -> ApiError:
    """One sentence about an error of pydantic. unknown: fields, one of which may be a missing field's other name"""
    param = str(problem["loc"][0]) if problem["loc"] else None
    message = problem["msg"]
    if problem["type"] == "missing":
        message = f"{param} is missing: give it"
        if unknown:
            message += f"; these fields are unknown: {', '.join(unknown)}"
    elif problem["type"] == "value_error":
        message = message.removeprefix("Value error, ")
    else:
        wanted = message.replace("Input should be", "it must be")
        message = f"{param} is {describe(problem['input'])}: {wanted[0].lower()}{wanted[1:]}"
    return ApiError(message, param=param, code="invalid_value")


def describe(value: Any) -> str:
    """A value in an error message, shortened."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
