"""Where slots and pages lie in an arena: arithmetic on sizes alone, before and without any bytes.

    bytes 0                                                                total_bytes
    | page 0 | slot 0 | slot 1 | slot 2 | ...     border     ... | page P-2 | page P-1 |
      sink     sink

Both kinds are indexed over the whole arena: slot u lies at `slots_base + u * slot_bytes`, page p at `p * page_bytes`.
Which ids may be handed out is the business of the books (`books.py`), so the border is only a number: fixed in an
`ArenaShape`, anywhere in a `UnifiedShape`, whose views name every slot and every page that the bytes could hold.
A slot is one stretch of bytes that holds all its parts, and of a part the bytes of one head of one layer are one
stretch; a page is one stretch, token-major: position, then the row of every layer. Moving or sending one is one copy.

In: an ArenaLayout (shapes, from the planner) and counts or a budget. Out: offsets, and how many ids there are.
Invariants: slot 0 and page 0 are sinks that nobody owns; offsets are multiples of ALIGNMENT.
Not here: the bytes (`pool.py`), who owns what (`books.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from baltoro.errors import ConfigError

ALIGNMENT = 64  # bytes; every part of a slot, and every slot, starts on a multiple


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor inside a slot, or one row of a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """What one slot and one page hold. A model without states has no slot parts, one without KV has no row."""

    slot_parts: tuple[Part, ...]
    row: Part | None
    page_size: int
    part_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Byte offset of each slot part, and the slot's size as the last entry."""
    slot_bytes: int = field(init=False, repr=False, compare=False)
    page_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        offsets = [0]
        for part in self.slot_parts:
            offsets.append(_align(offsets[-1] + part.num_bytes))
        object.__setattr__(self, "part_offsets", tuple(offsets))
        object.__setattr__(self, "slot_bytes", offsets[-1])
        object.__setattr__(self, "page_bytes", 0 if self.row is None else self.page_size * self.row.num_bytes)


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Where slots and pages lie for `num_slots` and `num_pages` that can be handed out (sinks come on top)."""

    layout: ArenaLayout
    num_slots: int
    num_pages: int

    @property
    def slots_base(self) -> int:
        """First byte of slot 0; page 0 lies before it."""
        return _align(self.layout.page_bytes)

    @property
    def first_page(self) -> int:
        """Lowest page id that can be handed out: the first one that lies wholly behind the slots."""
        if not self.layout.page_bytes or not self.layout.slot_bytes:
            return 1
        slots_end = self.slots_base + (self.num_slots + 1) * self.layout.slot_bytes
        return max(1, -(-slots_end // self.layout.page_bytes))

    @property
    def total_bytes(self) -> int:
        if not self.layout.page_bytes:
            return self.slots_base + (self.num_slots + 1) * self.layout.slot_bytes
        return _align((self.first_page + self.num_pages) * self.layout.page_bytes)

    @property
    def num_slot_ids(self) -> int:
        return self.num_slots + 1

    @property
    def num_page_ids(self) -> int:
        return self.first_page + self.num_pages


@dataclass(frozen=True, slots=True)
class UnifiedShape:
    """Where slots and pages can lie in an arena of `budget_bytes` without a border: ids count over all of it.

    `slot_limit`, `page_limit`: more than so many are never handed out; a kind without bytes needs one.
    Errors: ConfigError if not even the sinks fit.
    """

    layout: ArenaLayout
    budget_bytes: int
    slot_limit: int | None = None
    page_limit: int | None = None

    def __post_init__(self) -> None:
        if not self.layout.slot_bytes and self.slot_limit is None:
            raise ValueError("slots of no bytes need a slot_limit")
        if not self.layout.page_bytes and self.page_limit is None:
            raise ValueError("pages of no bytes need a page_limit")
        if self.slots_end(0) > self.pages_start(0):
            raise ConfigError(
                f"{self.budget_bytes} bytes hold no state slot of {self.layout.slot_bytes} bytes beside a KV page of "
                f"{self.layout.page_bytes}: raise memory_bytes"
            )

    @property
    def total_bytes(self) -> int:
        return self.budget_bytes // ALIGNMENT * ALIGNMENT

    @property
    def slots_base(self) -> int:
        """First byte of slot 0; page 0 lies before it."""
        return _align(self.layout.page_bytes)

    @property
    def num_page_ids(self) -> int:
        """Page ids of the whole arena, the sink and those under the slots included."""
        if self.layout.page_bytes:
            return self.total_bytes // self.layout.page_bytes
        return (self.page_limit or 0) + 1

    @property
    def num_slot_ids(self) -> int:
        return self.max_slots + 1

    @property
    def max_slots(self) -> int:
        """Slots that fit if there is no page."""
        return self.slots_beside(0)

    @property
    def max_pages(self) -> int:
        """Pages that fit if there is no slot."""
        return self.pages_beside(0)

    def slots_end(self, count: int) -> int:
        """First byte behind slots 0..count."""
        if not self.layout.slot_bytes:
            return self.layout.page_bytes
        return self.slots_base + (count + 1) * self.layout.slot_bytes

    def pages_start(self, count: int) -> int:
        """First byte of the last `count` pages."""
        if not self.layout.page_bytes:
            return self.total_bytes
        return (self.num_page_ids - count) * self.layout.page_bytes

    def slots_beside(self, num_pages: int) -> int:
        """Slots that fit beside the last `num_pages` pages."""
        limit, slot_bytes = self.slot_limit, self.layout.slot_bytes
        if not slot_bytes:
            return limit or 0
        fits = (self.pages_start(num_pages) - self.slots_base) // slot_bytes - 1
        return fits if limit is None else min(fits, limit)

    def pages_beside(self, num_slots: int) -> int:
        """Pages that fit beside slots 1..num_slots."""
        limit, page_bytes = self.page_limit, self.layout.page_bytes
        if not page_bytes:
            return limit or 0
        fits = self.num_page_ids + -self.slots_end(num_slots) // page_bytes
        return fits if limit is None else min(fits, limit)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
