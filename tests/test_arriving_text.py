"""Text that is still being written: its tokens and speech are those of the whole text, however it is cut into
pieces."""

import asyncio
import contextvars
import dataclasses
import itertools
import random
import re
import sys
import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
from helpers import GREEDY, engine_of, joined, slow, watched
from transformers import PreTrainedTokenizerFast

from qwen3_tts_cuda_graphs.prompts import incremental_tokenizer
from qwen3_tts_cuda_graphs.prompts.arriving_text import ArrivingText
from qwen3_tts_cuda_graphs.prompts.incremental_tokenizer import IncrementalTokenizer, last_nfc_boundary, may_combine
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.speech.listener import Listener
from qwen3_tts_cuda_graphs.speech.streaming import astream, stream

OPENING = "<|im_start|>assistant\n"
CLOSING = "<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    "Hello there! I'll say it's 3.14 o'clock; we've 1234 of 'em -- don't we're?",
    "今天天气真好我们一起去公园散步吧，你觉得怎么样？一二三。",
    "東京タワーはとても高いです。カタカナとひらがな、漢字が混ざっています",
    "👨‍👩‍👧‍👦 👍🏽👍🏽!!🏳️‍🌈 ok ❤️",
    "cafe\u0301 s\u030d\u0323x \u212b\u0323\u093f! \u1112\u1161\u11ab\u1100\u1173 \u0995\u09c7\u09be =\u0338 \u0301x",
    "def f(x):\n    return x**2  # foo\n\n\n  \n\tif a[0] != b:\r\n\r\n   pass   ",
    "  \n \n leading",
    "\n\nx\u2028y\u00a0\u3000 z",
    "a<|im_end|>b <|im_en <<tts_pad> <|im_start|>assistant\n<tts_text_eod",
    "Привет, как дела? ภาษาไทยไม่มี हिन्दी में। 한국어 문장입니다.",
    "......!!!???\n\n... 'ſ 'S 'lL 'LLama 'rex １２ Ⅷ ½ aaaaaaaaaaaaaaaa",
]
ENGLISH = TEXTS[0]


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    """A tokenizer with Qwen's steps and more merges than the tiny checkpoints have, learned from this file's texts."""
    backend = tokenizers.Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.normalizer = backend.normalizer
    learned.pre_tokenizer = backend.pre_tokenizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator(TEXTS * 2 + ["assistant"] * 9, trainer)
    learned.add_special_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=learned)


def cuts(text, seed):
    """Pieces of 1 to 6 characters."""
    dice = random.Random(seed)
    while text:
        length = dice.randint(1, 6)
        yield text[:length]
        text = text[length:]


# ---- Tokens


def test_known_tokens_are_those_of_the_whole_text(tokenizer):
    """No token is final that later text can change, by a longer word, an accent or more whitespace."""
    dice = random.Random(0)
    characters = sorted({*"".join(TEXTS)})
    mixed = ["".join(dice.choices(characters, k=30)) for _ in range(100)]
    for text in TEXTS + mixed:
        whole = tokenizer(OPENING + text + CLOSING).input_ids
        for pieces in (list(text), cuts(text, seed=1), cuts(text, seed=2)):
            so_far = IncrementalTokenizer(tokenizer, OPENING)
            known = 0
            for piece in pieces:
                so_far.push(piece)
                assert so_far.ids == whole[: len(so_far.ids)], (text, so_far.tail)
                assert len(so_far.ids) >= known
                known = len(so_far.ids)


@pytest.mark.parametrize("text", [ENGLISH, TEXTS[9], "Line one.\n\nLine two, 1 2 3."])
def test_complete_words_are_known(tokenizer, text):
    """A word must not be held back once the next one has begun."""
    so_far = IncrementalTokenizer(tokenizer, OPENING)
    for position, character in enumerate(text):
        so_far.push(character)
        next_word_begins = text[position - 1 : position] == " " and character.isalpha()
        if position > 0 and next_word_begins:
            complete = tokenizer(OPENING + text[: position - 1]).input_ids
            assert so_far.ids[: len(complete)] == complete, text[:position]


