"""Block Attention Residuals: the stream through depth, and the mix that every sub-layer reads.

A stream is the running sum of the current block (`prefix`) and the bank of entries that earlier blocks left. The
embedding is entry 0; entry b is the sum of all attention and MLP outputs of block b - 1.
Without AttnRes the bank stays empty and `prefix` is the ordinary residual stream.
Source: spec/k3.md 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype
from baltoro.model.context import ForwardContext
from baltoro.model.linear import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class Stream:
    """prefix [T, D] (None just after a block began) and the bank's entries, each [T, D].

    update   [T, D] that is not added yet: a fused read adds it on its way; `settled` adds it now
    stacked  the bank as one tensor [L, T, D], where fused reads want it so; None: not made
    """

    prefix: Tensor | None
    bank: tuple[Tensor, ...] = ()
    update: Tensor | None = None
    stacked: Tensor | None = None

    def add(self, update: Tensor) -> Stream:
        """The stream after a sub-layer wrote `update`."""
        one = self.settled()
        return replace(one, prefix=update if one.prefix is None else one.prefix + update)

    def hold(self, update: Tensor) -> Stream:
        """As `add`, but the sum is left to the next read."""
        return replace(self.settled(), update=update)

    def settled(self) -> Stream:
        """Nothing is left to add."""
        if self.update is None:
            return self
        return replace(self, prefix=self.update if self.prefix is None else self.prefix + self.update, update=None)

    def open_block(self, *, is_stacked: bool = False) -> Stream:
        """Close the running sum into the bank; the next update begins a new one."""
        one = self.settled()
        if one.prefix is None:
            return one
        bank, stacked = (*one.bank, one.prefix), None
        if is_stacked:
            old = torch.stack(bank[:-1]) if one.stacked is None and one.bank else one.stacked
            stacked = one.prefix.unsqueeze(0) if old is None else torch.cat([old, one.prefix.unsqueeze(0)])
        return Stream(None, bank, None, stacked)


def depth_query(norm: RMSNorm, proj: Linear) -> Tensor:
    """[D], accumulate dtype: the pseudo-query is the product of both parameter vectors."""
    acc = acc_dtype(norm.weight.dtype)
    return norm.weight.to(acc) * proj.weight[0].to(acc)


def mix(stream: Stream, query: Tensor, eps: float, ctx: ForwardContext) -> Tensor:
    """[T, D]: softmax over bank entries and prefix, each scored by its normed self against `query` [D].

    An empty bank (layer 0) hands the embedding through; its two tensors exist in the file and are never used.
    """
    sources = stream.bank if stream.prefix is None else (*stream.bank, stream.prefix)
    if not stream.bank:
        return sources[0]
    return ctx.kernels.attnres_mix(torch.stack(sources), query, eps)


def read(stream: Stream, query: Tensor, eps: float, norm: RMSNorm, ctx: ForwardContext) -> tuple[Stream, Tensor]:
    """(the stream with nothing left to add, the mix through `norm` [T, D]) in one operation; a bank must be there."""
    stacked = torch.stack(stream.bank) if stream.stacked is None else stream.stacked
    total, out = ctx.kernels.attnres_read(stacked, stream.prefix, stream.update, query, norm.weight, eps, norm.eps)
    return replace(stream, prefix=total, update=None, stacked=stacked), out
