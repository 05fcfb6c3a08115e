"""Launches of grouped products of tiled experts in Gluon, bf16: `gluon_ring` for some rows an expert, inputs put in
order (`tile_order.arranged`, runs of two), and `gluon_few` for few, inputs as they are. Many: `slabs`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baltoro.kernels.device import has_dependent_launch
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_layout import ROW_UNIT, UNIT, padded
from baltoro.kernels.moe.tile_order import arranged

if TYPE_CHECKING:
    from baltoro.kernels.moe.tile_experts import Plan, Tile


def parts(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    plan: Plan,
    num_active: int,
    fake_activations: bool,
) -> Tensor:
    """parts [pairs, M], not weighted yet, of x as `tile_experts.run` has prepared it for the plan's first product."""
    if plan.first.few:
        both = partial(few, table=table, order=order, experts=experts)
        hidden = both(x, activation=activation, num_active=num_active, tile=plan.first, is_rounded=fake_activations)
        return both(hidden, activation=None, num_active=1, tile=plan.second, is_rounded=False)
    hidden = first(x, table, order, experts, activation, plan.first, is_ordered=not fake_activations)
    if fake_activations:
        hidden = arranged(hidden, None, 2, hidden.shape[1], num_active=1, is_rounded=True)
    return second(hidden, table, order, experts, plan.second)


def first(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    tile: Tile,
    *,
    is_ordered: bool,
) -> Tensor:
    """hidden [pairs, F'] of x [pairs, M'] in order; bf16. is_ordered: in the order that `second` wants."""
    inner = padded(experts.inner)
    hidden = torch.empty(len(x), inner, dtype=x.dtype, device=x.device)
    rows = 2 * inner
    options = {"KIND": activation[0], "IS_FIRST": True, "IS_ORDERED": is_ordered}
    _launch(x, table, order, experts.first_packed, experts.first_scale, hidden, rows, activation[1:], tile, options)
    return hidden


def second(hidden: Tensor, table: Tensor, order: Tensor, experts: TiledExperts, tile: Tile) -> Tensor:
    """parts [pairs, M] of hidden [pairs, F'] in order, in the order of the pairs."""
    out = torch.empty(len(hidden), experts.width, dtype=hidden.dtype, device=hidden.device)
    rows = padded(experts.width, ROW_UNIT)
    options = {"KIND": 0, "IS_FIRST": False, "IS_ORDERED": False}
    _launch(hidden, table, order, experts.second_packed, experts.second_scale, out, rows, (1.0, 1.0), tile, options)
    return out


def few(
    x: Tensor,
    *,
    table: Tensor,
    order: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float] | None,
    num_active: int,
    tile: Tile,
    is_rounded: bool,
) -> Tensor:
    """hidden [pairs, F'] of x [tokens, M], bf16, rows apart or not; no activation: parts [pairs, M] of hidden."""
    from baltoro.kernels.moe import gluon_few

    is_first, is_dependent = activation is not None, has_dependent_launch(x)
    kind, *betas = activation or (0, 1.0, 1.0)
    tiles = experts.first if is_first else experts.second
    num_rows = 2 * padded(experts.inner) if is_first else padded(experts.width, ROW_UNIT)
    width = padded(experts.inner) if is_first else experts.width
    out = torch.empty(len(order), width, dtype=x.dtype, device=x.device)
    options: dict[str, Any] = {"maxnreg": tile.registers} if tile.registers else {}
    options |= {"launch_pdl": True} if is_dependent and not is_first else {}
    gluon_few.few_kernel[(num_rows // (64 * tile.warps), table.shape[1])](
        x, table, order, tiles.packed.view(torch.int32), tiles.scale, out, len(tiles.packed), num_active,
        padded(x.shape[1]) // UNIT, num_rows // 8, x.stride(0), x.shape[1], width, *betas,
        WARPS=tile.warps, KIND=kind, IS_FIRST=is_first, IS_WHOLE=x.shape[1] % UNIT == 0,
        IS_ROUNDED=is_rounded, PDL=is_dependent,
        num_warps=tile.warps, **options,
    )  # fmt: skip
    return out


def _launch(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    packed: Tensor,
    scales: Tensor,
    out: Tensor,
    num_rows: int,
    betas: tuple[float, float],
    tile: Tile,
    options: dict[str, Any],
) -> None:
    """Rows of weights of an expert, in blocks, by tiles of the table."""
    from baltoro.kernels.moe import gluon_ring

    grid, units, row_tiles = (num_rows // tile.block, table.shape[1]), x.shape[1] // UNIT, num_rows // 8
    options = options | {"WARPS": tile.warps, "STAGES": tile.stages, "num_warps": tile.warps}
    options |= {"maxnreg": tile.registers} if tile.registers else {}
    is_dependent = has_dependent_launch(x)
    options |= {"launch_pdl": True} if is_dependent and not options["IS_FIRST"] else {}
    gluon_ring.ring_kernel[grid](
        *_weights(packed, scales, tile.block // 8), _boxes(x, tile.rows), _boxes(x, tile.short or tile.rows),
        table, order, out, len(packed), units, row_tiles, out.shape[1], *betas,
        N=tile.rows, SHORT=tile.short, PARTS=tile.block // (16 * tile.warps), AHEAD=tile.ahead, PDL=is_dependent,
        **options,
    )  # fmt: skip


def _weights(packed: Tensor, scales: Tensor, tiles: int) -> tuple[Any, Any]:
    """For the copy engine: boxes of so many tiles of a unit, words [., 4 units, 32], which keeps what threads read from
    the same banks apart, and scale bytes [., 32 units]."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    count, units = packed.shape[0] * packed.shape[1], packed.shape[2]
    layouts = gl.NVMMASharedLayout(128, 32, 3), gl.NVMMASharedLayout(32, 8, 2)
    words, four = packed.view(torch.int32), units * 4
    return (
        TensorDescriptor(words, [count, four, 32], [four * 32, 32, 1], [tiles, 4, 32], layouts[0]),
        TensorDescriptor(scales, [count, units * 32], [units * 32, 1], [tiles, 32], layouts[1]),
    )


def _boxes(x: Tensor, rows: int) -> Any:
    """For the copy engine: boxes of `rows` by two times 64 columns, zeros below the last row. Each copy that a program
    asks for costs it a barrier, so a unit's halves come at once (2699 us instead of 2952 for 16,352 rows)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    height, width = x.shape
    layout = gl.NVMMASharedLayout(128, 16, 3)
    return TensorDescriptor(x, [width // 64, height, 64], [64, width, 1], [2, rows, 64], layout)
