"""Continuous batching: streams of one model that share the GPU, join at the next frame and leave when they end.

    with Engine(tts, max_streams=64) as engine:
        for audio, rate in engine.stream(tts.generate_voice_clone, text="Hello!", voice_clone_prompt=prompt, seed=7):
            play(audio)

    prompt thread            engine's thread                            delivery thread
    upstream's prompt   ->   prefill, frames of all streams,      ->    wait for the codec, give each
    (waiting)                full chunks to the codec (decoding)        listener its audio

Each thread has a CUDA stream of its own. The engine's thread never holds `changed`, the lock that listeners take, while
the GPU works. It holds the model's lock while streams advance, so that other calls on the same model wait.
"""

import asyncio
import atexit
import collections
import contextlib
import contextvars
import heapq
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import torch

from fast import megakernel_stopped
from fast.arriving_text import END, ArrivingText, text_rows
from fast.megakernel import PredictorStep
from fast.paths import why_stopped
from fast.prompts import (
    check_request,
    check_text,
    decoder_of,
    move_to,
    pin,
    reference_codes,
    request_for,
    with_voice_clone_prompt,
)
from fast.streaming import check_not_async, check_seed, is_arriving, warn_each_time
from serving.batch import HostSettings, Prefill, Slots, copy_to_device, frame_graph
from serving.codec import BATCH_CHUNK_SIZES, BatchCodec, PendingAudio
from serving.megakernel_frame import compile_frames_ahead, megakernel_frames
from serving.stream import CutOff, QueueFull, Stream, StreamTimeout

log = logging.getLogger("qwen3_tts_cudagraphs")

Chunk = tuple[np.ndarray, int]
MAX_ADMISSIONS_PER_FRAME = 32  # prompts that are prefilled between two frames
LEAD_TO_KEEP = 0.1  # seconds of audio ahead of playback; if all have more, they wait for those without first audio
LONGEST_HOLD = 5.0  # seconds that a request waits at most for streams that would run dry
MAX_CODEC_ROWS = 64  # chunks that are decoded together; more take much memory and are not faster
MAX_BATCHES_IN_CODEC = 8  # the engine waits for the codec before it hands over more
NEEDED_LATER = ("do_sample", "subtalker_dosample", "max_new_tokens")  # arguments that are read after the prefill


def value_for(number: int, texts: int, name: str, value):
    """The argument of one text out of several. Upstream's voice_clone_prompt has lists inside."""
    if isinstance(value, dict):
        return {key: value_for(number, texts, name, column) for key, column in value.items()}
    if not (isinstance(value, list) and len(value) == texts):
        return value
    return value[number : number + 1] if name == "voice_clone_prompt" else value[number]


