"""Triton kernels of the depth mix for few tokens: a row is shared out over many programs, in two short launches.

One program a token would pull 9 rows of 7168 through one processor. Here each program takes some channels: the first
launch makes its share of the products of all sources with each other and with the query; the second adds the shares up,
which gives every score and, since the mix is a sum of the sources, the norm of the mix too, without another exchange.
In and out: see `fast.py`, which launches them. Importing this needs triton.
Source: spec/kernels.md D.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def sources_of(
    bank, prefix, update, bank_source, bank_token, token, d,
    L: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    """Rows [BLOCK_L, len(d)]: the bank and, in row L, the running sum as it is kept; else zeros. And that sum."""
    source, mask = tl.arange(0, BLOCK_L), d < D
    rows = bank + source[:, None].to(tl.int64) * bank_source + token * bank_token + d[None, :]
    tile = tl.load(rows, mask=(source < L)[:, None] & mask[None, :], other=0)
    kept = tl.zeros([d.shape[0]], tile.dtype)
    at = token * D + d
    if HAS_PREFIX and HAS_UPDATE:
        total = tl.load(prefix + at, mask=mask, other=0).to(tl.float32)
        total += tl.load(update + at, mask=mask, other=0).to(tl.float32)
        kept = total.to(tile.dtype)
    elif HAS_PREFIX:
        kept = tl.load(prefix + at, mask=mask, other=0)
    elif HAS_UPDATE:
        kept = tl.load(update + at, mask=mask, other=0)
    if HAS_PREFIX or HAS_UPDATE:
        tile = tl.where((source == L)[:, None], kept[None, :], tile)
    return tile, kept


@triton.jit
def products_kernel(
    bank, prefix, update, query, total, products, dots, bank_source, bank_token,
    L: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Program (block of channels, token). Writes products [T, blocks, BLOCK_L, BLOCK_L], dots [T, blocks, BLOCK_L].

    PDL: it may start before the kernel in front of it has ended; only the query, a weight, is read at once.
    """
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    wide_query = tl.load(query + d, mask=d < D, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, kept = sources_of(bank, prefix, update, bank_source, bank_token, token, d,
                            L, D, BLOCK_L, HAS_PREFIX, HAS_UPDATE)  # fmt: skip
    if HAS_PREFIX and HAS_UPDATE:
        tl.store(total + token * D + d, kept, mask=d < D)
    wide = tile.to(tl.float32)
    if INTERP:  # it multiplies the bit patterns of bf16
        product = tl.dot(wide, tl.trans(wide), input_precision="ieee")
    else:
        product = tl.dot(tile, tl.trans(tile), input_precision="ieee")
    i = tl.arange(0, BLOCK_L)
    at = token * tl.num_programs(0) + block
    tl.store(products + (at * BLOCK_L + i[:, None]) * BLOCK_L + i[None, :], product)
    tl.store(dots + at * BLOCK_L + i, tl.sum(wide * wide_query[None, :], axis=1))


@triton.jit
def blend_kernel(
    bank, prefix, update, gain, products, dots, out, bank_source, bank_token, eps, norm_eps,
    L: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr,
    HAS_PREFIX: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of channels, token): its channels of the mix, or of the RMSNorm of the mix times the gain."""
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    tile, _ = sources_of(bank, prefix, update, bank_source, bank_token, token, d,
                         L, D, BLOCK_L, HAS_PREFIX, HAS_UPDATE)  # fmt: skip
    scale = tl.full([BLOCK_D], 1.0, tl.float32)
    if HAS_NORM:
        scale = tl.load(gain + d, mask=mask, other=0).to(tl.float32)
    if PDL:  # all above is older than the first launch, which waited for its own inputs before it let this one start
        gdc_wait()
        gdc_launch_dependents()
    i, b = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_B)
    at, is_block = token * BLOCKS + b, b < BLOCKS
    flat = tl.arange(0, BLOCK_L * BLOCK_L)
    dot_at = dots + at[:, None] * BLOCK_L + i[None, :]
    product_at = products + at[:, None] * (BLOCK_L * BLOCK_L) + flat[None, :]
    dot = tl.load(dot_at, mask=is_block[:, None], other=0.0)  # both on the way before either is summed
    product = tl.load(product_at, mask=is_block[:, None], other=0.0)
    dot, product = tl.sum(dot, axis=0), tl.reshape(tl.sum(product, axis=0), [BLOCK_L, BLOCK_L])
    square = tl.sum(tl.where(i[:, None] == i[None, :], product, 0.0), axis=0)
    count: tl.constexpr = L + 1 if HAS_PREFIX or HAS_UPDATE else L
    score = tl.where(i < count, dot * tl.rsqrt(square / D + eps), float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    if HAS_NORM:
        norm = tl.sum(tl.sum(product * weight[None, :], axis=1) * weight, axis=0)
        scale = scale * tl.rsqrt(tl.maximum(norm, 0.0) / D + norm_eps)
    mixed = tl.sum(tile.to(tl.float32) * weight[:, None], axis=0) * scale
    tl.store(out + token * D + d, mixed.to(out.dtype.element_ty), mask=mask)
