"""Requests one after another: none is influenced by the one before, and none is cut short silently."""

import copy
import dataclasses
import gc
import pickle
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import GREEDY, assert_the_same_together, joined, slow, use_rows, watched

from qwen3_tts_cuda_graphs.common.loading import load, load_upstream
from qwen3_tts_cuda_graphs.prompts.clone_prompts import speaker_prompt
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.speech.whole_calls import on_rows

TEXT = "Hello there."


@pytest.fixture
def voice(voices):
    return voices("x-vector").end_comes_up(True)


def assert_same_audio(audios, expected):
    """Upstream cuts off the reference's audio, whose length it may round down by a sample."""
    for audio, whole in zip(audios, expected, strict=True):
        assert 0 <= len(whole) - len(audio) <= 1
        np.testing.assert_allclose(audio, whole[len(whole) - len(audio) :], rtol=0, atol=1e-5)


@pytest.fixture
def assert_as_fresh(voice):
    """assert_as_fresh(**settings): a whole call and a stream give upstream's speech, and all rows are free."""

    def check(**settings):
        audios = []
        for tts in (voice.upstream, voice.fast):
            torch.manual_seed(5)
            audios += tts.generate_voice_clone(TEXT, **voice.arguments, **settings)[0]
        torch.manual_seed(5)
        audios.append(joined(stream(voice.fast_method, text=TEXT, **voice.arguments, **settings)))
        assert_same_audio(audios[1:], audios[:1] * 2)
        runner = voice.fast.speech.runner
        assert sorted(runner.free) == list(range(runner.row_count)) and not runner.active

    return check


def test_after_an_abandoned_stream(voice, assert_as_fresh):
    """A stream that is dropped halfway must not leave its turn, its row or its repetition penalty behind."""
    for _ in stream(voice.fast_method, chunk_frames=2, text="Never mind.", **voice.arguments):
        break
    assert_as_fresh()


def test_after_an_exception(voice, assert_as_fresh):
    """An error in the middle of a request must not leave its turn, its row or its state behind."""
    with mock.patch.object(voice.fast.speech.runner.graphs.of(1), "step", side_effect=ZeroDivisionError):
        for speak in (voice.fast_method, lambda **request: joined(stream(voice.fast_method, **request))):
            with pytest.raises(ZeroDivisionError):
                speak(text="Never mind.", **voice.arguments)
    assert_as_fresh()


def test_after_other_settings(voice, assert_as_fresh):
    """Settings are tensors that stay: each request must set all of them."""
    voice.codes(voice.fast, text="A longer one, by far.", **GREEDY)
    list(stream(voice.fast_method, text="A longer one, by far.", **voice.arguments, **GREEDY))
    assert_as_fresh(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3, subtalker_top_k=3)
    assert_as_fresh()


def test_another_end_token(voice):
    """As in upstream, a request may name its end token. The next request has the model's own again."""
    codes, _ = voice.codes(voice.upstream, text=TEXT, do_sample=False)
    other_end = dict(text=TEXT, do_sample=False, eos_token_id=int(codes[0][-1, 0]), max_new_tokens=100)
    voice.assert_same_tokens(**other_end)
    voice.assert_same_tokens(text=TEXT, do_sample=False)
    texts = [TEXT, "And another one, which goes on."]
    codes, _ = voice.codes(voice.upstream, text=texts, seed=6, max_new_tokens=12)
    for row in codes:  # a row that has ended is padded while the other continues
        voice.assert_same_tokens(text=texts, seed=6, max_new_tokens=12, eos_token_id=int(row[3, 0]))


def test_two_requests_share_one_seed(voice):
    """The surplus frame after the last one must not change the random numbers of the next request."""

    def two(tts):
        first, _ = voice.codes(tts, text=TEXT, seed=7)
        return voice.codes(tts, text=TEXT, seed=int(torch.randint(1000, ())))[0][0]

    assert torch.equal(two(voice.fast), two(voice.upstream))


def patience(voice, seconds):
    """A context in which a paused stream keeps its turn for so many seconds."""
    return mock.patch.object(voice.fast.speech.turns, "patience", seconds)


