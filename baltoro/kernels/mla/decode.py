"""Absorbed attention for a CPU: request by request, over the rows that it has and no others.

The reference gathers every request's pages up to the longest, and masks; of ragged requests most of that is copied for
nothing. One request's rows also fit into a core's cache.
In and out: as `reference.attend_absorbed`; the same up to rounding. Rows past a length are never read into the result.
Source: spec/k3.md 3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.mla.reference import by_token
from baltoro.kernels.precision import acc_dtype


def attend_absorbed(
    q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, *, latent: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q [N, H, R+Dr] or a window [N, W, H, R+Dr]; kv [P, page, R+Dr]; page_table [N, Pmax]; lengths [N] -> out
    [N, (W,) H, R], lse [N, (W,) H].

    Length 0 gives out 0 and -inf.
    """
    if q.dim() == 4:
        return by_token(attend_absorbed, q, kv, page_table, lengths, latent=latent, scale=scale)
    acc, size = acc_dtype(q.dtype), kv.shape[1]
    outputs, sums, tops = [], [], []
    for query, pages, length in zip(q.to(acc) * scale, page_table, lengths.tolist(), strict=True):
        rows = kv[pages[: -(-length // size)]].flatten(0, 1)[:length].to(acc)
        scores = query @ rows.T
        # one pass of exponentials for output and log-sum-exp; they are divided by and logged for all at once
        tops.append(scores.amax(-1) if length else scores.new_full((len(query),), -torch.inf))
        shares = torch.exp_(scores.sub_(tops[-1].unsqueeze(-1)))
        sums.append(shares.sum(-1))
        outputs.append(shares @ rows[:, :latent])
    total, top = torch.stack(sums), torch.stack(tops)
    return torch.stack(outputs) / total.clamp_min(1).unsqueeze(-1), top + total.log()
