"""Projections that read the same input, as one matrix: one product instead of many small ones, for inference.

In: Linears with one input width and dtype. Out: a tensor [sum of rows, in]; the Linears' weights become views of its
rows, so nothing is held twice and weights written in place later are seen.
Adapters are not part of it: each projection adds its own term to its own columns.
Limits: not for training (a view of a parameter has no gradient of its own); call it after the model is on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from baltoro.kernels.lora.rows import AdapterRows
from baltoro.model.linear import Linear


class HasWeight(Protocol):
    """A module with a weight [rows, in]."""

    weight: nn.Parameter


def merge_rows(linears: Sequence[HasWeight]) -> Tensor:
    """[sum of rows, in]; writes `weight.data` of each."""
    merged = torch.cat([linear.weight.detach() for linear in linears])
    for linear, rows in zip(linears, torch.split(merged, [one.weight.shape[0] for one in linears]), strict=True):
        linear.weight.data = rows
    return merged


def add_loras(merged: Tensor, readers: Sequence[HasWeight], x: Tensor, rows: AdapterRows | None) -> Tensor:
    """A merged product of x, in whose columns each reader's adapters have added their terms.

    One tensor again, not one a reader: what follows then works on the same layout, and so to the same bits.
    """
    if rows is None:
        return merged
    parts = torch.split(merged, [one.weight.shape[0] for one in readers], dim=-1)
    pairs = zip(parts, readers, strict=True)
    sums = [one.add_lora(part, x, rows) if isinstance(one, Linear) else part for part, one in pairs]
    return merged if all(new is old for new, old in zip(sums, parts, strict=True)) else torch.cat(sums, dim=-1)
