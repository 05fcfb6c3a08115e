"""Expanded attention of packed training spans through the framework's fused attention, a few padded batches at a time.

Spans are grouped by length (powers of two), padded at their end and attended causally: a padded key lies after every
real query, so causality alone masks it. Needs spans that start at 0; others go to the reference.
In: as `reference.attend`. Out: the same, up to the order of sums. Limit: pads cost up to twice the work of a span.
Source: spec/k3.md 3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.kernels.mla import reference
from baltoro.kernels.spans import Spans

MIN_LENGTH = 64


def attend(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, scale: float, out_dtype: torch.dtype) -> Tensor:
    """q, k [T, H, Dq], v [T, H, Dv] -> [T, H, Dv] in `out_dtype`, which is also the dtype it computes in."""
    if any(spans.starts):
        return reference.attend(q, k, v, spans=spans, scale=scale, out_dtype=out_dtype)
    width = v.shape[-1]
    q, k, v = q.to(out_dtype), k.to(out_dtype), v.to(out_dtype)
    if width < q.shape[-1]:  # fused kernels want one head width
        v = F.pad(v, (0, q.shape[-1] - width))
    rows, outputs = [], []
    for places, is_real in buckets(spans):
        queries, keys, values = (x[places].transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale).transpose(1, 2)
        rows.append(places[is_real])
        outputs.append(out[is_real])
    order = torch.argsort(torch.cat(rows))
    return torch.cat(outputs)[order][..., :width]


def buckets(spans: Spans) -> list[tuple[Tensor, Tensor]]:
    """(rows int64 [B, L], is_real bool [B, L]) per group of like lengths, L the longest; a pad names its first row."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for first, length in zip(spans.offsets, spans.lengths, strict=False):
        groups.setdefault(max(MIN_LENGTH, length - 1).bit_length(), []).append((first, length))
    result = []
    for _, members in sorted(groups.items()):
        firsts = torch.tensor([first for first, _ in members]).unsqueeze(1)
        lengths = torch.tensor([length for _, length in members]).unsqueeze(1)
        step = torch.arange(int(lengths.max())).unsqueeze(0)
        is_real = step < lengths
        rows = firsts + torch.where(is_real, step, 0)
        result.append((rows.to(spans.device), is_real.to(spans.device)))
    return result
