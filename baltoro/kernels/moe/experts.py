"""The product of the chosen experts, in plain torch: y[t] = sum_a weights[t, a] * expert_{ids[t, a]}(z[t]).

    expert(z) = w2 activation(w1 z, w3 z)

Weights are dense [E, out, in], or packed MXFP4 that is dequantised on use and never written. Product with the routing
weight and the sum over experts in the accumulate dtype, rounded once. Two forms of the same result: token-centric
(gather the weights of each pair; decode) and grouped by expert (prefill, training; autograd for dense weights).
Source: spec/k3.md 3.7 steps 6 and 7, spec/kernels.md E.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.quant import mxfp4, mxfp8

Activation = Callable[[Tensor, Tensor], Tensor]

# Up to this many (token, expert) pairs the weights are gathered per pair; beyond, experts are visited once each.
MAX_GATHERED_PAIRS = 32


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
        return _take(self.w1, ids, dtype), _take(self.w3, ids, dtype), _take(self.w2, ids, dtype)


def expert_product(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
) -> Tensor:
    """z [T, M], ids int64 [T, A], weights [T, A] -> [T, M] in z.dtype.

    fake_weights: dense weights pass through MXFP4 fake quantisation (packed ones are quantised already).
    fake_activations: the inputs of both products pass through MXFP8 fake quantisation. Gradients are straight-through.
    """
    form = gathered if ids.numel() <= MAX_GATHERED_PAIRS else grouped
    return form(
        z,
        ids,
        weights,
        experts,
        activation=activation,
        fake_weights=fake_weights,
        fake_activations=fake_activations,
    )


def gathered(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
) -> Tensor:
    """`expert_product` pair by pair: no sort, but each pair reads its expert's weights."""
    w1, w3, w2 = experts.take(ids.flatten(), z.dtype)
    if fake_weights:
        w1, w3, w2 = _fake_all((w1, w3, w2), experts)
    pairs = (mxfp8.fake(z) if fake_activations else z).repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
    hidden = activation(w1 @ pairs, w3 @ pairs)
    if fake_activations:
        hidden = mxfp8.fake(hidden.squeeze(-1)).unsqueeze(-1)
    out = (w2 @ hidden).view(*ids.shape, -1)
    acc = acc_dtype(z.dtype)
    return (out.to(acc) * weights.to(acc).unsqueeze(-1)).sum(1).to(z.dtype)


def grouped(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
) -> Tensor:
    """`expert_product` expert by expert: tokens sorted by expert, each hit expert's weights read once."""
    acc = acc_dtype(z.dtype)
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    tokens = order // ids.shape[1]
    hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
    rows = torch.split((mxfp8.fake(z) if fake_activations else z)[tokens], counts.tolist())
    outputs = []
    for expert, part in zip(_dense_experts(experts, hit, z.dtype, fake_weights), rows, strict=True):
        w1, w3, w2 = expert
        hidden = activation(part @ w1.T, part @ w3.T)
        outputs.append((mxfp8.fake(hidden) if fake_activations else hidden) @ w2.T)
    weighted = torch.cat(outputs).to(acc) * weights.to(acc).flatten()[order].unsqueeze(-1)
    return torch.zeros(z.shape, dtype=acc, device=z.device).index_add(0, tokens, weighted).to(z.dtype)


def _dense_experts(
    experts: ExpertWeights, hit: Tensor, dtype: torch.dtype, fake_weights: bool
) -> Sequence[tuple[Tensor, ...]]:
    """Dense (w1, w3, w2) of each hit expert, one at a time where they are packed."""
    columns = []
    for weight in (experts.w1, experts.w3, experts.w2):
        if isinstance(weight, Packed):
            columns.append([_take(weight, e, dtype).squeeze(0) for e in torch.split(hit, 1)])
            continue
        # unbind, not indexing: its gradient is one stack instead of a full-size tensor per expert
        dense = (mxfp4.fake(weight) if fake_weights else weight).to(dtype).unbind(0)
        columns.append([dense[e] for e in hit.tolist()])
    return list(zip(*columns, strict=True))


def _take(weight: Tensor | Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Packed):
        return mxfp4.dequantise(weight.packed[ids], weight.scale[ids], dtype)
    return weight[ids].to(dtype)


def _fake_all(dense: tuple[Tensor, Tensor, Tensor], experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    sources = (experts.w1, experts.w3, experts.w2)
    w1, w3, w2 = (w if isinstance(source, Packed) else mxfp4.fake(w) for w, source in zip(dense, sources, strict=True))
    return w1, w3, w2
