"""The audio of one text while it is generated, chunk by chunk.

The codec decodes a chunk on its own CUDA stream while the next frame is computed, so `stream` yields a chunk one frame
after its codes are computed. It does not wait for another frame before it yields the first chunk, nor before it waits
for text that is still being written.
"""

import asyncio
import collections
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from qwen3_tts_cuda_graphs.prompts.arriving_text import TEXT_TIMEOUT, ArrivingText
from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.prompts.checks import check_counts, check_seed, is_arriving, model_of
from qwen3_tts_cuda_graphs.prompts.pieces import TextReader, aread_pieces
from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.speech.runner import Runner
from qwen3_tts_cuda_graphs.speech.speech import Speech
from qwen3_tts_cuda_graphs.speech.utterance import NewText, Utterance, growing_chunks

Chunk = tuple[np.ndarray, int]


def stream(
    method: Callable,
    *,
    text: str | list[str] | Iterable[str],
    chunk_frames: int | None = None,
    text_timeout: float = TEXT_TIMEOUT,
    seed: int | None = None,
    warn: bool = True,
    **kwargs,
) -> Iterator[Chunk]:
    """Speak one text and yield (float32 samples, sample rate) while it is generated.

    method: tts.generate_voice_clone, generate_custom_voice or generate_voice_design of an accelerated model
    text: a text, or an iterator of its pieces, as a language model writes them. Speech begins when the first tokens
        are known, and waits when the text is late. The iterator runs in a thread of its own.
    chunk_frames: frames of 80 ms per chunk. Default: 1, 1, 2, 4, 8, 8, ..., for an early start and then fewer chunks.
    text_timeout: seconds without new text after which the stream ends with a TimeoutError
    seed: gives the same speech as `torch.manual_seed(seed)` before a whole call
    warn: whether to warn if the speech is cut off at a limit
    kwargs: the method's other arguments. Text from an iterator is spoken with non_streaming_mode=False.

    The chunks joined are the audio of the whole call. Mistakes raise an error here, before the first chunk.
    """
    if chunk_frames is not None:
        check_counts(chunk_frames=chunk_frames)
    check_seed(seed)
    speech = model_of(method).speech
    speech.turns.check_process()
    sizes = itertools.repeat(chunk_frames) if chunk_frames else growing_chunks()
    if isinstance(text, TextReader) or is_arriving(text):
        reader = text if isinstance(text, TextReader) else TextReader(text)
        reader.arriving = ArrivingText(method, text_timeout, **kwargs)
        return arriving_audio_chunks(speech, reader, sizes, seed, warn)
    return audio_chunks(speech, prepare_request(method, text, **kwargs), sizes, seed, warn)


async def astream(
    method: Callable, *, text: str | Iterable[str] | AsyncIterable[str], **kwargs
) -> AsyncIterator[Chunk]:
    """`stream` for asyncio: also takes an async iterator of pieces, and never blocks the event loop.

    Mistakes raise an error at the first iteration.
    """
    reader = TextReader() if hasattr(text, "__aiter__") else None
    reading = None
    thread = ThreadPoolExecutor(1, "speech")  # one thread, so that `close` comes after a `next` that was cancelled
    run = asyncio.get_running_loop().run_in_executor
    try:
        chunks = await run(thread, lambda: stream(method, text=reader or text, **kwargs))
        if reader:
            reading = asyncio.create_task(aread_pieces(text, reader.push))
        try:
            while (chunk := await run(thread, next, chunks, None)) is not None:
                yield chunk
        finally:
            thread.submit(chunks.close)
    finally:
        if reading:
            reading.cancel()
            reader.push(asyncio.CancelledError())  # the thread may be waiting for text
        thread.shutdown(wait=False)


def arriving_audio_chunks(
    speech: Speech, reader: TextReader, sizes: Iterator[int], seed: int | None, warn: bool
) -> Generator[Chunk, None, bool]:
    """`audio_chunks` of a text that is still arriving. Waits for the model's turn only once there is enough text."""
    reader.start()
    try:
        reader.wait_until(lambda: reader.arriving.can_begin)
        return (yield from audio_chunks(speech, reader.arriving.begin(), sizes, seed, warn, reader))
    finally:
        reader.close()


def audio_chunks(
    speech: Speech,
    request: Request,
    sizes: Iterator[int],
    seed: int | None = None,
    warn: bool = True,
    reader: TextReader | None = None,
) -> Generator[Chunk, None, bool]:
    """Speak a request chunk by chunk. Returns whether the speech has ended by itself, and not at a limit.

    sizes: frames of each chunk
    reader: has the rest of a text that is still arriving
    """
    runner = speech.runner
    utterance = speech.utterance(request, sizes, seed)
    pending = collections.deque()  # Batch, each of one chunk
    is_first = True

    with speech.turns.take(on_lost=lambda: runner.release(utterance)) as turn:
        runner.enter()
        runner.require_row()
        for _, error in runner.admit([utterance]):
            raise error
        try:
            while not utterance.is_complete():
                if reader:
                    feed_text(reader, runner, utterance)
                older_chunks = len(pending)
                runner.step([utterance], pending.append)
                is_late = utterance.lacks_text() and not utterance.finished
                # Waits for the audio of this step only if it is the first, or before a wait for text.
                while pending and (is_first or is_late or older_chunks > 0 or pending[0].audio.is_ready()):
                    is_first = False
                    older_chunks -= 1
                    with turn.paused():
                        yield pending.popleft().audio.wait()[0], speech.rate
                if is_late:  # keeps its turn meanwhile, for at most `text_timeout`
                    reader.wait_until(lambda: reader.arriving.has_text_for(utterance.launched))
        finally:
            if turn.is_current():
                runner.release(utterance)
    for batch in pending:
        yield batch.audio.wait()[0], speech.rate
    if warn:
        utterance.warn_if_cut_off()
    return not utterance.was_cut_off


def feed_text(reader: TextReader, runner: Runner, utterance: Utterance) -> None:
    """Hand new text to the utterance, for the next frame and, if there is enough, for the frame after it: without that
    one the utterance would lack text after each frame, and each of its chunks would have one frame."""
    arriving = reader.arriving
    reader.take_until(lambda: arriving.has_text_for(utterance.launched + 1))
    if new := arriving.take_embeddings():
        utterance.new_text.append(NewText(*new, runner.record_event()))
