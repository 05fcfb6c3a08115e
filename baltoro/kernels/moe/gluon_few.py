# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Grouped products with tiled MXFP4 weights for few rows an expert, in Gluon: no shared memory and no barrier.

As `tile_kernels.first_product` and `second_of_groups` in tiles of N = 8 rows. A thread of mma.sync holds a block
of 32 columns of its rows of weights, and, columns in the order of `tile_moves.arrange` for runs of two, the same block
of its row of the inputs: both come from memory as they lie, 16 bytes at a time, into the registers that the instruction
reads. A warp has 64 rows of weights, four tiles of 16: as soon as one is converted, its next words are asked for in the
same registers, so that three quarters of a unit or more are always on their way. Per unit of 128 x 128 weights Triton's
form has 596 instructions for two warps, of which 61 put the inputs' registers in pairs and 32 pass shared memory.
The interpreter does not know Gluon. Launched by `tile_experts`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baltoro.kernels.moe.gluon_parts import FIRST, SECOND, activated, half_unit

N: gl.constexpr = gl.constexpr(8)


@gluon.jit
def columns_of(x, row, unit, half: gl.constexpr, width, INPUTS: gl.constexpr, B: gl.constexpr, IS_WHOLE: gl.constexpr):
    """Halves of a unit's four blocks of N rows, [N, 64] -> [64, N] in the order of the positions."""
    place = gl.arange(0, 64, gl.SliceLayout(0, INPUTS))
    column = unit * 128 + (place // 16 * 32 + half * 16 + place % 16)
    if IS_WHOLE:
        value = gl.load(x + (row[:, None] + column[None, :]))
    else:
        is_there = (row >= 0)[:, None] & (column < width)[None, :]
        value = gl.load(x + (row[:, None] + column[None, :]), mask=is_there, other=0.0)
    value = gl.permute(gl.reshape(value, [N, 4, 4, 2, 2]), [2, 3, 1, 4, 0])
    return gl.convert_layout(gl.reshape(value, [64, N]), B, assert_trivial=True)


@gluon.jit
def asked(words, scales, words_at, scale_at, num_units, m: gl.constexpr):
    """Words and scale bytes of a unit's tile m, 16 rows a warp."""
    return gl.load(words + (words_at + m * num_units * 256)), gl.load(scales + (scale_at + m * num_units * 64))


@gluon.jit
def step(words, scale, low_x, high_x, sums, ROWS: gl.constexpr, A: gl.constexpr):
    """sums [ROWS, N] += a unit of 16 rows a warp, converted."""
    factor = gl.minimum(scale.to(gl.int32) + 94, 255) << 7
    factor = factor | factor << 16
    one, two = gl.split(gl.reshape(words, [ROWS, 8, 2]))
    factor = gl.reshape(gl.join(factor, factor), [ROWS, 8])
    factor = gl.convert_layout(factor, one.type.layout, assert_trivial=True)
    sums = mma_v2(half_unit(one, two, factor, FIRST, A), low_x, sums)
    return mma_v2(half_unit(one, two, factor, SECOND, A), high_x, sums)


@gluon.jit
def hidden_of(sums, beta, linear_beta, WARPS: gl.constexpr, KIND: gl.constexpr):
    """Rows 8 of the gate, 8 up -> [WARPS, 8, N] of `hidden`: warp, column, row of the inputs."""
    gate, up = gl.split(gl.permute(gl.reshape(sums, [WARPS, 2, 8, N]), [0, 2, 3, 1]))
    return activated(gate * 4294967296.0, up * 4294967296.0, beta, linear_beta, KIND)


@gluon.jit
def largest_of(value):
    """[WARPS, 8 columns, N] -> [WARPS, N]."""
    return gl.max(gl.abs(value), axis=1)


@gluon.jit
def rounded(x, largest):
    """`tile_moves.rounded_to_mxfp8`."""
    bits = gl.cast(largest, gl.int32, bitcast=True)
    power = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.maximum(power + 127, 0)
    small = gl.abs(x * gl.cast((254 - byte) << 23, gl.float32, bitcast=True))
    step = gl.maximum((gl.cast(small, gl.int32, bitcast=True) >> 23) - 127 - 3, -9)
    magic = gl.cast(((step + 23 + 127) << 23) | 0x400000, gl.float32, bitcast=True)
    small = (small + magic) - magic
    scale = gl.cast(gl.where(byte > 0, byte << 23, 0x400000), gl.float32, bitcast=True)
    return gl.where(x < 0, -small, small) * scale


@gluon.jit
def store(value, out, place, live, column, width):
    """value [columns, N] to out[place of the row, column], rows that are `live`."""
    at = out + (place[None, :] * width + column[:, None])
    gl.store(at, value.to(out.dtype.element_ty), mask=(live > 0)[None, :] & (column < width)[:, None])


@gluon.jit
def leave(
    sums, out, order, block, first, end, width, beta, linear_beta, WARPS: gl.constexpr, KIND: gl.constexpr,
    IS_FIRST: gl.constexpr, IS_ROUNDED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Four tiles of sums [16 WARPS, N] to their rows of `out`, activated, or to where the pairs are."""
    if IS_FIRST:
        out0, out1 = (
            hidden_of(sums[0], beta, linear_beta, WARPS, KIND),
            hidden_of(sums[1], beta, linear_beta, WARPS, KIND),
        )
        out2, out3 = (
            hidden_of(sums[2], beta, linear_beta, WARPS, KIND),
            hidden_of(sums[3], beta, linear_beta, WARPS, KIND),
        )
        if IS_ROUNDED:  # 32 columns are a warp's
            largest = gl.maximum(largest_of(out0), largest_of(out1))
            largest = gl.maximum(largest, gl.maximum(largest_of(out2), largest_of(out3)))
            largest = gl.expand_dims(largest, 1)
            out0, out1 = rounded(out0, largest), rounded(out1, largest)
            out2, out3 = rounded(out2, largest), rounded(out3, largest)
        outs = (out0, out1, out2, out3)
    else:
        outs = (sums[0] * 4294967296.0, sums[1] * 4294967296.0, sums[2] * 4294967296.0, sums[3] * 4294967296.0)
    LAST: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0]) if IS_FIRST else SUMS
    RUN: gl.constexpr = 8 if IS_FIRST else 16
    n = gl.arange(0, N, gl.SliceLayout(0, LAST))
    i = gl.arange(0, RUN * WARPS, gl.SliceLayout(1, LAST))
    column, live = block * (4 * RUN * WARPS) + i // RUN * (4 * RUN) + i % RUN, end - (first + n)
    if IS_FIRST:
        place = (first + n).to(gl.int64)
    else:
        place = gl.load(order + (first + n), mask=live > 0, other=0)
    for m in gl.static_range(4):
        value = gl.reshape(outs[m], [RUN * WARPS, N])
        store(gl.convert_layout(value, LAST), out, place, live, column + m * RUN, width)


@gluon.jit
def starts(num_units, WORDS: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr):
    """Where the first tiles' words and scale bytes of a unit lie: 64 rows a warp, 16 a tile of the instruction, the
    next tile two tiles of the layout further."""
    i, word = gl.arange(0, ROWS, gl.SliceLayout(1, WORDS)), gl.arange(0, 16, gl.SliceLayout(0, WORDS))
    words_at = ((i // 16 * 8 + i % 16 // 8) * num_units * 128 + i % 8 * 16)[:, None] + word[None, :]
    i, byte = gl.arange(0, ROWS, gl.SliceLayout(1, BYTES)), gl.arange(0, 4, gl.SliceLayout(0, BYTES))
    return words_at, ((i // 16 * 8 + i % 16 // 8) * num_units * 32 + i % 8 * 4)[:, None] + byte[None, :]


@gluon.jit
def tile_of(
    x, order, packed, scales, start, block, first, end, num_active, num_units, stride, x_width, to,
    WARPS: gl.constexpr, KIND: gl.constexpr, IS_FIRST: gl.constexpr, IS_WHOLE: gl.constexpr,
    IS_ROUNDED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Weights from unit `start` on times rows first .. end - 1, N at most; their places in `to`."""
    ROWS: gl.constexpr = 16 * WARPS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    W: gl.constexpr = [] if WARPS == 1 else ([[16, 0]] if WARPS == 2 else [[16, 0], [32, 0]])
    NONE: gl.constexpr = [] if WARPS == 1 else ([[0, 0]] if WARPS == 2 else [[0, 0], [0, 0]])
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], W, [], [ROWS, 16]
    )
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], W, [], [ROWS, 4]
    )
    INPUTS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], NONE, [], [N, 64]
    )
    words_at, scale_at = starts(num_units, WORDS, BYTES, ROWS)
    w, s = packed + start * 128, scales + start * 32
    words0, scale0 = asked(w, s, words_at, scale_at, num_units, 0)
    words1, scale1 = asked(w, s, words_at, scale_at, num_units, 1)
    words2, scale2 = asked(w, s, words_at, scale_at, num_units, 2)
    words3, scale3 = asked(w, s, words_at, scale_at, num_units, 3)
    if PDL and not IS_FIRST:
        gdc_wait()
    place = first + gl.arange(0, N, gl.SliceLayout(1, INPUTS))
    place = gl.where(place < end, place, first)  # what stands beyond an expert's last row is not stored
    if IS_FIRST:
        row = gl.load(order + place) // num_active * stride
    else:
        row = place.to(gl.int64) * stride
    sums0, sums1 = gl.zeros([ROWS, N], gl.float32, SUMS), gl.zeros([ROWS, N], gl.float32, SUMS)
    sums2, sums3 = gl.zeros([ROWS, N], gl.float32, SUMS), gl.zeros([ROWS, N], gl.float32, SUMS)
    gl.assume(num_units > 0)
    for unit in range(num_units):
        following = gl.minimum(unit + 1, num_units - 1)
        low = columns_of(x, row, unit, 0, x_width, INPUTS, B, IS_WHOLE)
        high = columns_of(x, row, unit, 1, x_width, INPUTS, B, IS_WHOLE)
        w, s = packed + (start + following) * 128, scales + (start + following) * 32
        sums0 = step(words0, scale0, low, high, sums0, ROWS, A)
        words0, scale0 = asked(w, s, words_at, scale_at, num_units, 0)
        sums1 = step(words1, scale1, low, high, sums1, ROWS, A)
        words1, scale1 = asked(w, s, words_at, scale_at, num_units, 1)
        sums2 = step(words2, scale2, low, high, sums2, ROWS, A)
        words2, scale2 = asked(w, s, words_at, scale_at, num_units, 2)
        sums3 = step(words3, scale3, low, high, sums3, ROWS, A)
        words3, scale3 = asked(w, s, words_at, scale_at, num_units, 3)
    out, width, beta, linear_beta = to
    leave(
        (sums0, sums1, sums2, sums3), out, order, block, first, end, width, beta, linear_beta,
        WARPS, KIND, IS_FIRST, IS_ROUNDED, SUMS,
    )  # fmt: skip


