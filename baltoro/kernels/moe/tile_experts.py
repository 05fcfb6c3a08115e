"""The product of tiled MXFP4 experts: tiles of weights straight into the matrix instructions' registers.

In and out: as `fast_experts.expert_product`, experts in tiles (tile_layout.py). Products and sums in fp32 (float32
inputs in IEEE fp32, bfloat16 ones with bf16 operands, exact for these weights); rounded to z.dtype between the two
products, and, grouped, once more before the weighted sum. Scale bytes above 160 (2^33) become infinite.
Launches: [count, group], arrange, first product, [arrange with rounding], second product, combine; no word to the host.
Source: spec/k3.md 3.7, spec/kernels.md E.4, E.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baltoro.errors import InvariantError
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_layout import ROW_UNIT, UNIT, padded


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: `rows` + `more` rows of inputs (each a power of two, or no more) by `block` of weights.

    registers   most a thread may have, 0 for no bound: fewer, so that more programs are resident
    """

    rows: int
    more: int
    block: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def wide(self) -> int:
        """Columns in a run of a thread's operand: Triton takes wgmma for four warps and 64 rows of weights or more."""
        return 2 if self.warps % 4 == 0 and self.block >= 64 else 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The cuts of both products. Grouped: both have the same number of rows, since they share a table of tiles."""

    first: Tile
    second: Tile

    @property
    def rows(self) -> int:
        total = self.first.rows + self.first.more
        if total != self.second.rows + self.second.more:
            raise InvariantError("both products need tiles of the same number of rows")
        return total


# mma.sync, which wastes less on 8 rows than wgmma does, in programs of two warps that share only the inputs' tile. For
# 16 pairs of 6144 and 3584 rows every program is resident at once: 24 and 27 warps a multiprocessor.
PAIRS = Plan(Tile(8, 0, 64, 1, 3), Tile(8, 0, 64, 1, 4))
# By the mean number of rows an expert, up to: more rows a tile share one conversion of the weights. Timed on an H200
# (2026-11-30), whole products: 531 us for 512 rows, 3067 us for 16,352. Tiles of 64 or 128 rows without a second part
# gave wrong sums at 128 registers (1.2e-2, NaN) and are not used; nothing between 16 and 96 rows was timed.
GROUPS = (
    (6.0, Plan(Tile(8, 0, 64, 1, 3), Tile(8, 0, 64, 2, 3))),
    (12.0, Plan(Tile(16, 0, 128, 2, 3), Tile(16, 0, 128, 2, 3))),
    (float("inf"), Plan(Tile(64, 32, 128, 8, 3, 128), Tile(64, 32, 128, 8, 3, 128))),
)
# Products in IEEE fp32 use no matrix instruction; right, not fast.
EXACT = Plan(Tile(16, 0, 64, 4, 1), Tile(16, 0, 64, 4, 1))


def plan_for(num_pairs: int, num_experts: int, dtype: torch.dtype, *, is_pairs: bool) -> Plan:
    """The cuts for a number of pairs: the one place where they are set."""
    if dtype == torch.float32:
        return EXACT
    if is_pairs:
        return PAIRS
    return next(plan for limit, plan in GROUPS if num_pairs <= limit * num_experts)


def run(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    plan: Plan,
    *,
    is_pairs: bool,
    fake_activations: bool = False,
) -> Tensor:
    """z [T, M], ids [T, A], weights [T, A] -> [T, M]. activation: kind, beta, linear beta (`KnownActivation`).

    is_pairs: each pair is a tile of one row and nothing is sorted; otherwise pairs are grouped by expert.
    """
    from triton import cdiv

    from baltoro.kernels.moe import tile_moves

    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if not ids.numel():
        return out.zero_()
    z, ids, count = z.contiguous(), ids.contiguous(), len(experts.first_packed)
    order, table = (ids, ids) if is_pairs else grouped(ids, count, plan.rows)
    arrange = partial(arranged, num_active=ids.shape[1], is_rounded=fake_activations)
    x = arrange(z, None if is_pairs else order, plan.first.wide, experts.width)
    grid = ids.numel() if is_pairs else table.shape[1]
    # Stores to arranged columns would break up the runs of wgmma (ptxas C7515): there, another pass arranges.
    is_arranged = plan.second.wide == 8 and plan.first.wide == 8 and not fake_activations
    hidden = first(x, table, ids, experts, activation, plan, grid, is_pairs=is_pairs, is_arranged=is_arranged)
    if not is_arranged:
        hidden = arrange(hidden, None, plan.second.wide, hidden.shape[1])
    parts = second(hidden, table, ids, order, experts, plan.second, grid, is_pairs=is_pairs)
    tile_moves.combine[(len(z), cdiv(experts.width, 512))](
        parts, weights.contiguous(), out, ids.shape[1], experts.width, BLOCK=512, num_warps=2
    )
    return out


def grouped(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """`tiles.tile_table` in two launches: order int64 [pairs], table int32 [3, tiles]."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.moe import tile_moves

    num_pairs = ids.numel()
    num_tiles = cdiv(num_pairs, rows) + num_experts
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_pairs, dtype=torch.int64, device=ids.device)
    table = torch.empty(3, num_tiles, dtype=torch.int32, device=ids.device)
    block = 1024 if num_pairs > 512 else 512
    tile_moves.count[(num_experts,)](ids, counts, num_pairs, BLOCK=block, num_warps=4)
    tile_moves.group[(num_experts + 1,)](
        ids, counts, order, table, num_pairs, num_experts, num_tiles, rows,
        BLOCK=block, EXPERTS=next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip
    return order, table


def arranged(x: Tensor, order: Tensor | None, wide: int, width: int, *, num_active: int, is_rounded: bool) -> Tensor:
    """x [., width] -> [rows, width padded] in the products' order of columns; rows as `order` says."""
    from triton import cdiv

    from baltoro.kernels.moe import tile_moves

    rows, units = len(x) if order is None else len(order), padded(width) // UNIT
    out = torch.empty(rows, units * UNIT, dtype=x.dtype, device=x.device)
    tile_moves.arrange[(rows, cdiv(units, 8))](
        x, x if order is None else order, out, num_active, width, units,
        UNITS=8, WIDE=wide, IS_SORTED=order is not None, IS_ROUNDED=is_rounded, num_warps=4,
    )  # fmt: skip
    return out


def _shape(tile: Tile, *, is_pairs: bool) -> dict[str, Any]:
    """A kernel's constants and options."""
    from triton import knobs

    bound = {"maxnreg": tile.registers} if tile.registers else {}
    return bound | {
        "N1": tile.rows, "N2": tile.more, "BLOCK": tile.block, "WIDE": tile.wide, "WARPS": tile.warps,
        "IS_PAIRS": is_pairs, "INTERPRET": knobs.runtime.interpret,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def first(
    x: Tensor,
    table: Tensor,
    ids: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    plan: Plan,
    grid: int,
    *,
    is_pairs: bool,
    is_arranged: bool,
) -> Tensor:
    """hidden [pairs, F'] in x.dtype."""
    from baltoro.kernels.moe import tile_kernels

    inner, (kind, beta, linear_beta), w = padded(experts.inner), activation, experts.first
    hidden = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    tile_kernels.first_product[(2 * inner // plan.first.block, grid)](
        x, table, ids, w.packed.view(torch.int32), w.scale, hidden,
        len(w.packed), ids.shape[1], x.shape[1] // UNIT, inner // UNIT, beta, linear_beta,
        KIND=kind, WIDE_NEXT=plan.second.wide, IS_ARRANGED=is_arranged, **_shape(plan.first, is_pairs=is_pairs),
    )  # fmt: skip
    return hidden


def second(
    hidden: Tensor,
    table: Tensor,
    ids: Tensor,
    order: Tensor,
    experts: TiledExperts,
    tile: Tile,
    grid: int,
    *,
    is_pairs: bool,
) -> Tensor:
    """parts [pairs, M], fp32 for single pairs."""
    from baltoro.kernels.moe import tile_kernels

    w, kept = experts.second, torch.float32 if is_pairs else hidden.dtype
    parts = torch.empty(ids.numel(), experts.width, dtype=kept, device=hidden.device)
    rows = padded(experts.width, ROW_UNIT)
    tile_kernels.second_product[(rows // tile.block, grid)](
        hidden, table, ids, order, w.packed.view(torch.int32), w.scale, parts,
        len(w.packed), hidden.shape[1] // UNIT, rows // 8, experts.width, **_shape(tile, is_pairs=is_pairs),
    )  # fmt: skip
    return parts
