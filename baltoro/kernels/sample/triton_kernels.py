"""Triton kernel of the sampler: the lowest logit that may be drawn, found bit by bit, then the draw over ids in order.

A float's bits, flipped so that they order as the floats do, are a key; the border of top-k or top-p is the largest key
such that as many logits, or as much mass, lie at or above it. Importing this needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(logits):
    """FP32 -> int64 in [0, 2^32) in the order of the floats; both zeros are one key."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def _at_or_above(row, width, border, cut, best, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have keys >= border, or the mass e^(logit - best) of those that also have keys >= cut."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(row + at, mask=at < width, other=float("-inf"))
        key = _keys(logit)
        is_in = (key >= border) & (key >= cut) & (at < width)
        if COUNTS:
            total += tl.where(is_in, 1.0, 0.0).to(tl.float64)
        else:
            total += tl.where(is_in, tl.exp(logit - best), 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _border(row, width, wanted, cut, best, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above which lies at least `wanted`."""
    border = tl.zeros([], tl.int64)
    for step in range(32):
        one = tl.full([], 1, tl.int64) << (31 - step)
        found = _at_or_above(row, width, border + one, cut, best, COUNTS, BLOCK)
        border = tl.where(found >= wanted, border + one, border)
    return border


@triton.jit
def sample_kernel(logits, top_k, top_p, min_p, uniform, ids, stride, width, BLOCK: tl.constexpr):
    """Program (row). Writes ids[row]."""
    m = tl.program_id(0).to(tl.int64)
    row = logits + m * stride
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(row + at, mask=at < width, other=float("-inf")))
    best = tl.max(highest, axis=0)
    k, p = tl.load(top_k + m), tl.load(top_p + m).to(tl.float32)
    none = tl.zeros([], tl.int64)
    cut = none
    if (k > 0) & (k < width):
        cut = _border(row, width, k.to(tl.float64), none, best, True, BLOCK)
    low = cut
    if p < 1:
        mass = _at_or_above(row, width, none, cut, best, False, BLOCK)
        low = tl.maximum(low, _border(row, width, p.to(tl.float64) * mass, cut, best, False, BLOCK))
    smallest = best + tl.log(tl.load(min_p + m).to(tl.float32))

    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(row + at, mask=at < width, other=float("-inf"))
        is_in = (_keys(logit) >= low) & (logit >= smallest) & (at < width)
        total += tl.where(is_in, tl.exp(logit - best), 0.0).to(tl.float64)
    whole = tl.sum(total, axis=0)
    target = tl.load(uniform + m) * whole
    before = tl.zeros([], tl.float64)
    chosen = tl.zeros([], tl.int64)
    last = tl.zeros([], tl.int64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(row + at, mask=at < width, other=float("-inf"))
        is_in = (_keys(logit) >= low) & (logit >= smallest) & (at < width)
        part = tl.where(is_in, tl.exp(logit - best), 0.0).to(tl.float64)
        mass = before + tl.cumsum(part, axis=0)
        chosen += tl.sum(((mass <= target) & (at < width)).to(tl.int64), axis=0)
        last = tl.maximum(last, tl.max(tl.where(part > 0, at, 0).to(tl.int64), axis=0))
        before += tl.sum(part, axis=0)
    # a number close to 1 may round to the whole mass: then the last id that has some
    tl.store(ids + m, tl.minimum(chosen, last))
