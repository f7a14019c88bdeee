"""Imported first, it makes this CPU like a GPU without a C compiler from torch 2.13 on: Triton is to compile the
product of a column and a row, as in RoPE, and fails."""

import warnings

import torch

if hasattr(torch.backends, "python_native"):
    from torch._native import registry

    def is_outer_product(a, b, *_, **__):
        return a.dim() == 3 and a.shape[2] == 1

    def compile_it(*_, **__):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    with warnings.catch_warnings(action="ignore"):
        registry.register_op_override(
            "triton", "aten", "bmm", "CPU", is_outer_product, compile_it, allow_multiple_override=True
        )
        registry._register_all_overrides()
    try:
        torch.bmm(torch.ones(1, 2, 1), torch.ones(1, 1, 2))
    except RuntimeError:
        pass
    else:
        raise AssertionError("this torch does not do that any more: remove what upstream.py and generate.py do")