def test_characters_that_combine():
    """NFC must not change text before a boundary. Checked for all characters in Python's Unicode tables."""

    def kind(character):
        category = unicodedata.category(character)
        return category[0] if category[0] in "LN" else "space" if character.isspace() else "other"

    for character in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.normalize("NFD", character)
        is_composite = len(parts) > 1 and unicodedata.normalize("NFC", parts) == character
        if is_composite:
            assert all(map(may_combine, parts[1:])), character
            assert kind(parts[0]) == kind(character)  # so a pre-token keeps its kind
    assert last_nfc_boundary("as\u030d\u0323") == 1
    assert last_nfc_boundary("\u0301") == 0


def test_another_tokenizer_is_refused(tokenizer):
    """A tokenizer with other rules is refused, as its tokens would silently be wrong."""
    other = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    other.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    with pytest.raises(ValueError, match="give the whole text at once"):
        IncrementalTokenizer(PreTrainedTokenizerFast(tokenizer_object=other))


# ---- Speech


def spoken(voice, text, seed=0, **arguments):
    """The codes of a stream, and the next random number."""
    arguments = voice.arguments | dict(non_streaming_mode=False) | arguments
    torch.manual_seed(seed)
    audio = joined(stream(voice.fast_method, text=text, **arguments))
    codes = voice.fast.speech.runner.rows.codes[0, : len(audio) // 1920]  # alone, so in the first row
    return codes, torch.rand(1)


@pytest.mark.parametrize("name", ["x-vector", "in-context", *slow("preset", "designed")])
def test_same_tokens_as_the_whole_text(voices, name):
    """Upstream's own codes for the whole text, on all voices, however the text is cut."""
    voice = voices(name).end_comes_up(False)
    cases = (
        (TEXTS[1][:6], list, 12, GREEDY),
        (TEXTS[4][:8], lambda text: cuts(text, seed=1), 16, {}),
        (ENGLISH[:12], list, 16, {}),
        ("Hi", list, 6, GREEDY),
    )
    for text, cut, tokens, sampling in cases[1:2] if name == "in-context" else cases:  # in-context prompts take long
        arguments = dict(max_new_tokens=tokens, **sampling)
        expected, after = voice.codes(voice.upstream, seed=3, text=text, non_streaming_mode=False, **arguments)
        codes, after_ours = spoken(voice, iter(cut(text)), seed=3, **arguments)
        assert torch.equal(codes, expected[0])
        assert after_ours == after


def speak(voice, text, **arguments):
    return stream(voice.fast_method, text=text, **voice.arguments | GREEDY | arguments)


def test_speech_begins_before_the_text_ends_and_waits_for_it(voice):
    """No frame is computed without its text, and no random numbers are drawn while waiting: either would change the
    speech that follows."""
    text = "Hello there."
    torch.manual_seed(0)
    expected = joined(stream(voice.fast_method, text=text, **voice.arguments))
    may_go_on = threading.Event()
    caller = contextvars.ContextVar("caller")
    caller.set("me")

    def pieces():
        assert caller.get() == "me"  # as if the iterator ran in the caller's thread
        yield text[:5]
        assert may_go_on.wait(20)
        yield text[5:]

    torch.manual_seed(0)
    chunks = stream(voice.fast_method, text=pieces(), **voice.arguments)
    known_rows = 3  # "Hell": the first is in the prompt, "o" may still be part of another token
    early = [next(chunks)]
    reading = threading.Thread(target=early.extend, args=[chunks])
    reading.start()
    while len(joined(early)) < known_rows * 1920:  # all known frames come before the next piece
        time.sleep(0.01)
    before = torch.get_rng_state()
    time.sleep(0.3)
    assert len(joined(early)) == known_rows * 1920  # and nothing more
    assert torch.equal(torch.get_rng_state(), before)
    may_go_on.set()
    reading.join()
    np.testing.assert_allclose(joined(early), expected, rtol=0, atol=1e-6)  # not to the bit, as chunk sizes differ


def test_text_that_is_there_early_has_the_same_chunks(voice):
    """Each piece was taken only when its frame needed it. The text seemed late, and every chunk had a single frame."""
    all_there = threading.Event()

    def pieces():
        yield from ENGLISH
        all_there.set()

    arguments = dict(non_streaming_mode=False, max_new_tokens=40)
    whole = [len(audio) for audio, _ in speak(voice.end_comes_up(False), ENGLISH, **arguments)]
    chunks = speak(voice, pieces(), **arguments)
    sizes = [len(next(chunks)[0])]
    assert all_there.wait(20)
    sizes += [len(audio) for audio, _ in chunks]
    assert sizes == whole


def test_an_iterator_that_fails_ends_the_stream(voice):
    """Half a text must not be taken for a whole one. What was known before the error is still spoken."""

    def pieces():
        yield "Hello there"
        raise LookupError("the language model is gone")

    voice.end_comes_up(False)
    heard = []
    with pytest.raises(LookupError, match="is gone"):
        heard.extend(speak(voice, pieces()))
    assert len(joined(heard)) == 9 * 1920  # all but "H", which is in the prompt, and "e", which may still change
    assert len(joined(speak(voice.end_comes_up(True), "Hi"))) > 0  # the model is free


@pytest.mark.parametrize("first", ["", "Hello"])
def test_an_iterator_that_never_yields_is_given_up(voice, first):
    """A language model that hangs must not block the model forever. Empty pieces do not count as text."""
    closed = threading.Event()

    def pieces():
        yield first
        while not closed.wait(0.05):
            yield ""

    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no text has come for 0.5 s"):
        list(speak(voice, pieces(), text_timeout=0.5))
    assert time.monotonic() - start < 10
    closed.set()
    assert len(joined(speak(voice, "Hi"))) > 0


def test_late_text_does_not_lose_its_turn(voice):
    """A stream may wait for text up to text_timeout. Another request took over after 10 s, the limit for paused
    listeners."""
    is_speaking, is_late = threading.Event(), threading.Event()

    def pieces():
        yield "Hello there, "
        is_late.wait(10)
        yield "you."

    def speak_another() -> np.ndarray:
        chunks = speak(voice, "Hi", max_new_tokens=4)
        is_speaking.wait(10)
        threading.Timer(0.5, is_late.set).start()
        return joined(chunks)

    with ThreadPoolExecutor(1) as thread, mock.patch.object(voice.fast.speech.turns, "patience", 0.05):
        other = thread.submit(speak_another)
        for _ in speak(voice.end_comes_up(False), pieces(), max_new_tokens=30):
            is_speaking.set()
        assert len(other.result()) > 0


def test_threads_share_the_tokenizer(voice):
    """Tokenizing with another padding than upstream's, in another thread, raised RuntimeError: Already borrowed."""
    tts = voice.fast
    with ThreadPoolExecutor(2) as threads:
        upstream = threads.submit(lambda: [tts._tokenize_texts(["Hello there. " * 50]) for _ in range(300)])
        ours = threads.submit(lambda: [tokenize(tts, "Hello there. " * 50) for _ in range(300)])
        assert upstream.result()[-1][0][0].tolist() == ours.result()[-1]


def test_a_closed_stream_stops_reading(voice):
    """A cancelled stream must not leave a thread behind that reads the language model to its end."""
    read = []

    def pieces():
        for number in itertools.count():
            read.append(number)
            yield "word "

    chunks = speak(voice, pieces())
    next(chunks)
    chunks.close()
    end = time.monotonic() + 5
    while any(thread.name == "text reader" for thread in threading.enumerate()):
        assert time.monotonic() < end, "the reader is still running"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "pieces, message",
    [
        ([], "empty"),
        (["  ", "\n"], "empty"),
        (["Hi ", b"you"], "a piece of the text is a bytes"),
        (["Hi \ud800"], "UTF-8"),
    ],
)
def test_mistakes_in_the_text(voice, pieces, message):
    """A bad piece is reported as such, and does not fail somewhere inside."""
    with pytest.raises(ValueError, match=message):
        list(speak(voice, iter(pieces)))


