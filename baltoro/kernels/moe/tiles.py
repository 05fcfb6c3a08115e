"""Pairs grouped by expert, and the tiles of rows that a fixed grid works on: all on the device, no word to the host.

In: ids [T, A]. Out: the order of the pairs by expert, and a table of tiles whose length depends on shapes alone, so a
launch over it can be captured in a graph. Source: spec/kernels.md E.5 (grouping on the device).
"""

from __future__ import annotations

import torch
from torch import Tensor


def tile_table(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """ids int64 [T, A] -> order int64 [pairs], tiles int32 [3, ceil(pairs / rows) + E].

    order: places in ids.flatten(), sorted by expert, stable. A tile: expert, first row, end row of the expert, in
    sorted pairs; unused tiles have the expert `num_experts`. A tile has at most `rows` rows.
    """
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    tile_ends = (counts + rows - 1).div(rows, rounding_mode="floor").cumsum(0)
    tile = torch.arange(-(-len(flat) // rows) + num_experts, device=ids.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    real = expert.clamp(max=num_experts - 1)
    before = tile_ends[real] - (counts[real] + rows - 1).div(rows, rounding_mode="floor")
    first = ends[real] - counts[real] + (tile - before) * rows
    return order, torch.stack((expert, first, ends[real])).int()
