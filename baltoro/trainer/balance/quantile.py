"""Quantile balancing: the router's selection bias, solved for equal load from histograms.

Token i takes expert j when s_ij + b_j exceeds its cut-off alpha_i, the (A+1)-th largest of s_i + b: when b_j is larger
than the margin m_ij = alpha_i - s_ij. Over n tokens expert j shall be taken n A / E times, so b_j becomes the
(A / E)-quantile of its margins; then the mean of b is removed. Exact for fixed cut-offs; these move with b, so it is
done once per optimizer step, on that step's tokens.
In: scores [T, E] of every training forward. Out: the new bias. Margins are only kept as counts in bins between
min b - 1 and max b + 1, which ranks can add up; the quantile is interpolated inside its bin.
Invariants: the bias enters the choice only, never the weights; a step without tokens leaves it.
Source: spec/training.md C.8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype


def margins(scores: Tensor, bias: Tensor, num_active: int) -> Tensor:
    """[T, E]: the bias that each expert would need to be taken by each token."""
    choice = scores + bias
    cut_off = choice.topk(num_active + 1, dim=-1).values[:, -1:]
    return cut_off - scores


def bin_range(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores lie in [0, 1], so margins cannot leave [min b - 1, max b + 1]. Bias [..., E] -> [...] each."""
    return bias.amin(-1) - 1.0, bias.amax(-1) + 1.0


def tally(total: Tensor, places: Tensor) -> None:
    """Add to `total` int64 [N] how often each of its places occurs in `places`, int64 of any shape.

    Integer sums, the same in any order; unlike a bincount it need not know the largest place.
    """
    total.scatter_add_(
        0, places.flatten(), torch.ones((), dtype=total.dtype, device=total.device).expand(places.numel())
    )


def add_histogram(total: Tensor, values: Tensor, low: Tensor | float, high: Tensor | float) -> None:
    """Add to `total`, int64 [E, bins], the counts of each column of `values` [T, E]."""
    num_experts, bins = total.shape
    place = ((values - low) * (bins / (high - low))).floor().clamp(0, bins - 1).to(torch.int64)
    tally(total.view(-1), place + torch.arange(num_experts, device=values.device) * bins)


def histogram(values: Tensor, low: Tensor | float, high: Tensor | float, bins: int) -> Tensor:
    """int64 [E, bins]: counts of each column of `values` [T, E]."""
    total = torch.zeros(values.shape[1], bins, dtype=torch.int64, device=values.device)
    add_histogram(total, values, low, high)
    return total


def quantile(counts: Tensor, fraction: float, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The `fraction`-quantile of each row of histograms [..., E, bins], interpolated inside its bin; [..., E] float64.

    low, high: [...] or numbers.
    """
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        low, high = (x.to(torch.float64)[..., None, None] for x in (low, high))
    below = counts.cumsum(dim=-1).to(torch.float64)
    rank = below[..., -1:] * fraction
    place = torch.searchsorted(below, rank).clamp(max=counts.shape[-1] - 1)
    inside = counts.gather(-1, place).to(torch.float64)
    before = below.gather(-1, place) - inside
    part = (rank - before) / inside.clamp(min=1.0)
    width = (high - low) / counts.shape[-1]
    return (low + (place.to(torch.float64) + part.clamp(0.0, 1.0)) * width).squeeze(-1)


def balanced_bias(counts: Tensor, num_active: int, low: Tensor | float, high: Tensor | float) -> Tensor:
    """[..., E] float64, mean 0: the bias that gives every expert its share under the counted cut-offs."""
    bias = quantile(counts, num_active / counts.shape[-2], low, high)
    return bias - bias.mean(-1, keepdim=True)


def sign_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The rule that quantile balancing is compared with: `rate` up for experts below the mean load, down above."""
    load = load.to(acc_dtype(bias.dtype))
    return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)