@pytest.mark.parametrize("heard", [1, 2])
def test_interleaved_streams_are_refused(voice, heard, caplog):
    """Two streams would overwrite each other's state: the older one raises, and the newer one is not disturbed."""

    def start():
        return stream(voice.fast_method, chunk_frames=1, text=TEXT, seed=3, **voice.arguments)

    expected = joined(start())
    with patience(voice, 0):
        older = start()
        for _ in range(heard):
            next(older)
        newer = start()
        chunks = [next(newer)]
        assert "neither finished nor closed" in caplog.text
        with pytest.raises(RuntimeError, match="another request"):
            next(older)
        np.testing.assert_array_equal(joined([*chunks, *newer]), expected)


def test_a_stream_may_be_resumed_in_any_thread(voices):
    """Servers with thread pools resume a stream in any thread. A second stream waits, even in a thread that has resumed
    the first one."""
    voice = voices("x-vector").end_comes_up(False)
    request = dict(chunk_frames=2, text=TEXT, max_new_tokens=20, **voice.arguments, **GREEDY)
    expected = joined(stream(voice.fast_method, **request))
    first, second = (stream(voice.fast_method, **request) for _ in range(2))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        chunks = [pool.submit(next, first).result() for pool in (one, other, one)]
        waiting = one.submit(list, second)
        chunks += other.submit(list, first).result()
        for heard in (chunks, waiting.result()):
            np.testing.assert_array_equal(joined(heard), expected)


def test_a_stream_that_nobody_resumes(voice, assert_as_fresh, caplog):
    """If a stream is kept but not resumed, the next request waits for a while, but not forever."""
    kept = stream(voice.fast_method, chunk_frames=1, text="Never mind.", **voice.arguments)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(next, kept).result()
    with patience(voice, 0.1):
        assert_as_fresh()
    assert "neither finished nor closed" in caplog.text
    with pytest.raises(RuntimeError, match="another request"):
        next(kept)


def test_numbers_that_are_not_finite(voice, assert_as_fresh):
    """NaN in a prompt is refused. NaN in the cache must not reach the next request, although 0 x NaN is NaN."""
    speaker = voice.arguments["voice_clone_prompt"]["ref_spk_embedding"][0].clone()
    speaker[3] = float("nan")
    prompt = voice.arguments["voice_clone_prompt"] | dict(ref_spk_embedding=[speaker])
    with pytest.raises(ValueError, match="NaN or infinite"):
        voice.codes(voice.fast, text=TEXT, voice_clone_prompt=prompt)
    voice.fast.speech.runner.rows.values[0].fill_(float("nan"))
    assert_as_fresh()


def test_inference_mode_leaves_nothing_behind(voice):
    """Tensors made in inference mode cannot be written outside of it."""
    with torch.inference_mode():
        tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=100)
        voice.codes(tts, text=["a", "b"], language="English", max_new_tokens=3)
    voice.codes(tts, text=["a", "b"], language="English", max_new_tokens=3)
    voice.codes(tts, text="a", max_new_tokens=3)
    list(stream(tts.generate_voice_clone, text="a", max_new_tokens=3, **voice.arguments))


def test_threads_take_turns(voice):
    """Whole calls and streams of several threads at once share one cache: each must get what it would get alone."""
    texts = ["One.", "Two is longer.", "Three!", "Four, the last of them."]
    request = dict(max_new_tokens=40, **voice.arguments, **GREEDY)

    def whole(text):
        return voice.fast_method(text, **request)[0][0]

    def streamed(text):
        return joined(stream(voice.fast_method, chunk_frames=1, text=text, **request))

    assert_the_same_together([(speak, text) for text in texts for speak in (whole, streamed)])


