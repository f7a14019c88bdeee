"""Continuous batching: streams of one model share the GPU. Each joins at the next frame and leaves at its end.

    tts = load("1.7B", rows=64)
    with Engine(tts) as engine:
        for audio, rate in engine.stream(tts.generate_voice_clone, text="Hello!", voice_clone_prompt=prompt, seed=7):
            play(audio)

    prompt thread            engine's thread                       delivery thread
    builds the prompt   ->   prefill, frames of all streams,  ->   waits for the codec, gives each
    (`waiting`)              chunks to the codec (`decoding`)      listener its audio

The first two threads and the codec each have a CUDA stream of their own. Listeners take the lock `changed`; the
engine's thread never holds it while the GPU works. While streams advance it has the model's turn (turns.py), so other
calls on the same model wait. schedule.py decides who is admitted, held back or evicted.
"""

import asyncio
import atexit
import collections
import contextlib
import gc
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

import numpy as np
import torch

from qwen3_tts_cuda_graphs.fast.codec import PendingAudio
from qwen3_tts_cuda_graphs.prompts.arriving_text import TEXT_TIMEOUT
from qwen3_tts_cuda_graphs.prompts.checks import check_counts, check_seed, check_text, is_arriving
from qwen3_tts_cuda_graphs.prompts.clone_prompts import with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.pieces import END, aread_pieces, start_reader
from qwen3_tts_cuda_graphs.prompts.script import nth_seed
from qwen3_tts_cuda_graphs.speech.intake import Intake
from qwen3_tts_cuda_graphs.speech.listener import Listener, ListenerChunks, StreamTimeout
from qwen3_tts_cuda_graphs.speech.runner import KernelStopped
from qwen3_tts_cuda_graphs.speech.schedule import Situation, admissions, can_decode_together, evictions, holds_back
from qwen3_tts_cuda_graphs.speech.streaming import Chunk
from qwen3_tts_cuda_graphs.speech.turns import PATIENCE
from qwen3_tts_cuda_graphs.speech.whole_calls import value_for

log = logging.getLogger("qwen3_tts_cuda_graphs")

MAX_BATCHES_IN_CODEC = 8  # with so many batches in the codec, the engine waits for it
BUILT = object()  # what `stream` gets from `built` of Listener.ask
TEXT_CHECK_INTERVAL = 0.1  # seconds between two checks of arriving texts for a timeout


