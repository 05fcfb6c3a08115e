"""b0: how many tokens each task takes the policy before RL. What an effort budget of tau * b0 is measured by.

In: Parts whose engine serves an adapter that changes nothing, a pool of tasks. Out: b0 by task id; tasks without an
attempt that counts (`shaping.b0_over`) have none, and no budget.
Invariants: measured once, before the first step, with the run's own prompts; kept in every checkpoint.
Source: spec/training.md C.4: how K3 estimates b0 is not published, so the statistic is a key.
"""

from __future__ import annotations

from baltoro.rl.collect import Collector
from baltoro.rl.config import PartialConfig
from baltoro.rl.partial import Book
from baltoro.rl.parts import Parts
from baltoro.rl.shaping import task_b0


def measure_b0(parts: Parts) -> dict[str, float]:
    """One strict round of `rollout.b0_attempts` on every task of the pool."""
    config = parts.config
    book = Book(PartialConfig(max_tokens=config.partial.max_tokens))
    seed = config.seed + 1  # other draws than the first step's
    collector = Collector(parts.policy, book, parts.talk, config.rollout, config.throttle, seed=seed)
    try:
        fresh = list(enumerate(parts.stream.pool))
        groups = collector.collect(parts.version, fresh, config.rollout.b0_attempts)
    finally:
        collector.close()
    found = {group.task: task_b0(group.members, config.shaping) for group in groups}
    return {task: b0 for task, b0 in found.items() if b0 is not None}
