"""On a GPU prompts are built on the host. On a CPU the same code must build the same prompts."""

import pytest
import torch
from helpers import VOICES, joined

from fast.prompts import build_request, decoder_of
from fast.text_table import HostTalker, TextTable, use_text_table
from generate import accelerate, load_upstream, stream

pytestmark = pytest.mark.filterwarnings("ignore:the speech was cut off")


@pytest.fixture(params=[name for name in VOICES if name != "in-context"])
def voice(voices, request):
    return voices(request.param).end_comes_up(True)


@pytest.mark.parametrize("non_streaming_mode", [True, False])
@pytest.mark.parametrize("text", ["Hello there.", " 你好，\n<|im_end|> cafe\u0301  12 ", "x" * 500])
def test_the_host_builds_the_same_prompt(voice, monkeypatch, non_streaming_mode, text):
    method = getattr(voice.fast, voice.method)
    arguments = dict(text=text, non_streaming_mode=non_streaming_mode, **voice.arguments)
    expected = build_request(method, **arguments)
    decoder = decoder_of(voice.fast)
    monkeypatch.setattr(decoder, "host_talker", HostTalker(voice.fast.model.talker))
    request = build_request(method, **arguments)
    assert request.keys() == expected.keys()
    for name, value in request.items():
        assert torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]


def test_a_model_with_a_table_speaks_as_before(voice):
    """Also twice: `accelerate` may be called again on the same model."""
    arguments = dict(text="Hello there.", max_new_tokens=20, **voice.arguments)
    torch.manual_seed(0)
    expected = joined(stream(getattr(voice.fast, voice.method), **arguments))

    tts = load_upstream(str(voice.folder), "cpu")
    tts.model.talker.codec_head.weight.data[voice.end_token] = voice.end_row
    embed, project = tts.model.talker.get_text_embeddings(), tts.model.talker.text_projection
    for _ in range(2):
        host_talker = use_text_table(tts.model.talker)
        accelerate(tts, max_seq_len=384)
        decoder_of(tts).host_talker = host_talker
        torch.manual_seed(0)
        torch.testing.assert_close(
            torch.tensor(joined(stream(getattr(tts, voice.method), **arguments))),
            torch.tensor(expected),
            rtol=0,
            atol=1e-5,
        )

    table = tts.model.talker.get_text_embeddings()
    assert isinstance(table, TextTable)
    ids = torch.arange(50)[None]
    torch.testing.assert_close(table(ids), project(embed(ids)))
