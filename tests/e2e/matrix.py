"""The equivalence matrix: its axes, its cells, and the few of them that CI runs.

A cell is an engine with other options; what it serves and what must hold of that is in `conversation.py`. CI runs a
covering set: every pair of values of two axes is in one of its cells. The nightly set is the full product.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

from baltoro.cache.retention import RETENTION_NAMES

AXES: dict[str, tuple[Any, ...]] = {
    "loop": ("plain", "overlap"),
    "page": (1, 16, 64, 192),
    "cache": ("off", "on", "host", "disk"),
    "budget": (37, 150, 1000),
    "retract": ("off", "recompute", "host"),
    "retention": RETENTION_NAMES,
    "pool": ("unified", "fixed"),
}
"""`retract` is forced, and says where the memory of the victim goes."""
NUM_CELLS = 40
ENDPOINTS = {1: 32, 16: 16, 64: 64, 192: 64}
"""Of each page size; states stand on multiples of 64 in all of them."""
GRID = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of each axis."""

    loop: str
    page: int
    cache: str
    budget: int
    retract: str
    retention: str
    pool: str

    @property
    def is_real(self) -> bool:
        """Whether it differs from every other: what needs a cache or a host tier says nothing without one."""
        has_tier = self.cache in ("host", "disk")
        return (has_tier or self.retract != "host") and (self.cache != "off" or self.retention == RETENTION_NAMES[0])

    def __str__(self) -> str:
        return "-".join(str(getattr(self, one.name)) for one in fields(self))


def full_product() -> list[Cell]:
    """Every cell."""
    return [cell for values in product(*AXES.values()) if (cell := Cell(*values)).is_real]


def values_of(cell: Cell, size: int) -> set[tuple[tuple[str, Any], ...]]:
    """Its combinations of `size` values of different axes."""
    return set(combinations([(one.name, getattr(cell, one.name)) for one in fields(cell)], size))


@cache
def covering() -> tuple[Cell, ...]:
    """The cells of CI: greedily every pair of values, then as many triples as `NUM_CELLS` cells can hold."""
    cells = full_product()
    random.Random(0).shuffle(cells)  # else ties favour the first values of each axis
    numbers: dict[tuple[tuple[str, Any], ...], int] = {}

    def mask(cell: Cell, size: int) -> int:
        bits = 0
        for value in values_of(cell, size):
            bits |= 1 << numbers.setdefault(value, len(numbers))
        return bits

    pairs, triples = [mask(cell, 2) for cell in cells], [mask(cell, 3) for cell in cells]
    seen, chosen = 0, []
    for _ in range(NUM_CELLS):
        gains = [
            ((two & ~seen).bit_count(), (three & ~seen).bit_count()) for two, three in zip(pairs, triples, strict=True)
        ]
        best = gains.index(max(gains))
        seen |= pairs[best] | triples[best]
        chosen.append(cells[best])
    return tuple(chosen)
