"""What only a GPU can show, on random weights of the published shapes. Skipped without one."""

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import GREEDY, NEEDS_GPU, assert_the_same_together, joined

import cudagraph_talker
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast.paths import MEGAKERNEL
from qwen3_tts_cuda_graphs.prompts.build import talker_arguments
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.streaming import stream

pytestmark = NEEDS_GPU
TEXTS = ["Real time speech synthesis.", "Hi!", "A much longer sentence than the two others, in the same batch."]
SIZES = ["0.6B", "1.7B"]


def load_with_speaker(folder):
    tts = load_upstream(str(folder))
    tts.speaker = torch.randn(tts.model.config.talker_config.hidden_size)
    return tts


@pytest.fixture(scope="module", params=SIZES)
def tts(request, checkpoint):
    """A model that each test accelerates in its own way."""
    return load_with_speaker(checkpoint("base", request.param))


@pytest.fixture(scope="module", params=SIZES)
def fast(request, checkpoint):
    """An accelerated model that the tests share."""
    return accelerate(load_with_speaker(checkpoint("base", request.param)), max_seq_len=256)


@pytest.fixture
def no_capture(monkeypatch):
    """no_capture() -> from now on, accelerate runs what it would capture."""

    def patch():
        monkeypatch.setattr("cudagraph_talker.GraphPool.capture", lambda pool, fn: fn)

    return patch


def rows_of(text):
    return len(text) if isinstance(text, list) else 1


def codes(tts, text, seed=0, frames=24, **settings):
    """The codes (B, T, 16) of the runner's frames. seed None: the generator's state stays as it is."""
    request = talker_arguments(
        tts.generate_voice_clone,
        text=text,
        language="English",
        voice_clone_prompt=speaker_prompt(tts.speaker, rows_of(text)),
        max_new_tokens=frames + 1,
        **settings,
    )
    if seed is not None:
        torch.manual_seed(seed)
    _, *steps = tts.model.talker.generate(**request).hidden_states  # the first is the prompt
    return torch.stack([codes for _, codes in steps], dim=1).cpu()


def whole(tts, text, frames=20, **settings):
    """The samples of a whole call, those of a list one after another."""
    audios, _ = tts.generate_voice_clone(
        text,
        "English",
        voice_clone_prompt=speaker_prompt(tts.speaker, rows_of(text)),
        max_new_tokens=frames + 1,
        **settings,
    )
    return np.concatenate(audios)


def streamed(tts, text, frames=20, chunk_frames=None, **settings):
    chunks = stream(
        tts.generate_voice_clone,
        text=text,
        language="English",
        voice_clone_prompt=speaker_prompt(tts.speaker),
        max_new_tokens=frames + 1,
        chunk_frames=chunk_frames,
        **settings,
    )
    return joined(chunks)


@pytest.mark.parametrize("fused", [True, False])
def test_captured_frames_are_the_uncaptured_ones(tts, fused, no_capture):
    """A graph that misses a tensor, a setting or the generator's state repeats old tokens.

    The list has fewer rows than its graph: what the others decode must not show.
    """
    requests = [
        dict(text=text, seed=seed, **settings)
        for text in (TEXTS[0], TEXTS)
        for seed, settings in (
            (0, GREEDY),
            (1, {}),
            (2, dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3)),
            (3, dict(subtalker_temperature=0.5, subtalker_top_k=5)),
            (1, {}),
        )
    ]
    accelerate(tts, max_seq_len=256, rows=4, fused=fused)
    captured = [codes(tts, **request) for request in requests]
    no_capture()
    accelerate(tts, max_seq_len=256, rows=4, fused=fused)
    uncaptured = [codes(tts, **request) for request in requests]
    for request, a, b in zip(requests, captured, uncaptured):
        assert torch.equal(a, b), request
    assert torch.equal(captured[1], captured[4])  # a seed is reproducible, whatever came between
    assert not torch.equal(captured[1], captured[3])  # the predictor's own settings are used


@pytest.mark.parametrize("chunk_frames", [None, 1, 3])
def test_streamed_audio_is_the_whole(fast, chunk_frames):
    """Chunks of other sizes take other kernels in the codec: equal but for bfloat16's rounding."""
    torch.manual_seed(0)
    expected = whole(fast, TEXTS[0], frames=40)
    torch.manual_seed(0)
    audio = streamed(fast, TEXTS[0], frames=40, chunk_frames=chunk_frames)
    assert len(audio) == len(expected) == 40 * 1920
    assert np.abs(audio - expected).max() < 0.02 and np.corrcoef(audio, expected)[0, 1] > 0.999


