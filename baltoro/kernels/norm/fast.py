"""RMSNorm on a GPU in one launch, a program a row: without gradients, as `reference.rms_norm` rounds it.

In and out: as the reference. Other shapes than [T, D], FP64 and gradients go there. Rows may be a view with a stride.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.device import has_dependent_launch
from baltoro.kernels.norm import reference

MAX_WIDTH = 16384
"""Of a row, which a program holds whole: 16 values a thread in 32 warps."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D], weight [D] -> [T, D] in x.dtype."""
    is_plain = x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float32) and x.stride(-1) == 1
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
