"""x @ weight.T as three operations, in plain torch: alone, after a norm, and merged with the router's logits.

Source: spec/k3.md 3.1 and 3.7, spec/kernels.md E.2.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from baltoro.kernels.norm.reference import rms_norm
from baltoro.kernels.precision import wide_linear


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O]."""
    return F.linear(x, weight)


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, I], normed and times gain [I], through weight [O, I] -> [T, O]."""
    return F.linear(rms_norm(x, gain, eps), weight)


def router_linear(x: Tensor, weight: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
    """x [T, D], weight [num_logits + O, D] -> logits [T, num_logits] in the accumulate dtype, [T, O] in x.dtype.

    Logits that pass through bf16 flip borderline picks.
    """
    return wide_linear(x, weight[:num_logits]), F.linear(x, weight[num_logits:])
