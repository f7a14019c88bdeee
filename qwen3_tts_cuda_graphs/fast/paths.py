"""Whether torch is new enough, whether the megakernel can run a model on this machine, and if not, why."""

import torch

from qwen3_tts_cuda_graphs.fast import megakernel, nvrtc

MIN_SHARED_BYTES = 99 * 1024  # of a block
MEGAKERNEL = "megakernel"  # the name of that path


class MegakernelStopped(RuntimeError):
    """A wait in the megakernel took too long. What it has computed since is worthless."""

    def __init__(self, reason: str, utterances=()):
        """utterances: those whose speech is lost"""
        super().__init__(f"{reason}: the speech is lost, the next request runs on separate kernels")
        self.reason = reason
        self.utterances = utterances


def check_torch(torch=torch) -> None:
    """Jetsons and clusters come with a torch of their own: name what it lacks before anything is captured."""
    if not hasattr(torch.nn.functional, "rms_norm"):
        raise ValueError(f"torch {torch.__version__} has no torch.nn.functional.rms_norm: install torch 2.5 or newer")


def choose_path(talker, fused: bool | None) -> tuple[bool, str]:
    """Whether to use the megakernel, and the name of the path for messages. `fused` as in `accelerate`."""
    if talker.device.type == "cpu" and not fused:
        return False, "on the CPU"
    reason = "fused=False" if fused is False else why_not(talker)
    if fused and reason:
        raise ValueError(f"fused=True: the megakernel cannot run here: {reason}")
    if reason:
        return False, describe(reason)
    return True, MEGAKERNEL


def describe(reason: str) -> str:
    """The name of the path without the megakernel."""
    return f"separate kernels, no megakernel: {reason}"


def why_not(talker) -> str:
    """What keeps this model on this machine from the megakernel. Empty if nothing does."""
    if reason := why_not_before_compiling(talker):
        return reason
    try:
        for stack in stacks_of(talker):
            megakernel.compile_for(*stack)
    except (OSError, RuntimeError) as error:
        return f"the kernel cannot be compiled: {' '.join(str(error).split())[:200]}"
    return ""


def compile_ahead(talker) -> None:
    """Start compiling in threads, which `why_not` then waits for."""
    if not why_not_before_compiling(talker):
        for stack in stacks_of(talker):
            megakernel.compile_ahead(*stack)


def why_not_before_compiling(talker) -> str:
    if talker.device.type != "cuda" or torch.version.hip:
        return "the model is not on an NVIDIA GPU"
    if talker.dtype != torch.bfloat16:
        return f"the weights are {talker.dtype}, not bfloat16"
    try:
        gpu = nvrtc.gpu_properties(talker.device)
    except (OSError, RuntimeError) as error:
        return f"the driver does not say what the GPU has: {error}"
    if gpu.major < 8:
        return f"the GPU's compute capability is {gpu.major}.{gpu.minor}, below 8.0"
    if gpu.multi_processor_count < 8:
        return f"the GPU has {gpu.multi_processor_count} multiprocessors, fewer than 8"
    if gpu.shared_memory_per_block_optin < MIN_SHARED_BYTES:
        return f"the GPU has {gpu.shared_memory_per_block_optin >> 10} KiB of shared memory per block, less than 99"
    return ""


def stacks_of(talker) -> list[tuple]:
    """The arguments of megakernel.compile_for, of the talker and of its code predictor."""
    predictor = talker.code_predictor
    hidden_size = talker.config.hidden_size
    return [
        (talker.model, [talker.codec_head], hidden_size),
        (predictor.model, list(predictor.lm_head), hidden_size),
    ]
