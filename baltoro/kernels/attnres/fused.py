"""The mix of depth with its neighbours, in plain torch: what the fused kernels compute, and the order of roundings.

`read`  the pending addition, the mix and the RMSNorm of the sub-layer that reads it, as decode has them
`scan_bank`, `fold`  two phases, for prefill: the bank does not change inside a block, so its share of every mix of the
block is made in one pass over it; each mix then folds the running sum in (online softmax)

The running sum rounds to the activation dtype with every addition. Between mix and norm nothing is rounded; the
bank's part rests in the activation dtype between the phases.
Source: spec/k3.md 3.3; spec/kernels.md D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype


def read(
    bank: Tensor, prefix: Tensor | None, update: Tensor | None, query: Tensor, gain: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """bank [L, T, D], L >= 1; prefix, update [T, D], at least one of them; query [D]; gain [D] of the following norm.

    Returns (prefix + update, RMSNorm(mix(bank, that sum))), [T, D] each in the dtype of the bank.
    """
    total = _sum(prefix, update)
    mixed = _mix(torch.cat([bank, total.unsqueeze(0)]), query, eps)
    return total, _norm(mixed, gain, norm_eps, bank.dtype)


def scan_bank(bank: Tensor, queries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """bank [L, T, D], queries [Q, D] -> (part [Q, T, D] in bank.dtype, lse [Q, T] in the accumulate dtype).

    part is the mix of the bank alone, lse the log-sum-exp of its scores.
    """
    wide = bank.to(acc_dtype(bank.dtype))
    scores = torch.einsum("ltd,qd->qtl", wide, queries.to(wide.dtype)) * _inverse_rms(wide, eps).T
    part = torch.einsum("qtl,ltd->qtd", torch.softmax(scores, dim=-1), wide)
    return part.to(bank.dtype), torch.logsumexp(scores, dim=-1)


def fold(
    part: Tensor,
    lse: Tensor,
    prefix: Tensor | None,
    update: Tensor | None,
    query: Tensor,
    gain: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """One mix of a block: part [T, D] and lse [T] of its query, the rest and the result as `read`."""
    total = _sum(prefix, update)
    wide = total.to(lse.dtype)
    score = (wide @ query.to(wide.dtype)) * _inverse_rms(wide, eps)
    weight = torch.sigmoid(score - lse).unsqueeze(-1)  # e^score / (e^score + e^lse)
    mixed = torch.lerp(part.to(wide.dtype), wide, weight)
    return total, _norm(mixed, gain, norm_eps, part.dtype)


def _sum(prefix: Tensor | None, update: Tensor | None) -> Tensor:
    if prefix is None or update is None:
        total = update if prefix is None else prefix
        assert total is not None, "neither a running sum nor an update"
        return total
    return prefix + update


def _mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """As `reference.mix`, unrounded."""
    wide = sources.to(acc_dtype(sources.dtype))
    share = torch.softmax((wide @ query.to(wide.dtype)) * _inverse_rms(wide, eps), dim=0)
    return (wide * share.unsqueeze(-1)).sum(0)


def _norm(wide: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return (wide * _inverse_rms(wide, eps).unsqueeze(-1) * gain.to(wide.dtype)).to(dtype)


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1) + eps)
