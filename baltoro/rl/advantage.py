"""Advantages of a group: each reward against the others on the same task. Pure functions on numbers.

In: rewards after shaping (None: excluded). Out: advantages, and what kind of group it was.
Invariants: excluded members have advantage 0 and no part in mean or deviation; a group of equal rewards has advantages
of exactly 0, whatever rounding does to its mean; a group without signal is counted by its reason.
Source: spec/training.md A.2, C.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from baltoro.errors import InvariantError
from baltoro.rl.config import AdvantageConfig

# mixed: rewards differ; all_right, all_wrong: they are all equal; single: one member is left; empty: none
Kind = Literal["mixed", "all_right", "all_wrong", "single", "empty"]


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """values, one a member; which of them the loss counts; the kind of group."""

    values: tuple[float, ...]
    is_counted: tuple[bool, ...]
    kind: Kind


def group_advantages(rewards: Sequence[float | None], config: AdvantageConfig) -> GroupAdvantages:
    """(r - mean) / (std + eps), or r - mean, over the members that have a reward.

    With zero_std "drop" no member of a group without signal is counted. A member alone has nothing to be compared with:
    its advantage is 0.
    Errors: InvariantError if a reward is not finite, or the lowest and the highest are not comparable
    """
    given = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, given)):
        raise InvariantError(f"rewards {given} are not finite; a judge that cannot tell gives no score at all")
    kind = _kind(given, config.right_above)
    is_counted = tuple(reward is not None and (kind == "mixed" or config.zero_std == "keep") for reward in rewards)
    if kind != "mixed":
        return GroupAdvantages((0.0,) * len(rewards), is_counted, kind)
    low, span = min(given), max(given) - min(given)
    if not math.isfinite(span):
        raise InvariantError(f"rewards from {low} to {max(given)} are too far apart to be compared")
    # in units of the span, from the lowest: the mean of rewards that are near to each other keeps its digits
    units = [(reward - low) / span for reward in given]
    mean, scale = math.fsum(units) / len(units), 1 / span
    if config.is_normalised:
        squares = math.fsum((unit - mean) ** 2 for unit in units)
        scale = math.sqrt(squares / (len(units) - config.is_unbiased)) + config.eps / span
        _check_bound([(unit - mean) / scale for unit in units], is_unbiased=config.is_unbiased)
    values = tuple(0.0 if reward is None else ((reward - low) / span - mean) / scale for reward in rewards)
    return GroupAdvantages(values, is_counted, kind)


def _check_bound(values: Sequence[float], *, is_unbiased: bool) -> None:
    """Errors: InvariantError for what no n rewards can give: more than (n - 1) / sqrt(n), or sqrt(n - 1) biased."""
    count = len(values)
    bound = (count - 1) / math.sqrt(count) if is_unbiased else math.sqrt(count - 1)
    if not max(map(abs, values)) <= bound * (1 + 1e-9):
        raise InvariantError(f"an advantage of {max(map(abs, values))} in a group of {count}: {bound} is the most")


def kinds(groups: Iterable[GroupAdvantages]) -> dict[Kind, int]:
    """How many groups of each kind, for the log: zero counts are there too."""
    found = Counter(group.kind for group in groups)
    every: tuple[Kind, ...] = ("mixed", "all_right", "all_wrong", "single", "empty")
    return {kind: found[kind] for kind in every}


def _kind(rewards: Sequence[float], right_above: float) -> Kind:
    if len(rewards) < 2:
        return "single" if rewards else "empty"
    if min(rewards) != max(rewards):
        return "mixed"
    return "all_right" if rewards[0] > right_above else "all_wrong"
