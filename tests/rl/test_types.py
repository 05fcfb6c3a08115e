"""Trajectories grow at their end only, know who said what, and come back from bytes as they were."""

from __future__ import annotations

import msgspec
import pytest

from baltoro.errors import InvariantError, ShapeError
from baltoro.rl.types import NOT_SAMPLED, Group, Trajectory


def _fresh(group: int = 3, index: int = 0) -> Trajectory:
    return Trajectory(task="add", group=group, index=index, prompt=(1, 2))


def _grown() -> Trajectory:
    return _fresh().say((5, 6), (-0.5, -0.25), 4, 1).hear((9,)).say((7,), (-1.0,), 6)


def test_every_token_knows_who_said_it() -> None:
    t = _grown()
    assert t.tokens == (5, 6, 9, 7) and t.logprobs == (-0.5, -0.25, 0.0, -1.0)
    assert t.versions == (4, 4, NOT_SAMPLED, 6) and t.mask == (True, True, False, True)
    assert t.num_sampled == 3 and t.thinking_tokens == 1
    assert t.sampled_versions == (4, 6) and t.staleness(6) == 2 and _fresh().staleness(6) == 0


def test_it_comes_back_from_bytes() -> None:
    t = msgspec.structs.replace(_grown(), status="complete", score=1.0, answer="12", reason="right")
    assert msgspec.json.decode(msgspec.json.encode(t), type=Trajectory) == t
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(t), type=Trajectory) == t


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="logprobs"):
        _fresh().say((5, 6), (-0.5,), 0)
    with pytest.raises(InvariantError, match="versions only rise"):
        _grown().say((1,), (0.0,), 5)
    with pytest.raises(InvariantError, match="versions only rise"):
        _fresh().say((1,), (0.0,), NOT_SAMPLED)
    with pytest.raises(InvariantError, match="does not grow"):
        msgspec.structs.replace(_fresh(), status="complete").hear((1,))


def test_a_group_is_whole_and_of_one_task() -> None:
    done = [msgspec.structs.replace(_fresh(3, n), status="complete", score=float(n)) for n in range(3)]
    broken = msgspec.structs.replace(done[1], status="stale")
    assert Group(group=3, task="add", members=(done[0], broken, done[2])).scores == (0.0, None, 2.0)
    with pytest.raises(InvariantError, match="not complete"):
        Group(group=3, task="add", members=(done[0], done[2]))
    with pytest.raises(InvariantError, match="of another"):
        Group(group=4, task="add", members=tuple(done))
