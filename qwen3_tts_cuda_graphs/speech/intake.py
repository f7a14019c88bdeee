"""The way of a request into an engine: one thread builds its prompt and takes its text; then it waits for a row.

One thread is enough, as upstream's Python code takes twice as long when two threads run it. It has a CUDA stream of its
own. Prompts that wait for it are built together. One by one, each would release the GIL several times, and waiting for
the GIL is most of the time when hundreds of requests arrive together.
"""

import collections
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.prompts.build import Asked
from qwen3_tts_cuda_graphs.prompts.checks import check_seed
from qwen3_tts_cuda_graphs.prompts.clone_prompts import is_on_gpu
from qwen3_tts_cuda_graphs.prompts.pieces import done_future
from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.speech.listener import Listener, QueueFull
from qwen3_tts_cuda_graphs.speech.utterance import NewText

MAX_TOGETHER = 32  # prompts that are built together
CHARACTERS_TOGETHER = 8000  # of all their texts, so that no prompt waits for long texts of later requests


class Queued(NamedTuple):
    """A request whose prompt is to be built."""

    listener: Listener
    asked: Asked  # its text is None if it is still to come
    seed: int | None
    inputs_ready: torch.cuda.Event | None  # recorded after the work that made its voice on the GPU
    built: Callable[[], None]  # as in Listener.ask


