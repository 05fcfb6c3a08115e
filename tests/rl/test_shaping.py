"""Scores to rewards: DAPO's buffer, effort budgets, and the order of the rules."""

from __future__ import annotations

from typing import Any

import pytest

from baltoro.errors import ConfigError
from baltoro.rl.advantage import group_advantages
from baltoro.rl.config import AdvantageConfig, ShapingConfig
from baltoro.rl.shaping import Shaped, overlong_penalty, shape, spent, task_b0
from baltoro.rl.types import NOT_SAMPLED, Trajectory


def _attempt(length: int, score: float | None = 1.0, **more: Any) -> Trajectory:
    """`length` sampled tokens, then one that a tool put in."""
    versions = (0,) * length + (NOT_SAMPLED,)
    fields: dict[str, Any] = {"status": "complete", "score": score, "thinking_tokens": length // 2} | more
    many = length + 1
    return Trajectory(
        task="t", group=0, index=0, prompt=(1,), tokens=(7,) * many, logprobs=(0.0,) * many, versions=versions, **fields
    )


def test_overlong_penalty_is_dapos_ramp() -> None:
    found = [overlong_penalty(n, max_tokens=100, buffer=20) for n in (0, 80, 81, 90, 100, 150)]
    assert found == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    for buffer in (0, 101):
        with pytest.raises(ConfigError, match="overlong_buffer"):
            overlong_penalty(1, max_tokens=100, buffer=buffer)


def test_tokens_that_a_tool_put_in_cost_nothing() -> None:
    assert spent(_attempt(10), ShapingConfig(counted="output")) == 10
    assert spent(_attempt(10), ShapingConfig(counted="thinking")) == 5
    assert shape(_attempt(80), ShapingConfig(overlong_buffer=20), max_tokens=100) == Shaped(1.0)


def test_more_than_the_budget_is_minus_one_right_or_wrong() -> None:
    config = ShapingConfig(tau=1.5, counted="output")
    for score in (1.0, 0.0):
        assert shape(_attempt(15, score), config, max_tokens=100, b0=10.0) == Shaped(score)
        assert shape(_attempt(16, score), config, max_tokens=100, b0=10.0) == Shaped(-1.0, ("over_budget",))
        assert shape(_attempt(90, score), config, max_tokens=100, b0=None) == Shaped(score)
        assert shape(_attempt(90, score), ShapingConfig(), max_tokens=100, b0=10.0) == Shaped(score)


def test_length_presses_inside_a_group_that_is_all_wrong() -> None:
    """The override comes before normalisation: two wrong answers, one over budget, are no group of equal rewards."""
    config = ShapingConfig(tau=1.0, counted="output")
    rewards = [shape(_attempt(n, 0.0), config, max_tokens=100, b0=10.0).reward for n in (5, 50)]
    group = group_advantages(rewards, AdvantageConfig())
    assert group.kind == "mixed" and group.values[0] > 0 > group.values[1]


def test_truncated_is_trained_masked_or_punished() -> None:
    attempt = _attempt(100, is_truncated=True)
    assert shape(attempt, ShapingConfig(truncated="train"), max_tokens=100) == Shaped(1.0)
    assert shape(attempt, ShapingConfig(truncated="mask"), max_tokens=100) == Shaped(None, ("truncated",))
    assert shape(attempt, ShapingConfig(truncated="penalise"), max_tokens=100) == Shaped(-1.0, ("truncated",))


def test_rules_apply_in_their_order_and_the_budget_has_the_last_word() -> None:
    config = ShapingConfig(truncated="penalise", overlong_buffer=50, tau=1.0, counted="output")
    attempt = _attempt(100, is_truncated=True)
    assert shape(attempt, config, max_tokens=100) == Shaped(-2.0, ("truncated", "overlong"))
    assert shape(attempt, config, max_tokens=100, b0=20.0) == Shaped(-1.0, ("truncated", "overlong", "over_budget"))


@pytest.mark.parametrize("more", [{"status": "failed", "score": None}, {"status": "stale"}, {"score": None}])
def test_what_has_no_verdict_has_no_reward(more: dict[str, Any]) -> None:
    """Never 0: an error of the machinery says nothing about the policy."""
    assert shape(_attempt(10, **more), ShapingConfig(truncated="penalise"), max_tokens=10) == Shaped(None)


def test_b0_by_statistic_and_over_whom() -> None:
    attempts = [_attempt(n, float(n in (10, 20, 60))) for n in (10, 20, 60, 100)]
    attempts.append(_attempt(999, None, status="failed"))

    def b0(**settings: Any) -> float | None:
        return task_b0(attempts, ShapingConfig(counted="output", **settings))

    assert b0() == 30.0
    assert b0(b0_statistic="median") == 20.0
    assert b0(b0_over="all") == 47.5
    assert b0(b0_over="all", b0_statistic="median") == 40.0
    assert b0(b0_over="all", b0_statistic="quantile", b0_quantile=0.0) == 10.0
    assert b0(b0_over="all", b0_statistic="quantile", b0_quantile=1.0) == 100.0
    assert b0(b0_statistic="quantile", b0_quantile=0.75) == 40.0
    assert task_b0(attempts[:1], ShapingConfig()) == 5.0


def test_a_task_that_nobody_solved_has_no_b0() -> None:
    assert task_b0([_attempt(10, 0.0)], ShapingConfig()) is None
    assert task_b0([_attempt(10, 0.0)], ShapingConfig(b0_over="all")) == 5.0
