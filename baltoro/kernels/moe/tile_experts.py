"""The product of tiled MXFP4 experts: tiles of weights straight into the matrix instructions' registers.

In and out: as `fast_experts.expert_product`, experts in tiles (tile_layout.py). Products and sums in fp32 (float32
inputs in IEEE fp32, bfloat16 ones with bf16 operands, exact for these weights); rounded to z.dtype between the two
products, and, grouped, once more before the weighted sum. Scale bytes above 160 (2^33) become infinite.
Launches for pairs: two, the second of which starts while the first ends and adds up at its own end; W4A8 has one more,
which rounds. Grouped: count, group, first product, second product, combine; with wgmma inputs are put in order by
launches of their own. No word to the host.
Source: spec/k3.md 3.7, spec/kernels.md E.4, E.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baltoro.errors import InvariantError
from baltoro.kernels.device import HOPPER, has_dependent_launch, machine
from baltoro.kernels.moe import gluon_launch, slabs
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_layout import ROW_UNIT, UNIT, padded
from baltoro.kernels.moe.tile_order import arranged, combine, grouped
from baltoro.kernels.quant.mxfp4 import BLOCK


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: `rows` + `more` rows of inputs (each a power of two, or no more) by `block` of weights.

    registers   most a thread may have, 0 for no bound: fewer, so that more programs are resident
    split       pieces of the columns, each with programs of its own; of the second product of pairs only
    fetch       units of weights that the second product asks for before the first has ended
    spread      programs begin with different columns
    signal      eighths of its columns that each program of the first product has gone over before programs of the
                second may start: what these ask for too early has left the second cache when they need it
    few         grouped, in tiles of 8: the form in Gluon without shared memory (gluon_few.py), 64 rows of weights a
                warp, no stages; the first product's for both
    ring        grouped, by wgmma: the form in Gluon whose weights are asked for `stages` - 1 units ahead
                (gluon_ring.py), with 16 rows of weights a warp of each of 1, 2 or 4 parts; the first product's for both
    short       of the ring: no more than so many rows are a tile of so many; or 0
    ahead       of the ring: words are read a part ahead
    slabs       grouped, by wgmma: the form written out (slab_text.py), with as many rows as each tile has, where it
                runs, otherwise as cut here; the first product's for both
    """

    rows: int
    more: int
    block: int
    warps: int
    stages: int
    registers: int = 0
    split: int = 1
    fetch: int = 4
    spread: bool = False
    signal: int = 0
    few: bool = False
    ring: bool = False
    short: int = 0
    ahead: bool = False
    slabs: bool = False

    @property
    def wide(self) -> int:
        """Columns in a run of a thread's operand: Triton takes wgmma for four warps and 64 rows of weights or more."""
        return 2 if self.warps % 4 == 0 and self.block >= 64 and not self.few else 8

    @property
    def is_arranged(self) -> bool:
        """Whether grouped inputs come in the order of the products' positions."""
        return self.wide == 2


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


@dataclass(frozen=True, slots=True)
class Inputs:
    """How the first product finds its inputs (put in the order of its positions, or as the tokens are), and whether
    it rounds what it leaves for the second through MXFP8."""

    is_arranged: bool
    is_rounded: bool


