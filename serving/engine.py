"""Continuous batching: streams of one model that share the GPU, join at the next frame and leave when they end.

    with Engine(tts, max_streams=64) as engine:
        for audio, rate in engine.stream(tts.generate_voice_clone, text="Hello!", voice_clone_prompt=prompt, seed=7):
            play(audio)

Each caller builds its prompt in its own thread and reads audio from a queue of its own. One thread, the engine's, runs
the GPU: it admits waiting requests, launches a frame of all streams, hands full chunks to the codec and finished audio
to the listeners. It holds no lock while the GPU works. While streams are active, other calls on the same model wait.
"""

import asyncio
import collections
import contextlib
import itertools
import logging
import queue
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import torch

from fast.streaming import build_request, check_request, check_text, decoder_of, reference_codes
from serving.batch import Slots, frame_graph
from serving.codec import BATCH_CHUNK_SIZES, BatchCodec

log = logging.getLogger("qwen3_tts_cudagraphs")

Chunk = tuple[np.ndarray, int]
GROWING_CHUNKS = (1, 1, 2, 4)  # frames of the first chunks, for an early start; then 8
END = None
ADMITTED_AT_ONCE = 8  # prompts between two frames


class Stream:
    """One request: what to decode, how far it is, and where its audio goes."""

    def __init__(self, request: dict, limit: int, reference: torch.Tensor | None, put: Callable):
        self.request = request
        self.limit = limit  # frames at most
        self.reference = reference
        self.generator = None  # of its random numbers
        self.is_seeded = False  # otherwise streams of a batch may share one draw
        self.put = put  # takes audio, an exception or END, in the engine's thread
        self.sizes = itertools.chain(GROWING_CHUNKS, itertools.repeat(8))
        self.chunk_size = next(self.sizes)
        self.built = None  # an event after the kernels that built the prompt
        self.cancelled = False
        self.prompt_length = request["attention_mask"].shape[1]
        self.launched = 0  # frames
        self.made = 0  # frames of which the host knows that they exist
        self.fed = 0  # frames given to the codec
        self.finished = False  # its last frame is made
        self.codec_slot = None
        self.unread = 0  # chunks that the listener has not taken yet
        self.paused_at = None  # since when it waits for its listener

    @property
    def length(self) -> int:
        """Positions of the cache in use."""
        return self.prompt_length + self.launched


