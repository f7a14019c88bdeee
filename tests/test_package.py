"""The package's own names: faster-qwen3-tts' interface on this project's model."""

import ast
import functools
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
from helpers import ROOT

import qwen3_tts_cuda_graphs
from qwen3_tts_cuda_graphs import FasterQwen3TTS, GGMLQwen3TTS, Qwen3TTSCudaGraphs

VOICE = dict(voice_clone_prompt={"ref_spk_embedding": [torch.zeros(64)]})
PEERS = Path(sys.prefix) / "peers"  # ./setup.sh none --test puts them there
METHODS = {
    "base": ("generate_voice_clone", dict(language="English", ref_text="what it says")),
    "custom_voice": ("generate_custom_voice", dict(speaker="dylan", language="Chinese", instruct="whisper")),
    "voice_design": ("generate_voice_design", dict(instruct="a warm narrator", language="English")),
}


@pytest.fixture(scope="module")
def recording_file(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    soundfile.write(path, *recording)
    return path


@pytest.fixture(scope="module")
def models(checkpoint):
    """models(kind) -> FasterQwen3TTS"""
    options = dict(device="cpu", dtype="float32", max_seq_len=384)
    return functools.cache(lambda kind: FasterQwen3TTS.from_pretrained(str(checkpoint(kind)), **options))


@pytest.fixture
def hello(checkpoint):
    """A text and a voice that is an embedding."""
    speaker = torch.load(checkpoint() / "speaker.pt", weights_only=True)
    return dict(text="Hello.", language="English", voice_clone_prompt={"ref_spk_embedding": [speaker]})


# ---- The interface


def test_every_public_name_is_there():
    """They are imported when they are used: `qwen3-tts --help` must not wait for torch."""
    assert all(getattr(qwen3_tts_cuda_graphs, name).__name__ for name in qwen3_tts_cuda_graphs.__all__)
    with pytest.raises(AttributeError, match="module 'qwen3_tts_cuda_graphs' has no attribute 'lode'"):
        qwen3_tts_cuda_graphs.lode  # noqa: B018


def peer_functions():
    """Name -> arguments of the public methods of the class, from the source of faster-qwen3-tts."""
    source = PEERS / "faster_qwen3_tts" / "model.py"
    assert source.is_file(), f"{source} is missing: run ./setup.sh none --test"
    (peer,) = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == "FasterQwen3TTS"]
    functions = [node for node in peer.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if not node.name.startswith("_")}


def described(arguments):
    """Names and defaults of a function's arguments, from its syntax tree."""
    assert not (arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg)
    names = [argument.arg for argument in arguments.args]
    defaults = [ast.unparse(default) for default in arguments.defaults]
    return [*zip(names, [None] * (len(names) - len(defaults)) + defaults, strict=True)]


def described_signature(function):
    """The same of a function itself."""
    parameters = inspect.signature(function).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [(item.name, None if item.default is item.empty else repr(item.default)) for item in parameters]


def test_the_same_methods_arguments_and_defaults():
    """A program that changes one import must not find an argument missing, renamed, moved or with another default."""
    kinds = {"classmethod": classmethod, "staticmethod": staticmethod, "property": property}
    peer = peer_functions()
    assert set(peer) >= {"from_pretrained", "warmup", "generate_voice_clone_streaming", "speech_tokenizer"}
    for name, function in peer.items():
        ours = vars(FasterQwen3TTS)[name]
        decorators = {ast.unparse(node) for node in function.decorator_list} - {"torch.inference_mode()"}
        assert {kind for kind, made in kinds.items() if isinstance(ours, made)} == decorators, name
        plain = ours.fget if isinstance(ours, property) else getattr(ours, "__func__", ours)
        assert described_signature(plain) == described(function.args), name


def test_the_same_attributes(models):
    """What programs read besides the methods: speech-to-speech looks for the model inside of the model."""
    model = models("base")
    assert model.sample_rate == 24000 and model.device == "cpu" and model.dtype == torch.float32
    assert model.max_seq_len == 384 and model.model.model.tts_model_type == "base"
    assert model.speech_tokenizer is model.model.model.speech_tokenizer
    assert model.warmup(prefill_len=100) is None
    assert Qwen3TTSCudaGraphs is FasterQwen3TTS


def test_the_same_timing(models, hello):
    """The third value of a chunk has the keys that faster-qwen3-tts' stream writes."""
    source = (PEERS / "faster_qwen3_tts" / "streaming.py").read_text()
    dicts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict) and len(node.keys) > 3]
    stream = models("base").generate_voice_clone_streaming(**hello, max_new_tokens=5, chunk_size=2)
    timings = [timing for _, _, timing in stream]
    assert dicts and all({key.value for key in node.keys} == set(timings[0]) for node in dicts)
    assert [timing["chunk_index"] for timing in timings] == [*range(len(timings))]
    assert timings[-1]["total_steps_so_far"] == sum(timing["chunk_steps"] for timing in timings) <= 5
    assert all(timing["decode_ms"] > 0 for timing in timings) and timings[0]["prefill_ms"] > 0


