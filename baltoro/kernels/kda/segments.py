"""States at borders inside spans for a chunk form that gives none: the spans are run piece by piece.

In and out: as `chunk.chunked`, in rounds. The first round runs every span up to its first border, the next one the
second pieces of the spans that have one, from the states the first left; so one border a span makes two calls.
The states come out as any final state does: same kernel, same dtype, never from what a kernel keeps for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from baltoro.kernels.spans import Borders, Spans

# (q, k, v, g, beta, spans, state) -> (o, state after each span)
Call = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Spans, Tensor], tuple[Tensor, Tensor]]


def run_in_segments(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], *, spans: Spans, state: Tensor, borders: Borders
) -> tuple[Tensor, Tensor]:
    """inputs: q, k, v, g, beta of `chunk.chunked`; state [N, H, V, K].

    Returns o [T, H, V] and states [N + B, H, V, K]: after each span, then at each border.
    """
    spans.check_borders(borders)
    pieces = [_pieces(n, length, borders) for n, length in enumerate(spans.lengths)]
    rows, outputs = [], []
    found = {(n, 0): state[n] for n in range(len(spans))}
    for turn in range(max(len(of_span) for of_span in pieces)):
        running = [(n, *of_span[turn]) for n, of_span in enumerate(pieces) if turn < len(of_span)]
        places = torch.cat([torch.arange(spans.offsets[n] + a, spans.offsets[n] + b) for n, a, b in running])
        places = places.to(state.device)
        starts = [spans.starts[n] + a for n, a, _ in running]
        part = Spans.build([b - a for _, a, b in running], starts, spans.device)
        q, k, v, g, beta = (x[places] for x in inputs)
        o, after = call(q, k, v, g, beta, part, torch.stack([found[n, a] for n, a, _ in running]))
        found.update({(n, b): after[i] for i, (n, _, b) in enumerate(running)})
        rows.append(places)
        outputs.append(o)
    wanted = [*enumerate(spans.lengths), *borders]
    order = torch.argsort(torch.cat(rows))
    return torch.cat(outputs)[order], torch.stack([found[point] for point in wanted])


def _pieces(span: int, length: int, borders: Borders) -> list[tuple[int, int]]:
    """[first, last) of the pieces that borders cut a span of `length` tokens into."""
    return list(pairwise(sorted({0, length, *(at for n, at in borders if n == span)})))
