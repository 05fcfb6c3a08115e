# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Grouped products with tiled MXFP4 weights in Gluon: half a unit is turned into numbers while wgmma reads the other.

As `tile_kernels.first_product` and `second_of_groups` with inputs in order (`tile_moves.arrange`, runs of two). In
Triton a program turns all weights of a unit into numbers, multiplies, and waits for the product before it begins
again: two programs on a multiprocessor spend 1380 clocks a unit of 128 x 128 weights and 80 rows (H200), of which the
conversion needs about 530 of the instruction slots and wgmma about as many. Here 64 columns are converted while the
product of the 64 before them is at work; inputs come by the copy engine, weights into registers a unit ahead.
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

from baltoro.kernels.moe.weave_text import conversion, registers

UNIT: gl.constexpr = gl.constexpr(128)
HALF: gl.constexpr = gl.constexpr(64)
FIRST: gl.constexpr = gl.constexpr(conversion((0, 1, 4, 5)))
SECOND: gl.constexpr = gl.constexpr(conversion((2, 3, 6, 7)))
REGISTERS: gl.constexpr = gl.constexpr(registers(4))


@gluon.jit
def assembled(a0, a1, a2, a3, b0, b1, b2, b3, A: gl.constexpr):
    """Numbers of two words, by pair and lane, each [rows, 8] -> wgmma's operand [rows, 64]; no thread sends any."""
    rows: gl.constexpr = a0.shape[0]
    # [rows, 8, word of two, pair, lane]; the first dimension of 8 is (block of the unit) (two words)
    value = gl.join(gl.join(gl.join(a0, b0), gl.join(a2, b2)), gl.join(gl.join(a1, b1), gl.join(a3, b3)))
    value = gl.permute(gl.reshape(value, [rows, 4, 4, 2, 2]), [0, 2, 3, 1, 4])
    return gl.convert_layout(gl.reshape(value, [rows, 64]), A, assert_trivial=True)


@gluon.jit
def half_unit(one, two, factor, TEXT: gl.constexpr, A: gl.constexpr):
    """Two pairs of both words as an operand: FIRST or SECOND."""
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        TEXT, REGISTERS, [one, two, factor], dtype=(gl.bfloat16,) * 8, is_pure=False, pack=1
    )
    return assembled(a0, a1, a2, a3, b0, b1, b2, b3, A)


