"""Cases and variants of `lab_experts`: inputs at K3's widths, and the cuts that are tried, the most promising first."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from baltoro.bench.kernels.moe import ACTIVE, INNER, LATENT, RESIDENT
from baltoro.kernels.moe import tile_experts
from baltoro.kernels.moe.permute import empty
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_experts import Plan, Tile

DEVICE = "cuda"
ACTIVATION = (1, 4.0, 25.0)  # SiTU
CHECKED = 16
EXACT_CASES = ("16 pairs", "512 rows")  # also in float32
# (tokens, pairs a token, is_pairs)
CASES = {"16 pairs": (1, ACTIVE, True), "512 rows": (512, 1, False), "16352 rows": (1022, ACTIVE, False)}
# (rows, more, block, warps, stages, most registers), the most promising first
VARIANTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "16 pairs": (
        (8, 0, 64, 2, 3), (8, 0, 32, 2, 4), (8, 0, 32, 1, 4), (8, 0, 64, 1, 3), (8, 0, 32, 2, 3), (8, 0, 64, 2, 4),
        (8, 0, 32, 1, 3), (8, 0, 16, 1, 4), (8, 0, 32, 2, 6), (8, 0, 64, 1, 4), (8, 0, 32, 1, 1), (8, 0, 128, 2, 3),
        (8, 0, 16, 1, 6),
    ),
    "512 rows": (
        (8, 0, 64, 2, 3), (8, 0, 64, 1, 3), (16, 0, 64, 2, 3), (8, 0, 32, 1, 4), (8, 0, 128, 2, 3), (8, 0, 64, 2, 4),
        (16, 0, 64, 1, 3), (16, 0, 128, 2, 3), (16, 0, 32, 1, 4), (16, 0, 128, 8, 4), (8, 0, 32, 2, 4),
    ),
    "16352 rows": (
        (128, 32, 128, 8, 3), (64, 32, 128, 8, 3, 128), (128, 64, 128, 8, 3), (64, 16, 128, 8, 3, 128),
        (128, 0, 128, 8, 3, 128), (64, 0, 128, 8, 3, 128), (128, 0, 256, 16, 3), (64, 0, 128, 8, 4, 128),
        (128, 32, 128, 8, 4), (64, 64, 128, 8, 3), (128, 32, 256, 16, 3),
    ),
}  # fmt: skip


@dataclass
class Case:
    """Inputs of a case and its reference for the first tokens."""

    name: str
    z: Tensor
    ids: Tensor
    shares: Tensor
    is_pairs: bool
    exact: Tensor | None = None
    times: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)


def configured(c: Case) -> Plan:
    return tile_experts.plan_for(c.ids.numel(), RESIDENT, torch.bfloat16, is_pairs=c.is_pairs)


def as_float32(c: Case) -> Case:
    """Its first tokens."""
    return Case(c.name, c.z.float()[:CHECKED], c.ids[:CHECKED], c.shares[:CHECKED], c.is_pairs)


def plan_of(variant: tuple[int, ...]) -> Plan:
    return Plan(Tile(*variant), Tile(*variant))


def case(name: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Pairs of distinct experts, drawn at random."""
    tokens, active, is_pairs = CASES[name]
    ids = torch.rand(tokens, RESIDENT, device=device).topk(active).indices
    z = torch.randn(tokens, LATENT, device=device, dtype=dtype)
    return Case(name, z, ids, torch.rand(tokens, active, device=device), is_pairs)


def unwritten(device: str) -> TiledExperts:
    """Experts to compile against: memory as it is."""
    return empty(RESIDENT, LATENT, INNER, device)
