"""Named axes of ranks: which rank stands where. No torch, no processes: only the arithmetic.

In: sizes of the axes and this process's rank. Out: its coordinate on each axis and the ranks beside it.
Invariants: the sizes multiply to the number of ranks; the axes are nested in the order of AXES, the last one innermost
(neighbouring ranks, the fastest links). `Mesh()` is one process: every axis has size 1, every coordinate is 0.
Not here: starting processes, moving bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from baltoro.errors import ConfigError

# dp requests or samples, pp layers, cp positions of one sample, ep experts, dcp positions of one request, tp heads
Axis = Literal["dp", "pp", "cp", "ep", "dcp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the six axes and the rank that asks."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dcp: int = 1
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ConfigError(f"mesh axis {axis} has size {self.size(axis)}; it must be at least 1")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank {self.rank} is outside a mesh of {self.num_ranks} ranks")

    @property
    def num_ranks(self) -> int:
        total = 1
        for axis in AXES:
            total *= self.size(axis)
        return total

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self, axis))

    def coordinate(self, axis: Axis) -> int:
        """Where this rank stands along `axis`, from 0."""
        return self.rank // self._stride(axis) % self.size(axis)

    def group(self, axis: Axis) -> tuple[int, ...]:
        """Ranks that differ from this one at most along `axis`, in the order of their coordinates."""
        stride = self._stride(axis)
        first = self.rank - self.coordinate(axis) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def _stride(self, axis: Axis) -> int:
        stride = 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            stride *= self.size(inner)
        return stride
