"""Launches around the products of tiled experts: pairs grouped by expert, inputs put in order, the last sum."""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.moe.tile_layout import UNIT, padded


def grouped(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """`tiles.tile_table` in two launches: order int64 [pairs], table int32 [3, tiles]."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.moe import tile_moves

    num_pairs = ids.numel()
    num_tiles = cdiv(num_pairs, rows) + num_experts
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_pairs, dtype=torch.int64, device=ids.device)
    table = torch.empty(3, num_tiles, dtype=torch.int32, device=ids.device)
    block, warps = (4096, 8) if num_pairs > 4096 else (1024 if num_pairs > 512 else 512, 4)
    tile_moves.count[(num_experts,)](ids, counts, num_pairs, BLOCK=block, num_warps=warps)
    tile_moves.group[(num_experts + 1,)](
        ids, counts, order, table, num_pairs, num_experts, num_tiles, rows,
        BLOCK=block, EXPERTS=next_power_of_2(num_experts), num_warps=warps,
    )  # fmt: skip
    return order, table


def arranged(x: Tensor, order: Tensor | None, wide: int, width: int, *, num_active: int, is_rounded: bool) -> Tensor:
    """x [., width], rows apart or not -> [rows, width padded], columns in the products' order, rows as `order` says."""
    from triton import cdiv

    from baltoro.kernels.moe import tile_moves

    rows, units = len(x) if order is None else len(order), padded(width) // UNIT
    out = torch.empty(rows, units * UNIT, dtype=x.dtype, device=x.device)
    piece = 8 if rows < 1024 else 32  # few rows: more programs; many: fewer, each with more bytes on the way
    tile_moves.arrange[(rows, cdiv(units, piece))](
        x, x if order is None else order, out, num_active, width, x.stride(0), units,
        UNITS=piece, WIDE=wide, IS_SORTED=order is not None, IS_ROUNDED=is_rounded, num_warps=4,
    )  # fmt: skip
    return out


def combine(parts: Tensor, weights: Tensor, z: Tensor) -> Tensor:
    """[T, M] in z.dtype: the weighted sums of parts [pairs, M]."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.moe import tile_moves

    out, width, active = torch.empty_like(z), parts.shape[1], weights.shape[1]
    # a warp adds up all parts of its columns: more warps would pass sums through shared memory (64 / 1022 tokens of 16
    # parts of 3584 columns: 2.7 / 31 us, 10.3 / 138 in blocks of 256 columns by four warps)
    tile_moves.combine[(len(z), cdiv(width, 128))](
        parts, weights.contiguous(), out, active, width, PARTS=next_power_of_2(active), BLOCK=128, num_warps=1
    )
    return out
