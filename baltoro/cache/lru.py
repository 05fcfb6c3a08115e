"""Least recently used first, but never something that others are built upon.

In: keys with their parents, touches, holds. Out: the oldest key that may go now.
A key may go when nobody holds it and no key here names it as its parent: of a chain of blocks the end goes first, so
that what stays can still be reached. A parent need not be here itself: children may come before it.
Invariants: the answer depends on the calls alone, not on a clock; finding it costs O(log n), amortised.
Single writer: the books that own it (`host.py`, `disk.py`).
"""

from __future__ import annotations

import heapq

from baltoro.errors import LeakError


class LeafLru:
    """Keys by age of their last use. Single writer: its owner."""

    def __init__(self) -> None:
        self._stamps: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, int] = {}
        self._holds: dict[bytes, int] = {}
        # (stamp, key) of keys that could go when they were pushed; what changed since is found out when it is popped
        self._heap: list[tuple[int, bytes]] = []
        self._now = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stamps

    def add(self, key: bytes, parent: bytes | None = None, *, holds: int = 0) -> None:
        """A new key, the youngest. Errors: LeakError if it is there."""
        if key in self._stamps:
            raise LeakError(f"{key.hex()} is there already")
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if holds:
            self._holds[key] = holds
        self._stamps[key] = 0
        self.touch(key)

    def remove(self, key: bytes) -> None:
        """Take a key out; its parent may go from now on, if it was the last child. Errors: LeakError if it is held."""
        if key in self._holds:
            raise LeakError(f"{key.hex()} is held and cannot be removed")
        del self._stamps[key]
        parent = self._parents.pop(key)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._offer(parent)

    def touch(self, key: bytes) -> None:
        """Make `key` the youngest."""
        self._now += 1
        self._stamps[key] = self._now
        self._offer(key)

    def hold(self, key: bytes) -> None:
        """One more reason why `key` may not go."""
        self._holds[key] = self._holds.get(key, 0) + 1

    def unhold(self, key: bytes) -> None:
        """One reason less. Errors: LeakError if there was none."""
        if key not in self._holds:
            raise LeakError(f"{key.hex()} is not held")
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
            self._offer(key)

    def num_holds(self, key: bytes) -> int:
        return self._holds.get(key, 0)

    @property
    def num_held(self) -> int:
        """Keys that somebody holds."""
        return len(self._holds)

    def may_go(self, key: bytes) -> bool:
        return key in self._stamps and key not in self._holds and key not in self._children

    def oldest(self) -> bytes | None:
        """The least recently used key that may go; it stays where it is."""
        while self._heap:
            stamp, key = self._heap[0]
            if self._stamps.get(key) == stamp and self.may_go(key):
                return key
            heapq.heappop(self._heap)
        return None

    def _offer(self, key: bytes) -> None:
        """Push `key` if it may go; entries that went stale are swept when they are the greater part."""
        if not self.may_go(key):
            return
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [(stamp, other) for other, stamp in self._stamps.items() if self.may_go(other)]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (self._stamps[key], key))
