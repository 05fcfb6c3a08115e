"""What stands before the chunk form of KDA, on a GPU in one launch: without gradients.

In and out: as `enter`; q, k, v each of contiguous rows. x, raw and b may be views with a stride between tokens. Under
autograd, in float64 and for other shapes (values of another width than keys) the reference runs.
Work is cut into jobs of tokens of one span, from a table made once for all layers of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device
from baltoro.kernels.kda import enter as reference
from baltoro.kernels.kda.enter import L2_EPS, Mixed
from baltoro.kernels.kda.fused_reference import MixerWeights
from baltoro.kernels.spans import Borders, Spans

MAX_KEYS, MAX_TAPS = 256, 8
KINDS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens of a program: `groups` of `rows` neighbours each. A thread has one group's share of a head's channels and
    reads rows + W - 1 inputs for `rows` outputs."""

    groups: int
    rows: int
    warps: int

    @property
    def tokens(self) -> int:
        return self.groups * self.rows


# 128 channels in bf16 are 16 threads of 16 bytes, so 4 warps are 8 groups; 7 loads are under way in each thread, and 5
# programs of 88 registers share a processor (8 x 8: 148 registers and 3 programs, but 11 inputs for 8 outputs)
TILE = Tile(8, 4, 4)


def enter(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    weights: MixerWeights,
    *,
    spans: Spans,
    history: Tensor | None,
    borders: Borders = (),
) -> tuple[Mixed, Tensor]:
    """Arguments and results as `enter.enter`."""
    if not _is_fit(x, raw, b, weights):
        return reference.enter(x, raw, b, weights, spans=spans, history=history, borders=borders)
    reference.check(x, raw, b, weights)
    spans.check_borders(borders)
    keep = weights.conv.shape[1] - 1
    if len(x) != spans.num_tokens:
        raise ShapeError(f"{len(x)} rows for {spans.num_tokens} tokens of spans")
    if history is not None and history.shape != (len(spans), keep, x.shape[1]):
        raise ShapeError(f"history {tuple(history.shape)} is not [N, W-1, C] = {(len(spans), keep, x.shape[1])}")
    return launch(x, raw, b, weights, spans, history, borders, TILE)


def launch(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    weights: MixerWeights,
    spans: Spans,
    history: Tensor | None,
    borders: Borders,
    tile: Tile,
) -> tuple[Mixed, Tensor]:
    """The launch, arguments checked."""
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.kda.triton_enter import enter_kernel

    num, heads, keys = raw.shape
    taps, bound = weights.conv.shape[1], weights.lower_bound
    planes = x.new_empty(3, num, heads, keys)
    decay, beta = x.new_empty(raw.shape, dtype=torch.float32), x.new_empty(b.shape, dtype=torch.float32)
    after = x.new_empty(len(spans) + len(borders), taps - 1, x.shape[1])
    jobs = jobs_of(spans, borders, tile.tokens)
    past = x if history is None else history.to(x.dtype).contiguous()
    if num:
        enter_kernel[(4 * heads * len(jobs),)](
            x, past, weights.conv, raw, b, weights.A_log, weights.dt_bias, jobs, planes, after, decay, beta,
            x.stride(0), raw.stride(0), b.stride(0), num, bound or 0.0, L2_EPS,
            H=heads, K=keys, BLOCK=triton.next_power_of_2(keys), TAPS=taps, GROUPS=tile.groups, ROWS=tile.rows,
            HAS_HISTORY=history is not None, IS_BOUNDED=bound is not None, num_warps=tile.warps,
        )  # fmt: skip
    q, k, v = planes.unbind(0)
    return Mixed(q, k, v, decay, beta), after


def _is_fit(x: Tensor, raw: Tensor, b: Tensor, weights: MixerWeights) -> bool:
    if torch.is_grad_enabled() or raw.dim() != 3 or any(t.dtype not in KINDS for t in (x, raw, b)):
        return False
    heads, keys = raw.shape[1:]
    # a dimension of one has whatever stride
    is_packed = (
        x.stride(-1) == 1 and raw.stride(2) == 1 and (heads == 1 or (raw.stride(1) == keys and b.stride(1) == 1))
    )
    is_packed &= all(t.is_contiguous() for t in (weights.conv, weights.A_log, weights.dt_bias))
    return is_packed and x.shape[1] == 3 * heads * keys and keys <= MAX_KEYS and weights.conv.shape[1] <= MAX_TAPS


def jobs_of(spans: Spans, borders: Borders, size: int) -> Tensor:
    """int32 [M, 4]: row, tokens, tokens of the span before that row, span; of at most `size` tokens of one span each.
    Behind them the points whose histories are kept, -1 - i tokens for point i: their row is the one after."""

    def make(found: Spans) -> Tensor:
        lengths, offsets = np.asarray(found.lengths, np.int64), np.asarray(found.offsets[:-1], np.int64)
        counts = -(-lengths // size)
        span = np.repeat(np.arange(len(lengths)), counts)
        place = (np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
        tiles = np.stack([offsets[span] + place, np.minimum(size, lengths[span] - place), place, span], 1)
        points = [*enumerate(found.lengths), *borders]
        kept = [(found.offsets[n] + length, -1 - i, length, n) for i, (n, length) in enumerate(points)]
        rows = np.concatenate([tiles, np.asarray(kept, np.int64).reshape(-1, 4)]).astype(np.int32)
        return to_device(torch.from_numpy(rows), found.device)

    return spans.once(("kda enter", size, borders), make)
