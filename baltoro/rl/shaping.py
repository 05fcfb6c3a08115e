"""From a judge's score to a reward: truncation, overlong penalty, effort budget, in this order. Pure functions.

In: a trajectory at its end, settings, its task's b0. Out: a reward (None: excluded from its group), and which rules
changed it. Lengths are counted over the whole life of a trajectory, all rounds and turns of it.
Invariants: everything here happens before advantages; the effort budget overrides whatever there was, a right answer's
score too.
Source: spec/training.md C.1 (DAPO), C.4 (K3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from baltoro.errors import ConfigError
from baltoro.rl.config import ShapingConfig
from baltoro.rl.types import Trajectory

OVER_BUDGET = -1.0


@dataclass(frozen=True, slots=True)
class Shaped:
    """A reward and the rules that had a part in it, in their order: truncated, overlong, over_budget."""

    reward: float | None
    rules: tuple[str, ...] = ()


def shape(trajectory: Trajectory, config: ShapingConfig, *, max_tokens: int, b0: float | None = None) -> Shaped:
    """Reward of a trajectory. max_tokens: its budget; b0: tokens that its task takes (None: not known, no override)."""
    if trajectory.score is None or trajectory.status != "complete":
        return Shaped(None)
    reward, rules = trajectory.score, []
    if trajectory.is_truncated and config.truncated != "train":
        if config.truncated == "mask":
            return Shaped(None, ("truncated",))
        reward, rules = OVER_BUDGET, ["truncated"]
    if config.overlong_buffer is not None:
        penalty = overlong_penalty(trajectory.num_sampled, max_tokens=max_tokens, buffer=config.overlong_buffer)
        if penalty:
            reward, rules = reward + penalty, [*rules, "overlong"]
    if config.tau is not None and b0 is not None and spent(trajectory, config) > config.tau * b0:
        reward, rules = OVER_BUDGET, [*rules, "over_budget"]
    return Shaped(reward, tuple(rules))


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """0 up to max_tokens - buffer, then linear down to -1 at max_tokens, and -1 beyond (DAPO's soft overlong)."""
    if not 0 < buffer <= max_tokens:
        raise ConfigError(f"shaping.overlong_buffer {buffer} must lie in 1..{max_tokens}, the budget in tokens")
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))


def spent(trajectory: Trajectory, config: ShapingConfig) -> int:
    """T: thinking tokens, or everything that was sampled (reasoning and tool calls, not what tools answered)."""
    return trajectory.thinking_tokens if config.counted == "thinking" else trajectory.num_sampled


def task_b0(attempts: Sequence[Trajectory], config: ShapingConfig) -> float | None:
    """b0 of one task from attempts of the policy before RL: the statistic of their T. None: none of them counts.

    Correct means a score above 0. Attempts without a score are left out; one that was cut off counts with what it had,
    so b0 over all is too low where many were.
    """
    scored = [(t.score, spent(t, config)) for t in attempts if t.status == "complete" and t.score is not None]
    lengths = sorted(length for score, length in scored if config.b0_over == "all" or score > 0.0)
    if not lengths:
        return None
    if config.b0_statistic == "mean":
        return fmean(lengths)
    return _quantile(lengths, 0.5 if config.b0_statistic == "median" else config.b0_quantile)


def _quantile(ordered: Sequence[int], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
