"""Which tasks a run trains on, in which order, and which it is evaluated on.

In: a recipe's [[tasks]], a seed. Out: families, an endless stream of tasks with a cursor, a fixed held-out set.
Invariants: what the stream gives depends on the seed and the count of tasks given alone, so its cursor is that count;
no held-out task is ever given for training (`envs` keeps the splits apart).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from baltoro.config import build
from baltoro.envs.base import Family, Task, fixed_set
from baltoro.envs.pool import RewardPool
from baltoro.envs.tasks.arithmetic import Arithmetic
from baltoro.envs.tasks.calculator import Calculator
from baltoro.envs.tasks.gym import Gym
from baltoro.errors import ConfigError
from baltoro.rl.recipe import FamilyConfig

GYM = "gym."


@dataclass(frozen=True, slots=True)
class Drawn:
    """A task, the family whose world it is tried in, and the effort that its prompts ask for."""

    task: Task
    family: Family
    effort: str | None


def make_family(config: FamilyConfig, pool: RewardPool | None = None) -> Family:
    """Errors: ConfigError for a family or option that is not known."""
    name, options = config.family, config.options
    if name == "arithmetic":
        return build(Arithmetic, {"name": name, **options}, "tasks.options.")
    if name == "calculator":
        return build(Calculator, {"name": name, **options}, "tasks.options.")
    if name.startswith(GYM):
        return Gym(name.removeprefix(GYM), options, pool)
    raise ConfigError(f"tasks.family {name!r} is not known; use arithmetic, calculator or gym.NAME (of reasoning-gym)")


class TaskStream:
    """Tasks for training. Single writer: the loop. `cursor`: how many were taken."""

    def __init__(
        self,
        families: Sequence[Family],
        shares: Sequence[float],
        *,
        seed: int,
        efforts: Sequence[str] = (),
        pool: int | None = None,
    ) -> None:
        """`pool`: so many tasks, again and again in their order."""
        self._families, self._shares = families, shares
        self._seed, self._efforts = seed, efforts
        self._sources: list[Iterator[Task]] = [
            family.tasks("train", Random(f"{seed}/{at}").getrandbits(31)) for at, family in enumerate(families)
        ]
        self.cursor = 0
        self.pool: list[Drawn] = []
        if pool is not None:
            self.pool = self.take(pool)
            self.cursor = 0

    def take(self, count: int) -> list[Drawn]:
        """The next ones."""
        return [self._next() for _ in range(count)]

    def skip_to(self, cursor: int) -> None:
        """Go on where another stream of the same settings stood."""
        while self.cursor < cursor:
            self._next()

    def _next(self) -> Drawn:
        if self.pool:
            self.cursor += 1
            return self.pool[(self.cursor - 1) % len(self.pool)]
        place = self._place(self.cursor)
        effort = self._efforts[self.cursor % len(self._efforts)] if self._efforts else None
        self.cursor += 1
        return Drawn(next(self._sources[place]), self._families[place], effort)

    def _place(self, number: int) -> int:
        draw = Random(f"{self._seed}/family/{number}")
        return draw.choices(range(len(self._families)), weights=self._shares)[0]


def held_out(families: Sequence[Family], count: int, efforts: Sequence[str] = ()) -> list[Drawn]:
    """`count` tasks of each family, always the same."""
    found = []
    for family in families:
        for number, task in enumerate(fixed_set(family, count)):
            found.append(Drawn(task, family, efforts[number % len(efforts)] if efforts else None))
    return found


def by_family(families: Sequence[Family]) -> Mapping[str, Family]:
    """Errors: ConfigError where two have one name."""
    found = {family.name: family for family in families}
    if len(found) < len(families):
        raise ConfigError("two [[tasks]] of one name: give each a name in its options")
    return found
