"""Pairs grouped by expert, and the tiles of rows that a fixed grid works on: all on the device, no word to the host.

In: ids [T, A]. Out: the order of the pairs by expert, and a table of tiles whose length depends on shapes alone, so a
launch over it can be captured in a graph. Source: spec/kernels.md E.5 (grouping on the device).
"""

from __future__ import annotations

import torch
from torch import Tensor


def places(num_pairs: int, num_experts: int, align: int) -> int:
    """Places for pairs sorted by expert where each expert's begin at a multiple of `align`."""
    return -(-(num_pairs + num_experts * (align - 1)) // align) * align


def tile_table(ids: Tensor, num_experts: int, rows: int, align: int = 1) -> tuple[Tensor, Tensor]:
    """ids int64 [T, A] -> order int64 [places], tiles int32 [3, ceil(pairs / rows) + E].

    order: places in ids.flatten(), sorted by expert, stable. A tile: expert, first row, end, in sorted pairs; unused
    tiles have the expert `num_experts`. A tile has at most `rows` rows.
    align: an expert's pairs begin at a multiple of it, -1 in `order` where there is none, and where they need more
    than one tile, these have the same number of rows, rounded up to a multiple of it.
    """
    flat = ids.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    wide = _up(counts, align) * align
    starts, begins = wide.cumsum(0) - wide, counts.cumsum(0) - counts
    by_expert = torch.argsort(flat, stable=True)
    order = torch.full((places(len(flat), num_experts, align),), -1, dtype=torch.int64, device=ids.device)
    order[torch.arange(len(flat), device=ids.device) + (starts - begins)[flat[by_expert]]] = by_expert
    tiles = _up(counts, rows)
    each = torch.full_like(counts, rows) if align == 1 else _up(_up(counts, tiles.clamp(min=1)), align) * align
    tile_ends = tiles.cumsum(0)
    tile = torch.arange(-(-len(flat) // rows) + num_experts, device=ids.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    real = expert.clamp(max=num_experts - 1)
    before = (tile - (tile_ends - tiles)[real]) * each[real]
    end = torch.minimum(before + each[real], counts[real])
    return order, torch.stack((expert, starts[real] + before, starts[real] + end)).int()


def _up(count: Tensor, by: Tensor | int) -> Tensor:
    return (count + by - 1).div(by, rounding_mode="floor")
