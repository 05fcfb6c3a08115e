"""Groups -> what the trainer eats: rewards, advantages, and one sample a trajectory. And figures of both.

In: complete groups, settings, b0 of the tasks. Out: PolicySamples in the order of groups and members, and counts.
Invariants: only sampled tokens count, over all turns; an excluded trajectory (failed, stale, masked) stays among the
samples with no counted token, so numbers of trajectories do not shift; nothing here depends on micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from baltoro.rl.advantage import GroupAdvantages, group_advantages, kinds
from baltoro.rl.config import AdvantageConfig, ShapingConfig
from baltoro.rl.shaping import shape, spent
from baltoro.rl.types import Group, Trajectory
from baltoro.trainer.policy_sample import PolicySample


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples of one optimizer step, and how the groups were.

    score     mean of what judges gave; reward: mean after shaping; both None where nobody has one
    kinds     groups by kind (`advantage.Kind`); rules: how often shaping changed a reward, by rule
    lengths   sampled tokens of each counted trajectory
    by_effort effort -> (mean score, mean T, count)
    """

    samples: list[PolicySample]
    score: float | None
    reward: float | None
    kinds: dict[str, int]
    rules: dict[str, int]
    reasons: dict[str, int]
    lengths: list[int]
    truncated: int
    num_stale: int
    staleness: list[int]
    num_versions: list[int]
    by_effort: dict[str, tuple[float, float, int]]

    @property
    def entropy(self) -> float | None:
        """Of a token, in nats: the mean of -logprob over what was sampled. Next to none: the policy has settled."""
        found = [p for s in self.samples for p, is_counted in zip(s.logprobs, s.is_counted, strict=True) if is_counted]
        return -fmean(found) if found else None

    @property
    def routes_bytes(self) -> int:
        """What the engine's routes take, of all samples."""
        return sum(len(sample.routes or b"") for sample in self.samples)

    @property
    def zero_std(self) -> float:
        """Share of groups whose members' rewards are all equal."""
        total = sum(self.kinds.values())
        return (self.kinds.get("all_right", 0) + self.kinds.get("all_wrong", 0)) / total if total else 0.0


def make_samples(
    groups: Sequence[Group],
    advantage: AdvantageConfig,
    shaping: ShapingConfig,
    *,
    max_tokens: int,
    version: int,
    b0: Mapping[str, float] | None = None,
    random_rewards: int | None = None,
    is_carried: bool = False,
    replays_routes: bool = False,
) -> StepSamples:
    """`version`: of the policy that is about to train. `random_rewards`: a seed, for the control whose rewards are
    drawn, not judged. `is_carried`: what goes on does so with the KV and state of older versions, which no forward can
    compute again, so its newest tokens say nothing about the drift between engine and trainer. `replays_routes`:
    samples have the engine's routes; where a trajectory has none, the trainer's routers choose, and that is counted."""
    samples: list[PolicySample] = []
    found: list[GroupAdvantages] = []
    rewards: list[float] = []
    rules: Counter[str] = Counter()
    for group in groups:
        shaped = [shape(t, shaping, max_tokens=max_tokens, b0=(b0 or {}).get(t.task)) for t in group.members]
        rules.update(rule for one in shaped for rule in one.rules)
        values = [one.reward for one in shaped]
        if random_rewards is not None:
            draw = Random(f"{random_rewards}/{group.group}")
            values = [None if value is None else float(draw.random() < 0.5) for value in values]
        rewards += [value for value in values if value is not None]
        found.append(group_advantages(values, advantage))
        for trajectory, value, is_counted in zip(group.members, found[-1].values, found[-1].is_counted, strict=True):
            routes = (trajectory.routes or b"") if replays_routes else None
            samples.append(_sample(trajectory, value, is_counted, version, is_carried, routes))
    members = [t for group in groups for t in group.members]
    judged = [t for t in members if t.status == "complete" and t.score is not None]
    return StepSamples(
        samples=samples,
        score=fmean(t.score or 0.0 for t in judged) if judged else None,
        reward=fmean(rewards) if rewards else None,
        kinds={str(kind): count for kind, count in kinds(found).items()},
        rules=dict(rules),
        reasons=dict(Counter(t.reason if t.status == "complete" else t.status for t in members)),
        lengths=[t.num_sampled for t in judged],
        truncated=sum(t.is_truncated for t in judged),
        num_stale=sum(t.status == "stale" for t in members),
        staleness=[t.staleness(version) for t in judged],
        num_versions=[len(t.sampled_versions) for t in judged],
        by_effort=_by_effort(judged, shaping),
    )


def _sample(
    trajectory: Trajectory, advantage: float, is_counted: bool, version: int, is_carried: bool, routes: bytes | None
) -> PolicySample:
    counted = trajectory.mask if is_counted else (False,) * len(trajectory.tokens)
    tokens = trajectory.prompt + trajectory.tokens
    is_hybrid = is_carried and trajectory.staleness(version) > 0
    is_fresh = tuple(one == version and not is_hybrid for one in trajectory.versions)
    return PolicySample(tokens, len(trajectory.prompt), counted, trajectory.logprobs, advantage, is_fresh, routes)


def _by_effort(judged: Sequence[Trajectory], shaping: ShapingConfig) -> dict[str, tuple[float, float, int]]:
    levels = sorted({t.effort for t in judged if t.effort is not None})
    of = {level: [t for t in judged if t.effort == level] for level in levels}
    return {
        level: (fmean(t.score or 0.0 for t in ts), fmean(spent(t, shaping) for t in ts), len(ts))
        for level, ts in of.items()
    }