# ---- Its calls, on the tiny models


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_and_its_stream(models, recording_file, kind):
    """The whole call, the stream and upstream's method with the same seed give the same speech."""
    name, arguments = METHODS[kind]
    model = models(kind)
    if kind == "base":
        arguments = arguments | dict(ref_audio=str(recording_file))
    limits = dict(max_new_tokens=13, min_new_tokens=13)

    torch.manual_seed(3)
    (whole,), rate = getattr(model, name)(text="Hello there.", **arguments, **limits)
    assert rate == 24000 and whole.dtype == np.float32 and len(whole) == 13 * 1920

    torch.manual_seed(3)
    chunks = [*getattr(model, f"{name}_streaming")(text="Hello there.", **arguments, **limits, chunk_size=5)]
    assert [len(audio) // 1920 for audio, _, _ in chunks] == [5, 5, 3]
    assert [timing["is_final"] for _, _, timing in chunks] == [False, False, True]
    np.testing.assert_allclose(np.concatenate([audio for audio, _, _ in chunks]), whole, rtol=0, atol=1e-5)

    if kind == "base":
        audio, rate = soundfile.read(recording_file, dtype="float32")
        audio = np.append(audio, np.zeros(rate // 2, dtype=np.float32))  # append_silence
        prompt = model.model.create_voice_clone_prompt((audio, rate), arguments["ref_text"])
        arguments = dict(language="English", voice_clone_prompt=prompt)
    torch.manual_seed(3)
    (upstreams,), _ = getattr(model.model, name)(text="Hello there.", max_new_tokens=14, **arguments)
    np.testing.assert_allclose(whole[: len(upstreams)], upstreams, rtol=0, atol=1e-5)


def test_a_minimum_length_holds(models, hello):
    """Upstream's methods have no min_new_tokens: the end token must not come earlier here."""
    lengths = []
    for minimum in (2, 40):
        torch.manual_seed(0)
        (audio,), _ = models("base").generate_voice_clone(**hello, max_new_tokens=50, min_new_tokens=minimum)
        lengths.append(len(audio) // 1920)
    assert lengths[0] < 40 <= lengths[1]
    with pytest.raises(ValueError, match="min_new_tokens is 0, it must be a whole number of at least 1"):
        models("base").generate_voice_clone(**hello, min_new_tokens=0)


def test_every_form_of_a_voice(models, recording_file, checkpoint):
    """Prompts of upstream, as items and as a dict, the recording itself, its embedding, with an instruction."""
    model = models("base")
    audio, rate = soundfile.read(recording_file, dtype="float32")
    prompt = model.model.create_voice_clone_prompt((audio, rate), "what it says")
    embedding = prompt[0].ref_spk_embedding
    as_dict = dict(
        ref_code=[prompt[0].ref_code], ref_spk_embedding=[embedding], x_vector_only_mode=[False], icl_mode=[True]
    )

    def speak(**arguments):
        torch.manual_seed(1)
        (audio,), _ = model.generate_voice_clone("Hello.", "English", max_new_tokens=4, min_new_tokens=4, **arguments)
        return audio

    in_context = speak(voice_clone_prompt=prompt)
    np.testing.assert_array_equal(speak(voice_clone_prompt=as_dict, ref_text="what it says"), in_context)
    reference = dict(ref_audio=recording_file, ref_text="what it says")
    np.testing.assert_array_equal(speak(**reference, append_silence=False), in_context)
    assert (speak(**reference) != in_context).any()  # with silence between the recording and the speech
    by_embedding = speak(voice_clone_prompt={"ref_spk_embedding": [embedding], "name": "a field of the program's"})
    np.testing.assert_array_equal(speak(ref_audio=str(recording_file), xvec_only=True), by_embedding)
    assert (by_embedding != in_context).any()
    assert (speak(voice_clone_prompt=prompt, instruct="whisper") != in_context).any()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(), "ref_audio is missing"),
        (dict(ref_audio="nowhere.wav"), "ref_text is missing"),
        (dict(ref_audio="nowhere.wav", xvec_only=True), "there is no file nowhere.wav"),
        (dict(ref_spk="voice.spk"), "ref_spk is for the GGML backend"),
        (dict(ref_codes=np.zeros(3)), "ref_codes is for the GGML backend"),
        (dict(voice_clone_prompt={}), "has no ref_spk_embedding"),
        (dict(voice_clone_prompt={"ref_spk_embedding": [0, 0]}), "must be a list with one entry"),
        (dict(voice_clone_prompt=[]), "has 0 entries"),
        (dict(voice_clone_prompt={"ref_spk_embedding": [0], "icl_mode": [True]}), "must be opposites"),
        (dict(voice_clone_prompt={"ref_spk_embedding": [0], "x_vector_only_mode": [False]}), "ref_code is needed"),
        (VOICE | dict(text=" "), "the text is empty"),
        (VOICE | dict(chunk_size=0), "chunk_size is 0"),
        (VOICE | dict(temperature=0), "temperature"),
        (VOICE | dict(chunk_size=2.5), "chunk_size is 2.5"),
        (VOICE | dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(voice_clone_prompt={"ref_spk_embedding": [torch.zeros(7)]}), "7 numbers, this model takes 64"),
        (dict(voice_clone_prompt=torch.zeros(64)), "has no ref_spk_embedding"),
        (dict(voice_clone_prompt=[torch.zeros(64)]), "has a Tensor"),
        (dict(ref_audio=__file__, ref_text="x"), "is not audio that can be read"),
    ],
)
def test_mistakes_are_named_before_any_work(models, arguments, message):
    """A stream that fails at its first chunk, when the program has already told its listener to wait for audio."""
    with pytest.raises(ValueError, match=message):
        models("base").generate_voice_clone_streaming(**dict(text="Hello.", language="English") | arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(backend="ggml"), "backend='ggml': this package runs on torch only"),
        (dict(dtype="bf16"), "dtype='bf16' is not a type of torch"),
        (dict(device="cuda:99"), r"this torch finds \d+ CUDA devices, not cuda:99"),
        (dict(device="gpu"), "there is no device 'gpu' here: choose cuda"),
        (dict(max_seq_len=0), "max_seq_len is 0"),
        (dict(attn_implementation=8), "max_seq_len is 8"),  # the older class's fourth argument
    ],
)
def test_what_cannot_be_honoured_is_refused(checkpoint, arguments, message):
    """GGML, a misspelled type or a missing GPU must not end in a traceback of another package."""
    with pytest.raises(ValueError, match=message):
        FasterQwen3TTS.from_pretrained(str(checkpoint()), **dict(device="cpu") | arguments)
    with pytest.raises(ValueError, match="GGMLQwen3TTS: this package runs on torch only"):
        GGMLQwen3TTS.from_pretrained("folder")


