"""A product of some tens to hundreds of rows whose work fills every processor evenly ("stream-K").

Tiles of the result are few and do not divide among the processors (35 of 128 x 128 for 4480 columns and 128 rows on
132). So all steps of all tiles are put in one row and cut into equal pieces, one a program; a piece covers parts of two
tiles at most, and a second launch adds the parts of each tile. The order of sums depends on shapes alone.
In and out: as `fast.many_rows`. Source: spec/kernels.md E.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baltoro.kernels.device import has_dependent_launch, machine

ADDED_ROWS = 16
"""Rows of a tile that a program of the second launch adds: with 128 columns 2048 sums, 16 a thread."""


@dataclass(frozen=True, slots=True)
class StreamTiles:
    """rows and n of a tile of the result, width k of a step, steps under way, warps; programs a processor."""

    rows: int
    n: int
    k: int
    stages: int
    warps: int
    per_unit: int = 1


def choose_tiles(num_rows: int) -> StreamTiles:
    """By the number of rows of x; to be set by scripts/gpu/lab_mla.py."""
    if num_rows <= 64:
        return StreamTiles(64, 128, 64, 7, 4)  # 24 kB a step, 147 kB under way
    if num_rows <= 128:
        return StreamTiles(128, 128, 64, 5, 8)
    return StreamTiles(256, 128, 64, 4, 8)  # 48 kB a step; the weight is read once


def fits(num_rows: int, num_columns: int, tiles: StreamTiles, num_programs: int) -> bool:
    """Whether there are no more tiles than programs."""
    return -(-num_rows // tiles.rows) * -(-num_columns // tiles.n) <= num_programs


def programs(x: Tensor, tiles: StreamTiles) -> int:
    """What runs at a time; on a CPU, under the interpreter, some number that cuts tiles."""
    return machine("cuda", x.device.index or 0).num_units * tiles.per_unit if x.is_cuda else 11


def product(
    x: Tensor, weight: Tensor, first: Tensor, rest: Tensor, num_first: int, *, tiles: StreamTiles | None = None
) -> None:
    """x [T, D], weight [O, D] -> first [T, num_first], rest [T, O - num_first]."""
    from triton import cdiv, knobs

    from baltoro.kernels.linear import stream_kernels

    if not len(x):
        return
    tiles = tiles or choose_tiles(len(x))
    (num_rows, width), num_columns = x.shape, len(weight)
    row_blocks, steps = cdiv(num_rows, tiles.rows), cdiv(width, tiles.k)
    num_tiles = row_blocks * cdiv(num_columns, tiles.n)
    iterations = min(steps, cdiv(num_tiles * steps, programs(x, tiles)))
    count = cdiv(num_tiles * steps, iterations)
    parts = x.new_empty(count, 2, tiles.rows, tiles.n, dtype=first.dtype)
    is_dependent = has_dependent_launch(x)
    launch = {"launch_pdl": True} if is_dependent else {}
    cut = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.n, "PDL": is_dependent}
    stream_kernels.deal[(count,)](
        x, weight, parts, num_rows, num_columns, width, x.stride(0), row_blocks, num_tiles, steps, iterations,
        BLOCK_K=tiles.k, STAGES=tiles.stages, IS_WHOLE=width % tiles.k == 0 and num_columns % tiles.n == 0,
        INTERPRET=knobs.runtime.interpret, num_warps=tiles.warps, **cut, **launch,
    )  # fmt: skip
    stream_kernels.add_parts[(num_tiles, cdiv(tiles.rows, ADDED_ROWS))](
        parts, first, rest, num_rows, num_first, num_columns, row_blocks, steps, iterations,
        ROWS=ADDED_ROWS, num_warps=4, **cut, **launch,
    )  # fmt: skip
