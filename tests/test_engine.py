"""The engine: each of the streams that share a batch gets the audio that it would get alone, whichever other streams
join, leave, stall or fail."""

import asyncio
import dataclasses
import gc
import itertools
import queue
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import GREEDY, engine_for, engine_of, frame_limits, joined, on_gpu, slow, watched

from qwen3_tts_cuda_graphs.common.loading import load, load_upstream
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast.codec import PendingAudio
from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech import runner as runner_module
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.listener import Listener, QueueFull, StreamTimeout
from qwen3_tts_cuda_graphs.speech.long_text import speak
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.speech.utterance import growing_chunks

LIMIT = 300  # seconds that any wait may take


def requests_of(voice, count: int) -> list[dict]:
    """Requests that differ in text, seed, length and settings."""
    dice = random.Random(0)
    words = "the first sound of a voice arrives before you notice that anything was asked".split()
    requests = []
    for number in range(count):
        settings = dict(temperature=dice.choice([0.6, 0.9]), top_k=dice.choice([20, 50]), top_p=dice.choice([0.8, 1.0]))
        settings |= dict(repetition_penalty=dice.choice([1.0, 1.05, 1.3]), subtalker_top_k=dice.choice([3, 50]))
        settings |= GREEDY if number % 4 == 3 else {}
        text = " ".join(dice.choices(words, k=dice.randint(1, 8)))
        requests.append(dict(text=text, seed=number, max_new_tokens=dice.randint(3, 50), **voice.arguments, **settings))
    return requests


def alone(voice, **request) -> np.ndarray:
    return joined(stream(voice.fast_method, **request))


def assert_same(audio: np.ndarray, expected: np.ndarray) -> None:
    """The audio is that of the same codes. Rows of a batch differ from a single row in the last bits of float32."""
    assert len(audio) == len(expected)
    np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)


def wait_until_idle(engine: Engine) -> None:
    """Wait until all streams have ended, and check that all rows are free again."""
    end = time.monotonic() + LIMIT
    runner = engine.runner
    while engine.counts() != (0, 0) or len(runner.free) < runner.row_count:
        assert time.monotonic() < end, "a row was never freed"
        time.sleep(0.01)
    assert sorted(runner.free) == list(range(runner.row_count)) and not runner.active


@on_gpu
def test_on_a_gpu(checkpoint):
    """A seeded stream that is alone gives the speech of a whole call; several streams have the right length and are
    finite."""
    tts = load(str(checkpoint("base", "0.6B")), max_seq_len=256, rows=6)
    prompt = speaker_prompt(torch.randn(1024, generator=torch.Generator().manual_seed(0)))
    request = dict(text="Hello there.", language="English", voice_clone_prompt=prompt)
    torch.manual_seed(7)
    expected = joined(stream(tts.generate_voice_clone, max_new_tokens=31, **request))

    def speak(number, tokens=20):
        return joined(engine.stream(tts.generate_voice_clone, seed=number, max_new_tokens=tokens + number, **request))

    with Engine(tts) as engine, ThreadPoolExecutor(12) as threads:
        assert gc.get_freeze_count()  # no long collections meanwhile
        np.testing.assert_array_equal(speak(7, tokens=24), expected)
        for number, audio in enumerate(threads.map(speak, range(12))):
            assert len(audio) == (19 + number) * 1920 and np.isfinite(audio).all() and np.abs(audio).max() > 0
    assert not gc.get_freeze_count()


@on_gpu
def test_the_audio_is_that_of_its_own_codes(checkpoint):
    """When a stream ends, another moves into its row, even if the GPU's codec has not read the last codes yet."""
    tts = load(str(checkpoint("base", "0.6B")), max_seq_len=256, rows=3)
    runner, codes, hidden_size = tts.speech.runner, {}, tts.model.talker.config.hidden_size
    prompt = speaker_prompt(torch.randn(hidden_size, generator=torch.Generator().manual_seed(0)))

    def keep_codes(streams, size, _):
        for one in streams:
            codes.setdefault(one, []).append(runner.rows.codes[one.row, one.decoded : one.decoded + size].clone())

    def speak(frames):
        request = dict(text="Hello there.", language="English", voice_clone_prompt=prompt)
        return joined(engine.stream(tts.generate_voice_clone, max_new_tokens=frames + 1, **request))

    with engine_of(tts, 3) as engine, ThreadPoolExecutor(8) as threads, watched(runner, "decode_chunk", keep_codes):
        spoken = [*threads.map(speak, (5, 9, 13, 17, 22, 27, 31, 36))]
    expected = [tts.model.speech_tokenizer.decode([torch.cat(chunks)])[0][0] for chunks in codes.values()]
    for audio in spoken:
        same_length = [other for other in expected if len(other) == len(audio)]
        assert min(np.abs(audio - other).max() for other in same_length) < 0.02


