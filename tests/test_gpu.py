"""What only a GPU can show, on random weights of the published shapes. Skipped without one."""
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import cudagraph_predictor
import cudagraph_talker
from conftest import assert_the_same_together
from generate import accelerate, handed_over, load_upstream, stream
from voices import speaker_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GREEDY = dict(do_sample=False, subtalker_dosample=False)
TEXTS = ["Real time speech synthesis.", "Hi!", "A much longer sentence than the two others, in the same batch."]


def loaded(folder):
    model = load_upstream(str(folder))
    model.speaker = torch.randn(model.model.config.talker_config.hidden_size)
    return model


@pytest.fixture(scope="module", params=["0.6B", "1.7B"])
def tts(request, checkpoint):
    return loaded(checkpoint("base", request.param))


@pytest.fixture(scope="module", params=["0.6B", "1.7B"])
def fast(request, checkpoint):
    return accelerate(loaded(checkpoint("base", request.param)), max_seq_len=256)


def codes(tts, text, seed=0, frames=24, **settings):
    prompt = speaker_prompt(tts.speaker, len(text) if isinstance(text, list) else 1)
    decoder, request = handed_over(tts.generate_voice_clone, dict(
        text=text, language="English", voice_clone_prompt=prompt, max_new_tokens=frames + 1, **settings))
    torch.manual_seed(seed)
    return torch.stack([codes.clone() for codes, _ in decoder.frames(**request)], dim=1).cpu()


@pytest.mark.filterwarnings("ignore:the speech was cut off")
@pytest.mark.parametrize("fused", [True, False])
def test_captured_frames_are_the_uncaptured_ones(tts, fused, monkeypatch):
    """A graph that misses a tensor, a setting or the generator's state repeats old tokens."""
    requests = [dict(text=text, seed=seed, **settings) for text in (TEXTS[0], TEXTS) for seed, settings in (
        (0, GREEDY), (1, {}), (2, dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3)),
        (3, dict(subtalker_temperature=0.5, subtalker_top_k=5)), (1, {}))]
    accelerate(tts, max_seq_len=256, fused=fused)
    captured = [codes(tts, **request) for request in requests]
    for module in (cudagraph_talker, cudagraph_predictor):
        monkeypatch.setattr(module, "capture", lambda fn, *_: fn)
    accelerate(tts, max_seq_len=256, fused=fused)
    uncaptured = [codes(tts, **request) for request in requests]
    for request, a, b in zip(requests, captured, uncaptured):
        assert torch.equal(a, b), request
    assert torch.equal(captured[1], captured[4])                  # a seed reproduces, whatever came between
    assert not torch.equal(captured[1], captured[3])              # the predictor's own settings are used


@pytest.mark.filterwarnings("ignore:the speech was cut off")
@pytest.mark.parametrize("chunk_frames", [None, 1, 3])
def test_streamed_sound_is_the_whole(fast, chunk_frames):
    """Codec chunks of other sizes take other kernels: equal but for bfloat16's rounding."""
    prompt = speaker_prompt(fast.speaker)
    request = dict(text=TEXTS[0], language="English", voice_clone_prompt=prompt, max_new_tokens=41)
    torch.manual_seed(0)
    (whole,), rate = fast.generate_voice_clone(**request)
    torch.manual_seed(0)
    chunks = [audio for audio, _ in stream(fast.generate_voice_clone, chunk_frames=chunk_frames, **request)]
    joined = np.concatenate(chunks)
    assert len(joined) == len(whole) == 40 * 1920
    assert np.abs(joined - whole).max() < 0.02 and np.corrcoef(joined, whole)[0, 1] > 0.999


