"""Requests on their way into an engine: one thread builds their prompts and takes their text; then they wait for a row.

One thread is enough: upstream's Python code takes twice as long when several run it at once. It has a CUDA stream of
its own. Tokenizing is a large part of that work: texts that wait for this thread are tokenized together.
"""

import collections
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.prompts.checks import check_seed
from qwen3_tts_cuda_graphs.prompts.clone_prompts import is_on_gpu
from qwen3_tts_cuda_graphs.prompts.pieces import done_future
from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.speech.listener import Listener, QueueFull
from qwen3_tts_cuda_graphs.speech.utterance import NewText

LONGEST_TOGETHER = 2000  # characters of a text: shorter ones do not wait for longer ones that came after them


class Intake:
    def __init__(self, engine):
        self.engine = engine
        self.speech = speech = engine.speech
        self.prompts = speech.tts.prompts
        self.changed = engine.changed  # notified when a request is queued or has new text
        self.texts = {}  # Listener -> text to be tokenized together with others
        self.waiting = collections.deque()  # requests that could be admitted
        self.preparing = 0  # requests whose prompts are being built
        self.prepared = 0  # prompts that were built, or could not be
        # A token takes a position, and stands for at most as many bytes as its name has characters. Those are bytes of
        # the text in Unicode's composed form (NFC); one of them comes from at most 1.5 characters as they were typed.
        self.max_characters = 2 * max(map(len, speech.tts.processor.tokenizer.get_vocab())) * engine.runner.max_seq_len
        self.thread = ThreadPoolExecutor(1, "speech prompts", self.start)

    def start(self) -> None:
        if self.speech.on_gpu:
            # The small kernels of a prompt must not wait for those of the frames.
            torch.cuda.set_stream(torch.cuda.Stream(self.speech.device, priority=-2))

    def submit(self, listener: Listener, method: Callable, text: str | None, seed: int | None, kwargs: dict) -> Future:
        """Have the prompt built and the request queued. `text` is None if it is still to come."""
        self.speech.turns.check_process()
        check_seed(seed)
        self.check_length(len(text or ""))
        # The caller may have made a voice on its own CUDA stream.
        inputs_ready = self.speech.runner.record_event() if is_on_gpu(kwargs.get("voice_clone_prompt")) else None
        with self.changed:
            self.engine.check_running()
            free = self.engine.runner.row_count - len(self.engine.active)
            waiting = len(self.waiting) + self.preparing - free
            if waiting >= self.engine.max_waiting:
                raise QueueFull(f"{waiting} requests are waiting already: try again later")
            if text and len(text) <= LONGEST_TOGETHER:
                self.texts[listener] = text
            future = self.thread.submit(self.build_prompt, listener, method, text, seed, kwargs, inputs_ready)
            self.preparing += 1
            self.engine.listeners.add(listener)
        # Also if it was cancelled while it was queued.
        future.add_done_callback(functools.partial(self.prompt_is_done, listener))
        if text is None:
            future.add_done_callback(self.engine.wake_delivery)
        return future

    def prompt_is_done(self, listener: Listener, future: Future) -> None:
        with self.changed:
            self.texts.pop(listener, None)
            self.preparing -= 1
            self.prepared += 1
            if not self.preparing:  # the engine may wait for it
                self.changed.notify_all()

    def check_length(self, characters: int) -> None:
        """Refuse what cannot fit before the prompt thread tokenizes it, for which all others would wait."""
        if characters > self.max_characters:
            raise ValueError(
                f"the text has {characters} characters, more than {self.max_characters} never fit into "
                f"{self.engine.runner.max_seq_len} positions: speak it in parts"
            )

    def push(self, listener: Listener, piece: str | BaseException | None) -> Future:
        try:
            return self.thread.submit(self.add_piece, listener, piece)
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
        if listener.is_closed:
            return
        try:
            self.engine.check_running()
            if inputs_ready:
                inputs_ready.wait()
            if seed is not None:
                listener.generator = self.speech.seeded_generator(seed)
            if text is None:
                listener.arriving = ArrivingText(method, listener.text_timeout, listener.max_text_tokens, **kwargs)
            else:
                if listener in self.texts:
                    self.tokenize_waiting()
                self.enqueue(listener, self.prompts.build(method, text, kwargs, listener.token_ids))
        except BaseException as error:
            listener.close(error)
            raise

    def tokenize_waiting(self) -> None:
        with self.changed:
            texts, self.texts = self.texts, {}
        if len(texts) > 1:  # a single one is tokenized where its prompt is built
            for listener, ids in zip(texts, self.prompts.tokenize_together(texts.values())):
                listener.token_ids = ids

    def enqueue(self, listener: Listener, request: Request) -> None:
        self.prompts.check(request)
        listener.load(request, self.engine.runner)
        with self.changed:
            self.engine.check_running()
            listener.queued_at = time.monotonic()
            if not listener.is_closed:
                self.waiting.append(listener)
            self.changed.notify_all()

    @torch.no_grad()
    def add_piece(self, listener: Listener, piece: str | BaseException | None) -> bool:
        """Add the next piece of a text that is still arriving, its end, or the error of its iterator. Returns whether
        more is wanted."""
        arriving = listener.arriving
        if listener.is_closed or arriving.is_over or not self.engine.is_running:
            return False
        try:
            if isinstance(piece, str):
                self.check_length(len(arriving.text) + len(piece))
            arriving.add(piece)
            if listener.queued_at is None:
                if arriving.can_begin:
                    self.enqueue(listener, arriving.begin())
            elif new := arriving.take_embeddings():
                new = NewText(*new, self.speech.runner.record_event())
                with self.changed:
                    listener.new_text.append(new)
                    self.changed.notify_all()
        except BaseException as error:
            self.fail_text(listener, error)
        return not arriving.is_over

    def fail_text(self, listener: Listener, error: BaseException) -> None:
        """Let what has come before be spoken, then give the listener the error."""
        with self.changed:
            listener.arriving.error = error
            has_begun = listener.queued_at is not None  # the engine's thread knows it
            self.changed.notify_all()
        if not has_begun:
            listener.close(error)
