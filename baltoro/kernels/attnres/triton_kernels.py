"""Triton kernels of the depth mix: whole in one launch (mix; add + mix + norm), or as bank pass and fold.

One program a token. The widths of a row lie in one register vector, so that only the scores need reductions.
In and out: see `fast.py`, which launches them. Importing this needs triton.
Source: spec/kernels.md D.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _score(row, query, eps, D: tl.constexpr):
    return tl.sum(row * query, axis=0) * tl.rsqrt(tl.sum(row * row, axis=0) / D + eps)


@triton.jit
def _pending(prefix, update, total, at, mask, HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr):
    """The running sum of a token after the pending addition, rounded as it is kept, in FP32. Writes it to `total`."""
    if HAS_PREFIX and HAS_UPDATE:
        row = tl.load(prefix + at, mask=mask, other=0).to(tl.float32)
        row += tl.load(update + at, mask=mask, other=0).to(tl.float32)
        kept = row.to(total.dtype.element_ty)
        tl.store(total + at, kept, mask=mask)
        row = kept.to(tl.float32)
    elif HAS_PREFIX:
        row = tl.load(prefix + at, mask=mask, other=0).to(tl.float32)
    else:
        row = tl.load(update + at, mask=mask, other=0).to(tl.float32)
    return row


@triton.jit
def _finish(out, at, mixed, gain, d, mask, norm_eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Writes the mix, or its RMSNorm times the gain."""
    if HAS_NORM:
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) / D + norm_eps)
        mixed = mixed * tl.load(gain + d, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def read_kernel(
    bank, prefix, update, query, gain, total, out, bank_source, bank_token, eps, norm_eps,
    L: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """bank [L, T, D] by strides; prefix, update, total, out [T, D] contiguous; query, gain [D]."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    at = token * D + d
    wide_query = tl.load(query + d, mask=mask, other=0).to(tl.float32)
    best = float("-inf")
    sums = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    if HAS_PREFIX or HAS_UPDATE:
        acc = _pending(prefix, update, total, at, mask, HAS_PREFIX, HAS_UPDATE)
        best = _score(acc, wide_query, eps, D)
        sums = 1.0
    for source in tl.static_range(L):
        row = tl.load(bank + source * bank_source + token * bank_token + d, mask=mask, other=0).to(tl.float32)
        score = _score(row, wide_query, eps, D)
        higher = tl.maximum(best, score)
        keep, weight = tl.exp(best - higher), tl.exp(score - higher)
        acc = acc * keep + row * weight
        sums = sums * keep + weight
        best = higher
    _finish(out, at, acc / sums, gain, d, mask, norm_eps, D, HAS_NORM)


@triton.jit
def scan_kernel(
    bank, queries, part, lse, bank_source, bank_token, num_tokens, eps,
    L: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All queries of a block over the bank of one token: scores as one product, then the weighted sums.

    The bank rows are read from memory once and from cache once. Writes part [Q, T, D] and lse [Q, T].
    """
    token = tl.program_id(0).to(tl.int64)
    source, q, d = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    rows = bank + source[:, None].to(tl.int64) * bank_source + token * bank_token
    dots = tl.zeros([BLOCK_Q, BLOCK_L], tl.float32)
    squares = tl.zeros([BLOCK_L], tl.float32)
    for first in range(0, D, BLOCK_D):
        column = first + d
        is_row = (source < L)[:, None] & (column < D)[None, :]
        tile = tl.load(rows + column[None, :], mask=is_row, other=0).to(tl.float32)
        is_query = (q < Q)[:, None] & (column < D)[None, :]
        wide = tl.load(queries + q[:, None] * D + column[None, :], mask=is_query, other=0).to(tl.float32)
        dots += tl.dot(wide, tl.trans(tile), input_precision="tf32x3")
        squares += tl.sum(tile * tile, axis=1)
    score = dots * tl.rsqrt(squares / D + eps)[None, :]
    score = tl.where((source < L)[None, :], score, float("-inf"))
    best = tl.max(score, axis=1)
    share = tl.exp(score - best[:, None])
    sums = tl.sum(share, axis=1)
    tl.store(lse + q.to(tl.int64) * num_tokens + token, best + tl.log(sums), mask=q < Q)
    share = share / sums[:, None]
    for first in range(0, D, BLOCK_D):
        column = first + d
        is_row = (source < L)[:, None] & (column < D)[None, :]
        tile = tl.load(rows + column[None, :], mask=is_row, other=0).to(tl.float32)
        mixed = tl.dot(share, tile, input_precision="tf32x3")
        place = (q[:, None].to(tl.int64) * num_tokens + token) * D + column[None, :]
        tl.store(part + place, mixed.to(part.dtype.element_ty), mask=(q < Q)[:, None] & (column < D)[None, :])


@triton.jit
def fold_kernel(
    part, lse, prefix, update, query, gain, total, out, eps, norm_eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    """part, prefix, update, total, out [T, D] contiguous; lse [T]; query, gain [D]."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    at = token * D + d
    row = _pending(prefix, update, total, at, mask, HAS_PREFIX, HAS_UPDATE)
    score = _score(row, tl.load(query + d, mask=mask, other=0).to(tl.float32), eps, D)
    weight = tl.sigmoid(score - tl.load(lse + token))
    rest = tl.load(part + at, mask=mask, other=0).to(tl.float32)
    _finish(out, at, rest + (row - rest) * weight, gain, d, mask, norm_eps, D, True)
