"""The gated activations on a GPU in one launch: of shared experts and dense MLPs, whose two halves lie side by side.

In and out: as the references. Rows may be views with a stride; gradients, FP64 and other shapes than [T, F] go there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.device import has_dependent_launch
from baltoro.kernels.moe import reference

BLOCK = 512
"""Values of a program: at one row of 768 two programs, four values a thread."""
SILU, SITU, SITU_LINEAR = 0, 1, 2


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """gate, up [T, F] -> [T, F] in gate.dtype."""
    if not _is_plain(gate, up):
        return reference.situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    kind = SITU_LINEAR if linear_beta is None else SITU
    return _launch(gate, up, kind, beta, 1.0 if linear_beta is None else linear_beta)


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [T, F] -> [T, F] in gate.dtype; silu is not rounded before the product."""
    if not _is_plain(gate, up):
        return reference.silu_glu(gate, up)
    return _launch(gate, up, SILU, 1.0, 1.0)


def _is_plain(gate: Tensor, up: Tensor) -> bool:
    if torch.is_grad_enabled() or gate.dim() != 2 or gate.dtype not in (torch.bfloat16, torch.float32):
        return False
    return gate.stride(-1) == 1 and up.stride(-1) == 1 and up.dtype == gate.dtype


def _launch(gate: Tensor, up: Tensor, kind: int, beta: float, linear_beta: float) -> Tensor:
    from triton import cdiv

    from baltoro.kernels.moe.glu_kernels import glu_kernel

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        rows, width = out.shape
        is_dependent = has_dependent_launch(gate)
        launch = {"launch_pdl": True} if is_dependent else {}
        glu_kernel[(cdiv(width, BLOCK), rows)](
            gate, up, out, gate.stride(0), up.stride(0), width, beta, linear_beta,
            KIND=kind, BLOCK=BLOCK, PDL=is_dependent, num_warps=4, **launch,
        )  # fmt: skip
    return out
