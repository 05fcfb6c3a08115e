"""Block Attention Residuals: the stream through depth, and the mix that every sub-layer reads.

A stream is the running sum of the current block (`prefix`) and the bank of entries that earlier blocks left. The
embedding is entry 0; entry b is the sum of all attention and MLP outputs of block b - 1.
Without AttnRes the bank stays empty and `prefix` is the ordinary residual stream.
Source: spec/k3.md 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype
from baltoro.model.context import ForwardContext
from baltoro.model.linear import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class Stream:
    """prefix [T, D] (None just after a block began) and the bank's entries, each [T, D]."""

    prefix: Tensor | None
    bank: tuple[Tensor, ...] = ()

    def add(self, update: Tensor) -> Stream:
        """The stream after a sub-layer wrote `update`."""
        return Stream(update if self.prefix is None else self.prefix + update, self.bank)

    def open_block(self) -> Stream:
        """Close the running sum into the bank; the next update begins a new one."""
        if self.prefix is None:
            return self
        return Stream(None, (*self.bank, self.prefix))


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
