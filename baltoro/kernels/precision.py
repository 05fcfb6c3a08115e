"""Which dtype sums are taken in.

"FP32" in the notes of the architecture means this dtype: float32 for every activation dtype but float64, so that the
whole model can run in float64 for exact comparisons.
"""

from __future__ import annotations

import torch


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulate dtype that belongs to an activation dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
