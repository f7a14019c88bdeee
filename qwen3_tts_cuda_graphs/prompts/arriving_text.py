"""A request whose text is still being written: which of its tokens are known, and which frames can be computed.

In upstream's streaming layout (`non_streaming_mode=False`) the prompt holds the first token of the text. Each frame
adds one more token, then the end token, then padding. With an in-context reference the prompt holds the reference's
codes, and beside them the tokens of the transcript and of the text. Frame k can be computed once its token is known.

`ArrivingText` has no threads and does no GPU work before `begin`. Its owner calls `add` with each piece of the text and
then with END, until `is_over`. It calls `begin` once `can_begin`. Before frame k it checks `has_text_for(k)` and hands
what `take_embeddings` returns to the runner. While it waits for text, it checks `timed_out`. The owner is the engine's
Intake, or the TextReader of a stream without an engine.
"""

import bisect
import math
import time
from collections.abc import Callable
from dataclasses import replace
from unicodedata import normalize

import torch

from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.prompts.checks import check_encodable, check_text, model_of
from qwen3_tts_cuda_graphs.prompts.clone_prompts import is_in_context, with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.cut import ANY_END, SENTENCE_END, count_bytes, split_text
from qwen3_tts_cuda_graphs.prompts.incremental_tokenizer import IncrementalTokenizer
from qwen3_tts_cuda_graphs.prompts.pieces import END
from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.prompts.templates import CLOSING_TOKENS, ROLE_TOKENS, tokenize, transcript_ids

TEXT_TIMEOUT = 60.0  # default of `text_timeout`: seconds that a stream waits for the next piece of its text

# Where text that is still arriving may be cut, once it has this share of the tokens that fit.
ARRIVING_ENDS = (0.6, SENTENCE_END), (0.9, ANY_END)
LONGEST_END = 4  # characters of an end; they may come in two pieces


class StreamTimeout(TimeoutError):
    """No new text has come, or nobody reads the audio. The message is for whoever made the request."""