@gluon.jit
def kept(value, A: gl.constexpr):
    """Itself: an operand's registers stay its own up to here, that is, until what reads them has been waited for."""
    return gl.inline_asm_elementwise("", "=r,0", [value], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def places(num_units, WORDS: gl.constexpr, BYTES: gl.constexpr, BLOCK: gl.constexpr):
    """Where a unit's words [BLOCK, 16] and scale bytes [BLOCK, 4] lie."""
    i, word = gl.arange(0, BLOCK, gl.SliceLayout(1, WORDS)), gl.arange(0, 16, gl.SliceLayout(0, WORDS))
    words_at = ((i // 8) * num_units * 128 + i % 8 * 16)[:, None] + word[None, :]
    i, byte = gl.arange(0, BLOCK, gl.SliceLayout(1, BYTES)), gl.arange(0, 4, gl.SliceLayout(0, BYTES))
    return words_at, ((i // 8) * num_units * 32 + i % 8 * 4)[:, None] + byte[None, :]


@gluon.jit
def asked(packed, scales, unit, num_units, words_at, scale_at):
    """A unit's words and scale bytes; those of the last unit again beyond it."""
    unit = gl.minimum(unit, num_units - 1)
    return gl.load(packed + (words_at + unit * 128)), gl.load(scales + (scale_at + unit * 32))


@gluon.jit
def fetch(x1, x2, boxes1, boxes2, bells, first, unit, num_units, N1: gl.constexpr, N2: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Ask for a unit's inputs, both halves at once; the buffers are free."""
    slot, wanted = unit % STAGES, unit < num_units
    bell = bells.index(slot)
    mbarrier.expect(bell, (N1 + N2) * 256, pred=wanted)
    tma.async_copy_global_to_shared(x1, [unit * 2, first, 0], bell, boxes1.index(slot), pred=wanted)
    if N2:
        tma.async_copy_global_to_shared(x2, [unit * 2, first + N1, 0], bell, boxes2.index(slot), pred=wanted)


@gluon.jit
def begun(weights, tiles1, tiles2, at, sums1, sums2, N2: gl.constexpr, A2: gl.constexpr):
    """The sums, to which a half's products are being added; those of the half before are done."""
    sums1 = warpgroup_mma(weights, tiles1.index(at).permute((1, 0)), sums1, is_async=True)
    if N2:
        again = gl.convert_layout(weights, A2, assert_trivial=True)
        sums2 = warpgroup_mma(again, tiles2.index(at).permute((1, 0)), sums2, is_async=True)
        sums1, sums2 = warpgroup_mma_wait(2, deps=[sums1, sums2])
    else:
        sums1 = warpgroup_mma_wait(1, deps=[sums1])
    return sums1, sums2


@gluon.jit
def activated(gate, up, beta, linear_beta, KIND: gl.constexpr):
    """As `tile_kernels.activated`."""
    share = 1.0 / (1.0 + gl.exp(-gate))
    if KIND == 0:
        out = gate * share * up
    else:
        out = beta * bounded(gate / beta) * share
        if KIND == 1:
            out = out * (linear_beta * bounded(up / linear_beta))
        else:
            out = out * up
    return out


@gluon.jit
def bounded(x):
    """tanh."""
    return 2.0 / (1.0 + gl.exp(-2.0 * x)) - 1.0


@gluon.jit
def leave(
    sums, first, to, N: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr,
    IS_FIRST: gl.constexpr, IS_ORDERED: gl.constexpr,
):  # fmt: skip
    """Sums [BLOCK, N] to rows from `first` on of out [pairs, width], activated; or, not IS_FIRST, where the pairs are.
    IS_ORDERED: columns as `tile_moves.arrange` would put them for the second product."""
    out, order, end, block, width, beta, linear_beta = to
    AT: gl.constexpr = gl.BlockedLayout([2 if IS_ORDERED else 8, 1], [8, 4], [1, WARPS], [0, 1])
    row = first + gl.arange(0, N, gl.SliceLayout(0, AT))
    if IS_FIRST:
        both = gl.permute(gl.reshape(sums, [BLOCK // 16, 2, 8, N]), [0, 2, 3, 1])
        gate, up = gl.split(both)
        value = activated(gate * 4294967296.0, up * 4294967296.0, beta, linear_beta, KIND)
        value = gl.convert_layout(gl.reshape(value.to(out.dtype.element_ty), [BLOCK // 2, N]), AT)
        column = block * (BLOCK // 2) + gl.arange(0, BLOCK // 2, gl.SliceLayout(1, AT))
        if IS_ORDERED:
            place = column % 32 // 16 * 64 + column % 16 // 2 * 8 + column % 128 // 32 * 2 + column % 2
            column = gl.max_contiguous(gl.multiple_of(column // 128 * 128 + place, 2), 2)
        at, is_there = (
            row.to(gl.int64)[None, :] * width + column[:, None],
            (row < end)[None, :] & (column >= 0)[:, None],
        )
    else:
        value = gl.convert_layout((sums * 4294967296.0).to(out.dtype.element_ty), AT)
        column = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, AT))
        pair = gl.load(order + row, mask=row < end, other=0)
        at, is_there = pair[None, :] * width + column[:, None], (row < end)[None, :] & (column < width)[:, None]
    gl.store(out + at, value, mask=is_there)


@gluon.jit
def grouped_kernel(
    x1, x2, table_ptr, order_ptr, packed_ptr, scales_ptr, out_ptr,
    num_experts, num_units, num_row_tiles, width, beta, linear_beta,
    N1: gl.constexpr, N2: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, IS_FIRST: gl.constexpr, IS_ORDERED: gl.constexpr,
):  # fmt: skip
    """out [pairs, width]; grid (blocks of weight rows, tiles). x1, x2: descriptors of the inputs in order, boxes of N1
    and N2 rows by two times 64 columns. packed int32, scales uint8, num_row_tiles of an expert.
    IS_FIRST: hidden, otherwise parts in the order of the pairs, not weighted yet."""
    SUMS1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N1, 16])
    SUMS2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N2 if N2 else N1, 16])
    A1: gl.constexpr = gl.DotOperandLayout(0, SUMS1, 2)
    A2: gl.constexpr = gl.DotOperandLayout(0, SUMS2, 2)
    W8: gl.constexpr = [[16, 0], [32, 0], [64, 0]]
    W4: gl.constexpr = [[16, 0], [32, 0]]
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], W8 if WARPS == 8 else W4, [], [BLOCK, 16]
    )
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], W8 if WARPS == 8 else W4, [], [BLOCK, 4]
    )
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    block, tile = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table_ptr + tile).to(gl.int64)
    first = gl.load(table_ptr + gl.num_programs(1) + tile)
    end = gl.load(table_ptr + 2 * gl.num_programs(1) + tile)
    if expert >= num_experts:
        return
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    M2: gl.constexpr = N2 if N2 else 8
    boxes1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, N1, HALF], BOX)
    boxes2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES if N2 else 1, 2, M2, HALF], BOX)
    tiles1 = boxes1._reinterpret(gl.bfloat16, [STAGES * 2, N1, HALF], TILE)
    tiles2 = boxes2._reinterpret(gl.bfloat16, [STAGES * 2 if N2 else 2, M2, HALF], TILE)
    bells = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(STAGES):
        mbarrier.init(bells.index(one), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for unit in gl.static_range(STAGES - 1):
        fetch(x1, x2, boxes1, boxes2, bells, first, unit, num_units, N1, N2, STAGES)
    words_at, scale_at = places(num_units, WORDS, BYTES, BLOCK)
    start = (expert * num_row_tiles + block * (BLOCK // 8)) * num_units
    packed, scales = packed_ptr + start * 128, scales_ptr + start * 32
    words, scale = asked(packed, scales, 0, num_units, words_at, scale_at)
    sums1, sums2 = gl.zeros([BLOCK, N1], gl.float32, SUMS1), gl.zeros([BLOCK, N2 if N2 else N1], gl.float32, SUMS2)
    one, two = gl.split(gl.reshape(words, [BLOCK, 8, 2]))
    high = half_unit(one, two, one, FIRST, A1)  # stands for what the last step left; nothing reads it
    gl.assume(num_units > 0)
    for unit in range(num_units):
        slot = unit % STAGES
        factor = gl.minimum(scale.to(gl.int32) + 94, 255) << 7
        factor = factor | factor << 16
        one, two = gl.split(gl.reshape(words, [BLOCK, 8, 2]))
        factor = gl.convert_layout(
            gl.reshape(gl.join(factor, factor), [BLOCK, 8]), one.type.layout, assert_trivial=True
        )
        low = half_unit(one, two, factor, FIRST, A1)
        mbarrier.wait(bells.index(slot), (unit // STAGES) & 1)
        sums1, sums2 = begun(low, tiles1, tiles2, slot * 2, sums1, sums2, N2, A2)
        kept(high, A1)
        gl.thread_barrier()  # all have done with the unit before
        fetch(x1, x2, boxes1, boxes2, bells, first, unit + STAGES - 1, num_units, N1, N2, STAGES)
        words, scale = asked(packed, scales, unit + 1, num_units, words_at, scale_at)
        high = half_unit(one, two, factor, SECOND, A1)
        sums1, sums2 = begun(high, tiles1, tiles2, slot * 2 + 1, sums1, sums2, N2, A2)
        kept(low, A1)
    if N2:
        sums1, sums2 = warpgroup_mma_wait(0, deps=[sums1, sums2])
    else:
        sums1 = warpgroup_mma_wait(0, deps=[sums1])
    kept(high, A1)
    gl.thread_barrier()  # all have done with the inputs, whose memory may serve again
    to = (out_ptr, order_ptr, end, block, width, beta, linear_beta)
    leave(sums1, first, to, N1, BLOCK, WARPS, KIND, IS_FIRST, IS_ORDERED)
    if N2:
        leave(sums2, first + N1, to, N2, BLOCK, WARPS, KIND, IS_FIRST, IS_ORDERED)
