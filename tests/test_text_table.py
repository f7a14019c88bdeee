"""On a GPU prompts are built on the host. On a CPU the same code must build the same prompts."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import joined, slow

from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.prompts import templates as prompt_templates
from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.prompts.build import Asked, prepare_request, talker_arguments
from qwen3_tts_cuda_graphs.prompts.clone_prompts import reference_codes
from qwen3_tts_cuda_graphs.prompts.request import Request, request_of
from qwen3_tts_cuda_graphs.prompts.templates import PromptTemplate, template_key
from qwen3_tts_cuda_graphs.prompts.text_table import HostTalker, TextTable, use_text_table
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.streaming import stream


def upstreams(method, text: str, **arguments) -> Request:
    reference = reference_codes(arguments.get("voice_clone_prompt"))
    return request_of(talker_arguments(method, text=text, **arguments), reference)


@pytest.fixture(params=["x-vector", *slow("preset", "designed")])
def voice(voices, request):
    return voices(request.param).end_comes_up(True)


@pytest.mark.parametrize("non_streaming_mode", [True, False])
@pytest.mark.parametrize("text", ["Hello there.", " 你好，\n<|im_end|> cafe\u0301  12 ", "x" * 500])
def test_the_host_builds_the_same_prompt(voice, non_streaming_mode, text):
    method = getattr(voice.fast, voice.method)
    arguments = dict(text=text, non_streaming_mode=non_streaming_mode, **voice.arguments)
    expected = talker_arguments(method, **arguments)
    voice.fast.prompts.host_talker = HostTalker(voice.fast.model.talker)
    try:
        request = talker_arguments(method, **arguments)
    finally:
        voice.fast.prompts.host_talker = None
    assert request.keys() == expected.keys()
    for name, value in request.items():
        assert torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]


def accelerate_with_table(tts):
    """As on a GPU. Also twice: `accelerate` may be called again on the same model."""
    host_talker = use_text_table(tts.model.talker)
    accelerate(tts, max_seq_len=384)
    tts.prompts.host_talker = host_talker
    return tts


def test_a_model_with_a_table_speaks_as_before(voice):
    arguments = dict(text="Hello there.", max_new_tokens=20, **voice.arguments)

    def speak(tts):
        torch.manual_seed(0)
        return torch.tensor(joined(stream(getattr(tts, voice.method), **arguments)))

    tts = load_upstream(str(voice.folder), "cpu")
    tts.model.talker.codec_head.weight.data[voice.end_token] = voice.end_row
    embed, project = tts.model.talker.get_text_embeddings(), tts.model.talker.text_projection
    for _ in range(2):
        torch.testing.assert_close(speak(accelerate_with_table(tts)), speak(voice.fast), rtol=0, atol=1e-5)
    table = tts.model.talker.get_text_embeddings()
    assert isinstance(table, TextTable)
    ids = torch.arange(50)[None]
    torch.testing.assert_close(table(ids), project(embed(ids)))


@pytest.fixture(scope="module")
def tables():
    """tables(folder) -> its model with a text table"""
    return functools.cache(lambda folder: accelerate_with_table(load_upstream(str(folder), "cpu")))


@pytest.fixture
def with_table(voice, tables):
    tts = tables(voice.folder)
    tts.prompts.templates.clear()
    return tts


@pytest.mark.parametrize("voice", ["x-vector", "in-context", *slow("preset", "designed")], indirect=True)
@pytest.mark.parametrize("non_streaming_mode", [True, False, None])
def test_a_prompt_like_an_earlier_one_is_upstreams(voice, with_table, non_streaming_mode):
    """Texts of one token and of many, other settings in between; a template must not take over another request's."""
    method = getattr(with_table, voice.method)
    layout = {} if non_streaming_mode is None else dict(non_streaming_mode=non_streaming_mode)
    for number, text in enumerate(["Hello there.", "a", "你好，<|im_end|> cafe\u0301", "one two three " * 20]):
        for settings in (dict(top_k=20), dict(top_k=20, temperature=0.5, language="Chinese")):
            arguments = voice.arguments | layout | settings
            expected = upstreams(method, text, **arguments)
            request = with_table.prompts.build(method, text, arguments)
            for name, value in vars(request).items():
                same = getattr(expected, name)
                assert torch.equal(value, same) if torch.is_tensor(value) else value == same
        templates = with_table.prompts.templates.templates
        assert len(templates) == 2
        assert all(template.layout for template in templates.values()), f"not used for text {number}"


@pytest.mark.parametrize("voice", ["x-vector", "in-context"], indirect=True)
@pytest.mark.parametrize("non_streaming_mode", [True, False])
def test_prompts_built_together_are_upstreams(voice, with_table, non_streaming_mode):
    """With the first of their kind among them, other settings in between, and one that cannot be built."""
    method = getattr(with_table, voice.method)
    arguments = voice.arguments | dict(non_streaming_mode=non_streaming_mode)
    texts = ["Hello there.", "a", "one two three " * 20, "Hello."]
    kinds = arguments, arguments | dict(temperature=0.5)
    asked = [Asked(method, text, kind) for text in texts for kind in kinds]
    asked.insert(3, Asked(method, "Wrong.", arguments | dict(language="Klingon")))
    together = [*with_table.prompts.build_together(asked)]
    # Upstream builds the first of each kind and the wrong one, each of which is there at once; templates the others.
    assert [*map(len, together)] == [1, 3, 1, 3, 1]
    built = [request for _, request in sorted((i, request) for one in together for i, request in one.items())]
    assert isinstance(built.pop(3), ValueError)
    asked.pop(3)
    for one, request in zip(asked, built, strict=True):
        expected = upstreams(method, one.text, **one.kwargs)
        for name, value in vars(request).items():
            same = getattr(expected, name)
            assert torch.equal(value, same) if torch.is_tensor(value) else value == same
    templates = with_table.prompts.templates.templates
    assert len(templates) == 2 and all(template.layout for template in templates.values())


