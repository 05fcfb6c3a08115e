"""The terms of adapters where only the device knows which row has which: every slot's term for all rows, times 0 or 1.

    delta[t] = sum_s share[t, s] * scale[s] * B[s] (A[s] x[t])

Slots stand beside each other as one adapter of rank U * r, so a site costs two products whatever the mix is, and
nothing asks the host: a step can be captured, and replayed with other slots and other factors. Slots that have no
factors at a site have scale 0 there. Worth it for a few slots, and for serving alone. Results are those of
`reference.py` up to the rounding of products: sums in the accumulate dtype, rounded once; a row without an adapter
keeps its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.kernels.precision import acc_dtype


def add_delta(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """out [T, O] + delta for x [T, I]; a [U, r, I], b [U, O, r], scale [U], shares [T, U]."""
    low = low_rank(x, a, scale, shares)
    return torch.addmm(out.to(low.dtype), low, side_by_side(b, low.dtype)).to(out.dtype)


def low_rank(x: Tensor, a: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """share * scale * A x of every slot, accumulate dtype: x [T, ..., I], a [U, r, I] -> [T, ..., U * r]."""
    acc = acc_dtype(x.dtype)
    low = F.linear(x.to(acc), a.flatten(0, 1).to(acc))
    return hide(low, scale, shares)


def hide(low: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """low [T, ..., U * r], each slot's part times its scale and the row's share of it."""
    weights = (shares * scale).view(len(low), *([1] * (low.dim() - 2)), -1, 1)
    return (torch.unflatten(low, -1, (shares.shape[1], -1)) * weights).flatten(-2)


def side_by_side(b: Tensor, dtype: torch.dtype) -> Tensor:
    """b [U, O, r] -> [U * r, O] in `dtype`."""
    return b.transpose(1, 2).flatten(0, 1).to(dtype)


def add_absorbed_query(out: Tensor, q: Tensor, a: Tensor, b: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """out [N, H, R] of q [N, H, K] through the key part of kv_b: a [U, r, R], b [U, H, K, r]."""
    acc = acc_dtype(q.dtype)
    # [H, N, K] x [H, K, U * r]
    factors = b.permute(1, 2, 0, 3).flatten(2).to(acc)
    low = hide(torch.bmm(q.transpose(0, 1).to(acc), factors).transpose(0, 1), scale, shares)
    return (out.to(acc) + low @ a.flatten(0, 1).to(acc)).to(out.dtype)


def add_absorbed_value(out: Tensor, latent: Tensor, a: Tensor, b: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """out [N, H, V] of latent [N, H, R] through the value part of kv_b: a [U, r, R], b [U, H, V, r]."""
    low = low_rank(latent, a, scale, shares)  # [N, H, U * r]
    factors = b.permute(1, 0, 3, 2).flatten(1, 2).to(low.dtype)  # [H, U * r, V]
    return (out.to(low.dtype) + torch.bmm(low.transpose(0, 1), factors).transpose(0, 1)).to(out.dtype)


def add_first(
    out: Tensor, z: Tensor, a: Tensor, b: Tensor, scale: Tensor, shares: Tensor, places: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Experts' w1 or w3: out [P, F] of P pairs, z [T, M], a [U, 1, r, M], b [U, E, F, r].

    places: (token, expert, slot - 1 or 0 without one) of each pair, int64 [P].
    """
    tokens, experts, slots = places
    low = torch.unflatten(low_rank(z, a[:, 0], scale, shares), -1, (len(scale), -1)).sum(1)  # of the row's own slot
    term = torch.bmm(b[slots, experts].to(low.dtype), low[tokens].unsqueeze(-1)).squeeze(-1)
    return (out.to(low.dtype) + term).to(out.dtype)


def add_second(
    out: Tensor,
    hidden: Tensor,
    weights: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    shares: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Experts' w2: out [T, M] in the accumulate dtype, hidden [P, F] and weights [P] of pairs, those of a token one
    after the other; a [U, E, r, F], b [U, 1, M, r]. The sum over a token's experts is taken in their order."""
    _, experts, slots = places
    low = torch.bmm(a[slots, experts].to(out.dtype), hidden.unsqueeze(-1).to(out.dtype)).squeeze(-1)
    low = (low * weights.to(out.dtype).unsqueeze(-1)).view(len(out), -1, low.shape[-1]).sum(1)
    every = hide(low.repeat(1, len(scale)), scale, shares)
    return torch.addmm(out, every, side_by_side(b[:, 0], out.dtype))
