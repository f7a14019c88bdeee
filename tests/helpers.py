"""What several test modules use: every kind of voice, on upstream's model and on the same model accelerated; and
products of bfloat16 tensors that are the same on every CPU."""

import functools
import io
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.engine import Engine

ROOT = Path(__file__).parents[1]


@functools.cache
def project_files(root=ROOT):
    """The files that git knows; without git, all but hidden ones. A user's own files in the checkout are not tested."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True).stdout.split("\0")
    except OSError:
        listed = []
    paths = [root / name for name in listed if name]
    if not paths:
        folders = (path for path in root.iterdir() if not path.name.startswith(".") and path.name != "build")
        paths = [path for folder in folders for path in [folder, *folder.rglob("*")]]
    return sorted(path for path in paths if path.is_file() and path.parent.name != "__pycache__")


GREEDY = dict(do_sample=False, subtalker_dosample=False)

VOICES = {  # name: model type, method, its arguments
    "x-vector": (
        "base",
        "generate_voice_clone",
        lambda tts, folder, recording: dict(
            voice_clone_prompt=speaker_prompt(torch.load(folder / "speaker.pt", weights_only=True), 8),
            language="English",
        ),
    ),
    "in-context": (
        "base",
        "generate_voice_clone",
        lambda tts, folder, recording: dict(
            voice_clone_prompt=tts.create_voice_clone_prompt(recording, "what it says"), language="German"
        ),
    ),
    "preset": (
        "custom_voice",
        "generate_custom_voice",
        lambda tts, folder, recording: dict(speaker="dylan", instruct="whisper", language="Auto"),
    ),
    "designed": (
        "voice_design",
        "generate_voice_design",
        lambda tts, folder, recording: dict(instruct="a warm narrator", language="Chinese"),
    ),
}


def slow(*values) -> list:
    """Parameters of a test that are left out in CI, where others run the same code."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Voice:
    """One way to speak, with upstream's model and with the same model accelerated."""

    def __init__(self, name, checkpoint, recording):
        kind, self.method, make_arguments = VOICES[name]
        self.folder = checkpoint(kind)
        self.upstream, self.fast = (load_upstream(str(self.folder), "cpu") for _ in range(2))
        accelerate(self.fast, max_seq_len=384, rows=8)
        self.arguments = make_arguments(self.upstream, self.folder, recording)
        self.end_token = self.upstream.model.config.talker_config.codec_eos_token_id
        self.end_row = self.upstream.model.talker.codec_head.weight[self.end_token].clone()

    def end_comes_up(self, comes_up):
        """Whether the tiny models choose their end token by themselves after a while, or never."""
        for tts in (self.upstream, self.fast):
            tts.model.talker.codec_head.weight.data[self.end_token] = self.end_row if comes_up else 0
        return self

    def codes(self, tts, seed=0, **arguments):
        """Call the model's own method. Returns the codes (T, 5) of each text, and the next random number."""
        model, results = tts.model, []
        model.generate = lambda **kwargs: results.append(type(model).generate(model, **kwargs)) or results[0]
        torch.manual_seed(seed)
        try:
            getattr(tts, self.method)(**self.arguments | arguments)
        finally:
            del model.generate
        return results[0][0], torch.rand(1)

    def assert_same_tokens(self, **arguments):
        (expected, after), (codes, after_ours) = (self.codes(tts, **arguments) for tts in (self.upstream, self.fast))
        assert [len(row) for row in codes] == [len(row) for row in expected]
        for row, expected_row in zip(codes, expected):
            assert torch.equal(row, expected_row)
        assert after_ours == after  # as many random numbers drawn as upstream draws
        return expected


class engine_of(Engine):
    """An engine on the first rows of a model."""

    def __init__(self, tts, rows, **options):
        self.all_rows = tts.speech.runner.row_count
        use_rows(tts.speech.runner, rows)
        super().__init__(tts, **options)

    def close(self):
        super().close()
        use_rows(self.runner, self.all_rows)


def use_rows(runner, rows):
    """Let a runner use its first rows only, or all of them again."""
    taken = {utterance.row for utterance in runner.active}
    runner.row_count, runner.free = rows, [row for row in range(rows) if row not in taken]


def phone_recording(samples, rate, container, codec, layout="mono") -> bytes:
    """As phones and browsers save them."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="flt", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.codec_context.format.name, layout, rate, stream.codec_context.frame_size)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def joined(chunks):
    """The samples of (samples, rate) chunks in one array."""
    return np.concatenate([audio for audio, _ in chunks])


def assert_the_same_together(jobs):
    """`jobs` are (speak, text): all at once, a thread each, they give what each gives alone."""
    alone = [speak(text) for speak, text in jobs]
    with ThreadPoolExecutor(len(jobs)) as threads:
        together = [job.result() for job in [threads.submit(speak, text) for speak, text in jobs]]
    for audio, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(audio, expected)


CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv_transpose1d}
PRODUCTS = {F.linear, torch.bmm, F.scaled_dot_product_attention} | CONVOLUTIONS


class ExactProducts(TorchFunctionMode):
    """In this context, matrix products, convolutions and attention of bfloat16 tensors are computed in float64 and
    rounded once.

    PyTorch multiplies bfloat16 in several ways, which sum and round differently. CPU, shapes and layout decide which it
    takes. As on a GPU, the result of a convolution is rounded before its bias is added, unless it is depthwise.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)
        x, weight, *rest = args
        out = kwargs.pop("out", None)
        bias = None
        if function in CONVOLUTIONS and rest and weight.shape[1] > 1:
            bias, rest[0] = rest[0], None
        wide_kwargs = {name: to_float64(value) for name, value in kwargs.items()}
        result = function(*map(to_float64, (x, weight, *rest)), **wide_kwargs).bfloat16()
        if out is not None:
            return out.copy_(result)
        return result if bias is None else result + bias[:, None]


def to_float64(value):
    return value.double() if torch.is_tensor(value) and value.dtype == torch.bfloat16 else value
