"""A request whose text is still being written: which of its tokens are known, and what a frame must wait for.

In upstream's streaming layout (`non_streaming_mode=False`) the prompt holds the first token of the text, each frame
adds one more, then comes an end token, then padding. With an in-context reference, its transcript and the text share
the prompt with the reference's codes. So frame k can be computed as soon as what it adds is known.

`ArrivingText` has no threads and does no GPU work before `begin`. Its owner calls `take` with each piece of text and
then with END, and `begin` once `can_begin`. Before frame k it asks `has_text_for(k)` and hands what `take_embeddings`
returns to the runner. When it waits for text, it asks whether that has `timed_out`. The engine is such an owner;
`TextReader` is the one of a stream without an engine.

`start_reader` and `aread_pieces` read an iterator of strings for either of them.
"""

import asyncio
import bisect
import contextvars
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Future
from unicodedata import normalize

import torch

from qwen3_tts_cuda_graphs.prompts.build import (
    check_encodable,
    check_text,
    prepare_request,
    request_for,
    to_device,
    with_voice_clone_prompt,
)
from qwen3_tts_cuda_graphs.prompts.incremental_tokenizer import IncrementalTokenizer
from qwen3_tts_cuda_graphs.prompts.templates import CLOSING_TOKENS, ROLE_TOKENS, is_in_context, tokenize, transcript_ids

END = None
MAX_PIECES_AHEAD = 256  # that an iterator has given and a stream has not taken

Push = Callable[[str | BaseException | None], Future]  # a piece, END or an error -> whether another one is wanted


class StreamTimeout(TimeoutError):
    """Its text does not come, or nobody reads its audio. The message is for whoever asked for the speech."""


class ArrivingText:
    """One text, and the request that speaks it."""

    def __init__(self, speech, method: Callable, timeout: float = 60.0, **kwargs):
        """method: a method of upstream's model that generates speech; kwargs: its arguments but the text
        timeout: seconds without new text after which it has `timed_out`

        Mistakes in them raise an error here, before there is any text.
        """
        if kwargs.setdefault("non_streaming_mode", False):
            raise ValueError(
                "non_streaming_mode=True puts the whole text into the prompt: text that arrives needs False"
            )
        self.speech = speech
        self.method = method
        self.kwargs = with_voice_clone_prompt(method, kwargs)
        _, self.reference = prepare_request(speech, method, "a", **self.kwargs)

        tts = method.__self__
        opening, _, _ = tts._build_assistant_text("\0").partition("\0")
        self.tokenizer = IncrementalTokenizer(tts.processor.tokenizer, opening)
        self.end_id = tts.model.config.tts_eos_token_id
        self.tokens_in_prompt = tokens_in_prompt(tts, self.kwargs.get("voice_clone_prompt"))
        self.tokens_to_begin = tokens_to_begin(tts, self.kwargs.get("voice_clone_prompt"))
        self.timeout = timeout
        self.came_at = time.monotonic()  # the last text
        self.text = ""
        self.ids = []  # known tokens of the text; with the end token once the text is finished
        self.is_finished = False
        self.taken = 0  # ids that are in the request or have been taken
        self.embedded = 0  # frames whose text has been embedded

    def take(self, piece: str | BaseException | None) -> None:
        """The next piece of the text, its end, or the error of its iterator, which is raised."""
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
        self.text += piece
        self.tokenizer.push(piece)
        self.ids = self.tokenizer.ids[ROLE_TOKENS:]

    def finish(self) -> None:
        """No more text. Raises an error if there was none."""
        known = self.ids
        tts = self.method.__self__
        check_text(self.text)
        ids = tokenize(tts, tts._build_assistant_text(self.text))
        self.ids = ids[ROLE_TOKENS:-CLOSING_TOKENS] + [self.end_id]
        self.is_finished = True
        if self.ids[: len(known)] != known:
            raise RuntimeError(f"the tokens of {self.text[:40]!r}... have changed while it arrived")

    def seconds_left(self) -> float:
        """How long the next text may take."""
        return max(0.0, self.came_at + self.timeout - time.monotonic())

    def timed_out(self) -> StreamTimeout | None:
        """The error for an owner that waits for text, once that has not come for too long."""
        if self.is_finished or self.seconds_left() > 0:
            return None
        return StreamTimeout(f"no text has come for {self.timeout:g} s, and it has not ended")

    @property
    def can_begin(self) -> bool:
        """Whether there is enough text for the prompt and the first frame."""
        return self.is_finished or len(self.ids) >= self.tokens_to_begin

    def begin(self) -> dict:
        """What `request_for` returns, with the text rows that are known by now."""
        self.taken = len(self.ids)
        if self.is_finished:
            return request_for(self.speech, self.method, self.text, self.kwargs)
        closing = [0] * CLOSING_TOKENS  # upstream cuts them off
        token_ids = self.tokenizer.ids + closing
        request = request_for(self.speech, self.method, self.text, self.kwargs, token_ids)
        inputs = torch.cat([request["inputs"][:-2], request["inputs"][-1:]])  # without the end
        self.embedded = len(inputs) - 2
        return request | {"inputs": inputs.pin_memory() if self.speech.on_gpu and not inputs.is_cuda else inputs}

    def has_text_for(self, frame: int) -> bool:
        """After `begin`: whether it is known what this frame adds."""
        return self.is_finished or frame < self.embedded + len(self.ids) - self.taken

    @property
    def frames_with_text(self) -> float:
        """After `begin`: frames whose text has been taken."""
        return math.inf if self.is_finished else self.embedded

    def characters_read(self, frames: int) -> int:
        """Of the text: a speech may end before its frames, which read a token each, have come to the text's end."""
        ids = self.ids[:-1] if self.is_finished else self.ids
        read = max(0, self.tokens_in_prompt + frames)
        if self.is_finished and read >= len(ids):
            return len(self.text)
        composed = len(self.method.__self__.processor.tokenizer.decode(ids[:read]))  # tokens are of composed characters
        places = range(len(self.text) + 1)
        return bisect.bisect_right(places, composed, key=lambda end: len(normalize("NFC", self.text[:end]))) - 1

    def take_embeddings(self) -> tuple | None:
        """After `begin`: the text that has become known since the last call, for `Utterance.new_text`."""
        first, ids = self.embedded, self.ids[self.taken :]
        if not ids:  # the middle of a word
            return None
        self.taken += len(ids)
        self.embedded += len(ids)
        return first, embed_text(self.speech, ids), self.frames_with_text, self.speech.runner.record_event()


