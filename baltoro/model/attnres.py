"""Block Attention Residuals: the stream through depth, and the mix that every sub-layer reads.

A stream is the running sum of the current block (`prefix`) and the bank of entries that earlier blocks left. The
embedding is entry 0; entry b is the sum of all attention and MLP outputs of block b - 1.
Without AttnRes the bank stays empty and `prefix` is the ordinary residual stream.
Source: spec/k3.md 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype
from baltoro.model.context import ForwardContext
from baltoro.model.linear import Linear, RMSNorm

MIN_SCANNED = 1024
"""Tokens of a step from which on the bank is read for many reads at once; with fewer a read is one launch."""
SCAN_BYTES = 512 << 20
"""What the bank's parts of reads to come may take: as many reads at once."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The bank's part of the reads to come, until the bank changes: part [Q, T, D], lse [Q, T]; `used` were read."""

    part: Tensor
    lse: Tensor
    used: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """prefix [T, D] (None just after a block began) and the bank's entries, each [T, D].

    update   [T, D] that is not added yet: a fused read adds it on its way; `settled` adds it now
    stacked  the bank as one tensor [L, T, D], where fused reads want it so; None: not made
    scan     the bank's part of reads to come, of long prefills
    """

    prefix: Tensor | None
    bank: tuple[Tensor, ...] = ()
    update: Tensor | None = None
    stacked: Tensor | None = None
    scan: Scan | None = None

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


def read(
    stream: Stream, query: Tensor, eps: float, norm: RMSNorm, ctx: ForwardContext, ahead: Tensor | None = None
) -> tuple[Stream, Tensor]:
    """(the stream with nothing left to add, the mix through `norm` [T, D]) in one operation; a bank must be there.

    ahead: [n, D], this query and those of the reads after it until the bank changes. Of long prefills the bank is read
    once for as many as SCAN_BYTES allow.
    """
    stacked = torch.stack(stream.bank) if stream.stacked is None else stream.stacked
    rest = (stream.prefix, stream.update, query, norm.weight, eps, norm.eps)
    scan = _scanned(stream, stacked, ahead, eps, ctx)
    if scan is None:
        total, out = ctx.kernels.attnres_read(stacked, *rest)
    else:
        total, out = ctx.kernels.attnres_fold(scan.part[scan.used], scan.lse[scan.used], *rest)
        scan = replace(scan, used=scan.used + 1) if scan.used + 1 < len(scan.part) else None
    return replace(stream, prefix=total, update=None, stacked=stacked, scan=scan), out


def _scanned(stream: Stream, bank: Tensor, ahead: Tensor | None, eps: float, ctx: ForwardContext) -> Scan | None:
    """What is left of the stream's scan, or a new one; None where a read by itself is better."""
    if stream.scan is not None or ahead is None or bank.shape[1] < MIN_SCANNED:
        return stream.scan
    num = min(len(ahead), SCAN_BYTES // (bank[0].numel() * bank.itemsize))
    return Scan(*ctx.kernels.attnres_scan(bank, ahead[:num], eps)) if num > 1 else None


def until_changes(queries: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
    """Of all reads in order (query [D], does the bank change behind it): for each [n, D], itself and those after it
    that see the same bank."""
    found: list[Tensor] = []
    run: list[Tensor] = []
    for query, changes in queries:
        run.append(query)
        if changes:
            found += _tails(run)
            run = []
    return found + _tails(run)


def _tails(run: list[Tensor]) -> list[Tensor]:
    return [torch.stack(run)[n:] for n in range(len(run))] if run else []
