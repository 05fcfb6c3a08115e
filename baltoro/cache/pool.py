"""One arena of bytes: state slots from its low end, KV pages from its high end, one border between them.

    bytes 0                                                                total_bytes
    | page 0 | slot 0 | slot 1 | slot 2 | ...     border     ... | page P-2 | page P-1 |
      sink     sink

Both kinds are indexed over the whole arena: slot u lies at `slots_base + u * slot_bytes`, page p at `p * page_bytes`.
Which ids may be handed out is the business of the books (`pages.py`, `slots.py`), so the border is only a number.
A slot is one stretch of bytes that holds all its parts; a page is one stretch, token-major: position, then the row of
every layer. Moving, copying or sending one is one copy.

In: an ArenaLayout (shapes, from the planner) and the counts. Out: strided views that a forward reads and writes.
Invariants: slot 0 and page 0 are sinks that nobody owns. Nothing is zeroed when it is handed out: a reader that starts
at position 0 ignores what it finds in a slot, and rows past the length of a request are masked by select; the tests
run with every free byte NaN to prove it.
Not here: who owns what (`pages.py`, `slots.py`), when copies happen (`engine/scheduler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; every part of a slot, and every slot, starts on a multiple
POISON = 0xFF  # a float of any width whose bytes are all ones is NaN


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

    @property
    def part_offsets(self) -> tuple[int, ...]:
        """Byte offset of each slot part, and the slot's size as the last entry."""
        offsets = [0]
        for part in self.slot_parts:
            offsets.append(_align(offsets[-1] + part.num_bytes))
        return tuple(offsets)

    @property
    def slot_bytes(self) -> int:
        return self.part_offsets[-1]

    @property
    def page_bytes(self) -> int:
        return 0 if self.row is None else self.page_size * self.row.num_bytes


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


class Pool:
    """The arena. Written by forwards through its views, and by the runner through the copies of a plan."""

    def __init__(self, shape: ArenaShape, device: str | torch.device = "cpu") -> None:
        self.shape = shape
        self.layout = shape.layout
        self.arena = torch.empty(shape.total_bytes, dtype=torch.uint8, device=device)
        layout = shape.layout
        self._slots = self.arena.as_strided(
            (shape.num_slots + 1, layout.slot_bytes), (layout.slot_bytes, 1), shape.slots_base
        )
        num_ids = shape.first_page + shape.num_pages
        self._pages = self.arena.as_strided((num_ids, layout.page_bytes), (layout.page_bytes, 1), 0)

    def slot_views(self) -> tuple[Tensor, ...]:
        """Per slot part, [U, *part.shape]; U counts the sink."""
        views, layout = [], self.layout
        for part, offset in zip(layout.slot_parts, layout.part_offsets, strict=False):
            size = part.dtype.itemsize
            strides = (layout.slot_bytes // size, *_contiguous_strides(part.shape))
            base = (self.shape.slots_base + offset) // size
            views.append(self.arena.view(part.dtype).as_strided((self.shape.num_slots + 1, *part.shape), strides, base))
        return tuple(views)

    def row_view(self) -> Tensor | None:
        """[P, page_size, *row.shape]; P counts every page id of the arena, also those that lie under the slots."""
        row = self.layout.row
        if row is None:
            return None
        shape = (self._pages.shape[0], self.layout.page_size, *row.shape)
        return self.arena.view(row.dtype).as_strided(shape, _contiguous_strides(shape), 0)

    def copy_slot(self, source: int, target: int) -> None:
        """Every byte of one slot, for all layers."""
        self._slots[target] = self._slots[source]

    def copy_page(self, source: int, target: int) -> None:
        """Every byte of one page, for all layers."""
        self._pages[target] = self._pages[source]

    def poison(self) -> None:
        """Fill everything with NaN: a debugging aid."""
        self.arena.fill_(POISON)

    def poison_ids(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Fill these pages and slots with NaN: what a new owner finds must not matter."""
        for page in pages:
            self._pages[page] = POISON
        for slot in slots:
            self._slots[slot] = POISON


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
