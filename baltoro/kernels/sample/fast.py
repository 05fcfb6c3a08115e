"""Filters and draw on a GPU in one launch, one program a row, without a word to the host and without sorting.

In and out: as `reference.sample`: the same floor and the same number, hence the same id, but where the number falls
within rounding (about 1e-7 of the mass) of the border between two ids. FP64 logits go to the reference.
Limits: 70 passes over a row, out of the L2 cache: right for tens of rows, not for one row's latency.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.sample import reference

BLOCK = 4096


def sample(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """logits [M, X] divided by the temperature; top_k int64, top_p, min_p, uniform (FP64) [M] -> ids int64 [M]."""
    if logits.dtype == torch.float64:
        return reference.sample(logits, top_k, top_p, min_p, uniform)
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.sample.triton_kernels import sample_kernel

    rows, width = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits, top_k, top_p, min_p, uniform, ids, logits.stride(0), width,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return ids
