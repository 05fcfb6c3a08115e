"""UnifiedBooks: one arena in which slots grow from the low end and pages from the high end, whoever needs the room.

    | sinks | slot slot .... slot | ...... free ...... | page .... page page page |
                     ^ hole        \\__ one stretch __/         ^ hole

Virtual ids above, physical ids below. What is released leaves a hole, which the next taking of its kind fills. Only
when a taking needs bytes that the other kind covers, blocks at the other kind's border are moved into its holes (one
BookMove each), just as many as needed. A block that is held does not move, and bounds what its neighbours can make
free: `has_room` counts exactly what is possible now.

In: the shape of the arena. Out: ids and moves (`books.py` has the contract).
Invariants: extent == live + holes + pending on each side (`region.py`); the two extents never overlap by a byte; a
refused taking changes nothing; the moves of one taking have no place in common and move no block twice.
Single writer: the scheduler. No bytes here (`pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baltoro.cache.books import BookMove
from baltoro.cache.region import Ids, Region
from baltoro.cache.shape import UnifiedShape
from baltoro.errors import LeakError, PoolExhausted


class UnifiedBooks:
    """Both kinds in one arena. Single writer: the scheduler."""

    def __init__(self, shape: UnifiedShape) -> None:
        self.shape = shape
        self.is_cramped = False
        self.num_moves = 0
        page_bytes = shape.layout.page_bytes
        self.pages_per_slot = shape.layout.slot_bytes // page_bytes if page_bytes else 0
        self._num_frozen = 0
        self._slots = Region("slot", shape.max_slots, base=0, step=1)
        self._pages = Region("page", shape.max_pages, base=shape.num_page_ids, step=-1)
        self._moves: list[BookMove] = []
        self.slots = UnifiedSlots(self._slots, self._num_free_slots, self._take_slot)
        self.pages = UnifiedPages(self._pages, self._num_free_pages, self._take_pages)

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether `pages.take(num_pages)` and `num_slots` times `slots.take()` would succeed, in any order."""
        pages, slots = self._pages, self._slots
        has_room = self._fits(slots.smallest_extent(num_slots), pages.smallest_extent(num_pages))
        self.is_cramped = not has_room and self._fits(slots.free_extent(num_slots), pages.free_extent(num_pages))
        return has_room

    def take_moves(self) -> list[BookMove]:
        moves, self._moves = self._moves, []
        return moves

    def hold(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        self._pages.hold(pages)
        self._slots.hold(slots)

    def unhold(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        self._pages.unhold(pages)
        self._slots.unhold(slots)

    def freeze(self) -> None:
        self._num_frozen += 1
        self._slots.is_frozen = self._pages.is_frozen = True

    def thaw(self) -> None:
        if not self._num_frozen:
            raise LeakError("the books were thawed more often than they were frozen")
        self._num_frozen -= 1
        self._slots.is_frozen = self._pages.is_frozen = self._num_frozen > 0

    def faults(self) -> list[str]:
        faults = self._slots.faults() + self._pages.faults()
        if not self._fits(self._slots.extent, self._pages.extent):
            faults.append(f"{self._slots.extent} slots and {self._pages.extent} pages overlap")
        return faults

    def free_gap_bytes(self) -> int:
        """Bytes between the two extents: what can be taken without any move or hole."""
        return self.shape.pages_start(self._pages.extent) - self.shape.slots_end(self._slots.extent)

    # ---- takings -------------------------------------------------------------------------------------------------
    def _take_pages(self, count: int) -> list[int]:
        if not self.has_room(count, 0):
            raise PoolExhausted(f"{count} KV pages wanted, {self._num_free_pages()} fit: {self._describe()}")
        extent = self._pages.extent_after(count)
        if not self._fits(self._slots.extent, extent):
            self._note("slot", self._slots.shrink(self.shape.slots_beside(extent)))
        return self._pages.take(count)

    def _take_slot(self) -> int:
        if not self.has_room(0, 1):
            raise PoolExhausted(f"no state slot fits: {self._describe()}")
        extent = self._slots.extent_after(1)
        if not self._fits(extent, self._pages.extent):
            self._note("page", self._pages.shrink(self.shape.pages_beside(extent)))
        return self._slots.take(1)[0]

    def _note(self, kind: str, moves: list[tuple[int, int]]) -> None:
        self.num_moves += len(moves)
        self._moves += [BookMove("slot" if kind == "slot" else "page", source, target) for source, target in moves]

    def _num_free_pages(self) -> int:
        slots = self._slots.smallest_extent(0)
        assert slots is not None
        return max(0, self.shape.pages_beside(slots) - self._pages.num_placed)

    def _num_free_slots(self) -> int:
        pages = self._pages.smallest_extent(0)
        assert pages is not None
        return max(0, self.shape.slots_beside(pages) - self._slots.num_placed)

    def _fits(self, slots: int | None, pages: int | None) -> bool:
        """Whether extents of so many slots and pages have room beside each other."""
        if slots is None or pages is None:
            return False
        return self.shape.slots_end(slots) <= self.shape.pages_start(pages)

    def _describe(self) -> str:
        pages, slots = self._pages, self._slots
        held = " (held blocks are in the way)" if self.is_cramped else ""
        return f"{pages.num_placed} pages and {slots.num_placed} slots are taken{held}"


class UnifiedPages:
    """The `PageStore` of `UnifiedBooks`. A page that is handed out holds what its last owner left: zero it."""

    def __init__(self, region: Region, num_free: Callable[[], int], take: Callable[[int], list[int]]) -> None:
        self._region, self._num_free, self.take = region, num_free, take
        self.count = region.count
        self.share, self.release, self.holders = region.share, region.release, region.holders

    @property
    def num_free(self) -> int:
        return self._num_free()

    @property
    def num_used(self) -> int:
        return self._region.num_used

    @property
    def num_pending(self) -> int:
        return self._region.num_pending

    def physical(self, pages: Ids) -> Ids:
        return self._region.physical(pages)

    def used_ids(self) -> tuple[int, ...]:
        return self._region.used_ids()


class UnifiedSlots:
    """The `SlotStore` of `UnifiedBooks`."""

    def __init__(self, region: Region, num_free: Callable[[], int], take: Callable[[], int]) -> None:
        self._region, self._num_free, self.take = region, num_free, take
        self.count = region.count

    @property
    def num_free(self) -> int:
        return self._num_free()

    @property
    def num_used(self) -> int:
        return self._region.num_used

    @property
    def num_pending(self) -> int:
        return self._region.num_pending

    def release(self, slot: int) -> None:
        self._region.release((slot,))

    def physical(self, slot: int) -> int:
        return self._region.physical_one(slot)

    def used_ids(self) -> tuple[int, ...]:
        return self._region.used_ids()
