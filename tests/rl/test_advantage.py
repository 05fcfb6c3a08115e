"""Advantages of groups by hand, each knob on its own, and groups without signal."""

from __future__ import annotations

import math
from statistics import pstdev, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.errors import InvariantError
from baltoro.rl.advantage import group_advantages, kinds
from baltoro.rl.config import AdvantageConfig

REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0)


def test_each_knob_by_hand() -> None:
    plain = group_advantages(REWARDS, AdvantageConfig(is_normalised=False)).values
    assert plain == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])
    for is_unbiased, deviation in ((True, stdev(REWARDS)), (False, pstdev(REWARDS))):
        for eps in (1e-8, 1e-4, 0.5):
            config = AdvantageConfig(is_unbiased=is_unbiased, eps=eps)
            found = group_advantages(REWARDS, config).values
            assert found == pytest.approx([a / (deviation + eps) for a in plain], rel=1e-12)


@pytest.mark.parametrize("reward", [0.1, 1.0, 0.0, -1.0, 1e9])
@pytest.mark.parametrize("eps", [1e-300, 1e-6])
def test_equal_rewards_give_exactly_zero(reward: float, eps: float) -> None:
    """0.1 six times has a mean that is not 0.1: a deviation of rounding, which must not be divided by."""
    group = group_advantages((reward,) * 6, AdvantageConfig(eps=eps))
    assert group.values == (0.0,) * 6
    assert group.kind == ("all_right" if reward > 0 else "all_wrong")


def test_groups_without_signal_are_counted_by_their_reason() -> None:
    config = AdvantageConfig()
    rewards = [REWARDS, (1.0, 1.0), (0.0, 0.0), (-1.0, -1.0), (1.0, None), (None, None), (0.5, None, 0.5)]
    found = kinds(group_advantages(group, config) for group in rewards)
    assert found == {"mixed": 1, "all_right": 2, "all_wrong": 2, "single": 1, "empty": 1}
    assert kinds([])["all_right"] == 0
    strict = AdvantageConfig(right_above=0.9)
    assert group_advantages((0.5, 0.5), strict).kind == "all_wrong"


def test_an_excluded_member_has_no_part_in_its_group() -> None:
    config = AdvantageConfig()
    rest = group_advantages(REWARDS, config).values
    for place in range(6):
        rewards = (*REWARDS[:place], None, *REWARDS[place:])
        group = group_advantages(rewards, config)
        assert group.values == (*rest[:place], 0.0, *rest[place:])
        assert [place for place, is_counted in enumerate(group.is_counted) if not is_counted] == [place]


def test_zero_std_groups_stay_in_the_denominator_or_leave_it() -> None:
    keep, drop = AdvantageConfig(zero_std="keep"), AdvantageConfig(zero_std="drop")
    assert group_advantages((1.0, 1.0, None), keep).is_counted == (True, True, False)
    assert group_advantages((1.0, 1.0, None), drop).is_counted == (False, False, False)
    assert group_advantages(REWARDS, drop).is_counted == (True,) * 5


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(InvariantError, match="not finite"):
        group_advantages((1.0, reward), AdvantageConfig())


def test_differences_of_rounding_are_no_signal() -> None:
    for rewards in ((0.3, 0.1 + 0.2), (0.0, 5e-324)):
        assert max(map(abs, group_advantages(rewards, AdvantageConfig()).values)) < 1e-9


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=12),
    st.booleans(),
    st.floats(-5, 5),
    st.floats(0.1, 5),
)
def test_advantages_sum_to_zero_and_do_not_see_a_shift(
    points: list[int], is_normalised: bool, shift: float, scale: float
) -> None:
    config, rewards = AdvantageConfig(is_normalised=is_normalised, eps=1e-12), [point / 100 for point in points]
    group = group_advantages(rewards, config)
    assert math.fsum(group.values) == pytest.approx(0.0, abs=1e-9)
    moved = group_advantages([scale * r + shift for r in rewards], config)
    if len(set(points)) > 1:
        factor = 1.0 if is_normalised else scale
        assert moved.values == pytest.approx([factor * a for a in group.values], rel=1e-7, abs=1e-7)