class ArrivingText:
    """One text, and the request that speaks it."""

    def __init__(self, method: Callable, timeout: float = TEXT_TIMEOUT, max_tokens: float = math.inf, **kwargs):
        """method: a method of upstream's model that generates speech; kwargs: its arguments, except the text
        timeout: seconds without new text after which it has `timed_out`
        max_tokens: the text is cut before it has more tokens; what follows is not part of it

        Mistakes in the arguments raise an error here, before there is any text.
        """
        if kwargs.setdefault("non_streaming_mode", False):
            raise ValueError(
                "non_streaming_mode=True puts the whole text into the prompt: text that arrives needs False"
            )
        if not 0 < timeout < math.inf:
            raise ValueError(f"text_timeout is {timeout}, it must be above 0 and finite, in seconds")
        self.method = method
        self.tts = tts = model_of(method)
        self.kwargs = with_voice_clone_prompt(method, kwargs)
        prepare_request(method, "a", **self.kwargs)

        opening, _, _ = tts._build_assistant_text("\0").partition("\0")
        self.tokenizer = IncrementalTokenizer(tts.processor.tokenizer, opening)
        self.end_id = tts.model.config.tts_eos_token_id
        self.tokens_in_prompt = tokens_in_prompt(tts, self.kwargs.get("voice_clone_prompt"))
        self.timeout = timeout
        self.max_tokens = max_tokens
        self.came_at = time.monotonic()  # when the last piece came
        self.text = ""
        self.ids = []  # known tokens of the text; with the end token once the text is finished
        self.is_finished = False
        self.error = None  # raised by the iterator, or about a piece
        self.taken = 0  # ids that `begin` and `take_embeddings` have returned embeddings of

    def add(self, piece: str | BaseException | None) -> None:
        """Add the next piece of the text, or END. If the piece is an error of the iterator, raises it."""
        if isinstance(piece, BaseException):
            raise piece
        if piece:
            self.came_at = time.monotonic()
        if piece is END:
            self.finish()
        else:
            self.push(piece)

    def push(self, piece: str) -> None:
        if not isinstance(piece, str):
            raise ValueError(f"a piece of the text is a {type(piece).__name__}, it must be a string")
        check_encodable(piece)
        end = self.end_of_what_fits(piece)
        piece = piece[:end]
        self.text += piece
        self.tokenizer.push(piece)
        self.ids = self.tokenizer.ids[ROLE_TOKENS:]
        if end is not None:
            self.finish()

    def end_of_what_fits(self, piece: str) -> int | None:
        """How many characters of the next piece fit into this text, which ends there. None: all, and it continues."""
        seen, text = len(self.text), self.text + piece
        settled = max(0, len(self.tokenizer.settled) - ROLE_TOKENS)  # tokens that can no longer change
        for share, end in ARRIVING_ENDS:
            if settled < share * self.max_tokens:
                continue
            for found in end.finditer(text, max(0, seen - LONGEST_END)):
                if found.end() >= seen and text[: found.end()].strip():
                    return found.end() - seen
        pending = max(0, seen - len(self.tokenizer.tail))  # where the text of the other tokens begins
        rest = text[pending:]
        if not rest.strip():
            return None

        def fits(part: str) -> bool:
            return len(part) == 1 or settled + len(tokenize(self.tts, part)) <= self.max_tokens

        if settled + count_bytes(rest) <= self.max_tokens or fits(rest):
            return None
        first_part = split_text([rest], fits, self.kwargs.get("language"))[0]
        characters = len("".join(first_part.split()))  # without whitespace, which `split_text` changes
        places = [place for place, character in enumerate(rest) if not character.isspace()]
        return max(0, pending + places[characters - 1] + 1 - seen)  # never before what has been added

    def finish(self) -> None:
        """End the text. Raises an error if it is empty."""
        known = self.ids
        check_text(self.text)
        ids = tokenize(self.tts, self.tts._build_assistant_text(self.text))
        self.ids = ids[ROLE_TOKENS:-CLOSING_TOKENS] + [self.end_id]
        self.is_finished = True
        if self.ids[: len(known)] != known:
            raise RuntimeError(f"the tokens of {self.text[:40]!r}... have changed while it arrived")

    @property
    def is_over(self) -> bool:
        """Whether no more text is taken."""
        return self.is_finished or self.error is not None

    def seconds_left(self) -> float:
        """Seconds until the next piece is overdue."""
        return max(0.0, self.came_at + self.timeout - time.monotonic())

    def timed_out(self) -> StreamTimeout | None:
        """The error for an owner that waits for text, or None as long as it is not overdue."""
        if self.is_over or self.seconds_left() > 0:
            return None
        return StreamTimeout(f"no text has come for {self.timeout:g} s, and it has not ended")

    @property
    def can_begin(self) -> bool:
        """Whether there is enough text for the prompt and the first frame."""
        return self.is_finished or len(self.ids) > max(0, self.tokens_in_prompt)

    def begin(self) -> Request:
        """The request, with the embeddings of the text that is known so far."""
        prompts = self.tts.prompts
        self.taken = len(self.ids)
        if self.is_finished:
            return prompts.build(self.method, self.text, self.kwargs)
        closing = [0] * CLOSING_TOKENS  # upstream cuts them off
        request = prompts.build(self.method, self.text, self.kwargs, self.tokenizer.ids + closing)
        inputs = torch.cat([request.inputs[:-2], request.inputs[-1:]])  # without the end
        inputs = inputs.pin_memory() if prompts.on_gpu and not inputs.is_cuda else inputs
        return replace(request, inputs=inputs, frames_with_text=self.frames_with_text)

    def has_text_for(self, frame: int) -> bool:
        """After `begin`: whether the token of this frame is known."""
        return self.is_finished or frame < len(self.ids) - self.tokens_in_prompt

    @property
    def frames_with_text(self) -> float:
        """After `begin`: frames whose embeddings have been returned."""
        return math.inf if self.is_finished else self.taken - self.tokens_in_prompt

    def characters_read(self, frames: int) -> int:
        """Characters of the text that so many frames have consumed. Speech may end before the end of its text."""
        ids = self.ids[:-1] if self.is_finished else self.ids
        read = max(0, self.tokens_in_prompt + frames)
        if self.is_finished and read >= len(ids):
            return len(self.text)
        composed = len(self.tts.processor.tokenizer.decode(ids[:read]))  # characters in NFC, as the tokenizer has them
        places = range(len(self.text) + 1)
        return bisect.bisect_right(places, composed, key=lambda end: len(normalize("NFC", self.text[:end]))) - 1

    def take_embeddings(self) -> tuple[int, torch.Tensor, float] | None:
        """After `begin`: what has become known since the last call, as its first frame, its embeddings (T, H), and
        `frames_with_text`. None: no further token is known."""
        first, ids = self.taken - self.tokens_in_prompt, self.ids[self.taken :]
        if not ids:
            return None
        self.taken += len(ids)
        return first, self.tts.prompts.embed_text(ids), self.frames_with_text


def tokens_in_prompt(tts, voice_clone_prompt) -> int:
    """Tokens of the text that are in the prompt. Below 0: so many frames consume the rest of the transcript first."""
    if not is_in_context(voice_clone_prompt):
        return 1
    (item,) = voice_clone_prompt
    positions = 1 + len(item.ref_code)  # codec_bos and the codes
    return positions - len(transcript_ids(tts, item))