@pytest.mark.parametrize("name", ["x-vector", *slow("in-context", "preset", "designed")])
def test_chunks_joined_are_the_whole(voices, name):
    """No chunk is lost, repeated or decoded from a wrong state, and all have the promised sizes."""
    voice = voices(name).end_comes_up(True)
    method = getattr(voice.fast, voice.method)
    torch.manual_seed(2)
    whole, rate = method(text=TEXT, **voice.arguments)
    for chunk_frames in (None, 1, 5) if name == "x-vector" else (None, 5):
        chunks, rates = zip(*stream(method, chunk_frames=chunk_frames, text=TEXT, seed=2, **voice.arguments))
        *sizes, last = [len(chunk) // 1920 for chunk in chunks]
        expected = [1, 1, 2, 4, *[8] * len(sizes)] if chunk_frames is None else [chunk_frames] * len(chunks)
        assert set(rates) == {rate} and sizes == expected[: len(sizes)] and last <= expected[len(sizes)]
        assert_same_audio([np.concatenate(chunks)], whole)


def test_stream_makes_the_prompt_from_a_recording(voice, recording):
    """With ref_audio instead of a prompt, the reference's codes must prime the codec, too."""
    request = dict(text=TEXT, ref_audio=recording, ref_text="what it says")
    torch.manual_seed(2)
    whole, _ = voice.fast_method(**request)
    assert_same_audio([joined(stream(voice.fast_method, seed=2, **request))], whole)


def test_a_list_is_one_batch_on_a_cpu(voice):
    """A list of any length has upstream's seeded tokens, however many rows the runner has."""
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=100)
    request = dict(text=["One.", "Two!", "3", "Four?", "V"], language="English", max_new_tokens=12, seed=3)
    (expected, after), (codes, after_ours) = (voice.codes(model, **request) for model in (voice.upstream, tts))
    assert after_ours == after
    for row, expected_row in zip(codes, expected, strict=True):
        assert torch.equal(row, expected_row)


def test_graphs_of_the_last_size_are_kept(voice):
    """The runner for the last length of a list is kept. One for every length would fill the memory, and making one for
    each request would take too long."""
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=100)

    def runner_after(*texts, **settings):
        voice.codes(tts, text=[*texts], language="English", max_new_tokens=3, **settings)
        return tts.model.talker.generate.__self__.list_runner

    two = runner_after("a", "b")
    assert runner_after("c", "d", temperature=0.5) is two
    assert runner_after("e", "f", "g") is not two


# ---- The methods that replace upstream's on a GPU, compared with upstream's own, which a CPU keeps


@pytest.fixture
def two_rows():
    """two_rows(voice): the voice's method on two rows. Checks that they are free after the test."""
    runners = []

    def method(voice):
        use_rows(voice.fast.speech.runner, 2)
        runners.append((voice.fast.speech.runner, 8))
        return types.MethodType(on_rows(voice.method, type(voice.fast)), voice.fast)

    yield method
    for runner, rows in runners:
        assert sorted(runner.free) == [0, 1] and not runner.active
        use_rows(runner, rows)


def different_voices(voice):
    """A voice for each of four texts."""
    if voice.method == "generate_custom_voice":
        return dict(speaker=["dylan", "aiden", "Dylan", "aiden"], instruct=["whisper", "", "shout", ""])
    if voice.method == "generate_voice_design":
        return dict(instruct=["a warm narrator", "a child", "", "an old man"])
    prompt = voice.arguments["voice_clone_prompt"]
    if isinstance(prompt, dict):  # more voices than texts
        return dict(
            voice_clone_prompt=prompt | dict(ref_spk_embedding=[k * prompt["ref_spk_embedding"][0] for k in range(8)])
        )
    (item,) = prompt
    shorter = dataclasses.replace(item, ref_code=item.ref_code[:7], ref_text="another")
    return dict(voice_clone_prompt=[item, shorter, shorter, item])


@pytest.mark.parametrize("name", ["in-context", *slow("x-vector", "preset", "designed")])
def test_a_list_on_rows(voices, two_rows, name):
    """There are more texts than rows, they end at different frames, and each has its own language and voice. The audio
    comes in the order of the texts."""
    voice = voices(name).end_comes_up(True)
    texts = ["Hello there.", "Hi", "A sentence that is a good deal longer than the others.", "Four!"]
    lists = dict(language=["German", "English", "Auto", "Chinese"]) | different_voices(voice)
    request = voice.arguments | lists | dict(text=texts, max_new_tokens=60) | GREEDY
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the speech was cut off")
        audios, rate = two_rows(voice)(**request)
        expected, _ = getattr(voice.fast, voice.method)(**request)
    assert rate == 24000 and len({len(audio) for audio in audios}) > 1
    assert_same_audio(audios, expected)


def test_one_text_on_rows(voice, two_rows):
    """A seed gives the same speech as upstream, and the next request gets the same random numbers."""
    method = two_rows(voice)
    results = []
    for speak in (method, voice.fast_method):
        torch.manual_seed(3)
        results.append((*speak(TEXT, **voice.arguments)[0], torch.rand(1)))
    (audio, after), (expected, after_expected) = results
    assert after == after_expected
    assert_same_audio([audio], [expected])


