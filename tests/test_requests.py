"""One request after another: nothing of the one before shows, nothing is cut short silently."""
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from conftest import VOICES, assert_the_same_together
from generate import accelerate, load, load_upstream, stream

TEXT = "Hello there."
cut_off_on_purpose = pytest.mark.filterwarnings("ignore:the speech was cut off")


@pytest.fixture
def voice(voices):
    return voices("x-vector").end_comes_up(True)


@pytest.fixture
def fresh_codes(voice):
    """What a request gives on a model that has served no other."""
    def codes(**request):
        tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=384, max_batch=4)
        return voice.codes(tts, text=TEXT, **request)[0][0]
    return codes


def test_after_an_abandoned_stream(voice, fresh_codes):
    for _ in stream(voice.fast.generate_voice_clone, chunk_frames=2, text="Never mind.", **voice.arguments):
        break
    assert torch.equal(voice.codes(voice.fast, text=TEXT, seed=5)[0][0], fresh_codes(seed=5))


def test_after_an_exception(voice, fresh_codes, monkeypatch):
    decoder = voice.fast.model.talker.generate.__self__
    talker, _ = decoder.graphs_for(1)
    with monkeypatch.context() as broken:
        broken.setattr(talker, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            voice.codes(voice.fast, text="Never mind.")
    assert torch.equal(voice.codes(voice.fast, text=TEXT, seed=5)[0][0], fresh_codes(seed=5))


def test_after_other_settings(voice, fresh_codes):
    settings = dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3, subtalker_top_k=3, seed=5)
    voice.codes(voice.fast, text="A longer one, by far.", do_sample=False, subtalker_dosample=False)
    assert torch.equal(voice.codes(voice.fast, text=TEXT, **settings)[0][0], fresh_codes(**settings))
    assert torch.equal(voice.codes(voice.fast, text=TEXT, seed=5)[0][0], fresh_codes(seed=5))


def test_another_end_token(voice):
    """Upstream lets the caller name the end token; the next request has its own again."""
    codes, _ = voice.codes(voice.upstream, text=TEXT, do_sample=False)
    other_end = dict(text=TEXT, do_sample=False, eos_token_id=int(codes[0][-1, 0]), max_new_tokens=100)
    voice.assert_same_tokens(**other_end)
    voice.assert_same_tokens(text=TEXT, do_sample=False)


def test_two_requests_share_one_seed(voice):
    """No frame beyond the last leaves a trace in the random numbers."""
    def two(tts):
        first, _ = voice.codes(tts, text=TEXT, seed=7)
        return voice.codes(tts, text=TEXT, seed=int(torch.randint(1000, ())))[0][0]
    assert torch.equal(two(voice.fast), two(voice.upstream))


@pytest.fixture
def patience(voice, monkeypatch):
    def set(seconds):
        monkeypatch.setattr(voice.fast.model.talker.generate.__self__.turns, "patience", seconds)
    return set


@pytest.mark.parametrize("heard", [1, 2])
def test_interleaved_streams_are_refused(voice, patience, heard):
    """Two streams would write over each other's state; the older one says so, and the newer one is not disturbed."""
    def start():
        torch.manual_seed(3)
        return stream(voice.fast.generate_voice_clone, chunk_frames=1, text=TEXT, **voice.arguments)
    expected = [audio for audio, _ in start()]
    patience(0)
    older = start()
    for _ in range(heard):
        next(older)
    newer = start()
    with pytest.warns(UserWarning, match="neither finished nor closed"):
        chunks = [next(newer)[0]]
    with pytest.raises(RuntimeError, match="another request"):
        next(older)
    chunks += [audio for audio, _ in newer]
    np.testing.assert_array_equal(np.concatenate(chunks), np.concatenate(expected))


@cut_off_on_purpose
def test_a_pool_goes_on_with_streams_in_any_thread(voices):
    """As servers do. The second stream waits, even if it starts in the thread that went on with the first one."""
    voice, greedy = voices("x-vector").end_comes_up(False), dict(do_sample=False, subtalker_dosample=False)
    request = dict(chunk_frames=2, text=TEXT, max_new_tokens=20, **voice.arguments, **greedy)
    expected = np.concatenate([audio for audio, _ in stream(voice.fast.generate_voice_clone, **request)])
    first, second = (stream(voice.fast.generate_voice_clone, **request) for _ in range(2))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        chunks = [pool.submit(next, first).result()[0] for pool in (one, other, one)]
        waiting = one.submit(lambda: [audio for audio, _ in second])
        chunks += other.submit(lambda: [audio for audio, _ in first]).result()
        for heard in (chunks, waiting.result()):
            np.testing.assert_array_equal(np.concatenate(heard), expected)


