"""RMSNorm and the gated norm of the KDA output, in plain torch.

In: [..., D] of any float dtype. Invariants: statistics in the accumulate dtype; no mean is subtracted, no bias, the
weight is used as it is (not 1 + weight). Source: spec/k3.md 3.1 and 3.4 step 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, rounded to x.dtype, then times weight [D]. Result in x.dtype."""
    wide = x.to(acc_dtype(x.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight.to(x.dtype)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """RMSNorm(o) * weight * sigmoid(gate), all in the accumulate dtype, rounded once to `out_dtype`.

    o and gate [..., V], weight [V].
    """
    acc = acc_dtype(torch.promote_types(o.dtype, out_dtype))
    wide = o.to(acc)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(acc)
    return (scaled * torch.sigmoid(gate.to(acc))).to(out_dtype)