class Engine:
    """Streams that share one model. `close` it, or use it in a `with` statement."""

    def __init__(
        self,
        tts,
        max_streams: int = 64,
        max_unread: int = 64,
        max_waiting: int = 1024,
        patience: float = 10.0,
        cut_off_is_error: bool = False,
    ):
        """Capture graphs for up to `max_streams` streams.

        max_unread: chunks that a listener may leave unread before its stream pauses
        max_waiting: requests that may wait for a place, beyond those that will find one free
        patience: seconds after which a paused stream loses its place to a waiting one
        cut_off_is_error: raise CutOff after the last chunk of a speech that ended at a limit, instead of warning
        """
        if max_streams < 1 or max_unread < 1:
            raise ValueError(f"max_streams is {max_streams} and max_unread {max_unread}, both must be at least 1")
        self.tts = tts
        self.decoder = decoder_of(tts)
        self.talker = self.decoder.talker
        self.device = self.talker.device
        self.on_gpu = self.device.type == "cuda"
        self.rate = tts.model.speech_tokenizer.get_output_sample_rate()
        self.seconds_per_frame = tts.model.speech_tokenizer.get_decode_upsample_rate() / self.rate
        self.max_streams = max_streams
        self.max_unread = max_unread
        self.max_waiting = max_waiting
        self.patience = patience
        self.cut_off_is_error = cut_off_is_error
        self.single = self.decoder.graphs_for(1)
        # The megakernel draws the noise of a frame's 15 codes in one call, upstream's layers one code at a time.
        self.draws_codes_at_once = isinstance(self.single[1].step, PredictorStep)
        self.seeds = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))  # for streams without a seed
        self.shared_generator = self.make_generator(None)
        self.settings = HostSettings(self.talker.config)
        # A token takes a position, and stands for at most as many bytes as its name has characters. A byte of the text
        # in Unicode's composed form (NFC), which the tokenizer reads, was at most 1.5 characters before.
        self.max_characters = 2 * max(map(len, tts.processor.tokenizer.get_vocab())) * self.decoder.max_seq_len
        with self.decoder.lock:
            self.capture()

        self.preparing = 0  # requests whose prompts are being built
        self.open = set()  # streams that somebody may be reading
        self.waiting = collections.deque()
        self.active = []  # admitted streams, each in its slot
        self.in_single = False  # True: there is one active stream, and its state is in the single-row graphs
        self.free_slots = list(range(max_streams))  # of the codec, too; a heap
        self.held_back = False  # whether streams wait for new listeners
        self.time_of_pass = 0.0  # seconds that one of the last passes of `run_until_idle` has taken at most
        self.launched = collections.deque()  # frames whose `ended` flags the host has not read yet
        self.decoding = queue.Queue(MAX_BATCHES_IN_CODEC)  # (streams, their audio, an error or END), in order
        self.advance_mask = None  # host copy of slots.advance
        self.closing = False
        self.why_closed = "the engine has been closed"
        self.changed = threading.Condition()
        if self.on_gpu:
            self.cuda_stream = torch.cuda.Stream(self.device)
            self.cuda_stream.wait_stream(torch.cuda.current_stream(self.device))
        self.prompt_thread = ThreadPoolExecutor(1, "speech prompts", self.start_prompt_thread)
        self.thread = threading.Thread(target=self.run, name="speech engine", daemon=True)
        self.delivery = threading.Thread(target=self.deliver, name="speech delivery", daemon=True)
        self.thread.start()
        self.delivery.start()
        atexit.register(self.close)

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        powers_of_two = [1 << i for i in range(self.max_streams.bit_length())]
        self.batch_sizes = [size for size in powers_of_two if size < self.max_streams] + [self.max_streams]
        compile_frames_ahead(self.talker, self.single, self.batch_sizes)
        self.slots = Slots(self.talker, self.max_streams, self.decoder.max_seq_len)
        self.graphs = {}
        for rows in reversed(self.batch_sizes):  # the largest first: the others fit into its memory
            log.info("capturing frames of up to %d streams", rows)
            self.graphs[rows] = frame_graph(self.talker, self.single[1], self.slots, rows)
            self.graphs[rows].capture(self.decoder.pool)
        self.megakernels = megakernel_frames(
            self.talker, self.single, self.slots, self.batch_sizes, self.decoder.pool
        )  # rows -> frames that are faster than those of `graphs`
        log.info("capturing prefills of several prompts")
        self.prefills = Prefill(self.talker, self.slots, self.decoder.pool)
        log.info("capturing the codec for up to %d streams", self.max_streams)
        codec_batches = sorted({min(rows, MAX_CODEC_ROWS) for rows in self.batch_sizes})
        self.codec = BatchCodec(self.tts.model.speech_tokenizer, self.max_streams, codec_batches)
        if self.on_gpu:
            torch._C._cuda_clearCublasWorkspaces()  # as `accelerate` does

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
        stream = Stream(audio.put, text_timeout)
        check_not_async(text)
        self.check_model(method)
        kwargs = with_voice_clone_prompt(method, kwargs)
        arrives = is_arriving(text)
        try:
            self.submit(stream, method, None if arrives else check_text(text), seed, kwargs).result()
        except BaseException as error:
            self.cancel(stream)
            if isinstance(error, CancelledError):
                raise RuntimeError(self.why_closed) from None
            raise
        if arrives:
            self.start_reader(stream, text)
        chunks = self.chunks_of(stream, audio)
        next(chunks)  # enters its `try`, so that closing it before the first chunk cancels the request, too
        return chunks

    def chunks_of(self, stream: Stream, audio: queue.SimpleQueue) -> Iterator[Chunk]:
        try:
            yield None  # to `stream`
            while (item := self.next_item(stream, audio)) is not END:
                yield self.take_item(stream, item), self.rate
            self.warn_if_cut_off(stream)
        finally:
            self.cancel(stream)

    def next_item(self, stream: Stream, audio: queue.SimpleQueue):
        while True:
            try:
                return audio.get(timeout=stream.seconds_for_text())
            except queue.Empty:
                if error := stream.text_timed_out():
                    raise error from None

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

        stream = Stream(put, text_timeout)
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
                if self.closing and prompt.cancelled():
                    raise RuntimeError(self.why_closed) from None
                raise
            if hasattr(text, "__aiter__"):
                reader = asyncio.create_task(self.aread_pieces(stream, text))
            elif arrives:
                self.start_reader(stream, text)
            while (item := await self.anext_item(stream, audio)) is not END:
                yield self.take_item(stream, item), self.rate
            self.warn_if_cut_off(stream)
        finally:
            self.cancel(stream)
            if reader:
                reader.cancel()

    async def anext_item(self, stream: Stream, audio: asyncio.Queue):
        while True:
            try:
                return await asyncio.wait_for(audio.get(), stream.seconds_for_text())
            except asyncio.TimeoutError:
                if error := stream.text_timed_out():
                    raise error from None

    def generate(
        self, method: Callable, *, text: list[str], seed: int | None = None, **kwargs
    ) -> tuple[list[np.ndarray], int]:
        """Speak a list of texts together. Returns their samples and the sample rate, as upstream's methods do.

        Arguments may be lists with one value per text. Text number i has the seed `seed + i`.
        """

        def speak(number: int) -> np.ndarray:
            own = {name: value_for(number, len(text), name, value) for name, value in kwargs.items()}
            own_seed = None if seed is None else seed + number
            return np.concatenate([audio for audio, _ in self.stream(method, text=text[number], seed=own_seed, **own)])

        if isinstance(text, str):
            raise ValueError("the text is a string: give a list of texts, or use stream")
        check_seed(seed)
        self.check_model(method)
        kwargs = with_voice_clone_prompt(method, kwargs)
        with ThreadPoolExecutor(self.max_streams, "speech list") as threads:
            return [*threads.map(speak, range(len(text)))], self.rate

    def take_item(self, stream: Stream, item) -> np.ndarray:
        if isinstance(item, BaseException):
            raise item
        with self.changed:
            stream.unread -= 1
            self.changed.notify_all()
        return item

    def warn_if_cut_off(self, stream: Stream) -> None:
        if stream.was_cut_off:
            name = "max_seq_len" if stream.max_frames + 1 < stream.request["max_new_tokens"] else "max_new_tokens"
            warning = CutOff(f"the speech was cut off after {stream.max_frames} frames, before its end: raise {name}")
            if self.cut_off_is_error:
                raise warning
            warn_each_time(warning)

    @property
    def is_running(self) -> bool:
        """False once it has been closed, or has stopped with an error."""
        return not self.closing

    def counts(self) -> tuple[int, int]:
        """How many streams are active, and how many wait for a place."""
        return len(self.active), len(self.waiting)

    def cancel(self, stream: Stream) -> None:
        with self.changed:
            stream.cancelled = True
            self.open.discard(stream)
            self.changed.notify_all()

    def submit(self, stream: Stream, method: Callable, text: str | None, seed: int | None, kwargs: dict) -> Future:
        """Have the prompt built and the request queued. `text` is None if it is still to come."""
        self.decoder.lock.check_process()
        check_seed(seed)
        self.check_length(len(text or ""))
        with self.changed:
            if self.closing:
                raise RuntimeError(self.why_closed)
            free = self.max_streams - len(self.active)
            waiting = len(self.waiting) + self.preparing - free
            if waiting >= self.max_waiting:
                raise QueueFull(f"{waiting} requests are waiting already: try again later")
            self.preparing += 1
            self.open.add(stream)
            inputs_ready = self.decoder.record_event()  # the caller may have made a voice on its own CUDA stream
            future = self.prompt_thread.submit(self.build_prompt, stream, method, text, seed, kwargs, inputs_ready)
        future.add_done_callback(self.prompt_is_done)  # also if it was cancelled while it was queued
        return future

    def check_model(self, method: Callable) -> None:
        if getattr(method, "__self__", None) is not self.tts:
            raise ValueError("this engine speaks with another model: use a method of the model it was made with")

    def check_length(self, characters: int) -> None:
        """Refuse what cannot fit before the prompt thread tokenizes it, for which all others would wait."""
        if characters > self.max_characters:
            raise ValueError(
                f"the text has {characters} characters, more than {self.max_characters} never fit into "
                f"{self.decoder.max_seq_len} positions: speak it in parts"
            )

    def prompt_is_done(self, future: Future) -> None:
        with self.changed:
            self.preparing -= 1
            self.changed.notify_all()

    def start_reader(self, stream: Stream, pieces: Iterable[str]) -> None:
        """A thread of its own: the iterator may take its time."""
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self.read_pieces, stream, pieces), name="text reader", daemon=True).start()

    def read_pieces(self, stream: Stream, pieces: Iterable[str]) -> None:
        last = END
        try:
            for piece in pieces:
                self.prompt_thread.submit(self.take_piece, stream, piece).result()
                if stream.cancelled or stream.text_error:
                    return
        except BaseException as error:  # raised again where the speech is read
            last = error
        with contextlib.suppress(RuntimeError, CancelledError):  # the engine has been closed
            self.prompt_thread.submit(self.take_piece, stream, last)

    async def aread_pieces(self, stream: Stream, pieces: AsyncIterable[str]) -> None:
        last = END
        try:
            async for piece in pieces:
                await asyncio.wrap_future(self.prompt_thread.submit(self.take_piece, stream, piece))
                if stream.text_error:
                    return
        except Exception as error:
            last = error
        with contextlib.suppress(RuntimeError):
            self.prompt_thread.submit(self.take_piece, stream, last)

    # ---- The prompt thread: one, as upstream's Python code takes twice as long when many threads run it at once

    def start_prompt_thread(self) -> None:
        if self.on_gpu:
            # The small kernels of a prompt must not wait for those of the frames.
            torch.cuda.set_stream(torch.cuda.Stream(self.device, priority=-2))

    @torch.no_grad()
    def build_prompt(
        self,
        stream: Stream,
        method: Callable,
        text: str | None,
        seed: int | None,
        kwargs: dict,
        inputs_ready: torch.cuda.Event | None,
    ) -> None:
        if stream.cancelled:
            return
        if inputs_ready:
            inputs_ready.wait()
        stream.is_seeded = seed is not None
        if stream.is_seeded:
            stream.generator = self.make_generator(seed)
        if text is None:
            stream.text = ArrivingText(self.decoder, method, **kwargs)
            stream.reference = stream.text.reference
        else:
            stream.reference = reference_codes(kwargs.get("voice_clone_prompt"))
            self.enqueue(stream, request_for(self.decoder, method, text, kwargs))

    def enqueue(self, stream: Stream, request: dict) -> None:
        stream.max_frames = check_request(self.decoder, request)
        stream.settings = self.settings.row(request)
        stream.prompt_length = request["attention_mask"].shape[1]
        if request["inputs_embeds"].is_cuda:  # with a reference recording
            stream.prompt_ready = self.decoder.record_event()
        if self.on_gpu:
            request = pin(request)
        with self.changed:
            if self.closing:
                raise RuntimeError(self.why_closed)
            stream.request = request
            stream.queued_at = time.monotonic()
            self.waiting.append(stream)
            self.changed.notify_all()

    @torch.no_grad()
    def take_piece(self, stream: Stream, piece: str | BaseException | None) -> None:
        """The next piece of a text that is still arriving, its end, or the error of its iterator."""
        if stream.cancelled or stream.text_error:
            return
        text = stream.text
        try:
            if isinstance(piece, BaseException):
                raise piece
            if piece is END:
                text.finish()
            else:
                self.check_length(len(text.text) + len(str(piece)))  # `push` refuses what is not a string
                text.push(piece)
            if piece or piece is END:
                stream.text_came_at = time.monotonic()
            if stream.request is None:
                if text.can_begin:
                    request = text.begin()
                    stream.frames_with_text = math.inf if text.is_finished else text.rows
                    self.enqueue(stream, request)
                return
            first, ids = text.take_ids()
            if not ids:  # the middle of a word
                return
            rows = text_rows(self.decoder, ids)
            known = math.inf if text.is_finished else text.rows
            with self.changed:
                stream.new_rows.append((first, rows, known, self.decoder.record_event()))
                self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                stream.text_error = error
                self.changed.notify_all()
            if stream.request is None:  # the engine does not know it yet
                stream.put(error)

    def make_generator(self, seed: int | None) -> torch.Generator:
        """A generator in the state that a call alone has after torch.manual_seed(seed).

        On a GPU `Decoder.frames` seeds its own generator with one draw from torch's default one.
        """
        generator = torch.Generator(self.device)
        if seed is None:
            # Not from torch's default generator: a seeded call may be drawing from it.
            return generator.manual_seed(int(torch.randint(1 << 62, (), generator=self.seeds)))
        generator.manual_seed(int(seed))
        if self.on_gpu:
            generator.manual_seed(int(torch.randint(1 << 62, (), device=self.device, generator=generator)))
        return generator

    # ---- The engine's thread

    def run(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            log.exception("the engine has stopped")
            self.fail(error)
        if self.on_gpu:
            with contextlib.suppress(Exception):
                self.cuda_stream.synchronize()
                self.codec.stream.synchronize()  # what they write is freed with the engine
        self.decoding.put(None)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.why_closed = f"the engine has stopped: {error}"
            self.closing = True  # `submit` refuses from here on
            self.changed.notify_all()

    def serve(self) -> None:
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.cuda_stream)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.waiting or self.active)
                if self.closing:
                    return
            with self.decoder.lock.take(give_up=lambda: self.closing) as turn:  # other calls on this model wait
                if turn:
                    self.run_until_idle()
            self.wait_for_listeners()

    @torch.no_grad()
    def run_until_idle(self) -> None:
        """Run frames until no stream can advance."""
        if self.on_gpu:
            self.cuda_stream.wait_stream(self.decoder.last_stream or self.cuda_stream)
            self.decoder.last_stream = self.cuda_stream
        while not self.closing:
            began = time.monotonic()
            self.drop_cancelled_and_overdue()
            if self.may_admit():
                self.admit()
            launched = self.launch()
            # On a GPU the host runs one frame behind, so that the GPU never waits for it.
            self.check_ended(keep=1 if launched and self.on_gpu else 0)
            self.decode_chunks(self.active)
            self.remove_finished()
            self.time_of_pass = max(time.monotonic() - began, 0.9 * self.time_of_pass)
            if not launched and self.held_back:
                self.wait_for_newcomers()
            elif not launched:
                if self.in_single:
                    self.leave_single()  # another call may use the single-row graphs meanwhile
                return

    def wait_for_newcomers(self) -> None:
        """Let streams without first audio have the GPU, and the prompt thread the GIL."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closing or not self.has_newcomers(), timeout=0.002)

    def has_newcomers(self) -> bool:
        """Whether a listener who has heard nothing yet is on the way or has been admitted."""
        can_admit = self.waiting and len(self.active) < self.max_streams
        return bool(self.preparing or can_admit or any(stream.first_delivered_at is None for stream in self.active))

    def wait_for_listeners(self) -> None:
        """Wait until a stream may advance, can be admitted or was cancelled. The timeout is for `patience`."""
        with self.changed:
            self.changed.wait_for(self.has_work, timeout=0.1)

    def has_work(self) -> bool:
        can_admit = self.waiting and len(self.active) < self.max_streams
        can_advance = any(
            stream.cancelled
            or stream.new_rows
            or (stream.unread < self.max_unread and stream.may_advance())
            or stream.text_has_failed()
            for stream in self.active
        )
        return bool(self.closing or not self.active or can_admit or can_advance)

    def drop_cancelled_and_overdue(self) -> None:
        """Drop cancelled requests, and those whose text does not come. If all slots are taken, evict streams paused
        beyond `patience`, oldest first."""
        with self.changed:
            self.waiting = collections.deque(stream for stream in self.waiting if not stream.cancelled)
            places_needed = len(self.waiting) if len(self.active) == self.max_streams else 0
        paused = [stream for stream in self.active if stream.paused_at is not None]
        paused.sort(key=lambda stream: stream.paused_at)
        for stream in paused[:places_needed]:
            if time.monotonic() - stream.paused_at > self.patience:
                message = f"nobody has read this stream for {self.patience:g} s: its place was given away"
                stream.put(StreamTimeout(message))
                stream.cancelled = True
        for stream in self.active:
            stream.finished |= stream.cancelled
            if error := stream.text_timed_out():  # its listener may have stopped reading
                stream.text_error = stream.text_error or error

    def may_admit(self) -> bool:
        """Not if a prefill would let a listener run dry who has audio, unless the next request has waited long."""
        if not self.waiting or time.monotonic() > self.waiting[0].queued_at + LONGEST_HOLD:
            return True
        playing = [stream for stream in self.active if stream.first_delivered_at and stream.may_advance()]
        return not any(0 < self.lead(stream) < self.lead_to_admit for stream in playing if stream.paused_at is None)

    @property
    def lead_to_admit(self) -> float:
        """Seconds of audio with which a stream can wait for a pass that admits others, and for the one after it."""
        return 2 * self.time_of_pass

    def admit(self) -> None:
        """Prefill waiting requests: several at a time, but not so many that the others wait long for the next frame."""
        with self.changed:
            free = self.max_streams - len(self.active)
            count = min(len(self.waiting), free, MAX_ADMISSIONS_PER_FRAME)
            admitted = [self.waiting.popleft() for _ in range(count)]
        if len(admitted) == 1 and not self.active and self.can_use_megakernel():
            self.prefill(admitted, self.prefill_single)
        elif admitted:
            if self.in_single:
                self.leave_single()
            while admitted:
                together = self.count_that_fit(admitted)
                self.prefill(admitted[:together], self.prefill_rows)
                admitted = admitted[together:]

    def count_that_fit(self, streams: list[Stream]) -> int:
        """How many of them can be prefilled together, from the first on."""
        lengths = [stream.prompt_length for stream in streams]
        return next(count for count in range(len(streams), 0, -1) if self.prefills.graph_for(lengths[:count]))

    def prefill(self, streams: list[Stream], run: Callable[[list[Stream]], None]) -> None:
        for stream in streams:
            self.use_prompt(stream)
            stream.slot = heapq.heappop(self.free_slots)
        states = [stream.generator and stream.generator.get_state() for stream in streams]
        try:
            run(streams)
            for stream in streams:
                self.codec.reset_row(stream.slot)
                if stream.reference is not None:
                    self.codec.prime(stream.slot, stream.reference)
        except Exception as error:
            self.in_single = False
            for stream in streams:
                heapq.heappush(self.free_slots, stream.slot)
            if len(streams) > 1:  # retry one by one, so that only the bad request fails
                for stream, state in zip(streams, states):
                    if state is not None:
                        stream.generator.set_state(state)
                    self.prefill([stream], run)
            else:
                log.exception("a request failed")
                streams[0].put(error)
            return
        for stream in streams:
            stream.request = {name: stream.request[name] for name in NEEDED_LATER}
            stream.settings = None
            self.active.append(stream)

    def use_prompt(self, stream: Stream) -> None:
        """Order the engine's CUDA stream behind the prompt thread's."""
        if stream.prompt_ready:
            stream.prompt_ready.wait()
            for value in stream.request.values():
                if torch.is_tensor(value) and value.is_cuda:
                    value.record_stream(self.cuda_stream)

    def prefill_single(self, streams: list[Stream]) -> None:
        """A stream that is alone: into the single-row graphs."""
        (stream,) = streams
        talker, predictor = self.single
        request = move_to(self.device, stream.request)
        talker.configure(**request)
        predictor.configure(**request)
        self.use_generator(stream)
        predictor.begin(**request)
        talker.begin(**request)
        self.in_single = True

    def prefill_rows(self, streams: list[Stream]) -> None:
        """Several prompts at once, into their slots."""
        columns = zip(*((stream.slot, stream.request, stream.settings) for stream in streams))
        graph = self.prefills.load(*map(list, columns))
        noise = graph.sampling.noise
        if not all(stream.is_seeded for stream in streams):
            noise.exponential_(generator=self.shared_generator)
        for row, stream in enumerate(streams):
            if stream.is_seeded and stream.request["do_sample"]:
                noise[row].exponential_(generator=stream.generator)
        graph.replay()

    def use_generator(self, stream: Stream) -> None:
        """Let the single-row graphs draw from this stream's generator."""
        stream.generator = stream.generator or self.make_generator(None)
        talker, predictor = self.single
        if self.on_gpu:
            talker.generator.set_state(stream.generator.get_state())
            return
        for sampling, sampled in ((talker.sampling, "do_sample"), (predictor.sampling, "subtalker_dosample")):
            sampling.generator = stream.generator if stream.request[sampled] else torch.Generator()

    def can_use_megakernel(self) -> bool:
        """False once the megakernel has stopped, here or in a call outside the engine: use the batch."""
        steps = [graph.step for graph in self.single]
        steps += [step for frame in self.megakernels.values() for step in frame.steps]
        return not why_stopped(*steps)

    def leave_single(self) -> None:
        """The only stream moves from the single-row graphs to its slot."""
        (stream,) = self.active
        if self.on_gpu:
            stream.generator.set_state(self.single[0].generator.get_state())
        self.slots.copy_from_single(stream.slot, *self.single, stream.length)
        self.in_single = False

    def enter_single(self) -> None:
        """The only stream moves from its slot to the single-row graphs."""
        (stream,) = self.active
        self.use_generator(stream)
        self.slots.copy_to_single(stream.slot, *self.single, stream.length)
        self.in_single = True

    def launch(self) -> bool:
        """Launch one frame of every stream that may advance. Returns whether there was one."""
        for stream in self.active:
            if stream.new_rows:
                self.write_text(stream)
            is_paused = stream.unread >= self.max_unread
            stream.paused_at = (stream.paused_at or time.monotonic()) if is_paused else None
        advancing = [stream for stream in self.active if stream.may_advance() and stream.paused_at is None]
        self.held_back = self.may_hold_back(advancing)
        if self.held_back or not advancing:
            return False

        if len(self.active) == 1 and not self.in_single and not self.waiting and self.can_use_megakernel():
            self.enter_single()
        ended, steps = self.launch_single(*advancing) if self.in_single else self.launch_rows(advancing)
        on_host = torch.empty(ended.shape, dtype=torch.bool, device="cpu", pin_memory=self.on_gpu)
        on_host.copy_(ended, non_blocking=True)
        flags = [(stream, 0 if self.in_single else stream.slot) for stream in advancing]
        self.launched.append((self.decoder.record_event(), on_host, flags, steps))
        return True

    def may_hold_back(self, advancing: list[Stream]) -> bool:
        """Whether these streams can wait for those without first audio. All or none: a frame takes as long for one."""
        if not advancing or not self.has_newcomers():
            return False
        lead_to_keep = LEAD_TO_KEEP + self.lead_to_admit
        return all(stream.decoded > 0 and self.lead(stream) > lead_to_keep for stream in advancing)

    def write_text(self, stream: Stream) -> None:
        """Put text that has arrived where the frames read it. There may be more of it than they can reach."""
        text = self.single[1].text[0] if self.in_single else self.slots.text[stream.slot]
        while stream.new_rows:
            first, rows, stream.frames_with_text, ready = stream.new_rows.popleft()
            if ready:
                ready.wait()
                rows.record_stream(self.cuda_stream)
            rows = rows[: max(0, len(text) - first)]
            text[first : first + len(rows)] = rows

    def launch_single(self, stream: Stream) -> tuple[torch.Tensor, tuple]:
        """Returns whether it has ended, and the steps in which the megakernel may have stopped."""
        talker, predictor = self.single
        predictor.replay()
        stream.launched += 1
        if stream.decoded == 0:
            # The first sound: its codes are complete, the talker's step would delay the codec.
            self.decode_chunks([stream])
            self.codec.wait()
        talker.replay()
        return talker.ended, (predictor.step, talker.step)

    def launch_rows(self, advancing: list[Stream]) -> tuple[torch.Tensor, tuple]:
        """Returns which slots have ended, and the steps in which the megakernel may have stopped."""
        self.close_gaps()
        rows = self.rows_needed()
        mask = [False] * len(self.slots.advance)
        for stream in advancing:
            mask[stream.slot] = True
            stream.launched += 1
        if mask != self.advance_mask:
            copy_to_device(torch.tensor(mask), self.slots.advance)
            self.advance_mask = mask
        self.draw_noise(advancing, rows)
        if rows in self.megakernels and self.can_use_megakernel():
            self.megakernels[rows].replay()
            if without_sound := [stream for stream in advancing if stream.decoded == 0]:
                # The next frame, which takes nearly all multiprocessors, would delay the codec.
                self.decode_chunks(without_sound)
                self.codec.wait()
            return self.slots.ended[:rows], self.megakernels[rows].steps
        self.graphs[rows].replay()
        return self.slots.ended[:rows], ()

    def rows_needed(self) -> int:
        """The smallest batch size that covers all slots in use."""
        last = max(stream.slot for stream in self.active)
        return next(rows for rows in self.batch_sizes if rows > last)

    def close_gaps(self) -> None:
        """Move streams to lower slots where a smaller batch size is enough for them."""
        enough = next(rows for rows in self.batch_sizes if rows >= len(self.active))
        for stream in self.active:
            if stream.slot >= enough:
                slot = heapq.heappushpop(self.free_slots, stream.slot)
                self.slots.move(stream.slot, slot, stream.length)
                self.codec.move(stream.slot, slot)
                stream.slot = slot

    def draw_noise(self, advancing: list[Stream], rows: int) -> None:
        """The random numbers of the next frame. A seeded stream draws them as it would alone, the others together."""
        codes, token = self.slots.predictor_sampling.noise, self.slots.sampling.noise
        if not all(stream.is_seeded for stream in self.active):
            codes[:rows].exponential_(generator=self.shared_generator)
            token[:rows].exponential_(generator=self.shared_generator)
        for stream in advancing:
            if not stream.is_seeded:
                continue
            if stream.request["subtalker_dosample"]:
                noise = codes[stream.slot]
                for part in [noise] if self.draws_codes_at_once else noise.split(1):
                    part.exponential_(generator=stream.generator)
            if stream.request["do_sample"]:
                token[stream.slot].exponential_(generator=stream.generator)

    def check_ended(self, keep: int) -> None:
        """Learn which streams have ended after the frames launched so far. The last `keep` may still be running."""
        while len(self.launched) > keep:
            event, ended, flags, steps = self.launched.popleft()
            if event:
                event.synchronize()
            if reason := why_stopped(*steps):
                self.fail_stopped(reason, flags)
            ended = ended.tolist()
            for stream, index in flags:
                if stream.finished:
                    continue
                has_ended = ended[index]
                stream.checked += 1
                stream.was_cut_off = stream.checked == stream.max_frames and not has_ended
                stream.finished = has_ended or stream.was_cut_off
        for stream in self.active:
            stream.finished |= stream.text_has_failed()

    def fail_stopped(self, reason: str, flags: list[tuple[Stream, int]]) -> None:
        """The megakernel has stopped in a frame of these streams, whose state is worthless now."""
        error = megakernel_stopped(self.decoder, reason)
        for stream, _ in flags:
            if not stream.finished:
                stream.put(type(error)(*error.args))  # a new one for each thread
                stream.cancelled = stream.finished = True

    def decode_chunks(self, streams: list[Stream]) -> None:
        """Hand complete chunks to the codec: one of each stream at a time, as they must be decoded in order."""
        while True:
            by_size = collections.defaultdict(list)
            for stream in streams:
                by_size[self.next_chunk(stream)].append(stream)
            by_size.pop(0, None)
            if not by_size:
                return
            # Small chunks first: they are those of streams with little audio ahead of their playback.
            for size, ready in sorted(by_size.items()):
                for first in range(0, len(ready), MAX_CODEC_ROWS):
                    self.decode(ready[first : first + MAX_CODEC_ROWS], size)

    def decode(self, streams: list[Stream], size: int) -> None:
        """Decode the next `size` frames of these streams."""
        sources = [self.single[1].codes[0]] if self.in_single else [self.slots.codes[stream.slot] for stream in streams]
        codes = [source[stream.decoded : stream.decoded + size] for source, stream in zip(sources, streams)]
        audio = self.codec.feed_rows([stream.slot for stream in streams], torch.stack(codes))
        for stream in streams:
            stream.decoded += size
            if not stream.finished:
                stream.chunk_size = next(stream.chunk_sizes)
        self.decoding.put((streams, audio))

    def lead(self, stream: Stream) -> float:
        """Seconds of audio ahead of the playback of a listener who plays from the first chunk on."""
        played = 0.0 if stream.first_delivered_at is None else time.monotonic() - stream.first_delivered_at
        return stream.delivered * self.seconds_per_frame - played

    def next_chunk(self, stream: Stream) -> int:
        """Frames of the chunk to decode next, 0 if it is not complete."""
        if stream.cancelled:
            return 0
        available = stream.valid - stream.decoded
        if stream.finished or stream.lacks_text():
            return next((size for size in BATCH_CHUNK_SIZES if size <= available), 0)
        return stream.chunk_size if stream.chunk_size <= available else 0

    def remove_finished(self) -> None:
        """Free the slots of finished streams."""
        for stream in [*self.active]:
            if not stream.finished or (not stream.cancelled and stream.decoded < stream.valid):
                continue
            self.active.remove(stream)
            self.in_single = False
            heapq.heappush(self.free_slots, stream.slot)
            if not stream.cancelled:
                # After its slot: whoever has seen the end can rely on a free one.
                self.decoding.put(([stream], stream.text_error or END))

    # ---- The delivery thread

    def deliver(self) -> None:
        """Give decoded audio to its listeners, in the order of the codec."""
        while (item := self.decoding.get()) is not None:
            streams, audio = item
            is_audio = isinstance(audio, PendingAudio)
            try:
                for stream, samples in zip(streams, audio.wait() if is_audio else [audio]):
                    if not stream.cancelled:
                        if is_audio:
                            self.count_delivered(stream, samples)
                        stream.put(samples)
            except Exception as error:
                log.exception("the engine has stopped")
                self.fail(error)
                for stream in streams:  # an END must not follow: their audio is not complete
                    stream.put(RuntimeError(self.why_closed))
                    stream.cancelled = True
        self.end_all()  # after the audio that there is

    def end_all(self) -> None:
        with self.changed:
            streams = [stream for stream in self.open if not stream.cancelled]
            self.active.clear()
            self.waiting.clear()
        for stream in streams:
            stream.put(RuntimeError(self.why_closed))  # a new error for each thread

    def count_delivered(self, stream: Stream, samples: np.ndarray) -> None:
        with self.changed:
            stream.unread += 1
            stream.delivered += round(len(samples) / self.rate / self.seconds_per_frame)
            if stream.first_delivered_at is None:
                stream.first_delivered_at = time.monotonic()
                self.changed.notify_all()

    # ---- Lifetime

    def close(self) -> None:
        """End all streams with an error and stop. Does not wait for other calls on the model."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.prompt_thread.shutdown(cancel_futures=True)
        self.thread.join()
        self.delivery.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()
