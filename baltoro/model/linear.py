"""The one Linear, the RMSNorm module and the names of their parameters.

In: activations [..., in]; out: [..., out] in the same dtype. No biases: the family has none.
Invariants: `weight` is [out, in]; parameters are created empty, `build.py` or `weights.py` fills them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baltoro.kernels.norm.reference import rms_norm


class Linear(nn.Module):
    """x @ weight.T."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, {self.weight.dtype}"


class RMSNorm(nn.Module):
    """Statistics in the accumulate dtype, cast to the input's, then times weight (spec 3.1)."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class WeightOnly(nn.Module):
    """A named `weight` and nothing else: short convolutions, whose product belongs to a kernel."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
