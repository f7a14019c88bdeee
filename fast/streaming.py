"""Audio while it is generated: the frames of the decoder, in chunks, through the codec that keeps its state.

The codec decodes a chunk on its own CUDA stream while the decoder computes the next frame, so `stream` yields a chunk
one frame after its codes exist. The first chunk is yielded at once, and so is everything there is before a wait for
text that is still being written.
"""

import asyncio
import itertools
import numbers
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from fast.arriving_text import ArrivingText, TextReader, text_rows
from fast.prompts import decoder_of, move_to, prepare_request

Chunk = tuple[np.ndarray, int]


def stream(
    method: Callable,
    *,
    text: str | list[str] | Iterable[str],
    chunk_frames: int | None = None,
    text_timeout: float = 60.0,
    **kwargs,
) -> Iterator[Chunk]:
    """Speak one text and yield (float32 samples, sample rate) while it is generated.

    method: tts.generate_voice_clone, generate_custom_voice or generate_voice_design of an accelerated model
    text: a text, or an iterator of its pieces, as a language model writes them. Speech begins when the first tokens
        are there and waits when the text is late. The iterator runs in a thread of its own.
    kwargs: the method's other arguments. Text from an iterator is spoken with non_streaming_mode=False.
    chunk_frames: frames of 80 ms per chunk. Default: 1, 1, 2, 4, 8, 8, ..., for an early start and then fewer chunks.
    text_timeout: seconds without new text after which the stream ends with a TimeoutError

    The chunks joined are the audio of the whole call. Mistakes raise an error here, before the first chunk.
    """
    if chunk_frames is not None:
        check_chunk_frames("chunk_frames", chunk_frames)
    tts = model_of(method)
    decoder = decoder_of(tts)
    check_not_async(text)
    if is_arriving(text):
        if not 0 < text_timeout < float("inf"):
            raise ValueError(f"text_timeout is {text_timeout}, it must be above 0 and finite, in seconds")
        reader = TextReader(ArrivingText(decoder, method, **kwargs), text, text_timeout)
        return arriving_audio_chunks(tts, decoder, reader, chunk_frames)
    request, _, reference = prepare_request(decoder, method, text, **kwargs)
    return audio_chunks(tts, decoder, request, reference, chunk_frames)


def check_chunk_frames(name: str, frames: int) -> None:
    if not isinstance(frames, numbers.Integral) or frames < 1:
        raise ValueError(f"{name} is {frames}, it must be a whole number of at least 1")


def warn_each_time(warning: str | Warning) -> None:
    """`warnings.warn` shows the same text once per line of code, but no speech may be cut short silently."""
    warnings.warn_explicit(warning, UserWarning, __file__, 1)


async def astream(
    method: Callable, *, text: str | Iterable[str] | AsyncIterable[str], **kwargs
) -> AsyncIterator[Chunk]:
    """`stream` for asyncio: also takes an async iterator of pieces, and never blocks the event loop.

    Mistakes raise an error at the first iteration.
    """
    pieces = AsyncPieces(text) if hasattr(text, "__aiter__") else None
    thread = ThreadPoolExecutor(1, "speech")  # only one: `close` comes after a `next` whose caller was cancelled
    run = asyncio.get_running_loop().run_in_executor
    try:
        chunks = await run(thread, lambda: stream(method, text=pieces or text, **kwargs))
        try:
            while (chunk := await run(thread, next, chunks, None)) is not None:
                yield chunk
        finally:
            thread.submit(chunks.close)
    finally:
        if pieces:
            pieces.cancel()
        thread.shutdown(wait=False)


class AsyncPieces:
    """An async iterator of strings as an iterator for another thread."""

    def __init__(self, pieces: AsyncIterable[str]):
        self.pieces = aiter(pieces)
        self.loop = asyncio.get_running_loop()
        self.coming = None
        self.is_cancelled = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.coming = asyncio.run_coroutine_threadsafe(self.get(), self.loop)
        piece = self.coming.result()
        if piece is None:
            raise StopIteration
        return piece

    async def get(self) -> str | None:
        if self.is_cancelled:
            raise asyncio.CancelledError
        return await anext(self.pieces, None)

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.coming:
            self.coming.cancel()


def model_of(method: Callable):
    """The model whose method this is."""
    tts = getattr(method, "__self__", None)
    if tts is None:
        raise ValueError(f"{method} belongs to no model: give a method of a loaded one, as tts.generate_voice_clone")
    return tts


