"""Weights of experts, dense or packed, and their products with rows that are grouped by expert; gradients included.

In: rows [P, in] in groups (expert, number of rows). Out: [P, out], each group times its expert's matrix.
Packed weights get no gradient and are dequantised on use, a few experts at a time; a backward dequantises them again,
so nothing dense of a frozen base is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.kernels.quant import mxfp4

# Packed weights are dequantised as many experts at a time as fit into this many elements, at least one.
DEQUANTISE_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Packed:
    """MXFP4 weights of E experts: packed uint8 [E, out, in/2], scale uint8 [E, out, in/32]."""

    packed: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """w1 (gate) and w3 (up) [E, F, M], w2 (down) [E, M, F]; each dense or packed."""

    w1: Tensor | Packed
    w3: Tensor | Packed
    w2: Tensor | Packed

    def take(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Dense w1, w3, w2 of experts `ids` [B], each [B, out, in] in `dtype`."""
        return take(self.w1, ids, dtype), take(self.w3, ids, dtype), take(self.w2, ids, dtype)

    def fake(self) -> ExpertWeights:
        """Dense weights through MXFP4 fake quantisation; packed ones are quantised already."""
        w1, w3, w2 = (w if isinstance(w, Packed) else mxfp4.fake(w) for w in (self.w1, self.w3, self.w2))
        return ExpertWeights(w1, w3, w2)


def take(weight: Tensor | Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense matrices [B, out, in] of experts `ids` [B] in `dtype`."""
    if isinstance(weight, Packed):
        return mxfp4.dequantise(weight.packed[ids], weight.scale[ids], dtype)
    return weight[ids].to(dtype)


def scatter(x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
    """x [T, D], each row `copies` times, in the given order: row i is x[order[i] // copies]. `place` undoes `order`."""
    result: Tensor = _Scatter.apply(x, order, place, copies)  # type: ignore[no-untyped-call]
    return result


class _Scatter(torch.autograd.Function):
    """Its gradient is a gather and a sum over the copies: no atomics, and the same on every run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        x = grad.index_select(0, place)
        return (torch.unflatten(x, 0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else x), None, None, None


def grouped_linear(x: Tensor, weight: Tensor | Packed, groups: list[tuple[int, int]]) -> Tensor:
    """x [P, in], rows in groups (expert, number of rows) -> [P, out]: each group times its expert's matrix."""
    if isinstance(weight, Tensor):
        result: Tensor = _GroupedLinear.apply(x, weight.to(x.dtype), groups)  # type: ignore[no-untyped-call]
        return result
    packed: Tensor = _PackedLinear.apply(x, weight.packed, weight.scale, groups)  # type: ignore[no-untyped-call]
    return packed


def _packed_product(x: Tensor, weight: Packed, groups: list[tuple[int, int]], *, is_transposed: bool) -> Tensor:
    """x [P, in], rows in groups, times the matrices [out, in] of their experts; transposed: [P, out] -> [P, in]."""
    at_once = max(1, DEQUANTISE_AT_ONCE // (weight.packed[0].numel() * 2))
    parts, outputs = torch.split(x, [count for _, count in groups]), []
    for first in range(0, len(groups), at_once):
        ids = torch.tensor([expert for expert, _ in groups[first : first + at_once]], device=x.device)
        matrices = take(weight, ids, x.dtype)
        matrices = matrices if is_transposed else matrices.mT
        outputs += [part @ matrix for part, matrix in zip(parts[first : first + at_once], matrices, strict=True)]
    return torch.cat(outputs)


class _PackedLinear(torch.autograd.Function):
    """MXFP4 weight, without a gradient. Kept for backward are its own bytes, which are dequantised once more there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.groups = groups
        return _packed_product(x, Packed(packed, scale), groups, is_transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _packed_product(grad, Packed(*ctx.saved_tensors), ctx.groups, is_transposed=True), None, None, None


class _GroupedLinear(torch.autograd.Function):
    """Dense weight [E, out, in]. Written out so that the weight's gradient is one tensor, not one per expert, and none
    at all for a frozen base."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.groups = groups
        out, first = x.new_empty(len(x), weight.shape[1]), 0
        for expert, count in groups:
            torch.mm(x[first : first + count], weight[expert].T, out=out[first : first + count])
            first += count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x, first = grad.new_empty(len(grad), weight.shape[2]), 0
        d_weight = None if x is None else torch.zeros_like(weight)
        for expert, count in ctx.groups:
            rows = slice(first, first + count)
            torch.mm(grad[rows], weight[expert], out=d_x[rows])
            if d_weight is not None:
                torch.mm(grad[rows].T, x[rows], out=d_weight[expert])
            first += count
        return d_x, d_weight, None
