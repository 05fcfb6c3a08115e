"""Policy losses: pure functions on packed [T] vectors, one loss a token.

In: logprobs of the sampled ids now (with gradient) and under the policy that sampled them ("old": the engine's, or the
trainer's own at the start of the step), advantages, a mask. Out: Terms: losses [T] to minimise, and counts for the log.
How losses become one number is `aggregate.py`'s: nothing here is averaged, so nothing here depends on micro-batches.
Invariants: a hidden row has loss and gradient exactly 0, even if it holds NaN; a shown NaN comes out as NaN; the
gradient goes into `now` alone.
Notation: x = now - old, rho = exp(x), A the advantage.
Source: spec/training.md A.2, C.1, C.2; docs/ideas/policy-losses.md has formulas, gradients and why a default is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype
from baltoro.trainer.policy_config import PolicyConfig
from baltoro.trainer.ratio import check_rows, log_ratio, shown

# exp() of more is no ratio that means anything, and the square of its gradient overflows float32
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Losses [T] of a micro-batch. is_low, is_high: bool [T], rows whose ratio left the range on that side.

    For `clipped` and `by_trajectory` these are the rows whose gradient the clip took; for `capped` and `mirror`, all.
    """

    losses: Tensor
    is_low: Tensor
    is_high: Tensor


def clipped(
    now: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
) -> Terms:
    """GRPO, DAPO, Dr.GRPO: max(-rho A, -clip(rho, 1 - low, 1 + high) A); `dual` caps it at dual * |A| where A < 0.

    Gradient -rho A grad(now), and 0 where rho is past the side that A pushes to (with dual: also past dual, if A < 0).
    """
    advantages = _advantages(advantages, mask, now)
    ratio = _ratio(log_ratio(now, old, mask))
    return _clip(ratio, advantages, mask, (1.0 - low, 1.0 + high), dual)


def by_trajectory(
    now: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mean_log_ratio: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Terms:
    """GSPO: one ratio s = exp(mean x) a trajectory, clipped as a whole. Aggregate it by trajectory means.

    mean_log_ratio  [T], of the trajectory of each row, over all its counted tokens (`aggregate.mean_log_ratios`)

    The value of a row is the whole trajectory's, max(-s A, -clip(s) A), so that a mean over its rows is it again; the
    gradient of a row is s A grad(now) of its own token: their mean is the gradient of the trajectory's loss. Rows of
    one trajectory may therefore lie in different micro-batches.
    """
    check_rows(mask, mean_log_ratio)
    advantages = _advantages(advantages, mask, now)
    x = log_ratio(now, old, mask)
    mean = shown(mean_log_ratio.detach().to(x.dtype), mask)
    ratio = _ratio(mean + (x - x.detach()))
    return _clip(ratio, advantages, mask, (1.0 - low, 1.0 + high), None)


def capped(now: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, max_ratio: float = 5.0) -> Terms:
    """CISPO: -sg[min(rho, max_ratio)] A now. Gradient -min(rho, max_ratio) A grad(now): capped, never 0."""
    advantages = _advantages(advantages, mask, now)
    x = log_ratio(now, old, mask)
    weight = _ratio(x).detach().clamp(max=max_ratio)
    is_high = mask & (x.detach().exp() > max_ratio)
    return Terms(-weight * advantages * shown(now.to(x.dtype), mask), torch.zeros_like(mask), is_high)


def mirror(
    now: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    gate: tuple[float, float],
    tau: float,
) -> Terms:
    """Per-token regularised mirror descent (K2.5): -1[gate[0] <= x <= gate[1]] rho A + tau x^2.

    The gate looks at x alone, not at the sign of A, and shuts the policy's term only: outside, 2 tau x grad(now) pulls
    the token back to the policy that sampled it, where the clip of `clipped` would leave it where it is.
    """
    advantages = _advantages(advantages, mask, now)
    x = log_ratio(now, old, mask)
    at = x.detach()
    is_low, is_high = mask & (at < gate[0]), mask & (at > gate[1])
    policy = torch.where(is_low | is_high, torch.zeros_like(x), -_ratio(x) * advantages)
    return Terms(policy + tau * x.square(), is_low, is_high)


def policy_terms(
    config: PolicyConfig,
    now: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    mean_log_ratio: Tensor | None = None,
) -> Terms:
    """The loss that `config` names. Errors: ShapeError if GSPO comes without its mean log-ratios."""
    match config.form:
        case "clipped":
            return clipped(
                now, old, advantages, mask, low=config.clip_low, high=config.clip_high, dual=config.dual_clip
            )
        case "by_trajectory":
            if mean_log_ratio is None:
                raise ShapeError("by_trajectory needs mean_log_ratio; see aggregate.mean_log_ratios")
            return by_trajectory(now, old, advantages, mask, mean_log_ratio, low=config.clip_low, high=config.clip_high)
        case "capped":
            return capped(now, old, advantages, mask, max_ratio=config.max_ratio)
        case "mirror":
            return mirror(now, old, advantages, mask, gate=(config.gate_low, config.gate_high), tau=config.tau)


def _advantages(advantages: Tensor, mask: Tensor, now: Tensor) -> Tensor:
    check_rows(mask, advantages, now)
    return shown(advantages.detach().to(acc_dtype(now.dtype)), mask)


def _ratio(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio: Tensor, advantages: Tensor, mask: Tensor, bounds: tuple[float, float], dual: float | None) -> Terms:
    """The pessimistic choice between the ratio and the clipped one. Hidden rows have A = 0, so their loss is 0."""
    low, high = bounds
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    is_low = mask & (advantages < 0) & (ratio.detach() < low)
    is_high = mask & (advantages > 0) & (ratio.detach() > high)
    if dual is not None:
        limit = -dual * advantages
        is_far = (advantages < 0) & (losses.detach() > limit)
        losses = torch.where(is_far, limit, losses)
        is_high = is_high | (mask & is_far)
    return Terms(losses, is_low, is_high)
