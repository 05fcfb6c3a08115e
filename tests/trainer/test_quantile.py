"""Quantile balancing: the sign, the histogram, and how fast it balances next to the sign rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.trainer.balance.quantile import balanced_bias, bin_range, histogram, margins, quantile, sign_bias

E, ACTIVE, TOKENS = 64, 4, 4096


def picks(scores: Tensor, bias: Tensor, active: int) -> Tensor:
    return (scores + bias).topk(active, dim=-1).indices


def max_over_mean(scores: Tensor, bias: Tensor, active: int) -> float:
    load = torch.bincount(picks(scores, bias, active).flatten(), minlength=scores.shape[1]).double()
    return float(load.max() / load.mean())


def solved(scores: Tensor, bias: Tensor, active: int, bins: int = 1000) -> Tensor:
    low, high = bin_range(bias)
    return balanced_bias(histogram(margins(scores, bias, active), low, high, bins), active, low, high)


def drifting_scores(step: int, *, seed: int = 0) -> Tensor:
    """Scores of a skewed router whose preferences drift (the simulation of spec C.8)."""
    generator = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, E, generator=generator, dtype=torch.float64)
    mix = min(step / 200, 1.0)
    noise = torch.Generator().manual_seed(1000 + step)
    logits = (1 - mix) * start + mix * end + 0.5 * torch.randn(TOKENS, E, generator=noise, dtype=torch.float64)
    return torch.sigmoid(logits)


def simulate(rule: str, steps: int, rate: float = 0.0) -> list[float]:
    """Largest over mean load at each step; the bias is that of the steps before."""
    bias, found = torch.zeros(E, dtype=torch.float64), []
    for step in range(steps):
        scores = drifting_scores(step)
        found.append(max_over_mean(scores, bias, ACTIVE))
        if rule == "quantile":
            bias = solved(scores, bias, ACTIVE)
        elif rule == "sign":
            load = torch.bincount(picks(scores, bias, ACTIVE).flatten(), minlength=E)
            bias = sign_bias(bias, load, rate)
    return found


def test_an_expert_is_taken_exactly_when_its_bias_exceeds_its_margin() -> None:
    scores, bias = torch.rand(50, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64) * 0.1
    is_taken = torch.zeros(50, 9, dtype=torch.bool).scatter_(1, picks(scores, bias, 3), True)
    # the first expert that is left out sits at its margin exactly
    assert torch.equal(bias > margins(scores, bias, 3) + 1e-12, is_taken)


def test_sign_an_expert_that_is_liked_too_much_gets_a_lower_bias() -> None:
    scores = torch.rand(4000, 4, dtype=torch.float64) * 0.5
    scores[:, 2] += 0.3
    bias = solved(scores, torch.zeros(4, dtype=torch.float64), 2)
    assert bias.argmin() == 2 and bias[2] < 0 < min(bias[0], bias[1], bias[3])


def test_two_experts_by_hand() -> None:
    """One of two is taken, and half of the tokens shall take each: the median token has s0 = 0.5 and s1 = 0.3."""
    scores = torch.stack([torch.linspace(0.2, 0.8, 1001), torch.full((1001,), 0.3)], dim=1).double()
    bias = torch.zeros(2, dtype=torch.float64)
    for _ in range(30):
        bias = solved(scores, bias, 1, bins=4000)
    assert float(bias[0] - bias[1]) == pytest.approx(-0.2, abs=2e-3)


def test_quantile_of_a_histogram_is_that_of_the_values() -> None:
    values = torch.rand(5000, 3, dtype=torch.float64) * torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64) - 0.3
    counts = histogram(values, -1.0, 1.0, 2000)
    assert torch.equal(counts.sum(dim=1), torch.tensor([5000] * 3))
    for fraction in (0.1, 0.25, 0.9):
        torch.testing.assert_close(
            quantile(counts, fraction, -1.0, 1.0), torch.quantile(values, fraction, dim=0), rtol=0, atol=1e-3
        )


def test_histograms_of_parts_add_up_to_that_of_the_whole() -> None:
    values = torch.rand(300, 5)
    parts = [histogram(part, 0.0, 1.0, 50) for part in values.split([100, 7, 193])]
    assert torch.equal(sum(parts, torch.zeros_like(parts[0])), histogram(values, 0.0, 1.0, 50))


def test_bias_has_mean_zero() -> None:
    scores = drifting_scores(0)
    assert abs(float(solved(scores, torch.zeros(E, dtype=torch.float64), ACTIVE).mean())) < 1e-12


def test_quantile_balances_after_one_step() -> None:
    found = simulate("quantile", 5)
    assert found[0] > 5 and found[1] < 1.8 and max(found[2:]) < 1.4


@pytest.mark.slow
def test_quantile_balances_at_once_where_the_sign_rule_takes_long() -> None:
    """The floor is sampling noise: the largest of 64 near-Poisson counts of mean 256 is about 1.15 of the mean."""
    none, slow, fast = simulate("none", 60), simulate("sign", 60, 1e-3), simulate("sign", 60, 1e-2)
    balanced = simulate("quantile", 60)
    assert none[0] > 5 and balanced[0] == slow[0] == none[0]
    assert balanced[1] < 1.8 and max(balanced[2:]) < 1.4
    assert sum(balanced[10:]) / 50 < 1.25
    assert slow[50] > 3 and fast[10] > 2.5
