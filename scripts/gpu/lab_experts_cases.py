"""Cases and variants of `lab_experts`: inputs at K3's widths, and the plans that are tried."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baltoro.bench.kernels.moe import ACTIVE, INNER, LATENT, RESIDENT
from baltoro.kernels.moe import tile_experts
from baltoro.kernels.moe.permute import empty
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_experts import FEW, MANY, RING, SMALL, WIDE, Plan, Tile

DEVICE = "cuda"
ACTIVATION = (1, 4.0, 25.0)  # SiTU
CHECKED = 16
EXACT_CASES = ("16 pairs", "512 rows")  # also in float32
# (tokens, pairs a token, is_pairs)
CASES = {
    "16 pairs": (1, ACTIVE, True), "512 rows": (512, 1, False), "16352 rows": (1022, ACTIVE, False),
    "64 pairs": (4, ACTIVE, True), "64 rows": (4, ACTIVE, False),
    "1024 rows": (64, ACTIVE, False), "2048 rows": (128, ACTIVE, False), "4096 rows": (256, ACTIVE, False),
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
        Plan(PAIR, LAST),
        Plan(Tile(8, 0, 64, 1, 3, spread=True), LAST),
        Plan(replace(PAIR, spread=True), replace(LAST, spread=True)),
        Plan(replace(PAIR, spread=True), replace(LAST, split=1)),
        Plan(replace(PAIR, spread=True), Tile(8, 0, 64, 1, 4)),
        Plan(Tile(8, 0, 64, 2, 3, spread=True), Tile(8, 0, 64, 1, 4)),
        Plan(replace(PAIR, spread=True), replace(LAST, fetch=0)),
        Plan(replace(PAIR, spread=True), replace(LAST, fetch=8)),
        Plan(replace(PAIR, spread=True, signal=4), LAST),
        Plan(replace(PAIR, spread=True, stages=4), replace(LAST, stages=4)),
    ),
    "512 rows": (
        both(FEW), both(replace(FEW, few=False)), both(replace(FEW, block=64, warps=1, registers=128)),
        both(Tile(8, 0, 128, 2, 3)),
        both(replace(FEW, ahead=True)), both(Tile(8, 0, 256, 4, 1, few=True)), both(Tile(8, 0, 128, 2, 3, fetch=0)),
        both(Tile(8, 0, 128, 2, 3, spread=True)),
    ),
    "16352 rows": (
        both(MANY),
        both(Tile(128, 32, 128, 8, 3, piped=True)),
        both(replace(MANY, piped=False)),
        both(Tile(64, 32, 128, 8, 3, 128, piped=True)),
        both(Tile(128, 32, 128, 8, 4, piped=True)),
        both(Tile(128, 0, 128, 8, 3, 128, piped=True)),
        both(replace(MANY, stages=4)),
        both(Tile(64, 32, 128, 8, 3, 128)),
    ),
    "64 pairs": (Plan(replace(PAIR, spread=True), LAST),),
    "64 rows": (both(FEW), both(replace(FEW, few=False)), both(Tile(8, 0, 128, 2, 3))),
    "1024 rows": (
        both(SMALL), both(SMALL, short=8, ahead=True), both(SMALL, short=8),
        both(RING, rows=16, short=8, stages=4, ahead=True), both(RING, rows=16, registers=80), both(SMALL, ahead=True),
        both(RING, rows=16, short=8, warps=4, stages=2, ahead=True), both(RING, rows=16, registers=80, ahead=True),
    ),
    "2048 rows": (
        both(RING), both(RING, short=16, ahead=True, stages=4), both(RING, short=16), both(RING, short=16, ahead=True),
        both(RING, short=16, warps=4, stages=2, registers=168),
        both(RING, block=128, short=16, stages=4, registers=80), both(RING, short=16, stages=4),
    ),
    "4096 rows": (both(WIDE), both(WIDE, short=32), both(WIDE, short=32, ahead=True), both(RING)),
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
        word += " piped" * tile.piped + " ring" * tile.ring + " ahead" * tile.ahead
        word += f" short {tile.short}" if tile.short else ""
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


def unwritten(device: str) -> TiledExperts:
    """Experts to compile against: memory as it is."""
    return empty(RESIDENT, LATENT, INNER, device)
