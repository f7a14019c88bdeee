"""Which path a model takes on this machine: the fused layers, or the reference path, and why."""
import torch

from fused_layers import compiled, sizes_of


def choose_path(talker, wanted):
    """Whether to use the fused layers, and words that say so. `wanted`: True, False, or None for wherever they run."""
    reason = "not wanted" if wanted is False else why_not(talker)
    if wanted and reason:
        raise ValueError(f"fused=True is impossible here: {reason}")
    return not reason, f"reference path, no fused layers: {reason}" if reason else "fused layers"


def why_not(talker):
    """What keeps this model on this machine from the fused layers; empty if nothing does."""
    if talker.device.type != "cuda" or torch.version.hip:
        return "the model is not on an NVIDIA GPU"
    if talker.dtype != torch.bfloat16:
        return f"the weights are {talker.dtype}, not bfloat16"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} is older than 2.9"
    gpu, predictor = torch.cuda.get_device_properties(talker.device), talker.code_predictor
    if gpu.major < 9:
        return f"the GPU's compute capability is {gpu.major}.{gpu.minor}, below 9.0"
    if gpu.multi_processor_count < 64:
        return f"the GPU has {gpu.multi_processor_count} multiprocessors, fewer than 64"
    try:
        for model, heads in ((talker.model, [talker.codec_head]), (predictor.model, predictor.lm_head)):
            compiled(model.device, **sizes_of(model, heads, talker.config.hidden_size))
    except (AttributeError, OSError, RuntimeError) as error:
        return f"the kernel cannot be compiled: {' '.join(str(error).split())[:200]}"
    return ""
