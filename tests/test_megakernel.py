"""The megakernel is the same model: with the tokens forced, its logits and its cache are as near to a float32
run of the same weights as those of the model's own bfloat16 forward. Most tests need a GPU."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_on_cpu import pretended_gpu
from helpers import on_gpu
from megakernel_cases import (
    compile_with,
    faulty_source,
    gpu_kernel_for,
    gpu_of,
    reference_choice,
    stack_without_weights,
    talker_scores,
)
from torch import Tensor

from cudagraph_talker import Sampling
from qwen3_tts_cuda_graphs.bench.parity import MARGIN, Megakernel, TeacherForced, error, random_request, verdict
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.fast import kernel_cache, nvrtc, paths
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Stack, kernel_sizes, stacks_of
from qwen3_tts_cuda_graphs.fast.rows import fill_with_random_states
from qwen3_tts_cuda_graphs.fast.self_test import PROMPTS
from qwen3_tts_cuda_graphs.speech import accelerate

LENGTH = 512
FRAMES = 200
END_TOKEN = 2150


@on_gpu
def test_nvrtc_says_which_size_is_unsupported():
    """Four blocks have more rows of the residual stream than threads: they would never be published."""
    device = torch.device("cuda", 0)
    sizes = replace(kernel_sizes(stack_without_weights("1.7B"), torch.cuda.get_device_properties(device)), grid=4)
    with pytest.raises(RuntimeError, match="GRID must be from 8 to 128"):
        SOURCE.load(sizes, device)


# ---- Logits, cache and choices, on a GPU


@pytest.fixture(scope="module", params=[("0.6B", 1.0), ("0.6B", 3.0), ("1.7B", 1.0), ("1.7B", 3.0)], ids=str)
def routes(request, checkpoint) -> Iterator[list[Any]]:
    """The megakernel, the model's own forward in bfloat16, and in float32; with flat and with peaked
    logits."""
    folder = str(checkpoint("base", *request.param))
    with torch.no_grad():
        yield [
            Megakernel(load_upstream(folder, dtype=torch.bfloat16).model.talker, LENGTH),
            TeacherForced(load_upstream(folder, dtype=torch.bfloat16).model.talker, LENGTH),
            TeacherForced(load_upstream(folder, dtype=torch.float32).model.talker, LENGTH),
        ]


@pytest.fixture(scope="module")
def fused(checkpoint) -> Megakernel:
    with torch.no_grad():
        return Megakernel(load_upstream(str(checkpoint("base", "0.6B"))).model.talker, LENGTH)


def begin(fused: Megakernel) -> None:
    """A random prompt, the same in every run."""
    torch.manual_seed(0)
    fused.rows.advance.fill_(True)
    fused.prefill(0, **random_request(fused.rows.text.shape[-1], "cuda"))


def cached(keys: list[Tensor], values: list[Tensor], positions: slice) -> Tensor:
    """Keys and values of all layers at these positions, in one row."""
    return torch.cat([tensor[:, :, positions].float().flatten() for tensor in (*keys, *values)])


def talker_cache(route: TeacherForced, positions: slice) -> Tensor:
    return cached(route.rows.keys, route.rows.values, positions)


def assert_no_worse(what: str, fused: Tensor, own: Tensor, exact: Tensor) -> None:
    for quantile in (0.5, 0.99):
        ratio = error(fused, exact, quantile) / error(own, exact, quantile)
        print(f"{what}: error {ratio:.4f} times the model's own at {quantile}")
        assert 0 < ratio <= MARGIN, (what, quantile)


@on_gpu
@torch.no_grad()
def test_logits_and_cache_with_forced_tokens(routes):
    """200 frames: logits of all 16 codes, the talker's cache and the predictor's caches."""
    torch.manual_seed(0)
    request = random_request(routes[0].rows.text.shape[-1], "cuda")
    tokens = torch.randint(2048, (FRAMES, 16), device="cuda")
    code_caches = [[] for _ in routes]

    def logits_of(route: TeacherForced, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
        step = route.graphs.step

        def step_and_keep() -> None:
            step()
            kept.append(cached(route.rows.code_keys, route.rows.code_values, slice(16)))

        with mock.patch.object(route.graphs, "step", step_and_keep):
            return route.logits(tokens, **request)

    logits = [*map(logits_of, routes, code_caches)]
    assert torch.equal(routes[0].rows.codes[0, :FRAMES], tokens)
    for name, of_routes in zip(("codes 1 to 15", "first codes"), zip(*logits)):
        good, figures = verdict(*of_routes)
        print(name, figures)
        assert good, (name, figures)
    end = request["inputs_embeds"].shape[1] + FRAMES
    assert_no_worse("talker's cache", *(talker_cache(route, slice(end)) for route in routes))
    assert_no_worse("predictor's caches", *map(torch.cat, code_caches))


@on_gpu
@torch.no_grad()
def test_positions(routes):
    """A random cache, a random embedding, one step; the cache changes at the step's position only."""
    torch.manual_seed(0)
    fused = routes[0]
    hidden = []
    new = []
    for position in [0, 1, 15, 16, 17, 255, 256, 257, LENGTH - 2, LENGTH - 1] * 4:
        for first, *others in zip(*(route.rows.cache() for route in routes)):
            first.normal_()
            for tensor in others:
                tensor.copy_(first)
        before = talker_cache(fused, slice(None))
        embedding = torch.randn_like(fused.rows.embedding)
        for route in routes:
            rows = route.rows
            rows.advance.fill_(True)
            rows.prompt_length.fill_(position)
            rows.frame.zero_()
            rows.embedding.copy_(embedding)
            route.graphs.step()
        hidden.append(torch.stack([route.rows.hidden.float().flatten() for route in routes]))
        new.append(torch.stack([talker_cache(route, slice(position, position + 1)) for route in routes]))
        changed = (talker_cache(fused, slice(None)) != before).view(-1, LENGTH, 128).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [position]
    assert_no_worse("hidden states", *torch.cat(hidden, dim=1))
    assert_no_worse("new rows of the cache", *torch.cat(new, dim=1))


