"""Continuous batching: streams of one model that share the GPU, join at the next frame and leave when they end.

    tts = load("1.7B", rows=64)
    with Engine(tts) as engine:
        for audio, rate in engine.stream(tts.generate_voice_clone, text="Hello!", voice_clone_prompt=prompt, seed=7):
            play(audio)

    prompt thread            engine's thread                            delivery thread
    upstream's prompt   ->   the runner: prefill, frames of all   ->    wait for the codec, give each
    (waiting)                streams, chunks to the codec (decoding)    listener its audio

Each thread has a CUDA stream of its own. The engine's thread never holds `changed`, the lock that listeners take, while
the GPU works. It takes its turn (turns.py) while streams advance, so that other calls on the same model wait. Who is
admitted, held back or evicted is decided in schedule.py.
"""

import asyncio
import atexit
import contextlib
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import torch

from qwen3_tts_cuda_graphs.fast.codec import PendingAudio
from qwen3_tts_cuda_graphs.prompts.arriving_text import END
from qwen3_tts_cuda_graphs.prompts.build import check_counts, check_text, with_voice_clone_prompt
from qwen3_tts_cuda_graphs.speech.accelerated import value_for
from qwen3_tts_cuda_graphs.speech.intake import Intake
from qwen3_tts_cuda_graphs.speech.listener import Listener, QueueFull, State, StreamTimeout
from qwen3_tts_cuda_graphs.speech.runner import MegakernelStopped
from qwen3_tts_cuda_graphs.speech.schedule import Situation, admissions, can_decode_together, evictions, holds_back
from qwen3_tts_cuda_graphs.speech.streaming import Chunk, check_not_async, check_seed, is_arriving, nth_seed

log = logging.getLogger("qwen3_tts_cuda_graphs")

MAX_BATCHES_IN_CODEC = 8  # the engine waits for the codec before it hands over more


