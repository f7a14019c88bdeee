"""The benchmark and its check, on a tiny model on the CPU."""
import json
import sys

import pytest
import soundfile
import torch

import bench
from cudagraph_talker import TalkerGraph
from generate import handed_over
from parity import Forced, one_pass
from random_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def run(monkeypatch, folder, *words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    bench.main()


def test_without_a_gpu_it_times_the_tiny_model_and_says_so(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "tiny", "tiny")                   # the README's, which ends by itself: not this one
    run(monkeypatch, tmp_path, "--quick")
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "bench_results_CPU.json").read_text())
    assert results["card"]["weights"] == "random" and results["card"]["commit"]
    rows = results["models"]["tiny"]
    for name in ("upstream", "reference path"):
        assert rows[name]["ms_a_frame"] > 0 and rows[name]["rtf"] > 0
    for chunks in ("1", "8", bench.RAMP):
        assert rows[f"reference path, chunks of {chunks}"]["first_audio_ms"] > 0
    assert rows["reference path, batch of 2"]["audio_seconds_a_second"] > 0
    assert soundfile.info(tmp_path / "sample_tiny.wav").samplerate == 24000
    assert "No GPU here" in printed and printed.strip().endswith("bench_results_CPU.json")


def test_the_check_passes_and_fails_when_it_should(tmp_path, monkeypatch, capsys):
    """A penalty left out is not upstream's speech."""
    write_checkpoint(tmp_path / "tiny", "tiny", ends=False)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "tiny", "--check", "--quick")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "WRONG" not in printed and printed.count("ok    ") == 5

    configure = TalkerGraph.configure
    monkeypatch.setattr(TalkerGraph, "configure", lambda graph, penalty, *rest: configure(graph, 1.0, *rest))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "tiny", "--check", "--quick")
    assert ended.value.code == "2 wrong" and "WRONG upstream's sound, seeded" in capsys.readouterr().out


@pytest.mark.parametrize("words, answer", [
    (("7B",), "neither 0.6B, 1.7B nor a folder"), (("--output", "nowhere/x.json"), "no folder nowhere"),
    (("./custom",), "give a Base model")], ids=str)
def test_mistakes(tmp_path, monkeypatch, capsys, words, answer):
    write_checkpoint(tmp_path / "custom", "tiny", "custom_voice")
    with pytest.raises(SystemExit) as ended, bench.answered_mistakes():
        run(monkeypatch, tmp_path, *words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and answer in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["x-vector", "in-context"])
def test_forced_logits_are_those_of_one_pass(voices, name):
    """The measure of `--check`, frame by frame over a static cache, against upstream's forward of all at once."""
    voice, tokens = voices(name), torch.randint(2048, (30, 16), generator=torch.Generator().manual_seed(0))
    _, request = handed_over(voice.fast.generate_voice_clone, voice.arguments | dict(text="Hello there."))
    _, logits = Forced(voice.upstream.model.talker, 384).logits(tokens, **request)
    torch.testing.assert_close(logits, one_pass(voice.upstream.model.talker, tokens, **request), rtol=0, atol=1e-4)


def test_the_figure_is_drawn_from_the_results(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    results = json.loads((bench.ROOT / "results/h200.json").read_text())
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/some.json").write_text(json.dumps(results))
    run(monkeypatch, tmp_path, "--plot")
    assert "upstream, 0.6B" in (tmp_path / "results/speed.svg").read_text()
