"""Ratios of two policies at the tokens that were sampled: log-ratio, drift (k1, k3), effective sample size, TIS.

In: packed [T] logprobs of the same ids under two policies, and a mask. Out: packed [T] vectors, or sums of them in
float64, which add up over micro-batches and ranks.
Invariants: a row that the mask hides is exactly 0 in every vector and every gradient, whatever it holds, NaN included;
a NaN that the mask shows is never hidden; a mean over no tokens is an error, not 0.
Limit: k1 and k3 estimate a KL only if the ids were drawn from the policy in the denominator of the ratio.
Source: spec/training.md A.2, A.3, C.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ConfigError, InvariantError, ShapeError
from baltoro.kernels.precision import acc_dtype


def log_ratio(now: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """x = now - old where the mask shows, 0 elsewhere; [T] in the accumulate dtype. The gradient goes into `now` alone.

    Errors  ShapeError if the three do not have one shape [T], or the mask is not bool
    """
    check_rows(mask, now, old)
    dtype = acc_dtype(torch.promote_types(now.dtype, old.dtype))
    return shown(now.to(dtype), mask) - shown(old.detach().to(dtype), mask)


def shown(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask shows, 0 elsewhere: a selection, so that even a hidden NaN leaves no trace."""
    return torch.where(mask, values, torch.zeros_like(values))


def check_rows(mask: Tensor, *vectors: Tensor) -> None:
    """Errors: ShapeError unless the mask is bool [T] and the others are [T]."""
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ShapeError(f"the mask must be bool [T], not {mask.dtype} {tuple(mask.shape)}")
    shapes = [tuple(v.shape) for v in vectors]
    if any(shape != tuple(mask.shape) for shape in shapes):
        raise ShapeError(f"packed vectors of shapes {shapes} do not go with a mask of {tuple(mask.shape)}")


def k1(now: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """-x in float64: unbiased for KL(old || now) on ids drawn from old, of either sign, and noisy. No gradient."""
    return -_exact(now, old, mask)


def k3(now: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """exp(x) - 1 - x in float64 through expm1: unbiased for KL(old || now) too, never negative, and far less noisy.

    x near 1e-5 gives 5e-11 with ten digits; exp(x) - 1 - x would leave six of them, and in float32 none. No gradient.
    """
    x = _exact(now, old, mask)
    return torch.expm1(x) - x


def _exact(now: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return log_ratio(now.detach().double(), old.detach().double(), mask)


def reference_kl(now: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """GRPO's penalty beta * k3 to a reference policy, without the beta: [T], differentiable in `now`.

    The ids come from `now` (up to staleness), so the ratio stands the other way round: reference / now.
    """
    check_rows(mask, now, reference)
    dtype = acc_dtype(torch.promote_types(now.dtype, reference.dtype))
    x = shown(reference.detach().to(dtype), mask) - shown(now.to(dtype), mask)
    return torch.expm1(x) - x


def tis_weights(
    trainer: Tensor, engine: Tensor, mask: Tensor, *, high: float = 2.0, low: float = 0.0
) -> tuple[Tensor, int]:
    """(weights [T], how many were cut): clamp(exp(trainer - engine), low, high), 0 where the mask hides; no gradient.

    trainer  logprobs by the trainer's own forward under the weights that sampled; engine  as recorded while sampling
    """
    if not 0.0 <= low < 1.0 < high:
        raise ConfigError(f"TIS needs 0 <= low < 1 < high, not {low} and {high}: the weight of an exact engine is 1")
    ratio = log_ratio(trainer.detach(), engine, mask).exp()
    is_cut = mask & ((ratio > high) | (ratio < low))
    return shown(ratio.clamp(low, high), mask), int(is_cut.sum())


@dataclass(frozen=True, slots=True)
class Drift:
    """Sums over counted tokens of what two policies disagree on; `a + b` is that of both parts. float64."""

    tokens: int = 0
    k1_sum: float = 0.0
    k3_sum: float = 0.0
    abs_sum: float = 0.0
    abs_max: float = 0.0
    ratio_sum: float = 0.0
    square_sum: float = 0.0

    def __add__(self, other: Drift) -> Drift:
        return Drift(
            self.tokens + other.tokens,
            self.k1_sum + other.k1_sum,
            self.k3_sum + other.k3_sum,
            self.abs_sum + other.abs_sum,
            _larger(self.abs_max, other.abs_max),
            self.ratio_sum + other.ratio_sum,
            self.square_sum + other.square_sum,
        )

    def _mean(self, total: float) -> float:
        if not self.tokens:
            raise InvariantError("drift over no tokens: the mask hides everything, so nothing was compared")
        return total / self.tokens

    @property
    def k1(self) -> float:
        """Mean of k1: noisy, but of a sign."""
        return self._mean(self.k1_sum)

    @property
    def k3(self) -> float:
        """Mean of k3: the figure to plot."""
        return self._mean(self.k3_sum)

    @property
    def mean_abs(self) -> float:
        """Mean |dlogp|."""
        return self._mean(self.abs_sum)

    @property
    def ess(self) -> float:
        """(sum w)^2 / (N sum w^2) of the ratios: 1 if all weigh the same, 1/N if one has everything."""
        return self._mean(self.ratio_sum**2 / self.square_sum if self.square_sum else math.nan)


def drift(now: Tensor, old: Tensor, mask: Tensor) -> Drift:
    """What `now` and `old` disagree on. One transfer from the device."""
    x = _exact(now, old, mask)[mask]
    if not len(x):
        return Drift()
    ratio = x.exp()
    parts = (-x.sum(), (torch.expm1(x) - x).sum(), x.abs().sum(), x.abs().max(), ratio.sum(), ratio.square().sum())
    return Drift(len(x), *torch.stack(parts).tolist())


def _larger(a: float, b: float) -> float:
    """max that keeps a NaN."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
