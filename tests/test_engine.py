"""Streams that share a batch: each gets what it would get alone, whoever joins, leaves, stalls or fails beside it."""

import asyncio
import contextvars
import dataclasses
import gc
import itertools
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import GREEDY, engine_of, joined, slow

from qwen3_tts_cuda_graphs.common.loading import load, load_upstream
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast.codec import PendingAudio
from qwen3_tts_cuda_graphs.prompts.build import prepare_request
from qwen3_tts_cuda_graphs.speech import accelerate, schedule
from qwen3_tts_cuda_graphs.speech import runner as runner_module
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.listener import Listener, QueueFull, State, StreamTimeout
from qwen3_tts_cuda_graphs.speech.long_text import speak
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.speech.utterance import growing_chunks

pytestmark = pytest.mark.filterwarnings("ignore:the speech was cut off")
LIMIT = 300  # seconds that any wait may take


@pytest.fixture(autouse=True)
def admit_at_once(monkeypatch):
    """On a CPU frames may be slower than playback: requests would wait for streams that run dry."""
    monkeypatch.setattr(schedule, "LONGEST_HOLD", 0.0)


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


def alone(voice, seed: int, **request) -> np.ndarray:
    torch.manual_seed(seed)
    return joined(stream(getattr(voice.fast, voice.method), **request))


def assert_same(audio: np.ndarray, expected: np.ndarray) -> None:
    """Other codes would give other audio. Rows of a batch differ from a single row in the last bits of float32."""
    assert len(audio) == len(expected)
    np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)


def wait_until_idle(engine: Engine) -> None:
    """Every place must become free again."""
    end = time.monotonic() + LIMIT
    runner = engine.runner
    while engine.counts() != (0, 0) or len(runner.free) < runner.row_count:
        assert time.monotonic() < end, "a row was never freed"
        time.sleep(0.01)
    assert sorted(runner.free) == list(range(runner.row_count)) and not runner.active


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(checkpoint):
    """A seed alone gives the speech of a call alone; streams together are of the right length, and finite."""
    tts = load(str(checkpoint("base", "0.6B")), max_seq_len=256, rows=6)
    prompt = speaker_prompt(torch.randn(1024, generator=torch.Generator().manual_seed(0)))
    request = dict(text="Hello there.", language="English", voice_clone_prompt=prompt)
    torch.manual_seed(7)
    expected = joined(stream(tts.generate_voice_clone, max_new_tokens=31, **request))

    def speak(number):
        return joined(engine.stream(tts.generate_voice_clone, seed=number, max_new_tokens=20 + number, **request))

    with Engine(tts) as engine, ThreadPoolExecutor(12) as threads:
        assert gc.get_freeze_count()  # no long collections meanwhile
        again = joined(engine.stream(tts.generate_voice_clone, seed=7, max_new_tokens=31, **request))
        np.testing.assert_array_equal(again, expected)
        for number, audio in enumerate(threads.map(speak, range(12))):
            assert len(audio) == (19 + number) * 1920 and np.isfinite(audio).all() and np.abs(audio).max() > 0
    assert not gc.get_freeze_count()


