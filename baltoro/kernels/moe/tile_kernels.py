"""Kernel bodies of `tile_experts`: products with tiled MXFP4 weights. Need triton; imported on first use.

A program multiplies BLOCK rows of an expert's matrix with N1 + N2 rows of inputs. The weights go from memory into the
registers that the matrix instruction reads: a thread's 16 bytes are a block of 32 columns of a row, so it needs one
scale for 32 weights, and what it holds of A is spread over the columns k; the inputs' columns follow (`columns`), on
the way in, or put into that order once (`tile_moves.arrange`). Of a unit of 128 columns: positions 0..63 the first
halves of its four blocks, 64..127 the second halves. WIDE columns in a run belong to one thread: 8 for the instruction
of a warp, 2 for that of four warps (wgmma).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baltoro.kernels.moe.tile_moves import rounded_to_mxfp8
from baltoro.kernels.moe.tile_numbers import factors, numbers, operand


@triton.jit
def times(weights, x, sums, dtype: tl.constexpr):
    """sums += weights [BLOCK, K] x [K, N]; fp32 inputs are multiplied in fp32."""
    return tl.dot(weights.to(dtype), x.to(dtype), sums, input_precision="ieee")


@triton.jit
def settled(sums):
    """Itself, once it is there. A loop whose last wgmma is still at work when the next round begins would write the
    next weights into registers that it reads: Triton 3.6 leaves the wait out where A comes from registers."""
    return tl.inline_asm_elementwise("", "=r,0", [sums], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def columns(NUM: tl.constexpr, WIDE: tl.constexpr, IS_ARRANGED: tl.constexpr):
    """Where the inputs of a unit's first NUM positions lie in the unit."""
    place = tl.arange(0, NUM)
    if IS_ARRANGED:
        column = place
    else:
        column = place % (4 * WIDE) // WIDE * 32 + place % 64 // (4 * WIDE) * WIDE + place // 64 * 16 + place % WIDE
        column = tl.max_contiguous(tl.multiple_of(column, WIDE), WIDE)
    return column


@triton.jit
def sources(place, end, order, num_active, IS_SORTED: tl.constexpr):
    """Rows of the inputs at places of the pairs: themselves, or the tokens of the sorted pairs."""
    row = place
    if IS_SORTED:
        row = tl.load(order + place, mask=place < end, other=0) // num_active
    return row.to(tl.int64)


@triton.jit
def begun(start, stop, block, tile, SPREAD: tl.constexpr):
    """The unit that a program begins with. Programs that all begin with the same one ask the same few bytes of the
    inputs, thus the same piece of the second cache, at the same time."""
    begin = start
    if SPREAD:
        begin = start + (block + tile * 7) % tl.maximum(stop - start, 1)
    return begin


@triton.jit
def turned(step, start, stop, begin):
    """Units start .. stop - 1 in turn from `begin` on."""
    unit = step + (begin - start)
    return tl.where(unit < stop, unit, unit - (stop - start))