@on_gpu
@torch.no_grad()
def test_the_same_choice_with_the_same_noise(fused):
    """The predictor's 15 choices per step, over a grid of settings: more than 10,000 in all."""
    ties = 0
    choices = 0
    begin(fused)
    rows = fused.rows
    for top_k in (1, 20, 50, 2048):
        for top_p in (0.8, 1.0):
            for temperature in (0.5, 0.9, 1.5):
                rows.code_sampling.set(True, temperature, top_k, top_p)
                for _ in range(30):
                    rows.frame.zero_()
                    rows.hidden.normal_()
                    rows.token.random_(2048)
                    rows.code_noise.exponential_()
                    fused.graphs.predict()
                    (scores,) = fused.launches[0].logits()
                    expected = reference_choice(scores, rows.code_sampling, rows.code_noise[0])
                    assert torch.equal(rows.codes[0, 0, 1:], expected), (top_k, top_p, temperature)
                    ranked = scores.sort(-1, descending=True).values
                    ties += int((ranked[:, top_k - 1] == ranked[:, min(top_k, 2047)]).sum())
                    choices += len(scores)
    assert choices >= 10_000 and ties > 100


@on_gpu
@torch.no_grad()
def test_the_talkers_choice_and_rules(fused):
    """Repetition penalty, suppressed tokens and the earliest end, greedy and sampled."""
    begin(fused)
    rows = fused.rows
    for trial in range(200):
        penalty = (1.0, 1.05, 1.5)[trial % 3]
        top_k = (1, 50, 3072)[trial % 5 % 3]
        top_p = (0.8, 1.0)[trial % 2]
        early = trial % 7 < 3
        rows.repetition_penalty.fill_(penalty)
        rows.suppressed.zero_()[0, torch.randint(3072, (1000,), device="cuda")] = True
        rows.end_token.fill_(END_TOKEN)
        rows.min_tokens.fill_(100 if early else 2)
        rows.sampling.set(trial % 4 > 0, 0.9, top_k, top_p)
        rows.embedding.normal_()
        rows.frame.fill_(3)
        rows.seen.bernoulli_(0.3)
        rows.noise.exponential_()
        seen = rows.seen.clone()
        fused.graphs.step()
        forbidden = END_TOKEN if early else None
        scores = talker_scores(fused.launches[1].logits()[0], seen, rows.suppressed, penalty, forbidden)
        assert torch.equal(rows.token[0], reference_choice(scores, rows.sampling, rows.noise[0]))
        seen[0, rows.token[0]] = True
        assert torch.equal(rows.seen, seen)
        assert rows.frame.item() == 4


@on_gpu
@torch.no_grad()
def test_a_step_has_the_same_bits_each_time(checkpoint):
    """Without the fence in `release`, bulk copies overwrote weights before they were read: in one of 20 to 4,000
    launches for 16 rows."""
    megakernel_of_16 = Megakernel(load_upstream(str(checkpoint("base", "0.6B"))).model.talker, LENGTH, row_count=16)
    fill_with_random_states(megakernel_of_16.rows, PROMPTS, frames=1)
    megakernel_of_16.rows.advance.fill_(False)
    for launch in megakernel_of_16.launches:
        launch()
        expected = launch.logits().clone()
        for number in range(3000):
            launch()
            assert torch.equal(launch.logits(), expected), number


@on_gpu
@torch.no_grad()
def test_a_wrong_kernel_is_found(routes):
    """RoPE with other angles: the comparison that `bench.py --check` makes finds it."""
    right, own, exact = routes
    torch.manual_seed(0)
    request = random_request(right.rows.text.shape[-1], "cuda")
    tokens = torch.randint(2048, (40, 16), device="cuda")
    with compile_with(gpu_kernel_for(faulty_source("RoPE of another position"))):
        logits = Megakernel(right.talker, LENGTH).logits(tokens, **request)
    for found, reference, truth in zip(logits, own.logits(tokens, **request), exact.logits(tokens, **request)):
        assert not verdict(found, reference, truth)[0]


