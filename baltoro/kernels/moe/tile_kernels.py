"""Kernel bodies of `tile_experts`: products with permuted MXFP4 weights. Need triton; imported on first use.

A program multiplies BLOCK rows of an expert's matrix with N1 + N2 rows of inputs. The weights go from memory into the
registers that the matrix instruction reads: a thread's 16 bytes are a block of 32 columns of a row, so it needs one
scale for 32 weights, and what it holds of A is spread over the columns k; the inputs are put into the same order once
(`arrange`). Of a unit of 128 columns: positions 0..63 the first halves of its four blocks, 64..127 the second halves.
WIDE columns in a run belong to one thread: 8 for the instruction of a warp, 2 for that of four warps (wgmma).
"""

import triton
import triton.language as tl


@triton.jit
def numbers(words, factor, INTERPRET: tl.constexpr):
    """Woven words int32 [rows, 16], factors of that shape (bits of bf16, in both halves of an int32)
    -> first and second halves of the blocks, each [rows, 64]: bf16; under the interpreter, which multiplies the bit
    patterns of bf16, fp32. A word stays within an element, whatever order a layout gives the registers.
    """
    if INTERPRET:
        bits = words.to(tl.uint32, bitcast=True)
        late = ((bits << 1) & 0x80008000) | ((bits >> 3) & 0x01800180) | ((bits >> 7) & 0x00400040)
        b01, b23, b45 = bits & 0x81C081C0, (bits << 3) & 0x81C081C0, (bits << 6) & 0x81C081C0
        power = (factor << 16).to(tl.float32, bitcast=True)
        b0, b1, b2, b3 = exact(b01 << 16), exact(b01), exact(b23 << 16), exact(b23)
        b4, b5, b6, b7 = exact(b45 << 16), exact(b45), exact(late << 16), exact(late)
        b0, b1, b2, b3, b4, b5, b6, b7 = (
            b0 * power, b1 * power, b2 * power, b3 * power, b4 * power, b5 * power, b6 * power, b7 * power
        )  # fmt: skip
    else:
        b0, b1, b2, b3, b4, b5, b6, b7 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, t, u;
            and.b32 p, $8, 0x81C081C0;
            mul.bf16x2 p, p, $9;
            mov.b32 {$0, $1}, p;
            shl.b32 p, $8, 3;
            and.b32 p, p, 0x81C081C0;
            mul.bf16x2 p, p, $9;
            mov.b32 {$2, $3}, p;
            shl.b32 p, $8, 6;
            and.b32 p, p, 0x81C081C0;
            mul.bf16x2 p, p, $9;
            mov.b32 {$4, $5}, p;
            shl.b32 p, $8, 1;
            and.b32 p, p, 0x80008000;
            shr.u32 t, $8, 3;
            and.b32 t, t, 0x01800180;
            shr.u32 u, $8, 7;
            and.b32 u, u, 0x00400040;
            or.b32 p, p, t;
            or.b32 p, p, u;
            mul.bf16x2 p, p, $9;
            mov.b32 {$6, $7}, p;
            }
            """,
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r", [words, factor], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    rows: tl.constexpr = words.shape[0]
    first = tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [rows, 64])
    return first, tl.reshape(tl.join(tl.join(b4, b6), tl.join(b5, b7)), [rows, 64])


@triton.jit
def exact(bits):
    """The number whose upper half of fp32 `bits` holds."""
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def operand(values, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK, 64] in the order of `load_rows` and of memory -> rows of the matrix, columns in `arrange`'s order.

    Nothing moves between threads: what changes is which row and column a register stands for.
    """
    values = tl.reshape(values, [BLOCK // (16 * WARPS), 2, WARPS, 8, 4, 8 // WIDE, 2, WIDE])
    return tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 6, 4, 7]), [BLOCK, 64])


@triton.jit
def times(weights, x, sums, dtype: tl.constexpr):
    """sums += weights [BLOCK, 64] x [64, N]; fp32 inputs are multiplied in fp32."""
    return tl.dot(weights.to(dtype), x.to(dtype), sums, input_precision="ieee")


