"""Kernel bodies around the products of `tile_experts`: inputs put in order, pairs grouped by expert, the last sum.

Need triton; imported on first use.
"""

import triton
import triton.language as tl


@triton.jit
def rounded_to_mxfp8(x, largest):
    """fp32 x, the largest magnitude of each one's block of 32 -> x through MXFP8 (quant/mxfp8.py), fp32."""
    bits = largest.to(tl.int32, bitcast=True)
    power = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    byte = tl.maximum(power + 127, 0)
    small = tl.abs(x * (254 - byte << 23).to(tl.float32, bitcast=True))
    # e4m3 has steps of 2^-3 of a value's power of two, 2^-9 at least; a sum with 1.5 x 2^23 steps rounds to them
    step = tl.maximum((small.to(tl.int32, bitcast=True) >> 23) - 127 - 3, -9)
    magic = (step + 23 + 127 << 23 | 0x400000).to(tl.float32, bitcast=True)
    small = (small + magic) - magic
    scale = tl.where(byte > 0, byte << 23, 0x400000).to(tl.float32, bitcast=True)
    return tl.where(x < 0, -small, small) * scale


@triton.jit
def arrange(
    x, order, out, num_active, width, stride, num_units,
    UNITS: tl.constexpr, WIDE: tl.constexpr, IS_SORTED: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """out [rows, 128 num_units]: rows of x [., width], `stride` apart, columns as `tile_numbers.operand` has them,
    zeros beyond width.

    IS_SORTED: row i is x[order[i] // num_active], otherwise x[i]. IS_ROUNDED: through MXFP8. Grid (rows, UNITS units).
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(order + row) // num_active if IS_SORTED else row
    # loaded and stored in runs of 16 bytes; the change of order is the program's own
    column = tl.program_id(1) * (UNITS * 128) + tl.arange(0, UNITS * 128)
    value = tl.load(x + source * stride + column, mask=column < width, other=0.0)
    if IS_ROUNDED:
        value = tl.reshape(value.to(tl.float32), [UNITS * 4, 32])
        value = rounded_to_mxfp8(value, tl.max(tl.abs(value), 1, keep_dims=True))
    value = tl.permute(tl.reshape(value, [UNITS, 4, 32 // WIDE, WIDE]), [0, 2, 1, 3])
    tl.store(out + row * num_units * 128 + column, tl.reshape(value, [UNITS * 128]), mask=column < num_units * 128)


@triton.jit
def count(ids, counts, num_pairs, BLOCK: tl.constexpr):
    """counts int32 [E] of each expert's pairs; grid (E)."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < num_pairs, other=-1) == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def group(
    ids, counts, order, table, num_pairs, num_experts, num_tiles, rows,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """An expert's pairs, in their order, and its tiles, as `tiles.tile_table`; grid (E + 1), the last one fills up."""
    expert = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    before = tl.load(counts + at, mask=(at < num_experts) & (at < expert), other=0)
    first, first_tile = tl.sum(before, 0), tl.sum((before + rows - 1) // rows, 0)
    if expert == num_experts:
        for start in range(first_tile, num_tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            for part in range(3):
                tl.store(table + part * num_tiles + tile, tl.where(part == 0, num_experts, 0), mask=tile < num_tiles)
        return
    mine = tl.load(counts + expert)
    for tile in range((mine + rows - 1) // rows):
        tl.store(table + first_tile + tile, expert)
        tl.store(table + num_tiles + first_tile + tile, first + tile * rows)
        tl.store(table + 2 * num_tiles + first_tile + tile, first + mine)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_mine = (tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(is_mine, 0) - 1, pair.to(tl.int64), mask=is_mine == 1)
        first += tl.sum(is_mine, 0)


@triton.jit
def combine(parts, weights, out, num_active, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, M] = sum over a token's pairs of weight * part, in fp32, always in the same order; grid (T, blocks of M).

    PARTS: the next power of two of num_active. All parts are asked for at once.
    """
    token = tl.program_id(0).to(tl.int64)
    column, i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    weight = tl.load(weights + token * num_active + i, mask=i < num_active, other=0.0).to(tl.float32)
    is_part = (i < num_active)[:, None] & (column < width)[None, :]
    part = tl.load(parts + (token * num_active + i)[:, None] * width + column[None, :], mask=is_part, other=0.0)
    total = tl.sum(part.to(tl.float32) * weight[:, None], 0)
    tl.store(out + token * width + column, total, mask=column < width)
