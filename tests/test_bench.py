"""The benchmark and its check, on a tiny model on the CPU."""

import argparse
import contextlib
import itertools
import json
import math
import re
import time
import weakref
from dataclasses import replace
from functools import partial

import pytest
import soundfile
import torch
import transformers
from helpers import ROOT, published_blocks

from cudagraph_talker import Rows
from qwen3_tts_cuda_graphs.bench import check, listeners, load_test, over_http, plot, quality, single, timing
from qwen3_tts_cuda_graphs.bench.__main__ import main
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.parity import TeacherForced, one_pass
from qwen3_tts_cuda_graphs.bench.peer import run_peer
from qwen3_tts_cuda_graphs.bench.processes import output_of
from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint
from qwen3_tts_cuda_graphs.common.loading import load, load_upstream
from qwen3_tts_cuda_graphs.prompts.build import talker_arguments

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
SHORT = replace(  # utterances as short as can be timed
    timing.SMALL, frames=(2, 5), upstream_frames=(2, 4), first_audio_runs=1, late_chunk_frames=4, streams=(1, 4)
)


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """bench(word, ...) runs a short benchmark in tmp_path. Returns what it prints, and the rows of the tiny model."""
    monkeypatch.setattr(timing, "SMALL", SHORT)

    def run(*words):
        with contextlib.chdir(tmp_path):
            main([*words])
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 100
        (results,) = tmp_path.glob("bench_results_CPU*.json")
        return printed, json.loads(results.read_text())["models"]["tiny"]

    return run


@pytest.fixture
def ended(tmp_path, capsys):
    """ended(word, ...) runs a command in tmp_path that exits. Returns the exit code, stdout and stderr."""

    def run(*words):
        with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as end:
            main([*words])
        return end.value.code, *capsys.readouterr()

    return run


def test_without_a_gpu_it_times_the_tiny_model_and_says_so(bench, tmp_path):
    """A folder named tiny, as the README makes one, is not used, because its model would end its speech by itself."""
    write_checkpoint(tmp_path / "tiny", "tiny")
    printed, rows = bench("--quick")
    card = json.loads((tmp_path / "bench_results_CPU.json").read_text())["card"]
    assert card["weights"] == "random" and card["commit"]
    for name in ("upstream", "separate kernels"):
        assert math.isfinite(rows[name]["ms_per_frame"]) and rows[name]["x_real_time"] > 0
    for chunks in single.CHUNKS:
        assert rows[f"separate kernels, chunks of {chunks}"]["first_audio_ms"] > 0
    arriving = rows["separate kernels, text at 50 tokens per second"]
    assert 0 < arriving["first_audio_ms"] and arriving["pieces_to_begin"] == 1  # every byte is a token here
    assert {"predictor", "frame at position 200"} <= rows["separate kernels, a frame's parts in ms"].keys()
    assert rows["separate kernels, first audio's parts in ms"]["prefill"] > 0
    assert math.isfinite(rows["separate kernels, times as fast"]["than upstream"])
    assert soundfile.info(tmp_path / "sample_tiny.wav").samplerate == 24000
    assert "No GPU here" in printed and printed.strip().endswith("bench_results_CPU.json")


def test_the_time_of_a_frame_is_the_difference_of_two_calls(monkeypatch):
    """The calls take 100 ms and 20 ms per frame. Real calls would be too short to measure on a busy machine."""
    monkeypatch.setattr(timing, "clock", lambda speak: (100 + 20 * 12.5 * speak(), speak()))
    row = timing.time_whole_calls(lambda frames: frames / 12.5, (2, 5), SHORT)
    assert (row["frames"], row["ms_per_frame"], row["x_real_time"]) == (5, pytest.approx(20), pytest.approx(2))


def test_many_listeners_and_lists(bench):
    """Lists are timed with upstream's method and with the engine."""
    _, rows = bench("--streams")
    for count, name in ((1, "1 stream alone"), (4, "4 streams at once")):
        assert rows[name]["listeners"] == count
        assert 0 < rows[name]["first_audio_ms"] <= rows[name]["first_audio_p95_ms"]
        assert rows[name]["audio_seconds_per_second"] > 0
    assert rows["lists"].keys() == {"2"} and rows["lists"]["2"].keys() == {"upstream_method", "engine"}
    assert all(speed > 0 for speed in rows["lists"]["2"].values())


