"""The low-rank terms of routed experts, with the outer factor shared by all experts of a layer.

    w1, w3   delta = scale * B[e] (A x)     A [r, M] shared, B [E, F, r]
    w2       delta = scale * B (A[e] h)     A [E, r, F], B [M, r] shared

A pair is one (token, chosen expert). The shared A is applied once a token, the shared B once a token after the weighted
sum over its experts: both are linear, so this is the same. Terms are added to the base's own sums in the accumulate
dtype, so factors of zero give back the base's bits, dense or MXFP4.
Source: spec/training.md A.5.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.kernels.lora import fixed
from baltoro.kernels.lora.reference import low_rank
from baltoro.kernels.lora.rows import AdapterRows, add_rows, gather


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """Factors of one matrix in all slots: a [U, Ea, r, in], b [U, Eb, out, r], of which one of Ea, Eb is 1 (shared).

    scale [U] in the accumulate dtype; `active`: slots that have factors here.
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    active: Collection[int]


@dataclass(frozen=True, slots=True)
class ExpertDelta:
    """The terms of one layer in one step. `rows`: adapter slots of the tokens."""

    w1: ExpertFactors
    w3: ExpertFactors
    w2: ExpertFactors
    rows: AdapterRows

    def add_first(self, gate: Tensor, up: Tensor, z: Tensor, tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """gate, up [P, F] of P pairs, with the terms of their tokens' adapters. z [T, M]; tokens, experts int64 [P]."""
        if self.rows.shares is not None:
            places, shares = self._places(tokens, experts), self.rows.shares
            return (
                fixed.add_first(gate, z, self.w1.a, self.w1.b, self.w1.scale, shares, places),
                fixed.add_first(up, z, self.w3.a, self.w3.b, self.w3.scale, shares, places),
            )
        pairs = self._pairs(tokens, experts, (*self.w1.active, *self.w3.active))
        return _first(gate, z, self.w1, pairs), _first(up, z, self.w3, pairs)

    def add_second(self, out: Tensor, hidden: Tensor, weights: Tensor, tokens: Tensor, experts: Tensor) -> Tensor:
        """out [T, M], the weighted sum in the accumulate dtype, with the terms of w2 for hidden [P, F].

        weights [P] of the pairs. Rows in fixed form: the pairs of a token one after the other.
        """
        if self.rows.shares is not None:
            places, w2 = self._places(tokens, experts), self.w2
            return fixed.add_second(out, hidden, weights, w2.a, w2.b, w2.scale, self.rows.shares, places)
        parts = []
        for pairs in self._pairs(tokens, experts, self.w2.active):
            slot = pairs.slot - 1
            low = pairs.by_expert(hidden.index_select(0, pairs.places).to(out.dtype), self.w2.a[slot])
            low = low * weights.index_select(0, pairs.places).to(out.dtype).unsqueeze(-1)
            summed = low.new_zeros(len(out), low.shape[1]).index_add(0, pairs.tokens, low) * self.w2.scale[slot]
            parts.append((pairs.rows, F.linear(gather(summed, pairs.rows), self.w2.b[slot, 0].to(out.dtype))))
        return add_rows(out, parts)

    @property
    def is_fixed(self) -> bool:
        """Whether nothing may ask the device which rows have an adapter."""
        return self.rows.shares is not None

    def _places(self, tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tokens, experts, self.rows.slot_places.index_select(0, tokens)

    def _pairs(self, tokens: Tensor, experts: Tensor, active: Collection[int]) -> list[_Pairs]:
        found = []
        order = torch.argsort(experts, stable=True)
        for slot, rows in self.rows.among(active):
            ours = order if rows is None else order[self.rows.slots[tokens[order]] == slot]
            hit, counts = torch.unique_consecutive(experts[ours], return_counts=True)
            groups = tuple(zip(hit.tolist(), counts.tolist(), strict=True))
            found.append(_Pairs(slot, rows, ours, tokens[ours], groups))
        return found


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of one slot, sorted by expert: their places among all pairs, their tokens, (expert, how many).

    rows: the slot's tokens, each once; None: all
    """

    slot: int
    rows: Tensor | None
    places: Tensor
    tokens: Tensor
    groups: tuple[tuple[int, int], ...]

    def by_expert(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [P, in], each row times its expert's matrix of weight [E, out, in], taken to x's dtype on use."""
        matrices = weight.unbind()  # its gradient is one stack, where indexing would fill the whole tensor per expert
        parts = torch.split(x, [count for _, count in self.groups])
        return torch.cat([F.linear(x, matrices[e].to(x.dtype)) for x, (e, _) in zip(parts, self.groups, strict=True)])


def _first(out: Tensor, z: Tensor, factors: ExpertFactors, pairs: list[_Pairs]) -> Tensor:
    parts: list[tuple[Tensor | None, Tensor]] = []
    for one in pairs:
        if one.slot in factors.active:
            low = low_rank(z, factors.a[:, 0], factors.scale, one.slot).index_select(0, one.tokens)
            parts.append((one.places, one.by_expert(low, factors.b[one.slot - 1])))
    return add_rows(out, parts)
