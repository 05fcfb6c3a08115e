"""Weights of experts, dense or packed, and their products with rows that are grouped by expert; gradients included.

In: rows [P, in] in groups (expert, number of rows). Out: [P, out], each group times its expert's matrix.
Packed weights get no gradient and are dequantised on use, a few experts at a time; a backward dequantises them again,
so nothing dense of a frozen base is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.errors import InvariantError
from baltoro.kernels.moe import tile_layout
from baltoro.kernels.quant import mxfp4

# Packed weights are dequantised as many experts at a time as fit into this many elements, at least one.
DEQUANTISE_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Packed:
    """MXFP4 weights of E experts in the published order: packed uint8 [E, out, in/2], scale uint8 [E, out, in/32]."""

    packed: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, out, in."""
        count, rows, half = self.packed.shape
        return count, rows, 2 * half

    def dense(self, ids: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Matrices [B, out, in] of experts `ids`."""
        return mxfp4.dequantise(self.packed[ids], self.scale[ids], dtype)


@dataclass(frozen=True, slots=True)
class Tiled:
    """The same in tiles (tile_layout.py): packed uint8 [E, rows/8, columns/128, 512], scale uint8 [..., 32]

    rows, columns   out and in, without the padding
    """

    packed: Tensor
    scale: Tensor
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, out, in."""
        return len(self.packed), self.rows, self.columns

    def dense(self, ids: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Matrices [B, out, in] of experts `ids`."""
        return tile_layout.values(self.packed[ids], self.scale[ids], self.rows, self.columns, dtype)


Weight = Tensor | Packed | Tiled
Order = Literal["published", "tiled"]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """w1 (gate) and w3 (up) [E, F, M], w2 (down) [E, M, F]; each dense, or packed in the published order."""

    w1: Tensor | Packed
    w3: Tensor | Packed
    w2: Tensor | Packed
    order: ClassVar[Order] = "published"

    def __post_init__(self) -> None:
        if any(isinstance(w, Tiled) for w in (self.w1, self.w3, self.w2)):
            raise InvariantError("a matrix in tiles among experts in the published order")

    def take(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Dense w1, w3, w2 of experts `ids` [B], each [B, out, in] in `dtype`."""
        return take(self.w1, ids, dtype), take(self.w3, ids, dtype), take(self.w2, ids, dtype)

    def fake(self) -> ExpertWeights:
        """Dense weights through MXFP4 fake quantisation; packed ones are quantised already."""
        w1, w3, w2 = (w if isinstance(w, Packed) else mxfp4.fake(w) for w in (self.w1, self.w3, self.w2))
        return ExpertWeights(w1, w3, w2)


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """Packed experts in tiles: w1 and w3 as one matrix [E, 2 F', M'], 8 rows of each in turn, and w2 [E, M'', F'].

    first_*, second_*   packed uint8 [E, rows/8, columns/128, 512], scale uint8 [E, rows/8, columns/128, 32]
    width, inner        M and F; ' padded to UNIT, '' to ROW_UNIT
    """

    first_packed: Tensor
    first_scale: Tensor
    second_packed: Tensor
    second_scale: Tensor
    width: int
    inner: int
    order: ClassVar[Order] = "tiled"

    def __post_init__(self) -> None:
        count, rows, hidden = (
            len(self.first_packed),
            tile_layout.padded(self.width, 256),
            tile_layout.padded(self.inner),
        )
        first, second = (count, hidden // 4, tile_layout.padded(self.width) // 128), (count, rows // 8, hidden // 128)
        for packed, scale, shape in (
            (self.first_packed, self.first_scale, first), (self.second_packed, self.second_scale, second)
        ):  # fmt: skip
            if tuple(packed.shape) != (*shape, 512) or tuple(scale.shape) != (*shape, 32):
                raise InvariantError(f"tiles {list(packed.shape)} and {list(scale.shape)} instead of {list(shape)}")

    @property
    def first(self) -> Tiled:
        """Rows of gate and up in turn; what is padded counts."""
        _, tiles, units, _ = self.first_packed.shape
        return Tiled(self.first_packed, self.first_scale, tiles * 8, units * 128)

    @property
    def second(self) -> Tiled:
        return self.w2

    @property
    def w1(self) -> Tiled:
        return Tiled(self.first_packed[:, 0::2], self.first_scale[:, 0::2], self.inner, self.width)

    @property
    def w3(self) -> Tiled:
        return Tiled(self.first_packed[:, 1::2], self.first_scale[:, 1::2], self.inner, self.width)

    @property
    def w2(self) -> Tiled:
        return Tiled(self.second_packed, self.second_scale, self.width, self.inner)

    def take(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Dense w1, w3, w2 of experts `ids` [B], each [B, out, in] in `dtype`."""
        return self.w1.dense(ids, dtype), self.w3.dense(ids, dtype), self.w2.dense(ids, dtype)

    def fake(self) -> TiledExperts:
        """Itself: quantised already."""
        return self


AnyExperts = ExpertWeights | TiledExperts


def take(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense matrices [B, out, in] of experts `ids` [B] in `dtype`."""
    if isinstance(weight, Tensor):
        return weight[ids].to(dtype)
    return weight.dense(ids, dtype)


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


def grouped_linear(x: Tensor, weight: Weight, groups: list[tuple[int, int]]) -> Tensor:
    """x [P, in], rows in groups (expert, number of rows) -> [P, out]: each group times its expert's matrix."""
    if isinstance(weight, Tensor):
        result: Tensor = _GroupedLinear.apply(x, weight.to(x.dtype), groups)  # type: ignore[no-untyped-call]
        return result
    packed: Tensor = _PackedLinear.apply(x, weight.packed, weight.scale, weight, groups)  # type: ignore[no-untyped-call]
    return packed


def _packed_product(x: Tensor, weight: Packed | Tiled, groups: list[tuple[int, int]], *, is_transposed: bool) -> Tensor:
    """x [P, in], rows in groups, times the matrices [out, in] of their experts; transposed: [P, out] -> [P, in]."""
    at_once = max(1, DEQUANTISE_AT_ONCE // (weight.shape[1] * weight.shape[2]))
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
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, weight: Packed | Tiled, groups: list[tuple[int, int]]
    ) -> Tensor:
        ctx.save_for_backward(packed, scale)
        # the object without its tensors: they are seen by hooks on what is saved
        ctx.rest, ctx.groups = None if isinstance(weight, Packed) else weight.shape[1:], groups
        return _packed_product(x, weight, groups, is_transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        weight = Packed(*saved) if ctx.rest is None else Tiled(*saved, *ctx.rest)
        return _packed_product(grad, weight, ctx.groups, is_transposed=True), None, None, None, None


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
