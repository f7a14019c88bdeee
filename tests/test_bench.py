"""The benchmark and its check, on a tiny model on the CPU."""

import argparse
import json
import math
import re
import sys
from dataclasses import replace

import pytest
import soundfile
import torch
import transformers

from cudagraph_talker import Rows
from qwen3_tts_cuda_graphs.bench import __main__ as bench
from qwen3_tts_cuda_graphs.bench import check, listeners, plot, quality, random_checkpoint, ready, single, timing
from qwen3_tts_cuda_graphs.bench import load_test as load_tool
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.parity import Forced, one_pass
from qwen3_tts_cuda_graphs.bench.peer import run_peer
from qwen3_tts_cuda_graphs.bench.random_checkpoint import write_checkpoint
from qwen3_tts_cuda_graphs.bench.timing import SMALL
from qwen3_tts_cuda_graphs.common.loading import load, load_upstream
from qwen3_tts_cuda_graphs.prompts.build import build_request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def run(monkeypatch, folder, *words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    bench.main()


@pytest.fixture
def short(monkeypatch):
    """Speeches as short as can be timed."""
    effort = replace(
        SMALL, frames=(2, 5), upstream_frames=(2, 4), first_audio_runs=1, late_chunk_frames=4, streams=(1, 4)
    )
    monkeypatch.setattr(timing, "SMALL", effort)


def test_without_a_gpu_it_times_the_tiny_model_and_says_so(short, tmp_path, monkeypatch, capsys):
    """A folder named tiny, as the README makes one, is not used: its model ends its speech by itself."""
    write_checkpoint(tmp_path / "tiny", "tiny")
    run(monkeypatch, tmp_path, "--quick")
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "bench_results_CPU.json").read_text())
    assert results["card"]["weights"] == "random" and results["card"]["commit"]
    rows = results["models"]["tiny"]
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
    assert max(map(len, printed.splitlines())) <= 100


def test_the_time_of_a_frame_is_the_difference_of_two_calls(monkeypatch):
    """Calls of 100 ms and 20 ms per frame. Of real ones so short, a busy machine makes any number."""
    monkeypatch.setattr(timing, "clock", lambda speak: (100 + 20 * 12.5 * speak(), speak()))
    row = timing.time_whole_calls(lambda frames: frames / 12.5, (2, 5), runs=3)
    assert (row["frames"], row["ms_per_frame"], row["x_real_time"]) == (5, pytest.approx(20), pytest.approx(2))


def test_many_listeners_and_lists(short, tmp_path, monkeypatch, capsys):
    """Lists go through upstream's method and through the engine."""
    run(monkeypatch, tmp_path, "--streams")
    rows = json.loads((tmp_path / "bench_results_CPU_streams.json").read_text())["models"]["tiny"]
    for count, name in ((1, "1 stream alone"), (4, "4 streams at once")):
        assert rows[name]["listeners"] == count
        assert 0 < rows[name]["first_audio_ms"] <= rows[name]["first_audio_p95_ms"]
        assert rows[name]["audio_seconds_per_second"] > 0
    assert rows["lists"].keys() == {"2"} and rows["lists"]["2"].keys() == {"upstream_method", "engine"}
    assert all(speed > 0 for speed in rows["lists"]["2"].values())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def write_recognizer(folder) -> None:
    """A speech recognizer of random weights: it hears letters in anything."""
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
def test_each_path_is_heard(tmp_path, monkeypatch, capsys):
    """Random weights prove only that it runs: the same audio must be judged the same, on every path."""
    write_recognizer(tmp_path / "recognizer")
    monkeypatch.setattr(quality, "RESAMPLES", 40)
    run(monkeypatch, tmp_path, "--listen", "--recognizer", str(tmp_path / "recognizer"))
    rows = json.loads((tmp_path / "bench_results_CPU_listen.json").read_text())["models"]["tiny"]
    assert [*rows] == ["upstream", "separate kernels", "separate kernels, streamed", "16 at once"]
    upstream, ours, streamed, together = rows.values()
    assert [one["text"][:3] for one in upstream["sentences"]] == ["The", "Der", "去海边"]
    assert upstream["word_errors_percent"] > 0 and upstream["seconds"] > 0
    for row in (ours, streamed):  # on a CPU the tokens are upstream's
        assert row["seconds"] == upstream["seconds"]
        assert abs(row["similarity"] - upstream["similarity"]) < 1e-3
    assert together["sentences"][0]["seconds"] == upstream["sentences"][0]["seconds"]  # of the same seed
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


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
    judged = [quality.Judged("", "", 10, errors, 0.5, 1.0, False) for errors in (0, 1, 2, 5)]
    row = quality.summary(judged, judged)
    assert row["word_errors_percent"] == 20 and (row["change_low"], row["change_high"]) == (0, 0)
    assert 0 <= row["word_errors_low"] < 20 < row["word_errors_high"] <= 50


