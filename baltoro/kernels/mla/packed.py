"""Expanded attention of packed spans on a GPU in one launch, with or without a past, nothing padded or copied.

In and out: as `expanded`. BF16 without gradients; others go to `expanded.by_padding`. A program has a block of a span's
queries and a head; where the blocks lie is worked out on the host, once a step, and the longest come first.
Source: spec/kernels.md C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device
from baltoro.kernels.mla import expanded as plain
from baltoro.kernels.spans import Spans


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries of a program, keys of a tile, tiles under way, warps."""

    rows: int
    keys: int
    stages: int
    warps: int


LONG, SHORT = Tiles(128, 64, 4, 8), Tiles(64, 64, 2, 4)
"""48 kB of queries and 40 kB a tile of keys and values at K3's widths; half the queries for spans of up to 64: 64 spans
of 32 after 480 in 70 us instead of 101, 1024 after 15,360 in 385 instead of 331 (H200, 12 heads)."""


def attend(
    q: Tensor,
    expanded: Tensor,
    shared: Tensor,
    *,
    spans: Spans,
    scale: float,
    out_dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """q [T, H, Dn + Dr], expanded [S, H, Dn + Dv], shared [S, Dr] -> [T, H, Dv]."""
    if len(q) != spans.num_tokens or len(expanded) != sum(spans.ends) or len(shared) != len(expanded):
        sizes = (len(q), len(expanded), len(shared))
        raise ShapeError(f"{sizes} rows of queries, keys and their shared part for spans {spans.lengths}")
    is_plain = q.dtype == expanded.dtype == shared.dtype == out_dtype == torch.bfloat16
    if not is_plain or torch.is_grad_enabled() or any(x.stride(-1) != 1 for x in (q, expanded, shared)):
        return plain.by_padding(q, expanded, shared, spans=spans, scale=scale, out_dtype=out_dtype)
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.mla.packed_kernels import attend_kernel

    tiles = tiles or (LONG if max(spans.lengths) > SHORT.rows else SHORT)
    heads, own = q.shape[1], q.shape[2] - shared.shape[1]
    value = expanded.shape[2] - own
    out = torch.empty(len(q), heads, value, dtype=out_dtype, device=q.device)
    size = tiles.rows
    blocks = spans.once(("attention blocks", size), lambda found: to_device(_blocks(found, size), found.device))
    wide = {name: max(16, triton.next_power_of_2(n)) for name, n in (("K", own), ("D", shared.shape[1]), ("V", value))}
    attend_kernel[(blocks.shape[1], heads)](
        q, expanded, shared, out, blocks, blocks.shape[1], scale / math.log(2.0),
        *q.stride()[:2], *expanded.stride()[:2], shared.stride(0), heads,
        K=own, D=shared.shape[1], V=value, BLOCK_K=wide["K"], BLOCK_D=wide["D"], BLOCK_V=wide["V"],
        ROWS=tiles.rows, KEYS=tiles.keys, STAGES=tiles.stages,
        INTERPRET=triton.knobs.runtime.interpret, num_warps=tiles.warps,
    )  # fmt: skip
    return out


def _blocks(spans: Spans, rows: int) -> Tensor:
    """int64 [4, blocks]: first row of the queries, how many, first row of the span's keys, keys that the first query
    sees; those that see most come first."""
    found, key = [], 0
    for offset, length, start in zip(spans.offsets, spans.lengths, spans.starts, strict=False):
        first = np.arange(0, length, rows)
        found.append((offset + first, np.minimum(rows, length - first), np.full_like(first, key), start + first + 1))
        key += start + length
    table = np.concatenate([np.stack(block) for block in found], axis=1)
    return torch.from_numpy(table[:, np.argsort(-table[3], kind="stable")].copy())
