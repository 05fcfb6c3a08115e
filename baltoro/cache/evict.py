"""What leaves the prefix tree when room is needed: leaves with their KV, and states on their own.

In: how much room is wanted. Out: what was given up, oldest first, for whoever wants to keep its bytes elsewhere.
A leaf goes with its KV and its state; a state that goes alone leaves a tombstone: the KV stays and shows later
requests where a checkpoint is worth planting. Age is the last use: a hit is a use of the node it ends at, not of those
above it, so states in the middle of a path age while the path stays.
Invariants: nothing pinned goes, nothing goes from the middle of a path; what is listed is released in the books
already, its bytes are whole until the next taking.
Single writer: `PrefixTree`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from baltoro.cache.books import Books
from baltoro.cache.node import Node
from baltoro.cache.node_store import NodeStore


@dataclass(frozen=True, slots=True)
class Evicted:
    """One thing that left. `tokens`: the edge, as bytes of int64 ids; it covers the last endpoint before `depth`.
    `page_places`, `state_place`: where the bytes lie (physical ids).

    kind "leaf": the node, its `pages` (those of its edge) and its state. kind "state": the state only; `pages` are
    named so that KV and state can be kept together, and are still the tree's.
    """

    kind: Literal["leaf", "state"]
    namespace: bytes
    digest: bytes
    parent_digest: bytes
    depth: int
    pages: tuple[int, ...]
    state: int | None
    tokens: bytes
    page_places: tuple[int, ...] = ()
    state_place: int | None = None


class Eviction:
    """One hunt for room: picks the next thing to go, and puts leaves whose going frees nothing aside until the end.

    Such a leaf's pages are all shared with running requests. `finish` must be called when the hunt is over.
    """

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._aside: list[tuple[int, int, Node]] = []  # a heap, by age
        self.evicted: list[Evicted] = []
        self.num_freed_pages = 0

    def leaf(self) -> Node | None:
        """The leaf that goes next; None if none can."""
        leaves = self._store.leaves
        while (node := leaves.oldest()) is not None and not self._frees_room(node):
            heapq.heappush(self._aside, (node.last_used, node.serial, node))
            leaves.pop()
        if node is not None or not self._aside:
            return node
        return self._aside[0][2]

    def state(self) -> Node | None:
        """The node whose state goes next; None if none can."""
        return self._store.states.oldest()

    def take_leaf(self, node: Node) -> None:
        """Let the leaf go."""
        if self._aside and node is self._aside[0][2]:
            heapq.heappop(self._aside)
        self.evicted.append(_describe(self._store.books, node, "leaf"))
        self._store.counts.evicted_nodes += 1
        self._store.counts.evicted_states += node.state is not None
        self.num_freed_pages += self._store.remove(node)

    def take_state(self, node: Node) -> None:
        """Let the state go; its KV stays."""
        self.evicted.append(_describe(self._store.books, node, "state"))
        self._store.counts.evicted_states += 1
        self._store.detach(node, is_evicted=True)

    def finish(self) -> list[Evicted]:
        """Enter again what was put aside. Out: all that went."""
        for _, _, node in self._aside:
            self._store.leaves.push(node)
        return self.evicted

    def _frees_room(self, node: Node) -> bool:
        """Whether a page of the leaf has no holder but the tree. Another node of the tree may still name it."""
        holders = self._store.books.pages.holders
        return any(holders(page) == 1 for page in node.pages)


def evict_page_holders(store: NodeStore, num_pages: int) -> list[Evicted]:
    """Leaves, oldest first, until `num_pages` pages are free that were not, or no leaf is left."""
    hunt = Eviction(store)
    while store.has_pages and hunt.num_freed_pages < num_pages and (node := hunt.leaf()) is not None:
        hunt.take_leaf(node)
    return hunt.finish()


def evict_states(store: NodeStore, num_states: int) -> list[Evicted]:
    """The `num_states` oldest states, or all that can go."""
    hunt = Eviction(store)
    while len(hunt.evicted) < num_states and (node := hunt.state()) is not None:
        hunt.take_state(node)
    return hunt.finish()


def evict_for(store: NodeStore, num_pages: int, num_slots: int, *, is_unified: bool) -> list[Evicted]:
    """The older of the oldest leaf and the oldest state, again and again, until the books have room.

    Ends early when nothing is left to go, or when the books only lack a quiet moment (`Books.is_cramped`).
    `is_unified`: room is one; otherwise only the kind that is short is given up.
    """
    books, hunt = store.books, Eviction(store)
    while not books.has_room(num_pages, num_slots) and not books.is_cramped:
        needs_pages = is_unified or books.pages.num_free < num_pages
        needs_slots = is_unified or books.slots.num_free < num_slots
        leaf = hunt.leaf() if needs_pages and store.has_pages else None
        state = hunt.state() if needs_slots else None
        if leaf is not None and (state is None or leaf.last_used <= state.last_used):
            hunt.take_leaf(leaf)
        elif state is not None:
            hunt.take_state(state)
        else:
            break
    return hunt.finish()


def _describe(books: Books, node: Node, kind: Literal["leaf", "state"]) -> Evicted:
    assert node.parent is not None
    places = tuple(books.pages.physical(np.array(node.pages, dtype=np.int64)).tolist())
    return Evicted(
        kind,
        node.space.name,
        node.digest,
        node.parent.digest,
        node.depth,
        node.pages,
        node.state,
        node.edge,
        places,
        None if node.state is None else books.slots.physical(node.state),
    )
