"""One number from the losses of tokens: written denominators, one gradient for every split into micro-batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baltoro.errors import ConfigError, InvariantError, ShapeError
from baltoro.trainer.aggregate import Totals, mean_log_ratios, row_weights, sum_by_trajectory, totals
from baltoro.trainer.loss import weighted_sum
from baltoro.trainer.policy_config import ALGORITHMS, PolicyConfig
from baltoro.trainer.policy_loss import policy_terms
from baltoro.trainer.ratio import log_ratio

# trajectories of 3, 1, 4 and 2 tokens, of which the mask shows 2, 1, 3 and 0
TRAJECTORY = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3])
MASK = torch.tensor([True, False, True, True, True, True, False, True, False, False])
LOSSES = torch.arange(1.0, 11.0, dtype=torch.float64)


def _value(mode: str, **more: int) -> float:
    of_step = totals([(MASK, TRAJECTORY)], 4)
    return float(weighted_sum(LOSSES, row_weights(MASK, TRAJECTORY, of_step, mode, **more)))  # type: ignore[arg-type]


def test_denominators_by_hand() -> None:
    assert _value("token_mean") == pytest.approx((1 + 3 + 4 + 5 + 6 + 8) / 6)
    assert _value("trajectory_mean") == pytest.approx(((1 + 3) / 2 + 4 + (5 + 6 + 8) / 3) / 3)
    assert _value("fixed_length", fixed_length=16) == pytest.approx((1 + 3 + 4 + 5 + 6 + 8) / (3 * 16))


def test_fixed_length_tells_no_long_trajectory_from_a_short_one() -> None:
    """A token weighs the same in either; with trajectory means, less in the longer one."""
    of_step = totals([(MASK, TRAJECTORY)], 4)
    fixed = row_weights(MASK, TRAJECTORY, of_step, "fixed_length", fixed_length=16)
    mean = row_weights(MASK, TRAJECTORY, of_step, "trajectory_mean")
    assert fixed[3] == fixed[4] and mean[3] == 3 * mean[4]


def test_a_step_that_counts_nothing_is_an_error() -> None:
    with pytest.raises(InvariantError, match="no token"):
        totals([(torch.zeros_like(MASK), TRAJECTORY)], 4)
    with pytest.raises(InvariantError, match="no token"):
        totals([], 4)
    with pytest.raises(ConfigError, match="fixed_length"):
        _value("fixed_length")


def _step_gradient(config: PolicyConfig, weights: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(gradient, loss) of a step of a small policy whose rows come in `parts`: index vectors into the packed rows."""
    generator = torch.Generator().manual_seed(7)
    count, vocabulary = len(TRAJECTORY), 5
    inputs = torch.randn(count, len(weights) // vocabulary, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocabulary, (count,), generator=generator)
    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.9], dtype=torch.float64)[TRAJECTORY]
    weights = weights.clone().requires_grad_()

    def logprobs(rows: Tensor) -> Tensor:
        logits = inputs[rows] @ weights.view(-1, vocabulary)
        return logits.log_softmax(-1).gather(1, ids[rows, None]).squeeze(1)

    of_step = totals([(MASK[rows], TRAJECTORY[rows]) for rows in parts], 4)
    sums = torch.zeros(4, dtype=torch.float64)
    for rows in parts:
        x = log_ratio(logprobs(rows).detach(), old[rows], MASK[rows])
        sums = sums + sum_by_trajectory(x, MASK[rows], TRAJECTORY[rows], 4)
    loss = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        now, mask, trajectory = logprobs(rows), MASK[rows], TRAJECTORY[rows]
        mean = mean_log_ratios(now, old[rows], mask, trajectory, of_step, sums=sums)
        terms = policy_terms(config, now, old[rows], advantages[rows], mask, mean_log_ratio=mean)
        scale = row_weights(mask, trajectory, of_step, config.aggregation, fixed_length=config.fixed_length)
        part = weighted_sum(terms.losses, scale)
        part.backward()  # type: ignore[no-untyped-call]
        loss = loss + part.detach()
    assert weights.grad is not None
    return weights.grad, loss


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(10)), cuts=st.sets(st.integers(1, 9)))
def test_the_gradient_is_that_of_one_batch_for_every_split(name: str, order: list[int], cuts: set[int]) -> None:
    """Rows in any order, cut anywhere: trajectories fall apart into several micro-batches."""
    weights = torch.linspace(-0.5, 0.5, 15, dtype=torch.float64)
    bounds = [0, *sorted(cuts), 10]
    parts = [torch.tensor(order[a:b]) for a, b in pairwise(bounds)]
    whole, loss = _step_gradient(ALGORITHMS[name], weights, [torch.arange(10)])
    split, split_loss = _step_gradient(ALGORITHMS[name], weights, parts)
    assert whole.abs().max() > 1e-6
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=1e-15)


def test_a_mean_of_means_would_depend_on_the_split() -> None:
    """What denominators of each micro-batch of its own would give: not the same, hence totals from outside."""
    parts = [slice(0, 2), slice(2, 10)]
    means = [float((LOSSES * MASK)[part].sum() / MASK[part].sum()) for part in parts]
    assert abs(sum(means) / 2 - _value("token_mean")) > 0.5


def test_a_cut_trajectory_needs_the_sums_of_the_step() -> None:
    now, old = torch.zeros(2, 10, dtype=torch.float64)
    of_step = totals([(MASK, TRAJECTORY)], 4)
    mean_log_ratios(now, old, MASK, TRAJECTORY, of_step)
    mean_log_ratios(now[4:], old[4:], MASK[4:], TRAJECTORY[4:], of_step)
    with pytest.raises(ShapeError, match=r"\[2\] are cut"):
        mean_log_ratios(now[:5], old[:5], MASK[:5], TRAJECTORY[:5], of_step)


def test_totals_must_be_counts() -> None:
    with pytest.raises(ShapeError, match="integers"):
        Totals(torch.ones(3))
