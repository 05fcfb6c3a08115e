"""Kernel bodies of `stream`: a product whose steps are dealt out evenly, and the sum of its parts. Needs triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baltoro.kernels.linear.kernels import split


@triton.jit(do_not_specialize=["num_rows", "iterations", "num_tiles"])
def deal(
    x,
    weight,
    parts,
    num_rows,
    num_columns,
    width,
    x_stride,
    row_blocks,
    num_tiles,
    steps,
    iterations,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Program p takes `iterations` steps of all `num_tiles * steps`, so parts of two tiles at most.

    Writes fp32 parts [programs, 2, BLOCK_M, BLOCK_N]. IS_WHOLE: no column and no k lies outside the weight.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.program_id(0) * iterations
    stop = tl.minimum(start + iterations, num_tiles * steps)
    m, n, kk = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    for segment in range(2):
        tile = start // steps + segment
        begin, end = tl.maximum(start - tile * steps, 0), tl.minimum(stop - tile * steps, steps)
        if end > begin:
            row, column = tile % row_blocks * BLOCK_M + m, tile // row_blocks * BLOCK_N + n
            x_row = x + row.to(tl.int64)[:, None] * x_stride
            weight_row = weight + column.to(tl.int64)[:, None] * width
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for step in tl.range(begin, end, num_stages=STAGES):
                k = step * BLOCK_K + kk
                if IS_WHOLE:
                    values = tl.load(x_row + k[None, :], mask=(row < num_rows)[:, None], other=0.0)
                    w = tl.load(weight_row + k[None, :])
                else:
                    is_real = (k < width)[None, :]
                    values = tl.load(x_row + k[None, :], mask=(row < num_rows)[:, None] & is_real, other=0.0)
                    w = tl.load(weight_row + k[None, :], mask=(column < num_columns)[:, None] & is_real, other=0.0)
                if INTERPRET:  # the interpreter multiplies the bit patterns of bf16
                    values, w = values.to(tl.float32), w.to(tl.float32)
                sums = tl.dot(values, tl.trans(w), sums, input_precision="ieee")
            place = (tl.program_id(0) * 2 + segment) * (BLOCK_M * BLOCK_N)
            tl.store(parts + place + m[:, None] * BLOCK_N + n[None, :], sums)


@triton.jit(do_not_specialize=["num_rows", "iterations"])
def add_parts(
    parts,
    first,
    rest,
    num_rows,
    num_first,
    num_columns,
    row_blocks,
    steps,
    iterations,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, ROWS of its rows): sums of the parts, in the order of k, to `first` and `rest`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for program in range(tile * steps // iterations, (tile * steps + steps - 1) // iterations + 1):
        segment = tile - program * iterations // steps
        place = (program * 2 + segment) * (BLOCK_M * BLOCK_N)  # some hundred parts: 32 bits are enough
        sums += tl.load(parts + place + m[:, None] * BLOCK_N + n[None, :])
    row, column = tile % row_blocks * BLOCK_M + m, tile // row_blocks * BLOCK_N + n
    split(sums, first, rest, row, column, num_rows, num_first, num_columns)
