"""Continuous batching: streams of one model that share the GPU, join at the next frame and leave when they end.

    with Engine(tts, max_streams=64) as engine:
        for audio, rate in engine.stream(tts.generate_voice_clone, text="Hello!", voice_clone_prompt=prompt, seed=7):
            play(audio)

Each caller builds its prompt in its own thread and reads audio from a queue of its own. One thread, the engine's, runs
the GPU: it admits waiting requests, launches a frame of all streams, hands full chunks to the codec and finished audio
to the listeners. It never holds `changed`, the lock that listeners take, while the GPU works. It holds the model's lock
while streams advance, so that other calls on the same model wait.
"""

import asyncio
import atexit
import collections
import contextlib
import logging
import queue
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import torch

from fast.megakernel import PredictorStep
from fast.paths import MegakernelStopped, describe, why_stopped
from fast.streaming import decoder_of, growing_chunks, prepare_request
from serving.batch import Slots, frame_graph
from serving.codec import BATCH_CHUNK_SIZES, BatchCodec

log = logging.getLogger("qwen3_tts_cudagraphs")

Chunk = tuple[np.ndarray, int]
END = None
MAX_ADMISSIONS_PER_FRAME = 8  # prompts that are prefilled between two frames


class Stream:
    """One request: what to decode, how far it is, and where its audio goes."""

    def __init__(self, put: Callable):
        self.put = put  # takes audio, an exception or END; called in the engine's thread
        self.cancelled = False
        # the request
        self.request = None  # arguments of talker.generate
        self.prompt_ready = None  # a CUDA event after the kernels that built the prompt
        self.prompt_length = 0
        self.max_frames = 0
        self.reference = None  # codes that precede the speech, for the codec
        self.generator = None  # draws this stream's noise
        self.is_seeded = False  # unseeded streams of a batch share one draw
        # how far it is, in frames
        self.launched = 0  # on the GPU
        self.confirmed = 0  # known to the host to be complete
        self.decoded = 0  # handed to the codec
        self.finished = False  # its last frame is confirmed
        self.was_cut_off = False
        # its audio
        self.codec_slot = None
        self.chunk_sizes = growing_chunks()
        self.chunk_size = next(self.chunk_sizes)
        self.unread = 0  # chunks that the listener has not taken yet
        self.paused_at = None  # time at which it began to wait for its listener

    @property
    def length(self) -> int:
        """Positions of the cache in use."""
        return self.prompt_length + self.launched


