"""Dumped rollouts again: train on them without generation, or judge them with another reward.

In: dumps (`log.read_dumps`), and for training Parts without an engine's part in it. Out: lines as a run's; a comparison
of old and new scores.
Invariants: a replay from a run's first dump, with its recipe and seed, takes the same optimizer steps as the run did;
re-scoring changes no dump; a judge of somebody else's runs in the pool of killable processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from baltoro.chat.tokenizer import Tokenizer
from baltoro.envs.base import Family, Score, play
from baltoro.envs.pool import Job, RewardPool
from baltoro.errors import ConfigError
from baltoro.rl import log
from baltoro.rl.parts import make_families, make_standalone_trainer
from baltoro.rl.recipe import RLConfig
from baltoro.rl.rollout import Talk, decoded
from baltoro.rl.samples import make_samples
from baltoro.rl.tasks import Drawn, by_family
from baltoro.rl.types import Group, Trajectory


def replay(
    config: RLConfig, dumps: Iterable[log.Dump], listener: Callable[[Mapping[str, Any]], None] = lambda line: None
) -> list[dict[str, Any]]:
    """One optimizer step a dump, in their order, from the recipe's first adapter."""
    trainer = make_standalone_trainer(config)
    lines = []
    for found in dumps:
        samples = make_samples(
            found.groups,
            config.advantages,
            config.shaping_at(found.step - 1),
            max_tokens=config.partial.max_tokens,
            version=found.version,
            b0=found.b0,
            is_carried=config.partial.resume == "carry",
            replays_routes=config.rollout.replays_routes,
            random_rewards=config.seed if config.reward == "random" else None,
        )
        record = trainer.step(samples.samples)
        line = {"step": found.step, "version": found.version}
        lines.append(line | log.rollout_line(samples, None) | log.train_line(record, trainer.norm))
        listener(lines[-1])
    return lines


@dataclass(slots=True)
class Rescored:
    """Scores before and after. Single writer: `rescore`. moved: (old reason, new reason) -> count."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    excluded: int = 0
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, before: Trajectory, score: Score) -> None:
        self.moved[before.reason, score.reason] += 1
        if score.score is None or before.score is None:
            self.excluded += 1
            return
        self.old.append(before.score)
        self.new.append(score.score)

    @property
    def means(self) -> tuple[float, float]:
        """Errors: ConfigError where nothing was compared."""
        if not self.new:
            raise ConfigError("no dumped trajectory could be judged again: nothing was compared")
        return fmean(self.old), fmean(self.new)


def rescore(config: RLConfig, dumps: Iterable[log.Dump], reward: str, out: Path | None = None) -> Rescored:
    """Judge every complete trajectory again: by its own family (`reward` "task"), or by PACKAGE.MODULE:FUNCTION, which
    is called with content, reasoning and check (the task's) and returns a `Score`. `out`: a folder for new dumps."""
    if reward != "task" and ":" not in reward:
        raise ConfigError(f"--rescore {reward!r}: write task, or PACKAGE.MODULE:FUNCTION")
    found = Rescored()
    with ExitStack() as owned:
        families = by_family(make_families(config, owned))
        talk = Talk(Tokenizer.load(config.model), config.rollout.thinking)
        judges = config.rollout
        pool = owned.enter_context(RewardPool(judges.judge_processes, timeout_s=judges.judge_timeout_s))
        for dumped in dumps:
            groups = tuple(_again(group, dumped, families, talk, pool, reward, found) for group in dumped.groups)
            if out is not None:
                log.write_dump(out, msgspec.structs.replace(dumped, groups=groups))
    return found


def _again(
    group: Group,
    dumped: log.Dump,
    families: Mapping[str, Family],
    talk: Talk,
    pool: RewardPool,
    reward: str,
    found: Rescored,
) -> Group:
    """The group with new scores."""
    task, members = dumped.tasks[group.task], []
    family = families.get(task.family)
    if family is None:
        raise ConfigError(f"the dump has tasks of {task.family}, which this recipe does not name")
    for t in group.members:
        if t.status != "complete":
            members.append(t)
            continue
        replies = decoded(t, Drawn(task, family, t.effort), talk)
        if reward == "task":
            env = family.env()
            score = play(env, task, replies)
            env.close()
        else:
            last = replies[-1]
            arguments = {"content": last.content, "reasoning": last.reasoning, "check": dict(task.check)}
            score = pool.score(Job(reward, arguments))
        found.add(t, score)
        status = "failed" if score.score is None else "complete"
        members.append(
            msgspec.structs.replace(t, score=score.score, answer=score.answer, reason=score.reason, status=status)
        )
    return msgspec.structs.replace(group, members=tuple(members))
