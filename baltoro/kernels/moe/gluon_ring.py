# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Grouped products with tiled MXFP4 weights for some rows an expert, in Gluon: the copy engine brings all that is read.

For tiles whose products take less time than their weights do to arrive: a unit of weights on its way while one is
worked on is 17 kB a multiprocessor, and the memory of an H200 needs 40 or more. Here a ring of
shared memory holds weights, scale bytes and inputs of several units, and a thread has none of their addresses. A warp
has 16 rows of weights of each of one or two parts of a block, so that a unit's inputs, of 32 rows as many bytes
as 128 rows of weights, are read for 256; at work are the sums of both parts and one half of a unit of one part.
The interpreter does not know Gluon. Launched by `tile_experts`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baltoro.kernels.moe.gluon_parts import FIRST, HALF, SECOND, half_unit, kept, leave


@gluon.jit
def expect(bells, unit, num_units, num_bytes: gl.constexpr, STAGES: gl.constexpr):
    """A copy of a unit is about to be asked for. Copies with one bell would have a barrier between them."""
    mbarrier.expect(bells.index(unit % STAGES), num_bytes, pred=unit < num_units)


@gluon.jit
def fetch_weights(w, s, words, bytes_, word_bells, byte_bells, row_tile, unit, num_units, STAGES: gl.constexpr):
    """Ask for a unit's words and scale bytes; the buffers are free."""
    slot, wanted = unit % STAGES, unit < num_units
    bell, other = word_bells.index(slot), byte_bells.index(slot)
    tma.async_copy_global_to_shared(w, [row_tile, unit * 4, 0], bell, words.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(s, [row_tile, unit * 32], other, bytes_.index(slot), pred=wanted)


@gluon.jit
def fetch_inputs(
    x1, x2, boxes1, boxes2, bells1, bells2, first, unit, num_units, N1: gl.constexpr, N2: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's inputs, both halves at once."""
    slot, wanted = unit % STAGES, unit < num_units
    tma.async_copy_global_to_shared(x1, [unit * 2, first, 0], bells1.index(slot), boxes1.index(slot), pred=wanted)
    if N2:
        other = bells2.index(slot)
        tma.async_copy_global_to_shared(x2, [unit * 2, first + N1, 0], other, boxes2.index(slot), pred=wanted)


@gluon.jit
def read(words, bytes_, at, ROWS: gl.constexpr, WORDS: gl.constexpr, BYTES: gl.constexpr):
    """First and second words and factors of a part of a unit, [ROWS, 8] each, from where the copy engine left them."""
    one, two = gl.split(gl.reshape(words.index(at).load(WORDS), [ROWS, 8, 2]))
    factor = gl.minimum(bytes_.index(at).load(BYTES).to(gl.int32) + 94, 255) << 7
    factor = factor | factor << 16
    factor = gl.reshape(gl.join(factor, factor), [ROWS, 8])
    return one, two, gl.convert_layout(factor, one.type.layout, assert_trivial=True)


@gluon.jit
def begun(
    weights, tiles1, tiles2, at, sums, part: gl.constexpr, PARTS: gl.constexpr, N2: gl.constexpr, A2: gl.constexpr
):
    """The sums, to one part of which a half's products are being added; those of the half before are done."""
    a1, a2, b1, b2 = sums
    inputs1 = tiles1.index(at).permute((1, 0))
    if part == 0:
        a1 = warpgroup_mma(weights, inputs1, a1, is_async=True)
    else:
        b1 = warpgroup_mma(weights, inputs1, b1, is_async=True)
    if N2:
        again, inputs2 = gl.convert_layout(weights, A2, assert_trivial=True), tiles2.index(at).permute((1, 0))
        if part == 0:
            a2 = warpgroup_mma(again, inputs2, a2, is_async=True)
        else:
            b2 = warpgroup_mma(again, inputs2, b2, is_async=True)
    return waited((a1, a2, b1, b2), 1, PARTS, N2)


@gluon.jit
def waited(sums, halves: gl.constexpr, PARTS: gl.constexpr, N2: gl.constexpr):
    """The sums, once the products of no more than so many halves are at work."""
    a1, a2, b1, b2 = sums
    if N2:
        if PARTS == 2:
            a1, a2, b1, b2 = warpgroup_mma_wait(2 * halves, deps=[a1, a2, b1, b2])
        else:
            a1, a2 = warpgroup_mma_wait(2 * halves, deps=[a1, a2])
    else:
        if PARTS == 2:
            a1, b1 = warpgroup_mma_wait(halves, deps=[a1, b1])
        else:
            a1 = warpgroup_mma_wait(halves, deps=[a1])
    return a1, a2, b1, b2


@gluon.jit
def ring_kernel(
    w, s, x1, x2, table_ptr, order_ptr, out_ptr, num_experts, num_units, num_row_tiles, width, beta, linear_beta,
    N1: gl.constexpr, N2: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, IS_FIRST: gl.constexpr, IS_ORDERED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [pairs, width]; grid (blocks of 16 WARPS PARTS weight rows, tiles). Descriptors: w int32 [rows / 8, 4 units,
    32], s uint8 [rows / 8, 32 units], boxes of a block by a unit; x1, x2 of the inputs in order, boxes of
    N1 and N2 rows by two times 64 columns. num_row_tiles of an expert. IS_FIRST: hidden, otherwise parts in the order
    of the pairs, not weighted yet."""
    if PDL and IS_FIRST:
        gdc_launch_dependents()
    ROWS: gl.constexpr = 16 * WARPS
    TILES: gl.constexpr = 2 * WARPS
    SUMS1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N1, 16])
    SUMS2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N2 if N2 else N1, 16])
    A1: gl.constexpr = gl.DotOperandLayout(0, SUMS1, 2)
    A2: gl.constexpr = gl.DotOperandLayout(0, SUMS2, 2)
    W3: gl.constexpr = [[2, 0, 0], [4, 0, 0], [8, 0, 0]] if WARPS == 8 else [[2, 0, 0], [4, 0, 0]]
    W2: gl.constexpr = [[2, 0], [4, 0], [8, 0]] if WARPS == 8 else [[2, 0], [4, 0]]
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0]], [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]], W3, [],
        [TILES, 4, 32],
    )  # fmt: skip
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], W2, [], [TILES, 32]
    )
    block, tile = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table_ptr + tile)
    first = gl.load(table_ptr + gl.num_programs(1) + tile)
    end = gl.load(table_ptr + 2 * gl.num_programs(1) + tile)
    if expert >= num_experts:
        return
    M2: gl.constexpr = N2 if N2 else 8
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    IN_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 3)
    IN_BYTES: gl.constexpr = gl.NVMMASharedLayout(32, 8, 2)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, PARTS * TILES, 4, 32], IN_WORDS)
    bytes_ = gl.allocate_shared_memory(gl.uint8, [STAGES, PARTS * TILES, 32], IN_BYTES)
    boxes1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, N1, HALF], BOX)
    boxes2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES if N2 else 1, 2, M2, HALF], BOX)
    part_words = words._reinterpret(gl.int32, [STAGES * PARTS, TILES, 4, 32], IN_WORDS)
    part_bytes = bytes_._reinterpret(gl.uint8, [STAGES * PARTS, TILES, 32], IN_BYTES)
    tiles1 = boxes1._reinterpret(gl.bfloat16, [STAGES * 2, N1, HALF], TILE)
    tiles2 = boxes2._reinterpret(gl.bfloat16, [STAGES * 2 if N2 else 2, M2, HALF], TILE)
    word_bells = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    byte_bells = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bells1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bells2 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(word_bells.index(stage), count=1)
        mbarrier.init(byte_bells.index(stage), count=1)
        mbarrier.init(bells1.index(stage), count=1)
        if N2:
            mbarrier.init(bells2.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    row_tile = expert * num_row_tiles + block * (PARTS * TILES)
    for stage in gl.static_range(STAGES - 1):
        expect(word_bells, stage, num_units, PARTS * TILES * 512, STAGES)
        expect(byte_bells, stage, num_units, PARTS * TILES * 32, STAGES)
        expect(bells1, stage, num_units, N1 * 256, STAGES)
        if N2:
            expect(bells2, stage, num_units, N2 * 256, STAGES)
    for stage in gl.static_range(STAGES - 1):
        fetch_weights(w, s, words, bytes_, word_bells, byte_bells, row_tile, stage, num_units, STAGES)
    if PDL and not IS_FIRST:
        gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        fetch_inputs(x1, x2, boxes1, boxes2, bells1, bells2, first, stage, num_units, N1, N2, STAGES)
    gl.thread_barrier()  # else the compiler has one in each round of the loop
    sums1, sums2 = gl.zeros([ROWS, N1], gl.float32, SUMS1), gl.zeros([ROWS, N2 if N2 else N1], gl.float32, SUMS2)
    sums = (sums1, sums2, sums1, sums2)
    high = gl.zeros([ROWS, HALF], gl.bfloat16, A1)  # stands for what the last step left; nothing reads it
    gl.assume(num_units > 0)
    for unit in range(num_units):
        slot, following = unit % STAGES, unit + STAGES - 1
        mbarrier.wait(word_bells.index(slot), (unit // STAGES) & 1)
        mbarrier.wait(byte_bells.index(slot), (unit // STAGES) & 1)
        mbarrier.wait(bells1.index(slot), (unit // STAGES) & 1)
        if N2:
            mbarrier.wait(bells2.index(slot), (unit // STAGES) & 1)
        for part in gl.static_range(PARTS):
            one, two, factor = read(part_words, part_bytes, slot * PARTS + part, ROWS, WORDS, BYTES)
            low = half_unit(one, two, factor, FIRST, A1)
            sums = begun(low, tiles1, tiles2, slot * 2, sums, part, PARTS, N2, A2)
            kept(high, A1)
            if part == 0:
                gl.thread_barrier()  # all have done with the unit before
                expect(word_bells, following, num_units, PARTS * TILES * 512, STAGES)
                expect(byte_bells, following, num_units, PARTS * TILES * 32, STAGES)
                expect(bells1, following, num_units, N1 * 256, STAGES)
                if N2:
                    expect(bells2, following, num_units, N2 * 256, STAGES)
                fetch_weights(w, s, words, bytes_, word_bells, byte_bells, row_tile, following, num_units, STAGES)
                fetch_inputs(x1, x2, boxes1, boxes2, bells1, bells2, first, following, num_units, N1, N2, STAGES)
            high = half_unit(one, two, factor, SECOND, A1)
            sums = begun(high, tiles1, tiles2, slot * 2 + 1, sums, part, PARTS, N2, A2)
            kept(low, A1)
    sums = waited(sums, 0, PARTS, N2)
    kept(high, A1)
    gl.thread_barrier()  # all have done with the inputs, whose memory may serve again
    for part in gl.static_range(PARTS):
        to = (out_ptr, order_ptr, end, block * PARTS + part, width, beta, linear_beta)
        leave(sums[2 * part], first, to, N1, ROWS, WARPS, KIND, IS_FIRST, IS_ORDERED)
        if N2:
            leave(sums[2 * part + 1], first + N1, to, N2, ROWS, WARPS, KIND, IS_FIRST, IS_ORDERED)