@triton.jit
def fetch(
    packed, row_tile, num_units, start, stop, begin, BLOCK: tl.constexpr, UNITS: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Ask for the weights of a program's first UNITS units, a power of two, as far as the second cache."""
    line = tl.arange(0, BLOCK // 8 * UNITS * 4)
    unit = turned(start + line // 4 % UNITS, start, stop, begin)
    at = (row_tile + line // (UNITS * 4)) * num_units + unit
    address = (packed + at * 128 + line % 4 * 32).to(tl.int64)
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def signal(left):
    """Let the dependent launch begin when `left` is 0; no branch, which would keep loads from running ahead."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.u32 $0, 0; }",
        "=r,r", [left], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def product(
    x, stride, width, row, row_more, live, live_more, packed, scales, row_tile, num_units, start, stop, begin,
    N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
    IS_ARRANGED: tl.constexpr, IS_WHOLE: tl.constexpr, SPREAD: tl.constexpr, SIGNAL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Weights, BLOCK rows from `row_tile` on, times rows of x, `row` [N1] and `row_more` [N2] where these are live.

    Units start .. stop - 1 of x's columns, of which there are `width` (IS_WHOLE: all are there). SPREAD: from unit
    `begin` on, those before it last.
    -> fp32 [BLOCK, N1], [BLOCK, N2], not yet times 2^32; N2 = 0: the second means nothing.
    """
    # an expert's rows as the loads' layout spreads them over warps: (16 WARPS rows) (tile of 8) (warp) (8)
    i = tl.arange(0, BLOCK)
    tile = i // (16 * WARPS) * (2 * WARPS) + i // 8 % WARPS * 2 + i // (8 * WARPS) % 2
    at = (row_tile + tile) * num_units
    word_at = packed + (at * 128 + i % 8 * 16)[:, None] + tl.arange(0, 16)[None, :]
    sums1, sums2 = tl.zeros([BLOCK, N1], tl.float32), tl.zeros([BLOCK, N2 if N2 else N1], tl.float32)
    dtype: tl.constexpr = tl.float32 if INTERPRET else x.dtype.element_ty
    if WIDE == 8:
        scale_at = scales + (at * 32 + i % 8 * 4)[:, None] + tl.arange(0, 4)[None, :]
    else:  # words, since bytes are too few for an asynchronous copy
        scale_at = scales + at * 8 + i % 8
    # A whole unit at once, 256 bytes of a row: half of it in place is 32 bytes of every 64, and with such copies the
    # first product of pairs took longer the more programs there were; with wgmma each half would be waited for.
    column = columns(128, WIDE, IS_ARRANGED)[:, None]
    x1, x2 = x + row[None, :] * stride + column, x + row_more[None, :] * stride + column
    for step in range(start, stop):
        if SIGNAL:
            signal(step - (stop - start) * SIGNAL // 8)
        unit = step
        if SPREAD:
            unit = turned(step, start, stop, begin)
        words, scale = tl.load(word_at + unit * 128), tl.load(scale_at + unit * (32 if WIDE == 8 else 8))
        low, high = numbers(words, factors(scale, BLOCK, WIDE), INTERPRET)
        low, high = operand(low, BLOCK, WIDE, WARPS), operand(high, BLOCK, WIDE, WARPS)
        mask1, mask2 = live[None, :], live_more[None, :]
        if not IS_WHOLE:
            is_there = column < width - unit * 128
            mask1, mask2 = live[None, :] & is_there, live_more[None, :] & is_there
        both = tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [BLOCK, 128])
        sums1 = times(both, tl.load(x1 + unit * 128, mask=mask1, other=0.0), sums1, dtype)
        if N2:
            sums2 = times(both, tl.load(x2 + unit * 128, mask=mask2, other=0.0), sums2, dtype)
        if WIDE == 2 and not INTERPRET:
            if N2:
                sums2 = settled(sums2)
            else:
                sums1 = settled(sums1)
    return sums1, sums2


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
    N: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Rows of `sums` are 8 of the gate, 8 up, in turn -> hidden [rows, F']. IS_ROUNDED: through MXFP8."""
    pairs = tl.permute(tl.reshape(sums, [BLOCK // 16, 2, 8, N]), [0, 2, 3, 1])
    gate, up = tl.split(pairs)
    out = activated(gate * 4294967296.0, up * 4294967296.0, beta, linear_beta, KIND)
    if IS_ROUNDED:
        out = tl.reshape(out, [BLOCK // 64, 32, N])
        out = rounded_to_mxfp8(out, tl.max(tl.abs(out), 1, keep_dims=True))
    out = tl.reshape(out, [BLOCK // 2, N])
    column, row = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2), first + tl.arange(0, N)
    at = hidden + row.to(tl.int64)[None, :] * (num_units * 128) + column[:, None]
    tl.store(at, out, mask=(row < end)[None, :])


@triton.jit
def first_product(
    x, table, ids, order, packed, scales, hidden, counters,
    num_experts, num_active, width, stride, num_units, num_units_out, num_counters, beta, linear_beta,
    KIND: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    WARPS: tl.constexpr, COUNTERS: tl.constexpr, IS_PAIRS: tl.constexpr, IS_ARRANGED: tl.constexpr,
    IS_WHOLE: tl.constexpr, IS_ROUNDED: tl.constexpr, SPREAD: tl.constexpr, SIGNAL: tl.constexpr, PDL: tl.constexpr,
    WAITS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """hidden [pairs, F'] = activation(w1 x, w3 x); grid (blocks of rows, pairs or tiles). x [tokens, M], or arranged
    [pairs, M']. Pairs: counters int32 [tokens, num_counters] become 0, for the second product."""
    if WAITS:
        gdc_wait()
    if PDL and SIGNAL == 0:
        gdc_launch_dependents()
    block, tile = tl.program_id(0), tl.program_id(1)
    if IS_PAIRS:
        expert = tl.load(ids + tile).to(tl.int64)
        first, end, row = tile // num_active, tile // num_active + 1, tile
        if (block == 0) & (tile % num_active == 0):
            counter = tl.arange(0, COUNTERS)
            tl.store(counters + first * num_counters + counter, 0, mask=counter < num_counters)
    else:
        expert = tl.load(table + tile).to(tl.int64)
        first = tl.load(table + tl.num_programs(1) + tile)
        end, row = tl.load(table + 2 * tl.num_programs(1) + tile), first
        if expert >= num_experts:
            return
    row_tile = expert * (num_units_out * 32) + block * (BLOCK // 8)
    place, more = first + tl.arange(0, N1), first + N1 + tl.arange(0, N2 if N2 else N1)
    is_sorted: tl.constexpr = not IS_PAIRS and not IS_ARRANGED
    sums1, sums2 = product(
        x, stride, width, sources(place, end, order, num_active, is_sorted),
        sources(more, end, order, num_active, is_sorted), place < end, more < end,
        packed, scales, row_tile, num_units, 0, num_units, begun(0, num_units, block, tile, SPREAD),
        N1, N2, BLOCK, WIDE, WARPS, IS_ARRANGED, IS_WHOLE, SPREAD, SIGNAL if PDL else 0, INTERPRET,
    )  # fmt: skip
    end = row + (end - first)
    store_hidden(sums1, hidden, row, end, block, num_units_out, beta, linear_beta, N1, KIND, BLOCK, IS_ROUNDED)
    if N2:
        row += N1
        store_hidden(sums2, hidden, row, end, block, num_units_out, beta, linear_beta, N2, KIND, BLOCK, IS_ROUNDED)


@triton.jit
def store_parts(sums, parts, order, first, end, block, width, N: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a product to where their pairs are: parts [pairs, M]."""
    row, column = first + tl.arange(0, N), block * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order + row, mask=row < end, other=0)
    at = parts + pair[None, :] * width + column[:, None]
    tl.store(at, sums * 4294967296.0, mask=(row < end)[None, :] & (column < width)[:, None])


@triton.jit
def second_of_groups(
    hidden, table, order, packed, scales, parts, num_experts, num_units, num_row_tiles, width,
    N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
    IS_ARRANGED: tl.constexpr, SPREAD: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """parts [pairs, M] in the order of the pairs, not weighted yet; grid (blocks of rows, tiles)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(table + tile).to(tl.int64)
    first = tl.load(table + tl.num_programs(1) + tile)
    end = tl.load(table + 2 * tl.num_programs(1) + tile)
    if expert >= num_experts:
        return
    row_tile = expert * num_row_tiles + block * (BLOCK // 8)
    begin = begun(0, num_units, block, tile, SPREAD)
    if FETCH and (PDL or INTERPRET):  # the table, the order and the weights are older than the first product
        fetch(packed, row_tile, num_units, 0, num_units, begin, BLOCK, FETCH, INTERPRET)
    if PDL:
        gdc_wait()
    place, more = first + tl.arange(0, N1), first + N1 + tl.arange(0, N2 if N2 else N1)
    sums1, sums2 = product(
        hidden, num_units * 128, 0, place.to(tl.int64), more.to(tl.int64), place < end, more < end,
        packed, scales, row_tile, num_units, 0, num_units, begin,
        N1, N2, BLOCK, WIDE, WARPS, IS_ARRANGED, True, SPREAD, 0, INTERPRET,
    )  # fmt: skip
    store_parts(sums1, parts, order, first, end, block, width, N1, BLOCK)
    if N2:
        store_parts(sums2, parts, order, first + N1, end, block, width, N2, BLOCK)


@triton.jit
def second_of_pairs(
    hidden, ids, weights, packed, scales, parts, counters, out, num_active, num_units, num_row_tiles, width,
    N: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, SPREAD: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [T, M] = sum over a token's pairs of weight * w2 hidden, in fp32, rounded once; grid (blocks of rows, SPLIT
    pieces of the columns of each pair). Every program leaves its part, fp32 [pairs, SPLIT, M]; whoever comes last of a
    token's at a block adds them up, always in the same order. counters int32 [T, blocks]: zeros."""
    block, piece = tl.program_id(0), tl.program_id(1)
    pair, split = piece // SPLIT, piece % SPLIT
    row_tile = tl.load(ids + pair).to(tl.int64) * num_row_tiles + block * (BLOCK // 8)
    start, stop = split * num_units // SPLIT, (split + 1) * num_units // SPLIT
    begin = begun(start, stop, block, piece, SPREAD)
    if FETCH and (PDL or INTERPRET):  # the picks and the weights are older than the first product
        fetch(packed, row_tile, num_units, start, stop, begin, BLOCK, FETCH, INTERPRET)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n, column, token = tl.arange(0, N), block * BLOCK + tl.arange(0, BLOCK), pair // num_active
    place = pair + n
    sums, _ = product(
        hidden, num_units * 128, 0, place.to(tl.int64), place.to(tl.int64), n < 1, n < 1,
        packed, scales, row_tile, num_units, start, stop, begin,
        N, 0, BLOCK, WIDE, WARPS, False, True, SPREAD, 0, INTERPRET,
    )  # fmt: skip
    at = parts + (piece.to(tl.int64) * width + column)[:, None] + n[None, :]
    tl.store(at, sums * 4294967296.0, mask=(n < 1)[None, :] & (column < width)[:, None])
    tl.debug_barrier()  # the counter goes up after all of the program's part is there
    num_parts = num_active * SPLIT
    if tl.atomic_add(counters + token * tl.num_programs(0) + block, 1, sem="acq_rel") == num_parts - 1:
        i = tl.arange(0, PARTS)
        weight = tl.load(weights + token * num_active + i // SPLIT, mask=i < num_parts, other=0.0).to(tl.float32)
        part_at = parts + (token.to(tl.int64) * num_parts + i)[:, None] * width + column[None, :]
        is_part = (i < num_parts)[:, None] & (column < width)[None, :]
        part = tl.load(part_at, mask=is_part, other=0.0, cache_modifier=".cg")
        tl.store(out + token.to(tl.int64) * width + column, tl.sum(part * weight[:, None], 0), mask=column < width)
