"""Absorbed attention for a CPU: request by request, over the rows that it has and no others.

The reference gathers every request's pages up to the longest, and masks; of ragged requests most of that is copied for
nothing. One request's rows also fit into a core's cache.
In and out: as `reference.attend_absorbed`; the same up to rounding. Rows past a length are never read into the result.
Source: spec/k3.md 3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype


def attend_absorbed(
    q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, *, latent: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q [N, H, R+Dr]; kv [P, page, R+Dr]; page_table [N, Pmax]; lengths [N] -> out [N, H, R], lse [N, H].

    Length 0 gives out 0 and -inf.
    """
    acc, size = acc_dtype(q.dtype), kv.shape[1]
    outputs, sums = [], []
    for query, pages, length in zip(q.to(acc) * scale, page_table, lengths.tolist(), strict=True):
        rows = kv[pages[: -(-length // size)]].flatten(0, 1)[:length].to(acc)
        scores = query @ rows.T
        sums.append(torch.logsumexp(scores, dim=-1))
        outputs.append(torch.softmax(scores, dim=-1) @ rows[:, :latent])
    return torch.stack(outputs), torch.stack(sums)