class Engine:
    """Streams that share one model. `close` it, or use it in a `with` statement. On a GPU, until then, objects that
    existed before are hidden from Python's garbage collector (gc.freeze)."""

    def __init__(
        self,
        tts,
        max_unread: int = 64,
        max_waiting: int = 1024,
        patience: float = 10.0,
        cut_off_is_error: bool = False,
        after_delivery: Callable[[], None] = lambda: None,
    ):
        """tts: an accelerated model, whose `rows` are how many streams there can be at once
        max_unread: chunks that a listener may leave unread before its stream pauses
        max_waiting: requests that may wait for a row, beyond those that will find one free
        patience: seconds after which a paused stream loses its row to a waiting one
        cut_off_is_error: raise CutOff after the last chunk of a speech that ended at a limit, instead of warning
        after_delivery: called when all streams that were decoded together have their audio
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
        self.open = set()  # streams that somebody may be reading
        self.active = []  # streams that have a row
        self.pass_seconds = 0.0  # a maximum that decays by a tenth with each pass
        self.decoding = queue.Queue(MAX_BATCHES_IN_CODEC)  # (streams, their audio or what each ends with), in order
        self.changed = threading.Condition()
        self.intake = Intake(self.speech, self.changed)
        if self.speech.on_gpu:
            device = self.speech.device
            self.cuda_stream = torch.cuda.Stream(device)
            self.cuda_stream.wait_stream(torch.cuda.current_stream(device))
            gc.collect()
            gc.freeze()  # to look through all that torch has loaded would stop every stream for 0.2 s
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
        text_timeout: float = 60.0,
        **kwargs,
    ) -> Iterator[Chunk]:
        """Speak one text and yield (float32 samples, sample rate) while it is generated.

        method: tts.generate_voice_clone, generate_custom_voice or generate_voice_design
        text: a text, or an iterator of its pieces, as a language model writes them, which a thread reads
        seed: seeds a generator of this stream's own. On a CPU in float32 the speech does not depend on other streams;
            on a GPU a seed reproduces only if the stream is alone throughout, as rounding depends on the batch size.
        text_timeout: seconds without new text after which the stream ends with a TimeoutError
        kwargs: the method's other arguments

        Chunks have 1, 1, 2, 4, 8, 8, ... frames. The request is queued at this call, and mistakes raise here.
        """
        audio = queue.SimpleQueue()
        stream = Listener(audio.put, text_timeout)
        check_not_async(text)
        self.check_model(method)
        kwargs = with_voice_clone_prompt(method, kwargs)
        arrives = is_arriving(text)
        try:
            self.submit(stream, method, None if arrives else check_text(text), seed, kwargs).result()
        except BaseException as error:
            self.cancel(stream)
            if isinstance(error, CancelledError):
                raise RuntimeError(self.intake.why_closed) from None
            raise
        if arrives:
            self.intake.start_reader(stream, text)
        chunks = self.chunks_of(stream, audio)
        next(chunks)  # enters its `try`, so that closing it before the first chunk cancels the request, too
        return chunks

    def chunks_of(self, stream: Listener, audio: queue.SimpleQueue) -> Iterator[Chunk]:
        try:
            yield None  # to `stream`
            while (item := self.next_item(stream, audio)) is not END:
                yield self.take_item(stream, item), self.rate
            stream.warn_if_cut_off(self.cut_off_is_error)
        finally:
            self.cancel(stream)

    def next_item(self, stream: Listener, audio: queue.SimpleQueue):
        while stream.state is State.PREPARING:  # later the engine's thread looks after it
            try:
                return audio.get(timeout=stream.seconds_for_text())
            except queue.Empty:
                if error := stream.text_timed_out():
                    raise error from None
        return audio.get()

    async def astream(
        self,
        method: Callable,
        *,
        text: str | Iterable[str] | AsyncIterable[str],
        seed: int | None = None,
        text_timeout: float = 60.0,
        **kwargs,
    ) -> AsyncIterator[Chunk]:
        """The same for asyncio, but queued at the first iteration, where mistakes raise. Never blocks the loop."""
        loop = asyncio.get_running_loop()
        audio = asyncio.Queue()

        def put(item) -> None:
            try:
                loop.call_soon_threadsafe(audio.put_nowait, item)
            except RuntimeError:  # the loop has been closed
                self.cancel(stream)

        stream = Listener(put, text_timeout)
        reader = None
        try:
            self.check_model(method)
            if kwargs.get("ref_audio") is not None:
                kwargs = await asyncio.to_thread(with_voice_clone_prompt, method, kwargs)
            arrives = is_arriving(text) or hasattr(text, "__aiter__")
            prompt = self.submit(stream, method, None if arrives else check_text(text), seed, kwargs)
            try:
                await asyncio.wrap_future(prompt)
            except asyncio.CancelledError:
                if not self.is_running and prompt.cancelled():
                    raise RuntimeError(self.intake.why_closed) from None
                raise
            if hasattr(text, "__aiter__"):
                reader = asyncio.create_task(self.intake.aread_pieces(stream, text))
            elif arrives:
                self.intake.start_reader(stream, text)
            while (item := await self.anext_item(stream, audio)) is not END:
                yield self.take_item(stream, item), self.rate
            stream.warn_if_cut_off(self.cut_off_is_error)
        finally:
            self.cancel(stream)
            if reader:
                reader.cancel()

    async def anext_item(self, stream: Listener, audio: asyncio.Queue):
        if stream.state is not State.PREPARING:  # the engine's thread looks after it
            return await audio.get()
        item = asyncio.ensure_future(audio.get())
        try:
            while not item.done():  # asyncio.wait_for may lose a cancellation, before Python 3.12
                await asyncio.wait([item], timeout=stream.seconds_for_text())
                if not item.done() and (error := stream.text_timed_out()):
                    raise error
            return item.result()
        finally:
            item.cancel()

    def generate(
        self, method: Callable, *, text: list[str], seed: int | None = None, **kwargs
    ) -> tuple[list[np.ndarray], int]:
        """Speak a list of texts together. Returns their samples and the sample rate, as upstream's methods do.

        Arguments may be lists with one value per text. Text number i has the seed `seed + i`.
        """

        def speak(number: int) -> np.ndarray:
            own = {name: value_for(number, len(text), name, value) for name, value in kwargs.items()}
            own_seed = nth_seed(seed, number)
            return np.concatenate([audio for audio, _ in self.stream(method, text=text[number], seed=own_seed, **own)])

        if isinstance(text, str):
            raise ValueError("the text is a string: give a list of texts, or use stream")
        check_seed(seed)
        for one in text:
            check_text(one)
        self.check_model(method)
        kwargs = with_voice_clone_prompt(method, kwargs)
        with ThreadPoolExecutor(self.runner.row_count, "speech list") as threads:
            return [*threads.map(speak, range(len(text)))], self.rate

    def take_item(self, stream: Listener, item) -> np.ndarray:
        if isinstance(item, BaseException):
            raise item
        with self.changed:
            stream.unread -= 1
            if stream.unread == self.max_unread - 1:  # it was paused
                self.changed.notify_all()
        return item

    @property
    def is_running(self) -> bool:
        """False once it has been closed, or has stopped with an error."""
        return not self.intake.why_closed

    def counts(self) -> tuple[int, int]:
        """How many streams are active, and how many wait for a row."""
        return len(self.active), len(self.intake.waiting)

    def cancel(self, stream: Listener) -> None:
        with self.changed:
            stream.end()
            self.open.discard(stream)
            self.changed.notify_all()

    def submit(self, stream: Listener, method: Callable, text: str | None, seed: int | None, kwargs: dict) -> Future:
        with self.changed:
            free = self.runner.row_count - len(self.active)
            waiting = len(self.intake.waiting) + self.intake.preparing - free
            if waiting >= self.max_waiting:
                raise QueueFull(f"{waiting} requests are waiting already: try again later")
            future = self.intake.submit(stream, method, text, seed, kwargs)
            self.open.add(stream)
        return future

    def check_model(self, method: Callable) -> None:
        if getattr(method, "__self__", None) is not self.tts:
            raise ValueError("this engine speaks with another model: use a method of the model it was made with")

    # ---- The engine's thread

    def run(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            log.exception("the engine has stopped")
            self.fail(error)
        for stream in self.active:  # the next call that uses the runner frees their rows
            stream.is_abandoned = True
        if self.speech.on_gpu:
            with contextlib.suppress(Exception):
                self.cuda_stream.synchronize()
                self.runner.codec.wait()
        self.decoding.put(None)

    def fail(self, error: BaseException) -> None:
        self.intake.close(f"the engine has stopped: {error}")  # it refuses requests from here on

    def serve(self) -> None:
        if self.speech.on_gpu:
            torch.cuda.set_device(self.speech.device)
            torch.cuda.set_stream(self.cuda_stream)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self.is_running or self.intake.waiting or self.active)
            with self.speech.turns.take(give_up=lambda: not self.is_running) as turn:  # other calls on this model wait
                if turn:
                    self.run_until_idle()
            if not self.is_running:
                return
            with self.changed:  # the timeout is for `patience`
                self.changed.wait_for(self.has_work, timeout=0.1)

    def run_until_idle(self) -> None:
        """Run frames until no stream can advance."""
        self.runner.enter(sleeps=True)
        while self.is_running:
            began = time.monotonic()
            self.drop_ended()
            now = self.situation()
            self.drop_overdue(now)
            has_admitted = self.admit(admissions(now))
            is_held_back = not has_admitted and holds_back(now)
            advancing = [] if is_held_back else [s for s in self.active if s.may_advance() and s.paused_at is None]
            try:
                self.runner.step(self.active, self.hand_over, advancing, together=can_decode_together(now))
            except MegakernelStopped as stopped:
                for stream in stopped.utterances:
                    stream.end(MegakernelStopped(stopped.reason))  # a new one for each thread
            self.release_finished()
            self.pass_seconds = max(time.monotonic() - began, 0.9 * self.pass_seconds)
            if is_held_back:
                self.wait_for_newcomers()
            elif not advancing:
                return

    def situation(self) -> Situation:
        """What the schedule decides by."""
        now = time.monotonic()
        for stream in self.active:
            is_paused = stream.unread >= self.max_unread
            stream.paused_at = (stream.paused_at or now) if is_paused else None
        return Situation(
            listeners=[stream.listener(now, self.speech.seconds_per_frame) for stream in self.active],
            rows=len(self.active) + len(self.runner.free),
            preparing=self.intake.preparing,
            waiting=len(self.intake.waiting),
            longest_wait=now - self.intake.waiting[0].queued_at if self.intake.waiting else 0.0,
            pass_seconds=self.pass_seconds,
        )

    def wait_for_newcomers(self) -> None:
        """Let streams without first audio have the GPU, and the prompt thread the GIL."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.intake.waiting or not self.is_running or not self.situation().has_newcomers, timeout=0.002
            )

    def has_work(self) -> bool:
        can_advance = any(
            stream.has_ended or (stream.unread < self.max_unread and stream.may_advance()) or stream.text_has_failed()
            for stream in self.active
        )
        return bool(not self.is_running or not self.active or (self.intake.waiting and self.runner.free) or can_advance)

    def drop_ended(self) -> None:
        """Drop waiting requests whose listeners have gone."""
        with self.changed:
            for stream in [stream for stream in self.intake.waiting if stream.has_ended]:
                self.intake.waiting.remove(stream)

    def drop_overdue(self, now: Situation) -> None:
        """Drop streams that lose their row, and end those whose text does not come."""
        for i in evictions(now, self.patience):
            reason = "its text came too slowly" if now.listeners[i].lacks_text else "nobody has read it"
            message = f"others were waiting and {reason} for {self.patience:g} s: its place was given away"
            self.active[i].end(StreamTimeout(message))
        for stream in self.active:
            if stream.text is not None and (error := stream.text_timed_out()):  # its listener may have stopped reading
                stream.text_error = stream.text_error or error
        self.release_finished()

    def admit(self, count: int) -> bool:
        """Returns whether there is somebody new."""
        with self.changed:
            admitted = [self.intake.waiting.popleft() for _ in range(min(count, len(self.intake.waiting)))]
            for stream in admitted:
                if not stream.has_ended:
                    stream.state = State.SPEAKING
        for stream, error in self.runner.admit(admitted):
            log.error("a request failed", exc_info=error)
            admitted.remove(stream)
            stream.end(error)
        self.active += admitted
        return bool(admitted)

    def hand_over(self, streams: list[Listener], audio: PendingAudio) -> None:
        self.decoding.put((streams, audio))

    def release_finished(self) -> None:
        """Free the rows of streams that are complete, have failed or have lost their listener. Attributes are looked at
        before methods are called: there may be hundreds of streams, in every frame."""
        for stream in self.active:
            if stream.text_error and stream.text_has_failed():
                stream.finished = True
        over = [s for s in self.active if s.has_ended or (s.finished and s.is_complete())]
        if not over:
            return
        for stream in over:
            self.active.remove(stream)
            self.runner.release(stream)
        with self.changed:
            over = [stream for stream in over if not stream.has_ended]
            for stream in over:
                stream.state = State.DELIVERING
        # After their rows are free: whoever has seen the end can rely on a free one.
        if over:
            self.decoding.put((over, [stream.text_error or END for stream in over]))

    # ---- The delivery thread

    def deliver(self) -> None:
        """Give decoded audio to its listeners, in the order of the codec."""
        while (item := self.decoding.get()) is not None:
            streams, audio = item
            try:
                items = audio
                if isinstance(audio, PendingAudio):
                    items = audio.wait()
                    self.count_delivered(streams, samples=len(items[0]))
                for stream, item in zip(streams, items):
                    if not stream.has_ended:
                        stream.put(item)
                self.after_delivery()
            except BaseException as error:
                log.exception("the engine has stopped")
                self.fail(error)
                for stream in streams:  # an END must not follow: their audio is not complete
                    stream.end(RuntimeError(self.intake.why_closed))
        self.end_all()  # after the audio that there is

    def end_all(self) -> None:
        with self.changed:
            streams = [stream for stream in self.open if not stream.has_ended]
            self.active.clear()
            self.intake.waiting.clear()
        for stream in streams:
            stream.put(RuntimeError(self.intake.why_closed))  # a new error for each thread

    def count_delivered(self, streams: list[Listener], samples: int) -> None:
        """A chunk of `samples` for each stream. The lock is taken once for all: the engine's thread needs it, too."""
        frames = round(samples / self.rate / self.speech.seconds_per_frame)
        with self.changed:
            for stream in streams:
                stream.unread += 1
                stream.delivered += frames
            for stream in [stream for stream in streams if stream.first_delivered_at is None]:
                stream.first_delivered_at = time.monotonic()
                self.changed.notify_all()

    # ---- Lifetime

    def close(self) -> None:
        """End all streams with an error and stop. Does not wait for other calls on the model."""
        self.intake.close("the engine has been closed")
        self.intake.thread.shutdown(cancel_futures=True)
        self.thread.join()
        self.delivery.join()
        if self.speech.on_gpu:
            gc.unfreeze()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()
