"""The megakernel as other GPUs would run it: their number of blocks, shared memory, L2 and kind of copies.

Each profile is compiled for its own architecture where there is an NVRTC. Where there is a GPU of compute capability
9.0 or higher, it also runs there: PTX for the profile's architecture if that is older, else machine code of the GPU
with the profile's sizes. On a CPU tests/test_kernel_on_cpu.py runs 8, 16 and 20 blocks, and both kinds of copies.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import on_gpu
from megakernel_cases import PROFILES, STACKS, compile_with, gpu_of, sizes_of

from qwen3_tts_cuda_graphs.bench.parity import Megakernel, TeacherForced, one_pass, random_request, verdict
from qwen3_tts_cuda_graphs.common.loading import load_upstream
from qwen3_tts_cuda_graphs.fast import kernels, nvrtc
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, Sizes, Stack, kernel_sizes

LENGTH = 512
FRAMES = 120


@pytest.mark.parametrize(
    "profile, grids",
    [
        ("H200", (128, 128)),
        ("RTX 4090", (128, 128)),
        ("A100", (103, 103)),
        ("RTX 3090", (77, 77)),
        ("RTX 5070 Ti", (64, 70)),
        ("RTX 3060", (28, 28)),
        ("Jetson Orin Nano", (8, 8)),
    ],
)
def test_the_fewest_blocks_with_the_least_work(profile, grids):
    """More blocks than that only make the exchange slower: the busiest decides."""
    assert tuple(sizes_of(profile, stack).grid for stack in ("0.6B", "1.7B")) == grids


def has_nvrtc() -> bool:
    try:
        nvrtc.load_nvrtc()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("stack", STACKS)
def test_every_profile_compiles(stack, rows):
    """For its own architecture, with its own instructions. Of many rows, those that have too few blocks are refused."""

    def compile_for_profile(profile: str) -> str:
        try:
            nvrtc.compile_source(SOURCE.complete(sizes_of(profile, stack, rows)), f"sm_{PROFILES[profile][0]}")
        except RuntimeError as error:
            is_refused = rows > 1 and "unsupported sizes: " in str(error)
            return "" if is_refused else f"{profile}: {error}"
        return ""

    with ThreadPoolExecutor(16) as threads:
        errors = [*filter(None, threads.map(compile_for_profile, PROFILES))]
    assert errors == []


@pytest.fixture(scope="module", params=["0.6B", "1.7B"])
def case(request, checkpoint) -> SimpleNamespace:
    """A talker for the megakernel, tokens to force, and their logits from the model's own forward in bfloat16 and in
    float32."""
    folder = str(checkpoint("base", request.param))
    own, exact, talker = (
        load_upstream(folder, dtype=dtype).model.talker for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)
    )
    torch.manual_seed(0)
    prompt = random_request(talker.config.hidden_size, talker.device)
    tokens = torch.randint(2048, (FRAMES, 16), device=talker.device)
    logits = TeacherForced(own, LENGTH).logits(tokens, **prompt), one_pass(exact, tokens, **prompt)
    return SimpleNamespace(talker=talker, prompt=prompt, tokens=tokens, logits=logits)


def kernel_of_profile(profile: str, capability_here: int) -> Any:
    """For compile_with."""
    capability = PROFILES[profile][0]
    architecture = f"compute_{capability}" if capability < capability_here else None

    def compile(stack: Stack) -> tuple[Sizes, Any]:
        sizes = kernel_sizes(stack, gpu_of(profile))
        source = SOURCE.complete(sizes), SOURCE.kernels
        own = nvrtc.architecture_of(stack.device)
        return sizes, kernels.load_kernels(*source, stack.device, sizes.shared_bytes, architecture or own)

    return compile


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_the_same_model(profile, case):
    """Logits with forced tokens, as near to float32 as the model's own."""
    here = torch.cuda.get_device_properties(0)
    wanted = gpu_of(profile)
    if wanted.shared_memory_per_block_optin > here.shared_memory_per_block_optin or here.major < 9:
        pytest.skip("this GPU cannot run it")
    with compile_with(kernel_of_profile(profile, 10 * here.major + here.minor)):
        fused = Megakernel(case.talker, LENGTH)
    fused_logits = fused.logits(case.tokens, **case.prompt)
    assert torch.equal(fused.rows.codes[0, :FRAMES], case.tokens)
    assert not any(launch.why_failed() for launch in fused.launches)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        fused.graphs.predict()
        fused.graphs.step()
    end.record()
    end.synchronize()
    grids = [launch.sizes.grid for launch in fused.launches]
    print(f"\n{profile}: {grids[1]} and {grids[0]} blocks, {start.elapsed_time(end) / 20:.2f} ms per frame here")
    for name, logits in zip(("codes 1 to 15", "first codes"), zip(fused_logits, *case.logits)):
        good, figures = verdict(*logits)
        print(" ", name, figures)
        assert good, (name, figures)