@torch.no_grad()
def test_calibration_projects_new_embeddings(checkpoint):
    """After new weights, the rows that the kernel looks up are those of the new weights; without a GPU."""
    talker = load_upstream(str(checkpoint("base", "tiny")), "cpu", torch.bfloat16).model.talker
    with compile_with(lambda stack: (kernel_sizes(stack, gpu_of()), None)):
        route = Megakernel(talker, 64)
    step = route.launches[0]
    looked_up = [projected.data_ptr() for projected in step.inputs]
    for weight in step.embeddings:
        weight.normal_()
    route.refresh()
    assert len(step.inputs) == talker.config.num_code_groups
    assert [projected.data_ptr() for projected in step.inputs] == looked_up
    for projected, weight in zip(step.inputs, step.embeddings):
        assert torch.equal(projected, step.project(weight))


# ---- Where it cannot run


@on_gpu
def test_where_it_cannot_run_it_says_why(checkpoint):
    tts = load_upstream(str(checkpoint("base", "tiny")), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sizes"):
        accelerate(tts, max_seq_len=64, fused=True)
    accelerate(tts, max_seq_len=64)
    assert "sizes" in tts.speech.path


def test_on_a_cpu_it_says_why(checkpoint):
    tts = load_upstream(str(checkpoint("base", "tiny")), "cpu")
    with pytest.raises(ValueError, match="not on an NVIDIA GPU"):
        accelerate(tts, max_seq_len=64, fused=True)
    accelerate(tts, max_seq_len=64)
    assert tts.speech.path == "on the CPU"


def test_the_settings_are_float32_whatever_the_default():
    """The kernel reads them as float32."""
    torch.set_default_dtype(torch.float64)
    try:
        sampling = Sampling(2048, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sampling.temperature.dtype == torch.float32
    assert sampling.one_minus_top_p.dtype == torch.float32


def test_a_torch_that_tells_less_of_the_gpu():
    """torch 2.5 and 2.6 do not know the shared memory of a block: loading ended in an AttributeError."""
    told = dict(name="Orin", major=8, minor=7, multi_processor_count=16)
    answers = {97: 163 << 10, 38: 4 << 20}

    def get_attribute(pointer: Any, attribute: int, handle: Any) -> int:
        pointer._obj.value = answers[attribute]
        return 0 if handle.value == 1 else 101

    def get_device(pointer: Any, number: int) -> int:
        pointer._obj.value = number
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=get_device, cuDeviceGetAttribute=get_attribute)
    driver.cuGetErrorString = lambda result, message: 0
    with pretended_gpu(SimpleNamespace(**told)), mock.patch.object(nvrtc, "load_driver", lambda: driver):
        gpu = nvrtc.gpu_properties(torch.device("cuda", 1))
        assert vars(gpu) == told | dict(shared_memory_per_block_optin=163 << 10, L2_cache_size=4 << 20)
        model = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
        assert "cuDeviceGetAttribute failed: CUDA error 101" in SOURCE.why_not(Stack(model, [], 0))


@on_gpu
def test_the_driver_tells_what_torch_tells():
    told = torch.cuda.get_device_properties(0)
    with pretended_gpu(SimpleNamespace(**{name: getattr(told, name) for name in nvrtc.TORCH_PROPERTIES})):
        gpu = nvrtc.gpu_properties(torch.device("cuda"))
    assert all(getattr(gpu, name) == getattr(told, name) for name in nvrtc.DEVICE_ATTRIBUTES)


@pytest.mark.parametrize("error", [RuntimeError, OSError])  # OSError: no NVRTC
def test_a_kernel_that_does_not_compile_is_not_used(error):
    """On a GPU that seems to have all it takes."""
    model, heads, _, _ = stack_without_weights("0.6B")
    model.device, model.dtype = torch.device("cuda", 0), torch.bfloat16
    predictor = SimpleNamespace(model=model, lm_head=heads * 15)
    talker = SimpleNamespace(
        model=model, codec_head=heads[0], device=model.device, config=model.config, code_predictor=predictor
    )
    both = threading.Barrier(2, timeout=20)  # the stacks are compiled at once

    def refuse(*_: str) -> None:
        raise error("Kernel compilation failed:\nno such instruction")

    with pretended_gpu(gpu_of("H200"), lambda *_: b"%d" % both.wait()):
        assert paths.choose_path(talker, None) == (True, "megakernel")
    with pretended_gpu(gpu_of("H200"), refuse):
        used, description = paths.choose_path(talker, None)
        assert not used
        assert "no such instruction" in description and "\n" not in description
        with pytest.raises(ValueError, match="no such instruction"):
            paths.choose_path(talker, True)
    too_small = gpu_of("H200")
    too_small.multi_processor_count = 7
    with pretended_gpu(too_small, refuse):
        SOURCE.compile_ahead(*stacks_of(talker))
        assert not kernel_cache.started
        assert "8 multiprocessors, the GPU has 7" in SOURCE.why_not(*stacks_of(talker))
