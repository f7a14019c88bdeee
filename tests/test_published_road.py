"""The files as they are published: a vocabulary above 100,000 entries, in folders and in the hub's cache, offline.

transformers treats such a tokenizer differently from a small one, and a folder differently from a hub id.
"""

import contextlib
import functools
import json
import os
import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from helpers import GREEDY, Voice, engine_of, joined, slow
from safetensors.torch import load_file, save_file
from serving_helpers import FRAME, SHORT, serving

from generate import MODELS
from qwen3_tts_cuda_graphs import FasterQwen3TTS
from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint
from qwen3_tts_cuda_graphs.cli.long_lines import count_tokens, text_tokenizer
from qwen3_tts_cuda_graphs.common.checkpoint_files import missing_files
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.common.model_config import read_config
from qwen3_tts_cuda_graphs.common.model_names import display_name
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.long_text import stream_long
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.upstream import Qwen3TTSModel

TEXT = "iPhone and McDonald's YouTube: 12 <|im_end|>\n\n  naïve CAFÉs, 今天天气真好 🎉"
NOT_PUBLISHED = "tokenizer.json", "added_tokens.json", "special_tokens_map.json"
NEEDED = ("config.json", "vocab.json", "merges.txt", "model.safetensors", "speech_tokenizer/model.safetensors")


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """published(kind): a folder with the files of the published models, and speaker.pt for a Base model."""

    @functools.cache
    def write(kind):
        folder = tmp_path_factory.mktemp("published") / f"Qwen3-TTS-{kind}"
        write_checkpoint(folder, "tiny", kind, ends=False, merges=105_000)
        for name in NOT_PUBLISHED:
            (folder / name).unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "4.57.3"}))
        processor = {"padding_side": "left", "padding_value": 0.0, "processor_class": "Qwen3TTSProcessor"}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return folder

    return write


@pytest.fixture(scope="session")
def hub_cache(published, tmp_path_factory):
    """The hub's cache after a download of 0.6B, with refs, snapshots, and links to blobs."""
    folder, home = published("base"), tmp_path_factory.mktemp("huggingface")
    repository = home / "hub" / ("models--" + MODELS["0.6B"].replace("/", "--"))
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    (repository / "blobs").mkdir()
    for number, file in enumerate(file for file in sorted(folder.rglob("*")) if file.is_file()):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copyfile(file, blob)
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return home