def tokens_to_begin(tts, voice_clone_prompt) -> int:
    """Tokens of the text that the prompt and the first frame take."""
    return max(1, tokens_in_prompt(tts, voice_clone_prompt) + 1)


def tokens_in_prompt(tts, voice_clone_prompt) -> int:
    """Tokens of the text that the prompt takes. Below 0: so many frames go on with the reference's transcript first."""
    if not is_in_context(voice_clone_prompt):
        return 1
    (item,) = voice_clone_prompt
    positions = 1 + len(item.ref_code)  # codec_bos and the codes
    return positions - len(transcript_ids(tts, item))


@torch.no_grad()
def embed_text(speech, ids: list[int]) -> torch.Tensor:
    """What frames add for these tokens. -> (T, H)"""
    talker = speech.host_talker or speech.talker
    rows = talker.text_projection(
        talker.get_text_embeddings()(torch.tensor(ids, dtype=torch.long, device=talker.device))
    )
    return to_device(rows, speech.talker.device)


# ---- Reading it from an iterator


def start_reader(pieces: Iterable[str], push: Push) -> None:
    """A thread of its own: the iterator may take its time, and is given up if it never returns."""
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(read_pieces, pieces, push), name="text reader", daemon=True).start()


def read_pieces(pieces: Iterable[str], push: Push) -> None:
    """Push each piece, then END or the error of the iterator."""
    last = END
    try:
        for piece in pieces:
            if not push(piece).result():
                return
    except BaseException as error:  # raised again where the speech is read
        last = error
    push(last)


async def aread_pieces(pieces: AsyncIterable[str], push: Push) -> None:
    """The same on an event loop, without a thread for each text."""
    last = END
    try:
        async for piece in pieces:
            if not await asyncio.wrap_future(push(piece)):
                return
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        last = error
    push(last)


def done_future(result: bool) -> Future:
    future = Future()
    future.set_result(result)
    return future


class Pieces:
    """Between who reads a text, in any thread, and the thread that speaks it. The reader may be ahead."""

    def __init__(self):
        self.queue = queue.SimpleQueue()  # of pieces, each with a Future that is done when it is taken
        self.ahead = deque()  # the Futures
        self.is_closed = False

    def push(self, piece: str | BaseException | None) -> Future:
        """Becomes True when there is room for another one, False when no more is wanted."""
        taken = Future()
        taken.set_running_or_notify_cancel()  # whoever stops waiting for it must not cancel it
        self.ahead.append(taken)
        self.queue.put((piece, taken))
        return self.ahead.popleft() if len(self.ahead) > MAX_PIECES_AHEAD else done_future(not self.is_closed)

    def get(self, timeout: float | None = None) -> str | BaseException | None:
        piece, taken = self.queue.get(timeout=timeout)
        taken.set_result(not self.is_closed)
        return piece

    def close(self) -> None:
        self.is_closed = True
        while not self.queue.empty():
            self.get()


class TextReader:
    """Takes pieces into an ArrivingText, in the thread that speaks it."""

    def __init__(self, text: ArrivingText, pieces: Pieces):
        self.text = text
        self.pieces = pieces
        self.error = None

    def is_ready(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition holds with the text that has come."""
        while not condition() and not self.error and not self.pieces.queue.empty():
            self.take(self.pieces.get())
        return condition()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for text. Raises the error of the iterator, or of its text, once all text before it is used up."""
        self.text.came_at = time.monotonic()  # it may have come long ago, with enough to say
        while not condition():
            if self.error:
                raise self.error
            try:
                self.take(self.pieces.get(timeout=self.text.seconds_left()))
            except queue.Empty:
                if error := self.text.timed_out():
                    raise error from None

    def take(self, piece: str | BaseException | None) -> None:
        try:
            self.text.take(piece)
        except BaseException as error:
            self.error = error