# mma.sync, which wastes less on 8 rows than wgmma does. For 16 pairs of 6144 and 3584 rows the first has 6 programs a
# multiprocessor; the second would have 3 or 4, so it is split in two along the columns. Timed on an H200 (2026-11-30),
# before inputs were loaded a unit at a time: 95.6 us, against 112 in blocks of 64 rows.
PAIRS = Plan(Tile(8, 0, 128, 2, 3, spread=True, signal=7), Tile(8, 0, 128, 2, 3, split=2))
# By the mean number of rows an expert, up to: more rows a tile share one conversion of the weights; with a bound of
# registers more programs stay on a multiprocessor. On an H200, 112 experts (2026-11-30), us of the whole, W4A16; the
# weights alone need 465 or so:
#     512 rows   SMALL 514, FEW 526
#     768        SMALL 507, FEW 586
#    1024        SMALL 511 and 525, ring of 16 x 256 by eight warps 546 (in Triton 635)
#    2048        RING 610, by eight warps and four stages 619 to 633, without `short` 677, MANY 860
#    4096        WIDE 811 to 899, with `ahead` 860, without `short` 890, MANY 904
#    6144        WIDE 939, MANY 1046
#  16,352        MANY 1680, 1820 on a hot card (in Triton 2667)
# Forms in Gluon are for Hopper and bf16; on other cards these are the cuts of the Triton forms, right but never timed.
FEW, SMALL = Tile(8, 0, 128, 2, 4, few=True), Tile(16, 0, 256, 4, 2, 128, ring=True, short=8, ahead=True)
RING = Tile(32, 0, 256, 4, 2, 168, ring=True, short=16, ahead=True)
WIDE = Tile(64, 0, 256, 8, 3, 128, ring=True, short=32)
MANY = Tile(64, 16, 128, 8, 3, 128, slabs=True)
GROUPS = (
    (4.0, Plan(FEW, FEW)), (12.0, Plan(SMALL, SMALL)), (26.0, Plan(RING, RING)), (60.0, Plan(WIDE, WIDE)),
    (float("inf"), Plan(MANY, MANY)),
)  # fmt: skip
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
    """z [T, M], rows apart or not, ids [T, A], weights [T, A] -> [T, M]. activation: kind, beta, linear beta, as
    `KnownActivation`.

    is_pairs: each pair is a tile of one row and nothing is sorted; otherwise pairs are grouped by expert.
    """
    if not ids.numel():
        return torch.zeros_like(z)
    z = z if z.stride(1) == 1 else z.contiguous()  # its rows may be apart: a slice of a wider product
    ids, count = ids.contiguous(), len(experts.first_packed)
    if plan.first.slabs and not is_pairs and _is_for_gluon(z) and slabs.fits(experts):
        return slabs.run(z, ids, weights, experts, activation, fake_activations=fake_activations)
    order, table = (ids, ids) if is_pairs else grouped(ids, count, plan.rows)
    arrange = partial(arranged, num_active=ids.shape[1])
    is_arranged, x = plan.first.is_arranged and not is_pairs, z
    # by the first product itself where a program has whole blocks of 32; it would break up the runs of wgmma
    is_rounded = fake_activations and plan.first.wide == 8 and plan.first.block >= 64
    if is_arranged:
        x = arrange(z, order, 2, experts.width, is_rounded=fake_activations)
    elif fake_activations:
        x = arrange(z, None, BLOCK, experts.width, is_rounded=True)
    if (plan.first.few or plan.first.ring) and not is_pairs and _is_for_gluon(z):
        parts = gluon_launch.parts(x, table, order, experts, activation, plan, ids.shape[1], fake_activations)
        return combine(parts, weights, z)
    inputs, grid = Inputs(is_arranged, is_rounded), ids.numel() if is_pairs else table.shape[1]
    hidden, counters = first(x, table, ids, order, experts, activation, plan, grid, inputs, is_pairs=is_pairs)
    is_arranged, is_rounded = plan.second.is_arranged and not is_pairs, fake_activations and not is_rounded
    if is_arranged or is_rounded:
        hidden = arrange(hidden, None, 2 if is_arranged else BLOCK, hidden.shape[1], is_rounded=is_rounded)
    if is_pairs:
        return second_of_pairs(hidden, ids, weights, counters, experts, plan.second, z.dtype)
    parts = second_of_groups(hidden, table, order, experts, plan.second)
    return combine(parts, weights, z)


def _is_for_gluon(z: Tensor) -> bool:
    return z.dtype == torch.bfloat16 and machine(z.device.type, z.device.index or 0).capability in HOPPER


