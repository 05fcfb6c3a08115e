"""Expanded attention of packed training spans through the framework's fused attention, a few padded batches at a time.

Spans are grouped by length (powers of two), padded at their end and attended causally: a padded key lies after every
real query, so causality alone masks it. Needs spans that start at 0; others go to the reference.
Rows move by index in one gather each way, gradients too: no atomics, and no word to the host.
In: as `reference.attend`. Out: the same, up to the order of sums. Limit: pads cost up to twice the work of a span.
Source: spec/k3.md 3.5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from baltoro.kernels.mla import reference
from baltoro.kernels.spans import Spans

MIN_LENGTH = 64


class Padding(NamedTuple):
    """Groups of spans of like length, each padded to the longest. A tuple, so that spans take it to another device.

    order   int64 [P], row of each padded row, group by group; a pad names its span's first row
    places  int64 [T], padded row of each row
    shapes  (spans, padded length) of each group
    groups  per group (rows int64 [B, L], is_real bool [B, L])
    """

    order: Tensor
    places: Tensor
    shapes: tuple[tuple[int, int], ...]
    groups: tuple[tuple[Tensor, Tensor], ...]


def attend(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, scale: float, out_dtype: torch.dtype) -> Tensor:
    """q, k [T, H, Dq], v [T, H, Dv] -> [T, H, Dv] in `out_dtype`, which is also the dtype it computes in."""
    if any(spans.starts):
        return reference.attend(q, k, v, spans=spans, scale=scale, out_dtype=out_dtype)
    padding, width = padding_of(spans), v.shape[-1]
    size = max(width, q.shape[-1])  # fused kernels want one head width
    packed = torch.stack([F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (q, k, v)], dim=1)
    rows: Tensor = _Pad.apply(packed.to(out_dtype), padding)  # type: ignore[no-untyped-call]
    outputs = []
    for shape, part in zip(padding.shapes, split_groups(rows, padding), strict=True):
        queries, keys, values = part.view(*shape, *part.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    result: Tensor = _Unpad.apply(torch.cat(outputs), padding)  # type: ignore[no-untyped-call]
    return result[..., :width]


def split_groups(rows: Tensor, padding: Padding) -> tuple[Tensor, ...]:
    """Padded rows [P, ...] group by group."""
    return torch.split(rows, [count * length for count, length in padding.shapes])


def buckets(spans: Spans) -> tuple[tuple[Tensor, Tensor], ...]:
    """(rows int64 [B, L], is_real bool [B, L]) per group of like lengths, L the longest; a pad names its first row."""
    return padding_of(spans).groups


def hidden_scores(spans: Spans) -> tuple[Tensor, ...]:
    """bool [B, L, L] per group: the pairs (query, key) that are none: the key comes later, or the query is a pad.

    A padded key lies after every real query, so its own column needs nothing.
    """
    return spans.once("hidden scores", _hidden)


def _hidden(spans: Spans) -> tuple[Tensor, ...]:
    found = []
    for _, is_real in buckets(spans):
        length = is_real.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=is_real.device).triu(1)
        found.append(future | ~is_real.unsqueeze(-1))
    return tuple(found)


def padding_of(spans: Spans) -> Padding:
    """The groups of these spans, made once."""
    return spans.once("padding", _padding)


def _padding(spans: Spans) -> Padding:
    members: dict[int, list[tuple[int, int]]] = {}
    for first, length in zip(spans.offsets, spans.lengths, strict=False):
        members.setdefault(max(MIN_LENGTH, length - 1).bit_length(), []).append((first, length))
    groups = []
    for _, group in sorted(members.items()):
        firsts = torch.tensor([first for first, _ in group]).unsqueeze(1)
        lengths = torch.tensor([length for _, length in group]).unsqueeze(1)
        step = torch.arange(max(length for _, length in group)).unsqueeze(0)
        is_real = step < lengths
        groups.append((firsts + torch.where(is_real, step, 0), is_real))
    order = torch.cat([rows.flatten() for rows, _ in groups])
    real = torch.cat([is_real.flatten() for _, is_real in groups]).nonzero().squeeze(1)
    places = torch.empty(spans.num_tokens, dtype=torch.int64).index_copy_(0, order[real], real)
    shapes = tuple((rows.shape[0], rows.shape[1]) for rows, _ in groups)
    device = spans.device
    moved = tuple((rows.to(device), is_real.to(device)) for rows, is_real in groups)
    return Padding(order.to(device), places.to(device), shapes, moved)


class _Pad(torch.autograd.Function):
    """x [T, ...] -> [P, ...]. Pads get no gradient: nothing real sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.padding.places), None


class _Unpad(torch.autograd.Function):
    """x [P, ...] -> [T, ...], dropping the pads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padding = ctx.padding
        return grad.new_zeros(len(padding.order), *grad.shape[1:]).index_copy_(0, padding.places, grad), None
