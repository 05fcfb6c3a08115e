"""One end of a unified arena: the blocks of one kind, packed towards that end, with holes where some were given back.

    place   1   2   3   4   5   6  | 7 ...          extent = 6: places 1..6 belong to this kind, the rest does not
            A   B   .   C   .   D  |                holes = {3, 5}; live = 4

Places are counted from the arena's own end, so both kinds look alike here; `physical` says where a place lies.
In: takings, releases and holds by virtual id. Out: virtual ids, and (source, target) places when blocks must move up.
Invariants: place `extent` is never a hole; a taking fills the hole nearest to the end before the extent grows; a held
block keeps its place, and while `is_frozen` every block does; a block that was released while held is pending: it has
no holder, and keeps place and virtual id until the last hold ends. Tables are int64 and of this kind's own size: entry
0 is the sink, free entries and the one after the last are -1.
Not here: whether the extent may grow, which depends on the other end (`unified.py`).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from baltoro.errors import LeakError

Ids = NDArray[np.int64]
FREE = -1


class Region:
    """Blocks of one kind. Single writer: the scheduler, through `UnifiedBooks`.

    `count`: blocks that can exist. Place p lies at physical id `base + step * p`.
    """

    def __init__(self, kind: str, count: int, *, base: int, step: int) -> None:
        self.kind, self.count = kind, count
        self.base, self.step = base, step
        self.extent = 0
        self.num_used = 0
        self.num_pending = 0
        self.is_frozen = False
        self._physical = np.full(count + 2, FREE, dtype=np.int64)
        self._physical[0] = 0
        self._holders = np.zeros(count + 2, dtype=np.int64)
        self._holds = np.zeros(count + 2, dtype=np.int64)
        self._ids = np.zeros(count + 2, dtype=np.int64)  # by place: whose it is, 0 for a hole
        self._free_ids = list(range(count, 0, -1))
        self._holes: list[int] = []  # a heap of places; entries that are no holes any more are skipped
        self._edge: int | None = 0  # highest place that is held; None: not known

    # ---- sizes ---------------------------------------------------------------------------------------------------
    @property
    def num_placed(self) -> int:
        """Blocks that take up bytes."""
        return self.num_used + self.num_pending

    @property
    def num_holes(self) -> int:
        return self.extent - self.num_placed

    def smallest_extent(self, extra: int) -> int | None:
        """The extent that `extra` more blocks need after every move that is allowed; None if there are too many."""
        needed = self.num_placed + extra
        return max(needed, self._held_edge()) if needed <= self.count else None

    def free_extent(self, extra: int) -> int | None:
        """The same if nothing were held."""
        needed = self.num_used + extra
        return needed if needed <= self.count else None

    # ---- takings -------------------------------------------------------------------------------------------------
    def extent_after(self, extra: int) -> int:
        """The extent after `take(extra)`."""
        return self.extent + max(0, extra - self.num_holes)

    def take(self, count: int) -> list[int]:
        """Virtual ids of `count` new blocks with one holder each. The caller has made room for `extent_after`."""
        places = [self._pop_hole() for _ in range(min(count, self.num_holes))]
        places += range(self.extent + 1, self.extent + 1 + count - len(places))
        ids = [self._free_ids.pop() for _ in places]
        where = np.array(places, dtype=np.int64)
        self._ids[where] = ids
        self._physical[ids] = self._place_ids(where)
        self._holders[ids] = 1
        self.extent = max(self.extent, *places) if places else self.extent
        self.num_used += count
        return ids

    def shrink(self, extent: int) -> list[tuple[int, int]]:
        """Move the blocks beyond `extent` into the holes nearest to the end: their physical (source, target), in order.

        `extent` is at least `smallest_extent(0)`, so nothing beyond it is held and the holes suffice.
        """
        beyond = self._ids[extent + 1 : self.extent + 1]
        sources = np.flatnonzero(beyond)[::-1] + extent + 1
        blocks = self._ids[sources]
        targets = np.array([self._pop_hole() for _ in sources], dtype=np.int64)
        self._ids[sources], self._ids[targets] = 0, blocks
        moves = zip(self._place_ids(sources).tolist(), self._place_ids(targets).tolist(), strict=True)
        self._physical[blocks] = self._place_ids(targets)
        self.extent = min(self.extent, extent)
        self._trim()
        return list(moves)

    # ---- holders -------------------------------------------------------------------------------------------------
    def share(self, ids: Iterable[int]) -> None:
        """One more holder for each. Errors: LeakError for a block without holders; nothing is changed then."""
        blocks = self._existing(ids)
        self._need(blocks, self._holders[blocks] > 0, "is free and cannot be shared")
        np.add.at(self._holders, blocks, 1)

    def release(self, ids: Iterable[int]) -> None:
        """One holder less for each. Errors: LeakError for a block without holders; nothing is changed then."""
        blocks = self._existing(ids)
        np.subtract.at(self._holders, blocks, 1)
        is_good = self._holders[blocks] >= 0
        if not is_good.all():
            np.add.at(self._holders, blocks, 1)
            self._need(blocks, is_good, "was released twice")
        ended = np.unique(blocks[self._holders[blocks] == 0])
        is_held = self._holds[ended] > 0
        self.num_used -= len(ended)
        self.num_pending += int(is_held.sum())
        self._free(ended[~is_held])

    def hold(self, ids: Iterable[int]) -> None:
        """Keep each in its place. Errors: LeakError for a block without holders; nothing is changed then."""
        blocks = self._existing(ids)
        self._need(blocks, self._holders[blocks] > 0, "is free and cannot be held")
        np.add.at(self._holds, blocks, 1)
        if len(blocks) and self._edge is not None:
            self._edge = max(self._edge, int(self._places(blocks).max()))

    def unhold(self, ids: Iterable[int]) -> None:
        """End one hold of each. Errors: LeakError for a block that is not held; nothing is changed then."""
        blocks = self._existing(ids)
        np.subtract.at(self._holds, blocks, 1)
        is_good = self._holds[blocks] >= 0
        if not is_good.all():
            np.add.at(self._holds, blocks, 1)
            self._need(blocks, is_good, "is not held")
        loose = blocks[self._holds[blocks] == 0]
        if len(loose):
            self._edge = None
        ended = np.unique(loose[self._holders[loose] == 0])
        self.num_pending -= len(ended)
        self._free(ended)

    # ---- questions -----------------------------------------------------------------------------------------------
    def holders(self, block: int) -> int:
        """Errors: LeakError for an id that cannot exist."""
        return int(self._holders[self._existing((block,))][0])

    def physical(self, ids: Ids) -> Ids:
        """Where blocks lie, int64; the sink stays 0. Errors: LeakError for a free id."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= self.count:
            self._existing(ids[ids != 0])
        found = self._physical[ids]
        if found.size and int(found.min()) < 0:
            self._need(ids, found >= 0, "is free and lies nowhere")
        return found

    def physical_one(self, block: int) -> int:
        """`physical` of one id."""
        found = int(self._physical[block]) if 0 <= block <= self.count else FREE
        if found < 0:
            raise LeakError(f"{self.kind} {block} is free and lies nowhere")
        return found

    def used_ids(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self._holders > 0).tolist())

    def faults(self) -> list[str]:
        """What does not add up: every number here is counted anew from the tables."""
        faults, ids = [], self._ids[1 : self.count + 1]
        placed = np.flatnonzero(ids) + 1
        blocks = self._ids[placed]
        pending = np.flatnonzero((self._holds > 0) & (self._holders == 0))
        edge = int(self._places(np.flatnonzero(self._holds > 0)).max(initial=0))
        holes = {place for place in self._holes if place <= self.extent and not self._ids[place]}
        mapped = set(np.flatnonzero(self._physical > 0).tolist())
        for what, is_good in (
            ("the tables disagree about where blocks lie", (self._places(blocks) == placed).all()),
            ("a place is named by two blocks, or by none", set(blocks.tolist()) == mapped),
            ("blocks with a place are not those that are used or pending", mapped == {*self.used_ids(), *pending}),
            ("used or pending blocks are miscounted", (len(self.used_ids()), len(pending)) == self._counts()),
            ("the extent does not end with a block", self.extent == int(placed.max(initial=0))),
            ("holes are lost", len(holes) == self.num_holes),
            ("the held edge is wrong", self._edge in (None, edge)),
            ("free ids and placed ones are not all", sorted([*self._free_ids, *mapped]) == [*range(1, self.count + 1)]),
            ("the sentinels were written", self._physical[0] == 0 and self._physical[-1] == FREE),
        ):
            if not is_good:
                faults.append(f"{self.kind}s: {what}")
        return faults

    # ---- helpers -------------------------------------------------------------------------------------------------
    def _counts(self) -> tuple[int, int]:
        return self.num_used, self.num_pending

    def _place_ids(self, places: Ids) -> Ids:
        """Physical ids."""
        return self.base + self.step * places

    def _places(self, blocks: Ids) -> Ids:
        return (self._physical[blocks] - self.base) * self.step

    def _held_edge(self) -> int:
        if self.is_frozen:
            return self.extent
        if self._edge is None:
            held = np.flatnonzero(self._holds)
            self._edge = int(self._places(held).max(initial=0))
        return self._edge

    def _existing(self, ids: Iterable[int]) -> Ids:
        blocks = np.asarray(ids if isinstance(ids, np.ndarray | array | list) else list(ids), dtype=np.int64)
        self._need(blocks, (blocks >= 1) & (blocks <= self.count), f"is outside 1..{self.count}")
        return blocks

    def _need(self, blocks: Ids, is_good: NDArray[np.bool_], what: str) -> None:
        if not is_good.all():
            raise LeakError(f"{self.kind} {int(blocks[~is_good][0])} {what}")

    def _free(self, blocks: Ids) -> None:
        places = self._places(blocks)
        self._ids[places] = 0
        self._physical[blocks] = FREE
        self._free_ids += blocks.tolist()
        for place in places.tolist():
            heapq.heappush(self._holes, place)
        self._trim()

    def _pop_hole(self) -> int:
        while True:
            place = heapq.heappop(self._holes)
            if place <= self.extent and not self._ids[place]:
                self._ids[place] = FREE  # the same place may stand in the heap twice
                return place

    def _trim(self) -> None:
        """Let the extent end with a block, and drop heap entries that are no holes before they pile up."""
        while self.extent and not self._ids[self.extent]:
            self.extent -= 1
        if len(self._holes) > 2 * self.num_holes + 64:
            self._holes = sorted({place for place in self._holes if place < self.extent and not self._ids[place]})
