"""Kernel bodies of `fast_experts` for the published order of bytes: need triton; imported on first use.

MXFP4 weights as int8 pairs: `bytes` [E, out, in/2], `scales` [E, out, in/32]. An element's bits put at fp16's places
(sign to 15, the three others to 9..11) are its value times 2^-14, the subnormal 0.5 included; the scale's exponent
takes the 2^14 back. Scale bytes above 240 (2^113) become NaN.
"""

import triton
import triton.language as tl

from baltoro.kernels.moe.tile_kernels import activated


@triton.jit
def element(code):
    """Code 0..15, any integer type -> fp32, the value times 2^-14."""
    wide = code.to(tl.int32)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(byte):
    """E8M0 byte -> fp32, 2^(byte - 127 + 14)."""
    wide = byte.to(tl.int32)
    return tl.where(wide > 240, float("nan"), (wide + 14 << 23).to(tl.float32, bitcast=True))


@triton.jit
def partial_sums(sums, x_low, x_high, packed, scales, row, block, mask, num_blocks):
    """Add x times a tile of weights, [rows, blocks, 16], to `sums` of that shape.

    row [rows] int64: row of the matrix of all experts; block [blocks]: block of 32 columns.
    """
    byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    pairs = tl.load(packed + row[:, None, None] * num_blocks * 16 + byte[None, :, :], mask=mask[:, :, None], other=0)
    scale = scale_of(tl.load(scales + row[:, None] * num_blocks + block[None, :], mask=mask, other=0))
    low, high = element(pairs & 15), element(pairs >> 4)
    return sums + (low * x_low[None, :, :] + high * x_high[None, :, :]) * scale[:, :, None]