class Intake:
    def __init__(self, engine):
        self.engine = engine
        self.speech = speech = engine.speech
        self.prompts = speech.tts.prompts
        self.changed = engine.changed  # notified when a request begins to wait for a row, and when it has new text
        self.queued = {}  # Listener -> Queued, in the order of the calls
        self.waiting = collections.deque()  # listeners that wait for a row
        self.preparing = 0  # requests whose prompts have not been built yet
        self.prepared = 0  # requests whose prompts have been built, or have failed
        # A token takes a position, and stands for at most as many bytes as its name has characters. Those are bytes of
        # the text in Unicode's composed form (NFC); one of them comes from at most 1.5 characters as they were typed.
        self.max_characters = 2 * max(map(len, speech.tts.processor.tokenizer.get_vocab())) * engine.runner.max_seq_len
        self.thread = ThreadPoolExecutor(1, "speech prompts", self.start)

    def start(self) -> None:
        if self.speech.on_gpu:
            # The small kernels of a prompt must not wait behind those of the frames.
            torch.cuda.set_stream(torch.cuda.Stream(self.speech.device, priority=-2))

    def submit(
        self,
        listener: Listener,
        method: Callable,
        text: str | None,
        seed: int | None,
        kwargs: dict,
        built: Callable[[], None],
    ) -> None:
        """Queue a request: its prompt is built, then it waits for a row. `text` is None if it is still to come."""
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
            if not self.queued:
                self.thread.submit(self.build_queued)
            self.queued[listener] = Queued(listener, Asked(method, text, kwargs), seed, inputs_ready, built)
            self.preparing += 1
            self.engine.listeners.add(listener)

    def cancel(self, listener: Listener) -> None:
        """Forget a request that is queued or waits for a row. The caller holds the lock."""
        if self.queued.pop(listener, None):
            self.count_out(1)
        with contextlib.suppress(ValueError):
            self.waiting.remove(listener)

    def count_out(self, requests: int) -> None:
        """So many requests wait for their prompts no longer."""
        with self.changed:
            self.preparing -= requests
            if not self.preparing:  # the engine may be waiting for this
                self.changed.notify_all()

    def count_prepared(self, requests: int) -> None:
        """So many prompts have been built, or have failed."""
        with self.changed:
            self.prepared += requests
            self.count_out(requests)

    def check_length(self, characters: int) -> None:
        """Refuse a text that cannot fit before it is tokenized, because all other requests would wait for that."""
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

    def take_queued(self) -> list[Queued]:
        """The next requests whose prompts are to be built together."""
        taken, characters = [], 0
        with self.changed:
            while self.queued and len(taken) < MAX_TOGETHER:
                one = next(iter(self.queued.values()))
                characters += len(one.asked.text or "")
                if taken and characters > CHARACTERS_TOGETHER:
                    break
                taken.append(self.queued.pop(one.listener))
        return taken

    @torch.no_grad()
    def build_queued(self) -> None:
        while taken := self.take_queued():
            self.build(taken)

    def build(self, taken: list[Queued]) -> None:
        """Build the prompts of these requests. Each waits for a row as soon as its prompt is built."""
        to_build = []
        for one in taken:
            try:
                self.begin(one)
            except BaseException as error:
                self.fail(one, error)
                continue
            if one.asked.text is None or one.listener.is_closed:  # there is nothing to build, or not yet
                self.count_prepared(1)
                one.built()
                if one.asked.text is None:
                    self.engine.wake_delivery()
            else:
                to_build.append(one)
        left = dict(enumerate(to_build))
        try:
            for built in self.prompts.build_together([one.asked for one in to_build]):
                self.enqueue_built([(left.pop(i), request) for i, request in built.items()])
        except BaseException as error:
            for one in left.values():
                self.fail(one, error)

    def fail(self, one: Queued, error: BaseException) -> None:
        self.count_prepared(1)
        one.listener.close(error)

    def begin(self, one: Queued) -> None:
        """Do what does not need a whole text."""
        listener = one.listener
        self.engine.check_running()
        if one.inputs_ready:
            one.inputs_ready.wait()
        if one.seed is not None:
            listener.generator = self.speech.seeded_generator(one.seed)
        if one.asked.text is None:
            method, _, kwargs, _ = one.asked
            listener.arriving = ArrivingText(method, listener.text_timeout, listener.max_text_tokens, **kwargs)

    def enqueue_built(self, built: list[tuple[Queued, Request | Exception]]) -> None:
        """Let these requests wait for a row, except for those that could not be built."""
        loaded = []
        for one, request in built:
            try:
                if isinstance(request, Exception):
                    raise request
                self.load(one.listener, request)
                loaded.append(one)
            except BaseException as error:
                self.fail(one, error)
        try:
            with self.changed:  # until it is released, none of them is admitted: no audio comes before `built`
                self.enqueue(*[one.listener for one in loaded])
                for one in loaded:
                    one.built()
                self.count_prepared(len(loaded))
        except BaseException as error:  # the engine has been closed
            for one in loaded:
                self.fail(one, error)

    def load(self, listener: Listener, request: Request) -> None:
        self.prompts.check(request)
        listener.load(request, self.engine.runner)

    def enqueue(self, *listeners: Listener) -> None:
        """Let these listeners wait for a row."""
        with self.changed:
            self.engine.check_running()
            for listener in listeners:
                listener.queued_at = time.monotonic()
            self.waiting += [listener for listener in listeners if not listener.is_closed]
            self.changed.notify_all()

    @torch.no_grad()
    def add_piece(self, listener: Listener, piece: str | BaseException | None) -> bool:
        """Add the next piece of an arriving text, its end, or the error of its iterator. Returns whether more pieces
        are wanted."""
        arriving = listener.arriving
        if listener.is_closed or arriving.is_over or not self.engine.is_running:
            return False
        try:
            if isinstance(piece, str):
                self.check_length(len(arriving.text) + len(piece))
            arriving.add(piece)
            if listener.queued_at is None:
                if arriving.can_begin:
                    self.load(listener, arriving.begin())
                    self.enqueue(listener)
            elif new := arriving.take_embeddings():
                new = NewText(*new, self.speech.runner.record_event())
                with self.changed:
                    listener.new_text.append(new)
                    self.changed.notify_all()
        except BaseException as error:
            self.fail_text(listener, error)
        return not arriving.is_over

    def fail_text(self, listener: Listener, error: BaseException) -> None:
        """Speak the text that came before the error, then give the error to the listener."""
        with self.changed:
            listener.arriving.error = error
            has_begun = listener.queued_at is not None  # the engine's thread knows it
            self.changed.notify_all()
        if not has_begun:
            listener.close(error)
