"""Books of the state slots of a fixed arena: each belongs to one owner, or is free.

In: wishes for a slot. Out: slot ids, lowest first (slots grow from the arena's low end).
Invariants: slot 0 (the sink) is never handed out; a slot has one owner; a slot that is held (`books.py`) is not handed
out again before the last hold ends. What has to be copied between slots is listed in the plan by the scheduler; no
bytes move here.
Single writer: the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baltoro.errors import LeakError, PoolExhausted


class SlotBook:
    """Slots 1..count; a `SlotStore` whose ids are physical. Single writer: the scheduler."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_cramped = False
        self.num_pending = 0
        self._free = list(range(count, 0, -1))
        self._is_used = [False] * (count + 1)
        self._holds: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free) - self.num_pending

    def take(self) -> int:
        """A free slot. Errors: PoolExhausted."""
        self.is_cramped = not self._free and self.num_pending > 0
        if not self._free:
            raise PoolExhausted(f"all {self.count} state slots are in use")
        slot = self._free.pop()
        self._is_used[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Errors: LeakError if it is free already, or no slot."""
        if not self._is_owned(slot):
            raise LeakError(f"slot {slot} was released twice")
        self._is_used[slot] = False
        if self._holds[slot]:
            self.num_pending += 1
        else:
            self._free.append(slot)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep the bytes of these slots until `unhold`. Errors: LeakError for a slot without an owner."""
        for slot in slots:
            if not self._is_owned(slot):
                raise LeakError(f"slot {slot} is free and cannot be held")
            self._holds[slot] += 1

    def unhold(self, slots: Iterable[int]) -> None:
        """End one hold of each. Errors: LeakError for a slot that is not held."""
        for slot in slots:
            if not self._holds[slot]:
                raise LeakError(f"slot {slot} is not held")
            self._holds[slot] -= 1
            if not self._holds[slot] and not self._is_used[slot]:
                self.num_pending -= 1
                self._free.append(slot)

    def physical(self, slot: int) -> int:
        """The same id."""
        return slot

    def used_ids(self) -> tuple[int, ...]:
        """For the audit."""
        return tuple(slot for slot, is_used in enumerate(self._is_used) if is_used)

    def faults(self) -> list[str]:
        """For the audit: what does not add up within the book."""
        free = set(self._free)
        faults = (
            [f"the free list of slots holds {len(self._free) - len(free)} twice"] if len(free) < self.num_free else []
        )
        kept = {slot for slot, holds in self._holds.items() if holds and not self._is_used[slot]}
        used = set(self.used_ids())
        if free & (used | kept) or free | used | kept != set(range(1, self.count + 1)) or len(kept) != self.num_pending:
            faults.append(f"slots: {len(free)} free, {len(used)} used and {len(kept)} pending are not all {self.count}")
        return faults

    def _is_owned(self, slot: int) -> bool:
        if not 1 <= slot <= self.count:
            raise LeakError(f"slot {slot} is outside 1..{self.count}")
        return self._is_used[slot]
