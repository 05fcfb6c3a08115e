"""Books of an arena: which pages and state slots are taken, and where they lie. Two implementations of one contract.

In: wishes for pages and slots, and what comes back. Out: virtual ids, which owners keep, and physical ids, which a
step is told. Copies that the books need (compaction) come out of `take_moves`, in order; no bytes move here.
Invariants: a virtual id names one block until it is released, wherever the block lies; id 0 is the sink of its kind;
taking is all or nothing; a block that is held stays where it is, and its bytes are not given to anybody else before
the last hold ends, even if its owner releases it in between (it is pending then).
Single writer: the scheduler. `FixedBooks`: the border between slots and pages never moves. `UnifiedBooks`
(`unified.py`): it goes where the room is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from baltoro.cache.pages import PageBook
from baltoro.cache.slots import SlotBook

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BookMove:
    """A block changed its place: copy all its bytes. Both ids are physical."""

    kind: Literal["slot", "page"]
    source: int
    target: int


class PageStore(Protocol):
    """KV pages by virtual id; each may have several holders."""

    @property
    def count(self) -> int:
        """Pages that can exist at once, if nothing else needs the room."""

    @property
    def num_free(self) -> int:
        """How many `take` would give now, if nobody took anything else."""

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""

    def take(self, count: int) -> list[int]:
        """`count` pages with one holder each. Errors: PoolExhausted, with nothing taken and nothing moved."""

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each. Errors: LeakError for a page nobody holds."""

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each; the last one frees it. Errors: LeakError for a page nobody holds."""

    def holders(self, page: int) -> int:
        """How many hold `page`. Errors: LeakError for an id that cannot exist."""

    def physical(self, pages: Ids) -> Ids:
        """Where they lie now, int64; 0 stays 0. Right until the next taking. Errors: LeakError for a free id."""

    def used_ids(self) -> tuple[int, ...]:
        """For the audit."""


class SlotStore(Protocol):
    """State slots by virtual id; each has one owner."""

    @property
    def count(self) -> int:
        """Slots that can exist at once, if nothing else needs the room."""

    @property
    def num_free(self) -> int:
        """How many times `take` would succeed now, if nobody took anything else."""

    @property
    def num_used(self) -> int:
        """Slots that somebody owns."""

    def take(self) -> int:
        """A slot. Errors: PoolExhausted, with nothing moved."""

    def release(self, slot: int) -> None:
        """Give it back. Errors: LeakError if it is free already, or no slot."""

    def physical(self, slot: int) -> int:
        """Where it lies now; 0 stays 0. Right until the next taking. Errors: LeakError for a free id."""

    def used_ids(self) -> tuple[int, ...]:
        """For the audit."""


class Books(Protocol):
    """Pages and slots of one arena. Single writer: the scheduler.

    Every `take` may list moves. Whoever lists other copies with physical ids drains `take_moves` right after taking,
    so that all copies stand in the order in which the books changed; run in that order they are right.
    """

    @property
    def pages(self) -> PageStore: ...

    @property
    def slots(self) -> SlotStore: ...

    @property
    def is_cramped(self) -> bool:
        """Whether the last `take` or `has_room` was refused only because of blocks that are held or pending."""

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot given back makes room for; 0 where the border stays."""

    @property
    def num_moves(self) -> int:
        """Blocks moved so far. While it stays the same, physical ids stay right."""

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether so many can be taken now, both kinds together; moves that taking would make are counted in."""

    def take_moves(self) -> list[BookMove]:
        """Copies that came due since the last call, to be made one after the other in this order."""

    def hold(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Keep these blocks where they are; holds are counted. Errors: LeakError for a free id."""

    def unhold(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """End one hold of each. Errors: LeakError for a block that is not held."""

    def freeze(self) -> None:
        """A step is in flight: until `thaw`, counted, no block moves. (Holding each of its blocks would cost more than
        the step's own books.)"""

    def thaw(self) -> None:
        """A step is done. Errors: LeakError without a `freeze`."""

    def faults(self) -> list[str]:
        """What is inconsistent within the books themselves, for the audit; empty if nothing is."""


class FixedBooks:
    """Pages first..first+num_pages-1 and slots 1..num_slots, side by side; virtual and physical ids are the same."""

    num_moves = 0
    pages_per_slot = 0

    def __init__(self, first_page: int, num_pages: int, num_slots: int) -> None:
        self.pages = PageBook(first_page, num_pages)
        self.slots = SlotBook(num_slots)

    @property
    def is_cramped(self) -> bool:
        return self.pages.is_cramped or self.slots.is_cramped

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        pages, slots = self.pages, self.slots
        has_room = num_pages <= pages.num_free and num_slots <= slots.num_free
        could = num_pages <= pages.num_free + pages.num_pending and num_slots <= slots.num_free + slots.num_pending
        pages.is_cramped = slots.is_cramped = could and not has_room
        return has_room

    def take_moves(self) -> list[BookMove]:
        return []

    def hold(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        self.pages.hold(pages)
        self.slots.hold(slots)

    def unhold(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        self.pages.unhold(pages)
        self.slots.unhold(slots)

    def freeze(self) -> None:
        """Nothing ever moves."""

    def thaw(self) -> None:
        """Nothing ever moves."""

    def faults(self) -> list[str]:
        return self.pages.faults() + self.slots.faults()
