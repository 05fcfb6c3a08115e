"""An order of MXFP4 nibbles for kernels: a byte holds two columns that lie half a block apart.

    published:  byte j of a block = columns 2j (low nibble) and 2j + 1 (high)
    halved:     byte j of a block = columns j (low) and j + 16 (high)

In a halved row the low nibbles of a block are 16 neighbouring columns, and so are the high ones: inputs are read in
whole runs instead of every second value. Scales stay as they are. Files always hold the published order.
Source: spec/kernels.md E.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.kernels.moe.experts import ExpertWeights, Packed
from baltoro.kernels.quant.mxfp4 import BLOCK, pack, unpack


@dataclass(frozen=True, slots=True)
class HalvedExperts:
    """The experts' matrices with halved bytes; shapes as in `Packed`."""

    w1: Packed
    w3: Packed
    w2: Packed


def permute(packed: Tensor) -> Tensor:
    """Published bytes uint8 [..., C/2] -> halved bytes, a new tensor."""
    codes = torch.unflatten(unpack(packed), -1, (-1, BLOCK))
    half = BLOCK // 2
    return (codes[..., :half] | (codes[..., half:] << 4)).flatten(-2)


def unpermute(halved: Tensor) -> Tensor:
    """The published bytes of halved ones, a new tensor."""
    blocks = torch.unflatten(halved, -1, (-1, BLOCK // 2))
    return pack(torch.cat((blocks & 15, blocks >> 4), dim=-1).flatten(-2))


def permute_experts(experts: ExpertWeights) -> HalvedExperts:
    """Halved copies of packed matrices, an expert at a time, so that little more than the copies is held.

    Errors: TypeError for dense matrices.
    """
    return HalvedExperts(_halved(experts.w1), _halved(experts.w3), _halved(experts.w2))


def _halved(weight: Tensor | Packed) -> Packed:
    if not isinstance(weight, Packed):
        raise TypeError("only packed experts have an order of nibbles; quantise dense ones first")
    out = torch.empty_like(weight.packed)
    for into, one in zip(out, weight.packed, strict=True):
        into.copy_(permute(one))
    return Packed(out, weight.scale)
