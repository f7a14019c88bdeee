"""Encoding in helper processes: the bytes are the same as in the server, and a helper that ends is replaced."""

import asyncio
import contextlib
import select
import signal
import subprocess

import numpy as np
import pytest

pytest.importorskip("av")

from qwen3_tts_cuda_graphs.serving.audio_formats import with_length
from qwen3_tts_cuda_graphs.serving.child_process import start_module, with_socket
from qwen3_tts_cuda_graphs.serving.encoders import MAX_READY, Encoders, LocalStream, RemoteStream, answers_to
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.messages import pack

SIZES = 1920, 1920, 3840, 7680, 15360, 1000  # samples of each chunk
LIMIT = 60.0


@contextlib.asynccontextmanager
async def running(count):
    encoders = Encoders(count)
    encoders.start()
    async with asyncio.timeout(LIMIT):
        while len(encoders.helpers) < count:
            await asyncio.sleep(0.02)
        try:
            yield encoders
        finally:
            encoders.close()


async def encoded(stream, name, seed=0):
    random, pieces = np.random.default_rng(seed), []
    for size in SIZES:
        pieces.append(await stream.add(random.normal(0, 3000, size).astype(np.int16)))
    pieces.append(await stream.finish())
    data = b"".join(with_length(name, 24000, stream.samples, pieces))
    stream.close()
    return data


def without_serial(data, name):
    """Each Ogg stream has a random serial number, which also changes its checksums."""
    if name != "opus":
        return data
    pages = data.split(b"OggS")
    return [page[:10] + page[22:] for page in pages]  # without serial number, page number and checksum


def test_the_same_bytes_as_in_the_server():
    """Several streams at once in one helper must not mix."""

    async def check():
        async with running(1) as encoders:
            kinds = [(name, 24000, speed) for name in ("mp3", "opus", "aac", "flac", "wav") for speed in (1.0, 1.5)]
            kinds += [("mulaw", 24000, 1.0, 8000), ("mp3", 24000, 1.5, 44100, 128), ("flac", 24000, 1.0, 16000)]
            streams = [encoders.open(*kind) for kind in kinds]
            assert [type(stream) for stream in streams] == [RemoteStream] * 8 + [LocalStream] + [RemoteStream] * 4
            remote = await asyncio.gather(
                *(encoded(stream, kinds[seed][0], seed) for seed, stream in enumerate(streams))
            )
            assert encoders.helpers[0].streams == 0
            for seed, (kind, data) in enumerate(zip(kinds, remote)):
                expected = await encoded(LocalStream(kind), kind[0], seed)
                assert without_serial(data, kind[0]) == without_serial(expected, kind[0]), kind

    asyncio.run(check())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_is_replaced(sent):
    """Its streams get an error, others continue, and new ones use another helper. The same for a helper that hangs."""

    async def check():
        async with running(2) as encoders:
            first, second = (encoders.open("mp3", 24000, 1.0) for _ in range(2))
            samples = np.zeros(15360, np.int16)
            assert first.helper is not second.helper and await first.add(samples)
            first.helper.popen.send_signal(sent)
            first.helper.seconds = 1.0
            with pytest.raises(ApiError, match="ask again"):
                while True:
                    await first.add(samples)
            first.close()
            assert len(await encoded(second, "mp3")) > 1000
            assert len(await encoded(encoders.open("mp3", 24000, 1.0), "mp3")) > 1000
            while len(encoders.helpers) < 2:
                await asyncio.sleep(0.02)

    asyncio.run(check())


def test_few_encoders_are_kept_ready():
    """One of each kind was kept, and clients may request any speed."""
    encoders, ready = {}, {}
    for number in range(30):
        kind = "mp3", 24000, 1 + number / 100
        [*answers_to(encoders, ready, dict(op="add", id=number, kind=kind), b"")]
    assert len(ready) == MAX_READY and kind in ready


def test_an_error_of_a_library_is_an_answer():
    """A stream that cannot be encoded gets an error, and the helper continues."""

    async def check():
        async with running(1) as encoders:
            with pytest.raises(RuntimeError):
                await encoders.open("mp3", 7, 1.0).add(np.zeros(1920, np.int16))
            assert len(await encoded(encoders.open("mp3", 24000, 1.0), "mp3")) > 1000

    asyncio.run(check())


def test_answers_that_nobody_takes():
    """When it was closed early, the generator yielded an error once more, which Python does not allow."""
    answers = answers_to({}, {}, dict(op="add", id=0, kind=("wav", 24000, 1.0)), b"")
    next(answers)
    answers.close()


def test_a_process_whose_server_is_gone_ends_silently():
    """When the server was killed, each of its helpers wrote a traceback, as its last answer could not be sent."""
    ours, helper = with_socket(start_module, module="encoders", stderr=subprocess.PIPE)
    ours.sendall(pack(dict(op="finish", id=0, kind=("wav", 24000, 1.0))))
    select.select([ours], [], [], LIMIT)
    ours.close()
    assert helper.communicate(timeout=LIMIT)[1] == b"" and helper.returncode == 0
