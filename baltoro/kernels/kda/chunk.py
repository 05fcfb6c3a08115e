"""The KDA recurrence in chunks, in plain torch: prefill and training. Equal to `reference.recurrent`.

Chunk borders lie on absolute multiples of the chunk (a span that starts off the grid has a short first chunk), so the
result does not depend on how a prompt is cut into spans. With G the decay summed from the chunk's start, S entering:

    A_kk[i, j] = beta_i sum_d k_i k_j e^(G_i - G_j), j < i;     A_qk[i, j] = sum_d q_i k_j e^(G_i - G_j), j <= i
    (w | u)    = (I + A_kk)^-1 diag(beta) (k e^G | v);          U = u - w S
    o          = (q e^G) S + A_qk U;                            S+ = diag(e^G_C) S + (k e^(G_C - G))' U

Every exponent is <= 0: pairs inside a sub-block of 16 are formed one by one, pairs of two sub-blocks through the start
of the later one. So nothing overflows for any gate in any dtype, and what underflows is forgotten anyway.
Only S -> S+ is serial, as one product a chunk with the transition diag(e^G_C) - (k e^(G_C - G))' w.
Source: spec/kernels.md A.3, A.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.kda.reference import prepare
from baltoro.kernels.spans import Spans

SUB = 16


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    spans: Spans,
    state: Tensor | None,
    scale: float,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run packed spans in chunks; arguments and results as `reference.recurrent`. `chunk` is a multiple of 16."""
    if chunk % SUB:
        raise ShapeError(f"chunk {chunk} is not a multiple of {SUB}")
    q, k, v, g, beta, state = prepare(q, k, v, g, beta, spans=spans, state=state)
    grid = _Grid.build(spans, chunk)
    q, k, v, g = (grid.spread(x) for x in (q * scale, k, v, g))  # [NC, H, C, *]
    beta = grid.spread(beta.unsqueeze(-1))
    a_kk, a_qk = _pairs(q, k, g)
    total = g.cumsum(-2)
    decayed = total.exp()
    rhs = torch.cat((k * decayed, v), dim=-1) * beta
    lower = a_kk * beta + torch.eye(chunk, dtype=k.dtype, device=k.device)
    w, u = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True).split(
        (k.shape[-1], v.shape[-1]), dim=-1
    )
    rest = k * (g.flip(-2).cumsum(-2).flip(-2) - g).exp()
    transition = (
        torch.diag_embed(decayed[..., -1, :]) - w.transpose(-1, -2) @ rest
    )  # [NC, H, K, K], acts from the right
    addition = u.transpose(-1, -2) @ rest  # [NC, H, V, K]
    entering, finals = _scan(transition, addition, state, grid)
    corrections = u - w @ entering.transpose(-1, -2)
    o = (q * decayed) @ entering.transpose(-1, -2) + a_qk @ corrections
    return grid.gather(o), finals


def _pairs(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A_kk (strictly lower, without beta) and A_qk (lower) [NC, H, C, C] from q, k, g [NC, H, C, K]."""
    chunk = k.shape[-2]
    blocks = chunk // SUB
    q, k, g = (torch.unflatten(x, -2, (blocks, SUB)) for x in (q, k, g))  # [NC, H, B, SUB, K]
    local = g.cumsum(-2)
    whole = local[..., -1, :]
    rows = torch.stack((k, q), dim=2) * local.exp().unsqueeze(2)  # [NC, H, 2, B, SUB, K]
    columns = k * (whole.unsqueeze(-2) - local).exp()  # decayed to the end of their own block
    pair = (local.unsqueeze(-2) - local.unsqueeze(-3)).masked_fill(
        torch.ones(SUB, SUB, dtype=torch.bool, device=k.device).triu(1).unsqueeze(-1), float("-inf")
    )
    near = k.unsqueeze(-3) * pair.exp()  # [NC, H, B, i, j, K]
    diagonal = (near.unsqueeze(2) * torch.stack((k, q), dim=2).unsqueeze(-2)).sum(-1)  # [NC, H, 2, B, SUB, SUB]
    empty = torch.zeros_like(diagonal[..., 0, :, :])
    lines = []
    for a in range(blocks):
        between = torch.zeros_like(whole[..., 0, :])
        line = [diagonal[..., a, :, :]]
        for b in range(a - 1, -1, -1):
            column = columns[..., b, :, :] * between.exp().unsqueeze(-2)
            line.insert(0, rows[..., a, :, :] @ column.transpose(-1, -2).unsqueeze(2))
            between = between + whole[..., b, :]
        lines.append(torch.cat((*line, *[empty] * (blocks - 1 - a)), dim=-1))
    both = torch.cat(lines, dim=-2)
    return both[:, :, 0].tril(-1), both[:, :, 1]


def _scan(transition: Tensor, addition: Tensor, state: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """States entering each chunk [NC, H, V, K] and after each span [N, H, V, K]."""
    entering, finals = [], []
    for n, (first, last) in enumerate(grid.ranges):
        matrix = state[n]
        for c in range(first, last):
            entering.append(matrix)
            matrix = torch.baddbmm(addition[c], matrix, transition[c])
        finals.append(matrix)
    return torch.stack(entering), torch.stack(finals)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where each token lies among the NC chunks of `chunk` rows; short chunks are padded with zeros at their end.

    ranges  chunks first..last-1 of each span
    rows    int64 [T] row of each token in the padded [NC * chunk], None if nothing is padded
    """

    ranges: tuple[tuple[int, int], ...]
    rows: Tensor | None
    chunk: int

    @staticmethod
    def build(spans: Spans, chunk: int) -> _Grid:
        ranges, pieces, first = [], [], 0
        for start, end in zip(spans.starts, spans.ends, strict=True):
            last = first + (end - 1) // chunk - start // chunk + 1
            # the first chunk begins at its first token, wherever that is on the absolute grid
            head = min(end, (start // chunk + 1) * chunk) - start
            pieces.append(torch.arange(first * chunk, first * chunk + head))
            pieces.append(torch.arange((first + 1) * chunk, (first + 1) * chunk + end - start - head))
            ranges.append((first, last))
            first = last
        is_padded = first * chunk != spans.num_tokens
        return _Grid(tuple(ranges), torch.cat(pieces).to(spans.device) if is_padded else None, chunk)

    def spread(self, x: Tensor) -> Tensor:
        """[T, H, *] -> [NC, H, C, *], zeros in the padding."""
        if self.rows is not None:
            padded = x.new_zeros(self.ranges[-1][1] * self.chunk, *x.shape[1:])
            x = padded.index_copy(0, self.rows.to(x.device), x)
        return torch.unflatten(x, 0, (-1, self.chunk)).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """[NC, H, C, V] -> [T, H, V]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.rows is None else x[self.rows.to(x.device)]
