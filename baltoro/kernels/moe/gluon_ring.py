# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Grouped products with tiled MXFP4 weights for some rows an expert, in Gluon: the copy engine brings all that is read.

As `gluon_groups`, for tiles whose products take less time than their weights do to arrive: there a unit's weights are
on their way while one is worked on, 17 kB a multiprocessor, where the memory of an H200 needs 40 or more. Here a ring
of shared memory holds weights, scale bytes and inputs of several units, and a thread has none of their addresses. A
warp has 16 rows of weights of each of one, two or four parts of a block, so that a unit's inputs, of 32 rows as many
bytes as 128 rows of weights, are read for 256; at work are the sums of all parts and one half of a unit of one part.
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

from baltoro.kernels.moe.gluon_groups import FIRST, HALF, SECOND, half_unit, kept, leave


@gluon.jit
def expect(word_bells, byte_bells, bells, unit, num_units, BLOCK: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    """Copies of a unit are about to be asked for. Those with one bell would have a barrier between them."""
    slot, wanted = unit % STAGES, unit < num_units
    mbarrier.expect(word_bells.index(slot), BLOCK * 512, pred=wanted)
    mbarrier.expect(byte_bells.index(slot), BLOCK * 32, pred=wanted)
    mbarrier.expect(bells.index(slot), N * 256, pred=wanted)


@gluon.jit
def fetch_weights(w, s, words, bytes_, word_bells, byte_bells, row_tile, unit, num_units, STAGES: gl.constexpr):
    """Ask for a unit's words and scale bytes; the buffers are free."""
    slot, wanted = unit % STAGES, unit < num_units
    bell, other = word_bells.index(slot), byte_bells.index(slot)
    tma.async_copy_global_to_shared(w, [row_tile, unit * 4, 0], bell, words.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(s, [row_tile, unit * 32], other, bytes_.index(slot), pred=wanted)


@gluon.jit
def fetch_inputs(x, boxes, bells, first, unit, num_units, STAGES: gl.constexpr):
    """Ask for a unit's inputs, both halves at once."""
    slot, wanted = unit % STAGES, unit < num_units
    tma.async_copy_global_to_shared(x, [unit * 2, first, 0], bells.index(slot), boxes.index(slot), pred=wanted)


@gluon.jit
def read(words, bytes_, at, ROWS: gl.constexpr, WORDS: gl.constexpr, BYTES: gl.constexpr):
    """First and second words and factors of a part of a unit, [ROWS, 8] each, from where the copy engine left them."""
    one, two = gl.split(gl.reshape(words.index(at).load(WORDS), [ROWS, 8, 2]))
    factor = gl.minimum(bytes_.index(at).load(BYTES).to(gl.int32) + 94, 255) << 7
    factor = factor | factor << 16
    factor = gl.reshape(gl.join(factor, factor), [ROWS, 8])
    return one, two, gl.convert_layout(factor, one.type.layout, assert_trivial=True)


@gluon.jit
def begun(weights, tiles, at, sums, part: gl.constexpr, PARTS: gl.constexpr):
    """The sums, to one part of which a half's products are being added; those of the half before are done."""
    a, b, c, d = sums
    inputs = tiles.index(at).permute((1, 0))
    if part == 0:
        a = warpgroup_mma(weights, inputs, a, is_async=True)
    elif part == 1:
        b = warpgroup_mma(weights, inputs, b, is_async=True)
    elif part == 2:
        c = warpgroup_mma(weights, inputs, c, is_async=True)
    else:
        d = warpgroup_mma(weights, inputs, d, is_async=True)
    return waited((a, b, c, d), 1, PARTS)


@gluon.jit
def waited(sums, halves: gl.constexpr, PARTS: gl.constexpr):
    """The sums, once the products of no more than so many halves are at work."""
    a, b, c, d = sums
    if PARTS == 4:
        a, b, c, d = warpgroup_mma_wait(halves, deps=[a, b, c, d])
    elif PARTS == 2:
        a, b = warpgroup_mma_wait(halves, deps=[a, b])
    else:
        a = warpgroup_mma_wait(halves, deps=[a])
    return a, b, c, d


@gluon.jit
def tile_of(
    w, s, x, out, order, row_tile, first, end, block, num_units, width, beta, linear_beta,
    N: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    IS_FIRST: gl.constexpr, IS_ORDERED: gl.constexpr, AHEAD: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Weights from `row_tile` on times rows first .. end - 1, N at most."""
    ROWS: gl.constexpr = 16 * WARPS
    TILES: gl.constexpr = 2 * WARPS
    BLOCK: gl.constexpr = TILES * PARTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    W3: gl.constexpr = [[2, 0, 0], [4, 0, 0], [8, 0, 0]] if WARPS == 8 else [[2, 0, 0], [4, 0, 0]]
    W2: gl.constexpr = [[2, 0], [4, 0], [8, 0]] if WARPS == 8 else [[2, 0], [4, 0]]
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0]], [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]], W3, [],
        [TILES, 4, 32],
    )  # fmt: skip
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], W2, [], [TILES, 32]
    )
    IN_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 3)
    IN_BYTES: gl.constexpr = gl.NVMMASharedLayout(32, 8, 2)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, 4, 32], IN_WORDS)
    bytes_ = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, 32], IN_BYTES)
    boxes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, N, HALF], gl.NVMMASharedLayout(128, 16, 3))
    part_words = words._reinterpret(gl.int32, [STAGES * PARTS, TILES, 4, 32], IN_WORDS)
    part_bytes = bytes_._reinterpret(gl.uint8, [STAGES * PARTS, TILES, 32], IN_BYTES)
    tiles = boxes._reinterpret(gl.bfloat16, [STAGES * 2, N, HALF], gl.NVMMASharedLayout(128, 16, 2))
    word_bells = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    byte_bells = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bells = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(word_bells.index(stage), count=1)
        mbarrier.init(byte_bells.index(stage), count=1)
        mbarrier.init(bells.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for stage in gl.static_range(STAGES - 1):
        expect(word_bells, byte_bells, bells, stage, num_units, BLOCK, N, STAGES)
    for stage in gl.static_range(STAGES - 1):
        fetch_weights(w, s, words, bytes_, word_bells, byte_bells, row_tile, stage, num_units, STAGES)
    if WAITS:
        gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        fetch_inputs(x, boxes, bells, first, stage, num_units, STAGES)
    gl.thread_barrier()  # else the compiler has one in each round of the loop
    none = gl.zeros([ROWS, N], gl.float32, SUMS)
    sums = (none, none, none, none)
    high = gl.zeros([ROWS, HALF], gl.bfloat16, A)  # stands for what the last step left; nothing reads it
    gl.assume(num_units > 0)
    for unit in range(num_units):
        slot, following = unit % STAGES, unit + STAGES - 1
        mbarrier.wait(word_bells.index(slot), (unit // STAGES) & 1)
        mbarrier.wait(byte_bells.index(slot), (unit // STAGES) & 1)
        mbarrier.wait(bells.index(slot), (unit // STAGES) & 1)
        at = slot * PARTS
        one, two, factor = read(part_words, part_bytes, at, ROWS, WORDS, BYTES)
        for part in gl.static_range(PARTS):
            if AHEAD and part + 1 < PARTS:
                next_one, next_two, next_factor = read(part_words, part_bytes, at + (part + 1), ROWS, WORDS, BYTES)
            low = half_unit(one, two, factor, FIRST, A)
            sums = begun(low, tiles, slot * 2, sums, part, PARTS)
            kept(high, A)
            if part == 0:
                gl.thread_barrier()  # all have done with the unit before
                expect(word_bells, byte_bells, bells, following, num_units, BLOCK, N, STAGES)
                fetch_weights(w, s, words, bytes_, word_bells, byte_bells, row_tile, following, num_units, STAGES)
                fetch_inputs(x, boxes, bells, first, following, num_units, STAGES)
            high = half_unit(one, two, factor, SECOND, A)
            sums = begun(high, tiles, slot * 2 + 1, sums, part, PARTS)
            kept(low, A)
            if AHEAD and part + 1 < PARTS:
                one, two, factor = next_one, next_two, next_factor
            elif part + 1 < PARTS:
                one, two, factor = read(part_words, part_bytes, at + (part + 1), ROWS, WORDS, BYTES)
    sums = waited(sums, 0, PARTS)
    kept(high, A)
    gl.thread_barrier()  # all have done with the inputs, whose memory may serve again
    for part in gl.static_range(PARTS):
        to = (out, order, end, block * PARTS + part, width, beta, linear_beta)
        leave(sums[part], first, to, N, ROWS, WARPS, KIND, IS_FIRST, IS_ORDERED)


@gluon.jit
def ring_kernel(
    w, s, x, x_short, table_ptr, order_ptr, out_ptr, num_experts, num_units, num_row_tiles, width, beta, linear_beta,
    N: gl.constexpr, SHORT: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, IS_FIRST: gl.constexpr, IS_ORDERED: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [pairs, width]; grid (blocks of 16 WARPS PARTS weight rows, tiles of N rows). Descriptors: w int32 [rows / 8,
    4 units, 32], s uint8 [rows / 8, 32 units], boxes of a block by a unit; x as `gluon_groups.grouped_kernel` has x1,
    as everything else. num_row_tiles of an expert. SHORT: no more than so many rows are a tile of so many, by boxes of
    x_short; or 0. AHEAD: a part's words are read while the one before is worked on."""
    if PDL and IS_FIRST:
        gdc_launch_dependents()
    WAITS: gl.constexpr = PDL and not IS_FIRST
    block, tile = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table_ptr + tile)
    first = gl.load(table_ptr + gl.num_programs(1) + tile)
    end = gl.load(table_ptr + 2 * gl.num_programs(1) + tile)
    if expert >= num_experts:
        return
    row_tile = expert * num_row_tiles + block * (2 * WARPS * PARTS)
    if SHORT:
        if end - first <= SHORT:
            tile_of(
                w, s, x_short, out_ptr, order_ptr, row_tile, first, end, block, num_units, width, beta, linear_beta,
                SHORT, WARPS, PARTS, STAGES, KIND, IS_FIRST, IS_ORDERED, AHEAD, WAITS,
            )  # fmt: skip
        else:
            tile_of(
                w, s, x, out_ptr, order_ptr, row_tile, first, end, block, num_units, width, beta, linear_beta,
                N, WARPS, PARTS, STAGES, KIND, IS_FIRST, IS_ORDERED, AHEAD, WAITS,
            )  # fmt: skip
    else:
        tile_of(
            w, s, x, out_ptr, order_ptr, row_tile, first, end, block, num_units, width, beta, linear_beta,
            N, WARPS, PARTS, STAGES, KIND, IS_FIRST, IS_ORDERED, AHEAD, WAITS,
        )  # fmt: skip