class Hub:
    """The model hub, which cannot be reached."""

    def __init__(self, put):
        """put: like setattr, undone after the test"""
        self.put = put
        self.asked = []  # the names that are looked up, none of which is found
        put(socket, "getaddrinfo", self.look_up)

    def look_up(self, host, *_, **__):
        self.asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "no network")

    def use_cache(self, home, offline=False):
        self.put(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
        self.put(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        read_config.cache_clear()
        text_tokenizer.cache_clear()

    def answer(self, download):
        """Let the hub be reachable; `download` downloads a model."""
        self.put(huggingface_hub, "model_info", lambda *_, **__: None)
        self.put(huggingface_hub, "snapshot_download", download)


@pytest.fixture
def hub(monkeypatch):
    return Hub(monkeypatch.setattr)


@pytest.fixture
def half_a_cache(hub_cache, hub, tmp_path):
    """half_a_cache(name): use a copy of the cache without this file. Returns its path, and the blob it linked to."""

    def take(name):
        home = tmp_path / "huggingface"
        shutil.copytree(hub_cache, home, symlinks=True)
        (missing,) = home.glob(f"hub/*/snapshots/*/{name}")
        blob = missing.readlink()
        missing.unlink()
        hub.use_cache(home)
        return missing, blob

    return take


@functools.cache
def qwen_tokens(folder):
    """The tokens that upstream has with a hub id, with the tokenizer's own pattern."""
    return transformers.Qwen2TokenizerFast.from_pretrained(folder, fix_mistral_regex=False)(TEXT).input_ids


def tokens(tts):
    return tts.processor.tokenizer(TEXT).input_ids


def in_pieces(text):
    return (text[start : start + 3] for start in range(0, len(text), 3))


# ---- One tokenization


def test_the_pattern_is_the_one_of_training(published):
    """With a folder, transformers would cut words like iPhone as for Mistral, which the model was not trained on."""
    folder = published("base")
    assert tokens(load_upstream(str(folder), "cpu")) == qwen_tokens(folder)
    assert count_tokens(str(folder), TEXT) == len(qwen_tokens(folder))  # the command line's, by the same tokenizer
    tts = Qwen3TTSModel.from_pretrained(str(folder))
    if transformers.__version__.startswith("4."):  # else this test shows nothing
        assert tokens(tts) != qwen_tokens(folder)
    assert tokens(accelerate(tts, max_seq_len=64)) == qwen_tokens(folder)


@pytest.mark.parametrize("name", ["in-context", *slow("preset", "designed")])
def test_every_voice_has_upstreams_tokens(published, recording, name):
    """Whole calls, streams, and text that is still arriving have the same tokens as upstream, from a folder too."""
    voice = Voice(name, published, recording).end_comes_up(False)
    voice.assert_same_tokens(text=TEXT, max_new_tokens=9)
    method = getattr(voice.fast, voice.method)
    arguments = voice.arguments | GREEDY | dict(max_new_tokens=9, non_streaming_mode=False)
    arriving = joined(stream(method, text=in_pieces(TEXT), **arguments))
    whole = joined(stream(method, text=TEXT, **arguments))
    assert len(arriving) == len(whole) and abs(arriving - whole).max() < 1e-5


# ---- Folders


def test_ways_to_name_a_folder(published, tmp_path):
    """A relative path, a link, a slash at the end, and a read-only folder."""
    folder = published("base")
    link = tmp_path / "link"
    link.symlink_to(folder)
    read_only = tmp_path / "read-only"
    shutil.copytree(folder, read_only)
    for path in (*read_only.rglob("*"), read_only):
        path.chmod(0o555 if path.is_dir() else 0o444)
    names = {f"./{folder.name}": folder.name, f"{folder}/": folder.name, str(link): "link", str(read_only): "read-only"}
    before = sorted(read_only.rglob("*"))
    with contextlib.chdir(folder.parent):
        for model, name in names.items():
            assert read_config(model)["tts_model_type"] == "base"
            assert display_name(model) == name
        for model in (f"./{folder.name}", str(read_only)):
            assert tokens(load_upstream(model, "cpu")) == qwen_tokens(folder)
    assert sorted(read_only.rglob("*")) == before
    with contextlib.chdir(folder):
        assert display_name(".") == folder.name


def copy_with_links(folder, to, without=()):
    to.mkdir(exist_ok=True)
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.is_file() and name not in without:
            (to / name).parent.mkdir(exist_ok=True)
            (to / name).symlink_to(file)
    return to


@pytest.mark.parametrize("file", NEEDED)
def test_a_missing_file_is_named(published, tmp_path, file):
    """Without merges.txt, transformers would say that protobuf is not installed."""
    folder = copy_with_links(published("base"), tmp_path / "model", without=[file])
    with pytest.raises(ValueError, match=f"it has no {file}: "):
        read_config(str(folder))


def test_optional_files(published, tmp_path):
    """The vocabulary may be in tokenizer.json alone, which has its own pattern. It may be Mistral's."""
    original = published("base")
    folder = copy_with_links(original, tmp_path / "model", ("vocab.json", "merges.txt", "preprocessor_config.json"))
    upstreams = transformers.Qwen2TokenizerFast.from_pretrained(original, fix_mistral_regex=True)
    upstreams.backend_tokenizer.save(str(folder / "tokenizer.json"))
    read_config(str(folder))
    assert tokens(load_upstream(str(folder), "cpu")) == qwen_tokens(original)


def in_shards(folder, to):
    """A copy of a checkpoint, with the weights in two files and an index."""
    copy_with_links(folder, to, without=["model.safetensors"])
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, to / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return to


def test_shards(published, tmp_path):
    """The error names the missing shard or index."""
    folder = in_shards(published("base"), tmp_path / "model")
    assert read_config(str(folder))
    weights = load_upstream(str(folder), "cpu").model.state_dict()
    for name, expected in load_file(published("base") / "model.safetensors").items():
        assert weights[name].equal(expected.float()), name
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert missing_files(folder) == ["model-00002-of-00002.safetensors"]
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json .* download it again"):
        missing_files(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert missing_files(folder) == ["model.safetensors.index.json"]
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert missing_files(folder) == ["model.safetensors"]


# ---- The hub's cache


@pytest.mark.parametrize("offline", [False, True], ids=["no network", "HF_HUB_OFFLINE"])
def test_what_is_in_the_cache_needs_no_network(published, hub_cache, hub, offline):
    """With a hub id, transformers 4.57 would ask the hub about the model's tags, without network for six minutes."""
    hub.use_cache(hub_cache, offline)
    for name in ("0.6B", MODELS["0.6B"]):
        assert read_config(name)["tts_model_type"] == "base"
        assert count_tokens(name, TEXT) == len(qwen_tokens(published("base")))
    assert tokens(load_upstream("0.6B", "cpu")) == qwen_tokens(published("base"))
    assert hub.asked == []


def test_a_snapshot_given_as_a_folder(published, hub_cache):
    """The model has the name of its repository, not its hash."""
    (snapshot,) = hub_cache.glob("hub/*/snapshots/*")
    assert display_name(str(snapshot)) == display_name(f"{snapshot}/") == "Qwen3-TTS-12Hz-0.6B-Base"
    assert display_name("0.6B") == "0.6B" and display_name("owner/name") == "name"
    assert read_config(str(snapshot)) == read_config(str(published("base")))


@pytest.mark.parametrize("cached", ["nothing", "not the weights"])
def test_no_network_and_no_weights(half_a_cache, hub, tmp_path, cached):
    if cached == "nothing":
        hub.use_cache(tmp_path)
    else:
        half_a_cache("model.safetensors")
    with pytest.raises(ValueError, match=r"0\.6B-Base cannot be downloaded .* check the name and the network"):
        read_config("0.6B")
    assert set(hub.asked) == {"huggingface.co"}


def test_a_cache_that_cannot_be_written(hub):
    """For a user without a home, the error names the cache, and not the network."""
    hub.answer(lambda *_, **__: os.makedirs("/dev/null/hub"))
    with pytest.raises(ValueError, match=r"owner/name cannot be kept in \S+: let \$HF_HOME name a writable folder"):
        read_config("owner/name")


@pytest.mark.parametrize("name", ["model.safetensors", "speech_tokenizer/model.safetensors"])
def test_half_a_cache_is_completed(name, published, half_a_cache, hub):
    """The snapshot of an interrupted download, which lacks the weights, is completed."""
    missing, blob = half_a_cache(name)
    downloads = []

    def download(model, local_files_only=False, allow_patterns=None):
        if not local_files_only and not allow_patterns:
            downloads.append(model)
            missing.symlink_to(blob)
        return str(missing.parents[name.count("/")])

    hub.answer(download)
    assert tokens(load_upstream("0.6B", "cpu")) == qwen_tokens(published("base"))
    assert downloads == [MODELS["0.6B"]]


# ---- Each published model, on every road; with real files where $QWEN3_TTS_PUBLISHED names a folder of model folders

PUBLISHED_MODELS = {  # name -> kind, its size in config.json, how it can speak
    "0.6B": ("base", "0b6", ["x-vector", "in-context"]),
    "1.7B": ("base", "1b7", ["x-vector", "in-context"]),
    "0.6B-CustomVoice": ("custom_voice", "0b6", ["preset"]),
    "1.7B-CustomVoice": ("custom_voice", "1b7", ["preset"]),
    "1.7B-VoiceDesign": ("voice_design", "1b7", ["designed"]),
}
NOT_STREAMING = dict(non_streaming_mode=False)  # the layout that text needs which is still arriving


@pytest.fixture(params=PUBLISHED_MODELS)
def model(request, published, tmp_path):
    """The folder of a model, and the names of its voices."""
    kind, size, voices = PUBLISHED_MODELS[request.param]
    real = os.environ.get("QWEN3_TTS_PUBLISHED")
    files = Path(real) / request.param if real else published(kind)
    folder = copy_with_links(files, tmp_path / f"Qwen3-TTS-12Hz-{request.param}")
    config = json.loads((folder / "config.json").read_text())
    if not real:
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config | {"tts_model_size": size}))
    if kind == "base" and not (folder / "speaker.pt").exists():
        torch.save(torch.randn(config["talker_config"]["hidden_size"]), folder / "speaker.pt")
    return folder, voices


@pytest.mark.slow
def test_a_published_model_in_python(model, recording):
    """All its voices, greedy and seeded, in lists, streams and the engine, with arriving and long texts."""
    folder, voices = model
    for name in voices:
        voice = Voice(name, lambda _: folder, recording).end_comes_up(False)
        method = getattr(voice.fast, voice.method)
        for settings in (GREEDY, dict(temperature=0.8, top_k=30)):
            voice.assert_same_tokens(text=TEXT, max_new_tokens=9, **settings)
        voice.assert_same_tokens(text=[TEXT, "Hello!"], max_new_tokens=6)
        arguments = voice.arguments | GREEDY | NOT_STREAMING | dict(max_new_tokens=9)
        whole = joined(stream(method, text=TEXT, **arguments))
        with engine_of(voice.fast, 2) as engine:
            ways = {
                "arriving": joined(stream(method, text=in_pieces(TEXT), **arguments)),
                "engine": joined(engine.stream(method, text=TEXT, **arguments)),
                "arriving in the engine": joined(engine.stream(method, text=in_pieces(TEXT), **arguments)),
            }
        (own,), _ = method(text=TEXT, **arguments)
        for way, audio in (ways | {"whole call": own}).items():
            assert len(audio) == len(whole) and abs(audio - whole).max() < 1e-4, (name, way)
        assert len(joined(stream_long(method, text="One.\n\nTwo.", pause=0.0, **arguments))) == 2 * 8 * 1920

        package = FasterQwen3TTS.from_pretrained(str(folder), device="cpu", dtype="float32", max_seq_len=384)
        talker = package.model.model.talker
        talker.codec_head.weight.data[talker.config.codec_eos_token_id] = 0
        (audio,), _ = getattr(package.model, voice.method)(text=TEXT, **arguments)
        assert abs(audio - whole).max() < 1e-4


@pytest.mark.slow
def test_a_published_model_over_http(model, tmp_path):
    """A request, arriving text, text that does not fit, and the model's name."""
    folder, _ = model
    with serving(folder, tmp_path / "voices", max_seq_len=256) as server:
        (listed,) = server.ask("GET", "/v1/models").json["data"]
        assert listed["id"] == folder.name and listed["voices"]
        fields = dict(response_format="pcm", voice=listed["voices"][0], **SHORT)
        assert len(server.pcm(input=TEXT, **fields)) == 5 * FRAME
        assert server.speak(**fields | {"input": "word " * 800, "max_new_tokens": 1000}).status == 400
        with server.talk(fields) as session:
            messages, audio = session.say(*in_pieces(TEXT))
        assert len(audio) == 5 * FRAME and "error" not in {message["type"] for message in messages}