def test_the_end_on_captured_graphs(tts, monkeypatch):
    """The surplus frame is dropped and its noise counts as not drawn: two requests after one seed, captured and not."""
    head = tts.model.talker.codec_head.weight
    monkeypatch.setattr(head, "data", head.data.clone())
    end = tts.model.config.talker_config.codec_eos_token_id
    head.data[end] = 8 * torch.randn_like(head.data[end]) * head.data.std()

    def two_requests():
        accelerate(tts, max_seq_len=256)
        first = codes(tts, TEXTS[0], frames=200)
        state = torch.cuda.get_rng_state()
        return first, codes(tts, TEXTS[1], seed=int(state.sum()), frames=200)
    captured = two_requests()
    for module in (cudagraph_talker, cudagraph_predictor):
        monkeypatch.setattr(module, "capture", lambda fn, *_: fn)
    assert all(torch.equal(a, b) for a, b in zip(captured, two_requests(), strict=True))
    assert captured[0].shape[1] < 200


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_a_padded_row_alone(tts):
    """The last of a long list may be alone in its group, and padded: it is spoken as it would be by itself."""
    accelerate(tts, max_seq_len=256, max_batch=1)
    request = dict(language="English", non_streaming_mode=True, max_new_tokens=21, **GREEDY)
    (_, last), _ = tts.generate_voice_clone(TEXTS[2:0:-1], voice_clone_prompt=speaker_prompt(tts.speaker, 2), **request)
    (alone,), _ = tts.generate_voice_clone(TEXTS[1], voice_clone_prompt=speaker_prompt(tts.speaker), **request)
    np.testing.assert_array_equal(last, alone)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_captures_beside_other_threads(tts, recording):
    """A list of a new length is captured while other threads build prompts, which takes memory."""
    accelerate(tts, max_seq_len=256, max_batch=4)
    decoder, done = tts.model.talker.generate.__self__, threading.Event()
    request = dict(language="English", max_new_tokens=9, **GREEDY)

    def build_prompts():
        built = 0
        while not done.is_set() or built == 0:
            prompt = tts.create_voice_clone_prompt(recording, "what it says")
            handed_over(tts.generate_voice_clone, dict(text=TEXTS[built % 3], voice_clone_prompt=prompt, **request))
            torch.empty((1 + built % 7) << 24, device="cuda")
            built += 1
        return built

    def speak(rows):
        prompt = speaker_prompt(tts.speaker, rows)
        return tts.generate_voice_clone((TEXTS * 2)[:rows], voice_clone_prompt=prompt, **request)[0]
    with ThreadPoolExecutor(2) as threads:
        building = [threads.submit(build_prompts) for _ in range(2)]
        beside = [speak(rows) for rows in (2, 3, 4)]
        done.set()
        assert all(job.result() > 0 for job in building)
    assert {2, 3, 4} <= decoder.graphs.keys()
    for rows, audios in zip((2, 3, 4), beside, strict=True):
        for audio, alone in zip(audios, speak(rows), strict=True):
            np.testing.assert_array_equal(audio, alone)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_threads_take_turns(fast):
    """Whole calls, streams and lists of several threads at once: each gets what it would get alone."""
    request = dict(language="English", max_new_tokens=21, **GREEDY)

    def whole(text):
        rows = len(text) if isinstance(text, list) else 1
        audios, _ = fast.generate_voice_clone(text, voice_clone_prompt=speaker_prompt(fast.speaker, rows), **request)
        return np.concatenate(audios)

    def streamed(text):
        return np.concatenate([audio for audio, _ in stream(
            fast.generate_voice_clone, text=text, voice_clone_prompt=speaker_prompt(fast.speaker), **request)])
    jobs = [(speak, text) for text in TEXTS for speak in (whole, streamed)] + [(whole, TEXTS[:2])]
    assert_the_same_together(jobs * 2)


def test_codec_of_a_batch(fast):
    """Utterances are queued one behind another on the codec's stream: each is what it is alone, and what upstream's
    decoder gives, but for bfloat16's rounding."""
    codec = fast.model.speech_tokenizer
    batch = [torch.randint(2048, (length, 16), device="cuda") for length in (70, 3, 40, 70)]
    together, _ = codec.decode([{"audio_codes": utterance} for utterance in batch])
    for utterance, audio in zip(batch, together, strict=True):
        np.testing.assert_allclose(audio, codec.decode({"audio_codes": utterance})[0][0], rtol=0, atol=0.02)
        with torch.no_grad():
            expected = codec.model.decoder(utterance.T[None])[0, 0].float().cpu().numpy()
        assert np.abs(audio - expected).max() < 0.02 and np.corrcoef(audio, expected)[0, 1] > 0.999
