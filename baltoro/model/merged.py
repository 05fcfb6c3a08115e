"""Projections that read the same input, as one matrix: one product instead of many small ones, for inference.

In: Linears with one input width and dtype. Out: a tensor [sum of rows, in]; the Linears' weights become views of its
rows, so nothing is held twice and weights written in place later are seen. Where the weights lie end to end already (a
base that was written merged, and mapped), the tensor is a view of them and nothing is copied or changed.
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


def merge_rows(linears: Sequence[HasWeight], *, may_copy: bool = True, step: int = 1) -> Tensor | None:
    """[sum of rows, in]; writes `weight.data` of each unless they lie end to end. None if that would take a copy which
    may not be made.

    step: a copy has more rows, zeros, up to a multiple of so many. A view has its weights alone: what lies behind them
    may be anything, and a backward multiplies it by zeros, which leaves a NaN one.
    """
    weights = [linear.weight.detach() for linear in linears]
    joined = _end_to_end(weights)
    if joined is not None or not may_copy:
        return joined
    sizes = [len(weight) for weight in weights]
    more = -sum(sizes) % step
    merged = torch.cat([*weights, weights[0].new_zeros(more, *weights[0].shape[1:])])
    for linear, rows in zip(linears, torch.split(merged[: len(merged) - more], sizes), strict=True):
        linear.weight.data = rows
    return merged


def _end_to_end(weights: Sequence[Tensor]) -> Tensor | None:
    """One view over all of them, if each begins where the one before ends."""
    first = weights[0]
    at, rows = first.storage_offset(), 0
    for weight in weights:
        is_next = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_next and weight.storage_offset() == at and weight.is_contiguous() and weight.dtype == first.dtype):
            return None
        at, rows = at + weight.numel(), rows + len(weight)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


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
