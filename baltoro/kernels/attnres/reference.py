"""The mix of Block Attention Residuals: a softmax over depth, one per token, in plain torch.

    score_j = (v_j . query) / sqrt(mean(v_j^2) + eps),  p = softmax_j(score),  out = sum_j p_j v_j

The pseudo-query is static: norm.weight * proj.weight. The sum takes the raw v_j. All in the accumulate dtype, rounded
once. Source: spec/k3.md 3.3, MIX.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype


def mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """sources [L, T, D] (bank entries, then the running prefix), query [D] -> [T, D] in sources.dtype."""
    wide = sources.to(acc_dtype(sources.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    share = torch.softmax((wide @ query.to(wide.dtype)) * rstd, dim=0)
    return (share.unsqueeze(-1) * wide).sum(0).to(sources.dtype)
