"""Kernel body of `fast_route`: needs triton; imported on first use.

One program a token. The row is cut into groups of WIDTH experts, a warp each, which find their own best A by A rounds
of two warp-wide maxima, without a barrier; the candidates of all groups are then ranked against each other at once.
Keys are floats made into unsigned integers of the same order, so NaN is the largest, as in torch.sort.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def select(
    logits, bias, ids, weights, counts, num_experts, scaling,
    TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    IS_SIGMOID: tl.constexpr, IS_RENORMALISED: tl.constexpr, HAS_COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits fp32 [T, E], bias fp32 [E] -> ids int64 [T, A], weights fp32 [T, A]; adds to counts int32 [E]."""
    token = tl.program_id(0).to(tl.int64)
    lane, group = tl.arange(0, WIDTH), tl.arange(0, GROUPS)
    expert = group[:, None] * WIDTH + lane[None, :]
    is_real = expert < num_experts
    row = logits + token * num_experts
    shift = tl.load(bias + expert, mask=is_real, other=0.0)  # a weight: read while the kernel in front still runs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logit = tl.load(row + expert, mask=is_real, other=float("-inf"))
    if IS_SIGMOID:
        peak, total = 0.0, 1.0
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        peak = tl.max(tl.max(logit, 1), 0)
        total = tl.sum(tl.sum(tl.exp(logit - peak), 1), 0)
        score = tl.exp(logit - peak) / total
    order = tl.where(is_real, ordered(score + shift), 0)  # 0 is below the key of -inf

    # slot j of a group, kept in thread j of its warp: its j-th best; among equals the lowest expert
    kept = tl.arange(0, SLOTS)[None, :]
    best = tl.zeros([GROUPS, SLOTS], tl.uint32)
    place = tl.zeros([GROUPS, SLOTS], tl.int32)
    for j in tl.static_range(TOP):
        top = tl.max(order, 1)
        at = tl.min(tl.where(order == top[:, None], lane[None, :], WIDTH), 1)
        best = tl.where(kept == j, top[:, None], best)
        place = tl.where(kept == j, at[:, None], place)
        order = tl.where(lane[None, :] == at[:, None], 0, order)

    slot = tl.zeros([GROUPS, TOP_BLOCK], tl.int32) + tl.arange(0, TOP_BLOCK)[None, :]
    key = tl.reshape(tl.gather(best, slot, 1), [GROUPS * TOP_BLOCK])
    chosen = tl.reshape(tl.gather(place, slot, 1) + group[:, None] * WIDTH, [GROUPS * TOP_BLOCK])
    rank = ranks(key, GROUPS * TOP_BLOCK)
    is_taken = rank < TOP
    picked = tl.load(row + chosen, mask=is_taken, other=0.0)
    if IS_SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-picked))
    else:
        weight = tl.exp(picked - peak) / total
    if IS_RENORMALISED:
        weight = weight / (tl.sum(tl.where(is_taken, weight, 0.0), 0) + 1e-20)
    tl.store(ids + token * TOP + rank, chosen.to(tl.int64), mask=is_taken)
    tl.store(weights + token * TOP + rank, weight * scaling, mask=is_taken)
    if HAS_COUNTS:
        tl.atomic_add(counts + chosen, 1, mask=is_taken)


@triton.jit
def ordered(key):
    """fp32 -> uint32 of the same order; -0 equals 0, NaN is the largest."""
    bits = tl.where(key == 0.0, 0.0, key).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = signed.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(key != key, 0xFFFFFFFF, order)


@triton.jit
def ranks(key, NUM: tl.constexpr):
    """How many candidates are better than each: a larger key, or an equal one in front of it, which is a lower expert.

    Slots that no expert filled have key 0 and come last. Sums go down a column, which a thread has to itself: along a
    row they took a warp-wide sum for each candidate.
    """
    place = tl.arange(0, NUM)
    is_before = place[:, None] < place[None, :]
    is_better = (key[:, None] > key[None, :]) | ((key[:, None] == key[None, :]) & is_before)
    return tl.sum(is_better.to(tl.int32), 0)