def test_mistakes_in_the_request_raise_at_once(voice):
    """Mistakes raise before the language model has begun to write."""
    never = iter(threading.Event().wait, True)
    with pytest.raises(ValueError, match="temperature"):
        speak(voice, never, do_sample=True, temperature=-1.0)
    with pytest.raises(ValueError, match="whole text into the prompt"):
        speak(voice, never, non_streaming_mode=True)
    with pytest.raises(ValueError, match="text_timeout is 0"):
        speak(voice, never, text_timeout=0)


def test_asyncio(voice):
    """An async iterator feeds a stream, the event loop is never blocked, and a cancelled listener frees the model."""
    expected = joined(speak(voice, "Hello there."))

    async def pieces():
        for character in "Hello there.":
            await asyncio.sleep(0)
            yield character

    async def never():
        yield "Hello"
        await asyncio.sleep(60)

    async def listen(text):
        return joined([it async for it in astream(voice.fast_method, text=text, **voice.arguments, **GREEDY)])

    async def main():
        arrived = await listen(pieces())
        np.testing.assert_allclose(arrived, expected, rtol=0, atol=1e-6)  # chunks are smaller when the text was late
        np.testing.assert_array_equal(await listen("Hello there."), expected)
        with pytest.raises(ValueError, match="use astream"):
            speak(voice, pieces())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(listen(never()), 0.5)

    start = time.monotonic()
    asyncio.run(main())
    np.testing.assert_array_equal(joined(speak(voice, "Hello there.")), expected)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_how_much_was_read(voice, form):
    """`characters_read` counts characters of the text as it was sent. Tokens stand for composed characters: for
    decomposed text the count was too small, and text was spoken again."""
    composed = "é한글 ô und dann noch mehr"
    sent = unicodedata.normalize(form, composed)
    text = ArrivingText(voice.fast_method, **voice.arguments)
    text.push(sent)
    text.finish()
    read = [sent[: text.characters_read(frames)] for frames in range(len(text.ids))]
    assert read[-1] == sent and all(itertools.starmap(str.startswith, itertools.pairwise(read[::-1])))
    assert sent[:-5] in read  # letters of ASCII are tokens
    assert set(read) <= {unicodedata.normalize(form, composed[:end]) for end in range(len(composed) + 1)}