@gluon.jit
def few_kernel(
    x_ptr, table_ptr, order_ptr, packed_ptr, scales_ptr, out_ptr,
    num_experts, num_active, num_units, num_row_tiles, stride, x_width, width, beta, linear_beta,
    WARPS: gl.constexpr, KIND: gl.constexpr, IS_FIRST: gl.constexpr, IS_WHOLE: gl.constexpr,
    IS_ROUNDED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [pairs, width]; grid (blocks of 64 WARPS weight rows, tiles of N rows). IS_FIRST: hidden of x
    [tokens, x_width], rows `stride` apart; IS_ROUNDED: through MXFP8. Otherwise parts, in the order of the pairs, of
    x = hidden.
    """
    if PDL and IS_FIRST:
        gdc_launch_dependents()
    block, tile = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table_ptr + tile).to(gl.int64)
    first = gl.load(table_ptr + gl.num_programs(1) + tile)
    end = gl.load(table_ptr + 2 * gl.num_programs(1) + tile)
    if expert >= num_experts:
        return
    start = (expert * num_row_tiles + block * (8 * WARPS)) * num_units
    to = (out_ptr, width, beta, linear_beta)
    tile_of(
        x_ptr, order_ptr, packed_ptr, scales_ptr, start, block, first, end, num_active, num_units, stride,
        x_width, to, WARPS, KIND, IS_FIRST, IS_WHOLE, IS_ROUNDED, PDL,
    )  # fmt: skip
