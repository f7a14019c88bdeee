"""A request whose text is still being written: which of its tokens are known, and what a frame must wait for.

In upstream's streaming layout (`non_streaming_mode=False`) the prompt holds the first token of the text, each frame
adds one more, then comes an end token, then padding. With an in-context reference, its transcript and the text share
the prompt with the reference's codes. So frame k can be computed as soon as what it adds is known.

`ArrivingText` has no threads and does no GPU work before `begin`. Its owner calls `add` with each piece of text and
then with END, until it `is_over`, and `begin` once `can_begin`. Before frame k it asks `has_text_for(k)` and hands what
`take_embeddings` returns to the runner. When it waits for text, it asks whether that has `timed_out`. The engine is
such an owner; `TextReader` is the one of a stream without an engine.
"""

import bisect
import math
import time
from collections.abc import Callable
from dataclasses import replace
from unicodedata import normalize

import torch

from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.prompts.checks import (
    TEXT_TIMEOUT,
    check_encodable,
    check_text,
    check_text_timeout,
    model_of,
)
from qwen3_tts_cuda_graphs.prompts.clone_prompts import is_in_context, with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.cut import end_after_tokens
from qwen3_tts_cuda_graphs.prompts.incremental_tokenizer import IncrementalTokenizer
from qwen3_tts_cuda_graphs.prompts.pieces import END
from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.prompts.templates import CLOSING_TOKENS, ROLE_TOKENS, tokenize, transcript_ids


class StreamTimeout(TimeoutError):
    """Its text does not come, or nobody reads its audio. The message is for whoever asked for the speech."""


class ArrivingText:
    """One text, and the request that speaks it."""

    def __init__(self, method: Callable, timeout: float = TEXT_TIMEOUT, max_tokens: float = math.inf, **kwargs):
        """method: a method of upstream's model that generates speech; kwargs: its arguments but the text
        timeout: seconds without new text after which it has `timed_out`
        max_tokens: where it ends by itself: what follows is not part of it

        Mistakes in them raise an error here, before there is any text.
        """
        if kwargs.setdefault("non_streaming_mode", False):
            raise ValueError(
                "non_streaming_mode=True puts the whole text into the prompt: text that arrives needs False"
            )
        check_text_timeout(timeout)
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
        self.came_at = time.monotonic()  # when the last text came
        self.text = ""
        self.ids = []  # known tokens of the text; with the end token once the text is finished
        self.is_finished = False
        self.error = None  # what its iterator or a piece has raised
        self.taken = 0  # ids that `begin` and `take_embeddings` have handed out

    def add(self, piece: str | BaseException | None) -> None:
        """Add the next piece of the text, or END. Raises the error of its iterator, which comes in place of a piece."""
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
        """How many characters of the next piece belong to this text, which then ends. None: all, and more may come."""
        seen = len(self.text)
        settled = max(0, len(self.tokenizer.settled) - ROLE_TOKENS)
        pending = max(0, seen - len(self.tokenizer.tail))

        def count_tokens(part: str) -> int:
            return len(tokenize(self.tts, part))

        language = self.kwargs.get("language")
        end = end_after_tokens(self.text + piece, seen, settled, pending, self.max_tokens, count_tokens, language)
        return None if end is None else max(0, end - seen)  # where less fits than has come, it ends now

    def finish(self) -> None:
        """No more text. Raises an error if there was none."""
        known = self.ids
        check_text(self.text)
        ids = tokenize(self.tts, self.tts._build_assistant_text(self.text))
        self.ids = ids[ROLE_TOKENS:-CLOSING_TOKENS] + [self.end_id]
        self.is_finished = True
        if self.ids[: len(known)] != known:
            raise RuntimeError(f"the tokens of {self.text[:40]!r}... have changed while it arrived")

    @property
    def is_over(self) -> bool:
        """Whether no more of it is wanted."""
        return self.is_finished or self.error is not None

    def seconds_left(self) -> float:
        """How long the next text may take."""
        return max(0.0, self.came_at + self.timeout - time.monotonic())

    def timed_out(self) -> StreamTimeout | None:
        """The error for an owner that waits for text, once that has not come for too long."""
        if self.is_over or self.seconds_left() > 0:
            return None
        return StreamTimeout(f"no text has come for {self.timeout:g} s, and it has not ended")

    @property
    def can_begin(self) -> bool:
        """Whether there is enough text for the prompt and the first frame."""
        return self.is_finished or len(self.ids) > max(0, self.tokens_in_prompt)

    def begin(self) -> Request:
        """The request, with the embeddings of the text that is known by now."""
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
        """After `begin`: whether it is known what this frame adds."""
        return self.is_finished or frame < len(self.ids) - self.tokens_in_prompt

    @property
    def frames_with_text(self) -> float:
        """After `begin`: frames whose text has been taken."""
        return math.inf if self.is_finished else self.taken - self.tokens_in_prompt

    def characters_read(self, frames: int) -> int:
        """Characters of the text that so many frames have read. A frame reads a token, and an utterance may end before
        its frames have come to the end of the text."""
        ids = self.ids[:-1] if self.is_finished else self.ids
        read = max(0, self.tokens_in_prompt + frames)
        if self.is_finished and read >= len(ids):
            return len(self.text)
        composed = len(self.tts.processor.tokenizer.decode(ids[:read]))  # tokens are of composed characters
        places = range(len(self.text) + 1)
        return bisect.bisect_right(places, composed, key=lambda end: len(normalize("NFC", self.text[:end]))) - 1

    def take_embeddings(self) -> tuple[int, torch.Tensor, float] | None:
        """After `begin`: what has become known since the last call. Returns the first frame that it is for, what this
        frame and those after it add (T, H), and how many frames have text then."""
        first, ids = self.taken - self.tokens_in_prompt, self.ids[self.taken :]
        if not ids:  # the middle of a word
            return None
        self.taken += len(ids)
        return first, self.tts.prompts.embed_text(ids), self.frames_with_text


def tokens_in_prompt(tts, voice_clone_prompt) -> int:
    """Tokens of the text that the prompt takes. Below 0: that many frames read the rest of the transcript first."""
    if not is_in_context(voice_clone_prompt):
        return 1
    (item,) = voice_clone_prompt
    positions = 1 + len(item.ref_code)  # codec_bos and the codes
    return positions - len(transcript_ids(tts, item))
