"""Use in notebooks and services: no global state is changed, a fork gets a clear error, a model can be freed."""

import asyncio
import gc
import warnings
import weakref

import pytest
import torch
from helpers import ROOT, run_program

from qwen3_tts_cuda_graphs.common.loading import load
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.prompts.text_table import use_text_table
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.streaming import stream
from qwen3_tts_cuda_graphs.speech.warm_up import warm_up


@pytest.mark.slow
def test_global_state_is_left_alone(checkpoint):
    """A service's logging, warnings, random numbers or default dtype must not change because it imports this package.

    Changes that the imported packages make themselves are allowed. stdout is an object without a file, as in a
    notebook, and everything happens while an event loop runs.
    """
    program = """
        import asyncio, io, locale, logging, os, random, signal, sys, warnings

        import accelerate, huggingface_hub, librosa, numpy, safetensors, soundfile, torch, transformers
        import transformers.generation, transformers.masking_utils, transformers.models.mimi.modeling_mimi

        def state():
            names = "", "transformers", "torch", "asyncio", "my.service"
            loggers = [logging.getLogger(name) for name in names]
            return dict(
                logging=[(log.level, list(log.handlers), log.propagate, log.disabled) for log in loggers],
                disabled=logging.root.manager.disable,
                warnings=(list(warnings.filters), warnings.showwarning),
                dtype=(torch.get_default_dtype(), torch.get_default_device()),
                modes=(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
                deterministic=(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
                precision=(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
                random=(random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()),
                process=(dict(os.environ), os.getcwd(), list(sys.path), locale.getlocale()),
                hooks=(sys.excepthook, signal.getsignal(signal.SIGINT), sys.stdout, sys.stderr),
                attention=transformers.integrations.sdpa_attention.use_gqa_in_sdpa,
            )

        async def main():
            sys.stdout = io.StringIO()
            before = state()
            import qwen3_tts_cuda_graphs.speech.engine
            from qwen3_tts_cuda_graphs import load, stream
            after_import = state()
            tts = load({folder}, "cpu", max_seq_len=64)
            after_load = state()
            for later in (after_import, after_load):
                changed = [name for name in before if before[name] != later[name]]
                assert not changed, [(before[name], later[name]) for name in changed]
            request = dict(text="Hi", speaker="aiden", language="Auto", max_new_tokens=3)
            assert list(stream(tts.generate_custom_voice, **request))
            await asyncio.to_thread(tts.generate_custom_voice, **request)
            later = state()
            changed = [name for name in before if name != "random" and before[name] != later[name]]
            assert not changed, changed
            assert sys.stdout.getvalue() == ""

        asyncio.run(main())
    """
    result = run_program(program.replace("{folder}", repr(str(checkpoint("custom_voice")))), ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_fork(checkpoint):
    """A web server that forks its workers: a fork before anything is loaded works, a later one must not hang or
    crash."""
    program = """
        import os, sys
        import torch
        from qwen3_tts_cuda_graphs.common.loading import load
        from qwen3_tts_cuda_graphs.speech.streaming import stream
        from qwen3_tts_cuda_graphs.speech.engine import Engine

        torch.set_num_threads(1)
        request = dict(text="Hi", speaker="aiden", language="Auto", max_new_tokens=3)

        def in_a_fork(check):
            child = os.fork()
            if child == 0:
                try:
                    check()
                except BaseException as error:
                    print(repr(error), flush=True)
                    os._exit(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        def speaks():
            load({folder}, "cpu", max_seq_len=64).generate_custom_voice(**request)

        def fails(call):
            try:
                call()
            except RuntimeError as error:
                print(error, flush=True)
            else:
                raise SystemExit("no error")

        in_a_fork(speaks)
        tts = load({folder}, "cpu", max_seq_len=64)
        engine = Engine(tts)
        in_a_fork(lambda: fails(lambda: tts.generate_custom_voice(**request)))
        in_a_fork(lambda: fails(lambda: list(stream(tts.generate_custom_voice, **request))))
        in_a_fork(lambda: fails(lambda: list(engine.stream(tts.generate_custom_voice, **request))))
        engine.close()
        tts.generate_custom_voice(**request)
    """
    result = run_program(program.replace("{folder}", repr(str(checkpoint("custom_voice")))), ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3 and all("load the model after the fork" in line for line in lines)


@pytest.mark.parametrize("kind", ["base", "custom_voice", "voice_design"])
def test_the_first_request_is_made_at_load(checkpoint, kind, monkeypatch, caplog):
    """It must not change the results of a user's seed, nor stay among the prompts. On a CPU it is not made."""
    tts = load(str(checkpoint(kind)), "cpu", max_seq_len=64)
    speech = tts.speech
    tts.prompts.host_talker = use_text_table(
        tts.model.talker
    )  # as on a GPU: later prompts use the templates of earlier ones
    torch.manual_seed(0)
    before = torch.get_rng_state()
    launched = []
    launch = speech.runner.launch
    monkeypatch.setattr(speech.runner, "launch", lambda *arguments: launched.append(1) or launch(*arguments))
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warm_up(tts)
    assert len(launched) == 2 and "slower" not in caplog.text  # two requests of one frame each
    assert torch.equal(torch.get_rng_state(), before)
    assert not tts.prompts.templates.templates and len(speech.runner.free) == 1


def test_a_model_that_cannot_be_warmed_up_is_loaded(checkpoint, caplog):
    """Its config may forbid that one request and allow others."""
    tts = load(str(checkpoint("custom_voice")), "cpu", max_seq_len=64)
    tts.generate_defaults["temperature"] = 0.0
    with caplog.at_level("INFO"):
        warm_up(tts)
    assert "the first request will be slower than the others: temperature 0.0" in caplog.text


def owners(tts) -> list[weakref.ref]:
    """References to all objects that hold memory of an accelerated model: weights, caches, buffers, the codec."""
    speech = tts.speech
    runner = speech.runner
    objects = [tts, tts.model, tts.model.talker, speech, runner, runner.rows, runner.codec]
    objects += [runner.rows.keys[0], runner.codec.samples, tts.model.talker.codec_head.weight, *runner.keepalive]
    return [weakref.ref(thing) for thing in objects]


def test_a_model_can_be_freed(checkpoint):
    """If a cache, a thread or a callback keeps a model alive, the next one does not fit into the memory."""
    request = dict(text="Hello.", speaker="aiden", language="Auto", max_new_tokens=6)

    def speak():
        tts = load(str(checkpoint("custom_voice")), "cpu", max_seq_len=64)
        method = tts.generate_custom_voice
        method(**request)
        list(stream(method, **request))
        next(stream(method, **request, chunk_frames=1))  # and not closed
        asyncio.run(asyncio.to_thread(lambda: list(stream(method, **request))))
        with Engine(tts) as engine:
            list(engine.stream(method, **request))
        return owners(tts)

    kept = speak()
    gc.collect()
    assert [reference() for reference in kept if reference() is not None] == []
    speak()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_a_gpu_comes_back(checkpoint):
    """Graphs, their pools and weights: the memory that remains after the first model must not grow with the next
    ones."""
    folder = str(checkpoint("base", "0.6B"))
    gc.collect()  # memory of other tests
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    left = []
    for _ in range(3):
        tts = load(folder, max_seq_len=512, rows=4)
        speaker = torch.randn(tts.model.config.talker_config.hidden_size)
        request = dict(text="Hello.", voice_clone_prompt=speaker_prompt(speaker), max_new_tokens=20)
        tts.generate_voice_clone(**request)
        list(stream(tts.generate_voice_clone, **request))
        with Engine(tts) as engine:
            list(engine.stream(tts.generate_voice_clone, **request))
        used = torch.cuda.memory_allocated()
        del tts, engine
        gc.collect()
        torch.cuda.empty_cache()
        left.append((torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]))
        print(f"used {used / 2**20:.0f} MiB, left {left[-1][0] / 2**20:.1f}, reserved {left[-1][1] / 2**20:.1f}")
    assert used > 2**30
    for allocated, reserved in left:
        assert allocated < 64 * 2**20 and reserved < 256 * 2**20, left  # cuBLAS keeps its workspaces
    assert left[2] == left[1], left