class Engine:
    """Streams that share one model. `close` it, or use it in a `with` statement."""

    def __init__(
        self, tts, max_streams: int = 64, max_unread: int = 64, max_waiting: int = 1024, patience: float = 10.0
    ):
        """Capture graphs for up to `max_streams` streams.

        max_unread: chunks that a listener may leave unread before its stream pauses
        max_waiting: requests that may wait for a place
        patience: seconds after which a paused stream loses its place to a waiting one
        """
        if max_streams < 1 or max_unread < 1:
            raise ValueError(f"max_streams is {max_streams} and max_unread {max_unread}, both must be at least 1")
        self.tts = tts
        self.decoder = decoder_of(tts)
        self.talker = self.decoder.talker
        self.device = self.talker.device
        self.on_gpu = self.device.type == "cuda"
        self.rate = tts.model.speech_tokenizer.get_output_sample_rate()
        self.max_streams = max_streams
        self.max_unread = max_unread
        self.max_waiting = max_waiting
        self.patience = patience
        self.single = self.decoder.graphs_for(1)
        # The megakernel draws the noise of a frame's 15 codes in one call, upstream's layers one code at a time.
        self.draws_codes_at_once = isinstance(self.single[1].step, PredictorStep)
        self.shared_generator = self.make_generator(None)
        with self.decoder.lock:
            self.capture()

        self.waiting = collections.deque()
        self.active = []  # admitted streams; active[i] is in slot i, but see in_single
        self.single_stopped = False  # True: the megakernel has stopped, all frames are those of the batch
        self.in_single = False  # True: there is one active stream, and its state is in the single-row graphs
        self.steps = collections.deque()  # frames launched whose `ended` flags the host has not read yet
        self.chunks = collections.deque()  # (streams, their audio once it is decoded), in the codec's order
        self.free_codec_slots = list(range(max_streams))
        self.advancing = None  # host copy of slots.advance
        self.closing = False
        self.why_closed = "the engine has been closed"
        self.changed = threading.Condition()
        if self.on_gpu:  # a CUDA stream of its own, so that callers can build prompts beside the frames
            self.cuda_stream = torch.cuda.Stream(self.device, priority=-1)
            self.cuda_stream.wait_stream(torch.cuda.current_stream(self.device))
        self.thread = threading.Thread(target=self.run, name="speech engine", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        powers_of_two = [1 << i for i in range(self.max_streams.bit_length())]
        self.batch_sizes = [size for size in powers_of_two if size < self.max_streams] + [self.max_streams]
        self.slots = Slots(self.talker, self.max_streams, self.decoder.max_seq_len)
        self.graphs = {}
        for rows in reversed(self.batch_sizes):  # the largest first: the others fit into its memory
            log.info("capturing frames of up to %d streams", rows)
            self.graphs[rows] = frame_graph(self.talker, self.single[1], self.slots, rows)
            self.graphs[rows].capture(self.decoder.pool)
        log.info("capturing the codec for up to %d streams", self.max_streams)
        self.codec = BatchCodec(self.tts.model.speech_tokenizer, self.max_streams, self.batch_sizes)

    # ---- For listeners, in any thread

    def stream(self, method: Callable, *, text: str, seed: int | None = None, **kwargs) -> Iterator[Chunk]:
        """Speak one text and yield (float32 samples, sample rate) while it is generated.

        method: tts.generate_voice_clone, generate_custom_voice or generate_voice_design
        seed: seeds a generator of this stream's own. On a CPU in float32 the speech does not depend on other streams;
            on a GPU a seed reproduces only if the stream is alone throughout, as rounding depends on the batch size.
        kwargs: the method's other arguments

        Chunks have 1, 1, 2, 4, 8, 8, ... frames. The request is queued at this call, and mistakes raise here.
        """
        audio = queue.SimpleQueue()
        stream = Stream(audio.put)
        self.submit(stream, method, text, seed, kwargs)
        chunks = self.chunks_of(stream, audio)
        next(chunks)  # enters its `try`, so that closing it before the first chunk cancels the request, too
        return chunks

    def chunks_of(self, stream: Stream, audio: queue.SimpleQueue) -> Iterator[Chunk]:
        try:
            yield None  # to `stream`
            while (item := audio.get()) is not END:
                yield self.take_item(stream, item), self.rate
            self.warn_if_cut_off(stream)
        finally:
            self.cancel(stream)

    async def astream(self, method: Callable, *, text: str, seed: int | None = None, **kwargs) -> AsyncIterator[Chunk]:
        """The same for asyncio, but queued at the first iteration, where mistakes raise. Never blocks the loop."""
        loop = asyncio.get_running_loop()
        audio = asyncio.Queue()

        def put(item) -> None:
            try:
                loop.call_soon_threadsafe(audio.put_nowait, item)
            except RuntimeError:  # the loop has been closed
                self.cancel(stream)

        stream = Stream(put)
        try:
            await asyncio.to_thread(self.submit, stream, method, text, seed, kwargs)
            while (item := await audio.get()) is not END:
                yield self.take_item(stream, item), self.rate
            self.warn_if_cut_off(stream)
        finally:
            self.cancel(stream)

    def take_item(self, stream: Stream, item) -> np.ndarray:
        if isinstance(item, Exception):
            raise item
        with self.changed:
            stream.unread -= 1
            self.changed.notify_all()
        return item

    def warn_if_cut_off(self, stream: Stream) -> None:
        if stream.was_cut_off:
            name = "max_seq_len" if stream.max_frames + 1 < stream.request["max_new_tokens"] else "max_new_tokens"
            warnings.warn(
                f"the speech was cut off after {stream.max_frames} frames, before its end: raise {name}", stacklevel=3
            )

    def cancel(self, stream: Stream) -> None:
        with self.changed:
            stream.cancelled = True
            self.changed.notify_all()

    @torch.no_grad()
    def submit(self, stream: Stream, method: Callable, text: str, seed: int | None, kwargs: dict) -> None:
        """Build the prompt in the caller's thread and queue the request."""
        if method.__self__ is not self.tts:
            raise ValueError("this engine speaks with another model: use a method of the model it was made with")
        with self.changed:
            if len(self.waiting) >= self.max_waiting:
                raise RuntimeError(f"{len(self.waiting)} requests are waiting already: try again later")
        request, stream.max_frames, stream.reference = prepare_request(self.decoder, method, text, **kwargs)
        request["attention_mask"] = request["attention_mask"].cpu()  # here, so that the engine need not wait for it
        stream.request = request
        stream.prompt_length = request["attention_mask"].shape[1]
        stream.generator = self.make_generator(seed)
        stream.is_seeded = seed is not None
        stream.prompt_ready = self.decoder.record_event()
        with self.changed:
            if self.closing:
                raise RuntimeError(self.why_closed)
            self.waiting.append(stream)
            self.changed.notify_all()

    def make_generator(self, seed: int | None) -> torch.Generator:
        """A generator in the state that a call alone has after torch.manual_seed(seed).

        On a GPU `Decoder.frames` seeds its own generator with one draw from torch's default one.
        """
        generator = torch.Generator(self.device)
        if seed is None:
            generator.manual_seed(int(torch.randint(1 << 62, ())))
            return generator
        generator.manual_seed(seed)
        if self.on_gpu:
            generator.manual_seed(int(torch.randint(1 << 62, (), device=self.device, generator=generator)))
        return generator

    # ---- The engine's thread

    def run(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            log.exception("the engine has stopped")
            with self.changed:
                self.why_closed = f"the engine has stopped: {error}"
                self.closing = True  # `submit` refuses from here on
        if self.on_gpu:
            with contextlib.suppress(Exception):
                self.cuda_stream.synchronize()
                self.codec.stream.synchronize()  # what they write is freed with the engine
        self.end_all()

    def serve(self) -> None:
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.cuda_stream)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.waiting or self.active)
                if self.closing:
                    return
            with self.decoder.lock:  # other calls on this model wait while streams advance
                self.run_until_idle()
            self.wait_for_listeners()

    @torch.no_grad()
    def run_until_idle(self) -> None:
        """Run frames until no stream can advance."""
        if self.on_gpu:
            self.cuda_stream.wait_stream(self.decoder.last_stream or self.cuda_stream)
            self.decoder.last_stream = self.cuda_stream
        while not self.closing:
            self.drop_cancelled_and_overdue()
            self.admit()
            launched = self.launch()
            # The host usually runs one frame behind, so that the GPU never waits for it. It catches up when the first
            # chunk of a new stream is due, when nothing was launched, and on a CPU.
            first_chunk_due = any(stream.confirmed == 0 for stream in self.active) and not self.waiting
            catch_up = first_chunk_due or not launched or not self.on_gpu
            self.read_ended_flags(keep=0 if catch_up else 1)
            self.decode_chunks()
            self.deliver(wait=catch_up)
            self.remove_finished()
            if not launched and not self.chunks:
                if self.in_single:
                    self.leave_single()  # another call may use the single-row graphs meanwhile
                return

    def wait_for_listeners(self) -> None:
        """Wait until a stream may advance, can be admitted or was cancelled. The timeout is for `patience`."""
        with self.changed:
            self.changed.wait_for(self.has_work, timeout=0.1)

    def has_work(self) -> bool:
        can_admit = self.waiting and len(self.active) < self.max_streams
        can_advance = any(stream.cancelled or stream.unread < self.max_unread for stream in self.active)
        return bool(self.closing or not self.active or can_admit or can_advance)

    def drop_cancelled_and_overdue(self) -> None:
        """Drop cancelled requests. If all slots are taken, evict streams paused beyond `patience`, oldest first."""
        with self.changed:
            self.waiting = collections.deque(stream for stream in self.waiting if not stream.cancelled)
            places_needed = len(self.waiting) if len(self.active) == self.max_streams else 0
        paused = [stream for stream in self.active if stream.paused_at is not None]
        paused.sort(key=lambda stream: stream.paused_at)
        for stream in paused[:places_needed]:
            if time.monotonic() - stream.paused_at > self.patience:
                message = f"nobody has read this stream for {self.patience:g} s: its place was given away"
                stream.put(TimeoutError(message))
                stream.cancelled = True
        for stream in self.active:
            stream.finished |= stream.cancelled

    def admit(self) -> None:
        """Prefill waiting requests: a few at a time, so that nobody waits long for the next frame."""
        for _ in range(MAX_ADMISSIONS_PER_FRAME):
            with self.changed:
                if not self.waiting or len(self.active) == self.max_streams:
                    return
                stream = self.waiting.popleft()
            try:
                self.prefill(stream)
            except Exception as error:
                if stream in self.active:
                    raise  # slots and streams no longer agree
                log.exception("a request failed")
                self.free_codec_slot(stream)
                stream.put(error)

    def prefill(self, stream: Stream) -> None:
        talker, predictor = self.single
        if self.in_single:
            self.leave_single()
        if not self.active and why_stopped(*self.single):  # in a call outside of the engine
            self.single_stopped = True
        request = stream.request
        if stream.prompt_ready:
            stream.prompt_ready.wait()
            for value in request.values():
                if torch.is_tensor(value) and value.is_cuda:
                    value.record_stream(self.cuda_stream)  # made on the caller's CUDA stream
        talker.configure(**request)
        predictor.configure(**request)
        self.use_generator(stream)
        predictor.begin(**request)
        talker.begin(**request)
        stream.request = {name: request[name] for name in ("do_sample", "subtalker_dosample", "max_new_tokens")}

        stream.codec_slot = self.free_codec_slots.pop()
        self.codec.reset_row(stream.codec_slot)
        if stream.reference is not None:
            self.codec.prime(stream.codec_slot, stream.reference)
        self.active.append(stream)
        self.in_single = True
        if len(self.active) > 1:
            self.leave_single()

    def use_generator(self, stream: Stream) -> None:
        """Let the single-row graphs draw from this stream's generator."""
        talker, predictor = self.single
        if self.on_gpu:
            talker.generator.set_state(stream.generator.get_state())
            return
        for sampling, sampled in ((talker.sampling, "do_sample"), (predictor.sampling, "subtalker_dosample")):
            sampling.generator = stream.generator if stream.request[sampled] else torch.Generator()

    def leave_single(self) -> None:
        """The last stream moves from the single-row graphs to its slot."""
        slot = len(self.active) - 1
        stream = self.active[slot]
        if self.on_gpu:
            stream.generator.set_state(self.single[0].generator.get_state())
        self.slots.copy_from_single(slot, *self.single, stream.length)
        self.in_single = False

    def enter_single(self) -> None:
        """The only stream moves from its slot to the single-row graphs."""
        (stream,) = self.active
        self.use_generator(stream)
        self.slots.copy_to_single(0, *self.single, stream.length)
        self.in_single = True

    def launch(self) -> bool:
        """Launch one frame of every stream that may advance. Returns whether there was one."""
        for stream in self.active:
            is_paused = stream.unread >= self.max_unread
            stream.paused_at = (stream.paused_at or time.monotonic()) if is_paused else None
        advancing = [
            stream.launched < stream.max_frames and not stream.finished and stream.paused_at is None
            for stream in self.active
        ]
        if not any(advancing):
            return False

        if self.single_stopped and self.in_single:
            self.leave_single()
        if len(self.active) == 1 and not self.in_single and not self.waiting and not self.single_stopped:
            self.enter_single()
        if self.in_single:
            talker, predictor = self.single
            predictor.replay()
            talker.replay()
            ended = talker.ended
        else:
            self.set_advancing(advancing)
            self.draw_noise(advancing)
            rows = next(rows for rows in self.batch_sizes if rows >= len(self.active))
            self.graphs[rows].replay()
            ended = self.slots.ended[: len(self.active)]

        on_host = torch.empty(ended.shape, dtype=torch.bool, device="cpu", pin_memory=self.on_gpu)
        on_host.copy_(ended, non_blocking=True)
        streams = [stream if advances else None for stream, advances in zip(self.active, advancing)]
        self.steps.append((self.decoder.record_event(), on_host, streams))
        for stream in filter(None, streams):
            stream.launched += 1
        return True

    def set_advancing(self, advancing: list[bool]) -> None:
        if advancing != self.advancing:
            mask = torch.zeros(self.max_streams, dtype=torch.bool, pin_memory=self.on_gpu)
            mask[: len(advancing)] = torch.tensor(advancing)
            self.slots.advance.copy_(mask, non_blocking=True)
            self.advancing = advancing

    def draw_noise(self, advancing: list[bool]) -> None:
        """The random numbers of the next frame. A seeded stream draws them as it would alone, the others together."""
        codes, token = self.slots.predictor_sampling.noise, self.slots.talker_sampling.noise
        if not all(stream.is_seeded for stream in self.active):
            codes[: len(self.active)].exponential_(generator=self.shared_generator)
            token[: len(self.active)].exponential_(generator=self.shared_generator)
        for slot, stream in enumerate(self.active):
            if not (advancing[slot] and stream.is_seeded):
                continue
            if stream.request["subtalker_dosample"]:
                for part in [codes[slot]] if self.draws_codes_at_once else codes[slot].split(1):
                    part.exponential_(generator=stream.generator)
            if stream.request["do_sample"]:
                token[slot].exponential_(generator=stream.generator)

    def read_ended_flags(self, keep: int) -> None:
        """Confirm launched frames, and learn whether their streams have ended. The last `keep` may still be running."""
        while len(self.steps) > keep:
            event, ended, streams = self.steps.popleft()
            if event:
                event.synchronize()
            if not self.single_stopped and (reason := why_stopped(*self.single)):
                self.single_stopped = True
                self.decoder.path = describe(reason)
                for stream in self.active:
                    stream.put(MegakernelStopped(f"{reason}: the speech is lost, the next request runs without it"))
                    stream.cancelled = stream.finished = True
            for stream, has_ended in zip(streams, ended.tolist()):
                if stream is None or stream.finished:
                    continue
                stream.confirmed += 1
                stream.was_cut_off = stream.confirmed == stream.max_frames and not has_ended
                stream.finished = has_ended or stream.was_cut_off

    def decode_chunks(self) -> None:
        """Hand full chunks to the codec, those of the same size together."""
        by_size = collections.defaultdict(list)
        for slot, stream in enumerate(self.active):
            while not stream.cancelled and (size := self.next_chunk(stream)):
                codes = self.single[1].codes[0] if self.in_single else self.slots.codes[slot]
                by_size[size].append((stream, codes[stream.decoded : stream.decoded + size]))
                stream.decoded += size
                if not stream.finished:
                    stream.chunk_size = next(stream.chunk_sizes)
        # The last chunks of a stream become smaller: descending sizes keep their order.
        for size in sorted(by_size, reverse=True):
            chunks = by_size[size]
            while chunks:
                now, later = self.first_of_each_stream(chunks)
                streams = [stream for stream, _ in now]
                codes = torch.stack([codes for _, codes in now])
                audio = self.codec.feed_rows([stream.codec_slot for stream in streams], codes)
                self.chunks.append((streams, audio))
                chunks = later

    @staticmethod
    def first_of_each_stream(chunks: list) -> tuple[list, list]:
        """Split into one codec batch and the rest: a stream's chunks must be decoded in order, one per batch."""
        first, further, seen = [], [], set()
        for stream, codes in chunks:
            (further if stream in seen else first).append((stream, codes))
            seen.add(stream)
        return first, further

    def next_chunk(self, stream: Stream) -> int:
        """Frames of the chunk to decode next, 0 if it is not complete."""
        available = stream.confirmed - stream.decoded
        if available >= stream.chunk_size:
            return stream.chunk_size
        if not stream.finished:
            return 0
        return next((size for size in BATCH_CHUNK_SIZES if size <= available), 0)

    def deliver(self, wait: bool) -> None:
        """Give decoded audio to its listeners."""
        while self.chunks and (wait or self.chunks[0][1].is_done()):
            streams, audio = self.chunks.popleft()
            for stream, samples in zip(streams, audio.wait()):
                if not stream.cancelled:
                    with self.changed:
                        stream.unread += 1
                    stream.put(samples)

    def remove_finished(self) -> None:
        """Free the slots of finished streams. The last stream moves into the gap."""
        in_codec = {stream for streams, _ in self.chunks for stream in streams}
        for slot in reversed(range(len(self.active))):
            stream = self.active[slot]
            has_audio_left = stream in in_codec or (not stream.cancelled and stream.decoded < stream.confirmed)
            if not stream.finished or has_audio_left:
                continue
            last = self.active.pop()
            if last is not stream:
                self.slots.move(len(self.active), slot, last.length)
                self.active[slot] = last
            self.in_single = False
            self.free_codec_slot(stream)
            if not stream.cancelled:
                stream.put(END)  # last: whoever has heard the end may count on a free slot

    def free_codec_slot(self, stream: Stream) -> None:
        if stream.codec_slot is not None:
            self.free_codec_slots.append(stream.codec_slot)
            stream.codec_slot = None

    def end_all(self) -> None:
        with self.changed:
            streams = [*self.active, *self.waiting]
            self.active.clear()
            self.waiting.clear()
        for stream in streams:
            stream.put(RuntimeError(self.why_closed))  # a new error for each thread

    # ---- Lifetime

    def close(self) -> None:
        """End all streams with an error and stop. Waits for other calls on the model that are running."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()
