"""Chunks joined are one pass of upstream's decoder, whatever their sizes."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import published_blocks

from qwen3_tts_cuda_graphs.bench.random_checkpoint import (
    Qwen3TTSTokenizerV2Config,
    Qwen3TTSTokenizerV2Model,
    codec_config,
    randomize,
    soften,
    write_checkpoint,
)
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.fast import codec as codec_module
from qwen3_tts_cuda_graphs.fast import cublas
from qwen3_tts_cuda_graphs.fast.codec import Codec
from qwen3_tts_cuda_graphs.speech import accelerate

CODES = 5  # of a frame
SIZES = {  # name: frames of the chunks, frames that are decoded
    "1": (lambda: itertools.repeat(1), 80),
    "3": (lambda: itertools.repeat(3), 81),
    "growing": (lambda: itertools.chain([1, 1, 2, 4], itertools.repeat(8)), 400),
    "mixed": (lambda: itertools.cycle([3, 1, 70, 8, 2, 33]), 400),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codec")
    with published_blocks():
        write_checkpoint(folder, "tiny", talker=dict(num_code_groups=CODES))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_upstream(folder, "cpu").model.speech_tokenizer


@pytest.fixture(scope="module")
def codec(tokenizer):
    return Codec(tokenizer, 3)


def one_pass(tokenizer, codes):
    with torch.no_grad():
        return tokenizer.model.decoder(codes.T[None])[0, 0].numpy()


@pytest.fixture(scope="module")
def whole(tokenizer):
    """400 frames, beyond upstream's chunks of 300, and their audio in one pass."""
    codes = torch.randint(2048, (400, CODES))
    return codes, one_pass(tokenizer, codes)


def decode_in_chunks(codec, codes, sizes, row=0):
    codec.reset(row)
    chunks, first = [], 0
    for size in sizes:
        if first >= len(codes):
            break
        chunks.append(codec.feed([row], codes[None, first : first + size]).wait()[0])
        first += size
    return np.concatenate(chunks)


@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_joined_are_one_pass(codec, whole, sizes):
    """State that is lost at a chunk's edge, or that is of another row. The attention window is 72 frames."""
    sizes, frames = SIZES[sizes]
    codes, expected = whole
    audio = decode_in_chunks(codec, codes[:frames], sizes(), row=1)
    np.testing.assert_allclose(audio, expected[: frames * codec.samples_per_frame], rtol=0, atol=1e-5)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_samples_are_float32_whatever_the_default(tokenizer, default):
    """Buffers made in torch's default dtype would change the samples' type, or their precision."""
    codes = torch.randint(2048, (3, CODES))
    expected = one_pass(tokenizer, codes)
    torch.set_default_dtype(default)
    try:
        audio = decode_in_chunks(Codec(tokenizer, 1), codes, [1, 2])
    finally:
        torch.set_default_dtype(torch.float32)
    assert audio.dtype == np.float32
    np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)


def test_upstream_decoder_is_left_as_it_was(tokenizer, codec):
    """The graphs' modules share upstream's weights, not its modules: a second call must not see the first's state."""
    codes = torch.randint(2048, (1, CODES, 20))
    with torch.no_grad():
        assert torch.equal(tokenizer.model.decoder(codes), tokenizer.model.decoder(codes))
    weights = dict(tokenizer.model.decoder.named_parameters())
    assert all(weight.data_ptr() == weights[name].data_ptr() for name, weight in codec.decoder.named_parameters())


def test_decode_takes_what_upstream_takes(tokenizer, folder):
    """A list of dicts, a dict, an encoding, a padded batch: padding that is decoded would lengthen the audio."""
    codec = accelerate(load_upstream(folder, "cpu"), max_seq_len=64).model.speech_tokenizer
    first, second = (torch.randint(2048, (length, CODES)) for length in (5, 9))
    padded = torch.full((2, 9, CODES), -1)
    padded[0, :5], padded[1] = first, second
    for encoded in (
        [{"audio_codes": first}, {"audio_codes": second}],
        {"audio_codes": [first.numpy(), second.numpy()]},
        {"audio_codes": padded},
        SimpleNamespace(audio_codes=[first, second]),
    ):
        ours, rate = codec.decode(encoded)
        theirs, their_rate = tokenizer.decode(encoded)
        assert rate == their_rate
        for audio, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(audio, expected, rtol=0, atol=1e-5)
    (audio,), _ = codec.decode({"audio_codes": first})
    np.testing.assert_allclose(audio, one_pass(tokenizer, first), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_published_shapes():
    """A size that only the tiny codec has must not be built in."""

    class Tokenizer:
        def __init__(self):
            torch.manual_seed(0)
            with torch.no_grad():
                self.model = randomize(Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**codec_config("0.6B"))), 0.7)
                soften(self.model.decoder)

        def get_decode_upsample_rate(self):
            return self.model.get_decode_upsample_rate()

    tokenizer = Tokenizer()
    codes = torch.randint(2048, (10, 16))
    audio = decode_in_chunks(Codec(tokenizer, 1), codes, [1, 2, 4, 3])
    np.testing.assert_allclose(audio, one_pass(tokenizer, codes), rtol=0, atol=1e-5)


@pytest.mark.parametrize("library", ["libcublas.so.13", "another name"])
def test_products_take_a_share_of_the_multiprocessors(library, monkeypatch):
    """Until the end, whatever happens; all of them, where cuBLAS cannot be told."""
    told = []

    def load(name, mode):
        if name != library:
            raise OSError(f"{name}: no such file")
        return SimpleNamespace(cublasSetSmCountTarget=lambda handle, count: told.append((handle.value, count)))

    gpu = SimpleNamespace(multi_processor_count=132)
    on_gpu = dict(current_blas_handle=lambda: 7, get_device_properties=lambda _: gpu, device=contextlib.nullcontext)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cublas.ctypes, "CDLL", load)
    for name, function in on_gpu.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with pytest.raises(KeyboardInterrupt), cublas.products_on(0.5, torch.device("cuda")):
        raise KeyboardInterrupt
    assert told == ([(7, 66), (7, 0)] if library == "libcublas.so.13" else [])


def test_who_leaves_multiprocessors_to_the_frames(codec, monkeypatch):
    """Full chunks of many rows: all else is short, or somebody waits for it."""
    asked = []
    monkeypatch.setattr(codec_module, "products_on", lambda *_: asked.append(what) or contextlib.nullcontext())
    monkeypatch.setattr(codec, "stream", "of a GPU")
    monkeypatch.setattr(codec, "indices", None)
    for what in itertools.product((1, 16, 32, 64), codec_module.CHUNK_SIZES):
        codec.capture(*what, SimpleNamespace(capture=lambda step: None))
    assert asked == [(32, 8), (64, 8)]
