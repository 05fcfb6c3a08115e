"""Kernel body of `fast_route`: needs triton; imported on first use.

One program a token. The A-th largest key is found bit by bit: 32 counts over the whole row, no sort. Keys are floats
made into unsigned integers of the same order, so NaN is the largest, as in torch.sort.
"""

import triton
import triton.language as tl


@triton.jit
def select(
    logits,
    bias,
    ids,
    weights,
    counts,
    num_experts,
    scaling,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """logits fp32 [T, E], bias fp32 [E] -> ids int64 [T, A], weights fp32 [T, A]; adds to counts int32 [E]."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    is_real = lane < num_experts
    row = logits + token * num_experts
    logit = tl.load(row + lane, mask=is_real, other=float("-inf"))
    peak = tl.max(logit, 0)
    if IS_SIGMOID:
        total = 1.0
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        total = tl.sum(tl.exp(logit - peak), 0)
        score = tl.exp(logit - peak) / total
    order = ordered(score + tl.load(bias + lane, mask=is_real, other=0.0))
    order = tl.where(is_real, order, 0)  # below the key of -inf

    floor = tl.zeros([1], tl.uint32)
    for bit in tl.static_range(32):
        candidate = floor | (1 << (31 - bit))
        count = tl.sum((order >= candidate).to(tl.int32), 0)
        floor = tl.where(count >= TOP, candidate, floor)
    is_above = order > floor
    is_level = (order == floor) & is_real
    missing = TOP - tl.sum(is_above.to(tl.int32), 0)
    is_chosen = is_above | (is_level & (tl.cumsum(is_level.to(tl.int32), 0) <= missing))

    # the chosen ones side by side, lowest expert first; then their ranks among each other
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    slot = tl.arange(0, TOP_BLOCK)
    is_hit = is_chosen[None, :] & (place[None, :] == slot[:, None])
    chosen = tl.sum(tl.where(is_hit, lane[None, :], 0), 1)
    key = tl.max(tl.where(is_hit, order[None, :], 0), 1)
    is_taken = slot < TOP
    rank = ranks(key, slot, is_taken)

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
def ranks(key, slot, is_taken):
    """How many of the taken slots are better than each: a larger key, or an equal one in a lower slot."""
    is_better = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (slot[None, :] < slot[:, None]))
    return tl.sum((is_better & is_taken[None, :]).to(tl.int32), 1)
