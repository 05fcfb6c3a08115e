"""Ratios of two policies: drift with ten digits, masks that hide even NaN, truncated weights, effective sample size."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baltoro.errors import ConfigError, InvariantError, ShapeError
from baltoro.trainer.ratio import Drift, drift, k1, k3, log_ratio, reference_kl, tis_weights


def _shown(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def _series(x: float) -> float:
    """exp(x) - 1 - x by its series, exactly."""
    exact = Fraction(x)
    return float(sum(exact**n / math.factorial(n) for n in range(2, 12)))


@pytest.mark.parametrize("x", [1e-7, -1e-6, 1e-5, 3e-3, -0.2])
def test_k3_keeps_its_digits_where_the_difference_is_small(x: float) -> None:
    old = torch.tensor([-0.25], dtype=torch.float64)
    now = old + x
    exact = _series(float(now - old))
    assert math.isclose(float(k3(now, old, _shown(1))), exact, rel_tol=3e-9)


def test_k3_of_float32_logprobs_is_taken_in_float64() -> None:
    now, old = torch.tensor([-1.0, -1.0 + 2**-17]), torch.tensor([-1.0 + 2**-17, -1.0])
    found = k3(now, old, _shown(2))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor([_series(-(2**-17)), _series(2**-17)]).double(), rtol=1e-6, atol=0)


def test_k1_and_k3_are_the_divergence_in_the_mean_over_what_was_sampled() -> None:
    old = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0)
    now = torch.log_softmax(old + 0.3 * torch.randn(50, dtype=torch.float64), 0)
    exact = (old.exp() * (old - now)).sum()
    for estimate in (k1, k3):
        torch.testing.assert_close((old.exp() * estimate(now, old, _shown(50))).sum(), exact)
    assert (k3(now, old, _shown(50)) >= 0).all()


def test_reference_penalty_is_the_divergence_from_the_policy_that_samples() -> None:
    now = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0).requires_grad_()
    reference = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0)
    found = (now.exp().detach() * reference_kl(now, reference, _shown(50))).sum()
    torch.testing.assert_close(found, (now.exp() * (now - reference)).sum())
    found.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    ratio = (reference - now).exp().detach()
    torch.testing.assert_close(now.grad, now.exp().detach() * (1 - ratio))


def test_hidden_rows_leave_no_trace_and_shown_ones_hide_nothing() -> None:
    now = torch.tensor([torch.nan, -1.0, torch.inf, -2.0], requires_grad=True)
    old = torch.tensor([0.0, -1.5, torch.nan, -2.0])
    mask = torch.tensor([False, True, False, True])
    x = log_ratio(now, old, mask)
    assert x.tolist() == [0.0, 0.5, 0.0, 0.0]
    x.square().sum().backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None and now.grad.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert drift(now, old, mask).tokens == 2 and math.isfinite(drift(now, old, mask).k3)
    assert math.isnan(drift(now, old, _shown(4)).k3)
    assert math.isnan((Drift(1) + drift(now, old, _shown(4)) + Drift(1)).abs_max)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 1000))
def test_drift_adds_up_over_parts(count: int, cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    now, old = torch.randn(2, count, generator=generator, dtype=torch.float64)
    mask = torch.rand(count, generator=generator) < 0.8
    mask[0] = True
    whole = drift(now, old, mask)
    parts = drift(now[:cut], old[:cut], mask[:cut]) + drift(now[cut:], old[cut:], mask[cut:])
    assert whole.tokens == parts.tokens and whole.abs_max == parts.abs_max
    for name in ("k1", "k3", "mean_abs", "ess"):
        assert math.isclose(getattr(whole, name), getattr(parts, name), rel_tol=1e-9, abs_tol=1e-12)
    x = (now - old)[mask]
    assert math.isclose(whole.k3, float(k3(now, old, mask)[mask].mean()), rel_tol=1e-9)
    assert math.isclose(whole.ess, float(x.exp().sum() ** 2 / (len(x) * (2 * x).exp().sum())), rel_tol=1e-9)


def test_effective_share_is_one_for_equal_weights_and_one_token_for_a_single_heavy_one() -> None:
    zeros = torch.zeros(8, dtype=torch.float64)
    assert math.isclose(drift(zeros + 0.7, zeros, _shown(8)).ess, 1.0)
    heavy = zeros.clone()
    heavy[3] = 60.0
    assert math.isclose(drift(heavy, zeros, _shown(8)).ess, 1 / 8)


def test_a_mean_over_no_tokens_is_an_error() -> None:
    nothing = drift(torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    for name in ("k1", "k3", "mean_abs", "ess"):
        with pytest.raises(InvariantError, match="no tokens"):
            getattr(nothing, name)


def test_tis_truncates_reports_and_has_no_gradient() -> None:
    engine = torch.zeros(5, dtype=torch.float64)
    trainer = torch.tensor([0.0, math.log(1.9), math.log(3.0), -5.0, torch.nan], dtype=torch.float64)
    trainer.requires_grad_()
    mask = torch.tensor([True, True, True, True, False])
    weights, cut = tis_weights(trainer, engine, mask, high=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.9, 2.0, math.exp(-5.0), 0.0], dtype=torch.float64))
    assert cut == 1 and not weights.requires_grad
    assert tis_weights(trainer, engine, mask, high=2.0, low=0.5)[1] == 2
    with pytest.raises(ConfigError, match="exact engine"):
        tis_weights(trainer, engine, mask, high=0.5)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="bool"):
        log_ratio(torch.zeros(3), torch.zeros(3), torch.ones(3))
    with pytest.raises(ShapeError, match="packed"):
        log_ratio(torch.zeros(3), torch.zeros(1), _shown(3))