@pytest.mark.parametrize("name", ["x-vector", *slow("in-context", "preset")])
def test_streams_that_join_and_leave_are_as_alone(voices, name):
    """More requests than rows, started one after another: prefill, copies between rows, other rows' settings and noise
    must not leak, and a stream that is alone again returns to the graphs of a single row."""
    voice = voices(name).end_comes_up(True)
    requests = requests_of(voice, 8)
    expected = [alone(voice, **request) for request in requests]

    def speak(number):
        time.sleep(0.03 * number)
        return engine.speak(**requests[number])

    with engine_for(voice, 3) as engine, ThreadPoolExecutor(8) as threads:
        for audio, expected_audio in zip(threads.map(speak, range(8), timeout=LIMIT), expected, strict=True):
            assert_same(audio, expected_audio)


def test_a_seed_holds_beside_streams_without_one(endless):
    """Streams without a seed share one draw, which begins at row 0: it overwrote the noise of a seeded stream there."""
    request = dict(text="Hello there.", max_new_tokens=24, **endless.arguments)
    expected = alone(endless, seed=7, **request)
    with engine_for(endless, 3) as engine:
        with engine.speech.turns.take():  # the engine waits for it
            streams = [engine.ask(seed=seed, **request) for seed in (7, None, None)]
        audios = [joined(stream) for stream in streams]
    assert_same(audios[0], expected)
    assert len({audio.tobytes() for audio in audios}) == 3


def test_prompts_that_wait_together_are_prefilled_together(voice):
    """Prompts of different lengths in one batch, then gaps between the rows: no padding may leak."""
    requests = requests_of(voice, 7)
    expected = [alone(voice, **request) for request in requests]
    together, moves = [], []
    with (
        engine_for(voice, 8) as engine,
        watched(engine.runner.prefills, "load", lambda rows, _: together.append(len(rows))),
        watched(runner_module, "copy_row", lambda *rows: moves.append(rows)),
    ):
        engine.runner.prefills.prefix_cache.prefixes.clear()
        with engine.speech.turns.take():  # the engine waits for it
            streams = [engine.ask(**request) for request in requests]
        for chunks, audio in zip(streams, expected, strict=True):
            assert_same(joined(chunks), audio)
    assert together == [7] and moves


def test_prompts_that_wait_are_built_together(voice):
    """Each text has the tokens that it has alone, without the padding that upstream's own calls switch on. A request
    that is cancelled meanwhile is left out, one that cannot be built fails alone, and none waits for a long text."""
    requests = requests_of(voice, 5)
    expected = [alone(voice, **request) for request in requests]
    together, may_go_on = [], threading.Event()
    with (
        engine_for(voice, 8) as engine,
        watched(engine.tts.prompts, "build_together", lambda asked: together.append([one.text for one in asked])),
        ThreadPoolExecutor(5) as threads,
    ):
        engine.intake.thread.submit(may_go_on.wait, LIMIT)
        asked = [threads.submit(engine.ask, **request) for request in requests]
        while engine.intake.preparing < len(requests):
            time.sleep(0.001)
        items = [queue.SimpleQueue() for _ in range(3)]
        cancelled, wrong, long = (Listener(engine, own.put) for own in items)
        cancelled.ask(voice.fast_method, "Never spoken.", None, voice.arguments)
        cancelled.cancel()
        wrong.ask(voice.fast_method, "Wrong.", None, voice.arguments | dict(language="Klingon"))
        long.ask(voice.fast_method, "word " * 1600, None, voice.arguments)
        may_go_on.set()
        for chunks, audio in zip(asked, expected, strict=True):
            assert_same(joined(chunks.result(LIMIT)), audio)
        with pytest.raises(ValueError, match="Klingon"):
            raise items[1].get(timeout=LIMIT)
        with pytest.raises(ValueError, match="raise max_seq_len"):
            raise items[2].get(timeout=LIMIT)
        assert not engine.intake.queued and not engine.intake.preparing
    assert [sorted(texts) for texts in together] == [
        sorted(["Wrong.", *(request["text"] for request in requests)]),
        ["word " * 1600],
    ]