def test_what_a_listener_counts(monkeypatch):
    """Audio of 1 s each at 0, 0.5, 2.5 and 2.6 s: the third chunk comes 0.5 s too late, and the fourth is on time."""
    now = 10.0
    monkeypatch.setattr(listeners.time, "perf_counter", lambda: now)

    def speak(times):
        nonlocal now
        for moment in times:
            now = 10.0 + moment
            yield bytes(100), 100

    heard = listeners.listen(lambda: speak([0.25, 0.5, 2.5, 2.6]))
    assert (heard.first_audio_ms, heard.seconds, heard.underruns) == (250, 4, 1)
    now = 10.0
    assert listeners.listen(lambda: speak([0.25, 0.5, 2.5]), leave_after=0).seconds == 1


def test_how_listeners_are_summed_up():
    heard = [listeners.Hearing(0.0, first_audio_ms=float(ms), seconds=2.0, underruns=ms % 2) for ms in range(1, 101)]
    row = listeners.summary(heard, wall=10.0)
    assert row["listeners"] == 100 and row["audio_seconds_per_second"] == 20 and row["underruns"] == 50
    assert (row["first_audio_ms"], row["first_audio_p95_ms"], row["first_audio_p99_ms"]) == (50.5, 95, 99)


def test_arrivals_are_independent_and_as_many_as_asked_for():
    """A mean of 20 per second over 1000 s: beyond 5 standard deviations once in a million seeds. The seed is fixed."""
    arrivals = [*listeners.poisson_arrivals(20, 1000, seed=0)]
    assert abs(len(arrivals) - 20000) < 5 * 20000**0.5 and arrivals == sorted(arrivals) and arrivals[-1] < 1000
    gaps = [later - earlier for earlier, later in zip(arrivals, arrivals[1:])]
    assert abs(sum(gap > 0.05 for gap in gaps) / len(gaps) - math.exp(-1)) < 0.02


def test_the_load_script_counts_what_fails(monkeypatch):
    """What a listener heard before the error counts, too."""
    streams = iter(range(5))

    def speak():
        yield bytes(4800), load_tool.BYTES_PER_SECOND
        if next(streams) % 2:
            raise OSError("the connection was closed")

    row = load_tool.drive(speak, argparse.Namespace(one_by_one=4, at_once=None))
    assert row["errors"] == {"the connection was closed": 2} and row["listeners"] == 4


@pytest.mark.slow
def test_how_long_until_a_process_speaks(tmp_path, monkeypatch):
    """It starts processes of its own, which no other test imports from."""
    run(monkeypatch, tmp_path, "--ready")
    row = json.loads((tmp_path / "bench_results_CPU_ready.json").read_text())["models"]["tiny"]["ready"]
    assert row["runs"] == 1
    assert all(value > 0 for value in row.values())
    assert row["shell_to_first_audio_s"] > row["first_request_ms"] / 1e3


