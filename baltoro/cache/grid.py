"""The one grid of depths on which state checkpoints stand, the same for every request.

In: the chunk of the KDA kernel, the distance of hash endpoints, the track interval of decode. Out: which depths count.
Invariants: depths are absolute (tokens from position 0, never from where a prefix hit ended); a checkpoint stands on a
multiple of `step` = lcm(chunk, endpoint), where the kernel has a state and the tree has a node. The size of a page
plays no part in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baltoro.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Grid:
    """Depths in tokens. `endpoint`: where a prefix can be found; `interval`: how often decode leaves a checkpoint."""

    chunk: int
    endpoint: int
    interval: int

    def __post_init__(self) -> None:
        for name in ("chunk", "endpoint", "interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number of tokens, 1 or more", param=name)
        if self.interval % self.step:
            above = -(-self.interval // self.step) * self.step
            raise ConfigError(
                f"the track interval {self.interval} is no multiple of {self.step}, the common multiple of the KDA "
                f"chunk ({self.chunk}) and the hash endpoint ({self.endpoint}): use {above}",
                param="interval",
            )

    @property
    def step(self) -> int:
        """Distance of the depths at which a checkpoint can stand."""
        return math.lcm(self.chunk, self.endpoint)

    def floor(self, depth: int) -> int:
        """The deepest grid depth that is not below `depth`, from 0."""
        return depth - depth % self.step

    def floor_endpoint(self, depth: int) -> int:
        """The deepest hash endpoint that is not below `depth`, from 0."""
        return depth - depth % self.endpoint

    def deepest_in(self, start: int, end: int) -> int:
        """The deepest grid depth g with start < g <= end; 0 if the span [start, end) ends before one."""
        depth = self.floor(end)
        return depth if depth > start else 0
