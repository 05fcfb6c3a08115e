"""Groups -> samples: only sampled tokens count, over all turns; who is excluded keeps its number."""

from __future__ import annotations

from baltoro.rl.config import AdvantageConfig, ShapingConfig
from baltoro.rl.samples import make_samples
from baltoro.rl.types import Group, Trajectory
from baltoro.trainer.policy_sample import pack_policy


def trajectory(index: int, score: float | None, **changes: object) -> Trajectory:
    t = Trajectory(task="t", group=4, index=index, prompt=(1, 2, 3), effort="low" if index % 2 else "high")
    t = t.say((10, 11), (-0.1, -0.2), 3).hear((50, 51, 52)).say((12,), (-0.3,), 4)
    fields: dict[str, object] = {
        "status": "complete",
        "score": score,
        "reason": "right" if score else "wrong",
        **changes,
    }
    return Trajectory(**{name: fields.get(name, getattr(t, name)) for name in t.__struct_fields__})  # type: ignore[arg-type]


def made(*members: Trajectory, shaping: ShapingConfig | None = None, seed: int | None = None):  # type: ignore[no-untyped-def]
    group = Group(group=4, task="t", members=members)
    return make_samples(
        [group], AdvantageConfig(), shaping or ShapingConfig(), max_tokens=9, version=6, random_rewards=seed
    )


def test_only_sampled_tokens_count_over_all_turns() -> None:
    found = made(trajectory(0, 1.0), trajectory(1, 0.0))
    assert found.samples[0].is_counted == (True, True, False, False, False, True)
    batch = pack_policy(found.samples, 100)[0]
    assert batch.targets.tolist() == [10, 11, 12, 10, 11, 12]
    assert batch.rows.tolist() == [2, 3, 7, 11, 12, 16]
    assert batch.old.tolist() == [-0.1, -0.2, -0.3] * 2
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.is_fresh.tolist() == [False] * 6
    assert found.lengths == [3, 3] and found.staleness == [3, 3] and found.num_versions == [2, 2]


def test_a_failed_member_counts_nowhere_and_keeps_its_number() -> None:
    failed = trajectory(1, None, status="failed", reason="the judge is out")
    found = made(trajectory(0, 1.0), failed, trajectory(2, 0.0))
    assert [sample.num_counted for sample in found.samples] == [3, 0, 3]
    assert [round(sample.advantage, 3) for sample in found.samples] == [0.707, 0.0, -0.707]
    assert pack_policy(found.samples, 100)[0].trajectory.tolist() == [0, 0, 0, 2, 2, 2]
    assert found.score == 0.5 and found.reasons == {"right": 1, "failed": 1, "wrong": 1}


def test_masked_truncation_leaves_the_denominator() -> None:
    cut = trajectory(1, 0.0, is_truncated=True)
    found = made(trajectory(0, 1.0), cut, trajectory(2, 0.0), shaping=ShapingConfig(truncated="mask"))
    assert [sample.num_counted for sample in found.samples] == [3, 0, 3]
    assert found.rules == {"truncated": 1} and found.truncated == 1


def test_efforts_are_told_apart() -> None:
    found = made(trajectory(0, 1.0), trajectory(1, 0.0), shaping=ShapingConfig(counted="output"))
    assert found.by_effort == {"high": (1.0, 3.0, 1), "low": (0.0, 3.0, 1)}


def test_random_rewards_look_at_nothing() -> None:
    one = made(trajectory(0, 1.0), trajectory(1, 0.0), trajectory(2, 1.0), seed=3)
    two = made(trajectory(0, 0.0), trajectory(1, 1.0), trajectory(2, 0.0), seed=3)
    assert [s.advantage for s in one.samples] == [s.advantage for s in two.samples]
