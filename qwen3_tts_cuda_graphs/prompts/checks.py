"""Checks of a request's numbers and texts. Each raises a ValueError whose message says what to do.

Imports quickly, as the command line and the server's front process use it, too.
"""

from collections.abc import Callable
from numbers import Integral

from qwen3_tts_cuda_graphs.prompts.notation import MAX_PAUSE

SLOWEST, FASTEST = 0.25, 4.0  # OpenAI's limits of the speed


def model_of(method: Callable):
    """The accelerated model whose method this is."""
    tts = getattr(method, "__self__", None)
    if tts is None:
        raise ValueError(f"{method} belongs to no model: give a method of a loaded one, as tts.generate_voice_clone")
    if not hasattr(tts, "prompts"):
        raise ValueError("this model is not accelerated: call accelerate(tts) first")
    return tts


# ---- Numbers


def check_counts(**values) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} is {value}, it must be a whole number of at least 1")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that torch does not take."""
    if seed is not None and not (isinstance(seed, Integral) and -(2**63) <= seed < 2**64):
        raise ValueError(f"seed is {seed!r}, it must be a whole number from -2**63 to 2**64 - 1")


def number_ranges(config: dict) -> dict[str, tuple[Callable, str]]:
    """For each number that a user may set: a test of a value, and what a good value is. config: the model's"""
    talker = config["talker_config"]
    vocab, positions = talker["vocab_size"], talker["max_position_embeddings"]
    return {
        "temperature": (lambda x: 0 < x <= 1e6, "above 0 and at most 1e6"),  # larger ones overflow float32
        "top_k": (lambda x: 1 <= x <= vocab, f"from 1 to {vocab}"),
        "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "repetition_penalty": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6, 1.0 for none"),
        "max_seq_len": (lambda x: 32 <= x <= positions, f"from 32 to {positions}"),
        "speed": (lambda x: SLOWEST <= x <= FASTEST, f"from {SLOWEST:g} to {FASTEST:g}"),
        "pause": (lambda x: 0 <= x <= MAX_PAUSE, f"from 0 to {MAX_PAUSE:g}"),
        "retry": (lambda x: 0 <= x <= 100, "from 0 to 100"),
        "seed": (lambda x: 0 <= x < 2**63, "from 0 to 2**63 - 1"),
    }


def check_number(config: dict, name: str, value: float | None) -> None:
    """Refuse a value of an option that is out of range."""
    is_good, wanted = number_ranges(config)[name]
    if value is not None and not is_good(value):
        option = "--" + name.replace("_", "-")
        raise ValueError(f"{option} is {value}, it must be {wanted}")


# ---- The text


def check_text(text: str | list[str]) -> str:
    """The text, if it can be spoken."""
    if isinstance(text, list | tuple):
        if len(text) != 1:
            raise ValueError(f"stream speaks one text at a time, not {len(text)}")
        (text,) = text
    if not isinstance(text, str):
        raise ValueError(f"the text is a {type(text).__name__}, it must be a string")
    if not text.strip():
        raise ValueError("the text is empty: give something to say")
    check_encodable(text)
    return text


def check_encodable(text: str, what: str = "the text") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a character that UTF-8 cannot encode: {text[error.start]!r}") from None


def is_arriving(text) -> bool:
    """Whether a text is an iterator of its pieces. Raises an error if it is an async one."""
    if hasattr(text, "__aiter__"):
        raise ValueError("the text is an async iterator: use astream instead of stream")
    return hasattr(text, "__iter__") and not isinstance(text, str | bytes | list | tuple | dict | set)