def check_seed(seed: int | None) -> None:
    """Whether torch takes it."""
    if seed is not None and not (isinstance(seed, numbers.Integral) and -(2**63) <= seed < 2**64):
        raise ValueError(f"seed is {seed!r}, it must be a whole number from -2**63 to 2**64 - 1")


def check_not_async(text) -> None:
    if hasattr(text, "__aiter__"):
        raise ValueError("the text is an async iterator: use astream instead of stream")


def is_arriving(text) -> bool:
    return hasattr(text, "__iter__") and not isinstance(text, str | bytes | list | tuple | dict | set)


def arriving_audio_chunks(tts, decoder, reader: TextReader, chunk_frames: int | None) -> Generator[Chunk, None, bool]:
    """`audio_chunks` of a text that is still arriving. The model is not locked before there is enough of it."""
    text = reader.text
    reader.start()
    try:
        reader.wait_until(lambda: text.can_begin)
        request = move_to(decoder.talker.device, text.begin())
        return (yield from audio_chunks(tts, decoder, request, text.reference, chunk_frames, reader))
    finally:
        reader.close()


def audio_chunks(
    tts,
    decoder,
    request: dict,
    reference: torch.Tensor | None,
    chunk_frames: int | None,
    reader: TextReader | None = None,
) -> Generator[Chunk, None, bool]:
    """Returns whether the speech has ended by itself, and not at a limit."""
    codec = tts.model.speech_tokenizer.decode.__self__
    rate = tts.model.speech_tokenizer.get_output_sample_rate()
    sizes = itertools.repeat(chunk_frames) if chunk_frames else growing_chunks()
    size = next(sizes)
    frames = []  # codes that wait for their chunk to be full
    wait_for_audio = None  # returns the samples of the chunk that the codec is decoding
    is_first = True

    with decoder.lock.take() as turn:
        codec.reset()
        if reference is not None:
            codec.feed(reference)  # prime the codec with the reference and discard that audio
        for codes in frames_of(decoder, request, reader, turn):
            if wait_for_audio is not None:  # the codec worked while this frame was computed
                with turn.paused():
                    yield wait_for_audio(), rate
                wait_for_audio = None
            text_is_late = codes is None
            if not text_is_late:
                frames.append(codes)
            if len(frames) == size or (text_is_late and frames):
                wait_for_audio = codec.feed(torch.stack(frames))
                frames = []
                size = next(sizes)
            if wait_for_audio is not None and (is_first or text_is_late):
                is_first = False
                with turn.paused():
                    yield wait_for_audio(), rate
                wait_for_audio = None
        rest = [wait_for_audio, codec.feed(torch.stack(frames)) if frames else None]
        talker, _ = decoder.graphs_for(1)
        has_ended = talker.all_ended(1, None)  # `frames` has waited for the last step
    for wait_for_audio in filter(None, rest):
        yield wait_for_audio(), rate
    return has_ended


def frames_of(decoder, request: dict, reader: TextReader | None, turn) -> Iterator[torch.Tensor | None]:
    """The codes (16,) of each frame. None: the text is late, and the next frame waits for it."""
    frames = decoder.frames(**request)
    if reader is None:
        yield from (codes[0] for codes, _ in frames)
        return
    text = reader.text
    for number in itertools.count():
        row_is_known = partial(text.has_row, number)
        if not reader.is_ready(row_is_known):
            yield None
            with turn.paused():
                reader.wait_until(row_is_known)
        if number > 0:  # the first frame sets all rows from the request
            write_text_rows(decoder, text)
        frame = next(frames, None)
        if frame is None:
            return
        codes, _ = frame
        yield codes[0]


def write_text_rows(decoder, text: ArrivingText) -> None:
    """Put the rows of tokens that have become known into the graphs' static tensor. Those it has no room for are never
    reached."""
    first, ids = text.take_ids()
    _, predictor = decoder.graphs_for(1)
    room = predictor.text.shape[1] - first
    if ids and room > 0:
        rows = text_rows(decoder, ids[:room])
        predictor.text[0, first : first + len(rows)] = rows


def growing_chunks() -> Iterator[int]:
    """Frames per chunk: an early start, then fewer chunks."""
    return itertools.chain((1, 1, 2, 4), itertools.repeat(8))
