"""The mix of Block Attention Residuals: a softmax over depth, one per token, in plain torch.

    score_j = (v_j . query) / sqrt(mean(v_j^2) + eps),  p = softmax_j(score),  out = sum_j p_j v_j

The pseudo-query is static: norm.weight * proj.weight. The sum takes the raw v_j. All in the accumulate dtype, rounded
once. The gradient is written out: it keeps the sources and three numbers per token and source.
Source: spec/k3.md 3.3, MIX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.kernels.precision import acc_dtype


def mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """sources [L, T, D] (bank entries, then the running prefix), query [D] -> [T, D] in sources.dtype."""
    if torch.is_grad_enabled():
        result: Tensor = _Mix.apply(sources, query, eps)  # type: ignore[no-untyped-call]
        return result
    wide = sources.to(acc_dtype(sources.dtype))
    share = torch.softmax((wide @ query.to(wide.dtype)) * _inverse_rms(wide, eps), dim=0)
    return (wide * share.unsqueeze(-1)).sum(0).to(sources.dtype)


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1) + eps)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sources: Tensor, query: Tensor, eps: float) -> Tensor:
        wide = sources.to(acc_dtype(sources.dtype))
        inverse = _inverse_rms(wide, eps)
        dots = wide @ query.to(wide.dtype)
        share = torch.softmax(dots * inverse, dim=0)  # [L, T]
        ctx.save_for_backward(sources, query, inverse, dots, share)
        out = wide[0] * share[0].unsqueeze(-1)
        for source, part in zip(wide[1:], share[1:], strict=True):
            out.addcmul_(source, part.unsqueeze(-1))
        return out.to(sources.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sources, query, inverse, dots, share = ctx.saved_tensors
        wide, grad = sources.to(inverse.dtype), grad.to(inverse.dtype)
        wide_query = query.to(wide.dtype)
        d_share = (wide * grad).sum(-1)
        d_score = share * (d_share - (share * d_share).sum(0))
        along_query = d_score * inverse
        along_source = d_score * dots * inverse**3 / -wide.shape[-1]  # through the norm
        d_sources = grad * share.unsqueeze(-1)
        d_sources.addcmul_(wide, along_source.unsqueeze(-1)).addcmul_(along_query.unsqueeze(-1), wide_query)
        d_query = along_query.flatten() @ wide.flatten(0, 1)
        return d_sources.to(sources.dtype), d_query.to(query.dtype), None
