"""Sums, differences and products of whole numbers, as one question with one number for an answer.

In: how many digits and terms, which operations. Out: tasks. Wordings are those of the tiny model's corpora.
Invariants: see `held_out`: one pair of two-digit numbers in ten is asked for in evaluation alone; with three terms or
more, or longer numbers, one question in ten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from baltoro.envs.base import Env, Reply, Split, Task, question_task
from baltoro.envs.rewards import SingleTurn
from baltoro.envs.tasks.held_out import is_mine, pair_is_held_out, shows_held_out_pair
from baltoro.errors import ConfigError

WORDINGS = ("What is {}?", "How much is {}?", "Compute {}.", "Calculate {}.", "{} = ?", "Work out {}.")
OPERATIONS = "+-x"
MOST_MISSES = 10_000  # draws in a row that belong to the other split: there is none of this one


@dataclass(frozen=True)
class Arithmetic:
    """The family. `operations`: of "+-x"; numbers lie between `low` and `high`, what stands behind an x
    between 2 and `high_factor`.

    Errors: ConfigError for settings that leave nothing to ask.
    """

    name: str = "arithmetic"
    operations: str = "+-"
    low: int = 10
    high: int = 99
    high_factor: int = 9
    num_terms: int = 2

    def __post_init__(self) -> None:
        if not self.operations or set(self.operations) - set(OPERATIONS):
            raise ConfigError(f"operations must be some of {OPERATIONS!r}, not {self.operations!r}")
        if not 0 <= self.low <= self.high or self.num_terms < 2 or self.high_factor < 2:
            raise ConfigError("numbers need 0 <= low <= high, two terms or more, factors of 2 or more")

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        rng = Random(f"{self.name}/{split}/{seed}")
        num_misses = 0
        while num_misses < MOST_MISSES:
            num_misses += 1
            numbers, signs = self._draw(rng)
            text = " ".join(str(n) if i == 0 else f"{signs[i - 1]} {n}" for i, n in enumerate(numbers))
            if _belongs(numbers, signs, text, split):
                gold = value(numbers, signs)
                check = {"kind": "number", "gold": gold, "expression": text}
                yield question_task(self.name, rng.choice(WORDINGS).format(text), check)
                num_misses = 0
        raise ConfigError(f"{self.name} has no {split} tasks with numbers from {self.low} to {self.high}")

    def env(self) -> Env:
        return SingleTurn()

    def reference(self, task: Task) -> Sequence[Reply]:
        return [Reply(f"The answer is {task.check['gold']}.")]

    def _draw(self, rng: Random) -> tuple[list[int], list[str]]:
        signs = [rng.choice(self.operations) for _ in range(self.num_terms - 1)]
        numbers = [rng.randint(self.low, self.high)]
        numbers += [rng.randint(2, self.high_factor) if s == "x" else rng.randint(self.low, self.high) for s in signs]
        return numbers, signs


def value(numbers: Sequence[int], signs: Sequence[str]) -> int:
    """Products first, then from left to right."""
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "x":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms)


def _belongs(numbers: Sequence[int], signs: Sequence[str], text: str, split: Split) -> bool:
    is_pair = len(numbers) == 2 and "x" not in signs and all(10 <= number < 100 for number in numbers)
    if is_pair:
        return pair_is_held_out(*numbers) == (split == "eval")
    key: object = (numbers[0], signs[0], numbers[1]) if len(numbers) == 2 else text  # as the corpora hash it
    return is_mine(split, "arithmetic", key) and not (split == "train" and shows_held_out_pair(text))