@pytest.mark.parametrize("surplus", [-5, 0, 40])
def test_a_transcript_is_not_counted_as_text(voices, surplus):
    """If a transcript is longer than its recording, its rest was counted as text that had been read, and so much text
    was never spoken."""
    voice = voices("in-context")
    (item,) = voice.arguments["voice_clone_prompt"]
    positions = 1 + len(item.ref_code)
    prompt = [dataclasses.replace(item, ref_text="x" * (positions + surplus))]  # a character is a token
    text = ArrivingText(voice.fast_method, voice_clone_prompt=prompt)
    text.push("One two three four.")
    text.finish()
    assert [text.characters_read(frames) for frames in range(70)] == [
        min(max(0, frames - surplus), len(text.text)) for frames in range(70)
    ]


@pytest.mark.parametrize("size", [1, 10_000])  # of the pieces that the text comes in
@pytest.mark.parametrize(
    "text, ends",
    [
        ("xqzjkvw" * 60, None),
        ("0123456789abcdef" * 20, None),
        ("今天天气；很好我们：走吧" * 10, None),
        ("สวัสดีครับวันนี้อากาศดีมาก" * 5, None),
        ("e\u0301" * 200, None),
        ("\U0001f600" * 40, None),
        ("3 1 4 1 5 9 " * 30, r"\S "),
        ("one two three four five. " * 8, r"(\w )|(five\. ?)"),
        ("\n" * 200 + "Hello there. " * 8, None),
    ],
    ids=["letters", "hash", "；：", "Thai", "accents", "emoji", "digits", "sentences", "line ends"],
)
def test_a_text_that_does_not_fit_is_cut(voice, text, ends, size):
    """All of the text is spoken, in utterances that fit. Text without spaces was never cut, and did not fit."""
    most, utterances = 40, []
    tts = voice.fast
    with engine_of(tts, 2) as engine:
        while (rest := text[len("".join(utterances)) :]).strip():
            listener = Listener(engine, print, max_text_tokens=most)
            listener.ask(tts.generate_voice_clone, None, 0, voice.arguments | {"max_new_tokens": 2})
            for piece in [*(rest[start : start + size] for start in range(0, len(rest), size)), None]:
                listener.push(piece).result()
            assert listener.arriving.is_finished and not listener.arriving.error
            utterances.append(listener.arriving.text)
            listener.cancel()
    assert "".join(utterances).rstrip() == text.rstrip() and len(utterances) > 2
    assert max(len(tokenize(tts, utterance.strip())) for utterance in utterances) <= most + 4
    if ends:
        assert all(re.search(f"({ends})$", utterance) or size > 1 for utterance in utterances[:-1])


