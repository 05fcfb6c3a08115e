"""RMSNorm and the gated norm behind KDA on a GPU, in one launch each: without gradients, rounded as the references do.

In and out: as the references. Other shapes than [T, D] (gated: [T, H, V]), FP64 and gradients go there. Rows may be a
view with a stride.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.device import has_dependent_launch
from baltoro.kernels.norm import reference

MAX_WIDTH = 16384
"""Of a row, which a program holds whole: 16 values a thread in 32 warps."""
KINDS = (torch.bfloat16, torch.float32)
GATED_VALUES, GATED_WARPS = 4096, 8
"""Of a program of the gated norm: 32 rows of 128, 32 values a thread."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D], weight [D] -> [T, D] in x.dtype."""
    is_plain = x.dim() == 2 and x.dtype in KINDS and x.stride(-1) == 1
    if not is_plain or torch.is_grad_enabled() or x.shape[1] > MAX_WIDTH:
        return reference.rms_norm(x, weight, eps)
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.norm.triton_kernels import rms_norm_kernel

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        warps = max(1, min(16, block // 512))
        is_dependent = has_dependent_launch(x)
        launch = {"launch_pdl": True} if is_dependent else {}
        rms_norm_kernel[(len(x),)](
            x, weight, out, x.stride(0), eps,
            D=x.shape[1], BLOCK=block, PDL=is_dependent, num_warps=warps, **launch,
        )  # fmt: skip
    return out


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """o, gate [T, H, V], weight [V] -> [T, H, V] in `out_dtype`."""
    is_plain = o.dim() == 3 and gate.shape == o.shape and o.stride(-1) == 1 and gate.stride(-1) == 1
    is_plain = is_plain and weight.is_contiguous() and all(d in KINDS for d in (o.dtype, gate.dtype, out_dtype))
    if not is_plain or torch.is_grad_enabled() or o.shape[-1] > GATED_VALUES:
        return reference.gated_rms_norm(o, gate, weight, eps, out_dtype)
    return gated_launch(o, gate, weight, eps, out_dtype, GATED_VALUES, GATED_WARPS)


def gated_launch(
    o: Tensor, gate: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, values: int, warps: int
) -> Tensor:
    """The launch, arguments checked; so many values a program."""
    import triton

    from baltoro.kernels.norm.triton_kernels import gated_rms_norm_kernel

    out = torch.empty(o.shape, dtype=out_dtype, device=o.device)
    if out.numel():
        tokens, heads, width = o.shape
        block = triton.next_power_of_2(width)
        rows = max(1, values // block)
        gated_rms_norm_kernel[(triton.cdiv(tokens * heads, rows),)](
            o, gate, weight, out, o.stride(0), o.stride(1), gate.stride(0), gate.stride(1), tokens * heads, eps,
            H=heads, D=width, BLOCK=block, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return out