@triton.jit
def product(
    x, first, end, packed, scales, row_tile, num_units,
    N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Weights, BLOCK rows from `row_tile` on, times rows first.. of x (those from `end` on are zeros).

    -> fp32 [BLOCK, N1], [BLOCK, N2], not yet times 2^32; N2 = 0: the second is the first.
    """
    # an expert's rows as the loads' layout spreads them over warps: (16 WARPS rows) (tile of 8) (warp) (8)
    i = tl.arange(0, BLOCK)
    tile = i // (16 * WARPS) * (2 * WARPS) + i // 8 % WARPS * 2 + i // (8 * WARPS) % 2
    at = (row_tile + tile) * num_units
    word_at = packed + (at * 128 + i % 8 * 16)[:, None] + tl.arange(0, 16)[None, :]
    scale_at = scales + (at * 32 + i % 8 * 4)[:, None] + tl.arange(0, 4)[None, :]
    column = tl.arange(0, 64)[:, None]
    row1 = first + tl.arange(0, N1)
    x1, live1 = x + row1.to(tl.int64)[None, :] * (num_units * 128) + column, (row1 < end)[None, :]
    sums1 = tl.zeros([BLOCK, N1], tl.float32)
    if N2:
        row2 = first + N1 + tl.arange(0, N2)
        x2, live2 = x + row2.to(tl.int64)[None, :] * (num_units * 128) + column, (row2 < end)[None, :]
        sums2 = tl.zeros([BLOCK, N2], tl.float32)
    dtype: tl.constexpr = tl.float32 if INTERPRET else x.dtype.element_ty
    for unit in range(num_units):
        words = tl.load(word_at + unit * 128)
        # 2^126 of the bits' places, 2^(byte - 127) and 2^-32: bf16 holds it for bytes up to 160, beyond is infinity
        factor = tl.minimum(tl.load(scale_at + unit * 32).to(tl.int32) + 94, 255) << 7
        factor = tl.broadcast_to((factor | factor << 16)[:, :, None], [BLOCK, 4, 4])
        low, high = numbers(words, tl.reshape(factor, [BLOCK, 16]), INTERPRET)
        low, high = operand(low, BLOCK, WIDE, WARPS), operand(high, BLOCK, WIDE, WARPS)
        sums1 = times(low, tl.load(x1 + unit * 128, mask=live1, other=0.0), sums1, dtype)
        if N2:
            sums2 = times(low, tl.load(x2 + unit * 128, mask=live2, other=0.0), sums2, dtype)
        sums1 = times(high, tl.load(x1 + unit * 128 + 64, mask=live1, other=0.0), sums1, dtype)
        if N2:
            sums2 = times(high, tl.load(x2 + unit * 128 + 64, mask=live2, other=0.0), sums2, dtype)
    if not N2:
        sums2 = sums1
    return sums1, sums2


@triton.jit
def place_of(column, WIDE: tl.constexpr):
    """Where `arrange` puts a column."""
    inner = column % 16
    place = column // 128 * 128 + column % 32 // 16 * 64 + column % 128 // 32 * WIDE
    return place + inner // WIDE * (4 * WIDE) + inner % WIDE


@triton.jit
def activated(gate, up, beta, linear_beta, KIND: tl.constexpr):
    """KIND 0: silu(gate) up; 1: SiTU; 2: SiTU with a linear up. fp32."""
    share = 1.0 / (1.0 + tl.exp(-gate))
    if KIND == 0:
        out = gate * share * up
    else:
        bent = beta * bounded(gate / beta) * share
        out = bent * (linear_beta * bounded(up / linear_beta) if KIND == 1 else up)
    return out


@triton.jit
def bounded(x):
    """tanh, without libdevice."""
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def store_hidden(
    sums, hidden, first, end, block, num_units, beta, linear_beta,
    N: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, IS_ARRANGED: tl.constexpr,
):  # fmt: skip
    """Rows of `sums` are 8 of the gate, 8 up, in turn -> hidden [rows, F'], columns as the next product wants them."""
    pairs = tl.permute(tl.reshape(sums, [BLOCK // 16, 2, 8, N]), [0, 2, 3, 1])
    gate, up = tl.split(pairs)
    out = tl.reshape(activated(gate * 4294967296.0, up * 4294967296.0, beta, linear_beta, KIND), [BLOCK // 2, N])
    column, row = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2), first + tl.arange(0, N)
    place = place_of(column, WIDE) if IS_ARRANGED else column
    at = hidden + row.to(tl.int64)[None, :] * (num_units * 128) + place[:, None]
    tl.store(at, out, mask=(row < end)[None, :])


@triton.jit
def first_product(
    x, table, ids, packed, scales, hidden, num_experts, num_active, num_units, num_units_out, beta, linear_beta,
    KIND: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    WIDE_NEXT: tl.constexpr, WARPS: tl.constexpr, IS_PAIRS: tl.constexpr, IS_ARRANGED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """hidden [pairs, F'] = activation(w1 x, w3 x); grid (blocks of rows, pairs or tiles). x [tokens or pairs, M']."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if IS_PAIRS:
        expert, first = tl.load(ids + tile).to(tl.int64), tile // num_active
        end, row = first + 1, tile
    else:
        expert = tl.load(table + tile).to(tl.int64)
        first = tl.load(table + tl.num_programs(1) + tile)
        end, row = tl.load(table + 2 * tl.num_programs(1) + tile), first
    if expert >= num_experts:
        return
    row_tile = expert * (num_units_out * 32) + block * (BLOCK // 8)
    sums1, sums2 = product(x, first, end, packed, scales, row_tile, num_units, N1, N2, BLOCK, WIDE, WARPS, INTERPRET)
    end = row + (end - first)
    store_hidden(
        sums1, hidden, row, end, block, num_units_out, beta, linear_beta, N1, KIND, BLOCK, WIDE_NEXT, IS_ARRANGED
    )
    if N2:
        row += N1
        store_hidden(
            sums2, hidden, row, end, block, num_units_out, beta, linear_beta, N2, KIND, BLOCK, WIDE_NEXT, IS_ARRANGED
        )


@triton.jit
def store_parts(
    sums, parts, order, first, end, block, width, N: tl.constexpr, BLOCK: tl.constexpr, IS_PAIRS: tl.constexpr
):
    """Rows of a product to where their pairs are: parts [pairs, M]."""
    row, column = first + tl.arange(0, N), block * BLOCK + tl.arange(0, BLOCK)
    pair = row.to(tl.int64) if IS_PAIRS else tl.load(order + row, mask=row < end, other=0)
    at = parts + pair[None, :] * width + column[:, None]
    tl.store(at, sums * 4294967296.0, mask=(row < end)[None, :] & (column < width)[:, None])


@triton.jit
def second_product(
    hidden, table, ids, order, packed, scales, parts, num_experts, num_units, num_row_tiles, width,
    N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    WARPS: tl.constexpr, IS_PAIRS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """parts [pairs, M] in the order of the pairs, not weighted yet; grid (blocks of rows, pairs or tiles)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if IS_PAIRS:
        expert, first, end = tl.load(ids + tile).to(tl.int64), tile, tile + 1
    else:
        expert = tl.load(table + tile).to(tl.int64)
        first = tl.load(table + tl.num_programs(1) + tile)
        end = tl.load(table + 2 * tl.num_programs(1) + tile)
    if expert >= num_experts:
        return
    row_tile = expert * num_row_tiles + block * (BLOCK // 8)
    sums1, sums2 = product(
        hidden, first, end, packed, scales, row_tile, num_units, N1, N2, BLOCK, WIDE, WARPS, INTERPRET
    )
    store_parts(sums1, parts, order, first, end, block, width, N1, BLOCK, IS_PAIRS)
    if N2:
        store_parts(sums2, parts, order, first + N1, end, block, width, N2, BLOCK, IS_PAIRS)