def test_a_process_that_does_not_speak(monkeypatch):
    """The benchmark must neither wait for it nor hide why."""
    with pytest.raises(ValueError, match="-c 1 / 0 has failed: ZeroDivisionError: division by zero"):
        ready.first_output(["-c", "1 / 0"], 1)
    monkeypatch.setattr(ready, "LIMIT", 0.5)
    with pytest.raises(ValueError, match="it took too long"):
        ready.first_output(["-c", "import time; time.sleep(100)"], 1)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_rows_that_quick_leaves_out(short, tmp_path, monkeypatch, capsys):
    """The three files alone run on upstream's layers and codec. A voice that cannot be loaded is left out."""
    write_checkpoint(tmp_path, "tiny", ends=False)
    checkpoint = Checkpoint("tiny", str(tmp_path), str(tmp_path / "missing"), tmp_path / "speaker.pt")
    voice = dict(voice_clone_prompt=single.speaker_prompt(checkpoint.speaker))
    loaded = []
    monkeypatch.setattr(single, "load_alone", lambda model: loaded.append(load_upstream(model)) or loaded[-1])

    row = single.time_three_files(single.import_three_files(), checkpoint, voice, timing.SMALL)
    (tts,) = loaded
    assert row["frames"] == 5 and math.isfinite(row["ms_per_frame"]) and row["x_real_time"] > 0
    assert type(tts.model.talker.generate.__self__).__module__ == "generate"
    assert not hasattr(tts, "speech")
    assert "decode" not in vars(tts.model.speech_tokenizer)
    assert not any("forward" in vars(module) for module in tts.model.talker.modules())

    rows = dict(single.time_voices(single.accelerate(tts), voice, checkpoint.custom_voice, timing.SMALL))
    assert [*rows] == ["voice: x-vector", "voice: in-context"]
    assert "voice: preset voice left out: " in capsys.readouterr().out


def test_times_as_fast_compares_with_what_was_timed():
    rows = {name: dict(ms_per_frame=ms) for name, ms in (("upstream", 120), ("separate kernels", 10))}
    assert dict(single.times_as_fast(rows)) == {"separate kernels, times as fast": {"than upstream": 12}}
    rows |= {"faster-qwen3-tts": dict(ms_per_frame=20), "the three files alone": dict(ms_per_frame=15)}
    assert dict(single.times_as_fast(rows)) == {
        "the three files alone, times as fast": {"than upstream": 8, "than faster-qwen3-tts": 20 / 15},
        "separate kernels, times as fast": {"than upstream": 12, "than faster-qwen3-tts": 2},
    }


@pytest.mark.slow
def test_the_check_passes(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "tiny", "--check", "--quick")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "WRONG" not in printed and printed.count("ok    ") == 5


def test_a_codec_that_rounds_more_passes(tmp_path, monkeypatch):
    """Other random codecs differ by 3e-05 between chunks and the whole, where 1e-05 was allowed: that is no fault."""
    original = random_checkpoint.randomize
    monkeypatch.setattr(random_checkpoint, "randomize", lambda model, gain: original(model, 1.2 if gain < 1 else gain))
    write_checkpoint(tmp_path, "tiny")
    tts = load(str(tmp_path), "cpu")
    arguments = check.clone_arguments(torch.load(tmp_path / "speaker.pt", weights_only=True), 60)
    allowed = check.ROUNDING_MARGIN * check.codec_error(tts)
    _, is_good, figures = check.check_stream(tts, arguments, check.speak(tts, arguments), allowed)
    assert is_good and 4e-5 < allowed < 1e-3, figures  # a real fault is larger


@pytest.mark.slow
def test_the_check_finds_what_is_wrong(tmp_path, monkeypatch, capsys):
    """Without its repetition penalty the speech is not upstream's."""
    configure = Rows.configure
    no_penalty = {"repetition_penalty": 1.0}
    monkeypatch.setattr(Rows, "configure", lambda rows, **settings: configure(rows, **settings | no_penalty))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "tiny", "--check", "--quick")
    printed = capsys.readouterr().out
    assert ended.value.code == "2 wrong" and "WRONG upstream's audio, seeded" in printed
    assert printed.count("ok    ") == 3


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
def test_mistakes(tmp_path, monkeypatch, capsys, words, answer):
    write_checkpoint(tmp_path / "custom", "tiny", "custom_voice")
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, *words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and answer in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["x-vector", "in-context"])
def test_forced_logits_are_those_of_one_pass(voices, name):
    """The measure of `--check`, frame by frame over a static cache, against upstream's forward of all at once."""
    voice = voices(name)
    talker = voice.upstream.model.talker
    tokens = torch.randint(2048, (30, 5), generator=torch.Generator().manual_seed(0))
    request = build_request(voice.fast.generate_voice_clone, **voice.arguments | dict(text="Hello there."))
    logits = Forced(talker, 384).logits(tokens, **request)
    torch.testing.assert_close(logits, one_pass(talker, tokens, **request), rtol=0, atol=1e-4)


