"""Nodes of the prefix tree by age, the least recently used first.

In: nodes that have become removable, or have been used. Out: the oldest that is removable now.
A heap of (last use, node) that is put right when it is read: an entry whose node was used since, pinned or removed is
dropped there. Whoever makes a node removable again pushes it again.
Invariants: every removable node has an entry with its present age; finding the oldest costs O(log n), amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from baltoro.cache.node import Node

SMALL = 64  # entries below which a heap is not worth sweeping


class OldestFirst:
    """Removable nodes by age. Single writer: `NodeStore`."""

    def __init__(self, is_removable: Callable[[Node], bool]) -> None:
        self._is_removable = is_removable
        self._heap: list[tuple[int, int, Node]] = []
        self._num_kept = 0  # after the last sweep

    def push(self, node: Node) -> None:
        """Enter `node` with its present age, if it is removable."""
        if not self._is_removable(node):
            return
        heapq.heappush(self._heap, (node.last_used, node.serial, node))
        if len(self._heap) > 2 * self._num_kept + SMALL:
            self._sweep()

    def oldest(self) -> Node | None:
        """The removable node that was used the longest ago; it stays entered."""
        while self._heap:
            entry = self._heap[0]
            if self._is_current(entry):
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Node | None:
        """The oldest, which is entered no longer."""
        node = self.oldest()
        while node is not None and self._heap and self._heap[0][2] is node:  # entered twice, they lie side by side
            heapq.heappop(self._heap)
        return node

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._heap)

    def entered(self) -> set[int]:
        """Serials of the nodes that `oldest` can come to. Looks at all: for the audit."""
        return {entry[1] for entry in self._heap if self._is_current(entry)}

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        return entry[0] == entry[2].last_used and self._is_removable(entry[2])

    def _sweep(self) -> None:
        current = {entry[1]: entry for entry in self._heap if self._is_current(entry)}
        self._heap = list(current.values())
        heapq.heapify(self._heap)
        self._num_kept = len(self._heap)
