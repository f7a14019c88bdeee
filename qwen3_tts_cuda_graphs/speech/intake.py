"""Requests on their way into an engine: one thread builds their prompts and takes their text; then they wait for a row.

One thread is enough: upstream's Python code takes twice as long when several run it at once. It has a CUDA stream of
its own.
"""

import asyncio
import collections
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from qwen3_tts_cuda_graphs.prompts.arriving_text import END, ArrivingText
from qwen3_tts_cuda_graphs.prompts.build import check_encodable, check_request, is_on_gpu, reference_codes, request_for
from qwen3_tts_cuda_graphs.prompts.cut import end_after_tokens
from qwen3_tts_cuda_graphs.prompts.templates import ROLE_TOKENS, tokenize
from qwen3_tts_cuda_graphs.speech.listener import Listener, State
from qwen3_tts_cuda_graphs.speech.streaming import check_seed


class Intake:
    def __init__(self, speech, changed: threading.Condition):
        """changed: the engine's condition, notified when a request is queued or has new text"""
        self.speech = speech
        self.changed = changed
        self.waiting = collections.deque()  # requests that could be admitted
        self.preparing = 0  # requests whose prompts are being built
        self.prepared = 0  # prompts that were built, or could not be
        self.why_closed = ""
        # A token takes a position, and stands for at most as many bytes as its name has characters. Those are bytes of
        # the text in Unicode's composed form (NFC); one of them comes from at most 1.5 characters as they were typed.
        self.max_characters = 2 * max(map(len, speech.tts.processor.tokenizer.get_vocab())) * speech.max_seq_len
        self.thread = ThreadPoolExecutor(1, "speech prompts", self.start)

    def start(self) -> None:
        if self.speech.on_gpu:
            # The small kernels of a prompt must not wait for those of the frames.
            torch.cuda.set_stream(torch.cuda.Stream(self.speech.device, priority=-2))

    def check_open(self) -> None:
        if self.why_closed:
            raise RuntimeError(self.why_closed)

    def submit(self, stream: Listener, method: Callable, text: str | None, seed: int | None, kwargs: dict) -> Future:
        """Have the prompt built and the request queued. `text` is None if it is still to come."""
        self.speech.turns.check_process()
        check_seed(seed)
        self.check_length(len(text or ""))
        # The caller may have made a voice on its own CUDA stream.
        inputs_ready = self.speech.runner.record_event() if is_on_gpu(kwargs.get("voice_clone_prompt")) else None
        with self.changed:
            self.check_open()
            future = self.thread.submit(self.build_prompt, stream, method, text, seed, kwargs, inputs_ready)
            self.preparing += 1
        future.add_done_callback(self.prompt_is_done)  # also if it was cancelled while it was queued
        return future

    def prompt_is_done(self, future: Future) -> None:
        with self.changed:
            self.preparing -= 1
            self.prepared += 1
            if not self.preparing:  # the engine may wait for it
                self.changed.notify_all()

    def close(self, reason: str) -> None:
        with self.changed:
            self.why_closed = self.why_closed or reason
            self.changed.notify_all()

    def check_length(self, characters: int) -> None:
        """Refuse what cannot fit before the prompt thread tokenizes it, for which all others would wait."""
        if characters > self.max_characters:
            raise ValueError(
                f"the text has {characters} characters, more than {self.max_characters} never fit into "
                f"{self.speech.max_seq_len} positions: speak it in parts"
            )

    def start_reader(self, stream: Listener, pieces: Iterable[str]) -> None:
        """A thread of its own: the iterator may take its time."""
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self.read_pieces, stream, pieces), name="text reader", daemon=True).start()

    def read_pieces(self, stream: Listener, pieces: Iterable[str]) -> None:
        last = END
        try:
            for piece in pieces:
                self.thread.submit(self.take_piece, stream, piece).result()
                if stream.has_ended or stream.text_error:
                    return
        except BaseException as error:  # raised again where the speech is read
            last = error
        with contextlib.suppress(RuntimeError, CancelledError):  # the engine has been closed
            self.thread.submit(self.take_piece, stream, last)

    async def aread_pieces(self, stream: Listener, pieces: AsyncIterable[str]) -> None:
        """The same on an event loop, without a thread for each text."""
        last = END
        try:
            async for piece in pieces:
                await asyncio.wrap_future(self.thread.submit(self.take_piece, stream, piece))
                if stream.text_error:
                    return
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            last = error
        with contextlib.suppress(RuntimeError):
            self.thread.submit(self.take_piece, stream, last)

    @torch.no_grad()
    def build_prompt(
        self,
        stream: Listener,
        method: Callable,
        text: str | None,
        seed: int | None,
        kwargs: dict,
        inputs_ready: torch.cuda.Event | None,
    ) -> None:
        if stream.has_ended:
            return
        if inputs_ready:
            inputs_ready.wait()
        if seed is not None:
            stream.generator = self.speech.seeded_generator(seed)
        if text is None:
            stream.text = ArrivingText(self.speech, method, **kwargs)
            stream.reference = stream.text.reference
        else:
            stream.reference = reference_codes(kwargs.get("voice_clone_prompt"))
            self.enqueue(stream, request_for(self.speech, method, text, kwargs))

    def enqueue(self, stream: Listener, request: dict) -> None:
        check_request(self.speech, request)
        self.speech.load(stream, request)
        with self.changed:
            self.check_open()
            stream.queued_at = time.monotonic()
            if not stream.has_ended:
                stream.state = State.WAITING
                self.waiting.append(stream)
            self.changed.notify_all()

    @torch.no_grad()
    def take_piece(self, stream: Listener, piece: str | BaseException | None) -> None:
        """The next piece of a text that is still arriving, its end, or the error of its iterator."""
        if stream.has_ended or stream.text_error:
            return
        text = stream.text
        try:
            if text.is_finished:  # without this
                return
            is_full = False
            if isinstance(piece, str):
                self.check_length(len(text.text) + len(piece))
                piece, is_full = self.what_fits(stream, piece)
            text.take(piece)
            if is_full:
                text.take(END)
            if piece or piece is END:
                stream.text_came_at = time.monotonic()
            if stream.state is State.PREPARING:
                if text.can_begin:
                    request = text.begin()
                    stream.frames_with_text = text.frames_with_text
                    self.enqueue(stream, request)
            elif embeddings := text.take_embeddings():
                with self.changed:
                    stream.new_text.append(embeddings)
                    self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                stream.text_error = error
                self.changed.notify_all()
            if stream.state is State.PREPARING:  # the engine does not know it yet
                stream.put(error)

    def what_fits(self, stream: Listener, piece: str) -> tuple[str, bool]:
        """As much of a piece as belongs to this utterance, and whether the utterance is full then."""
        check_encodable(piece)
        text = stream.text
        whole, seen = text.text + piece, len(text.text)
        settled = max(0, len(text.tokenizer.settled) - ROLE_TOKENS)
        pending = max(0, seen - len(text.tokenizer.tail))

        def count_tokens(part: str) -> int:
            return len(tokenize(self.speech.tts, part))

        language = text.kwargs.get("language")
        end = end_after_tokens(whole, seen, settled, pending, stream.max_text_tokens, count_tokens, language)
        return whole[seen:end], end is not None
