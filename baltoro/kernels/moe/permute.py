"""Packed experts put into tiles (tile_layout.py), and their published bytes back.

In: `ExpertWeights` of packed matrices. Out: `TiledExperts`, copies; an expert at a time, so that little more than the
copies is held. Scales are taken as they are: whoever computes in bf16 asks `fits_bf16` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.moe.products import ExpertWeights, Packed, Tiled, TiledExperts
from baltoro.kernels.moe.tile_layout import ROW_UNIT, ROWS, UNIT, padded, permute_matrix, unpermute_matrix
from baltoro.kernels.quant.mxfp4 import BLOCK

MAX_SCALE = 160  # the byte of 2^33: beyond, products of tiles in bf16 become infinite


def permute_experts(experts: ExpertWeights) -> TiledExperts:
    """Tiles of packed matrices. Errors: TypeError for dense matrices."""
    gate, up, down = _packed(experts.w1), _packed(experts.w3), _packed(experts.w2)
    count, inner, width = len(gate.packed), gate.packed.shape[1], down.packed.shape[1]
    out = empty(count, width, inner, gate.packed.device)
    for expert in range(count):
        halves = [permute_matrix(w.packed[expert], w.scale[expert], UNIT) for w in (gate, up)]
        for into, one in zip((out.first.packed, out.first.scale), zip(*halves, strict=True), strict=True):
            into[expert].copy_(torch.stack(one, 1).flatten(0, 1))
        packed, scale = permute_matrix(down.packed[expert], down.scale[expert], ROW_UNIT)
        out.second.packed[expert].copy_(packed)
        out.second.scale[expert].copy_(scale)
    return out


def published(tiles: Tiled) -> Packed:
    """The bytes of all experts of a matrix in the published order: a copy."""
    count, device = len(tiles.packed), tiles.packed.device
    packed = torch.empty(count, tiles.rows, tiles.columns // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(count, tiles.rows, tiles.columns // BLOCK, dtype=torch.uint8, device=device)
    for expert in range(count):
        one = unpermute_matrix(tiles.packed[expert], tiles.scale[expert], tiles.rows, tiles.columns)
        packed[expert].copy_(one[0])
        scale[expert].copy_(one[1])
    return Packed(packed, scale)


def fits_bf16(experts: ExpertWeights) -> bool:
    """Whether products of its tiles in bf16 are exact: no scale is beyond MAX_SCALE."""
    return all(int(_packed(w).scale.max()) <= MAX_SCALE for w in (experts.w1, experts.w3, experts.w2))


def empty(count: int, width: int, inner: int, device: torch.device | str) -> TiledExperts:
    """Memory for tiles of `count` experts, M and F given."""
    first = _tiles(count, 2 * padded(inner), padded(width), device)
    second = _tiles(count, padded(width, ROW_UNIT), padded(inner), device)
    return TiledExperts(*first, *second, width, inner)


def _tiles(count: int, rows: int, columns: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    shape = (count, rows // ROWS, columns // UNIT)
    sizes = (ROWS * UNIT // 2, ROWS * UNIT // BLOCK)
    packed, scale = (torch.empty(*shape, size, dtype=torch.uint8, device=device) for size in sizes)
    return packed, scale


def _packed(weight: Tensor | Packed | Tiled) -> Packed:
    if not isinstance(weight, Packed):
        raise TypeError("only packed experts in the published order can be put into tiles; quantise dense ones first")
    return weight
