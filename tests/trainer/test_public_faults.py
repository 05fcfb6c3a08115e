"""Faults of docs/spec/training.md B.2 that sit in losses; docs/ideas/public-faults-training.md lists all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baltoro.kernels.quant import mxfp4
from baltoro.trainer.aggregate import Totals, mean_log_ratios, row_weights, totals
from baltoro.trainer.loss import weighted_sum
from baltoro.trainer.policy_config import ALGORITHMS
from baltoro.trainer.policy_loss import policy_terms
from baltoro.trainer.ratio import tis_weights

F64 = torch.float64


def step(name: str, now: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, trajectory: Tensor) -> Tensor:
    """Gradient of one step of an algorithm on one micro-batch, with respect to `now`."""
    config, now = ALGORITHMS[name], now.clone().requires_grad_()
    of_step = totals([(mask, trajectory)], int(trajectory.max()) + 1)
    mean = mean_log_ratios(now, old, mask, trajectory, of_step)
    terms = policy_terms(config, now, old, advantages, mask, mean_log_ratio=mean)
    weights = row_weights(mask, trajectory, of_step, config.aggregation, fixed_length=config.fixed_length)
    (gradient,) = torch.autograd.grad(weighted_sum(terms.losses, weights), now)
    return gradient


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_masked_trajectory_leaves_the_denominator_too(name: str) -> None:
    """B-23: with a cut-off trajectory masked, the step is that of a batch which never had it."""
    trajectory = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    old = -torch.linspace(0.1, 2.0, 8, dtype=F64)
    now = old + torch.linspace(-0.1, 0.1, 8, dtype=F64)
    advantages = torch.tensor([1.0, -0.5, -0.5], dtype=F64)[trajectory]
    mask = trajectory != 1
    got = step(name, now, old, advantages, mask, trajectory)
    kept = mask.nonzero().flatten()
    renumbered = torch.where(trajectory[kept] == 2, 1, 0)
    wanted = step(name, now[kept], old[kept], advantages[kept], mask[kept], renumbered)
    assert torch.equal(got[~mask], torch.zeros(2, dtype=F64)) and wanted.abs().min() > 0
    torch.testing.assert_close(got[kept], wanted, rtol=1e-12, atol=0)


def test_a_long_trajectory_has_a_ratio_and_no_overflow() -> None:
    """trl#4772: exp of a sum over 4,000 tokens overflows where each has moved by a little; the mean does not."""
    trajectory = torch.zeros(4000, dtype=torch.int64)
    mask, old = torch.ones(4000, dtype=torch.bool), torch.full((4000,), -1.0)
    now = old + 0.2
    assert torch.isinf((now - old).sum().exp())
    of_step = Totals(torch.tensor([4000]))
    mean = mean_log_ratios(now, old, mask, trajectory, of_step)
    terms = policy_terms(ALGORITHMS["gspo"], now, old, torch.full((4000,), -1.0), mask, mean_log_ratio=mean)
    assert float(terms.losses[0]) == pytest.approx(math.exp(0.2), rel=1e-5) and terms.losses.isfinite().all()


def test_weights_of_truncated_importance_are_per_token_and_bounded() -> None:
    """trl#4772, the other half: one token that moved far cuts its own weight and no other's."""
    now, engine = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -90.0, -1.5])
    weights, num_cut = tis_weights(now, engine, torch.ones(3, dtype=torch.bool), low=0.0, high=2.0)
    torch.testing.assert_close(weights.float(), torch.tensor([1.0, 2.0, math.exp(0.5)]))
    assert num_cut == 1


def test_a_delta_merged_into_four_bits_is_lost() -> None:
    """B-11: why `merge` refuses a quantised base. A delta of 1 % of the weight, merged and quantised again, arrives to
    less than a third, and the error that it brings is larger than itself."""
    generator = torch.Generator().manual_seed(0)
    base = mxfp4.dequantise(*mxfp4.quantise(torch.randn(256, 256, generator=generator)), torch.float32)
    delta = torch.randn(256, 32, generator=generator) @ torch.randn(32, 256, generator=generator)
    delta *= 0.01 * base.norm() / delta.norm()
    arrived = mxfp4.dequantise(*mxfp4.quantise(base + delta), torch.float32) - base
    share = float((arrived * delta).sum() / delta.square().sum())
    assert share < 1 / 3
    assert (arrived - delta).norm() > delta.norm()
