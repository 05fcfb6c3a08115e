"""Kernel bodies of `fast`: need triton; imported on first use.

All write columns [0, num_first) to `first` and the others to `rest`, each in its own dtype, from one fp32 sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_rows"])
def few_rows(
    x,
    weight,
    gain,
    first,
    rest,
    num_rows,
    num_first,
    num_columns,
    width,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """As `one_row`, for up to ROWS rows.

    Only where the matrix unit cannot be used: fp32, or a norm in front that must not round.
    """
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = weight + column.to(tl.int64)[:, None] * width
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_real = k < width
        w_mask = (column < num_columns)[:, None] & is_real[None, :]
        w = tl.load(weight_row + k[None, :], mask=w_mask, other=0.0).to(tl.float32)
        x_mask = (row < num_rows)[:, None] & is_real[None, :]
        values = tl.load(x + row[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values = values * tl.load(gain + k, mask=is_real, other=0.0).to(tl.float32)[None, :]
        sums += values[:, None, :] * w[None, :, :]
    out = tl.sum(sums, 2)
    if HAS_NORM:
        out = out / tl.sqrt(tl.sum(squares, 1) / width + eps)[:, None]
    split(out, first, rest, row, column, num_rows, num_first, num_columns)


@triton.jit
def one_row(
    x,
    weight,
    gain,
    first,
    rest,
    num_first,
    num_columns,
    width,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x; one program BLOCK_N rows of the weight, products and sums in fp32, no matrix unit.

    No layout changes between load and sum, and UNROLL steps' loads in flight: this is bound by bytes under way.
    With HAS_NORM, x passes through an RMSNorm: the gain before the product, 1 / rms after it (they commute).
    PDL: it may start before the kernel in front of it has ended. IS_EARLY: BLOCK_K covers a row of the weight, which is
    older than that kernel and fetched meanwhile.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = weight + column.to(tl.int64)[:, None] * width
    is_column = (column < num_columns)[:, None]
    squares = tl.zeros([BLOCK_K], tl.float32)
    if IS_EARLY:
        k = tl.arange(0, BLOCK_K)
        is_real = k < width
        w = tl.load(weight_row + k[None, :], mask=is_column & is_real[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if IS_EARLY:
        values = tl.load(x + k, mask=is_real, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = values * values
            values = values * tl.load(gain + k, mask=is_real, other=0.0).to(tl.float32)
        sums = w.to(tl.float32) * values[None, :]
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, width, BLOCK_K, loop_unroll_factor=UNROLL):
            k = start + tl.arange(0, BLOCK_K)
            is_real = k < width
            w = tl.load(weight_row + k[None, :], mask=is_column & is_real[None, :], other=0.0).to(tl.float32)
            values = tl.load(x + k, mask=is_real, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += values * values
                values = values * tl.load(gain + k, mask=is_real, other=0.0).to(tl.float32)
            sums += w * values[None, :]
    out = tl.sum(sums, 1)
    if HAS_NORM:
        out = out / tl.sqrt(tl.sum(squares, 0) / width + eps)
    tl.store(first + column, out, mask=column < num_first)
    tl.store(rest + column - num_first, out, mask=(column >= num_first) & (column < num_columns))


@triton.jit(do_not_specialize=["num_rows"])
def thin(
    x,
    weight,
    first,
    rest,
    num_rows,
    num_first,
    num_columns,
    width,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows of x through the matrix unit, weight on the left: [BLOCK_N, K] @ [K, ROWS], K in STAGES buffers.

    The weight goes to shared memory without passing registers, so that many bytes are under way, and is read once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight + column.to(tl.int64)[:, None] * width
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        is_real = (k < width)[None, :]
        w = tl.load(weight_row + k[None, :], mask=(column < num_columns)[:, None] & is_real, other=0.0)
        values = tl.load(x_row + k[None, :], mask=(row < num_rows)[:, None] & is_real, other=0.0)
        if INTERPRET:  # the interpreter multiplies the bit patterns of bf16
            values, w = values.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(w, tl.trans(values), sums, input_precision="ieee")
    split(tl.trans(sums), first, rest, row, column, num_rows, num_first, num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def many_rows(
    x,
    weight,
    first,
    rest,
    num_rows,
    num_first,
    num_columns,
    width,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """A matrix product with the same split of its columns; grid (row blocks, column blocks)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight + column.to(tl.int64)[:, None] * width
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        is_real = (k < width)[None, :]
        values = tl.load(x_row + k[None, :], mask=(row < num_rows)[:, None] & is_real, other=0.0)
        w = tl.load(weight_row + k[None, :], mask=(column < num_columns)[:, None] & is_real, other=0.0)
        if INTERPRET:  # the interpreter multiplies the bit patterns of bf16
            values, w = values.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(values, tl.trans(w), sums, input_precision="ieee")
    split(sums, first, rest, row, column, num_rows, num_first, num_columns)


@triton.jit
def split(out, first, rest, row, column, num_rows, num_first, num_columns):
    """Store a tile: left columns to `first` [T, num_first], the others to `rest`."""
    is_row = (row < num_rows)[:, None]
    is_first = column < num_first
    wide = row.to(tl.int64)[:, None]
    tl.store(first + wide * num_first + column[None, :], out, mask=is_row & is_first[None, :])
    is_rest = (column >= num_first) & (column < num_columns)
    beside = wide * (num_columns - num_first) + (column - num_first)[None, :]
    tl.store(rest + beside, out, mask=is_row & is_rest[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def cut_sums(sums, first, rest, num_rows, num_first, num_columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, blocks of columns): fp32 sums [T, num_columns] to `first` and, rounded, to `rest`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, column = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    split(tl.load(sums + place, mask=(column < num_columns)[None, :], other=0.0), first, rest, row, column, num_rows,
          num_first, num_columns)  # fmt: skip