def test_mistakes_in_a_list_on_rows(voice, two_rows):
    """After an error in one of several texts all rows are free, whichever texts were admitted with it."""
    method = two_rows(voice)
    request = dict(text=["One.", "Two."], max_new_tokens=4, **voice.arguments)
    for mistake in (
        dict(language=["English", "Klingon"]),
        dict(language=["English"] * 3),
        dict(temperature=-1.0),
        dict(max_new_tokens=1),
        dict(text=["x" * 500, "Two."], non_streaming_mode=True),
    ):
        with pytest.raises(ValueError):
            method(**request | mistake)
    broken = watched(voice.fast.speech.runner.codec, "reset", lambda row: 1 / (row != 1))
    with broken, pytest.raises(ZeroDivisionError):
        method(**request)
    assert sorted(voice.fast.speech.runner.free) == [0, 1]
    request["voice_clone_prompt"] = speaker_prompt(request["voice_clone_prompt"]["ref_spk_embedding"][0])  # for both
    with pytest.warns(UserWarning, match="cut off after 3 frames") as warned:
        assert [len(audio) for audio in method(**request, **GREEDY)[0]] == [3 * 1920] * 2
    assert len(warned) == 2  # one for each text


def test_max_new_tokens_before_the_end_warns(voice):
    """Speech is never cut off silently: a warning says where, and which limit to raise."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")  # Python's own filter, which shows a text once per line of code
        for _ in range(2):
            voice.codes(voice.fast, text=TEXT, max_new_tokens=4)
    texts = [str(warning.message) for warning in warned]
    assert texts == ["the speech was cut off after 3 frames, before its end: raise max_new_tokens"] * 2


def test_full_cache_before_the_end_warns(voices):
    """The warning also comes if the cache is full. The frames up to there are upstream's."""
    voice = voices("x-vector").end_comes_up(False)
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=20)
    tts.model.talker.codec_head.weight.data[voice.end_token] = 0
    with pytest.warns(UserWarning, match="cut off after 10 frames, before its end: raise max_seq_len"):
        codes, _ = voice.codes(tts, text=TEXT)
    assert torch.equal(codes[0], voice.codes(voice.upstream, text=TEXT, max_new_tokens=11)[0][0])


def test_whole_numbers_may_be_numpys(voice):
    settings = dict(top_k=np.int64(5), chunk_frames=np.int64(2), max_new_tokens=4)
    with pytest.warns(UserWarning, match="cut off"):
        list(stream(voice.fast_method, text="a", **voice.arguments | settings))


def test_the_end_at_the_limit_does_not_warn(voice, recwarn):
    """Speech that ends with the last allowed frame is complete."""
    codes, _ = voice.codes(voice.fast, text=TEXT, seed=2)
    voice.codes(voice.fast, text=TEXT, seed=2, max_new_tokens=len(codes[0]) + 1)
    assert not [warning for warning in recwarn if "cut off" in str(warning.message)]


def test_prompt_longer_than_the_cache_is_refused(voice):
    """It is refused before it is written behind the end of the cache."""
    with pytest.raises(ValueError, match=r"the prompt takes \d{3} of 384 positions: raise max_seq_len"):
        voice.codes(voice.fast, text="x" * 500, non_streaming_mode=True)


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", [0.0, -1.0, float("nan")]),
        ("top_p", [-0.1, 1.5]),
        ("top_k", [-1]),
        ("subtalker_temperature", [0.0]),
        ("subtalker_top_p", [2.0]),
        ("repetition_penalty", [0.0, float("nan")]),
        ("max_new_tokens", [1]),
    ],
)
def test_impossible_settings_are_refused(voice, name, values):
    """Without a check, such settings would give NaN, or leave no token to sample."""
    for value in values:
        with pytest.raises(ValueError):
            voice.codes(voice.fast, text=TEXT, **{name: value})


def test_next_to_no_temperature_takes_the_best(voice):
    """Scores divided by a very small temperature overflow, and infinity minus infinity is NaN."""
    (greedy,) = voice.codes(voice.fast, text=TEXT, **GREEDY)[0]
    (cold,) = voice.codes(voice.fast, text=TEXT, temperature=1e-45, subtalker_temperature=1e-45)[0]
    assert torch.equal(cold, greedy)