class Engine:
    """Streams that share one model. `close` it, or use it in a `with` statement. On a GPU, Python's garbage collector
    ignores the objects that exist now (gc.freeze) until the engine is closed."""

    def __init__(
        self,
        tts,
        max_unread: int = 64,
        max_waiting: int = 1024,
        patience: float = PATIENCE,
        cut_off_is_error: bool = False,
        after_delivery: Callable[[], None] = lambda: None,
    ):
        """tts: an accelerated model; the number of its rows limits how many streams there can be at once
        max_unread: chunks that a listener may leave unread before its stream pauses
        max_waiting: requests that may wait for a row, not counting those for which a row is free
        patience: seconds after which a paused stream loses its row to a waiting one
        cut_off_is_error: raise CutOff after the last chunk of an utterance that ended at a limit, instead of warning
        after_delivery: called when the audio of all streams in a batch of the codec has been delivered
        """
        check_counts(max_unread=max_unread)
        self.tts = tts
        self.speech = tts.speech
        self.runner = tts.speech.runner
        self.rate = tts.speech.rate
        self.max_unread = max_unread
        self.max_waiting = max_waiting
        self.patience = patience
        self.cut_off_is_error = cut_off_is_error
        self.after_delivery = after_delivery
        self.listeners = set()  # all whose request has been queued and not cancelled
        self.last_progress = {}  # "frame" or "prompt" -> how many have been made, and since when it is that many
        self.active = []  # listeners that have a row
        self.why_closed = ""  # empty while the engine runs
        self.passes = 0  # of the loop in run_until_idle
        self.pass_seconds = 0.0  # duration of a pass: a maximum that decays by a tenth with each pass
        self.decoding = queue.Queue(MAX_BATCHES_IN_CODEC)  # Batch, or (listeners, the last item of each), in order
        self.next_text_check = math.inf  # when the delivery thread checks arriving texts
        self.changed = threading.Condition()
        self.intake = Intake(self)
        if self.speech.on_gpu:
            device = self.speech.device
            self.cuda_stream = torch.cuda.Stream(device)
            self.cuda_stream.wait_stream(torch.cuda.current_stream(device))
            gc.collect()
            gc.freeze()  # a collection of all that torch has loaded would stop every stream for 0.2 s
        self.thread = threading.Thread(target=self.run, name="speech engine", daemon=True)
        self.delivery = threading.Thread(target=self.deliver, name="speech delivery", daemon=True)
        self.thread.start()
        self.delivery.start()
        atexit.register(self.close)

    # ---- For listeners, in any thread

    def stream(
        self,
        method: Callable,
        *,
        text: str | Iterable[str],
        seed: int | None = None,
        text_timeout: float = TEXT_TIMEOUT,
        **kwargs,
    ) -> Iterator[Chunk]:
        """Speak one text and yield (float32 samples, sample rate) while it is generated.

        method: tts.generate_voice_clone, generate_custom_voice or generate_voice_design
        text: a text, or an iterator of its pieces, as a language model writes them; a thread reads the iterator
        seed: of this stream's own generator. On a CPU in float32 the speech does not depend on other streams. On a GPU
            a seed reproduces only if the stream is alone throughout, as rounding depends on the batch size.
        text_timeout: seconds without new text after which the stream ends with a TimeoutError
        kwargs: the method's other arguments

        Chunks have 1, 1, 2, 4, 8, 8, ... frames. The request is queued at this call, and mistakes raise here.
        """
        arrives = is_arriving(text)
        self.check_model(method)
        kwargs = with_voice_clone_prompt(method, kwargs)
        items = queue.SimpleQueue()
        listener = Listener(self, items.put, text_timeout)
        try:
            listener.ask(method, None if arrives else check_text(text), seed, kwargs, lambda: items.put(BUILT))
            if (item := items.get()) is not BUILT:
                raise item
        except BaseException:
            listener.cancel()
            raise
        if arrives:
            start_reader(text, listener.push)
        return ListenerChunks(listener, items)

    async def astream(
        self,
        method: Callable,
        *,
        text: str | Iterable[str] | AsyncIterable[str],
        seed: int | None = None,
        text_timeout: float = TEXT_TIMEOUT,
        **kwargs,
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio; `text` may be an async iterator, too. The request is queued at the first iteration, and
        mistakes raise there. Never blocks the event loop."""
        loop = asyncio.get_running_loop()
        items = asyncio.Queue()

        def put(item) -> None:
            try:
                loop.call_soon_threadsafe(items.put_nowait, item)
            except RuntimeError:  # the loop has been closed
                listener.cancel()

        listener = Listener(self, put, text_timeout)
        reader = None
        try:
            self.check_model(method)
            if kwargs.get("ref_audio") is not None:
                kwargs = await asyncio.to_thread(with_voice_clone_prompt, method, kwargs)
            is_async = hasattr(text, "__aiter__")
            arrives = is_async or is_arriving(text)
            listener.ask(method, None if arrives else check_text(text), seed, kwargs)
            if is_async:
                reader = asyncio.create_task(aread_pieces(text, listener.push))
            elif arrives:
                start_reader(text, listener.push)
            while (audio := listener.receive(await items.get())) is not END:
                yield audio, self.rate
        finally:
            listener.cancel()
            if reader:
                reader.cancel()

    def generate(
        self, method: Callable, *, text: list[str], seed: int | None = None, **kwargs
    ) -> tuple[list[np.ndarray], int]:
        """Speak a list of texts together. Returns their samples and the sample rate, as upstream's methods do.

        Arguments may be lists with one value per text. Text number i has the seed `seed + i`.
        """
        if isinstance(text, str):
            raise ValueError("the text is a string: give a list of texts, or use stream")
        check_seed(seed)
        texts = [*map(check_text, text)]
        self.check_model(method)
        kwargs = with_voice_clone_prompt(method, kwargs)
        items = queue.SimpleQueue()  # (number of a text, audio or END or an error)
        audio = [[] for _ in texts]
        waiting = collections.deque(enumerate(texts))
        listeners = {}  # number of a text -> its Listener

        def ask(number: int, text: str) -> None:
            own = {name: value_for(number, len(texts), name, value) for name, value in kwargs.items()}
            listeners[number] = Listener(self, lambda item: items.put((number, item)))
            listeners[number].ask(method, text, nth_seed(seed, number), own)

        try:
            while waiting or listeners:
                if waiting and len(listeners) < self.runner.row_count:
                    ask(*waiting.popleft())
                    continue
                number, item = items.get()
                if listeners[number].receive(item) is END:
                    listeners.pop(number).cancel()
                else:
                    audio[number].append(item)
        finally:
            for listener in listeners.values():
                listener.cancel()
        return [*map(np.concatenate, audio)], self.rate

    @property
    def is_running(self) -> bool:
        """False once the engine has been closed, or has stopped with an error."""
        return not self.why_closed

    def check_running(self) -> None:
        if self.why_closed:
            raise RuntimeError(self.why_closed)

    def counts(self) -> tuple[int, int]:
        """How many streams are active, and how many wait for a row."""
        return len(self.active), len(self.intake.waiting)

    def stands_still(self, seconds: float) -> str | None:
        """Whether the engine is stuck: "frame" or "prompt" if it has had work of this kind for so many seconds without
        completing any, or None. Call it regularly: a call notices only what has changed since the call before."""
        now = time.monotonic()
        has_frames = (self.active or self.intake.waiting) and self.has_work()
        kinds = ("frame", has_frames, self.passes), ("prompt", self.intake.preparing, self.intake.prepared)
        for kind, has_work, made in kinds:
            made_before, since = self.last_progress.get(kind, (None, now))
            if not has_work or made != made_before:
                self.last_progress[kind] = made, now
            elif now - since > seconds:
                return kind
        return None

    def check_model(self, method: Callable) -> None:
        if getattr(method, "__self__", None) is not self.tts:
            raise ValueError("this engine speaks with another model: use a method of the model it was made with")

    # ---- The engine's thread

    def run(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            log.exception("the engine has stopped")
            self.stop(f"the engine has stopped: {error}")
        for listener in self.active:
            listener.must_be_released = True  # by the next call that uses the runner
        if self.speech.on_gpu:
            with contextlib.suppress(Exception):
                self.cuda_stream.synchronize()
                self.runner.codec.wait()
        self.decoding.put(None)

    def serve(self) -> None:
        if self.speech.on_gpu:
            torch.cuda.set_device(self.speech.device)
            torch.cuda.set_stream(self.cuda_stream)
        while self.is_running:
            with self.changed:  # with a timeout, as a paused stream loses its row after `patience`
                self.changed.wait_for(self.has_work, timeout=0.1 if self.active else None)
            with self.speech.turns.take(give_up=lambda: not self.is_running) as turn:
                if turn:
                    self.run_until_idle()

    def run_until_idle(self) -> None:
        """Run frames until no stream can advance."""
        self.runner.enter(sleeps=True)
        while self.is_running:
            began = time.monotonic()
            situation = self.current_situation()
            self.evict_idle(situation)
            has_admitted = self.admit(admissions(situation))
            is_held_back = not has_admitted and holds_back(situation)
            advancing = []
            if not is_held_back:
                advancing = [one for one in self.active if one.may_advance() and one.paused_at is None]
            try:
                self.runner.step(self.active, self.decoding.put, advancing, together=can_decode_together(situation))
            except KernelStopped as stopped:
                for listener in stopped.utterances:
                    listener.close(KernelStopped(stopped.reason))  # one exception object for each thread
            self.release_finished()
            self.passes += 1
            self.pass_seconds = max(time.monotonic() - began, 0.9 * self.pass_seconds)
            if is_held_back:
                self.wait_for_newcomers()
            elif not advancing:
                return

    def current_situation(self) -> Situation:
        """What the schedule decides by. Notes when streams have paused."""
        now = time.monotonic()
        for listener in self.active:
            listener.paused_at = (listener.paused_at or now) if listener.has_too_much_unread else None
        with self.changed:  # another thread may cancel a request, which removes it from the queue
            waiting = [*self.intake.waiting]
        return Situation(
            listeners=[listener.row_status(now, self.speech.seconds_per_frame) for listener in self.active],
            rows=len(self.active) + len(self.runner.free),
            preparing=self.intake.preparing,
            waiting=[listener.prompt_length for listener in waiting],
            longest_wait=now - waiting[0].queued_at if waiting else 0.0,
            pass_seconds=self.pass_seconds,
        )

    def wait_for_newcomers(self) -> None:
        """Leave the GPU to streams without first audio, and the GIL to the prompt thread."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.intake.waiting or not self.is_running or not self.current_situation().has_newcomers,
                timeout=0.002,
            )

    def has_work(self) -> bool:
        can_admit = self.intake.waiting and (self.runner.free or not self.active)
        can_advance = any(
            one.is_closed or (not one.has_too_much_unread and one.may_advance()) or one.text_has_failed()
            for one in self.active
        )
        return bool(not self.is_running or can_admit or can_advance)

    def evict_idle(self, situation: Situation) -> None:
        """End the streams that lose their rows to waiting requests."""
        for i in evictions(situation, self.patience):
            reason = "its text came too slowly" if situation.listeners[i].lacks_text else "nobody has read it"
            message = f"others were waiting and {reason} for {self.patience:g} s: its place was given away"
            self.active[i].close(StreamTimeout(message))
        self.release_finished()

    def admit(self, count: int) -> bool:
        """Move waiting requests into rows. Returns whether there was one."""
        with self.changed:
            admitted = [self.intake.waiting.popleft() for _ in range(min(count, len(self.intake.waiting)))]
        for listener, error in self.runner.admit(admitted):
            log.error("a request failed", exc_info=error)
            admitted.remove(listener)
            listener.close(error)
        self.active += admitted
        return bool(admitted)

    def release_finished(self) -> None:
        """Free the rows of streams that are complete, have failed or were cancelled. Attributes are tested before
        methods are called: there may be hundreds of streams, and this runs in every frame."""
        for listener in self.active:
            if listener.arriving and listener.text_has_failed():
                listener.finished = True
        over = [one for one in self.active if one.is_closed or (one.finished and one.is_complete())]
        for listener in over:
            self.active.remove(listener)
            self.runner.release(listener)
        # Only now, with their rows free: who has received the end of a stream can rely on a free row.
        if over := [listener for listener in over if not listener.is_closed]:
            self.decoding.put((over, [(listener.arriving and listener.arriving.error) or END for listener in over]))

    # ---- The delivery thread

    def deliver(self) -> None:
        """Give decoded audio to its listeners, in the order in which the codec got it."""
        while (batch := self.next_batch()) is not None:
            listeners, audio = batch
            try:
                items = audio
                if isinstance(audio, PendingAudio):
                    items = audio.wait()
                    self.count_delivered(listeners, samples=len(items[0]))
                for listener, item in zip(listeners, items):
                    if not listener.is_closed:
                        listener.put(item)
                self.after_delivery()
            except BaseException as error:
                log.exception("the engine has stopped")
                self.stop(f"the engine has stopped: {error}")
                for listener in listeners:  # their audio is not complete, so no END may follow
                    listener.close(RuntimeError(self.why_closed))
        self.end_all()  # when all audio that was decoded has been delivered

    def next_batch(self) -> tuple | None:
        """The next batch of the codec. This thread never waits for a listener or a turn, so it also ends streams whose
        text has timed out. It wakes up regularly for that, but only while a text is arriving."""
        while True:
            if time.monotonic() >= self.next_text_check:
                self.next_text_check = math.inf  # before the check, as `wake_delivery` may be called meanwhile
                with self.changed:
                    arriving = [listener for listener in self.listeners if listener.awaits_text]
                if arriving:
                    self.next_text_check = time.monotonic() + TEXT_CHECK_INTERVAL
                for listener in arriving:
                    if error := listener.text_timed_out():
                        self.intake.fail_text(listener, error)
            timeout = None if self.next_text_check == math.inf else TEXT_CHECK_INTERVAL
            with contextlib.suppress(queue.Empty):
                return self.decoding.get(timeout=timeout)

    def wake_delivery(self) -> None:
        """Have the delivery thread check the arriving texts now. While its queue is full it is awake anyway."""
        self.next_text_check = 0.0
        with contextlib.suppress(queue.Full):
            self.decoding.put_nowait(((), ()))

    def end_all(self) -> None:
        with self.changed:
            listeners = [listener for listener in self.listeners if not listener.is_closed]
            self.active.clear()
            self.intake.waiting.clear()
        for listener in listeners:
            listener.put(RuntimeError(self.why_closed))  # one exception object for each thread

    def count_delivered(self, listeners: list[Listener], samples: int) -> None:
        """Note that each of them gets so many samples. Takes the lock once, as the engine's thread needs it, too."""
        frames = round(samples / self.speech.samples_per_frame)
        with self.changed:
            for listener in listeners:
                listener.unread += 1
                listener.delivered += frames
                if listener.first_delivered_at is None:
                    listener.first_delivered_at = time.monotonic()
                    self.changed.notify_all()

    # ---- Lifetime

    def stop(self, reason: str) -> None:
        """Refuse requests, and let the engine's thread end."""
        with self.changed:
            self.why_closed = self.why_closed or reason
            self.changed.notify_all()

    def close(self) -> None:
        """End all streams with an error and stop. Does not wait for other calls on the model."""
        self.stop("the engine has been closed")
        self.intake.thread.shutdown()  # waits for the prompts queued there, which fail at once
        self.thread.join()
        self.delivery.join()
        if self.speech.on_gpu:
            gc.unfreeze()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()
