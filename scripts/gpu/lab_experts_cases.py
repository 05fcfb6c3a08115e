"""Cases and variants of `lab_experts`: inputs at K3's widths, and the plans that are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from baltoro.bench.kernels.moe import ACTIVE, INNER, LATENT, RESIDENT
from baltoro.kernels.moe import gluon_launch, slabs, tile_experts, tile_order
from baltoro.kernels.moe.permute import empty
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.slab_end_text import MOST
from baltoro.kernels.moe.tile_experts import FEW, MANY, RING, SMALL, WIDE, Plan, Tile
from baltoro.kernels.moe.tile_layout import padded

DEVICE = "cuda"
ACTIVATION = (1, 4.0, 25.0)  # SiTU
CHECKED = 16
EXACT_CASES = ("16 pairs", "512 rows")  # also in float32
# (tokens, pairs a token, is_pairs)
CASES = {
    "16 pairs": (1, ACTIVE, True), "512 rows": (512, 1, False), "16352 rows": (1022, ACTIVE, False),
    "64 pairs": (4, ACTIVE, True), "64 rows": (4, ACTIVE, False),
    "768 rows": (48, ACTIVE, False), "1024 rows": (64, ACTIVE, False), "2048 rows": (128, ACTIVE, False),
    "4096 rows": (256, ACTIVE, False), "6144 rows": (384, ACTIVE, False),
}  # fmt: skip
PAIR, LAST = Tile(8, 0, 128, 2, 3), Tile(8, 0, 128, 2, 3, split=2)


def both(tile: Tile, **changes: object) -> Plan:
    tile = replace(tile, **changes)  # type: ignore[arg-type]
    return Plan(tile, tile)


# The most promising first.
VARIANTS: dict[str, tuple[Plan, ...]] = {
    "16 pairs": (
        Plan(replace(PAIR, spread=True, signal=7), LAST),
        Plan(replace(PAIR, spread=True), LAST),
        Plan(replace(PAIR, spread=True, signal=7), replace(LAST, split=1)),
    ),
    "512 rows": (both(FEW), both(SMALL), both(FEW, block=64, warps=1, registers=128)),
    "64 pairs": (Plan(replace(PAIR, spread=True, signal=7), LAST), Plan(replace(PAIR, spread=True), LAST)),
    "64 rows": (both(FEW), both(FEW, few=False)),
    "768 rows": (both(SMALL), both(FEW)),
    "1024 rows": (both(SMALL), both(RING)),
    "2048 rows": (both(RING), both(RING, warps=8, stages=4, registers=128), both(WIDE)),
    "4096 rows": (both(WIDE), both(WIDE, ahead=True), both(MANY)),
    "6144 rows": (both(WIDE), both(MANY)),
    "16352 rows": (both(MANY),),
}  # fmt: skip


def short(plan: Plan) -> str:
    """Both cuts: rows+more x block, warps, stages, [registers], [split], [spread], [signal], form, fetch."""
    words = []
    for tile in (plan.first, plan.second):
        word = f"{tile.rows}+{tile.more}x{tile.block} w{tile.warps} s{tile.stages}"
        word += f" r{tile.registers}" if tile.registers else ""
        word += f" k{tile.split}" if tile.split > 1 else ""
        word += " spread" * tile.spread + (f" after {tile.signal}/8" if tile.signal else "")
        word += " few" * tile.few
        word += " ring" * tile.ring + " ahead" * tile.ahead + (f" short {tile.short}" if tile.short else "")
        word = "slabs" if tile.slabs else word
        words.append(word)
    same = words[0] == words[1]
    return f"({words[0] if same else ' | '.join(words)}, fetch {plan.second.fetch})"


@dataclass
class Case:
    """Inputs of a case and its reference for the first tokens."""

    name: str
    z: Tensor
    ids: Tensor
    shares: Tensor
    is_pairs: bool
    exact: Tensor | None = None
    times: dict[Plan, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def checked(self) -> Tensor:
        """Tokens whose result is compared: from all of them, so that they have all places in tiles."""
        return torch.arange(len(self.z), device=self.z.device)[:: max(1, len(self.z) // CHECKED)][:CHECKED]


def configured(c: Case) -> Plan:
    return tile_experts.plan_for(c.ids.numel(), RESIDENT, torch.bfloat16, is_pairs=c.is_pairs)


def as_float32(c: Case) -> Case:
    """Its first tokens."""
    return Case(c.name, c.z.float()[c.checked], c.ids[c.checked], c.shares[c.checked], c.is_pairs)


def case(name: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Pairs of distinct experts, drawn at random."""
    tokens, active, is_pairs = CASES[name]
    ids = torch.rand(tokens, RESIDENT, device=device).topk(active).indices
    z = torch.randn(tokens, LATENT, device=device, dtype=dtype)
    return Case(name, z, ids, torch.rand(tokens, active, device=device), is_pairs)


def products(experts: TiledExperts, c: Case, plan: Plan) -> tuple[Callable[[], object], ...]:
    """Launches of the first and the second product alone."""
    if plan.first.slabs:
        return slab_products(experts, c)
    order, table, grid = c.ids, c.ids, c.ids.numel()
    if not c.is_pairs:
        order, table = tile_order.grouped(c.ids, RESIDENT, plan.rows)
        grid = table.shape[1]
    inputs = tile_experts.Inputs(plan.first.is_arranged and not c.is_pairs, is_rounded=False)
    x = c.z
    if inputs.is_arranged:
        x = torch.randn(c.ids.numel(), padded(LATENT), device=c.z.device, dtype=c.z.dtype)
    hidden = torch.randn(c.ids.numel(), padded(INNER), device=c.z.device, dtype=c.z.dtype)
    counters = torch.zeros(len(c.ids), 1024, dtype=torch.int32, device=c.z.device)

    few = partial(gluon_launch.few, table=table, order=order, experts=experts, tile=plan.first, is_rounded=False)

    def first() -> object:
        if plan.first.few:
            return few(x, activation=ACTIVATION, num_active=c.ids.shape[1])
        if plan.first.ring:
            return gluon_launch.first(x, table, order, experts, ACTIVATION, plan.first, is_ordered=True)
        return tile_experts.first(x, table, c.ids, order, experts, ACTIVATION, plan, grid, inputs, is_pairs=c.is_pairs)

    def second() -> object:
        if c.is_pairs:  # its counters go on: nothing is added up
            return tile_experts.second_of_pairs(hidden, c.ids, c.shares, counters, experts, plan.second, c.z.dtype)
        if plan.second.few:
            return few(hidden, activation=None, num_active=1)
        if plan.second.ring:
            return gluon_launch.second(hidden, table, order, experts, plan.second)
        return tile_experts.second_of_groups(hidden, table, order, experts, plan.second)

    return first, second


def slab_products(experts: TiledExperts, c: Case) -> tuple[Callable[[], object], ...]:
    """The same of the form with slabs."""
    order, table = tile_order.grouped(c.ids, RESIDENT, MOST, slabs.ALIGN)
    x = torch.randn(padded(LATENT) // 64, len(order), 64, device=c.z.device, dtype=c.z.dtype)
    hidden = torch.randn(padded(INNER) // 64, len(order), 64, device=c.z.device, dtype=c.z.dtype)
    return (
        partial(slabs.first, x, table, order, experts, ACTIVATION, is_ordered=True),
        partial(slabs.second, hidden, table, order, experts, c.ids.numel()),
    )


def unwritten(device: str) -> TiledExperts:
    """Experts to compile against: memory as it is."""
    return empty(RESIDENT, LATENT, INNER, device)