@triton.jit
def first_of_pairs(
    z, ids, w1, s1, w3, s3, hidden, num_active, num_hidden, width, beta, linear_beta,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """hidden fp32 [pairs, F] = activation(w1 z, w3 z) of each pair's expert; grid (pairs, blocks of F)."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(ids + pair) * num_hidden + column
    num_blocks = width // 32
    gates = tl.zeros([BLOCK_N, BLOCKS, 16], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCKS, 16], tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        low = 2 * (block[:, None] * 16 + tl.arange(0, 16)[None, :])
        is_real = block < num_blocks
        at = z + pair // num_active * width + low
        x_low = tl.load(at, mask=is_real[:, None], other=0.0).to(tl.float32)
        x_high = tl.load(at + 1, mask=is_real[:, None], other=0.0).to(tl.float32)
        mask = (column < num_hidden)[:, None] & is_real[None, :]
        gates = partial_sums(gates, x_low, x_high, w1, s1, row, block, mask, num_blocks)
        ups = partial_sums(ups, x_low, x_high, w3, s3, row, block, mask, num_blocks)
    gate, up = tl.sum(tl.sum(gates, 2), 1), tl.sum(tl.sum(ups, 2), 1)
    out = activated(gate, up, beta, linear_beta, KIND)
    tl.store(hidden + pair * num_hidden + column, out, mask=column < num_hidden)


@triton.jit
def second_of_tokens(
    hidden, ids, weights, w2, s2, out, num_active, num_hidden, width,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out [T, M] = sum over the token's experts of weight * w2 hidden, in fp32, rounded once; grid (T, blocks of M)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_blocks = num_hidden // 32
    sums = tl.zeros([BLOCK_N, BLOCKS, 16], tl.float32)
    for active in range(num_active):
        pair = token * num_active + active
        row = tl.load(ids + pair) * width + column
        weight = tl.load(weights + pair)
        for start in range(0, num_blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            low = 2 * (block[:, None] * 16 + tl.arange(0, 16)[None, :])
            is_real = block < num_blocks
            at = hidden + pair * num_hidden + low
            x_low = tl.load(at, mask=is_real[:, None], other=0.0).to(tl.float32) * weight
            x_high = tl.load(at + 1, mask=is_real[:, None], other=0.0).to(tl.float32) * weight
            mask = (column < width)[:, None] & is_real[None, :]
            sums = partial_sums(sums, x_low, x_high, w2, s2, row, block, mask, num_blocks)
    tl.store(out + token * width + column, tl.sum(tl.sum(sums, 2), 1), mask=column < width)


@triton.jit
def tile_product(sums, x_low, x_high, packed, scales, row, byte, mask, num_bytes, INTERPRET: tl.constexpr):
    """sums [BM, BN] += x [BM, columns] times weights [BN, columns]: two products, of the low and the high nibbles.

    The weights are exact in bf16. row [BN] int64, byte [BK], mask [BN, BK].
    """
    pairs = tl.load(packed + row[:, None] * num_bytes + byte[None, :], mask=mask, other=0)
    scale = scale_of(tl.load(scales + row[:, None] * (num_bytes // 16) + (byte // 16)[None, :], mask=mask, other=0))
    low = (element(pairs & 15) * scale).to(x_low.dtype)
    high = (element(pairs >> 4) * scale).to(x_low.dtype)
    if INTERPRET:  # the interpreter multiplies the bit patterns of bf16
        low, high = low.to(tl.float32), high.to(tl.float32)
        x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
    sums = tl.dot(x_low, tl.trans(low), sums, input_precision="ieee")
    return tl.dot(x_high, tl.trans(high), sums, input_precision="ieee")


@triton.jit
def first_of_groups(
    z, order, tiles, w1, s1, w3, s3, hidden, num_experts, num_active, num_hidden, width, beta, linear_beta,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """hidden [pairs sorted by expert, F]; grid (tiles, blocks of F). tiles int32 [3, tiles]: expert, first, end row."""
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= num_experts:
        return
    place = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(tiles + 2 * num_tiles + tile)
    token = tl.load(order + place, mask=is_row, other=0) // num_active
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, num_bytes = expert * num_hidden + column, width // 2
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_bytes, BLOCK_K):
        byte = start + tl.arange(0, BLOCK_K)
        at = z + token[:, None] * width + 2 * byte[None, :]
        x_mask = is_row[:, None] & (byte < num_bytes)[None, :]
        x_low = tl.load(at, mask=x_mask, other=0.0)
        x_high = tl.load(at + 1, mask=x_mask, other=0.0)
        mask = (column < num_hidden)[:, None] & (byte < num_bytes)[None, :]
        gate = tile_product(gate, x_low, x_high, w1, s1, row, byte, mask, num_bytes, INTERPRET)
        up = tile_product(up, x_low, x_high, w3, s3, row, byte, mask, num_bytes, INTERPRET)
    out = activated(gate, up, beta, linear_beta, KIND)
    at = hidden + place.to(tl.int64)[:, None] * num_hidden + column[None, :]
    tl.store(at, out, mask=is_row[:, None] & (column < num_hidden)[None, :])


@triton.jit
def second_of_groups(
    hidden, order, tiles, w2, s2, out, num_experts, num_hidden, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [pairs, M] in the order of the pairs, not weighted yet; grid (tiles, blocks of M)."""
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= num_experts:
        return
    place = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(tiles + 2 * num_tiles + tile)
    pair = tl.load(order + place, mask=is_row, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, num_bytes = expert * width + column, num_hidden // 2
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_bytes, BLOCK_K):
        byte = start + tl.arange(0, BLOCK_K)
        at = hidden + place.to(tl.int64)[:, None] * num_hidden + 2 * byte[None, :]
        x_mask = is_row[:, None] & (byte < num_bytes)[None, :]
        x_low = tl.load(at, mask=x_mask, other=0.0)
        x_high = tl.load(at + 1, mask=x_mask, other=0.0)
        mask = (column < width)[:, None] & (byte < num_bytes)[None, :]
        sums = tile_product(sums, x_low, x_high, w2, s2, row, byte, mask, num_bytes, INTERPRET)
    tl.store(out + pair[:, None] * width + column[None, :], sums, mask=is_row[:, None] & (column < width)[None, :])