def test_a_prompt_does_not_wait_for_those_after_it(voice):
    """A request can be admitted when its own prompt is built, not when all are that are built together."""
    begin, go_on = threading.Event(), threading.Event()
    with engine_for(voice, 2) as engine:
        build = engine.tts.prompts.build_by_upstream

        def build_when_allowed(asked, key):
            assert asked.text == "Hello." or go_on.wait(LIMIT)
            return build(asked, key)

        with mock.patch.object(engine.tts.prompts, "build_by_upstream", build_when_allowed):
            engine.intake.thread.submit(begin.wait, LIMIT)
            listeners = [Listener(engine, lambda item: None) for _ in range(2)]
            built = [threading.Event() for _ in listeners]
            for listener, text, event in zip(listeners, ["Hello.", "A second one."], built):
                listener.ask(voice.fast_method, text, None, voice.arguments, event.set)
            begin.set()
            try:
                assert built[0].wait(60) and not built[1].is_set()
            finally:
                go_on.set()
            assert built[1].wait(LIMIT)
        for listener in listeners:
            listener.cancel()


def test_full_chunks_are_decoded_together(endless):
    """Streams that began at different frames hand their chunks of 8 frames to the codec at the same frame. The first
    chunks and the last one do not wait, and none waits if frames are slow."""

    def decoded(speech, together: bool) -> list[tuple[int, int, int]]:
        """(frames since idle, frames, utterances) of what the codec decodes. The second begins 3 frames later."""
        runner, active, chunks = speech.runner, [], []

        def hand_over(decoded):
            utterances, audio = decoded
            chunks.append((runner.frames_since_idle, len(audio.wait()[0]) // 1920, len(utterances)))

        runner.enter()
        assert not runner.active
        for frame in range(31):
            if frame in (0, 3):
                request = prepare_request(endless.fast_method, "Hi.", max_new_tokens=29, **endless.arguments)
                active.append(speech.utterance(request, chunk_sizes=growing_chunks()))
                assert not runner.admit(active[-1:])
            runner.step(active, hand_over, together=together)
        for utterance in active:
            runner.release(utterance)
        assert all(utterance.is_complete() for utterance in active)
        return [chunk for chunk in chunks if chunk[0] > 12]

    with engine_for(endless, 2) as engine, engine.speech.turns.take():
        together = decoded(engine.speech, together=True)
        apart = decoded(engine.speech, together=False)
    assert together == [(16, 8, 1), (24, 8, 2), (28, 4, 1), (31, 8, 1), (31, 4, 1)]
    assert apart == [(16, 8, 1), (19, 8, 1), (24, 8, 1), (27, 8, 1), (28, 4, 1), (31, 4, 1)]


def test_what_goes_to_the_codec_is_a_copy(voice):
    """A GPU's codec reads the codes later, when the row may already belong to another stream."""
    runner, shared, batches = voice.fast.speech.runner, [], set()

    def see(rows, codes):
        batches.add(len(rows))
        shared.append(codes.untyped_storage().data_ptr() == runner.rows.codes.untyped_storage().data_ptr())

    with engine_for(voice, 3) as engine, ThreadPoolExecutor(3) as threads, watched(runner.codec, "feed", see):
        with engine.speech.turns.take():
            streams = [engine.ask(**request) for request in requests_of(voice, 3)]
        [*threads.map(joined, streams)]
    assert not any(shared) and {1, 3} <= batches


@pytest.mark.parametrize("name", ["in-context", *slow("x-vector", "preset")])
def test_a_list_of_texts(voices, name):
    """More texts than rows, with an argument for each text, and prompts with a row for each."""
    voice = voices(name).end_comes_up(True)
    texts = ["Hello there.", "Hi", "One, two, three."]
    lists = dict(language=["English", "German", "Auto"])
    if name == "in-context":
        lists["voice_clone_prompt"] = voice.arguments["voice_clone_prompt"] * 3
    with engine_for(voice, 2) as engine:
        wavs, rate = engine.generate(engine.method, text=texts, seed=5, max_new_tokens=12, **voice.arguments | lists)
    assert rate == 24000 and len(wavs) == 3
    for number, text in enumerate(texts):
        arguments = voice.arguments | dict(text=text, language=lists["language"][number], max_new_tokens=12)
        assert_same(wavs[number], alone(voice, seed=5 + number, **arguments))


def test_mistakes_in_a_list_come_first(voice):
    """The errors came only after the texts before had been spoken, some as an IndexError."""
    two = {name: column and column[:2] for name, column in voice.arguments["voice_clone_prompt"].items()}
    with engine_for(voice, 2) as engine:
        frames = engine.runner.frames_since_idle
        with pytest.raises(ValueError, match="the text is empty"):
            engine.generate(engine.method, text=["Hello."] * 8 + [""], **voice.arguments)
        with pytest.raises(ValueError, match="2 voices for 3 texts"):
            engine.generate(engine.method, text=["Hello."] * 3, **voice.arguments | dict(voice_clone_prompt=two))
        assert engine.runner.frames_since_idle == frames
        (_, last), _ = engine.generate(
            engine.method, text=["Hi", "Hi"], seed=2**64 - 1, max_new_tokens=4, **voice.arguments
        )
        assert_same(last, alone(voice, seed=0, text="Hi", max_new_tokens=4, **voice.arguments))


def test_a_listener_who_leaves_early_disturbs_nobody(voice):
    requests = requests_of(voice, 4)
    expected = [alone(voice, **request) for request in requests]
    with engine_for(voice, 3) as engine, ThreadPoolExecutor(4) as threads:
        leaving = [engine.ask(**request) for request in requests_of(voice, 3)]
        for chunks in leaving:
            next(chunks)
        jobs = [threads.submit(engine.speak, **request) for request in requests]
        for chunks in leaving:
            chunks.close()
        for job, audio in zip(jobs, expected, strict=True):
            assert_same(job.result(LIMIT), audio)
        wait_until_idle(engine)


def test_a_slow_reader_pauses_and_hears_the_same(voice):
    """A paused row must not advance or draw random numbers, and its stream must not block another call on the same
    model that its listener makes."""
    slow, quick = requests_of(voice, 2)
    slow["max_new_tokens"] = 60
    expected = alone(voice, **slow), alone(voice, **quick)
    with engine_for(voice, 2, max_unread=1) as engine:
        chunks = engine.ask(**slow)
        heard = [next(chunks)]
        assert_same(engine.speak(**quick), expected[1])
        assert_same(alone(voice, **quick), expected[1])
        for chunk in chunks:
            time.sleep(0.01)
            heard.append(chunk)
        assert_same(joined(heard), expected[0])


def test_a_place_that_nobody_reads_from_is_given_away(endless):
    request = dict(text="Hello.", max_new_tokens=100, **endless.arguments)
    with engine_for(endless, 1, max_unread=1, patience=0.05) as engine:
        abandoned = engine.ask(seed=0, **request)
        next(abandoned)
        assert len(engine.speak(seed=1, **request | dict(max_new_tokens=5))) == 4 * 1920
        with pytest.raises(StreamTimeout, match="given away"):
            list(abandoned)


def test_a_place_whose_text_comes_slowly_is_given_away(endless):
    """Listeners that sent a word now and then kept all rows for as long as they liked."""
    request = dict(text="Hello.", max_new_tokens=5, **endless.arguments)
    is_over = threading.Event()

    def pieces():
        yield "one two three four "
        while not is_over.wait(0.5):
            yield "5 "  # 160 ms of speech

    with engine_for(endless, 1, patience=0.5) as engine, ThreadPoolExecutor(1) as thread:
        slow = engine.ask(**request | dict(text=pieces(), max_new_tokens=500))
        next(slow)
        listening = thread.submit(list, slow)
        assert len(engine.speak(seed=1, **request)) == 4 * 1920
        with pytest.raises(StreamTimeout, match="text came too slowly .* given away"):
            listening.result(LIMIT)
        is_over.set()


def test_a_cancelled_task_stops_waiting_for_text(voice):
    """The text of a task never comes, and the task is cancelled. Before Python 3.12 asyncio.wait_for may lose a
    cancellation."""

    async def pieces():
        await asyncio.sleep(LIMIT)
        yield "too late"

    async def main():
        with engine_for(voice, 1) as engine:
            request = requests_of(voice, 1)[0] | dict(text=pieces(), non_streaming_mode=False)
            listening = asyncio.create_task(anext(engine.astream(engine.method, **request)))
            await asyncio.sleep(0.1)
            listening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listening
            wait_until_idle(engine)

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_nobody_waits_for_text_that_is_not_needed_yet(endless):
    """A listener may pause for longer than `text_timeout`, as long as there is text for the next frame."""
    has_paused = threading.Event()

    def pieces():
        yield "one two three four five six seven eight "
        assert has_paused.wait(LIMIT)

    request = dict(text=pieces(), text_timeout=0.3, max_new_tokens=20, **endless.arguments)
    with engine_for(endless, 1, max_unread=1) as engine:
        chunks = engine.ask(**request)
        heard = [next(chunks)]
        time.sleep(0.6)
        has_paused.set()
        assert len(joined([*heard, *chunks])) == 19 * 1920


def test_a_request_that_has_gone_takes_no_place(endless):
    """A cancelled request counted as waiting for a moment, and a stream that had been paused for long lost its row for
    nothing."""
    request = dict(text="Hello.", max_new_tokens=20, **endless.arguments)
    with engine_for(endless, 1, max_unread=1, patience=0.05) as engine:
        paused = engine.ask(**request)
        heard = [next(paused)]
        time.sleep(0.3)
        with engine.speech.turns.take():  # the engine waits for it
            engine.ask(**request).close()
        while engine.counts()[1]:
            time.sleep(0.01)
        heard += paused
        assert len(joined(heard)) == 19 * 1920


def test_bad_input_fails_alone_and_at_the_call(voice):
    (request,) = requests_of(voice, 1)
    no_model = type(voice.fast).generate_voice_clone
    with engine_for(voice, 2) as engine:
        for bad, message in (
            (dict(text=" "), "empty"),
            (dict(text=None), "the text is a NoneType"),  # inside the engine None stands for a text that is to come
            # Other requests would wait while it is tokenized.
            (dict(text="word " * 400_000), "2000000 characters, more than 10752 never fit into 384 positions"),
            (dict(text=async_pieces_of("Hello.")), "use astream"),
            (dict(max_new_tokens=1), "max_new_tokens"),
            (dict(temperature=-1.0), "temperature"),
            (dict(eos_token_id=5), "end token"),
            *((dict(seed=seed), "whole number") for seed in ("a", 2**70, 1.5)),
        ):
            with pytest.raises(ValueError, match=message):
                engine.ask(**request | bad)
            if "seed" in bad:
                with pytest.raises(ValueError, match=message):
                    engine.generate(engine.method, **request | bad | dict(text=["Hello."]))
        for speak, method, message in (
            (engine.stream, voice.upstream.generate_voice_clone, "another model"),
            (engine.stream, no_model, "a method of the model"),
            (stream, no_model, "belongs to no model"),
        ):
            with pytest.raises(ValueError, match=message):
                speak(method, **request)
        assert_same(engine.speak(**request), alone(voice, **request))


def test_an_error_in_one_prompt_leaves_the_others_speaking(endless):
    good, bad = requests_of(endless, 2)
    good["max_new_tokens"] = 40
    expected = alone(endless, **good)
    with engine_for(endless, 2, max_unread=1) as engine:  # the good stream pauses until its audio is read
        chunks = engine.ask(**good)
        heard = [next(chunks)]
        broken = mock.patch.object(engine.runner.prefills, "read", side_effect=ZeroDivisionError)
        with broken, pytest.raises(ZeroDivisionError):
            engine.speak(**bad)
        assert_same(joined([*heard, *chunks]), expected)


def test_a_stream_closed_before_its_first_chunk_frees_its_place(voice):
    """A generator that has not started does not run its `finally` when it is closed."""
    (request,) = requests_of(voice, 1)
    with engine_for(voice, 1) as engine:
        engine.ask(**request).close()
        wait_until_idle(engine)
        assert_same(engine.speak(**request), alone(voice, **request))


def test_an_engine_that_fails_leaves_the_rows_to_others(voice):
    """The rows of the engine's streams were never released, and later calls found all rows taken."""
    runner = voice.fast.speech.runner
    broken = mock.patch.object(runner, "step", side_effect=torch.OutOfMemoryError("no memory"))
    with engine_for(voice, runner.row_count) as engine, broken, pytest.raises(RuntimeError, match="no memory"):
        engine.speak(text="Hi.", **voice.arguments)
    for _ in range(runner.row_count):
        alone(voice, text="Hi.", max_new_tokens=3, **voice.arguments)
    assert sorted(runner.free) == list(range(runner.row_count))


def test_closing_delivers_the_audio_there_is_and_then_an_error(endless):
    """The engine is closed after 8 frames, with chunks of 1, 2 and 4 frames in the codec, while a second stream waits
    for a row."""
    request = dict(text="Hello.", seed=1, max_new_tokens=300, **endless.arguments)
    expected = alone(endless, **request | dict(max_new_tokens=9))
    engine = engine_for(endless, 1)
    waits = itertools.count()

    def close(streams, *_, **__) -> None:
        if streams and streams[0].launched == 8:
            threading.Thread(target=engine.close).start()
            while engine.is_running:
                time.sleep(0.001)

    def be_late(*_) -> None:
        if next(waits) > 0:  # all but the first chunk
            engine.thread.join(LIMIT)

    heard = []
    with watched(engine.runner, "step", close), watched(PendingAudio, "wait", be_late):
        chunks, waiting = (engine.ask(**request) for _ in range(2))
        with pytest.raises(RuntimeError, match="closed"):
            heard.extend(chunks)
        with pytest.raises(RuntimeError, match="closed"):
            list(waiting)
    assert_same(joined(heard), expected)
    with pytest.raises(RuntimeError, match="closed"):
        engine.ask(**request)


def test_other_calls_on_the_model_wait_their_turn(voice):
    """Streams and upstream's methods use the same rows as the engine."""
    first, second, third = requests_of(voice, 3)
    expected = alone(voice, **first), alone(voice, **second)
    with engine_for(voice, 2) as engine, ThreadPoolExecutor(1) as thread:
        state = torch.get_rng_state()
        engine.speak(**third | dict(seed=None))
        assert torch.equal(torch.get_rng_state(), state)  # a call beside it may have set a seed
        chunks = engine.ask(**first)
        heard = [next(chunks)]
        whole = thread.submit(alone, voice, **second)
        assert_same(joined([*heard, *chunks]), expected[0])
        assert_same(whole.result(LIMIT), expected[1])
        engine.speak(**third)


@pytest.mark.slow
def test_a_stream_that_fills_the_cache(voice):
    """The row stays in the batch while its last chunk is decoded, at a position behind the end of the cache."""
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=64, rows=2)
    tts.model.talker.codec_head.weight.data[voice.end_token] = 0  # it never ends
    full = dict(text="Hello.", seed=1, max_new_tokens=10_000, **voice.arguments)
    other = dict(text="Hi.", seed=2, max_new_tokens=58, **voice.arguments)

    def speak(request, stream=stream):
        return joined(stream(tts.generate_voice_clone, **request))

    expected = [speak(full), speak(other)]
    with engine_of(tts, 2) as engine, ThreadPoolExecutor(2) as threads:
        for audio, alone_audio in zip(threads.map(speak, [full, other], [engine.stream] * 2, timeout=LIMIT), expected):
            assert_same(audio, alone_audio)


async def collect(engine, request):
    return joined([chunk async for chunk in engine.astream(engine.method, **request)])


def test_asyncio(voice):
    """Several streams run in one event loop, which stays responsive; a cancelled stream frees its row."""
    requests = requests_of(voice, 3)
    expected = [alone(voice, **request) for request in requests]

    async def main():
        with engine_for(voice, 2) as engine:
            cancelled = asyncio.create_task(collect(engine, requests[0] | dict(max_new_tokens=300)))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            spoken = await asyncio.gather(*(collect(engine, request) for request in requests))
            await asyncio.to_thread(wait_until_idle, engine)
            return spoken

    for audio, alone_audio in zip(asyncio.run(main()), expected, strict=True):
        assert_same(audio, alone_audio)


def pieces_of(text, seconds=0.0):
    for start in range(0, len(text), 3):
        time.sleep(seconds)
        yield text[start : start + 3]


async def async_pieces_of(text):
    for piece in pieces_of(text):
        await asyncio.sleep(0.002)
        yield piece


@pytest.mark.parametrize("name", ["x-vector", *slow("in-context", "preset")])
def test_texts_that_arrive_are_spoken_as_if_they_were_whole(voices, name):
    """Arriving texts give the speech of whole texts beside other streams, from threads and from asyncio, at different
    speeds."""
    voice = voices(name).end_comes_up(True)
    requests = [
        request | dict(text=f"{request['text']}, and 3 more.", non_streaming_mode=False)
        for request in requests_of(voice, 6)
    ]
    expected = [alone(voice, **request) for request in requests]

    def speak(number):
        request, text = requests[number], requests[number]["text"]
        if number % 3 == 2:
            return asyncio.run(collect(engine, request | dict(text=async_pieces_of(text))))
        return engine.speak(**request | dict(text=pieces_of(text, 0.002 * number) if number % 3 == 1 else text))

    with engine_for(voice, 4) as engine, ThreadPoolExecutor(6) as threads:
        for audio, expected_audio in zip(threads.map(speak, range(6), timeout=LIMIT), expected, strict=True):
            assert_same(audio, expected_audio)
        wait_until_idle(engine)


def test_a_stream_whose_text_is_late_waits_and_others_go_on(endless):
    """Before a stream waits for text it delivers all frames that it has, however small the chunk."""
    go_on = threading.Event()
    text = "one two three four five six"

    def pieces():
        yield text[:14]
        assert go_on.wait(LIMIT)
        yield text[14:]

    request = dict(seed=3, max_new_tokens=30, non_streaming_mode=False, **endless.arguments)
    expected = alone(endless, text=text, **request)
    with engine_for(endless, 2) as engine:
        chunks = engine.ask(text=pieces(), **request)
        heard = [next(chunks)]
        assert_same(engine.speak(text=text, **request), expected)
        go_on.set()
        assert_same(joined([*heard, *chunks]), expected)


def test_an_idle_engine_sleeps(endless):
    """The delivery thread woke up ten times a second to check arriving texts, even if there was none. It does so only
    while a text is arriving."""

    def wakes() -> int:
        threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("speech")]
        lines = [line for it in threads for line in Path(f"/proc/self/task/{it}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    with engine_for(endless, 1) as engine:
        is_over = threading.Event()
        text = ("too late" for _ in range(1) if is_over.wait(LIMIT))
        with pytest.raises(StreamTimeout, match="no text"):
            engine.speak(text=text, text_timeout=0.1, **endless.arguments)
        is_over.set()
        time.sleep(0.2)
        before = wakes()
        time.sleep(0.5)
        assert wakes() - before < 3


def test_an_iterator_that_fails_or_stops_ends_its_stream_only(endless):
    """See test_arriving_text.py for mistakes in arriving texts."""
    (request,) = requests_of(endless, 1)
    request |= dict(non_streaming_mode=False, max_new_tokens=12)

    def failing(start):
        yield start
        raise KeyError("the language model is gone")

    def stopping(start):
        yield start
        is_over.wait(LIMIT)

    is_over = threading.Event()
    with engine_for(endless, 1) as engine:
        for start in ("", "one two three four"):
            with pytest.raises(KeyError, match="gone"):
                list(engine.ask(**request | dict(text=failing(start), max_new_tokens=40)))
            with pytest.raises(StreamTimeout, match="no text"):
                list(engine.ask(**request | dict(text=stopping(start), max_new_tokens=40), text_timeout=0.3))
            wait_until_idle(engine)
        unread = engine.ask(**request | dict(text=stopping(start), max_new_tokens=40), text_timeout=0.3)
        next(unread)
        wait_until_idle(engine)  # its row must become free even if the listener has stopped reading
        with pytest.raises(StreamTimeout, match="no text"):
            list(unread)
        pieces = iter(["one ", "\ud800", "five " * 30, "six"])
        with pytest.raises(ValueError, match="UTF-8"):
            list(engine.ask(**request | dict(text=pieces)))
        assert next(pieces).startswith("five")  # nothing after the bad piece is read
        assert_same(engine.speak(**request), alone(endless, **request))
        engine.intake.max_characters = 5
        with pytest.raises(ValueError, match="never fit"):
            list(engine.ask(**request | dict(text=itertools.repeat("a "))))
    is_over.set()


@pytest.mark.parametrize("pieces", [["Hi th", "<", " a"], ["Hi th", "", " a"]], ids=str)
def test_a_piece_without_a_new_token(voice, pieces):
    """A piece in the middle of a word may make no further token known."""
    request = dict(seed=1, max_new_tokens=30, non_streaming_mode=False, **voice.arguments)
    expected = alone(voice, text="".join(pieces), **request)
    with engine_for(voice, 2) as engine:
        assert_same(engine.speak(text=iter(pieces), **request), expected)


def test_too_many_requests(voice):
    """A burst of requests is not refused while rows are free: only requests beyond the free rows count as waiting."""
    with engine_for(voice, 3, max_waiting=1) as engine:
        with engine.speech.turns.take():  # nobody is admitted yet
            streams = [engine.ask(**request) for request in requests_of(voice, 4)]
            with pytest.raises(QueueFull, match="1 requests are waiting"):
                engine.ask(**requests_of(voice, 1)[0])
        for chunks in streams:
            chunks.close()


def test_cancelled_while_its_prompt_is_queued(voice):
    """A prompt that is never built must not count as one that is being built."""

    async def main():
        with engine_for(voice, 2) as engine:
            release = threading.Event()
            engine.intake.thread.submit(release.wait, LIMIT)
            task = asyncio.create_task(collect(engine, requests_of(voice, 1)[0]))
            await asyncio.sleep(0.05)
            assert engine.intake.preparing == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release.set()
            assert engine.intake.preparing == 0 and not engine.listeners

    asyncio.run(main())


def test_cancelled_requests_do_not_hide_a_prompt_that_stands_still(voice):
    """The server replaces an engine whose prompt thread hangs, also while others ask and leave."""
    with engine_for(voice, 2) as engine:
        release = threading.Event()
        engine.intake.thread.submit(release.wait, LIMIT)
        hanging, *others = (Listener(engine, lambda item: None) for _ in range(20))
        try:
            hanging.ask(voice.fast_method, "Hello.", None, voice.arguments)
            noticed = set()
            for listener in others:
                listener.ask(voice.fast_method, "Hello.", None, voice.arguments)
                noticed.add(engine.stands_still(0.1))
                listener.cancel()
                time.sleep(0.02)
            assert "prompt" in noticed
        finally:
            release.set()
            hanging.cancel()


def test_a_bad_reference_fails_alone(voices):
    """If a stream cannot be admitted, its listener gets the error, and the engine continues. The requests that were
    admitted with it are prefilled again, with the same random numbers."""
    voice = voices("in-context").end_comes_up(True)
    bad, request = requests_of(voice, 2)
    calls = itertools.count()
    fails_twice = watched(voice.fast.speech.runner.codec, "feed", lambda *_: 1 / 0 if next(calls) < 2 else None)
    with engine_for(voice, 2) as engine, fails_twice:  # the second time when each is admitted alone
        with engine.speech.turns.take():  # both are admitted together
            streams = [engine.ask(**bad), engine.ask(**request)]
        with pytest.raises(ZeroDivisionError):
            list(streams[0])
        assert_same(joined(streams[1]), alone(voice, **request))
        wait_until_idle(engine)


def test_reference_codes_beyond_the_codebook_are_refused_at_the_call(voices):
    """Such codes raised an IndexError in the engine's thread. On a GPU a kernel would fail, and with it all streams."""
    voice = voices("in-context")
    (item,) = voice.arguments["voice_clone_prompt"]
    with engine_for(voice, 1) as engine:
        for bad in (2048, -1):
            codes = item.ref_code.clone()
            codes[3, 0] = bad
            request = dict(text="Hello.", voice_clone_prompt=[dataclasses.replace(item, ref_code=codes)])
            for speak in (stream, engine.stream):
                with pytest.raises(ValueError, match="the codebooks have 0 to 2047"):
                    speak(engine.method, **request)
        request["voice_clone_prompt"][0].ref_code = item.ref_code[:, :2]
        with pytest.raises(ValueError, match="must be .frames, 3."):
            engine.ask(**request)


def test_closing_ends_streams_whose_text_has_not_come(voice):
    engine = engine_for(voice, 1)
    never = threading.Event()
    text = ("too late" for _ in range(1) if never.wait(LIMIT))
    chunks = engine.ask(text=text, non_streaming_mode=False, **voice.arguments)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(chunks)
    never.set()


def test_every_utterance_that_is_cut_short_warns(endless):
    """Python's own filter shows the same warning only once: the second utterance was cut off silently."""
    request = dict(text="Hi", **endless.arguments)
    with engine_for(endless, 1) as engine, warnings.catch_warnings(record=True) as warned, frame_limits(1, 0):
        warnings.simplefilter("default")
        for _ in range(2):
            engine.speak(max_new_tokens=3, **request)
        for _ in range(2):
            list(speak(engine.method, **request))
    first, second, third, fourth = (str(warning.message) for warning in warned)
    assert "cut off after 2 frames" in first and first == second
    assert "'Hi' did not end" in third and third == fourth


@pytest.mark.filterwarnings("error", "ignore:the speech was cut off")
def test_a_plain_stream_that_is_paused(voice):
    """An engine that is being closed neither waits for the stream nor takes over. A running engine takes over after a
    while, and continues even if warnings are errors."""
    (request,) = requests_of(voice, 1)
    engine = engine_for(voice, 1)
    paused = stream(engine.method, **request)
    next(paused)
    chunks = engine.ask(**request)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match="closed"):
        next(chunks)
    list(paused)

    turns = voice.fast.speech.turns
    with engine_for(voice, 1) as engine, mock.patch.object(turns, "patience", 0.1):
        paused = stream(engine.method, **request)
        next(paused)
        assert_same(engine.speak(**request), alone(voice, **request))
        with pytest.raises(RuntimeError, match="taken over"):
            next(paused)


def test_audio_that_cannot_be_delivered_is_not_left_out(voice):
    """A stream that has lost a chunk must not end normally."""
    (request,) = requests_of(voice, 1)
    broken = mock.patch.object(PendingAudio, "wait", side_effect=ZeroDivisionError)
    with engine_for(voice, 1) as engine, broken, pytest.raises(RuntimeError, match="stopped"):
        engine.speak(**request)