@pytest.mark.parametrize("is_finished", [False, True])
def test_text_that_arrives_has_upstreams_prompt(voice, with_table, is_finished):
    """Its prompt is made like an earlier one, too: upstream's code takes a millisecond or two."""
    method = getattr(with_table, voice.method)
    arguments = voice.arguments | dict(non_streaming_mode=False)
    for _ in range(2):
        text = ArrivingText(method, **arguments)
        text.push("Hello there")
        if is_finished:
            text.finish()
        request = text.begin()
        whole = upstreams(method, "Hello there", **arguments)
        known = len(whole.inputs) - 2 if is_finished else text.frames_with_text
        assert known >= 1 and request.prefix_key == whole.prefix_key is not None
        assert torch.equal(request.prefix, whole.prefix)
        assert torch.equal(request.inputs[:-1], whole.inputs[: 1 + known])
        assert torch.equal(request.inputs[-1], whole.inputs[-1])
    (template,) = with_table.prompts.templates.templates.values()
    assert template.layout


@pytest.mark.parametrize("voice", ["x-vector", "in-context"], indirect=True)
def test_another_speaker_or_recording_is_another_template(with_table, voice):
    """Of a reference, the codes and the transcript are in the prompt."""
    method = with_table.generate_voice_clone
    speaker = torch.load(voice.folder / "speaker.pt", weights_only=True)
    prompts = [speaker_prompt(speaker * scale) for scale in (1.0, 2.0)]
    if isinstance(voice.arguments["voice_clone_prompt"], list):
        (item,) = voice.arguments["voice_clone_prompt"]
        others = dict(ref_code=item.ref_code.flip(0)), dict(ref_code=item.ref_code[:5]), dict(ref_text="what else")
        prompts = [[dataclasses.replace(item, **other)] for other in ({}, *others)]
    for prompt in prompts:
        arguments = dict(voice_clone_prompt=prompt, language="English")
        for _ in range(2):
            request = with_table.prompts.build(method, "Hello.", arguments)
            expected = upstreams(method, "Hello.", **arguments)
            assert torch.equal(request.prefix, expected.prefix) and torch.equal(request.inputs, expected.inputs)
    templates = with_table.prompts.templates.templates
    assert len(templates) == len(prompts) and all(template.layout for template in templates.values())


@pytest.mark.parametrize("voice", ["x-vector", "in-context"], indirect=True)
def test_templates_take_a_limited_memory(with_table, voice, monkeypatch):
    """256 of them were kept, of any size, and those of refused requests, too: 12.8 GB of prompts that did not fit."""
    method = with_table.generate_voice_clone
    templates = with_table.prompts.templates.templates
    for top_k, mistake in enumerate([{}, dict(max_new_tokens=1), dict(temperature=-1.0), dict(eos_token_id=1)], 1):
        text = "Hello." if mistake else "x" * 2000
        with pytest.raises(ValueError):
            arguments = voice.arguments | dict(top_k=top_k, non_streaming_mode=True) | mistake
            prepare_request(method, text, **arguments)
    assert not templates

    monkeypatch.setattr(prompt_templates, "MAX_BYTES", limit := 200_000)
    held = []
    for top_k in range(1, 40):
        text = "x" * 50 * (top_k % 3)
        with_table.prompts.build(method, f"Hello {text}", voice.arguments | dict(top_k=top_k, non_streaming_mode=False))
        held.append(sum(kept.request.prefix.nbytes + kept.request.inputs.nbytes for kept in templates.values()))
    assert limit / 4 < max(held) <= limit and len(templates) < 39


def test_what_cannot_be_compared_has_no_template(voices):
    in_context = voices("in-context").arguments["voice_clone_prompt"]
    assert template_key("generate_voice_clone", dict(voice_clone_prompt=in_context * 2)) is None
    assert template_key("generate_custom_voice", dict(speaker=["dylan"])) is None
    assert template_key("generate_custom_voice", dict(top_k=1)) != template_key(
        "generate_custom_voice", dict(top_k=1.0)
    )


def test_another_layout_is_left_to_upstream(voice, with_table, monkeypatch):
    method = getattr(with_table, voice.method)
    monkeypatch.setattr(PromptTemplate, "equals_upstreams", lambda *_: False)
    for _ in range(2):
        request = with_table.prompts.build(method, "Hello.", voice.arguments)
        assert torch.equal(request.prefix, upstreams(method, "Hello.", **voice.arguments).prefix)
    (template,) = with_table.prompts.templates.templates.values()
    assert template.layout is None


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux lists them")
@pytest.mark.parametrize("non_streaming_mode", [True, False])
def test_a_prompt_stays_in_its_thread(voice, with_table, non_streaming_mode):
    """Waking torch's thread pool has taken 5 to 20 ms on a virtual machine, longer than the rest of the first audio."""
    method = getattr(with_table, voice.method)
    arguments = voice.arguments | dict(non_streaming_mode=non_streaming_mode)
    with_table.prompts.build(method, "Hello.", arguments)

    def threads_now() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def build() -> tuple[set[str], set[str]]:  # in a new thread, which has no pool yet
        torch.set_num_threads(4)
        before = threads_now()
        request = with_table.prompts.build(method, "one two three " * 1000, arguments)
        by_prompt = threads_now() - before
        request.inputs.new_ones(1 << 16).add_(1)
        return by_prompt, threads_now() - before

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            by_prompt, by_pool = pool.submit(build).result()
    finally:
        torch.set_num_threads(threads)
    assert not by_prompt and by_pool
