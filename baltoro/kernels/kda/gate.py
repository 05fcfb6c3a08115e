"""The log-decay of KDA per token, head and key channel: bounded (K3) or softplus (Kimi-Linear).

    bounded    g = lower_bound * sigmoid(exp(A_log[h]) * (raw + dt_bias[h, d])), so lower_bound < g < 0
    softplus   g = -exp(A_log[h]) * softplus(raw + dt_bias[h, d])

In the accumulate dtype. Source: spec/k3.md 3.4 step 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype


def log_decay(raw: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> Tensor:
    """raw [T, H, K], A_log [H], dt_bias [H, K] -> g [T, H, K] in the accumulate dtype of raw."""
    if A_log.shape != raw.shape[1:2] or dt_bias.shape != raw.shape[1:]:
        raise ShapeError(f"raw {tuple(raw.shape)}, A_log {tuple(A_log.shape)}, dt_bias {tuple(dt_bias.shape)}")
    acc = acc_dtype(raw.dtype)
    rate = A_log.to(acc).exp().unsqueeze(-1)
    shifted = raw.to(acc) + dt_bias.to(acc)
    if lower_bound is None:
        return -rate * F.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)
