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
    L: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """bank [L, T, D] by strides; prefix, update, total, out [T, D] contiguous; query, gain [D].

    All sources at a time, in chunks of a row: sums of products stay spread over the threads, so that nothing waits
    inside the first pass, and the scores cost one reduction. The second pass finds the bank in the caches.
    """
    token = tl.program_id(0).to(tl.int64)
    d, c, source = tl.arange(0, BLOCK_D), tl.arange(0, CHUNK), tl.arange(0, BLOCK_L)
    mask = d < D
    at = token * D + d
    rows = bank + source[:, None].to(tl.int64) * bank_source + token * bank_token
    dots = tl.zeros([BLOCK_L, CHUNK], tl.float32)
    squares = tl.zeros([BLOCK_L, CHUNK], tl.float32)
    for first in tl.static_range(0, D, CHUNK):
        column = first + c
        is_row = (source < L)[:, None] & (column < D)[None, :]
        tile = tl.load(rows + column[None, :], mask=is_row, other=0).to(tl.float32)
        # as wide as the tile, from the first cache: one row of it would have to change layout, with barriers
        dots += tile * tl.load(query + source[:, None] * 0 + column[None, :], mask=is_row, other=0).to(tl.float32)
        squares += tile * tile
    score = tl.sum(dots, axis=1) * tl.rsqrt(tl.sum(squares, axis=1) / D + eps)
    score = tl.where(source < L, score, float("-inf"))
    best = tl.max(score, axis=0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    own = float("-inf")
    if HAS_PREFIX or HAS_UPDATE:
        acc = _pending(prefix, update, total, at, mask, HAS_PREFIX, HAS_UPDATE)
        own = _score(acc, tl.load(query + d, mask=mask, other=0).to(tl.float32), eps, D)
        best = tl.maximum(best, own)
    share, own_share = tl.exp(score - best), tl.exp(own - best)
    sums = tl.sum(share, axis=0) + own_share
    acc = acc * own_share
    for one in tl.static_range(L):
        weight = tl.sum(tl.where(source == one, share, 0.0), axis=0)
        row = tl.load(bank + one * tl.cast(bank_source, tl.int64) + token * bank_token + d, mask=mask, other=0).to(
            tl.float32
        )
        acc += row * weight
    _finish(out, at, acc / sums, gain, d, mask, norm_eps, D, HAS_NORM)


@triton.jit
def scores_kernel(
    bank, queries, share, lse, bank_source, bank_token, num_tokens, eps,
    L: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program TOKENS tokens: all queries against all their bank rows. Writes share [T, Q, L] and lse [Q, T], FP32.

    The rows of several tokens share each tile of the queries. queries [PARTS, Q, D]: FP32 queries beside a bf16 bank
    come as the sum of two bf16, to 2^-17 of them, so that the bank enters the matrix unit as it is.
    """
    row, q, d = tl.arange(0, TOKENS * BLOCK_L), tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // BLOCK_L
    source = row % BLOCK_L
    is_row = (source < L) & (token < num_tokens)
    rows = bank + source.to(tl.int64) * bank_source + token * bank_token
    dots = tl.zeros([TOKENS * BLOCK_L, BLOCK_Q], tl.float32)
    squares = tl.zeros([TOKENS * BLOCK_L, BLOCK_D], tl.float32)
    for first in range(0, D, BLOCK_D):
        is_column = (first + d < D)[None, :]
        tile = tl.load(rows[:, None] + (first + d)[None, :], mask=is_row[:, None] & is_column, other=0)
        for part in tl.static_range(PARTS):
            at = queries + (part * Q + q[:, None]) * D + (first + d)[None, :]
            query = tl.load(at, mask=(q < Q)[:, None] & is_column, other=0)
            if queries.dtype.element_ty == tl.float32:
                dots = tl.dot(tile.to(tl.float32), tl.trans(query), dots, input_precision="tf32x3")
            else:
                dots = tl.dot(tile, tl.trans(query), dots)
        wide = tile.to(tl.float32)
        squares += wide * wide
    score = dots * tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    score = tl.where((source < L)[:, None], score, float("-inf"))
    score = tl.reshape(score, [TOKENS, BLOCK_L, BLOCK_Q])
    best = tl.max(score, axis=1)
    weight = tl.exp(score - best[:, None, :])
    sums = tl.sum(weight, axis=1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_real = (token < num_tokens)[:, None] & (q < Q)[None, :]
    tl.store(lse + q[None, :].to(tl.int64) * num_tokens + token[:, None], best + tl.log(sums), mask=is_real)
    weight, one = weight / sums[:, None, :], tl.arange(0, BLOCK_L)
    at = share + (token[:, None, None] * Q + q[None, None, :]) * L + one[None, :, None]
    tl.store(at, weight, mask=is_real[:, None, :] & (one < L)[None, :, None])


@triton.jit
def sums_kernel(
    bank, share, part, bank_source, bank_token, num_tokens,
    L: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (token): part [Q, T, D] = share [Q, L] @ bank [L, D].

    The inner width is doubled: each source stands there twice. IS_SPLIT: its share is the sum of two bf16, else the
    second one is 0.
    """
    token = tl.program_id(0).to(tl.int64)
    pair, q, d = tl.arange(0, 2 * BLOCK_L), tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    source = pair % BLOCK_L
    at = share + (token * Q + q[:, None]) * L + source[None, :]
    weight = tl.load(at, mask=(q < Q)[:, None] & (source < L)[None, :], other=0.0)
    is_first = (pair < BLOCK_L)[None, :]
    if IS_SPLIT:
        high = weight.to(tl.bfloat16)
        weight = tl.where(is_first, high, (weight - high.to(tl.float32)).to(tl.bfloat16))
    else:
        weight = tl.where(is_first, weight, 0.0)
    rows = bank + source[:, None].to(tl.int64) * bank_source + token * bank_token
    for first in range(0, D, BLOCK_D):
        column = first + d
        tile = tl.load(rows + column[None, :], mask=(source < L)[:, None] & (column < D)[None, :], other=0)
        if IS_SPLIT:
            mixed = tl.dot(weight, tile)
        else:
            mixed = tl.dot(weight, tile.to(tl.float32), input_precision="tf32x3")
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