def write_recognizer(folder) -> None:
    """A speech recognizer with random weights, which recognizes letters in any audio."""
    folder.mkdir()
    letters = ["[PAD]", "[UNK]", "|", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    convolutions = dict(conv_dim=(8, 8), conv_kernel=(10, 8), conv_stride=(5, 8), num_conv_pos_embeddings=4)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(letters), num_conv_pos_embedding_groups=2, **sizes, **convolutions
    )
    transformers.Wav2Vec2ForCTC(config).save_pretrained(folder)


@pytest.mark.slow
def test_each_path_is_heard(bench, tmp_path):
    """With random weights only this can be tested: the same audio gets the same scores on every path."""
    write_recognizer(tmp_path / "recognizer")
    _, rows = bench("--listen", "--recognizer", "recognizer")
    assert [*rows] == ["upstream", "separate kernels", "separate kernels, streamed", "16 at once"]
    upstream, ours, streamed, together = rows.values()
    assert [one["text"][:3] for one in upstream["sentences"]] == ["The", "Der", "去海边"]
    assert upstream["word_errors_percent"] > 0 and upstream["seconds"] > 0
    for row in (ours, streamed):  # on a CPU the tokens are upstream's
        assert row["seconds"] == upstream["seconds"]
        assert abs(row["similarity"] - upstream["similarity"]) < 1e-3
    assert together["sentences"][0]["seconds"] == upstream["sentences"][0]["seconds"]  # of the same seed


def test_word_errors():
    for expected, heard, errors in [
        ("Hello, world!", "hello world", 0),
        ("Don't go.", "dont  GO", 0),
        ("one two three", "one three", 1),
        ("one two three", "", 3),
        ("one two", "zero one too two", 2),
    ]:
        assert quality.edit_distance(*(quality.words_of(text, "English") for text in (expected, heard))) == errors
    assert quality.words_of("你好，世界。", "Chinese") == ["你", "好", "世", "界"]
    counted = dict(words=10, similarity=0.5, seconds=1.0, is_runaway=False)
    scores = [counted | dict(errors=errors) for errors in (0, 1, 2, 5)]
    row = quality.summarize(scores, scores)
    assert row["word_errors_percent"] == 20 and (row["change_low"], row["change_high"]) == (0, 0)
    assert 0 <= row["word_errors_low"] < 20 < row["word_errors_high"] <= 50
    assert row["similarity_change_low"] == row["similarity_change_high"] == 0


def test_what_a_listener_counts():
    """0.1 s of audio come after 0.1 s, 60 s of audio 0.3 s later, which is too late, and more of it in time."""

    def speak():
        for pause, seconds in ((0.1, 0.1), (0.3, 60), (0, 1)):
            time.sleep(pause)
            yield bytes(round(100 * seconds)), 100

    heard = listeners.listen(speak)
    assert heard.first_audio_ms >= 100 and (heard.seconds, heard.underruns) == (pytest.approx(61.1), 1)
    assert listeners.listen(speak, leave_after=0).seconds == pytest.approx(0.1)


def test_how_listeners_are_summed_up():
    heard = [listeners.Hearing(0.0, first_audio_ms=float(ms), seconds=2.0, underruns=ms % 2) for ms in range(1, 101)]
    row = listeners.summary(heard, wall=10.0)
    assert row["listeners"] == 100 and row["audio_seconds_per_second"] == 20 and row["underruns"] == 50
    assert (row["first_audio_ms"], row["first_audio_p95_ms"], row["first_audio_p99_ms"]) == (50.5, 95, 99)


def test_arrivals_are_independent_and_as_many_as_asked_for():
    """20 per second over 1000 s: one in a million seeds is beyond 5 standard deviations. The seed is fixed."""
    arrivals = [*listeners.poisson_arrivals(20, 1000)]
    assert abs(len(arrivals) - 20000) < 5 * 20000**0.5 and arrivals == sorted(arrivals) and arrivals[-1] < 1000
    gaps = [later - earlier for earlier, later in zip(arrivals, arrivals[1:])]
    assert abs(sum(gap > 0.05 for gap in gaps) / len(gaps) - math.exp(-1)) < 0.02


def test_the_load_script_counts_what_fails():
    """What a listener heard before the error counts, too. A server that does not answer at all is an error at once."""
    streams = iter(range(5))

    def speak():
        yield bytes(4800), over_http.BYTES_PER_SECOND
        if next(streams) % 2:
            raise OSError("the connection was closed")

    args = argparse.Namespace(one_by_one=4, crowds=[], compare=None)
    ((name, row),) = load_test.measure(args, partial(load_test.drive_here, speak))
    assert (name, row["errors"], row["listeners"]) == ("4 one by one", ["the connection was closed"] * 2, 4)
    with pytest.raises(OSError, match="refused"):
        next(
            load_test.measure(args, partial(load_test.drive_here, partial(over_http.audio_from, "http://127.0.0.1:9")))
        )