def test_a_prompt_that_is_a_dict_with_codes(voice):
    """Upstream takes such a prompt, too."""
    codes = torch.randint(64, (6, voice.fast.model.talker.config.num_code_groups))
    prompt = voice.arguments["voice_clone_prompt"] | {"ref_code": [codes], "icl_mode": [False]}
    arguments = voice.arguments | GREEDY | dict(max_new_tokens=4, voice_clone_prompt=prompt, non_streaming_mode=False)
    whole, arriving = (
        joined(stream(voice.fast_method, text=text, **arguments))
        for text in ("Hello there.", iter(["Hello ", "there."]))
    )
    np.testing.assert_allclose(arriving, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", ["\u0301", "\u200d", " ", "\u1161", " word"], ids=ascii)
def test_what_never_settles_takes_no_longer_per_character(tokenizer, run):
    """With endless accents, wide whitespace or a long page each character was encoded with all before it. Accents took
    16 s."""
    encoded = []
    so_far = IncrementalTokenizer(tokenizer, OPENING)
    text = "e" + run * (4000 // len(run))
    with watched(incremental_tokenizer.Rules, "encode", lambda _, text: encoded.append(len(text))):
        for character in text:
            so_far.push(character)
    assert sum(encoded) < 1000 * len(text)  # once per character it would be half of the text's square
    expected = tokenizer(OPENING + text).input_ids
    assert so_far.ids == expected[: len(so_far.ids)]


@pytest.mark.parametrize("first", ["", "今天天气真好" * 50, "x" * 300])
def test_a_long_piece_is_known_soon(tokenizer, first):
    """Speech must not wait until twice as much text has come. In Chinese, which has no spaces, it must not wait for the
    end of a clause."""
    so_far = IncrementalTokenizer(tokenizer, OPENING)
    text = OPENING
    for piece in [first, *("今天天气真好" * 10)]:
        so_far.push(piece)
        text += piece
        expected = tokenizer(text).input_ids
        assert so_far.ids == expected[: len(so_far.ids)]
    assert len(so_far.ids) > len(expected) - 20


@pytest.mark.parametrize("run", ["-", "!?", "a", "今", "—"])
def test_a_run_of_punctuation_takes_no_longer_per_character(tokenizer, run):
    """A long run is one pre-token. 1,000 hyphens took 45 ms per character, on the only thread that builds prompts."""
    so_far = IncrementalTokenizer(tokenizer, OPENING)
    text = run * 1000
    for character in text:
        so_far.push(character)
        assert len(so_far.tail) < 3 * incremental_tokenizer.LONG_PRE_TOKEN
    expected = tokenizer(OPENING + text).input_ids
    assert so_far.ids == expected[: len(so_far.ids)] and len(so_far.ids) > 0.9 * len(expected)
