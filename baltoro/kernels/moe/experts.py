"""The product of the chosen experts, in plain torch: y[t] = sum_a weights[t, a] * expert_{ids[t, a]}(z[t]).

    expert(z) = w2 activation(w1 z, w3 z)

Weights are dense [E, out, in], or packed MXFP4 that is dequantised on use, a few experts at a time, and never written.
Product with the routing weight and the sum over experts in the accumulate dtype, in the order of `ids`, rounded once:
a token's result does not depend on who else is in the batch beyond the rounding of matrix products. Three forms of the
same: token-centric (gather the weights of each pair; decode), grouped by expert (prefill, training), and every token
through every expert (a batched decode that hits most of a few small experts anyway: three products instead of many).
Source: spec/k3.md 3.7 steps 6 and 7, spec/kernels.md E.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.kernels.lora.experts import ExpertDelta
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.quant import mxfp4, mxfp8

Activation = Callable[[Tensor, Tensor], Tensor]

# Up to this many (token, expert) pairs the weights are gathered per pair; beyond, experts are visited once each. On a
# CPU copies cost what products cost, so there it is as long as so many elements a matrix are copied.
MAX_GATHERED_PAIRS, MAX_GATHERED = 32, 1 << 15
# Every token goes through every expert where that is at most so many multiplications a matrix, and so many times
# those that are needed: below, the time goes into starting products, not into doing them (2 CPU cores, 2026-11-30:
# 16 experts of 256 x 192, 8 tokens: 5.4 ms gathered, 1.0 everywhere, 1.0 grouped; one token 0.8, 0.6, 0.4).
MAX_EVERYWHERE, MAX_WASTE = 1 << 23, 8
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


def expert_product(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """z [T, M], ids int64 [T, A], weights [T, A] -> [T, M] in z.dtype.

    fake_weights: dense weights pass through MXFP4 fake quantisation. fake_activations: the inputs of both products pass
    through MXFP8 fake quantisation. Gradients are straight-through. `delta`: terms of adapters, which read the inputs
    of both products unquantised.
    """
    experts = experts.fake() if fake_weights else experts
    if torch.is_grad_enabled():
        form = grouped  # the others would keep matrices of the base for backward
    elif _are_few(ids, experts):
        form = gathered
    else:
        form = everywhere if _is_small(ids, experts) else grouped
    return form(z, ids, weights, experts, activation=activation, fake_activations=fake_activations, delta=delta)


def gathered(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` pair by pair: no sort, but each pair reads its expert's weights."""
    w1, w3, w2 = experts.take(ids.flatten(), z.dtype)
    pairs = (mxfp8.fake(z) if fake_activations else z).repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
    gate, up = (w1 @ pairs).squeeze(-1), (w3 @ pairs).squeeze(-1)
    if delta is not None:
        tokens = torch.arange(len(z), device=z.device).repeat_interleave(ids.shape[1])
        gate, up = delta.add_first(gate, up, z, tokens, ids.flatten())
    hidden = activation(gate, up)
    total = combine(w2 @ (mxfp8.fake(hidden) if fake_activations else hidden).unsqueeze(-1), weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden, weights.flatten(), tokens, ids.flatten())
    return total.to(z.dtype)


def grouped(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` expert by expert: pairs sorted by expert, each hit expert's weights read once."""
    order = torch.argsort(ids.flatten(), stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    sorted_ids = ids.flatten()[order]
    hit, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    groups = list(zip(hit.tolist(), counts.tolist(), strict=True))
    pairs = scatter(mxfp8.fake(z) if fake_activations else z, order, place, ids.shape[1])
    gate, up = _linear(pairs, experts.w1, groups), _linear(pairs, experts.w3, groups)
    if delta is not None:
        tokens = order // ids.shape[1]
        gate, up = delta.add_first(gate, up, z, tokens, sorted_ids)
    hidden = activation(gate, up)
    out = _linear(mxfp8.fake(hidden) if fake_activations else hidden, experts.w2, groups)
    total = combine(scatter(out, place, order, 1), weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden, weights.flatten()[order], tokens, sorted_ids)
    return total.to(z.dtype)


def everywhere(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` for few and small experts: all of them work on all tokens, and each token picks its own."""
    w1, w3, w2 = (_all(weight, z.dtype) for weight in (experts.w1, experts.w3, experts.w2))
    rows = (mxfp8.fake(z) if fake_activations else z).expand(len(w1), *z.shape)
    gate, up = torch.bmm(rows, w1.mT), torch.bmm(rows, w3.mT)  # [E, T, F]
    tokens = torch.arange(len(z), device=z.device).repeat_interleave(ids.shape[1])
    pairs = ids.flatten(), tokens
    if delta is not None:  # of the pairs that were picked; others are thrown away below
        picked = delta.add_first(gate[pairs], up[pairs], z, tokens, ids.flatten())
        gate, up = gate.index_put(pairs, picked[0]), up.index_put(pairs, picked[1])
    hidden = activation(gate, up)
    out = torch.bmm(mxfp8.fake(hidden) if fake_activations else hidden, w2.mT)  # [E, T, M]
    total = combine(out[pairs], weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden[pairs], weights.flatten(), tokens, ids.flatten())
    return total.to(z.dtype)


def _all(weight: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    """Every expert's matrix [E, out, in]; dense ones are not copied."""
    if isinstance(weight, Packed):
        return mxfp4.dequantise(weight.packed, weight.scale, dtype)
    return weight.to(dtype)


def _size(experts: ExpertWeights) -> tuple[int, int]:
    """How many experts, and elements of one matrix."""
    weight = experts.w1
    if isinstance(weight, Packed):
        return len(weight.packed), 2 * weight.packed[0].numel()
    return len(weight), weight[0].numel()


def _are_few(ids: Tensor, experts: ExpertWeights) -> bool:
    return ids.numel() * _size(experts)[1] <= MAX_GATHERED if ids.is_cpu else ids.numel() <= MAX_GATHERED_PAIRS


def _is_small(ids: Tensor, experts: ExpertWeights) -> bool:
    num_experts, size = _size(experts)
    return num_experts * len(ids) * size <= MAX_EVERYWHERE and num_experts <= MAX_WASTE * ids.shape[1]


def combine(out: Tensor, weights: Tensor, z: Tensor) -> Tensor:
    """Weighted sum over the experts of each token: out [T * A, M, ...] -> [T, M], in the accumulate dtype."""
    acc = acc_dtype(z.dtype)
    return (out.view(*weights.shape, -1).to(acc) * weights.to(acc).unsqueeze(-1)).sum(1)


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


def _linear(x: Tensor, weight: Tensor | Packed, groups: list[tuple[int, int]]) -> Tensor:
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
