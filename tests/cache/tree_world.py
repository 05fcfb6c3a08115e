"""Requests, books and a prefix tree in small, with a second account of everything, kept in plain dictionaries.

The truth about KV is in `rows`: what was last written at each (page, position in it), as a hash of all ids up to
there; the truth about states is in `states`. A match that leads to a row or a state of any other prefix is a fault,
however it came about. What the tree should hold is foretold by `tree_model.py`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from baltoro.cache.answers import Match, Pin
from baltoro.cache.audit import Holding, audit
from baltoro.cache.books import Books, FixedBooks
from baltoro.cache.evict import Evicted
from baltoro.cache.grid import Grid
from baltoro.cache.node import root_digest
from baltoro.cache.node_store import descendants
from baltoro.cache.prefix import PrefixTree
from baltoro.cache.retention import CheckpointKind, Retention
from tests.cache.tree_model import Gone, Key, Model

KINDS: tuple[CheckpointKind, ...] = ("prefill", "prompt_end", "decode", "branch", "turn_end")
MAX_LENGTH = 26


@dataclass(slots=True, eq=False)
class Running:
    """A request: what it holds, and which prefix each of its positions continues."""

    namespace: bytes
    generation: int
    ids: array[int]
    pages: list[int]
    computed: int
    pin: Pin | None
    pin_key: Key | None

    def prefix_hash(self, depth: int) -> int:
        return hash((self.namespace, self.generation, tuple(self.ids[:depth])))


class World:
    """Every operation is followed by `check`. `random` decides everything."""

    def __init__(
        self, random: Random, books: Books, grid: Grid, page_size: int, retention: Retention, **options: bool
    ) -> None:
        self.random, self.books, self.grid, self.page_size = random, books, grid, page_size
        self.tree = PrefixTree(grid, page_size, books, retention, **options)  # type: ignore[arg-type]
        self.has_pages, self.has_states = self.tree.has_pages, self.tree.has_states
        self.model = Model(grid, page_size, retention, has_states=self.has_states, has_pages=self.has_pages)
        self.running: list[Running] = []
        self.rows: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
        self.in_flight: list[int] = []
        self.seen: Counter[str] = Counter()

    def act(self) -> None:
        """One operation and the check of everything."""
        often = [self.start] * 4 + [self.advance] * 6 + [self.finish] * 2
        seldom = [self.look, self.evict_pages, self.evict_states, self.evict_room]
        rare = [self.flush, self.drop] if self.random.random() < 0.1 else []
        operation: Callable[[], None] = self.random.choice([*often, *seldom, *rare, self.fly])
        self.seen[operation.__name__] += 1
        operation()
        self.check()

    # ---- operations

    def look(self) -> None:
        self.match(self.random.choice((b"a", b"b")), self.some_ids())

    def start(self) -> None:
        """A request comes, pins what is there, and writes on in a copy of a page that it found in part."""
        if len(self.running) == 5:
            return
        namespace, ids = self.random.choice((b"a", b"a", b"b")), self.some_ids()
        match = self.match(namespace, ids)
        pin = self.tree.pin(match)
        key = self.model.key(namespace, ids, match.depth) if match.depth else None
        self.model.pin(key, 1, has_state=pin.has_state)
        self.books.pages.share(match.pages)
        generation = self.model.generations[namespace]
        request = Running(namespace, generation, ids, list(match.pages), match.depth, pin, key)
        self.running.append(request)
        self.seen["hit"] += match.depth > 0
        rest = match.depth % self.page_size
        if not self.has_pages or not rest:
            return
        if not self.make_room(1, 0):
            self.leave(request)
            return
        (own,), shared = self.books.pages.take(1), request.pages.pop()
        for row in range(self.page_size):
            self.rows[own, row] = self.rows[shared, row] if row < rest else 0
        self.books.pages.release([shared])
        request.pages.append(own)

    def advance(self) -> None:
        """A request computes some tokens and enters them, with or without a state."""
        if not self.running:
            return
        request = self.random.choice(self.running)
        end = min(request.computed + self.random.randint(1, 9), MAX_LENGTH)
        while len(request.ids) < end + 1:
            request.ids.append(self.random.randint(0, 1))
        depth = self.random.choice((self.grid.floor(end), self.grid.floor_endpoint(end)))
        is_new = self.grid.floor(depth) == depth > request.computed
        has_state = self.has_states and is_new and self.random.random() < 0.7
        num_pages = max(0, -(-end // self.page_size) - len(request.pages)) if self.has_pages else 0
        if not self.make_room(num_pages, int(has_state)):
            self.leave(request)
            return
        request.pages += self.books.pages.take(num_pages)
        for position in range(request.computed, end if self.has_pages else 0):
            place = request.pages[position // self.page_size], position % self.page_size
            self.rows[place] = request.prefix_hash(position + 1)
        request.computed = end
        slot = self.books.slots.take() if has_state else None
        if slot is not None:
            self.states[slot] = request.prefix_hash(depth)
        if depth:
            self.insert(request, depth, slot, self.random.choice(KINDS))

    def finish(self) -> None:
        if self.running:
            request = self.random.choice(self.running)
            depth = self.grid.floor_endpoint(request.computed)
            if depth:
                self.insert(request, depth, None, "turn_end")
            self.leave(request)

    def fly(self) -> None:
        """A step goes out that touches a request's pages, and the one before has landed."""
        self.books.unhold(self.in_flight, [])
        self.in_flight = []
        if self.running and not isinstance(self.books, FixedBooks):
            self.in_flight = list(self.random.choice(self.running).pages)
        self.books.hold(self.in_flight, [])

    def evict_pages(self) -> None:
        count = self.random.randint(1, 5)
        expected = self.model.evict(self.used(), lambda freed, _: freed >= count, may_state=lambda *_: False)
        self.compare(self.tree.evict_page_holders(count), expected)

    def evict_states(self) -> None:
        count = self.random.randint(1, 2)
        expected = self.model.evict(self.used(), lambda _, states: states >= count, may_leaf=lambda *_: False)
        self.compare(self.tree.evict_states(count), expected)

    def evict_room(self) -> None:
        self.make_room(self.random.randint(0, 6), self.random.randint(0, 2))

    def flush(self) -> None:
        self.tree.flush()
        self.model.flush()

    def drop(self) -> None:
        namespace = self.random.choice((b"a", b"b"))
        self.tree.drop_namespace(namespace)
        self.model.drop(namespace)

    # ---- what operations are made of

    def some_ids(self) -> array[int]:
        """A prompt that often starts like something known."""
        known = [key[2] for key in self.model.entries] or [()]
        start = list(self.random.choice(known))[: self.random.randint(0, MAX_LENGTH - 2)]
        more = self.random.randint(1, min(12, MAX_LENGTH - len(start)))
        return array("q", start + [self.random.randint(0, 1) for _ in range(more)])

    def used(self) -> set[int]:
        return {page for request in self.running for page in request.pages}

    def match(self, namespace: bytes, ids: array[int]) -> Match:
        """What the tree says, after every row and state it leads to was looked at."""
        limit = len(ids) - 1
        match = self.tree.match(namespace, ids, limit)
        depth, kv_depth, entry = self.model.find(namespace, ids, limit)
        branch = self.grid.floor(kv_depth) if self.has_states else 0
        assert (match.depth, match.kv_depth, match.branch) == (depth, kv_depth, branch if branch > depth else 0)
        assert match.state == (entry.state if entry else None)
        truth = Running(namespace, self.model.generations[namespace], ids, [], 0, None, None)
        if match.state is not None:
            assert self.states[match.state] == truth.prefix_hash(depth)
        assert len(match.pages) == (-(-depth // self.page_size) if self.has_pages else 0)
        for position in range(depth if self.has_pages else 0):
            place = match.pages[position // self.page_size], position % self.page_size
            assert self.rows[place] == truth.prefix_hash(position + 1)
        return match

    def insert(self, request: Running, depth: int, slot: int | None, kind: CheckpointKind) -> None:
        """Enter, compare with what the model expects, and move the request's receipt there."""
        namespace, ids = request.namespace, request.ids
        is_old = request.generation != self.model.generations[namespace]
        start = request.pin if is_old or self.random.random() < 0.5 else None
        is_taken = False
        if not is_old:
            done = self.tree.insert(namespace, ids, depth, request.pages, state=slot, kind=kind, start=start)
            is_taken, superseded = self.model.insert(namespace, ids, depth, request.pages, slot, kind)
            assert (done.is_state_taken, sorted(done.superseded)) == (is_taken, sorted(superseded))
            self.seen["superseded"] += len(superseded)
        elif start is not None and start.node is not None:
            done = self.tree.insert(namespace, ids, depth, request.pages, state=slot, kind=kind, start=start)
            assert not done.is_state_taken and not done.num_new_tokens
            self.seen["too late"] += 1
        if slot is not None and not is_taken:
            self.books.slots.release(slot)
        if is_old:
            return
        has_state = self.random.random() < 0.2
        pin = self.tree.pin_at(namespace, ids, depth, start=start, has_state=has_state)
        key = self.model.key(namespace, ids, depth)
        entry = self.model.entries.get(key)
        assert (pin is None) == (entry is None or (has_state and entry.state is None))
        if pin is not None:
            self.model.pin(key, 1, has_state=has_state)
            self.give_back(request)
            request.pin, request.pin_key = pin, key

    def give_back(self, request: Running) -> None:
        if request.pin is not None:
            self.tree.unpin(request.pin)
            self.model.pin(request.pin_key, -1, has_state=request.pin.has_state)
        request.pin = request.pin_key = None

    def leave(self, request: Running) -> None:
        self.give_back(request)
        self.books.pages.release(request.pages)
        self.running.remove(request)

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether there is room after the tree has made some."""
        books, num_pages = self.books, num_pages if self.has_pages else 0
        if isinstance(books, FixedBooks):
            pages, slots, is_unified = books.pages.num_free, books.slots.num_free, self.tree.is_unified
            expected = self.model.evict(
                self.used(),
                lambda freed, states: pages + freed >= num_pages and slots + states >= num_slots,
                may_leaf=lambda freed, _: is_unified or pages + freed < num_pages,
                may_state=lambda _, states: is_unified or slots + states < num_slots,
            )
            self.compare(self.tree.evict_for(num_pages, num_slots), expected)
            return books.has_room(num_pages, num_slots)
        # how much room comes of it is the books' business: what goes is foretold, not when it is enough
        evicted = self.tree.evict_for(num_pages, num_slots)
        steps = iter(range(len(evicted)))
        self.compare(evicted, self.model.evict(self.used(), lambda *_: next(steps, None) is None))
        has_room = books.has_room(num_pages, num_slots)
        self.seen["cramped"] += books.is_cramped
        if not has_room and not books.is_cramped:
            assert self.model.oldest_leaf(self.used()) is None and self.model.oldest_state() is None
        return has_room

    def compare(self, evicted: list[Evicted], expected: list[Gone]) -> None:
        found = [(item.kind, item.namespace, item.depth, item.state) for item in evicted]
        assert found == [(kind, key[0], len(key[2]), state) for kind, key, state in expected]
        for item, (_, key, _) in zip(evicted, expected, strict=True):
            chain = [root_digest(key[0]), *self.tree.digests(key[0], array("q", key[2]), 0, item.depth)]
            assert chain[-2:] == [item.parent_digest, item.digest]
            assert array("q", item.tokens).tolist() == list(key[2][-self.grid.endpoint :])
            self.seen[f"evicted {item.kind}"] += 1
        self.seen["shared leaf"] += sum(item.kind == "leaf" and self.used() >= set(item.pages) for item in evicted)

    # ---- the check

    def check(self) -> None:
        self.tree.audit()
        audit(self.books, [*self.tree.holdings(), *(Holding(str(id(r)), r.pages) for r in self.running)])
        found: dict[Key, tuple[object, ...]] = {}
        for root in self.tree.store.roots.values():
            paths = {root: array("q")}
            for node in descendants(root):
                assert node.parent is not None
                ids = paths[node] = paths[node.parent] + array("q", node.edge)
                key = self.model.key(root.space.name, ids, len(ids))
                found[key] = node.pages, node.state, node.pins, node.state_pins
        entries = self.model.entries.values()
        live = [entry for entry in entries if self.model.is_findable(entry.key)]
        assert found == {entry.key: (entry.pages, entry.state, entry.pins, entry.state_pins) for entry in live}
        stats = self.tree.stats()
        assert stats.num_nodes == len(entries) == self.tree.num_tokens // self.grid.endpoint
        assert stats.num_states == sum(entry.state is not None for entry in entries)
        assert stats.num_pins == sum(request.pin is not None for request in self.running)

    def close(self) -> None:
        """Everybody goes home: nothing may be left."""
        self.books.unhold(self.in_flight, [])
        for request in list(self.running):
            self.leave(request)
            self.check()
        self.flush()
        self.check()
        assert self.books.pages.num_used == self.books.slots.num_used == 0
