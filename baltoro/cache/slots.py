"""Books of the state slots: each belongs to one request, or is free.

In: wishes for a slot. Out: slot ids, lowest first (slots grow from the arena's low end).
Invariants: slot 0 (the sink) is never handed out; a slot has one owner. What has to be copied between slots is listed
in the plan by the scheduler; no bytes move here.
Single writer: the scheduler.
"""

from __future__ import annotations

from baltoro.errors import LeakError, PoolExhausted


class SlotBook:
    """Slots 1..count. Single writer: the scheduler."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._is_free = [True] * (count + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        """A free slot. Errors: PoolExhausted."""
        if not self._free:
            raise PoolExhausted(f"all {self.count} state slots are in use")
        slot = self._free.pop()
        self._is_free[slot] = False
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Errors: LeakError if it is free already, or no slot."""
        if not 1 <= slot <= self.count:
            raise LeakError(f"slot {slot} is outside 1..{self.count}")
        if self._is_free[slot]:
            raise LeakError(f"slot {slot} was released twice")
        self._is_free[slot] = True
        self._free.append(slot)

    def free_ids(self) -> tuple[int, ...]:
        """For the audit."""
        return tuple(self._free)