def test_the_figure_is_drawn_from_the_results(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    results = json.loads((bench.ROOT / "results/h200.json").read_text())
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/some.json").write_text(json.dumps(results))
    run(monkeypatch, tmp_path, "--plot")
    figure = tmp_path / "results/speed.svg"
    drawn = figure.read_text()
    fastest, ratios = (results["models"]["0.6B"][f"megakernel{what}"] for what in ("", ", times as fast"))
    assert f"{ratios['than upstream']:.0f} x ({fastest['ms_per_frame']:.2f} ms)" in drawn
    assert ">megakernel*<" in drawn and drawn.count(">does not stream<") == 4  # two ways, for each size
    assert capsys.readouterr().out.strip() == str(figure)
    written = figure.stat().st_mtime_ns  # what has not changed is not written again
    run(monkeypatch, tmp_path, "--plot")
    assert figure.read_text() == drawn and figure.stat().st_mtime_ns == written


@pytest.mark.parametrize("path", sorted((bench.ROOT / "results").glob("*.svg")), ids=lambda path: path.stem)
def test_a_phone_shows_the_figures_in_legible_type(path):
    """At least 10 pixels high on a screen that is 400 pixels wide."""
    drawing = path.read_text()
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', drawing)[1])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", drawing)]
    assert len(sizes) > 10 and min(sizes) * 400 / width >= 10


def test_the_servers_figure_shows_all_of_both_lines():
    """Both axes have one scale, which the higher percentile needs."""
    pytest.importorskip("matplotlib")
    rows = {f"{rate} requests per second for 10 s": dict(first_audio_ms=5, first_audio_p95_ms=50) for rate in (5, 40)}
    for axis in plot.draw_server({"engine": rows, "over HTTP": rows}).axes:
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 50 and len(axis.lines) == 2


@pytest.mark.parametrize("option, remedy", [("--plot", "pip install matplotlib"), ("--tables", "run it in a checkout")])
def test_what_drawing_and_writing_need(tmp_path, monkeypatch, capsys, option, remedy):
    """setup.sh does not install matplotlib, and a wheel has no docs: one line, before anything is read or written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "ROOT", tmp_path / "missing")
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, option)
    assert remedy in capsys.readouterr().err


def test_the_peer_runs_with_a_python_of_its_own(tmp_path, capsys):
    """Its transformers is another one. A peer that cannot run is left out with a line, without ending the benchmark."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    rows = {"faster-qwen3-tts": dict(ms_per_frame=20.0, version="0.5.4")}
    checkpoint = Checkpoint("tiny", "folder", None, tmp_path / "speaker.pt")
    answer = (
        f'[ "$PYTHONPATH" = {tmp_path}/peers:{bench.ROOT} ] && [ "$3 $4" = "folder {tmp_path}/speaker.pt" ] && echo hi'
    )
    python.write_text(f"#!/bin/sh\n{answer} && echo '{json.dumps(rows)}'\n")
    python.chmod(0o755)
    assert dict(run_peer(checkpoint, python)) == rows

    python.write_text("#!/bin/sh\necho 'error: no GPU' >&2\nexit 2\n")
    assert dict(run_peer(checkpoint, python)) == {}
    assert dict(run_peer(checkpoint, tmp_path / "bin" / "missing")) == {}
    first, second = capsys.readouterr().out.splitlines()
    assert first == "faster-qwen3-tts left out: error: no GPU" and "missing" in second
