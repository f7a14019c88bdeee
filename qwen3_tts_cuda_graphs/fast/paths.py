"""Whether torch is new enough, whether the megakernel can run a model on this machine, and if not, why."""

import torch

from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of

MEGAKERNEL = "megakernel"  # the name of that path


def check_torch() -> None:
    """Jetsons and clusters come with a torch of their own: name what it lacks before anything is captured."""
    if not hasattr(torch.nn.functional, "rms_norm"):
        raise ValueError(f"torch {torch.__version__} has no torch.nn.functional.rms_norm: install torch 2.5 or newer")


def choose_path(talker, fused: bool | None) -> tuple[bool, str]:
    """Whether to use the megakernel, and the name of the path for messages. `fused` as in `accelerate`."""
    if talker.device.type == "cpu" and not fused:
        return False, "on the CPU"
    reason = "fused=False" if fused is False else SOURCE.why_not(*stacks_of(talker))
    if fused and reason:
        raise ValueError(f"fused=True: the megakernel cannot run here: {reason}")
    if reason:
        return False, path_without(reason)
    return True, MEGAKERNEL


def path_without(reason: str) -> str:
    """The name of the path without the megakernel."""
    return f"separate kernels, no megakernel: {reason}"
