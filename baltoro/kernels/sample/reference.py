"""Sampling in plain torch: every filter is a lowest logit, every draw one number.

    keep   = { x : logit(x) >= floor }        floor = max of what top-k, top-p and min-p ask for
    id     = first x with  sum_{y <= x, y in keep} p(y)  >  u * sum_{y in keep} p(y)        u in [0, 1)

A filter that is a value and not a set of places needs no sort order, keeps equal logits together, and so depends on
nothing but the row. The sum runs over ids in order, in FP64.
Limits: ties at the border of top-k are all kept.
Shapes: logits [M, X] in the accumulate dtype, already divided by the temperature; one entry of the options a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Likeliest values that top-p looks at first: a nucleus is nearly always among them, and sorting all costs far more.
# Rows whose nucleus is larger look at eight times as many, and so on.
HEAD, WIDER = 256, 8


def floor(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[M], the lowest logit that may be drawn: top-k (0 is off), then top-p of what is left (1 is off), and min-p of
    the best (0 is off)."""
    lowest = logits.amax(dim=-1) + torch.log(min_p)
    rows = torch.nonzero((top_k > 0) & (top_k < logits.shape[1])).squeeze(1)
    if rows.numel():
        count = top_k[rows]
        head = logits[rows].topk(int(count.amax()), dim=-1).values
        by_k = head.gather(1, count.unsqueeze(1) - 1).squeeze(1)
        lowest[rows] = torch.maximum(lowest[rows], by_k)
        cut = torch.full_like(lowest, -torch.inf).index_copy(0, rows, by_k)
    else:
        cut = torch.full_like(lowest, -torch.inf)
    rows = torch.nonzero(top_p < 1).squeeze(1)
    if rows.numel():
        lowest[rows] = torch.maximum(lowest[rows], _nucleus(logits[rows], cut[rows], top_p[rows]))
    return lowest


def _nucleus(logits: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
    """[M], the lowest logit of the smallest set that holds top_p of the mass of logits >= cut[M]."""
    best = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - best).masked_fill_(logits < cut.unsqueeze(1), 0)
    wanted = top_p.double() * weights.sum(dim=-1, dtype=torch.float64)
    found = torch.empty_like(cut)
    left, width = torch.arange(len(logits), device=logits.device), min(HEAD, logits.shape[1])
    while left.numel():
        head = logits[left].topk(width, dim=-1).values
        parts = torch.exp(head - best[left]).masked_fill_(head < cut[left].unsqueeze(1), 0).double()
        mass = parts.cumsum(dim=-1)
        is_in = (mass - parts < wanted[left].unsqueeze(1)) & (parts > 0)
        found[left] = torch.where(is_in, head, torch.inf).amin(dim=-1)
        is_open = mass[:, -1] < wanted[left]
        if width == logits.shape[1]:
            break
        left, width = left[is_open], min(width * WIDER, logits.shape[1])
    return found


def draw(logits: Tensor, lowest: Tensor, uniform: Tensor) -> Tensor:
    """int64 [M]: one id a row among those with logit >= lowest[M], chosen by uniform[M] (FP64, in [0, 1))."""
    best = logits.amax(dim=-1, keepdim=True)
    weights = torch.where(logits >= lowest.unsqueeze(1), torch.exp(logits - best), 0).double()
    mass = weights.cumsum(dim=-1)
    total = mass[:, -1]
    # never the total itself, which u close to 1 may round to: no id lies behind it
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(mass, target.unsqueeze(1), right=True).squeeze(1)
    return ids.clamp_max(logits.shape[1] - 1)


def sample(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """`floor`, then `draw`: ids int64 [M]. top_k int64, top_p and min_p as the logits, uniform FP64, [M] each."""
    return draw(logits, floor(logits, top_k, top_p, min_p), uniform)


def penalise(
    row: Tensor, seen: Tensor, output: Tensor, counts: Tensor, *, repetition: float, frequency: float, presence: float
) -> None:
    """Lower the logits row[X] of tokens that were there before, in place.

    seen    int64, prompt and output ids, each once: divided (positive logits) or multiplied by `repetition`
    output  int64, output ids, each once, and counts: how often; minus count * frequency + presence
    """
    if repetition != 1.0:
        old = row[seen]
        row[seen] = torch.where(old > 0, old / repetition, old * repetition)
    if output.numel():
        row[output] -= counts.to(row.dtype) * frequency + presence


def log_probs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(natural-log probability of ids[M], log-sum-exp), [M] each, of logits[M, X]."""
    total = torch.logsumexp(logits, dim=-1)
    return logits.gather(1, ids.unsqueeze(1)).squeeze(1) - total, total