def test_a_stream_that_nobody_goes_on_with(voice, patience, fresh_codes):
    """It is kept, but its thread has ended: the next request waits for a while, and no longer."""
    kept = stream(voice.fast.generate_voice_clone, chunk_frames=1, text="Never mind.", **voice.arguments)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(next, kept).result()
    patience(0.1)
    with pytest.warns(UserWarning, match="neither finished nor closed"):
        codes = voice.codes(voice.fast, text=TEXT, seed=5)[0][0]
    assert torch.equal(codes, fresh_codes(seed=5))
    with pytest.raises(RuntimeError, match="another request"):
        next(kept)


def test_numbers_that_are_not_finite(voice, fresh_codes):
    """Refused, and even if some got in, the next request is clean."""
    speaker = voice.arguments["voice_clone_prompt"]["ref_spk_embedding"][0].clone()
    speaker[3] = float("nan")
    prompt = voice.arguments["voice_clone_prompt"] | dict(ref_spk_embedding=[speaker])
    with pytest.raises(ValueError, match="not finite"):
        voice.codes(voice.fast, text=TEXT, voice_clone_prompt=prompt)
    for graph in voice.fast.model.talker.generate.__self__.graphs_for(1):
        graph.cache.layers[0].values.fill_(float("nan"))
    assert torch.equal(voice.codes(voice.fast, text=TEXT, seed=5)[0][0], fresh_codes(seed=5))


@cut_off_on_purpose
def test_inference_mode_leaves_nothing_behind(voice):
    """Tensors made in inference mode cannot be written outside of it."""
    with torch.inference_mode():
        tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=100)
        voice.codes(tts, text=["a", "b"], language="English", max_new_tokens=3)
    voice.codes(tts, text=["a", "b"], language="English", max_new_tokens=3)
    voice.codes(tts, text="a", max_new_tokens=3)


def test_threads_take_turns(voice):
    """Whole calls and streams of several threads at once: each gets what it would get alone."""
    greedy = dict(do_sample=False, subtalker_dosample=False, max_new_tokens=40)
    texts = ["One.", "Two is longer.", "Three!", "Four, the last of them."]

    def whole(text):
        return voice.fast.generate_voice_clone(text, **voice.arguments, **greedy)[0][0]

    def streamed(text):
        return np.concatenate([audio for audio, _ in stream(
            voice.fast.generate_voice_clone, chunk_frames=1, text=text, **voice.arguments, **greedy)])
    assert_the_same_together([(speak, text) for text in texts for speak in (whole, streamed)])


