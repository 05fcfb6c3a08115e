"""Which dtype sums are taken in, and products that are taken in it.

"FP32" in the notes of the architecture means this dtype: float32 for every activation dtype but float64, so that the
whole model can run in float64 for exact comparisons.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulate dtype that belongs to an activation dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O], widened first: result in the accumulate dtype of x. What is kept for backward
    is the two as they came, never a wider copy."""
    acc = acc_dtype(x.dtype)
    if not torch.is_grad_enabled() or x.dtype == weight.dtype == acc:
        return F.linear(x.to(acc), weight.to(acc))
    result: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        acc = acc_dtype(x.dtype)
        return F.linear(x.to(acc), weight.to(acc))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        d_weight = (grad.mT @ x.to(grad.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient is to flow through what is computed from `tensors`: a kernel without a backward must not take
    it, or everything before it stays untrained without a word."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