@pytest.mark.slow
def test_how_long_until_a_process_speaks(bench):
    """It starts other processes, whose code no other test runs."""
    _, rows = bench("--ready")
    row = rows["ready"]
    assert row["runs"] == 1
    assert all(value > 0 for value in row.values())
    assert row["shell_to_first_audio_s"] > row["first_request_ms"] / 1e3


def test_a_process_that_does_not_speak():
    """The benchmark must neither wait for it forever nor hide the reason."""
    with pytest.raises(ValueError, match="-c 1 / 0 has failed: ZeroDivisionError: division by zero"):
        next(output_of(["-c", "1 / 0"], 1))
    with pytest.raises(ValueError, match="it took too long"):
        next(output_of(["-c", "import time; time.sleep(100)"], 1, timeout=0.5))


def test_rows_that_quick_leaves_out(tmp_path, capsys):
    """The three files alone use upstream's layers and codec. A voice that cannot be loaded is left out."""
    write_checkpoint(tmp_path, "tiny", ends=False)
    measured = Checkpoint("tiny", str(tmp_path), str(tmp_path / "missing"), tmp_path / "speaker.pt")

    tts, row = single.time_captured(measured, SHORT, single.accelerate_of_three_files())
    assert row["frames"] == 5 and math.isfinite(row["ms_per_frame"]) and row["x_real_time"] > 0
    assert type(tts.model.talker.generate.__self__).__module__ == "generate"
    assert not hasattr(tts, "speech")
    assert "decode" not in vars(tts.model.speech_tokenizer)
    assert not any("forward" in vars(module) for module in tts.model.talker.modules())

    rows = dict(single.time_voices(single.accelerate(tts), measured, SHORT))
    assert [*rows] == ["voice: x-vector", "voice: in-context"]
    assert "voice: preset voice left out: " in capsys.readouterr().out


def test_models_are_freed_before_the_next_one_is_measured(tmp_path, monkeypatch):
    """The figures of peak memory would include them."""
    write_checkpoint(tmp_path, "tiny", ends=False)
    measured = Checkpoint("tiny", str(tmp_path), None, tmp_path / "speaker.pt")
    models = []

    def load_and_watch(model):
        assert not any(earlier() for earlier in models)
        tts = load_upstream(model)
        models.append(weakref.ref(tts.model))
        return tts

    monkeypatch.setattr(timing, "load_upstream", load_and_watch)
    rows = itertools.islice(single.time_all(measured, SHORT), 3)
    assert [name for name, _ in rows] == ["upstream", "the three files alone", "separate kernels"]
    assert len(models) == 3


def test_times_as_fast_compares_with_what_was_timed():
    rows = {name: dict(ms_per_frame=ms) for name, ms in (("upstream", 120), ("separate kernels", 10))}
    assert dict(single.times_as_fast(rows)) == {"separate kernels, times as fast": {"than upstream": 12}}
    rows |= {"faster-qwen3-tts": dict(ms_per_frame=20), "the three files alone": dict(ms_per_frame=15)}
    assert dict(single.times_as_fast(rows)) == {
        "the three files alone, times as fast": {"than upstream": 8, "than faster-qwen3-tts": 20 / 15},
        "separate kernels, times as fast": {"than upstream": 12, "than faster-qwen3-tts": 2},
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_right", [True, False])
def test_the_check(is_right, ended, monkeypatch):
    """It passes for a correct model, and fails without the repetition penalty, as the speech is not upstream's then."""
    if not is_right:
        configure = Rows.configure
        monkeypatch.setattr(Rows, "configure", lambda rows, **all: configure(rows, **all | {"repetition_penalty": 1.0}))
    code, printed, _ = ended("tiny", "--check", "--quick")
    assert (code, printed.count("ok    ")) == ((0, 5) if is_right else ("2 wrong", 3))
    assert ("WRONG upstream's audio, seeded" in printed) != is_right


def test_a_codec_that_rounds_more_passes(tmp_path):
    """With some random codecs, chunks and the whole correctly differ by 3e-05. Once, only 1e-05 was allowed."""
    with published_blocks():
        write_checkpoint(tmp_path, "tiny", codec_gain=1.2)
    tts = load(str(tmp_path), "cpu")
    arguments = check.speech_arguments(60, **Checkpoint("tiny", str(tmp_path), None, tmp_path / "speaker.pt").voice())
    allowed = check.ROUNDING_MARGIN * check.codec_error(tts)
    _, is_good, figures = check.check_stream(tts, arguments, check.speak_seeded(tts, arguments), allowed)
    assert is_good and 4e-5 < allowed < 1e-3, figures  # a real fault is larger


@pytest.mark.parametrize(
    "words, answer",
    [
        (("7B",), "neither 0.6B, 1.7B nor a folder"),
        (("",), "neither 0.6B, 1.7B nor a folder"),
        (("1.7b", "--speaker", "ryan"), "use --model 0.6B-CustomVoice or 1.7B-CustomVoice"),
        (("--recognizer", ""), "--recognizer is empty"),
        (("--output", "nowhere/x.json"), "no folder nowhere"),
        (("./custom",), "give a Base model"),
    ],
    ids=str,
)
def test_mistakes(checkpoint, tmp_path, ended, words, answer):
    (tmp_path / "custom").symlink_to(checkpoint("custom_voice"))
    code, _, error = ended(*words)
    assert code == 2 and answer in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["x-vector", "in-context"])