@pytest.mark.parametrize("name", VOICES)
@pytest.mark.parametrize("chunk_frames", [None, 1, 5])
def test_chunks_joined_are_the_whole(voices, name, chunk_frames):
    voice = voices(name).end_comes_up(True)
    method = getattr(voice.fast, voice.method)
    torch.manual_seed(2)
    (whole,), rate = method(text=TEXT, **voice.arguments)
    torch.manual_seed(2)
    chunks, rates = zip(*stream(method, chunk_frames=chunk_frames, text=TEXT, **voice.arguments))
    sizes = [len(chunk) // 1920 for chunk in chunks]
    expected = [1, 1, 2, 4, *[8] * len(sizes)] if chunk_frames is None else [chunk_frames] * len(sizes)
    assert set(rates) == {rate} and sizes[:-1] == expected[:len(sizes) - 1] and sizes[-1] <= expected[len(sizes) - 1]
    joined = np.concatenate(chunks)
    assert 0 <= len(whole) - len(joined) <= 1                     # upstream's proportion rounds down, by a sample
    np.testing.assert_allclose(joined, whole[len(whole) - len(joined):], rtol=0, atol=1e-5)


def test_stream_makes_the_prompt_from_a_recording(voice, recording):
    request = dict(text=TEXT, ref_audio=recording, ref_text="what it says")
    torch.manual_seed(2)
    (whole,), _ = voice.fast.generate_voice_clone(**request)
    torch.manual_seed(2)
    joined = np.concatenate([audio for audio, _ in stream(voice.fast.generate_voice_clone, **request)])
    np.testing.assert_allclose(joined, whole[len(whole) - len(joined):], rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [dict(do_sample=False, subtalker_dosample=False), dict()],
                         ids=["greedy", "seeded"])
def test_more_texts_than_fit_a_batch(voice, settings):
    """Groups of max_batch=4: greedy rows are those of one big batch, seeded ones reproduce."""
    texts = ["One.", "Two, longer.", "Three, quite a bit longer.", "Four.", "Five!"]              # one alone, padded
    request = dict(text=texts, language="English", max_new_tokens=100, seed=3, **settings)
    codes, _ = voice.codes(voice.fast, **request)
    expected, _ = voice.codes(voice.upstream if settings else voice.fast, **request)
    assert len(codes) == 5 and all(torch.equal(row, other) for row, other in zip(codes, expected))


@cut_off_on_purpose
def test_batches_are_captured_once_and_share_memory(voice):
    decoder = voice.fast.model.talker.generate.__self__
    voice.codes(voice.fast, text=["a", "b"], language="English", max_new_tokens=3)
    voice.codes(voice.fast, text=["a", "b", "c"], language="English", max_new_tokens=3)
    two, three = decoder.graphs_for(2), decoder.graphs_for(3)
    voice.codes(voice.fast, text=["d", "e"], language="English", max_new_tokens=3, temperature=0.5)
    assert decoder.graphs_for(2) is two
    assert two[0].cache.layers[0].keys.data_ptr() == three[0].cache.layers[0].keys.data_ptr()


def test_max_new_tokens_before_the_end_warns(voice):
    with pytest.warns(UserWarning, match="cut off after 3 frames.*max_new_tokens above 4"):
        voice.codes(voice.fast, text=TEXT, max_new_tokens=4)


def test_full_cache_before_the_end_warns(voices):
    voice = voices("x-vector").end_comes_up(False)
    tts = accelerate(load_upstream(str(voice.folder), "cpu"), max_seq_len=20)
    tts.model.talker.codec_head.weight.data[voice.end_token] = 0
    with pytest.warns(UserWarning, match="cut off after 10 frames.*max_seq_len above 20"):
        codes, _ = voice.codes(tts, text=TEXT)
    assert torch.equal(codes[0], voice.codes(voice.upstream, text=TEXT, max_new_tokens=11)[0][0])


def test_the_end_at_the_limit_does_not_warn(voice, recwarn):
    codes, _ = voice.codes(voice.fast, text=TEXT, seed=2)
    voice.codes(voice.fast, text=TEXT, seed=2, max_new_tokens=len(codes[0]) + 1)
    assert not [warning for warning in recwarn if "cut off" in str(warning.message)]


def test_prompt_longer_than_the_cache_is_refused(voice):
    with pytest.raises(ValueError, match=r"takes \d{3} positions, the cache has 384: shorten"):
        voice.codes(voice.fast, text="x" * 500, non_streaming_mode=True)


@pytest.mark.parametrize("settings", [
    dict(temperature=0.0), dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_p=-0.1), dict(top_p=1.5),
    dict(top_k=-1), dict(subtalker_temperature=0.0), dict(subtalker_top_p=2.0), dict(repetition_penalty=0.0),
    dict(repetition_penalty=float("nan")), dict(max_new_tokens=1)], ids=str)
def test_impossible_settings_are_refused(voice, settings):
    with pytest.raises(ValueError):
        voice.codes(voice.fast, text=TEXT, **settings)


def test_next_to_no_temperature_takes_the_best(voice):
    greedy, = voice.codes(voice.fast, text=TEXT, do_sample=False, subtalker_dosample=False)[0]
    cold, = voice.codes(voice.fast, text=TEXT, temperature=1e-45, subtalker_temperature=1e-45)[0]
    assert torch.equal(cold, greedy)


def test_stream_wants_one_text_and_an_accelerated_model(voice):
    with pytest.raises(ValueError, match="chunk_frames is 0"):
        next(stream(voice.fast.generate_voice_clone, chunk_frames=0, text="a", **voice.arguments))
    with pytest.raises(ValueError, match="one text at a time, not 2"):
        next(stream(voice.fast.generate_voice_clone, text=["a", "b"], **voice.arguments))
    with pytest.raises(ValueError, match="call accelerate"):
        next(stream(voice.upstream.generate_voice_clone, text="a", **voice.arguments))
    with pytest.raises(ValueError, match="model's own end token"):
        next(stream(voice.fast.generate_voice_clone, text="a", eos_token_id=5, **voice.arguments))


@cut_off_on_purpose
def test_load_takes_a_folder_and_accelerates_it_again(voice, fresh_codes):
    tts = load(str(voice.folder), max_seq_len=100, device="cpu")
    accelerate(tts, max_seq_len=300)
    assert torch.equal(voice.codes(tts, text=TEXT, seed=5)[0][0], fresh_codes(seed=5))


@cut_off_on_purpose
def test_accelerated_again_under_an_open_stream(voice):
    """Its graphs go on reading the tables that the model's modules had then, and nobody does later."""
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


def test_a_model_that_is_not_accelerated_stays_as_it_is(voice):
    """Configs of the same kind, in the same process."""
    ours, theirs = (tts.model.config for tts in (voice.fast, voice.upstream))
    assert type(ours).__getattribute__ is object.__getattribute__ is not type(theirs).__getattribute__
    assert isinstance(ours, type(theirs)) and ours.to_dict() == theirs.to_dict()
