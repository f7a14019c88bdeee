"""Requests on their way into an engine: one thread builds their prompts and takes their text; then they wait for a row.

One thread is enough: upstream's Python code takes twice as long when several run it at once. It has a CUDA stream of
its own.
"""

import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.prompts.checks import check_encodable, check_seed
from qwen3_tts_cuda_graphs.prompts.clone_prompts import is_on_gpu
from qwen3_tts_cuda_graphs.prompts.cut import end_after_tokens
from qwen3_tts_cuda_graphs.prompts.pieces import END, done_future
from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.prompts.templates import ROLE_TOKENS, tokenize
from qwen3_tts_cuda_graphs.speech.listener import Listener, State


class Intake:
    def __init__(self, speech, changed: threading.Condition):
        """changed: the engine's condition, notified when a request is queued or has new text"""
        self.speech = speech
        self.prompts = speech.tts.prompts
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

    def submit(self, listener: Listener, method: Callable, text: str | None, seed: int | None, kwargs: dict) -> Future:
        """Have the prompt built and the request queued. `text` is None if it is still to come."""
        self.speech.turns.check_process()
        check_seed(seed)
        self.check_length(len(text or ""))
        # The caller may have made a voice on its own CUDA stream.
        inputs_ready = self.speech.runner.record_event() if is_on_gpu(kwargs.get("voice_clone_prompt")) else None
        with self.changed:
            self.check_open()
            future = self.thread.submit(self.build_prompt, listener, method, text, seed, kwargs, inputs_ready)
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

    def push(self, listener: Listener, piece: str | BaseException | None) -> Future:
        try:
            return self.thread.submit(self.take_piece, listener, piece)
        except RuntimeError:  # the engine has been closed
            return done_future(False)

    @torch.no_grad()
    def build_prompt(
        self,
        listener: Listener,
        method: Callable,
        text: str | None,
        seed: int | None,
        kwargs: dict,
        inputs_ready: torch.cuda.Event | None,
    ) -> None:
        if listener.has_ended:
            return
        try:
            self.check_open()
            if inputs_ready:
                inputs_ready.wait()
            if seed is not None:
                listener.generator = self.speech.seeded_generator(seed)
            if text is None:
                listener.text = ArrivingText(method, listener.text_timeout, **kwargs)
            else:
                self.enqueue(listener, self.prompts.build(method, text, kwargs))
        except BaseException as error:
            listener.end(error)
            raise

    def enqueue(self, listener: Listener, request: Request) -> None:
        self.prompts.check(request)
        self.speech.load(listener, request)
        with self.changed:
            self.check_open()
            listener.queued_at = time.monotonic()
            if not listener.has_ended:
                listener.state = State.WAITING
                self.waiting.append(listener)
            self.changed.notify_all()

    @torch.no_grad()
    def take_piece(self, listener: Listener, piece: str | BaseException | None) -> bool:
        """Add the next piece of a text that is still arriving, its end, or the error of its iterator. Returns whether
        more is wanted."""
        text = listener.text
        if listener.has_ended or listener.text_error or self.why_closed or text.is_finished:
            return False
        try:
            is_full = False
            if isinstance(piece, str):
                self.check_length(len(text.text) + len(piece))
                piece, is_full = self.what_fits(listener, piece)
            text.take(piece)
            if is_full:
                text.take(END)
            if listener.state is State.PREPARING:
                if text.can_begin:
                    request = text.begin()
                    listener.frames_with_text = text.frames_with_text
                    self.enqueue(listener, request)
            elif embeddings := text.take_embeddings():
                ready = self.speech.runner.record_event()
                with self.changed:
                    listener.new_text.append((*embeddings, ready))
                    self.changed.notify_all()
        except BaseException as error:
            self.fail_text(listener, error)
        return not (listener.text_error or text.is_finished)

    def fail_text(self, listener: Listener, error: BaseException) -> None:
        """Let what has come before be spoken, then give the listener the error."""
        with self.changed:
            listener.text_error = error
            has_begun = listener.state is not State.PREPARING  # the engine's thread knows it
            self.changed.notify_all()
        if not has_begun:
            listener.end(error)

    def what_fits(self, listener: Listener, piece: str) -> tuple[str, bool]:
        """Returns as much of a piece as belongs to this utterance, and whether the utterance is full then."""
        check_encodable(piece)
        text = listener.text
        whole, seen = text.text + piece, len(text.text)
        settled = max(0, len(text.tokenizer.settled) - ROLE_TOKENS)
        pending = max(0, seen - len(text.tokenizer.tail))

        def count_tokens(part: str) -> int:
            return len(tokenize(self.speech.tts, part))

        language = text.kwargs.get("language")
        end = end_after_tokens(whole, seen, settled, pending, listener.max_text_tokens, count_tokens, language)
        return whole[seen:end], end is not None
