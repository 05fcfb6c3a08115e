"""The prefix tree: which prefixes have their KV in pages, and which of them a state that a request can start from.

In: token ids of requests (picture positions carry ids made from the picture's digest), their pages, snapshots of
their states. Out: the longest prefix that is restorable, receipts that keep it, what left to make room.

    depth        E        2E        3E        4E
    root --------o---------o---------o---------o     KV at every hash endpoint (E tokens)
                           S         |               a state (sparse overlay): a hit of 2E, although KV goes to 4E
                                     +---------o S   another continuation, with its own state: a hit of 4E

Invariants: a hit is the minimum of what is restorable, never KV without the state of the same depth; a state is
attached to a node of equal depth, on the grid; what a receipt names stays until the receipt is given back; the tree
only decides: shares and releases happen in the books, bytes are moved by others.
Caller's part: pin a match before anything is allocated; insert only what has landed (the step that writes it is
committed); put what `evict_*` lists aside before anything is taken again.
Single writer: the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baltoro.cache import evict
from baltoro.cache.answers import Inserted, Match, Pin, TreeStats
from baltoro.cache.audit import Holding
from baltoro.cache.books import Books
from baltoro.cache.evict import Evicted
from baltoro.cache.grid import Grid
from baltoro.cache.node import Node, chain_digests, root_digest
from baltoro.cache.node_store import NodeStore, descendants
from baltoro.cache.retention import PASSING, CheckpointKind, Retention
from baltoro.cache.tree_audit import tree_faults
from baltoro.cache.walk import pages_of, path_below, states_above
from baltoro.errors import ConfigError, LeakError

NOTHING = Inserted(0, False, ())


class PrefixTree:
    """Single writer: the scheduler."""

    def __init__(
        self,
        grid: Grid,
        page_size: int,
        books: Books,
        retention: Retention,
        *,
        has_states: bool,
        has_pages: bool = True,
        min_depth: int = 0,
        is_unified: bool = True,
    ) -> None:
        """`min_depth`: shorter prefixes are not kept. `is_unified`: `books` have one room for pages and slots."""
        if has_pages and page_size % grid.endpoint and grid.endpoint % page_size:
            raise ConfigError(
                f"pages of {page_size} tokens do not go with hash endpoints every {grid.endpoint}: one must be a "
                "multiple of the other",
                param="page_size",
            )
        if not has_states and not has_pages:
            raise ConfigError("a model with neither KV nor states has no prefix to keep")
        self.grid, self.page_size, self.retention = grid, page_size, retention
        self.has_states, self.has_pages = has_states, has_pages
        self.min_depth, self.is_unified = min_depth, is_unified
        self.store = NodeStore(grid.endpoint, books, has_pages=has_pages)
        self._pins: dict[int, Pin] = {}
        self._num_pins = 0

    # finding

    def match(self, namespace: bytes, ids: array[int], limit: int) -> Match:
        """The longest restorable prefix of `ids` of at most `limit` tokens. The node it ends at counts as used."""
        root = self.store.roots.get(namespace)
        path: list[Node] = []
        num_usable = 0
        if root is not None:
            path, num_usable = path_below(root, ids, min(limit, len(ids)), self.grid.endpoint)
        num_usable = num_usable if self.has_states else len(path)
        kv_depth = len(path) * self.grid.endpoint
        depth = num_usable * self.grid.endpoint
        branch = self.grid.floor(kv_depth) if self.has_states else 0
        branch = branch if branch > depth else 0
        if not num_usable:
            return Match(namespace, 0, kv_depth, None, (), branch, root_digest(namespace), None)
        node = path[num_usable - 1]
        self.store.touch(node)
        pages = pages_of(path[:num_usable], self.page_size, self.grid.endpoint) if self.has_pages else ()
        return Match(namespace, depth, kv_depth, node.state, pages, branch, node.digest, node)

    def digests(
        self, namespace: bytes, ids: array[int], first_depth: int, last_depth: int, *, parent: bytes | None = None
    ) -> list[bytes]:
        """Digests of the endpoints d with first_depth < d <= last_depth; the tree is not looked at.

        `parent`: the digest at `first_depth`, if the caller knows it; otherwise everything above is hashed too.
        """
        endpoint = self.grid.endpoint
        if parent is not None:
            return chain_digests(parent, ids, endpoint, first_depth, last_depth)
        return chain_digests(root_digest(namespace), ids, endpoint, 0, last_depth)[first_depth // endpoint :]

    # receipts

    def pin(self, match: Match) -> Pin:
        """Keep what `match` found, its state included. Errors: LeakError if the tree changed under it."""
        node = match.node
        if node is not None and (not node.is_alive or node.state != match.state):
            raise LeakError(f"a match of {match.depth} tokens is stale: pin it before anything else is done")
        return self._pin(node, has_state=match.state is not None)

    def pin_at(
        self, namespace: bytes, ids: array[int], depth: int, *, start: Pin | None = None, has_state: bool = False
    ) -> Pin | None:
        """Keep the KV of the first `depth` tokens; None if the tree does not hold all of it.

        `start`: a receipt for a shorter prefix of the same request, to save the way. `has_state`: keep the state at
        `depth` too, and None if there is none. Without it the state may be superseded.
        """
        node, known = self._known(namespace, ids, depth, start)
        if node is None or known != depth or (has_state and node.state is None):
            return None
        return self._pin(node if depth else None, has_state=has_state)

    def _pin(self, node: Node | None, *, has_state: bool) -> Pin:
        self._num_pins += 1
        if node is not None:
            self.store.pin(node, has_state=has_state)
        pin = self._pins[self._num_pins] = Pin(self._num_pins, node, has_state)
        return pin

    def pages_to(self, pin: Pin) -> tuple[int, ...]:
        """Pages of the prefix that `pin` keeps, from position 0."""
        path: list[Node] = []
        node = pin.node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return pages_of(path[::-1], self.page_size, self.grid.endpoint) if self.has_pages else ()

    def unpin(self, pin: Pin) -> None:
        """Give a receipt back. Errors: LeakError if it was given back before."""
        if self._pins.pop(pin.serial, None) is None:
            raise LeakError(f"receipt {pin.serial} was given back twice")
        if pin.node is not None:
            self.store.unpin(pin.node, has_state=pin.has_state)

    # entering

    def insert(
        self,
        namespace: bytes,
        ids: array[int],
        depth: int,
        pages: Sequence[int],
        *,
        state: int | None,
        kind: CheckpointKind,
        start: Pin | None = None,
    ) -> Inserted:
        """Enter the first `depth` tokens (a multiple of the endpoint), and `state` at that depth if there is one.

        `pages`: the request's, from position 0; the tree takes a share of those of new nodes and leaves the others.
        `start`: a receipt for a shorter prefix of the same request, to save the way. A state where there is one
        already is refused. Nothing is entered below `min_depth`, or behind a receipt whose namespace was dropped.
        Errors: LeakError if the depth is off the grid, or `ids` or `pages` end before it.
        """
        self._check(depth, len(ids), len(pages), has_state=state is not None)
        is_dropped = start is not None and start.node is not None and start.node.space.is_dropped
        if depth < max(self.min_depth, 1) or is_dropped:
            return NOTHING
        node, known = self._known(namespace, ids, depth, start)
        if known < depth:
            if not self.has_pages and state is None:
                return NOTHING
            node = self._grow(self.store.root(namespace) if node is None else node, ids, depth, pages)
        assert node is not None
        superseded: tuple[int, ...] = ()
        is_taken = state is not None and node.state is None
        if is_taken:
            assert state is not None
            self.store.attach(node, state, kind)
            superseded = self._supersede(node)
        elif node.state is not None and kind not in PASSING:
            node.kind = kind  # reached again, and by somebody who will come back
        self.store.touch(node)
        return Inserted(depth - known, is_taken, superseded)

    def _check(self, depth: int, num_ids: int, num_pages: int, *, has_state: bool) -> None:
        if depth % self.grid.endpoint:
            raise LeakError(f"depth {depth} is no hash endpoint (every {self.grid.endpoint} tokens)")
        if depth > num_ids or (self.has_pages and depth > num_pages * self.page_size):
            raise LeakError(f"{num_ids} ids and {num_pages} pages do not reach depth {depth}")
        if has_state and (not self.has_states or depth % self.grid.step):
            raise LeakError(f"a state of depth {depth} cannot stand on a grid of {self.grid.step} tokens")

    def _known(self, namespace: bytes, ids: array[int], depth: int, start: Pin | None) -> tuple[Node | None, int]:
        """The deepest node on the way of `ids` to `depth`, and its depth; None and 0 if even the root is not there."""
        node = self.store.roots.get(namespace)
        if start is not None and start.node is not None and start.node.depth <= depth:
            node = self._checked_start(start.node, namespace, ids)
        if node is None:
            return None, 0
        path, _ = path_below(node, ids, depth, self.grid.endpoint)
        node = path[-1] if path else node
        return node, node.depth

    def _checked_start(self, node: Node, namespace: bytes, ids: array[int]) -> Node:
        """`node`, if it can be a prefix of `ids`: its namespace and last edge are looked at."""
        edge = ids[node.depth - self.grid.endpoint : node.depth].tobytes()
        if node.space.name != namespace or node.edge != edge:
            raise LeakError(f"a receipt for {node.depth} tokens of another request was handed in as a start")
        return node

    def _grow(self, node: Node, ids: array[int], depth: int, pages: Sequence[int]) -> Node:
        """New nodes from `node` down to `depth`. Out: the last."""
        endpoint, size = self.grid.endpoint, self.page_size
        own: tuple[int, ...] = ()
        for end in range(node.depth + endpoint, depth + 1, endpoint):
            if self.has_pages:
                own = tuple(pages[(end - endpoint) // size : -(-end // size)])
            node = self.store.add(node, ids[end - endpoint : end].tobytes(), own)
        return node

    def _supersede(self, new: Node) -> tuple[int, ...]:
        """Release the states above `new` that the policy gives up."""
        gone = self.retention.superseded(states_above(new), new)
        self.store.counts.superseded += len(gone)
        return tuple([self.store.detach(node, is_evicted=False) for node in gone])

    # leaving

    def evict_page_holders(self, num_pages: int) -> list[Evicted]:
        """Leaves, oldest first, until `num_pages` pages are free that were not, or none is left."""
        return evict.evict_page_holders(self.store, num_pages)

    def evict_states(self, num_states: int) -> list[Evicted]:
        """The oldest states; KV stays."""
        return evict.evict_states(self.store, num_states)

    def evict_for(self, num_pages: int, num_slots: int) -> list[Evicted]:
        """Whatever is oldest, until the books have room for both, lack only a quiet moment, or nothing is left."""
        return evict.evict_for(self.store, num_pages, num_slots, is_unified=self.is_unified)

    def flush(self) -> None:
        """Remove everything that is not pinned."""
        for root in [*self.store.roots.values(), *self.store.dropped]:
            self.store.sweep(root)

    def drop_namespace(self, namespace: bytes) -> None:
        """Make a namespace unfindable at once; what is pinned of it goes with its last receipt.

        For names that are not used again (an adapter version, a policy version): a request that began before and
        holds no receipt would otherwise enter what it computed under the old meaning.
        """
        self.store.drop(namespace)

    # seeing

    @property
    def num_tokens(self) -> int:
        return self.store.counts.nodes * self.grid.endpoint

    def stats(self) -> TreeStats:
        """For metrics."""
        counts = self.store.counts
        return TreeStats(
            num_nodes=counts.nodes,
            num_tokens=self.num_tokens,
            num_states=counts.states,
            num_tombstones=counts.tombstones,
            num_pins=len(self._pins),
            num_namespaces=len(self.store.roots),
            num_evicted_nodes=counts.evicted_nodes,
            num_evicted_states=counts.evicted_states,
            num_superseded=counts.superseded,
        )

    def audit(self) -> None:
        """Add the tree up. Errors: LeakError with the difference."""
        faults = tree_faults(self.store, self.grid.step, sum(pin.node is not None for pin in self._pins.values()))
        if faults:
            raise LeakError("; ".join(faults))

    def holdings(self) -> list[Holding]:
        """What the tree holds in the books, read from its nodes."""
        nodes = [node for root in [*self.store.roots.values(), *self.store.dropped] for node in descendants(root)]
        pages = sorted({page for node in nodes for page in node.pages})
        return [Holding("prefix tree", pages, [node.state for node in nodes if node.state is not None])]
