"""Projections that read the same input, as one matrix: one product instead of many small ones, for inference.

In: Linears with one input width and dtype. Out: a tensor [sum of rows, in]; the Linears' weights become views of its
rows, so nothing is held twice and weights written in place later are seen.
Limits: not for training (a view of a parameter has no gradient of its own); call it after the model is on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class HasWeight(Protocol):
    """A module with a weight [rows, in]."""

    weight: nn.Parameter


def merge_rows(linears: Sequence[HasWeight]) -> Tensor:
    """[sum of rows, in]; writes `weight.data` of each."""
    merged = torch.cat([linear.weight.detach() for linear in linears])
    for linear, rows in zip(linears, torch.split(merged, [one.weight.shape[0] for one in linears]), strict=True):
        linear.weight.data = rows
    return merged
