"""RMSNorm, the gated norm of the KDA output and the L2 norm of its keys, in plain torch.

In: [..., D] of any float dtype. Invariants: statistics in the accumulate dtype; no mean is subtracted, no bias, the
weight is used as it is (not 1 + weight). Gradients are written out: a norm then keeps its input and one number per row.
Without gradients the formula runs by itself, which at decode sizes costs half as much.
Source: spec/k3.md 3.1 and 3.4 steps 4 and 9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.kernels.precision import acc_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, rounded to x.dtype, then times weight [D]. Result in x.dtype."""
    if torch.is_grad_enabled():
        result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return result
    wide = x.to(acc_dtype(x.dtype))
    return (wide * _inverse_rms(wide, eps)).to(x.dtype) * weight.to(x.dtype)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """RMSNorm(o) * weight * sigmoid(gate), all in the accumulate dtype, rounded once to `out_dtype`.

    o and gate [..., V], weight [V].
    """
    acc = acc_dtype(torch.promote_types(o.dtype, out_dtype))
    o, gate, weight = o.to(acc), gate.to(acc), weight.to(acc)
    if torch.is_grad_enabled():
        result: Tensor = _GatedRMSNorm.apply(o, gate, weight, eps)  # type: ignore[no-untyped-call]
        return result.to(out_dtype)
    return (o * _inverse_rms(o, eps)).mul_(weight).mul_(torch.sigmoid(gate)).to(out_dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in the accumulate dtype."""
    wide = x.to(acc_dtype(x.dtype))
    if torch.is_grad_enabled():
        result: Tensor = _L2Norm.apply(wide, eps)  # type: ignore[no-untyped-call]
        return result
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _input_gradient(normed: Tensor, d_normed: Tensor, mean_dot: Tensor, inverse: Tensor) -> Tensor:
    """Of normed = x * inverse(x): (d_normed - normed * mean(d_normed * normed)) * inverse. Overwrites d_normed."""
    return d_normed.addcmul_(normed, mean_dot, value=-1).mul_(inverse)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(acc_dtype(x.dtype))
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed, wide_weight = x.to(inverse.dtype) * inverse, weight.to(inverse.dtype)
        product = grad * normed
        mean_dot = (product @ wide_weight).unsqueeze(-1) / x.shape[-1]
        d_x = _input_gradient(normed, grad * wide_weight, mean_dot, inverse)
        return d_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    """All in the accumulate dtype."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(o, eps)
        ctx.save_for_backward(o, gate, weight, inverse)
        return (o * inverse).mul_(weight).mul_(torch.sigmoid(gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        o, gate, weight, inverse = ctx.saved_tensors
        normed, share = o * inverse, torch.sigmoid(gate)
        d_normed = grad * share
        product = d_normed * normed
        mean_dot = (product @ weight).unsqueeze(-1) / o.shape[-1]
        d_o = _input_gradient(normed, d_normed.mul_(weight), mean_dot, inverse)
        d_weight = product.flatten(0, -2).sum(0)
        return d_o, share.neg_().add_(1).mul_(product).mul_(weight), d_weight, None


class _L2Norm(torch.autograd.Function):
    """All in the accumulate dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, inverse)
        return x * inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        normed = x * inverse
        dot = (grad * normed).sum(-1, keepdim=True)
        return normed.mul_(dot).neg_().add_(grad).mul_(inverse), None
