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

# Values looked at first for top-p: a nucleus is nearly always among them, and a full sort costs far more.
HEAD = 256


def floor(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[M], the lowest logit that may be drawn: top-k (0 is off), then top-p of what is left (1 is off), and min-p of
    the best (0 is off)."""
    best = logits.amax(dim=-1, keepdim=True)
    lowest = best.squeeze(1) + torch.log(min_p)
    size = logits.shape[1]
    is_cut = (top_k > 0) & (top_k < size)
    is_nucleus = top_p < 1
    if not bool((is_cut | is_nucleus).any()):
        return lowest
    longest = int(torch.where(is_cut, top_k, 0).amax())
    width = min(size, max(longest, HEAD if bool(is_nucleus.any()) else 1))
    while True:
        head = logits.topk(width, dim=-1).values
        by_k = head.gather(1, (torch.where(is_cut, top_k, 1) - 1).unsqueeze(1)).squeeze(1)
        by_k = torch.where(is_cut, by_k, -torch.inf)
        by_p, is_whole = _nucleus(logits, head, best, by_k, top_p)
        if width == size or bool((is_whole | ~is_nucleus).all()):
            break
        width = size
    return torch.maximum(lowest, torch.maximum(by_k, torch.where(is_nucleus, by_p, -torch.inf)))


def _nucleus(logits: Tensor, head: Tensor, best: Tensor, by_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest logit of the smallest set that holds top_p of the mass above `by_k`, whether `head` holds that set)."""
    left = torch.where(logits >= by_k.unsqueeze(1), torch.exp(logits - best), 0).double()
    wanted = top_p.double() * left.sum(dim=-1)
    weights = torch.where(head >= by_k.unsqueeze(1), torch.exp(head - best), 0).double()
    mass = weights.cumsum(dim=-1)
    is_in = (mass - weights < wanted.unsqueeze(1)) & (weights > 0)
    by_p = torch.where(is_in, head, torch.inf).amin(dim=-1)
    return by_p, mass[:, -1] >= wanted


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