def _shape(tile: Tile) -> dict[str, Any]:
    """A kernel's constants and options."""
    from triton import knobs

    bound = {"maxnreg": tile.registers} if tile.registers else {}
    return bound | {
        "BLOCK": tile.block, "WIDE": tile.wide, "WARPS": tile.warps, "SPREAD": tile.spread,
        "INTERPRET": knobs.runtime.interpret,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def first(
    x: Tensor,
    table: Tensor,
    ids: Tensor,
    order: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    plan: Plan,
    grid: int,
    inputs: Inputs,
    *,
    is_pairs: bool,
) -> tuple[Tensor, Tensor]:
    """hidden [pairs, F'] in x.dtype; counters int32 [T, blocks of the second product], zeros (pairs only)."""
    from triton import next_power_of_2

    from baltoro.kernels.moe import tile_kernels

    inner, (kind, beta, linear_beta), tile = padded(experts.inner), activation, plan.first
    hidden = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    num_counters = padded(experts.width, ROW_UNIT) // plan.second.block
    counters = torch.empty(len(ids) if is_pairs else 0, num_counters, dtype=torch.int32, device=x.device)
    units = padded(experts.width) // UNIT
    waits = is_pairs and has_dependent_launch(x)
    tile_kernels.first_product[(2 * inner // tile.block, grid)](
        x, table, ids, order, experts.first_packed.view(torch.int32), _scales(experts.first_scale, tile),
        hidden, counters,
        len(experts.first_packed), ids.shape[1], x.shape[1], x.stride(0), units, inner // UNIT, num_counters,
        beta, linear_beta, KIND=kind, N1=tile.rows, N2=tile.more, COUNTERS=next_power_of_2(num_counters),
        IS_PAIRS=is_pairs, IS_ARRANGED=inputs.is_arranged, IS_WHOLE=x.shape[1] % UNIT == 0,
        IS_ROUNDED=inputs.is_rounded, SIGNAL=tile.signal, PDL=has_dependent_launch(x), WAITS=waits,
        **_shape(tile), **_launch(waits),
    )  # fmt: skip
    return hidden, counters


def second_of_groups(hidden: Tensor, table: Tensor, order: Tensor, experts: TiledExperts, tile: Tile) -> Tensor:
    """parts [pairs, M] of hidden [pairs, F'] sorted by expert, in the order of the pairs."""
    from baltoro.kernels.moe import tile_kernels

    parts = torch.empty(len(hidden), experts.width, dtype=hidden.dtype, device=hidden.device)
    rows, is_dependent = padded(experts.width, ROW_UNIT), has_dependent_launch(hidden) and not tile.is_arranged
    tile_kernels.second_of_groups[(rows // tile.block, table.shape[1])](
        hidden, table, order, experts.second_packed.view(torch.int32), _scales(experts.second_scale, tile), parts,
        len(experts.second_packed), hidden.shape[1] // UNIT, rows // 8, experts.width, N1=tile.rows, N2=tile.more,
        IS_ARRANGED=tile.is_arranged, FETCH=fetched(tile, hidden.shape[1] // UNIT), PDL=is_dependent,
        **_shape(tile), **_launch(is_dependent),
    )  # fmt: skip
    return parts


def second_of_pairs(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    counters: Tensor,
    experts: TiledExperts,
    tile: Tile,
    dtype: torch.dtype,
) -> Tensor:
    """[T, M] in `dtype` of hidden [pairs, F'], ids and weights [T, A], counters of zeros."""
    from triton import next_power_of_2

    from baltoro.kernels.moe import tile_kernels

    rows, is_dependent = padded(experts.width, ROW_UNIT), has_dependent_launch(hidden)
    parts = torch.empty(len(hidden), tile.split, experts.width, dtype=torch.float32, device=hidden.device)
    out = torch.empty(len(ids), experts.width, dtype=dtype, device=hidden.device)
    tile_kernels.second_of_pairs[(rows // tile.block, len(hidden) * tile.split)](
        hidden, ids, weights.contiguous(), experts.second_packed.view(torch.int32),
        _scales(experts.second_scale, tile), parts, counters, out,
        ids.shape[1], hidden.shape[1] // UNIT, rows // 8, experts.width,
        N=tile.rows, SPLIT=tile.split, PARTS=next_power_of_2(ids.shape[1] * tile.split),
        FETCH=fetched(tile, hidden.shape[1] // UNIT), PDL=is_dependent, **_shape(tile), **_launch(is_dependent),
    )  # fmt: skip
    return out


def _scales(scale: Tensor, tile: Tile) -> Tensor:
    """Bytes, or for wgmma words of the four bytes of a row in a unit."""
    return scale if tile.wide == 8 else scale.view(torch.int32)


def fetched(tile: Tile, num_units: int) -> int:
    """Units that are asked for early: a power of two, no more than the least piece of the columns has."""
    units = min(tile.fetch, num_units // tile.split)
    return 1 << units.bit_length() - 1 if units else 0


def _launch(is_dependent: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if is_dependent else {}
