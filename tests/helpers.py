"""What several test modules use: every kind of voice, on upstream's model and on the same model accelerated; and
products of bfloat16 tensors that are the same on every CPU."""

import functools
import io
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from qwen3_tts_cuda_graphs.bench import random_checkpoint
from qwen3_tts_cuda_graphs.cli import speaking
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.common.model_config import read_config
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.speech import accelerate, long_text, schedule
from qwen3_tts_cuda_graphs.speech.engine import Engine

# isort: split
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSTalkerConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration

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


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(test):
    """A test that is skipped without a GPU."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


def slow(*values) -> list:
    """Parameters of a test that are left out in CI, where others run the same code. Of several arguments: tuples."""
    return [pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow) for value in values]


def random_talker(**sizes):
    """Upstream's talker and predictor in bfloat16 with random weights. `sizes`: of both, if not the published ones"""
    widths = dict(random_checkpoint.TALKER, text_vocab_size=8, text_hidden_size=16, **sizes)
    config = Qwen3TTSTalkerConfig(code_predictor_config=random_checkpoint.PREDICTOR | sizes, **widths)
    talker = Qwen3TTSTalkerForConditionalGeneration(config).eval().bfloat16()
    for name, parameter in talker.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)  # upstream's are 1, which hides a wrong one
        elif parameter.dim() == 2:
            parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
    return talker.requires_grad_(False)


class Voice:
    """One way to speak, with upstream's model and with the same model accelerated."""

    def __init__(self, name, checkpoint, recording):
        kind, self.method, make_arguments = VOICES[name]
        self.folder = checkpoint(kind)
        self.upstream, self.fast = (load_upstream(str(self.folder), "cpu") for _ in range(2))
        accelerate(self.fast, max_seq_len=384, rows=8)
        self.fast_method = getattr(self.fast, self.method)
        self.arguments = make_arguments(self.upstream, self.folder, recording)
        self.end_token = self.upstream.model.config.talker_config.codec_eos_token_id
        self.end_row = self.upstream.model.talker.codec_head.weight[self.end_token].clone()

    def end_comes_up(self, comes_up):
        """Whether the tiny models choose their end token by themselves after a while, or never."""
        for tts in (self.upstream, self.fast):
            tts.model.talker.codec_head.weight.data[self.end_token] = self.end_row if comes_up else 0
        return self

    def codes(self, tts, seed=0, **arguments):
        """Call the model's own method. Returns the codes (T, 3) of each text, and the next random number."""
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
    """An engine on the first rows of a model. On a CPU frames may be slower than playback: requests would wait for
    streams that run dry."""

    def __init__(self, tts, rows, **options):
        self.all_rows = tts.speech.runner.row_count
        self.no_hold = mock.patch.object(schedule, "LONGEST_HOLD", 0.0)
        self.no_hold.start()
        use_rows(tts.speech.runner, rows)
        super().__init__(tts, **options)

    def close(self):
        super().close()
        use_rows(self.runner, self.all_rows)
        self.no_hold.stop()


class engine_for(engine_of):
    """The same for a kind of voice."""

    def __init__(self, voice, rows, **options):
        super().__init__(voice.fast, rows, **options)
        self.method = voice.fast_method

    def ask(self, **request):
        return self.stream(self.method, **request)

    def speak(self, **request):
        return joined(self.ask(**request))


@contextmanager
def watched(owner, name, see):
    """In this context `see` gets the arguments of each call of that function, before it is made."""
    function = getattr(owner, name)

    def see_and_call(*args, **kwargs):
        see(*args, **kwargs)
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, see_and_call):
        yield


def frame_limits(least, per_token):
    """In this context an utterance is stopped after so many frames."""
    return mock.patch.multiple(long_text, MIN_FRAME_LIMIT=least, FRAMES_PER_TOKEN=per_token)


def published_blocks():
    """In this context tiny checkpoints have a codec of the published number of blocks."""
    return mock.patch.dict(random_checkpoint.TINY_DECODER, decoder_dim=48, upsample_rates=(8, 5, 4, 3))


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


class Command:
    """Runs a program's main in this process, which is quicker. -> exit code, stdout, stderr"""

    def __init__(self, patch, capture, **stand_ins):
        self.patch = patch
        self.capture = capture
        self.stand_ins = stand_ins  # for what cli/speaking.py imports

    def __call__(self, main, *words, stdin=(), device=None, **stand_ins):
        """stdin: pieces that somebody writes to a pipe; device: stands in for the package sounddevice"""
        self.capture.readouterr()
        read_config.cache_clear()
        with ExitStack() as stack:
            patch = stack.enter_context(self.patch.context())
            stack.enter_context(warnings.catch_warnings())  # puts back what main changes
            warnings.simplefilter("default", UserWarning)
            patch.setattr(sys, "stdin", stack.enter_context(pipe_of(stdin)))
            patch.setattr(sys, "argv", ["program", *map(str, words)])
            patch.setitem(sys.modules, "sounddevice", device)
            for name, stand_in in (self.stand_ins | stand_ins).items():
                patch.setattr(speaking, name, stand_in)
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
        self.audio, stderr = self.capture.readouterr()  # stdout may be a WAV
        return code, self.audio.decode(errors="replace"), stderr.decode()


@contextmanager
def pipe_of(pieces):
    """What reads these bytes, which a thread writes one after another."""
    reader, writer = os.pipe()

    def write():
        with suppress(BrokenPipeError), open(writer, "wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    with open(reader, "rb", buffering=0) as file:
        yield io.TextIOWrapper(file, "utf-8")
    thread.join(20)


def assert_refused(result, message):
    """One line, and exit code 2."""
    code, _, stderr = result
    assert code == 2 and message in stderr and len(stderr.splitlines()) == 1, stderr


def run_program(program, *folders, **options):
    """In a process of its own, in which the folders come first on the path."""
    program = f"import sys\nsys.path[:0] = {[str(folder) for folder in folders]}\n" + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, **options)


def wav_bytes(samples, rate, **options) -> bytes:
    """As soundfile writes them; options: format, subtype"""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, **dict(format="WAV") | options)
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