@pytest.mark.parametrize(
    "size",
    [
        "tiny",
        pytest.param(
            "0.6B",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)
def test_the_audio_is_that_of_its_own_codes(checkpoint, size, monkeypatch):
    """When a stream ends, another moves into its row. A GPU's codec may not have read the last codes yet."""
    tts = load(str(checkpoint("base", size)), max_seq_len=256, rows=3)
    runner, codes, hidden_size = tts.speech.runner, {}, tts.model.talker.config.hidden_size
    prompt = speaker_prompt(torch.randn(hidden_size, generator=torch.Generator().manual_seed(0)))

    def decode_chunk(streams, size, hand_over):
        for one in streams:
            codes.setdefault(one, []).append(runner.rows.codes[one.row, one.decoded : one.decoded + size].clone())
        return original(streams, size, hand_over)

    original = runner.decode_chunk
    monkeypatch.setattr(runner, "decode_chunk", decode_chunk)

    def speak(frames):
        request = dict(text="Hello there.", language="English", voice_clone_prompt=prompt)
        return joined(engine.stream(tts.generate_voice_clone, max_new_tokens=frames + 1, **request))

    with Engine(tts) as engine, ThreadPoolExecutor(8) as threads:
        spoken = [*threads.map(speak, (5, 9, 13, 17, 22, 27, 31, 36))]
    expected = [tts.speech.decode([torch.cat(chunks)])[0][0] for chunks in codes.values()]
    for audio in spoken:
        same_length = [other for other in expected if len(other) == len(audio)]
        assert min(np.abs(audio - other).max() for other in same_length) < 0.02


@pytest.fixture
def voice(voices):
    return voices("x-vector").end_comes_up(True)


@pytest.mark.parametrize("name", ["x-vector", *slow("in-context", "preset")])
def test_streams_that_join_and_leave_are_as_alone(voices, name):
    """More requests than rows, started one after another: prefill, copies between rows, other rows' settings and noise
    must not leak, and a stream that is alone again goes back to the frame of a single row."""
    voice = voices(name).end_comes_up(True)
    method = getattr(voice.fast, voice.method)
    requests = requests_of(voice, 8)
    expected = [alone(voice, **request) for request in requests]

    def speak(engine, number):
        time.sleep(0.03 * number)
        return joined(engine.stream(method, **requests[number]))

    with engine_of(voice.fast, 3) as engine, ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(speak, engine, number) for number in range(8)]
        for job, audio in zip(jobs, expected, strict=True):
            assert_same(job.result(LIMIT), audio)


def test_prompts_that_wait_together_are_prefilled_together(voice, monkeypatch):
    """Prompts of different lengths in one batch, then gaps between the rows: no padding may leak."""
    method = voice.fast.generate_voice_clone
    requests = requests_of(voice, 7)
    expected = [alone(voice, **request) for request in requests]
    with engine_of(voice.fast, 8) as engine:
        together, moves = [], []
        engine.runner.prefills.kept.prefixes.clear()
        prefills, load, copy_row = engine.runner.prefills, engine.runner.prefills.load, runner_module.copy_row
        monkeypatch.setattr(prefills, "load", lambda rows, *rest: together.append(len(rows)) or load(rows, *rest))
        monkeypatch.setattr(runner_module, "copy_row", lambda *rows: moves.append(rows) or copy_row(*rows))
        with engine.speech.turns.take():  # the engine waits for it
            streams = [engine.stream(method, **request) for request in requests]
        for chunks, audio in zip(streams, expected, strict=True):
            assert_same(joined(chunks), audio)
    assert together == [7] and moves


def test_full_chunks_are_decoded_together(voice, monkeypatch):
    """Streams that began at different frames give the codec their chunks of 8 at the same ones. First chunks, the last
    one, and all where frames are slow, do not wait."""
    voice.end_comes_up(False)
    arguments = dict(voice.arguments, max_new_tokens=29)

    def decoded(speech, together: bool) -> list[tuple[int, int, int]]:
        """(beat, frames, utterances) of what goes to the codec; the second begins 3 frames after the first."""
        runner, active, chunks = speech.runner, [], []

        def decode_chunk(utterances, size, _):
            chunks.append((runner.beat, size, len(utterances)))
            for utterance in utterances:
                utterance.take_chunk(size)

        monkeypatch.setattr(runner, "decode_chunk", decode_chunk)
        runner.enter()
        assert not runner.active
        for frame in range(31):
            if frame in (0, 3):
                request = prepare_request(voice.fast.generate_voice_clone, "Hi.", **arguments)
                active.append(speech.utterance(request, chunk_sizes=growing_chunks()))
                assert not runner.admit(active[-1:])
            runner.step(active, None, together=together)
        for utterance in active:
            runner.release(utterance)
        assert all(utterance.is_complete() for utterance in active)
        return [chunk for chunk in chunks if chunk[0] > 12]

    with engine_of(voice.fast, 2) as engine, engine.speech.turns.take():
        together = decoded(engine.speech, together=True)
        apart = decoded(engine.speech, together=False)
    assert together == [(16, 8, 1), (24, 8, 2), (28, 4, 1), (31, 8, 1), (31, 4, 1)]
    assert apart == [(16, 8, 1), (19, 8, 1), (24, 8, 1), (27, 8, 1), (28, 4, 1), (31, 4, 1)]


def test_what_goes_to_the_codec_is_a_copy(voice, monkeypatch):
    """The codec of a GPU reads it later, when the row may have another one's codes."""
    with engine_of(voice.fast, 3) as engine, ThreadPoolExecutor(3) as threads:
        runner, shared, batches = engine.runner, [], set()
        feed = runner.codec.feed

        def watch(rows, codes):
            batches.add(len(rows))
            shared.append(codes.untyped_storage().data_ptr() == runner.rows.codes.untyped_storage().data_ptr())
            return feed(rows, codes)

        monkeypatch.setattr(runner.codec, "feed", watch)
        with engine.speech.turns.take():
            streams = [engine.stream(voice.fast.generate_voice_clone, **request) for request in requests_of(voice, 3)]
        [*threads.map(joined, streams)]
    assert not any(shared) and {1, 3} <= batches


@pytest.mark.parametrize("name", ["in-context", *slow("x-vector", "preset")])
def test_a_list_of_texts(voices, name):
    """More texts than rows, with an argument for each text, and prompts with a row for each."""
    voice = voices(name).end_comes_up(True)
    method, texts = getattr(voice.fast, voice.method), ["Hello there.", "Hi", "One, two, three."]
    lists = dict(language=["English", "German", "Auto"])
    if name == "in-context":
        lists["voice_clone_prompt"] = voice.arguments["voice_clone_prompt"] * 3
    with engine_of(voice.fast, 2) as engine:
        wavs, rate = engine.generate(method, text=texts, seed=5, max_new_tokens=12, **voice.arguments | lists)
    assert rate == 24000 and len(wavs) == 3
    for number, text in enumerate(texts):
        arguments = voice.arguments | dict(text=text, language=lists["language"][number], max_new_tokens=12)
        assert_same(wavs[number], alone(voice, 5 + number, **arguments))


def test_mistakes_in_a_list_come_first(voices):
    """They came after the texts before had been spoken, some as an IndexError."""
    voice = voices("x-vector").end_comes_up(True)
    method, prompt = voice.fast.generate_voice_clone, voice.arguments["voice_clone_prompt"]
    two = {name: column and column[:2] for name, column in prompt.items()}
    with engine_of(voice.fast, 2) as engine:
        frames = engine.runner.beat
        with pytest.raises(ValueError, match="the text is empty"):
            engine.generate(method, text=["Hello."] * 8 + [""], **voice.arguments)
        with pytest.raises(ValueError, match="2 voices for 3 texts"):
            engine.generate(method, text=["Hello."] * 3, **voice.arguments | dict(voice_clone_prompt=two))
        assert engine.runner.beat == frames
        last = engine.generate(method, text=["Hi", "Hi"], seed=2**64 - 1, max_new_tokens=4, **voice.arguments)[0][1]
        assert_same(last, alone(voice, 0, text="Hi", max_new_tokens=4, **voice.arguments))


def test_a_listener_who_leaves_early_disturbs_nobody(voice):
    method = voice.fast.generate_voice_clone
    requests = requests_of(voice, 4)
    expected = [alone(voice, **request) for request in requests]
    with engine_of(voice.fast, 3) as engine, ThreadPoolExecutor(4) as threads:
        leaving = [engine.stream(method, **request) for request in requests_of(voice, 3)]
        for chunks in leaving:
            next(chunks)
        jobs = [threads.submit(lambda request: joined(engine.stream(method, **request)), r) for r in requests]
        for chunks in leaving:
            chunks.close()
        for job, audio in zip(jobs, expected, strict=True):
            assert_same(job.result(LIMIT), audio)
        wait_until_idle(engine)


def test_a_slow_reader_pauses_and_hears_the_same(voice):
    """A paused row must not advance or draw random numbers."""
    method = voice.fast.generate_voice_clone
    slow, quick = requests_of(voice, 2)
    slow["max_new_tokens"] = 60
    expected = alone(voice, **slow), alone(voice, **quick)
    with engine_of(voice.fast, 2, max_unread=1) as engine:
        chunks = engine.stream(method, **slow)
        heard = [next(chunks)[0]]
        assert_same(joined(engine.stream(method, **quick)), expected[1])
        for audio, _ in chunks:
            time.sleep(0.01)
            heard.append(audio)
        assert_same(np.concatenate(heard), expected[0])


def test_a_place_that_nobody_reads_from_is_given_away(voices):
    voice = voices("x-vector").end_comes_up(False)
    method = voice.fast.generate_voice_clone
    request = dict(text="Hello.", max_new_tokens=100, **voice.arguments)
    with engine_of(voice.fast, 1, max_unread=1, patience=0.05) as engine:
        abandoned = engine.stream(method, seed=0, **request)
        next(abandoned)
        audio = joined(engine.stream(method, seed=1, **request | dict(max_new_tokens=5)))
        assert len(audio) == 4 * 1920
        with pytest.raises(StreamTimeout, match="given away"):
            list(abandoned)


def test_a_place_whose_text_comes_slowly_is_given_away(voices):
    """Listeners who send a word now and then kept all places for as long as they liked."""
    voice = voices("x-vector").end_comes_up(False)
    method = voice.fast.generate_voice_clone
    request = dict(text="Hello.", max_new_tokens=5, **voice.arguments)
    is_over = threading.Event()

    def pieces():
        yield "one two three four "
        while not is_over.wait(0.5):
            yield "5 "  # 160 ms of speech

    with engine_of(voice.fast, 1, patience=0.5) as engine:
        slow = engine.stream(method, **request | dict(text=pieces(), max_new_tokens=500))
        next(slow)
        listening = ThreadPoolExecutor(1).submit(list, slow)
        assert len(joined(engine.stream(method, seed=1, **request))) == 4 * 1920
        with pytest.raises(StreamTimeout, match="text came too slowly .* given away"):
            listening.result(LIMIT)
        is_over.set()


def test_a_cancelled_task_stops_waiting_for_text(voice):
    """Its text never comes, and neither does a result: asyncio.wait_for may lose a cancellation, before Python 3.12."""

    async def pieces():
        await asyncio.sleep(LIMIT)
        yield "too late"

    async def main():
        with engine_of(voice.fast, 1) as engine:
            request = requests_of(voice, 1)[0] | dict(text=pieces(), non_streaming_mode=False)
            listening = asyncio.create_task(anext(engine.astream(voice.fast.generate_voice_clone, **request)))
            await asyncio.sleep(0.1)
            listening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listening
            wait_until_idle(engine)

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_nobody_waits_for_text_that_is_not_needed_yet():
    """A listener woke up 100 times a second when the text was late and the speech was not."""
    listener = Listener(None, put=None)
    assert not listener.text_timed_out()  # its prompt is being built
    listener.text = SimpleNamespace(timed_out=lambda: "late")
    assert listener.text_timed_out()
    listener.state = State.SPEAKING
    listener.frames_with_text = 3
    assert not listener.text_timed_out()
    listener.launched = 3
    assert listener.text_timed_out()
    listener.text_error = ValueError("the text has failed already")
    assert not listener.text_timed_out()


def test_a_request_that_has_gone_takes_no_place(voices):
    """It waited for a moment: a stream that had been paused for long lost its row to nobody."""
    voice = voices("x-vector").end_comes_up(False)
    method = voice.fast.generate_voice_clone
    request = dict(text="Hello.", max_new_tokens=20, **voice.arguments)
    with engine_of(voice.fast, 1, max_unread=1, patience=0.05) as engine:
        paused = engine.stream(method, **request)
        heard = [next(paused)]
        time.sleep(0.3)
        with engine.speech.turns.take():  # the engine waits for it
            engine.stream(method, **request).close()
        while engine.counts()[1]:
            time.sleep(0.01)
        heard += paused
        assert len(joined(heard)) == 19 * 1920


def test_bad_input_fails_alone_and_at_the_call(voice):
    method = voice.fast.generate_voice_clone
    (request,) = requests_of(voice, 1)
    with engine_of(voice.fast, 2) as engine:
        with pytest.raises(ValueError, match="empty"):
            engine.stream(method, **request | dict(text=" "))
        with pytest.raises(ValueError, match="the text is a NoneType"):  # None is how the engine marks one to come
            engine.stream(method, **request | dict(text=None))
        with pytest.raises(ValueError, match="2000000 characters, more than 10752 never fit into 384 positions"):
            engine.stream(method, **request | dict(text="word " * 400_000))  # others would wait while it is tokenized
        with pytest.raises(ValueError, match="use astream"):
            engine.stream(method, **request | dict(text=async_pieces_of("Hello.")))
        with pytest.raises(ValueError, match="max_new_tokens"):
            engine.stream(method, **request | dict(max_new_tokens=1))
        with pytest.raises(ValueError, match="temperature"):
            engine.stream(method, **request | dict(temperature=-1.0))
        with pytest.raises(ValueError, match="end token"):
            engine.stream(method, **request | dict(eos_token_id=5))
        with pytest.raises(ValueError, match="another model"):
            engine.stream(voice.upstream.generate_voice_clone, **request)
        with pytest.raises(ValueError, match="a method of the model"):
            engine.stream(type(voice.fast).generate_voice_clone, **request)
        with pytest.raises(ValueError, match="belongs to no model"):
            stream(type(voice.fast).generate_voice_clone, **request)
        for seed in ("a", 2**70, 1.5):
            with pytest.raises(ValueError, match="whole number"):
                engine.stream(method, **request | dict(seed=seed))
            with pytest.raises(ValueError, match="whole number"):
                engine.generate(method, **request | dict(seed=seed, text=["Hello."]))
        assert_same(joined(engine.stream(method, **request)), alone(voice, **request))


def test_an_error_in_one_prompt_leaves_the_others_speaking(voice, monkeypatch):
    method = voice.end_comes_up(False).fast.generate_voice_clone
    good, bad = requests_of(voice, 2)
    good["max_new_tokens"] = 40
    expected = alone(voice, **good)
    with engine_of(voice.fast, 2, max_unread=1) as engine:  # the good one waits for its listener
        chunks = engine.stream(method, **good)
        heard = [next(chunks)[0]]
        with monkeypatch.context() as broken:
            broken.setattr(engine.runner.prefills, "read", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(engine.stream(method, **bad))
        heard += [audio for audio, _ in chunks]
        assert_same(np.concatenate(heard), expected)


def test_a_stream_closed_before_its_first_chunk_frees_its_place(voice):
    """A generator that has not started does not run its `finally` when it is closed."""
    (request,) = requests_of(voice, 1)
    with engine_of(voice.fast, 1) as engine:
        engine.stream(voice.fast.generate_voice_clone, **request).close()
        wait_until_idle(engine)
        assert_same(joined(engine.stream(voice.fast.generate_voice_clone, **request)), alone(voice, **request))


def test_a_paused_stream_does_not_hold_up_other_calls(voice):
    """The engine waits for its listener, who waits for a call on the same model."""
    slow, other = requests_of(voice, 2)
    slow["max_new_tokens"] = 60
    expected = alone(voice, **slow), alone(voice, **other)
    with engine_of(voice.fast, 2, max_unread=1) as engine:
        chunks = engine.stream(voice.fast.generate_voice_clone, **slow)
        heard = [next(chunks)[0]]
        assert_same(alone(voice, **other), expected[1])
        heard += [audio for audio, _ in chunks]
        assert_same(np.concatenate(heard), expected[0])


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_an_engine_that_fails_leaves_the_rows_to_others(voice, monkeypatch):
    """Those of its streams were lost, and later calls found all rows taken."""
    runner = voice.fast.speech.runner

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    with Engine(voice.fast) as engine, monkeypatch.context() as patch:
        patch.setattr(runner, "step", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            joined(engine.stream(voice.fast.generate_voice_clone, text="Hi.", **voice.arguments))
    for _ in range(runner.row_count):
        joined(stream(voice.fast.generate_voice_clone, text="Hi.", max_new_tokens=3, **voice.arguments))
    assert sorted(runner.free) == list(range(runner.row_count))


def test_closing_delivers_the_audio_there_is_and_then_an_error(voices, monkeypatch):
    """Closed after 8 frames, with chunks of 1, 2 and 4 frames in the codec. A second stream waits for a place."""
    voice = voices("x-vector").end_comes_up(False)
    request = dict(text="Hello.", seed=1, max_new_tokens=300, **voice.arguments)
    expected = alone(voice, **request | dict(max_new_tokens=9))
    engine = engine_of(voice.fast, 1)
    step, wait = engine.runner.step, PendingAudio.wait
    waits = iter(range(100))

    def close_and_step(streams, *rest, **options) -> None:
        if streams and streams[0].launched == 8:
            threading.Thread(target=engine.close).start()
            while engine.is_running:
                time.sleep(0.001)
        step(streams, *rest, **options)

    def wait_late(audio: PendingAudio) -> list[np.ndarray]:
        if next(waits) > 0:  # all but the first chunk are late
            engine.thread.join(LIMIT)
        return wait(audio)

    monkeypatch.setattr(engine.runner, "step", close_and_step)
    monkeypatch.setattr(PendingAudio, "wait", wait_late)
    chunks, waiting = (engine.stream(voice.fast.generate_voice_clone, **request) for _ in range(2))
    heard = []
    with pytest.raises(RuntimeError, match="closed"):
        heard.extend(audio for audio, _ in chunks)
    assert_same(np.concatenate(heard), expected)
    with pytest.raises(RuntimeError, match="closed"):
        list(waiting)
    with pytest.raises(RuntimeError, match="closed"):
        engine.stream(voice.fast.generate_voice_clone, **request)


def test_other_calls_on_the_model_wait_their_turn(voice):
    """Streams and upstream's methods use the same rows as the engine."""
    method = voice.fast.generate_voice_clone
    first, second, third = requests_of(voice, 3)
    expected = alone(voice, **first), alone(voice, **second)
    with engine_of(voice.fast, 2) as engine:
        state = torch.get_rng_state()
        joined(engine.stream(method, **third | dict(seed=None)))
        assert torch.equal(torch.get_rng_state(), state)  # a call beside it may have set a seed
        chunks = engine.stream(method, **first)
        heard = [next(chunks)[0]]
        whole = []
        thread = threading.Thread(target=lambda: whole.append(alone(voice, **second)))
        thread.start()
        heard += [audio for audio, _ in chunks]
        thread.join(LIMIT)
        assert_same(np.concatenate(heard), expected[0])
        assert_same(whole[0], expected[1])
        joined(engine.stream(method, **third))


@pytest.mark.slow
def test_a_stream_that_fills_the_cache(voice):
    """Its row stays in the batch while its last chunk is decoded, at a position behind the cache."""
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=64, rows=2)
    tts.model.talker.codec_head.weight.data[voice.end_token] = 0  # it never ends
    full = dict(text="Hello.", seed=1, max_new_tokens=10_000, **voice.arguments)
    other = dict(text="Hi.", seed=2, max_new_tokens=58, **voice.arguments)
    expected = []
    for request in (full, other):
        torch.manual_seed(request["seed"])
        arguments = {name: value for name, value in request.items() if name != "seed"}
        expected.append(joined(stream(tts.generate_voice_clone, **arguments)))
    with Engine(tts) as engine, ThreadPoolExecutor(2) as threads:
        speak = engine.stream
        jobs = [
            threads.submit(lambda request: joined(speak(tts.generate_voice_clone, **request)), r) for r in (full, other)
        ]
        for job, audio in zip(jobs, expected, strict=True):
            assert_same(job.result(LIMIT), audio)


def test_asyncio(voice):
    """Several streams in one event loop, which stays responsive; a cancelled one frees its place."""
    method = voice.fast.generate_voice_clone
    requests = requests_of(voice, 3)
    expected = [alone(voice, **request) for request in requests]

    async def speak(engine, request):
        return np.concatenate([audio async for audio, _ in engine.astream(method, **request)])

    async def main():
        with engine_of(voice.fast, 2) as engine:
            cancelled = asyncio.create_task(speak(engine, requests[0] | dict(max_new_tokens=300)))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            spoken = await asyncio.gather(*(speak(engine, request) for request in requests))
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


@pytest.mark.parametrize(
    "name", ["x-vector", *(pytest.param(name, marks=pytest.mark.slow) for name in ("in-context", "preset"))]
)
def test_texts_that_arrive_are_spoken_as_if_they_were_whole(voices, name):
    """Beside other streams, from threads and from asyncio, at different speeds."""
    voice = voices(name).end_comes_up(True)
    method = getattr(voice.fast, voice.method)
    requests = [request | dict(text=f"{request['text']}, and 3 more.") for request in requests_of(voice, 6)]
    expected = [alone(voice, **request | dict(non_streaming_mode=False)) for request in requests]

    def speak(engine, number):
        request = requests[number] | dict(non_streaming_mode=False)
        if number % 3 == 1:
            request["text"] = pieces_of(request["text"], seconds=0.002 * number)
        if number % 3 != 2:
            return joined(engine.stream(method, **request))
        request["text"] = async_pieces_of(request["text"])

        async def collect():
            return [chunk async for chunk in engine.astream(method, **request)]

        return joined(asyncio.run(collect()))

    with engine_of(voice.fast, 4) as engine, ThreadPoolExecutor(6) as threads:
        jobs = [threads.submit(speak, engine, number) for number in range(6)]
        for job, audio in zip(jobs, expected, strict=True):
            assert_same(job.result(LIMIT), audio)
        wait_until_idle(engine)


def test_a_stream_whose_text_is_late_waits_and_others_go_on(voices):
    """The frames that are known are heard at once, however small the chunk."""
    voice = voices("x-vector").end_comes_up(False)
    method = voice.fast.generate_voice_clone
    go_on = threading.Event()
    text = "one two three four five six"
    caller = contextvars.ContextVar("caller")
    caller.set("me")

    def pieces():
        assert caller.get() == "me"  # as if the iterator ran in the caller's thread
        yield text[:14]
        assert go_on.wait(LIMIT)
        yield text[14:]

    request = dict(seed=3, max_new_tokens=30, non_streaming_mode=False, **voice.arguments)
    expected = alone(voice, text=text, **request)
    with engine_of(voice.fast, 2) as engine:
        chunks = engine.stream(method, text=pieces(), **request)
        heard = [next(chunks)[0]]
        assert_same(joined(engine.stream(method, text=text, **request)), expected)
        go_on.set()
        heard += [audio for audio, _ in chunks]
        assert_same(np.concatenate(heard), expected)


def test_an_iterator_that_fails_or_stops_ends_its_stream_only(voices):
    voice = voices("x-vector").end_comes_up(False)
    method = voice.fast.generate_voice_clone
    (request,) = requests_of(voice, 1)
    request |= dict(non_streaming_mode=False, max_new_tokens=40)

    def failing(start):
        yield start
        raise KeyError("the language model is gone")

    def stopping(start):
        yield start
        is_over.wait(LIMIT)

    is_over = threading.Event()
    with engine_of(voice.fast, 1) as engine:
        for start in ("", "one two three four"):
            with pytest.raises(KeyError, match="gone"):
                list(engine.stream(method, **request | dict(text=failing(start))))
            with pytest.raises(StreamTimeout, match="no text"):
                list(engine.stream(method, **request | dict(text=stopping(start)), text_timeout=0.3))
            wait_until_idle(engine)
        unread = engine.stream(method, **request | dict(text=stopping(start)), text_timeout=0.3)
        next(unread)
        wait_until_idle(engine)  # its place must not depend on a listener who has stopped reading
        with pytest.raises(StreamTimeout, match="no text"):
            list(unread)
        with pytest.raises(ValueError, match="empty"):
            list(engine.stream(method, **request | dict(text=iter([" "]))))
        heard = []
        pieces = iter(["one two three four ", "\ud800", "five " * 30, "six"])
        with pytest.raises(ValueError, match="UTF-8"):
            heard.extend(engine.stream(method, **request | dict(text=pieces)))
        assert len(joined(heard)) < 20 * 1920  # nothing after the bad piece, which would take all 39 frames
        assert next(pieces).startswith("five")  # nor is it read
        assert_same(joined(engine.stream(method, **request)), alone(voice, **request))
        engine.intake.max_characters = 5
        with pytest.raises(ValueError, match="never fit"):
            list(engine.stream(method, **request | dict(text=itertools.repeat("a "))))
    is_over.set()


@pytest.mark.parametrize("pieces", [["Hi th", "<", " a"], ["Hi th", "", " a"]], ids=str)
def test_a_piece_without_a_new_token(voice, pieces):
    """In the middle of a word no token may be known yet."""
    request = dict(seed=1, max_new_tokens=30, non_streaming_mode=False, **voice.arguments)
    expected = alone(voice, text="".join(pieces), **request)
    with engine_of(voice.fast, 2) as engine:
        assert_same(joined(engine.stream(voice.fast.generate_voice_clone, text=iter(pieces), **request)), expected)


def test_too_many_requests(voice):
    """A burst that finds places free is not refused: only what waits beyond them counts."""
    with engine_of(voice.fast, 3, max_waiting=1) as engine:
        with engine.speech.turns.take():  # nobody is admitted yet
            streams = [engine.stream(voice.fast.generate_voice_clone, **request) for request in requests_of(voice, 4)]
            with pytest.raises(QueueFull, match="1 requests are waiting"):
                engine.stream(voice.fast.generate_voice_clone, **requests_of(voice, 1)[0])
        for chunks in streams:
            chunks.close()


def test_cancelled_while_its_prompt_is_queued(voice):
    """A prompt that is never built must not count as one that is being built."""

    async def main():
        with engine_of(voice.fast, 2) as engine:
            release = threading.Event()
            engine.intake.thread.submit(release.wait, LIMIT)
            chunks = engine.astream(voice.fast.generate_voice_clone, **requests_of(voice, 1)[0])
            task = asyncio.create_task(anext(chunks))
            await asyncio.sleep(0.05)
            assert engine.intake.preparing == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release.set()
            assert engine.intake.preparing == 0 and not engine.listeners

    asyncio.run(main())


def test_a_bad_reference_fails_alone(voices, monkeypatch):
    """Whatever fails while a stream is admitted, its listener must hear of it, and the engine speaks on. Those admitted
    with it are read again, from the same random numbers."""
    voice = voices("in-context").end_comes_up(True)
    method = voice.fast.generate_voice_clone
    bad, request = requests_of(voice, 2)
    with engine_of(voice.fast, 2) as engine:
        codec, feed, calls = engine.runner.codec, engine.runner.codec.feed, itertools.count()
        monkeypatch.setattr(codec, "feed", lambda *codes: 1 / 0 if next(calls) < 2 else feed(*codes))  # the retry, too
        with engine.speech.turns.take():  # both are admitted together
            streams = [engine.stream(method, **bad), engine.stream(method, **request)]
        with pytest.raises(ZeroDivisionError):
            list(streams[0])
        assert_same(joined(streams[1]), alone(voice, **request))
        wait_until_idle(engine)


def test_reference_codes_beyond_the_codebook_are_refused_at_the_call(voices):
    """They raised an IndexError in the engine's thread, and on a GPU a kernel would fail, and all streams with it."""
    voice = voices("in-context")
    method = voice.fast.generate_voice_clone
    (item,) = voice.arguments["voice_clone_prompt"]
    with engine_of(voice.fast, 1) as engine:
        for bad in (2048, -1):
            codes = item.ref_code.clone()
            codes[3, 0] = bad
            request = dict(text="Hello.", voice_clone_prompt=[dataclasses.replace(item, ref_code=codes)])
            for speak in (stream, engine.stream):
                with pytest.raises(ValueError, match="the codebooks have 0 to 2047"):
                    speak(method, **request)
        request["voice_clone_prompt"][0].ref_code = item.ref_code[:, :3]
        with pytest.raises(ValueError, match="must be .frames, 5."):
            engine.stream(method, **request)


def test_closing_ends_streams_whose_text_has_not_come(voice):
    engine = engine_of(voice.fast, 1)
    never = threading.Event()

    def pieces():
        never.wait(LIMIT)
        yield "too late"

    request = dict(text=pieces(), non_streaming_mode=False, **voice.arguments)
    chunks = engine.stream(voice.fast.generate_voice_clone, **request)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(chunks)
    never.set()


def test_every_speech_that_is_cut_short_warns(voices, monkeypatch):
    """Python's own filter shows a text once per line of code: the second speech was cut off silently."""
    voice = voices("x-vector").end_comes_up(False)
    method, request = voice.fast.generate_voice_clone, dict(text="Hi", **voice.arguments)
    with engine_of(voice.fast, 1) as engine, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(2):
            list(engine.stream(method, max_new_tokens=3, **request))
        monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.MIN_FRAME_LIMIT", 1)
        monkeypatch.setattr("qwen3_tts_cuda_graphs.speech.long_text.FRAMES_PER_TOKEN", 0)
        for _ in range(2):
            list(speak(method, **request))
    texts = [str(warning.message) for warning in warned]
    assert [("cut off after 2 frames" in text, "'Hi' did not end" in text) for text in texts] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]


@pytest.mark.filterwarnings("error", "ignore:the speech was cut off")
def test_a_plain_stream_that_is_paused(voice, monkeypatch):
    """A closing engine neither waits for it nor takes over. A running one takes over after a while, and goes on even
    where warnings are errors."""
    method = voice.fast.generate_voice_clone
    (request,) = requests_of(voice, 1)
    plain = {name: value for name, value in request.items() if name != "seed"}
    engine = engine_of(voice.fast, 1)
    paused = stream(method, **plain)
    next(paused)
    chunks = engine.stream(method, **request)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match="closed"):
        next(chunks)
    list(paused)

    with engine_of(voice.fast, 1) as engine:
        monkeypatch.setattr(engine.speech.turns, "patience", 0.1)
        paused = stream(method, **plain)
        next(paused)
        assert_same(joined(engine.stream(method, **request)), alone(voice, **request))
        with pytest.raises(RuntimeError, match="taken over"):
            next(paused)


def test_audio_that_cannot_be_delivered_is_not_left_out(voice, monkeypatch):
    """A chunk that is lost must not be followed by a normal end."""
    (request,) = requests_of(voice, 1)
    with engine_of(voice.fast, 1) as engine:
        monkeypatch.setattr(PendingAudio, "wait", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="stopped"):
            list(engine.stream(voice.fast.generate_voice_clone, **request))