# ---- speech-to-speech

HANDLER = """
    from queue import Queue
    from threading import Event

    import numpy as np, torch

    import qwen3_tts_cuda_graphs

    sys.modules["faster_qwen3_tts"] = qwen3_tts_cuda_graphs  # the handler imports our class

    from speech_to_speech.TTS.qwen3_tts_handler import AUDIO_RESPONSE_DONE, Qwen3TTSHandler
    from speech_to_speech.pipeline.messages import EndOfResponse, TTSInput

    torch.set_num_threads(1)
    load = qwen3_tts_cuda_graphs.FasterQwen3TTS.from_pretrained
    calls = []


    def load_on_a_cpu(model_name, **arguments):  # the handler takes "cuda" only
        calls.append(arguments)
        return load(model_name, **arguments | dict(device="cpu"), max_seq_len=512)


    qwen3_tts_cuda_graphs.FasterQwen3TTS.from_pretrained = load_on_a_cpu
    folders, recording = {folders!r}, {recording!r}
    for kind, options in (
        ("base", dict(ref_audio=recording, ref_text="what it says", streaming_chunk_size=4)),
        ("base", dict(ref_audio=recording, xvec_only=True, parity_mode=True)),
        ("custom_voice", dict(speaker="Aiden", language="zh")),
        ("voice_design", dict(instruct="a warm narrator", non_streaming_mode=None)),
    ):
        handler = Qwen3TTSHandler(
            Event(),
            Queue(),
            Queue(),
            setup_args=(Event(),),
            setup_kwargs=dict(model_name=folders[kind], dtype="float32", backend="torch", max_new_tokens=12) | options,
        )
        blocks = list(handler.process(TTSInput(text="Hello there.")))
        assert len(blocks) > 4 and all(block.dtype == np.int16 and len(block) == 512 for block in blocks), kind
        assert np.abs(np.concatenate(blocks)).max() > 300
        assert list(handler.process(EndOfResponse())) == [AUDIO_RESPONSE_DONE]
        handler.on_session_end()
        handler.cleanup()
    print(len(calls), calls[0]["attn_implementation"])
"""


@pytest.mark.skipif(
    transformers.__version__ < "5",
    reason="speech-to-speech needs transformers 5: ./setup.sh none --transformers5 --test",
)
def test_the_handler_of_speech_to_speech(checkpoint, recording_file, tmp_path):
    """Its own code, unmodified, with our class under the name that it imports."""
    assert (PEERS / "speech_to_speech").is_dir(), "run ./setup.sh none --transformers5 --test"
    folders = {kind: str(checkpoint(kind)) for kind in METHODS}
    program = (
        textwrap.dedent(HANDLER)
        .replace("{folders!r}", repr(folders))
        .replace("{recording!r}", repr(str(recording_file)))
    )
    program = f"import sys\nsys.path += {[str(ROOT), str(PEERS)]}\n" + program
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "4 eager", result.stdout
    assert "Error" not in result.stderr and "failed" not in result.stderr, result.stderr