def test_forced_logits_are_those_of_one_pass(voices, name):
    """The logits that `--check` compares, frame by frame over a static cache, are those of upstream's one forward."""
    voice = voices(name)
    talker = voice.upstream.model.talker
    tokens = torch.randint(2048, (30, 3), generator=torch.Generator().manual_seed(0))
    request = talker_arguments(voice.fast.generate_voice_clone, **voice.arguments | dict(text="Hello there."))
    logits = TeacherForced(talker, 384).logits(tokens, **request)
    torch.testing.assert_close(logits, one_pass(talker, tokens, **request), rtol=0, atol=1e-4)


def test_the_figure_is_drawn_from_the_results(tmp_path):
    """A figure that has not changed is not written again."""
    pytest.importorskip("matplotlib")
    results = json.loads((ROOT / "results/h200.json").read_text())
    (tmp_path / "some.json").write_text(json.dumps(results))
    (figure,) = plot.plot(tmp_path)
    drawn, written = figure.read_text(), figure.stat().st_mtime_ns
    fastest, ratios = (results["models"]["0.6B"][f"megakernel{what}"] for what in ("", ", times as fast"))
    assert f"{ratios['than upstream']:.0f} x ({fastest['ms_per_frame']:.2f} ms)" in drawn
    assert ">megakernel*<" in drawn and drawn.count(">does not stream<") == 4  # two ways, for each size
    assert plot.plot(tmp_path) == [tmp_path / "speed.svg"]
    assert figure.read_text() == drawn and figure.stat().st_mtime_ns == written


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.svg")), ids=lambda path: path.stem)
def test_a_phone_shows_the_figures_in_legible_type(path):
    """At least 10 pixels high on a screen that is 400 pixels wide."""
    drawing = path.read_text()
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', drawing)[1])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", drawing)]
    assert len(sizes) > 10 and min(sizes) * 400 / width >= 10


def test_the_servers_figure_has_the_engine_and_the_server():
    """It has the rates in their order, and leaves out conditions that were measured at one rate only."""
    rows = {f"{rate} requests per second for 10 s": dict(first_audio_ms=5, first_audio_p95_ms=50) for rate in (40, 5)}
    one = dict([*rows.items()][:1])
    _, groups = plot.server({"engine": rows, "over HTTP": rows, "over HTTP, busy": one}).values()
    assert {name: [(bar[0], bar[2]) for bar in bars] for name, bars in groups.items()} == {
        name: [("5 per second", 50), ("40 per second", 50)] for name in ("engine", "over HTTP")
    }


def test_the_peer_runs_with_a_python_of_its_own(tmp_path, capsys):
    """It needs another transformers. A peer that cannot run is left out with a message; the benchmark continues."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    row = ["faster-qwen3-tts", dict(ms_per_frame=20.0, version="0.5.4")]
    checkpoint = Checkpoint("tiny", "folder", None, tmp_path / "speaker.pt")
    answer = f'[ "$PYTHONPATH" = {tmp_path}/peers:{ROOT} ] && [ "$3 $4" = "folder {tmp_path}/speaker.pt" ] && echo hi'
    python.write_text(f"#!/bin/sh\n{answer} && echo '{json.dumps(row)}'\n")
    python.chmod(0o755)
    assert [*run_peer(checkpoint, python)] == [row]

    python.write_text("#!/bin/sh\necho 'error: no GPU' >&2\nexit 2\n")
    assert [*run_peer(checkpoint, python)] == [*run_peer(checkpoint, tmp_path / "bin" / "missing")] == []
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("faster-qwen3-tts left out: ") and first.endswith(" has failed: error: no GPU")
    assert "missing" in second