def test_the_end_on_captured_graphs(tts, monkeypatch, no_capture):
    """The host learns of the end one frame late, and the surplus frame is dropped: two requests, captured or not."""
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
    no_capture()
    assert all(torch.equal(a, b) for a, b in zip(captured, two_requests(), strict=True))
    assert captured[0].shape[1] < 200


def test_requests_continue_the_generator(fast):
    """Two requests after one seed must differ, as upstream's do, and torch.rand must not repeat their numbers."""
    torch.manual_seed(7)
    untouched = torch.rand(4, device="cuda")
    runs = []
    for _ in range(2):
        first, second = codes(fast, TEXTS[0], seed=7), codes(fast, TEXTS[0], seed=None)
        runs.append((first, second, torch.rand(4, device="cuda").cpu()))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][2], untouched.cpu())
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("fused, rows", [(None, 1), (None, 8), (False, 4)])
def test_requests_capture_nothing(tts, monkeypatch, fused, rows):
    """A capture takes seconds, and makes other threads fail that draw random numbers meanwhile."""
    accelerate(tts, max_seq_len=256, rows=rows, fused=fused)

    def refuse(*_, **__):
        raise AssertionError("a request captures a graph")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    with torch.cuda.stream(torch.cuda.current_stream()), pytest.raises(AssertionError, match="captures a graph"):
        cudagraph_talker.GraphPool(tts.model.talker.device).capture(lambda: None)  # the patch works
    for texts in (TEXTS[0], TEXTS[:2], TEXTS, TEXTS * 3):
        assert len(whole(tts, texts)) > 0
    assert len(streamed(tts, TEXTS[0])) == 20 * 1920


def test_a_list_on_one_row_is_its_single_texts(fast):
    """Each text of a list is spoken as it would be by itself, whatever the lengths of the others."""
    if fast.speech.path != MEGAKERNEL:
        pytest.skip(fast.speech.path)
    request = dict(non_streaming_mode=True, **GREEDY)
    assert torch.equal(codes(fast, TEXTS, **request), torch.cat([codes(fast, text, **request) for text in TEXTS]))


def test_captures_beside_threads_that_build_prompts(tts, recording):
    """Memory that another thread allocates must not make a capture fail, nor a request read freed memory."""
    done = threading.Event()
    request = dict(language="English", max_new_tokens=9, **GREEDY)
    accelerate(tts, max_seq_len=256, rows=4, fused=False)

    def build_prompts():
        built = 0
        while not done.is_set() or built == 0:
            prompt = tts.create_voice_clone_prompt(recording, "what it says")
            talker_arguments(tts.generate_voice_clone, text=TEXTS[built % 3], voice_clone_prompt=prompt, **request)
            torch.empty((1 + built % 7) << 24, device="cuda")
            built += 1
        return built

    with ThreadPoolExecutor(2) as threads:
        building = [threads.submit(build_prompts) for _ in range(2)]
        try:
            accelerate(tts, max_seq_len=256, rows=4, fused=False)
            beside = [whole(tts, (TEXTS * 2)[:rows], frames=8, **GREEDY) for rows in (1, 2, 3, 4)]
        finally:
            done.set()
        assert all(job.result() > 0 for job in building)
    for rows, audio in zip((1, 2, 3, 4), beside, strict=True):
        np.testing.assert_array_equal(audio, whole(tts, (TEXTS * 2)[:rows], frames=8, **GREEDY))


def test_other_threads_may_draw_random_numbers(fast):
    """A language model that samples in the same process failed while a request captured or replayed a graph."""
    done = threading.Event()
    weights = torch.rand(1000, device="cuda")

    def draw():
        drawn = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set() or drawn == 0:
                assert 0 <= int(torch.multinomial(weights, 1)) < 1000
                drawn += 1
        return drawn

    expected = [whole(fast, TEXTS[0], **GREEDY), whole(fast, TEXTS, **GREEDY), streamed(fast, TEXTS[2], **GREEDY)]
    with ThreadPoolExecutor(2) as threads:
        drawing = [threads.submit(draw) for _ in range(2)]
        try:
            for _ in range(5):
                audios = [
                    whole(fast, TEXTS[0], **GREEDY),
                    whole(fast, TEXTS, **GREEDY),
                    streamed(fast, TEXTS[2], **GREEDY),
                ]
                whole(fast, TEXTS[1])  # sampled
                streamed(fast, TEXTS[1])
                for audio, alone in zip(audios, expected, strict=True):
                    np.testing.assert_array_equal(audio, alone)
        finally:
            done.set()
        assert all(job.result() > 0 for job in drawing)


