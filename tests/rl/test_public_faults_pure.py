"""Faults of docs/spec/training.md B.2 in advantages and groups; docs/ideas/public-faults-training.md lists all."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.errors import InvariantError
from baltoro.rl.advantage import group_advantages
from baltoro.rl.config import AdvantageConfig
from baltoro.rl.types import Group, Trajectory

CONFIG = AdvantageConfig(eps=1e-12)


def test_ragged_groups_are_each_measured_against_themselves() -> None:
    """B-20: groups of 8, 7 and 8; an easy and a hard one would swallow each other if the batch were one group."""
    groups = [(1.0,) * 7 + (0.0,), (0.0,) * 6 + (1.0,), (1.0, 0.0) * 4]
    found = [group_advantages(group, CONFIG).values for group in groups]
    assert [len(values) for values in found] == [8, 7, 8]
    assert all(math.fsum(values) == pytest.approx(0.0, abs=1e-12) for values in found)
    as_one = group_advantages([reward for group in groups for reward in group], CONFIG).values
    assert found[0][0] == pytest.approx(0.353553, abs=1e-6) and as_one[0] > 0.9
    assert group_advantages((1.0,), CONFIG).values == (0.0,) and group_advantages((1.0,), CONFIG).kind == "single"


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=24), st.booleans())
def test_an_advantage_has_a_hard_bound(rewards: list[float], is_unbiased: bool) -> None:
    """B-21: (n - 1) / sqrt(n), or sqrt(n - 1) with the biased deviation, however near the rewards are to each other."""
    count = len(rewards)
    bound = (count - 1) / math.sqrt(count) if is_unbiased else math.sqrt(count - 1)
    for near in (rewards, [1.0 + reward * 1e-16 for reward in rewards], [0.1 + reward * 1e-20 for reward in rewards]):
        values = group_advantages(near, AdvantageConfig(eps=1e-300, is_unbiased=is_unbiased)).values
        assert max(map(abs, values)) <= bound * (1 + 1e-9)


def test_rewards_far_apart_are_compared_or_refused() -> None:
    """B-21: squares that overflow gave a deviation of infinity, and everybody an advantage of 0."""
    values = group_advantages((1e200, -1e200, 0.0), CONFIG).values
    assert values == pytest.approx([1.0, -1.0, 0.0])
    with pytest.raises(InvariantError, match="too far apart"):
        group_advantages((1.7e308, -1.7e308), CONFIG)


@pytest.mark.parametrize("place", range(8))
def test_the_only_loser_of_a_group_is_signal(place: int) -> None:
    """B-21: the whole group decides whether there is any, no group without one of its members."""
    rewards = [1.0] * 8
    rewards[place] = 0.0
    group = group_advantages(rewards, CONFIG)
    assert group.kind == "mixed" and all(group.is_counted)
    assert group.values[place] == pytest.approx(-7 / math.sqrt(8))


def test_a_score_of_zero_is_a_score() -> None:
    """B-24: `scores or rewards` took a legitimate 0 for missing."""
    lost = Trajectory(task="t", group=1, index=0, prompt=(1,), status="complete", score=0.0)
    absent = msgspec.structs.replace(lost, index=1, score=None, status="failed")
    won = msgspec.structs.replace(lost, index=2, score=1.0)
    group = Group(group=1, task="t", members=(lost, absent, won))
    assert group.scores == (0.0, None, 1.0)
    found = group_advantages(group.scores, CONFIG)
    assert found.is_counted == (True, False, True) and found.values[0] < 0 == found.values[1]


def test_scores_belong_to_their_members() -> None:
    """B-24: a list of rewards of another length was broadcast. A score is its trajectory's; none may be missing."""
    members = [Trajectory(task="t", group=1, index=i, prompt=(1,), status="complete", score=0.0) for i in (0, 2)]
    with pytest.raises(InvariantError, match="not complete"):
        Group(group=1, task="t", members=tuple(members))


def test_staleness_is_that_of_the_oldest_token_when_it_is_used() -> None:
    """B-19: at generation the last token was fresh; what counts is the first, and the version that trains on it."""
    held = Trajectory(task="t", group=1, index=0, prompt=(1,)).say((5,), (-1.0,), 3).hear((6,)).say((7,), (-1.0,), 5)
    assert [held.staleness(version) for version in (5, 6, 9)] == [2, 3, 6]