@pytest.mark.parametrize(
    "mistake, message",
    [
        (dict(chunk_frames=0), "chunk_frames is 0"),
        (dict(chunk_frames=-1), "chunk_frames is -1"),
        (dict(chunk_frames=2.5), "chunk_frames is 2.5"),
        (dict(text=""), "the text is empty"),
        (dict(text=" \n\t"), "the text is empty"),
        (dict(text=None), "the text is a NoneType"),
        (dict(text=5), "the text is a int"),
        (dict(text=b"Hello."), "the text is a bytes"),
        (dict(text=[None]), "the text is a NoneType"),
        (dict(text="caf\udce9"), r"UTF-8 cannot encode: '\\udce9'"),
        (dict(text=["a", "b"]), "one text at a time, not 2"),
        (dict(text=[]), "one text at a time, not 0"),
        (dict(eos_token_id=5), "model's own end token"),
        (dict(top_k=2.5), "top_k is 2.5, it must be a whole number"),
        (dict(max_new_tokens=6.5), "max_new_tokens is 6.5, it must be a whole number"),  # it never ended
        (dict(voice_clone_prompt=speaker_prompt(torch.zeros(7))), "has 7 numbers, this model takes 64"),
    ],
    ids=str,
)
def test_stream_reports_mistakes_at_the_call(voice, mistake, message):
    """An error at the first next() would be too late, as a server has sent its headers by then."""
    with pytest.raises(ValueError, match=message):
        stream(voice.fast_method, **dict(text="a") | voice.arguments | mistake)


def test_an_interrupted_prefill_frees_its_row(voice):
    """Ctrl-C during a prefill lost the row for good."""
    runner = voice.fast.speech.runner
    interrupted = mock.patch.object(runner, "read_prompts", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        next(stream(voice.fast_method, text="a", **voice.arguments))
    assert sorted(runner.free) == list(range(runner.row_count))


@pytest.mark.parametrize("size", ["rows", "max_seq_len"])
def test_a_model_without_room(voice, size):
    with pytest.raises(ValueError, match=f"{size} is 0, it must be a whole number of at least 1"):
        accelerate(load_upstream(str(voice.folder), "cpu"), **{size: 0})


def test_stream_needs_an_accelerated_model(voice):
    """The error says what to do, unlike an AttributeError of upstream's objects."""
    with pytest.raises(ValueError, match="call accelerate"):
        stream(voice.upstream.generate_voice_clone, text="a", **voice.arguments)


def test_a_model_can_be_accelerated_again(voice):
    """A second `accelerate` must not replace again what the first one has replaced."""
    tts = load(str(voice.folder), max_seq_len=100, device="cpu")
    accelerate(tts, max_seq_len=300)
    codes, expected = (voice.codes(model, text=TEXT, seed=5)[0][0] for model in (tts, voice.upstream))
    assert torch.equal(codes, expected)


def test_accelerated_again_under_an_open_stream(voice):
    """The stream's graphs still read the tensors that the model's modules had before. They are kept until the stream
    ends, and no longer."""
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=100)
    chunks = stream(tts.generate_voice_clone, chunk_frames=1, text=TEXT, **voice.arguments)
    next(chunks)
    norms = weakref.ref(tts.model.talker.model.layers[0].self_attn.forward.args[-1])
    accelerate(tts, max_seq_len=100)
    gc.collect()
    assert norms() is not None
    del chunks
    gc.collect()
    assert norms() is None


def test_configs_of_an_accelerated_model(voice):
    """The configs of an accelerated model have a faster class. A config that was pickled or copied must have upstream's
    class and the same content. Configs of other models in the process stay as they are."""
    ours, theirs = (tts.model.config for tts in (voice.fast, voice.upstream))
    assert type(ours).__getattribute__ is object.__getattribute__ is not type(theirs).__getattribute__
    for config, original in ((ours, theirs), (ours.talker_config, theirs.talker_config)):
        assert isinstance(config, type(original)) and config.to_dict() == original.to_dict()
        for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
            assert type(same) is type(original) and same.to_dict() == original.to_dict()
