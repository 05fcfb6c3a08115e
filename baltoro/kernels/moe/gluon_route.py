"""Kernel body of `fast_route` for a Hopper GPU, sigmoid scores: as `route_kernels.select`, with every layout by hand.

A warp a group of experts, WIDE of them a thread. A round is one maximum over the warp and one vote on who has it; the
slots that rounds fill lie in the threads that later rank them, so candidates cross the program once. Keys are floats
made into signed integers of the same order, NaN the largest. Importing this needs triton. Source: spec/kernels.md E.3.
"""

from __future__ import annotations

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOTHING = gl.constexpr(-(2**31))  # below the key of -inf
VOTE = gl.constexpr("{ .reg .pred has; setp.ne.s32 has, $1, 0; vote.sync.ballot.b32 $0, has, -1; }")


@cache
def layouts(groups: int, slots: int, wide: int) -> tuple[gl.BlockedLayout, gl.BlockedLayout]:
    """Of experts [groups, 32, wide] and of pairs [groups, slots, groups, slots]: candidate, then whom it meets."""
    experts = gl.BlockedLayout([1, 1, wide], [1, 32, 1], [groups, 1, 1], [2, 1, 0])
    beside = 32 // slots
    pairs = gl.BlockedLayout([1, 1, groups // beside, slots], [1, slots, beside, 1], [groups, 1, 1, 1], [3, 2, 1, 0])
    return experts, pairs


@gluon.jit
def ordered(key):
    """fp32 -> int32 of the same order; -0 equals 0, NaN is the largest."""
    bits = gl.cast(gl.where(key == 0.0, 0.0, key), gl.int32, bitcast=True)
    return gl.where(key != key, 0x7FFFFFFF, gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@gluon.jit
def best_of_group(order, number, lane, slot, TOP: gl.constexpr, WIDE: gl.constexpr, CANDIDATE: gl.constexpr):
    """order int32 [groups, 32, WIDE], number int32 of the same shape -> the TOP best of each group and their numbers.

    Among equals the lowest number. Results int32 [groups, slots] in layout CANDIDATE, NOTHING where nothing is left.
    """
    best, place = slot * 0 + NOTHING, slot * 0
    below = (1 << lane) - 1  # bits of the lanes in front
    for j in gl.static_range(TOP):
        mine = gl.max(order, 2)
        top = gl.max(mine, 1)
        has = mine == top[:, None]
        votes = gl.inline_asm_elementwise(VOTE, "=r,r", [has.to(gl.int32)], gl.int32, is_pure=False, pack=1)
        first = gl.min(gl.where(order == gl.expand_dims(mine, 2), number, 0x7FFFFFFF), 2)
        is_mine = has & ((votes & below) == 0)  # the lowest lane of those that have it
        order = gl.where(gl.expand_dims(is_mine, 2) & (number == gl.expand_dims(first, 2)), NOTHING, order)
        at = gl.max(gl.where(is_mine, first, -1), 1)
        is_slot = slot == j
        best = gl.where(is_slot, gl.convert_layout(top, gl.SliceLayout(1, CANDIDATE))[:, None], best)
        place = gl.where(is_slot, gl.convert_layout(at, gl.SliceLayout(1, CANDIDATE))[:, None], place)
    return best, place


@gluon.jit
def select_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, num_experts, scaling,
    TOP: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, WIDE: gl.constexpr,
    EXPERTS: gl.constexpr, PAIRS: gl.constexpr,
    IS_RENORMALISED: gl.constexpr, HAS_COUNTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program a token. logits fp32 [T, E], bias fp32 [E] -> ids int64, weights fp32 [T, TOP]; adds to counts int32.

    EXPERTS, PAIRS: `layouts`. GROUPS warps, of 32 WIDE experts each.
    """
    MINE: gl.constexpr = gl.SliceLayout(2, EXPERTS)
    OTHERS: gl.constexpr = gl.SliceLayout(3, PAIRS)  # [groups, slots, other groups]
    CANDIDATE: gl.constexpr = gl.SliceLayout(2, OTHERS)
    lane = gl.arange(0, 32, gl.SliceLayout(0, MINE))[None, :]
    wide = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, EXPERTS)))[None, None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, MINE))[:, None]
    number = gl.expand_dims((group * 32 + lane) * WIDE, 2) + wide
    is_real = number < num_experts
    token = gl.program_id(0).to(gl.int64)
    row = logits_ptr + token * num_experts
    shift = gl.load(bias_ptr + number, mask=is_real, other=0.0)  # a weight: the kernel in front may still run
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logit = gl.load(row + number, mask=is_real, other=0.0)
    order = gl.where(is_real, ordered(1.0 / (1.0 + gl.exp(-logit)) + shift), NOTHING)

    own = gl.arange(0, GROUPS, gl.SliceLayout(1, CANDIDATE))[:, None]
    slot = gl.arange(0, SLOTS, gl.SliceLayout(0, CANDIDATE))[None, :] + 0 * own
    best, chosen = best_of_group(order, number, lane + 0 * group, slot, TOP, WIDE, CANDIDATE)
    picked = gl.load(row + chosen, mask=best > NOTHING, other=0.0)  # on the way while they are ranked
    rank = ranks(best, own, slot, GROUPS, PAIRS)
    is_taken = rank < TOP
    weight = 1.0 / (1.0 + gl.exp(-picked))
    if IS_RENORMALISED:
        weight = weight / (gl.sum(gl.sum(gl.where(is_taken, weight, 0.0), 1), 0) + 1e-20)
    gl.store(ids_ptr + token * TOP + rank, chosen.to(gl.int64), mask=is_taken)
    gl.store(weights_ptr + token * TOP + rank, weight * scaling, mask=is_taken)
    if HAS_COUNTS:
        gl.atomic_add(counts_ptr + chosen, chosen * 0 + 1, mask=is_taken)


@gluon.jit
def ranks(best, own, slot, GROUPS: gl.constexpr, PAIRS: gl.constexpr):
    """How many candidates are better than each, [groups, slots]; with equal keys a lower group is.

    Of its own group those in the slots before. NOTHING comes last.
    """
    OTHERS: gl.constexpr = gl.SliceLayout(3, PAIRS)
    key = gl.maximum(best, NOTHING + 1)
    met = gl.convert_layout(key, gl.SliceLayout(0, gl.SliceLayout(0, PAIRS)))
    other = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, OTHERS)))[None, None, :]
    mine = gl.expand_dims(own + 0 * slot, 2)
    bound = gl.expand_dims(key, 2) - (other < mine).to(gl.int32)
    is_better = gl.expand_dims(gl.expand_dims(met, 0), 0) > gl.expand_dims(bound, 3)
    better = gl.sum(is_better.to(gl.int32), 3)
    return slot + gl.sum(gl.where(other == mine, 0, better), 2)
