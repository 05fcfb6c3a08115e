"""Triton kernels of the copies inside the arena. 64-bit offsets. Importing this needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_kernel(blocks, sources, targets, stride, words, BLOCK: tl.constexpr):
    """Program (stretch of a block, pair): words of block sources[m] to block targets[m]."""
    pair = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = blocks + tl.load(sources + pair).to(tl.int64) * stride
    target = blocks + tl.load(targets + pair).to(tl.int64) * stride
    tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def scatter_kernel(
    kv, pages, offsets, latent, shared, kv_page, kv_row, latent_row, shared_row,
    R: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): latent | shared of a token to its place."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place = tl.load(pages + row).to(tl.int64) * kv_page + tl.load(offsets + row).to(tl.int64) * kv_row
    first = tl.load(latent + row * latent_row + d, mask=d < R, other=0)
    second = tl.load(shared + row * shared_row + d - R, mask=(d >= R) & (d < R + D), other=0)
    tl.store(kv + place + d, tl.where(d < R, first, second), mask=d < R + D)