class Engine:
    def __init__(self, tts, max_streams: int = 64, max_unread: int = 64, patience: float = 10.0):
        """Capture graphs for up to `max_streams` streams.

        max_unread: chunks that a listener may leave unread before its stream pauses
        patience: seconds after which a paused stream loses its place to a waiting one
        """
        self.tts = tts
        self.decoder = decoder_of(tts)
        self.talker = self.decoder.talker
        self.device = self.talker.device
        self.on_gpu = self.device.type == "cuda"
        self.rate = tts.model.speech_tokenizer.get_output_sample_rate()
        self.max_streams = max_streams
        self.max_unread = max_unread
        self.patience = patience
        self.single = self.decoder.graphs_for(1)
        self.is_megakernel = hasattr(self.single[1].step, "logits")
        self.shared_generator = self.generator(None)
        self.capture()

        self.waiting = collections.deque()
        self.active = []  # streams; the index is the slot, unless the only one is in the single-row graphs
        self.in_single = False  # whether active[0] is there
        self.steps = collections.deque()  # launched, and not yet looked at
        self.chunks = collections.deque()  # in the codec
        self.free_codec_slots = list(range(max_streams))
        self.advancing = None  # the mask that is on the device
        self.closing = False
        self.changed = threading.Condition()
        if self.on_gpu:
            self.cuda_stream = torch.cuda.Stream(self.device, priority=-1)
            self.cuda_stream.wait_stream(torch.cuda.current_stream(self.device))
        self.thread = threading.Thread(target=self.run, name="speech engine", daemon=True)
        self.thread.start()

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        batches = [size for size in (1 << i for i in range(20)) if size < self.max_streams] + [self.max_streams]
        self.slots = Slots(self.talker, self.max_streams, self.decoder.max_seq_len)
        self.graphs = {}
        for rows in batches[::-1]:  # the largest first: the others fit into its memory
            log.info("capturing frames of up to %d streams", rows)
            graph = frame_graph(self.talker, self.single[1], self.slots, rows)
            graph.capture(self.decoder.pool)
            self.graphs[rows] = graph
        self.batches = batches
        log.info("capturing the codec for up to %d streams", self.max_streams)
        self.codec = BatchCodec(self.tts.model.speech_tokenizer, self.max_streams, batches)

    # ---- for listeners, in any thread

    def stream(self, method: Callable, *, text: str, seed: int | None = None, **kwargs) -> Iterator[Chunk]:
        """Speak one text and yield (float32 samples, sample rate) while it is generated.

        method and kwargs: as for generate.stream
        seed: random numbers of its own; the same seed gives the same speech, whoever else is there
        """
        audio = queue.SimpleQueue()
        stream = self.submit(method, text, seed, kwargs, audio.put)
        return self.chunks_of(stream, audio)

    def chunks_of(self, stream: Stream, audio: queue.SimpleQueue) -> Iterator[Chunk]:
        try:
            while (item := audio.get()) is not END:
                yield self.received(stream, item), self.rate
        finally:
            self.cancel(stream)

    async def astream(self, method: Callable, *, text: str, seed: int | None = None, **kwargs) -> AsyncIterator[Chunk]:
        """The same for asyncio. The event loop is never blocked."""
        loop = asyncio.get_running_loop()
        audio = asyncio.Queue()

        def put(item) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(audio.put_nowait, item)

        stream = await asyncio.to_thread(self.submit, method, text, seed, kwargs, put)
        try:
            while (item := await audio.get()) is not END:
                yield self.received(stream, item), self.rate
        finally:
            self.cancel(stream)

    def received(self, stream: Stream, item) -> np.ndarray:
        if isinstance(item, Exception):
            raise item
        with self.changed:
            stream.unread -= 1
            self.changed.notify_all()
        return item

    def cancel(self, stream: Stream) -> None:
        with self.changed:
            stream.cancelled = True
            self.changed.notify_all()

    @torch.no_grad()
    def submit(self, method: Callable, text: str, seed: int | None, kwargs: dict, put: Callable) -> Stream:
        """Build the prompt in the caller's thread and queue the request. Raises an error if the input is bad."""
        if kwargs.get("voice_clone_prompt") is None and kwargs.get("ref_audio") is not None:
            kwargs["voice_clone_prompt"] = self.tts.create_voice_clone_prompt(
                kwargs.pop("ref_audio"), kwargs.pop("ref_text", None), kwargs.pop("x_vector_only_mode", False)
            )
        request = build_request(method, text=check_text(text), **kwargs)
        limit = check_request(self.decoder, request)
        request["attention_mask"] = request["attention_mask"].cpu()  # here, so that the engine need not wait for it
        stream = Stream(request, limit, reference_codes(kwargs.get("voice_clone_prompt")), put)
        stream.generator = self.generator(seed)
        stream.is_seeded = seed is not None
        stream.built = self.decoder.record_event()
        with self.changed:
            if self.closing:
                raise RuntimeError("the engine has been closed")
            self.waiting.append(stream)
            self.changed.notify_all()
        return stream

    def generator(self, seed: int | None) -> torch.Generator:
        """Random numbers as a call alone has them after torch.manual_seed(seed)."""
        generator = torch.Generator(self.device)
        if seed is None:
            generator.manual_seed(int(torch.randint(1 << 62, ())))
            return generator
        generator.manual_seed(seed)
        if self.on_gpu:
            generator.manual_seed(int(torch.randint(1 << 62, (), device=self.device, generator=generator)))
        return generator

    # ---- the engine's thread

    def run(self) -> None:
        if self.on_gpu:  # a CUDA stream of its own, so that callers can build prompts beside the frames
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.cuda_stream)
        while True:
            with self.changed:
                while not (self.closing or self.waiting or self.active):
                    self.changed.wait()
                if self.closing:
                    break
            with self.decoder.lock:  # calls on the same model wait until no stream is active
                self.speak()
        self.end_all(RuntimeError("the engine has been closed"))

    @torch.no_grad()
    def speak(self) -> None:
        """Frame after frame until nobody listens any more."""
        if self.on_gpu:
            self.cuda_stream.wait_stream(self.decoder.last_stream or self.cuda_stream)
            self.decoder.last_stream = self.cuda_stream
        while (self.waiting or self.active) and not self.closing:
            try:
                self.drop_cancelled()
                self.admit()
                launched = self.launch()
                first_audio = any(stream.made == 0 for stream in self.active) and not self.waiting
                # Otherwise the host is one frame behind, so that the GPU never waits for it.
                wait = first_audio or not launched or not self.on_gpu
                self.look_at_steps(keep=0 if wait else 1)
                self.decode_chunks()
                self.deliver(wait)
                self.leave()
                if not launched and not self.chunks:
                    self.wait_for_listeners()
            except Exception as error:  # of the GPU or of the engine itself: nothing can go on
                log.exception("the engine failed")
                self.end_all(error)

    def wait_for_listeners(self) -> None:
        """Every stream waits for its listener to read."""
        with self.changed:
            if not self.closing and not self.waiting:
                self.changed.wait(timeout=0.1)

    def drop_cancelled(self) -> None:
        with self.changed:
            self.waiting = collections.deque(stream for stream in self.waiting if not stream.cancelled)
            starving = bool(self.waiting) and len(self.active) == self.max_streams
        now = time.monotonic()
        for stream in self.active:
            if starving and stream.paused_at is not None and now - stream.paused_at > self.patience:
                stream.put(
                    TimeoutError(f"nobody has read this stream for {self.patience:g} s: its place was given away")
                )
                stream.cancelled = True
            if stream.cancelled:
                stream.finished = True

    def admit(self) -> None:
        """Prefill waiting requests: a few at a time, so that nobody waits long for the next frame."""
        for _ in range(ADMITTED_AT_ONCE):
            with self.changed:
                if not self.waiting or len(self.active) == self.max_streams:
                    return
                stream = self.waiting.popleft()
            try:
                self.enter(stream)
            except Exception as error:  # of this request alone
                log.exception("a request failed")
                self.forget(stream)
                stream.put(error)

    def enter(self, stream: Stream) -> None:
        talker, predictor = self.single
        if self.in_single:
            self.leave_single()
        request = stream.request
        if stream.built:
            stream.built.wait()
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
        """Let the graphs of a single row draw from this stream's generator."""
        talker, predictor = self.single
        if self.on_gpu:
            talker.generator.set_state(stream.generator.get_state())
            return
        for sampling, sampled in ((talker.sampling, "do_sample"), (predictor.sampling, "subtalker_dosample")):
            sampling.generator = stream.generator if stream.request[sampled] else torch.Generator()

    def leave_single(self) -> None:
        """The last stream moves from the graphs of a single row to its slot."""
        slot = len(self.active) - 1
        stream = self.active[slot]
        if self.on_gpu:
            stream.generator.set_state(self.single[0].generator.get_state())
        self.slots.take(slot, *self.single, stream.length)
        self.in_single = False

    def launch(self) -> bool:
        """One frame of every stream that may advance. Whether there was one."""
        for stream in self.active:
            paused = stream.unread >= self.max_unread
            stream.paused_at = (stream.paused_at or time.monotonic()) if paused else None
        advancing = [
            stream.launched < stream.limit and not stream.finished and stream.paused_at is None
            for stream in self.active
        ]
        if not any(advancing):
            return False

        if len(self.active) == 1 and not self.in_single and not self.waiting:
            self.use_generator(self.active[0])
            self.slots.give(0, *self.single, self.active[0].length)
            self.in_single = True
        if self.in_single:
            talker, predictor = self.single
            predictor.replay()
            talker.replay()
            ended = talker.ended
        else:
            self.set_advancing(advancing)
            self.draw_noise(advancing)
            rows = next(rows for rows in self.batches if rows >= len(self.active))
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
            mask = torch.zeros(self.max_streams, dtype=torch.bool)
            mask[: len(advancing)] = torch.tensor(advancing)
            self.slots.advance.copy_(mask)
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
                for part in [codes[slot]] if self.is_megakernel else codes[slot].split(1):
                    part.exponential_(generator=stream.generator)
            if stream.request["do_sample"]:
                token[slot].exponential_(generator=stream.generator)

    def look_at_steps(self, keep: int) -> None:
        """Learn from launched frames whether their streams have ended. The last `keep` may still be running."""
        while len(self.steps) > keep:
            event, ended, streams = self.steps.popleft()
            if event:
                event.synchronize()
            for stream, has_ended in zip(streams, ended.tolist()):
                if stream is None or stream.finished:
                    continue
                stream.made += 1
                stream.finished = has_ended
                if stream.made == stream.limit and not has_ended:
                    stream.finished = True
                    warnings.warn(f"the speech was cut off after {stream.limit} frames, before its end", stacklevel=2)

    def decode_chunks(self) -> None:
        """Hand full chunks to the codec, those of the same size together."""
        by_size = collections.defaultdict(list)
        for slot, stream in enumerate(self.active):
            while not stream.cancelled and (size := self.next_chunk(stream)):
                codes = self.single[1].codes[0] if self.in_single else self.slots.codes[slot]
                by_size[size].append((stream, codes[stream.fed : stream.fed + size]))
                stream.fed += size
                if not stream.finished:
                    stream.chunk_size = next(stream.sizes)
        for chunks in by_size.values():
            while chunks:  # a stream that has ended may have several chunks left, which come one after another
                batch, rest, seen = [], [], set()
                for chunk in chunks:
                    (rest if chunk[0] in seen else batch).append(chunk)
                    seen.add(chunk[0])
                streams = [stream for stream, _ in batch]
                codes = torch.stack([codes for _, codes in batch])
                self.chunks.append((streams, self.codec.feed_rows([stream.codec_slot for stream in streams], codes)))
                chunks = rest

    def next_chunk(self, stream: Stream) -> int:
        """Frames of the chunk to decode next, 0 if it is not complete."""
        available = stream.made - stream.fed
        if available >= stream.chunk_size:
            return stream.chunk_size
        if not stream.finished:
            return 0
        return next((size for size in BATCH_CHUNK_SIZES if size <= available), 0)

    def deliver(self, wait: bool) -> None:
        """Give finished audio to its listeners."""
        while self.chunks and (wait or self.chunks[0][1].is_done()):
            streams, audio_of_streams = self.chunks.popleft()
            for stream, audio in zip(streams, audio_of_streams()):
                if not stream.cancelled:
                    with self.changed:
                        stream.unread += 1
                    stream.put(audio)

    def leave(self) -> None:
        """Free the slots of finished streams. The last stream moves into the gap."""
        in_codec = {id(stream) for streams, _ in self.chunks for stream in streams}
        for slot in reversed(range(len(self.active))):
            stream = self.active[slot]
            if not stream.finished or (not stream.cancelled and stream.fed < stream.made):
                continue
            if id(stream) in in_codec:
                continue
            if not stream.cancelled:
                stream.put(END)
            last = self.active.pop()
            if last is not stream:
                self.slots.move(len(self.active), slot, last.length)
                self.active[slot] = last
            self.forget(stream)
            self.in_single = False
            self.advancing = None

    def forget(self, stream: Stream) -> None:
        if stream.codec_slot is not None:
            self.free_codec_slots.append(stream.codec_slot)
            stream.codec_slot = None

    def end_all(self, error: Exception) -> None:
        with self.changed:
            streams = [*self.active, *self.waiting]
            self.active.clear()
            self.waiting.clear()
        self.steps.clear()
        self.chunks.clear()
        self.in_single = False
        self.free_codec_slots = list(range(self.max_streams))
        for stream in streams:
            stream.put(error)

    # ---- lifetime

    def close(self) -> None:
        """End all streams with an error and stop."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()
