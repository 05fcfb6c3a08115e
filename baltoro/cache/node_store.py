"""The nodes of the prefix tree and what they hold in the books.

In: nodes to add, use, pin and remove, from the tree's other files. Out: nodes; shares and releases in the books.
Invariants: the tree is one holder of a page, however many of its nodes name it; a node with children, and a pinned
one, is never removed; a state goes with its node. In a model without KV a node that has neither state, child nor pin
says nothing and goes.
Single writer: `PrefixTree`, and through it the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baltoro.cache.ages import OldestFirst
from baltoro.cache.books import Books
from baltoro.cache.node import Node, Space, edge_digest, root_digest
from baltoro.cache.retention import CheckpointKind
from baltoro.errors import LeakError


@dataclass(slots=True)
class Counts:
    """What is in the tree, and what has left it. Single writer: `NodeStore`."""

    nodes: int = 0
    states: int = 0
    tombstones: int = 0
    evicted_nodes: int = 0
    evicted_states: int = 0
    superseded: int = 0


class NodeStore:
    """All nodes of one tree. Single writer: `PrefixTree`."""

    def __init__(self, endpoint: int, books: Books, *, has_pages: bool) -> None:
        self.endpoint, self.books, self.has_pages = endpoint, books, has_pages
        self.roots: dict[bytes, Node] = {}
        self.dropped: list[Node] = []  # roots of dropped namespaces that pinned nodes still hang from
        self.counts = Counts()
        self.page_counts: dict[int, int] = {}  # page -> nodes that name it
        self.leaves = OldestFirst(lambda node: node.is_alive and not node.pins and not node.children)
        self.states = OldestFirst(lambda node: node.state is not None and not node.state_pins)
        self._clock = 0
        self._serial = 0

    def root(self, namespace: bytes) -> Node:
        """The empty prefix of `namespace`, made if it is not there."""
        root = self.roots.get(namespace)
        if root is None:
            root = self._new(Space(namespace), None, b"", root_digest(namespace), ())
            self.roots[namespace] = root
        return root

    def add(self, parent: Node, edge: bytes, pages: tuple[int, ...]) -> Node:
        """A new child. The tree takes a share of those `pages` that it does not hold yet."""
        counts, fresh = self.page_counts, []
        for page in pages:
            count = counts.get(page, 0)
            counts[page] = count + 1
            if not count:
                fresh.append(page)
        if fresh:
            self.books.pages.share(fresh)
        node = self._new(parent.space, parent, edge, edge_digest(parent.digest, edge), pages)
        parent.children[edge] = node
        self.counts.nodes += 1
        node.last_used = self._clock
        return node

    def _new(self, space: Space, parent: Node | None, edge: bytes, digest: bytes, pages: tuple[int, ...]) -> Node:
        self._serial += 1
        depth = 0 if parent is None else parent.depth + self.endpoint
        return Node(space, parent, edge, depth, digest, pages, self._serial)

    def touch(self, node: Node) -> None:
        """Make `node` the most recently used."""
        self._clock += 1
        node.last_used = self._clock
        if node.parent is not None:
            self.leaves.push(node)
            self.states.push(node)

    def attach(self, node: Node, state: int, kind: CheckpointKind) -> None:
        """Give the slot `state` to `node`, which has none."""
        assert node.state is None
        node.state, node.kind = state, kind
        self.counts.states += 1
        self._set_tombstone(node, False)
        self.states.push(node)

    def detach(self, node: Node, *, is_evicted: bool) -> int:
        """Release the state of `node` and say which slot it was; KV stays. An evicted one leaves a tombstone."""
        assert node.state is not None and not node.state_pins
        slot, node.state = node.state, None
        self.books.slots.release(slot)
        self.counts.states -= 1
        self._set_tombstone(node, is_evicted)
        self.prune(node)
        return slot

    def remove(self, node: Node) -> int:
        """Take a leaf out with all it holds. Out: pages that became free, because nobody else holds them."""
        parent = node.parent
        assert parent is not None and not node.children and not node.pins
        if node.state is not None:
            slot, node.state = node.state, None
            self.books.slots.release(slot)
            self.counts.states -= 1
        self._set_tombstone(node, False)
        del parent.children[node.edge]
        node.parent, node.is_alive = None, False
        self.counts.nodes -= 1
        num_freed = self._release_pages(node.pages)
        self._after_child(parent)
        return num_freed

    def _release_pages(self, pages: tuple[int, ...]) -> int:
        """One node less names each. Out: how many became free."""
        counts, store, last = self.page_counts, self.books.pages, []
        for page in pages:
            counts[page] -= 1
            if not counts[page]:
                del counts[page]
                last.append(page)
        num_freed = sum(store.holders(page) == 1 for page in last)
        store.release(last)
        return num_freed

    def _after_child(self, node: Node) -> None:
        """`node` lost a child: it may be removable itself, and a root without children has nothing to say."""
        if node.children:
            return
        if node.parent is not None:
            self.leaves.push(node)
        elif node.space.is_dropped:
            self.dropped.remove(node)
        else:
            del self.roots[node.space.name]

    def prune(self, node: Node | None) -> None:
        """Remove `node` and then its ancestors as long as they say nothing, or belong to a dropped namespace."""
        while node is not None and node.parent is not None:
            is_idle = not node.children and not node.pins
            is_empty = not self.has_pages and node.state is None
            if not is_idle or not (is_empty or node.space.is_dropped):
                return
            parent = node.parent
            self.remove(node)
            node = parent

    def pin(self, node: Node, *, has_state: bool) -> None:
        """One more receipt for `node`."""
        node.pins += 1
        node.state_pins += has_state

    def unpin(self, node: Node, *, has_state: bool) -> None:
        """One receipt less. What became removable is entered again, or goes if its namespace was dropped."""
        if not node.pins or (has_state and not node.state_pins):
            raise LeakError(f"a prefix of {node.depth} tokens was unpinned more often than it was pinned")
        node.pins -= 1
        node.state_pins -= has_state
        if has_state and not node.state_pins and node.state is not None and node.space.is_dropped:
            self.detach(node, is_evicted=False)
        self.prune(node)
        if node.is_alive:
            self.leaves.push(node)
            self.states.push(node)

    def sweep(self, root: Node) -> None:
        """Remove all of a namespace that is not pinned."""
        for node in reversed(list(descendants(root))):
            if node.state is not None and not node.state_pins:
                self.detach(node, is_evicted=False)
            if node.is_alive and not node.children and not node.pins:
                self.remove(node)

    def drop(self, namespace: bytes) -> None:
        """Make a namespace unfindable, and remove of it what is not pinned; the rest goes when it is unpinned."""
        root = self.roots.pop(namespace, None)
        if root is None:
            return
        root.space.is_dropped = True
        self.dropped.append(root)
        self.sweep(root)

    def _set_tombstone(self, node: Node, is_tombstone: bool) -> None:
        self.counts.tombstones += is_tombstone - node.is_tombstone
        node.is_tombstone = is_tombstone


def descendants(root: Node) -> Iterator[Node]:
    """All nodes below `root`, each after its parent."""
    left = list(root.children.values())
    while left:
        node = left.pop()
        yield node
        left.extend(node.children.values())
