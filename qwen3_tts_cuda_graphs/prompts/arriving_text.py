"""A request whose text is still being written: which of its tokens are known, and what a frame must wait for.

In upstream's streaming layout (`non_streaming_mode=False`) the prompt holds the first token of the text, each frame
adds one more, then comes an end token, then padding. With an in-context reference, its transcript and the text share
the prompt with the reference's codes. So frame k can be computed as soon as what it adds is known.

`ArrivingText` has no threads and does no GPU work before `begin`. Its owner calls `take` with each piece of text and
then with END, and `begin` once `can_begin`. Before frame k it asks `has_text_for(k)` and hands what `take_embeddings`
returns to the runner. `TextReader` is such an owner, for an iterator of strings.
"""

import bisect
import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
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


class ArrivingText:
    """One text, and the request that speaks it."""

    def __init__(self, speech, method: Callable, **kwargs):
        """method: a method of upstream's model that generates speech; kwargs: its arguments but the text

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
        self.text = ""
        self.ids = []  # known tokens of the text; with the end token once the text is finished
        self.is_finished = False
        self.taken = 0  # ids that are in the request or have been taken
        self.embedded = 0  # frames whose text has been embedded

    def take(self, piece: str | BaseException | None) -> None:
        """The next piece of the text, its end, or the error of its iterator, which is raised."""
        if isinstance(piece, BaseException):
            raise piece
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


class TextReader:
    """Reads an iterator of strings into an ArrivingText.

    The iterator runs in a thread of its own, so that it can be late while speech goes on, and given up if it never
    returns. Everything else happens in the caller's thread.
    """

    def __init__(self, text: ArrivingText, pieces: Iterable[str], timeout: float):
        self.text = text
        self.pieces = pieces
        self.timeout = timeout
        self.queue = queue.Queue(maxsize=256)
        self.error = None
        self.is_closed = False

    def start(self) -> None:
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=[self.read], name="text reader", daemon=True).start()

    def read(self) -> None:
        last = END
        try:
            for piece in self.pieces:
                self.queue.put(piece)
                if self.is_closed:
                    return
        except BaseException as error:  # raised again where the speech is read
            last = error
        self.queue.put(last)

    def is_ready(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition holds with the text that has come."""
        while not condition() and not self.error and not self.queue.empty():
            self.take(self.queue.get())
        return condition()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for text. Raises the error of the iterator, or of its text, once all text before it is used up."""
        deadline = time.monotonic() + self.timeout
        while not condition():
            if self.error:
                raise self.error
            try:
                piece = self.queue.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no text has come for {self.timeout:g} s, and it has not ended") from None
            self.take(piece)
            if piece:
                deadline = time.monotonic() + self.timeout

    def take(self, piece: str | BaseException | None) -> None:
        try:
            self.text.take(piece)
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        """Let the thread end after the piece that it waits for."""
        self.is_closed = True
        while not self.queue.empty():
            self.queue.get()
