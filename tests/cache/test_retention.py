"""Retention policies: what each takes, what it gives up, and what none may touch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.cache.retention import RETENTION_NAMES, CheckpointKind, Turns, retention_by_name
from baltoro.errors import ConfigError

KINDS: tuple[CheckpointKind, ...] = ("prefill", "prompt_end", "decode", "branch", "turn_end")


@dataclass(frozen=True)
class Stand:
    depth: int
    kind: CheckpointKind
    is_fork: bool = False
    is_state_pinned: bool = False


def wanted(name: str, depth: int, *, is_second_hit: bool = False) -> set[str]:
    policy = retention_by_name(name, interval=256)
    return {kind for kind in KINDS if policy.wants(kind, depth, prompt_len=1000, is_second_hit=is_second_hit)}


def test_each_policy_takes_what_its_table_says() -> None:
    assert wanted("turns", 64) == set(KINDS)
    assert wanted("interval", 512) == set(KINDS)
    assert wanted("interval", 64) == set()
    assert wanted("prompt_end", 64) == {"prompt_end", "turn_end"}
    assert wanted("second_hit", 64) == {"turn_end"}
    assert wanted("second_hit", 64, is_second_hit=True) == {"turn_end", "branch"}


def test_turns_gives_up_passing_checkpoints_as_the_request_advances() -> None:
    path = [Stand(64 * i, kind) for i, kind in enumerate(KINDS, 1)]
    gone = Turns().superseded(path, Stand(640, "decode"))
    assert [node.kind for node in gone] == ["prefill", "decode"]


def test_turns_keeps_forks_and_pinned_states() -> None:
    path = [Stand(64, "prefill", is_fork=True), Stand(128, "decode", is_state_pinned=True), Stand(192, "decode")]
    assert Turns(cap=1).superseded(path, Stand(256, "turn_end")) == [path[2]]


def test_above_the_cap_the_shallowest_goes_first() -> None:
    path = [Stand(64 * i, "turn_end") for i in range(1, 6)]
    assert Turns(cap=6).superseded(path, Stand(640, "turn_end")) == []
    assert Turns(cap=4).superseded(path, Stand(640, "turn_end")) == path[:2]
    fork = [Stand(64, "branch", is_fork=True), *path[1:]]
    assert Turns(cap=4).superseded(fork, Stand(640, "turn_end")) == path[1:3], "a fork is passed over"
    mixed = [*path[:4], Stand(320, "prefill")]
    assert Turns(cap=5).superseded(mixed, Stand(640, "turn_end")) == [mixed[4]], "a passing one makes the room"


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.booleans(), st.booleans()), max_size=12),
    st.sampled_from(RETENTION_NAMES),
    st.integers(1, 9),
)
def test_no_policy_touches_forks_or_pinned_states(
    stands: list[tuple[CheckpointKind, bool, bool]], name: str, cap: int
) -> None:
    path = [Stand(64 * i, *stand) for i, stand in enumerate(stands, 1)]
    gone = retention_by_name(name, interval=64, cap=cap).superseded(path, Stand(640, "turn_end"))
    assert len(set(gone)) == len(gone) and set(gone) <= set(path)
    assert not any(node.is_fork or node.is_state_pinned for node in gone)
    if name == "turns":
        left = [node for node in path if node not in gone]
        assert len(left) < cap or all(node.is_fork or node.is_state_pinned for node in left)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lru'.*turns, interval, prompt_end, second_hit"):
        retention_by_name("lru", interval=64)
    with pytest.raises(ConfigError, match="1 or more"):
        retention_by_name("turns", interval=64, cap=0)
