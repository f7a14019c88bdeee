"""The benchmark and its check, on a tiny model on the CPU."""

import json
import sys

import pytest
import soundfile
import torch

import bench
from cudagraph_talker import TalkerGraph
from fast.prompts import build_request
from generate import load_upstream
from tools import ready
from tools.parity import Forced, one_pass
from tools.random_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def run(monkeypatch, folder, *words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    bench.main()


def test_without_a_gpu_it_times_the_tiny_model_and_says_so(tmp_path, monkeypatch, capsys):
    """A folder named tiny, as the README makes one, is not used: its model ends its speech by itself."""
    write_checkpoint(tmp_path / "tiny", "tiny")
    run(monkeypatch, tmp_path, "--quick")
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "bench_results_CPU.json").read_text())
    assert results["card"]["weights"] == "random" and results["card"]["commit"]
    rows = results["models"]["tiny"]
    for name in ("upstream", "separate kernels"):
        assert rows[name]["ms_per_frame"] > 0 and rows[name]["x_real_time"] > 0
    for chunks in ("1", "8", bench.GROWING):
        assert rows[f"separate kernels, chunks of {chunks}"]["first_audio_ms"] > 0
    arriving = rows["separate kernels, text at 50 tokens per second"]
    assert 0 < arriving["first_audio_ms"] and arriving["pieces_to_begin"] == 1  # every byte is a token here
    assert rows["separate kernels, batch of 2"]["audio_seconds_per_second"] > 0
    assert rows["separate kernels, times as fast"]["than upstream"] > 0
    assert soundfile.info(tmp_path / "sample_tiny.wav").samplerate == 24000
    assert "No GPU here" in printed and printed.strip().endswith("bench_results_CPU.json")


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
    with pytest.raises(ValueError, match="-c has failed: ZeroDivisionError: division by zero"):
        ready.first_output(["-c", "1 / 0"], 1)
    monkeypatch.setattr(ready, "LIMIT", 0.5)
    with pytest.raises(ValueError, match="it took too long"):
        ready.first_output(["-c", "import time; time.sleep(100)"], 1)


@pytest.mark.filterwarnings("ignore:the speech was cut off")
def test_rows_that_quick_leaves_out(tmp_path):
    """The three files alone run on upstream's layers and codec; lists are timed with and without max_batch."""
    write_checkpoint(tmp_path, "tiny", ends=False)
    speaker = torch.load(tmp_path / "speaker.pt", weights_only=True)
    effort = bench.Effort(short=2, long=4, runs=1, lists=(2, 3))
    tts = load_upstream(str(tmp_path))
    speak = bench.whole_call(tts.generate_voice_clone, voice_clone_prompt=bench.speaker_prompt(speaker))

    row = bench.time_three_files(tts, speak, effort)
    assert row["frames"] == 4 and row["ms_per_frame"] > 0 and row["x_real_time"] > 0
    assert isinstance(tts.model.talker.generate.__self__, bench.Decoder)
    assert tts.model.talker.generate.__self__.path == "upstream's layers"
    assert "decode" not in vars(tts.model.speech_tokenizer)
    assert not any("forward" in vars(module) for module in tts.model.talker.modules())

    bench.accelerate(tts)
    rows = dict(bench.time_lists(tts, speaker, effort))
    assert [*rows] == ["list of 2 texts", "list of 3 texts", "list of 3 texts, max_batch=3"]
    assert all(row["audio_seconds_per_second"] > 0 for row in rows.values())


def test_times_as_fast_compares_with_what_was_timed():
    rows = {name: dict(ms_per_frame=ms) for name, ms in (("upstream", 120), ("separate kernels", 10))}
    assert dict(bench.times_as_fast(rows)) == {"separate kernels, times as fast": {"than upstream": 12}}
    rows |= {"faster-qwen3-tts": dict(ms_per_frame=20), "the three files alone": dict(ms_per_frame=15)}
    assert dict(bench.times_as_fast(rows)) == {
        "the three files alone, times as fast": {"than upstream": 8, "than faster-qwen3-tts": 20 / 15},
        "separate kernels, times as fast": {"than upstream": 12, "than faster-qwen3-tts": 2},
    }


@pytest.mark.slow
def test_the_check_passes(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "tiny", "--check", "--quick")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "WRONG" not in printed and printed.count("ok    ") == 5


@pytest.mark.slow
def test_the_check_finds_what_is_wrong(tmp_path, monkeypatch, capsys):
    """Without its repetition penalty the speech is not upstream's."""
    configure = TalkerGraph.configure
    no_penalty = {"repetition_penalty": 1.0}
    monkeypatch.setattr(TalkerGraph, "configure", lambda graph, **settings: configure(graph, **settings | no_penalty))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "tiny", "--check", "--quick")
    printed = capsys.readouterr().out
    assert ended.value.code == "2 wrong" and "WRONG upstream's audio, seeded" in printed
    assert printed.count("ok    ") == 3


@pytest.mark.parametrize(
    "words, answer",
    [
        (("7B",), "neither 0.6B, 1.7B nor a folder"),
        (("--output", "nowhere/x.json"), "no folder nowhere"),
        (("./custom",), "give a Base model"),
    ],
    ids=str,
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, answer):
    write_checkpoint(tmp_path / "custom", "tiny", "custom_voice")
    with pytest.raises(SystemExit) as ended, bench.cli_errors():
        run(monkeypatch, tmp_path, *words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and answer in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["x-vector", "in-context"])
def test_forced_logits_are_those_of_one_pass(voices, name):
    """The measure of `--check`, frame by frame over a static cache, against upstream's forward of all at once."""
    voice = voices(name)
    talker = voice.upstream.model.talker
    tokens = torch.randint(2048, (30, 16), generator=torch.Generator().manual_seed(0))
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
    assert "upstream, 0.6B" in figure.read_text()
    assert capsys.readouterr().out.strip() == str(figure)


def test_the_peer_runs_with_a_python_of_its_own(tmp_path, capsys):
    """Its transformers is another one. A peer that cannot run is left out with a line, without ending the benchmark."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    rows = {"faster-qwen3-tts": dict(ms_per_frame=20.0, version="0.5.4")}
    answer = json.dumps(dict(models={"folder": rows}))
    python.write_text(f'#!/bin/sh\n[ "$PYTHONPATH" = {tmp_path}/peers ] && [ -s "$5" ] && echo \'{answer}\' > "$7"\n')
    python.chmod(0o755)
    assert dict(bench.run_peer("folder", torch.zeros(4), python)) == rows

    python.write_text("#!/bin/sh\necho 'error: no GPU' >&2\nexit 2\n")
    assert dict(bench.run_peer("folder", torch.zeros(4), python)) == {}
    assert dict(bench.run_peer("folder", torch.zeros(4), tmp_path / "bin" / "missing")) == {}
    first, second = capsys.readouterr().out.splitlines()
    assert first == "faster-qwen3-tts left out: error: no GPU" and "missing" in second
