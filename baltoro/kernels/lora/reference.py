"""scale * B(Ax) beside a base product, in plain torch: the oracle, and the path of every device so far.

    delta[t] = scale[s] * B[s] (A[s] x[t])      s = slot of row t, 0 is none

Both products and the sum with the base are taken in the accumulate dtype, whatever the base is kept in, and rounded
once: factors of zero give back the base's bits. Slots are numbered from 1; factors of slot s lie at s - 1. Ranks below
the widest are zero rows of A and zero columns of B. Autograd-able in x, A and B. Rows in fixed form go to `fixed.py`.
Source: spec/training.md A.5; the absorbed form follows from kv_b + scale * B A in spec/k3.md 3.5.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.kernels.lora import fixed
from baltoro.kernels.lora.rows import AdapterRows, add_rows, gather
from baltoro.kernels.precision import acc_dtype


def add_delta(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, rows: AdapterRows, *, active: Collection[int]
) -> Tensor:
    """out [T, O] + delta for x [T, I]; a [U, r, I], b [U, O, r], scale [U] in the accumulate dtype.

    `active`: slots that have factors here; others are left alone.
    """
    if rows.shares is not None:
        return fixed.add_delta(out, x, a, b, scale, rows.shares)
    parts = []
    for slot, index in rows.among(active):
        low = low_rank(gather(x, index), a, scale, slot)
        parts.append((index, F.linear(low, b[slot - 1].to(low.dtype))))
    return add_rows(out, parts)


def low_rank(x: Tensor, a: Tensor, scale: Tensor, slot: int) -> Tensor:
    """scale * A x of one slot: [N, I] -> [N, r] in the accumulate dtype."""
    acc = acc_dtype(x.dtype)
    return F.linear(x.to(acc), a[slot - 1].to(acc)) * scale[slot - 1]


def add_absorbed_query(
    out: Tensor, q: Tensor, a: Tensor, b: Tensor, scale: Tensor, rows: AdapterRows, *, active: Collection[int]
) -> Tensor:
    """Latent queries out [N, H, R] of q [N, H, K] through the key part of kv_b: a [U, r, R], b [U, H, K, r].

    q (W + scale B A) = q W + scale (q B) A
    """
    if rows.shares is not None:
        return fixed.add_absorbed_query(out, q, a, b, scale, rows.shares)
    parts = []
    for slot, index in rows.among(active):
        acc = acc_dtype(q.dtype)
        low = torch.einsum("nhk,hkr->nhr", gather(q, index).to(acc), b[slot - 1].to(acc)) * scale[slot - 1]
        parts.append((index, low @ a[slot - 1].to(acc)))
    return add_rows(out, parts)


def add_absorbed_value(
    out: Tensor, latent: Tensor, a: Tensor, b: Tensor, scale: Tensor, rows: AdapterRows, *, active: Collection[int]
) -> Tensor:
    """Values out [N, H, V] of latent outputs [N, H, R] through the value part of kv_b: a [U, r, R], b [U, H, V, r]."""
    if rows.shares is not None:
        return fixed.add_absorbed_value(out, latent, a, b, scale, rows.shares)
    parts = []
    for slot, index in rows.among(active):
        low = low_rank(gather(latent, index), a, scale, slot)
        parts.append((index, torch.einsum("nhr,hvr->nhv", low, b[slot - 1].to(low.dtype))))
    return add_rows(out, parts)