def test_threads_with_their_own_cuda_streams(fast):
    """Whole calls, streams and lists of several threads share one cache: each must get what it would get alone. A
    request must wait for the kernels of the one before it, which may have run on another CUDA stream."""

    def on_own_stream(speak):
        def speak_there(tts, text, **settings):
            with torch.cuda.stream(torch.cuda.Stream()):
                return speak(tts, text, **settings)

        return speak_there

    def job(speak, text):
        return lambda text: speak(fast, text, **GREEDY), text

    ways = whole, streamed, on_own_stream(whole), on_own_stream(streamed)
    jobs = [job(speak, text) for text in TEXTS for speak in ways]
    jobs += [job(whole, TEXTS[:2]), job(on_own_stream(whole), TEXTS[:2])]
    assert_the_same_together(jobs * 2)
    expected = whole(fast, TEXTS[2], **GREEDY)
    for _ in range(5):  # in one thread, where no lock makes anybody wait
        np.testing.assert_array_equal(on_own_stream(whole)(fast, TEXTS[2], **GREEDY), expected)


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


def test_text_that_arrives_is_where_the_frames_read_it(fast):
    """Rows that are written late, twice or beside their frame would be heard as missing or repeated words."""
    method = fast.generate_voice_clone
    voice = dict(language="English", voice_clone_prompt=speaker_prompt(fast.speaker))
    request = talker_arguments(method, text=TEXTS[2], **voice)
    rows = request["trailing_text_hidden"][0]

    def pieces():
        for character in TEXTS[2]:
            time.sleep(0.002)
            yield character

    audio = joined(stream(method, text=pieces(), max_new_tokens=len(rows) + 11, **voice))
    assert len(audio) == (len(rows) + 10) * 1920
    padding = request["tts_pad_embed"][0].expand(10, -1)
    written = fast.speech.runner.rows.text[0, : len(rows) + 10]
    assert torch.equal(written.cpu(), torch.cat([rows, padding]).cpu())


PEAK = """
import sys, torch
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.common.loading import load
from qwen3_tts_cuda_graphs.speech.streaming import stream
tts = load(sys.argv[1])
speaker = torch.randn(tts.model.config.talker_config.hidden_size)
for _ in stream(tts.generate_voice_clone, text="Hello.", voice_clone_prompt=speaker_prompt(speaker), max_new_tokens=99):
    pass
print(torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30)
"""


@pytest.mark.parametrize("size, limit", [("0.6B", 2.8), ("1.7B", 5.0)])
def test_peak_memory(checkpoint, size, limit):
    """A process that loads a model and speaks must leave room on a GPU of 8 GB: GiB in tensors, and held by torch."""
    command = [sys.executable, "-c", PEAK, str(checkpoint("base", size))]
    output = subprocess.run(command, cwd=cudagraph_talker.__file__.rsplit("/", 1)[0], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr[-2000:]
    allocated, reserved = map(float, output.stdout.split()[-2:])
    print(f"{size}: {allocated:.2f} GiB in tensors, {reserved:.2f} GiB held by torch")
    assert allocated <= limit and reserved <= limit


def test_graphs_of_a_pool_share_one_workspace():
    """cuBLAS keeps 32 MiB for each stream on Hopper. When one graph is freed, the others must keep theirs. And
    torch must not keep that of a graph for its next use of the stream: the graph may be freed before."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    left = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
    right = torch.randn(8192, 64, device=device, dtype=torch.bfloat16)  # long sums: split over blocks, in the workspace
    out = torch.zeros(64, 64, device=device, dtype=torch.bfloat16)
    expected = left @ right
    pool = cudagraph_talker.GraphPool(device)
    gc.collect()  # what other tests have left must not be freed between two looks at the memory

    def multiply():
        torch.mm(left, right, out=out)

    def used():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    torch._C._cuda_clearCublasWorkspaces()
    before = used()
    replays = [pool.capture(multiply)]
    assert used() - before < 1 << 20  # a graph has small tensors of its own
    before = used()
    replays += [pool.capture(multiply) for _ in range(4)]
    assert used() == before

    del replays[1:]
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]  # take what has been freed
    out.zero_()
    replays[0]()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert all(other.isnan().all() for other in others)
