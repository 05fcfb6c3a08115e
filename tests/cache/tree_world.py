"""Requests, books and a prefix tree in small, with a second account of everything, kept in plain dictionaries.

The truth about KV is in `rows`: what was last written at each (page, position in it), as a hash of all ids up to
there; the truth about states is in `states`. A match that leads to a row or a state of any other prefix is a fault,
however it came about. The model of the tree knows nothing of nodes: it maps (namespace, ids) to what should be there.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from baltoro.cache.audit import Holding, audit
from baltoro.cache.books import Books, FixedBooks
from baltoro.cache.evict import Evicted
from baltoro.cache.grid import Grid
from baltoro.cache.node import root_digest
from baltoro.cache.node_store import descendants
from baltoro.cache.prefix import Match, Pin, PrefixTree
from baltoro.cache.retention import PASSING, CheckpointKind, Retention

# (namespace, how often it was dropped before, ids)
Key = tuple[bytes, int, tuple[int, ...]]
KINDS: tuple[CheckpointKind, ...] = ("prefill", "prompt_end", "decode", "branch", "turn_end")
MAX_LENGTH = 26


@dataclass(slots=True, eq=False)
class Entry:
    """The model's node; has what a retention policy looks at."""

    key: Key
    pages: tuple[int, ...]
    order: int
    last_used: int
    state: int | None = None
    kind: CheckpointKind = "prefill"
    pins: int = 0
    state_pins: int = 0
    is_fork: bool = False

    @property
    def depth(self) -> int:
        return len(self.key[2])

    @property
    def is_state_pinned(self) -> bool:
        return self.state_pins > 0


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
    slots: list[int] = field(default_factory=list)


class World:
    """Every operation is followed by `check`. `random` decides everything."""

    def __init__(
        self, random: Random, books: Books, grid: Grid, page_size: int, retention: Retention, **options: bool | int
    ) -> None:
        self.random, self.books, self.grid, self.page_size = random, books, grid, page_size
        self.tree = PrefixTree(grid, page_size, books, retention, **options)  # type: ignore[arg-type]
        self.retention = retention
        self.has_pages, self.has_states = self.tree.has_pages, self.tree.has_states
        self.entries: dict[Key, Entry] = {}
        self.generations: Counter[bytes] = Counter()
        self.running: list[Running] = []
        self.rows: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
        self.clock = self.order = 0
        self.seen: Counter[str] = Counter()

    def act(self) -> None:
        """One operation and the check of everything."""
        operation = self.random.choice(
            [self.start] * 4 + [self.advance] * 6 + [self.finish] * 2 + [self.look, self.evict_pages]
            + [self.evict_states, self.evict_room] + ([self.flush, self.drop] if self.random.random() < 0.1 else [])
        )  # fmt: skip
        self.seen[operation.__name__] += 1
        operation()
        self.check()

    # ---- operations

    def look(self) -> None:
        self.match(self.random.choice((b"a", b"b")), self.some_ids())

    def start(self) -> None:
        if len(self.running) == 5:
            return
        namespace, ids = self.random.choice((b"a", b"a", b"b")), self.some_ids()
        match = self.match(namespace, ids)
        pin = self.tree.pin(match)
        key = self.key(namespace, ids, match.depth) if match.node is not None else None
        self.model_pin(key, 1, has_state=pin.has_state)
        self.tree.store.books.pages.share(match.pages)
        request = Running(namespace, self.generations[namespace], ids, list(match.pages), match.depth, pin, key)
        self.running.append(request)
        rest = match.depth % self.page_size
        if self.has_pages and rest:  # the last page is shared only in part: write into a copy
            if not self.make_room(1, 0):
                self.drop_running(request)
                return
            (own,) = self.books.pages.take(1)
            shared = request.pages.pop()
            for row in range(self.page_size):
                self.rows[own, row] = self.rows.get((shared, row), 0) if row < rest else 0
            self.books.pages.release([shared])
            request.pages.append(own)
        self.seen["hit"] += match.depth > 0

    def advance(self) -> None:
        if not self.running:
            return
        request = self.random.choice(self.running)
        end = min(request.computed + self.random.randint(1, 9), MAX_LENGTH)
        while len(request.ids) < end + 1:
            request.ids.append(self.random.randint(0, 1))
        missing = -(-end // self.page_size) - len(request.pages) if self.has_pages else 0
        depth = self.random.choice((self.grid.floor(end), self.grid.floor_endpoint(end)))
        has_state = (
            self.has_states and self.grid.floor(depth) == depth > request.computed and self.random.random() < 0.7
        )
        if not self.make_room(max(0, missing), int(has_state)):
            self.drop_running(request)
            return
        request.pages += self.books.pages.take(max(0, missing))
        for position in range(request.computed, end if self.has_pages else 0):
            place = request.pages[position // self.page_size], position % self.page_size
            self.rows[place] = self.prefix_hash(request, position + 1)
        request.computed = end
        slot = None
        if has_state:
            slot = self.books.slots.take()
            self.states[slot] = self.prefix_hash(request, depth)
        if depth:
            self.insert(request, depth, slot, self.random.choice(KINDS))

    def finish(self) -> None:
        if self.running:
            request = self.random.choice(self.running)
            depth = self.grid.floor_endpoint(request.computed)
            if depth:
                self.insert(request, depth, None, "turn_end")
            self.drop_running(request)

    def evict_pages(self) -> None:
        count = self.random.randint(1, 5)
        expected = self.model_evict(lambda freed, _: freed >= count, can_states=False)
        self.compare(self.tree.evict_page_holders(count), expected)

    def evict_states(self) -> None:
        count = self.random.randint(1, 2)
        expected = self.model_evict(lambda _, states: states >= count, can_leaves=False)
        self.compare(self.tree.evict_states(count), expected)

    def evict_room(self) -> None:
        self.make_room(self.random.randint(0, 6), self.random.randint(0, 2))

    def flush(self) -> None:
        self.tree.flush()
        for entry in list(self.entries.values()):
            self.model_sweep(entry)

    def drop(self) -> None:
        namespace = self.random.choice((b"a", b"b"))
        self.tree.drop_namespace(namespace)
        if any(key[:2] == (namespace, self.generations[namespace]) for key in self.entries):
            self.generations[namespace] += 1
        else:  # nothing was there; a request that runs may still enter its tokens
            return
        for entry in list(self.entries.values()):
            if entry.key[0] == namespace:
                self.model_sweep(entry)

    # ---- what operations are made of

    def some_ids(self) -> array[int]:
        """A prompt that often starts like something known."""
        known = [key[2] for key in self.entries] or [()]
        start = list(self.random.choice(known))[: self.random.randint(0, MAX_LENGTH - 2)]
        more = self.random.randint(1, max(1, MAX_LENGTH - len(start)))
        return array("q", start + [self.random.randint(0, 1) for _ in range(min(more, 12))])

    def key(self, namespace: bytes, ids: array[int], depth: int) -> Key:
        return namespace, self.generations[namespace], tuple(ids[:depth])

    def prefix_hash(self, request: Running, depth: int) -> int:
        return hash((request.namespace, request.generation, tuple(request.ids[:depth])))

    def match(self, namespace: bytes, ids: array[int]) -> Match:
        limit = len(ids) - 1
        match = self.tree.match(namespace, ids, limit)
        depths = range(self.grid.endpoint, limit + 1, self.grid.endpoint)
        kv = max((d for d in depths if self.key(namespace, ids, d) in self.entries), default=0)
        usable = [d for d in depths if d <= kv]
        if self.has_states:
            usable = [d for d in usable if self.entries[self.key(namespace, ids, d)].state is not None]
        depth = max(usable, default=0)
        assert (match.depth, match.kv_depth) == (depth, kv)
        assert match.branch == (self.grid.floor(kv) if self.has_states and self.grid.floor(kv) > depth else 0)
        generation = self.generations[namespace]
        if depth:
            entry = self.entries[self.key(namespace, ids, depth)]
            assert match.state == entry.state
            self.clock += 1
            entry.last_used = self.clock
        if match.state is not None:
            assert self.states[match.state] == hash((namespace, generation, tuple(ids[:depth])))
        if self.has_pages:
            assert len(match.pages) == -(-depth // self.page_size)
            for position in range(depth):
                place = match.pages[position // self.page_size], position % self.page_size
                assert self.rows[place] == hash((namespace, generation, tuple(ids[: position + 1])))
        return match

    def insert(self, request: Running, depth: int, slot: int | None, kind: CheckpointKind) -> None:
        """Enter, compare with what the model expects, and move the request's receipt there."""
        is_old = request.generation != self.generations[request.namespace]
        start = request.pin if is_old or self.random.random() < 0.5 else None
        if is_old and (start is None or start.node is None):
            if slot is not None:
                self.books.slots.release(slot)
            return  # see PrefixTree.drop_namespace
        done = self.tree.insert(
            request.namespace, request.ids, depth, request.pages, state=slot, kind=kind, start=start
        )
        taken = self.model_insert(request, depth, slot, kind, done.superseded) if not is_old else False
        assert done.is_state_taken == taken
        if slot is not None and not taken:
            self.books.slots.release(slot)
        if is_old:
            return
        has_state = self.random.random() < 0.2
        pin = self.tree.pin_at(request.namespace, request.ids, depth, start=start, has_state=has_state)
        key = self.key(request.namespace, request.ids, depth)
        entry = self.entries.get(key)
        assert (pin is None) == (entry is None or (has_state and entry.state is None))
        if pin is not None:
            self.model_pin(key, 1, has_state=has_state)
            self.give_back(request)
            request.pin, request.pin_key = pin, key

    def give_back(self, request: Running) -> None:
        if request.pin is not None:
            self.tree.unpin(request.pin)
            self.model_pin(request.pin_key, -1, has_state=request.pin.has_state)
            if request.pin_key is not None:
                self.model_prune()
        request.pin = request.pin_key = None

    def drop_running(self, request: Running) -> None:
        self.give_back(request)
        self.books.pages.release(request.pages)
        self.running.remove(request)

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        if not self.has_pages:
            num_pages = 0
        if isinstance(self.books, FixedBooks):
            pages, slots, unified = self.books.pages.num_free, self.books.slots.num_free, self.tree.is_unified
            expected = self.model_evict(
                lambda freed, states: pages + freed >= num_pages and slots + states >= num_slots,
                can_leaves=lambda freed: unified or pages + freed < num_pages,
                can_states=lambda states: unified or slots + states < num_slots,
            )
            self.compare(self.tree.evict_for(num_pages, num_slots), expected)
        else:  # where the room comes from is the books' business: what went is looked at, not how much
            evicted = self.tree.evict_for(num_pages, num_slots)
            left = len(evicted)
            expected = self.model_evict(lambda _, __: left == 0, count=left)
            self.compare(evicted, expected)
            assert self.books.has_room(num_pages, num_slots) or not self.model_evict(lambda _, __: False, count=1)
        return self.books.has_room(num_pages, num_slots)

    # ---- the model

    def children(self, entry: Entry) -> int:
        name, generation, ids = entry.key
        depth = len(ids) + self.grid.endpoint
        return sum(
            key[0] == name and key[1] == generation and len(key[2]) == depth and key[2][: len(ids)] == ids
            for key in self.entries
        )

    def model_insert(
        self, request: Running, depth: int, slot: int | None, kind: CheckpointKind, superseded: tuple[int, ...]
    ) -> bool:
        endpoint, size = self.grid.endpoint, self.page_size
        keys = [self.key(request.namespace, request.ids, d) for d in range(endpoint, depth + 1, endpoint)]
        is_new = any(key not in self.entries for key in keys)
        if is_new and not self.has_pages and slot is None:
            return False
        for key in keys:
            if key not in self.entries:
                end = len(key[2])
                pages = tuple(request.pages[(end - endpoint) // size : -(-end // size)]) if self.has_pages else ()
                self.order += 1
                self.entries[key] = Entry(key, pages, self.order, self.clock)
        entry = self.entries[keys[-1]]
        taken = slot is not None and entry.state is None
        gone: list[Entry] = []
        if taken:
            entry.state, entry.kind = slot, kind
            above = [self.entries[key] for key in keys[:-1]]
            for other in above:
                other.is_fork = self.children(other) > 1
            gone = self.retention.superseded([other for other in above if other.state is not None], entry)
            assert not any(other.state_pins or other.is_fork for other in gone)
        elif entry.state is not None and kind not in PASSING:
            entry.kind = kind
        assert sorted(superseded) == sorted(other.state or 0 for other in gone)
        self.seen["superseded"] += len(gone)
        for other in gone:
            other.state = None
        self.clock += 1
        entry.last_used = self.clock
        return taken

    def model_pin(self, key: Key | None, by: int, *, has_state: bool) -> None:
        if key is not None:
            self.entries[key].pins += by
            self.entries[key].state_pins += by * has_state

    def model_prune(self) -> None:
        """What nothing keeps goes: in dropped namespaces, and everywhere if there is no KV."""
        for key, entry in list(self.entries.items()):
            if key[1] != self.generations[key[0]]:
                entry.state = entry.state if entry.state_pins else None
        wanted = {
            (key[0], key[1], key[2][:depth])
            for key, entry in self.entries.items()
            if entry.pins or entry.state is not None or (self.has_pages and key[1] == self.generations[key[0]])
            for depth in range(self.grid.endpoint, len(key[2]) + 1, self.grid.endpoint)
        }
        self.entries = {key: entry for key, entry in self.entries.items() if key in wanted}

    def model_sweep(self, entry: Entry) -> None:
        if not entry.state_pins:
            entry.state = None
        name, generation, ids = entry.key
        is_kept = any(
            other.pins and key[:2] == (name, generation) and key[2][: len(ids)] == ids
            for key, other in self.entries.items()
        )
        if not is_kept:
            del self.entries[entry.key]

    def model_evict(
        self, is_enough, *, can_leaves=True, can_states=True, count=None
    ) -> list[tuple[str, Key, int | None]]:  # type: ignore[no-untyped-def]
        """What should go, in order: a search through everything for the oldest, again and again."""
        used = {page for request in self.running for page in request.pages}
        gone: list[tuple[str, Key, int | None]] = []
        freed = num_states = 0
        while not is_enough(freed, num_states) and len(gone) != count:
            leaves, states = [], []
            if self.has_pages and (can_leaves if isinstance(can_leaves, bool) else can_leaves(freed)):
                leaves = [e for e in self.entries.values() if not e.pins and not self.children(e)]
                useful = [e for e in leaves if not used.issuperset(e.pages)]
                self.seen["useless leaf"] += bool(leaves) and not useful
                leaves = useful or leaves
            if can_states if isinstance(can_states, bool) else can_states(num_states):
                states = [e for e in self.entries.values() if e.state is not None and not e.state_pins]
            leaf = min(leaves, key=lambda e: (e.last_used, e.order), default=None)
            state = min(states, key=lambda e: (e.last_used, e.order), default=None)
            if leaf is not None and (state is None or leaf.last_used <= state.last_used):
                gone.append(("leaf", leaf.key, leaf.state))
                del self.entries[leaf.key]
                named = {page for entry in self.entries.values() for page in entry.pages}
                freed += len(set(leaf.pages) - named - used)
                num_states += leaf.state is not None
            elif state is not None:
                gone.append(("state", state.key, state.state))
                state.state = None
                num_states += 1
                self.model_prune()
            else:
                break
        return gone

    def compare(self, evicted: list[Evicted], expected: list[tuple[str, Key, int | None]]) -> None:
        assert [(e.kind, e.namespace, e.depth, e.state) for e in evicted] == [
            (kind, key[0], len(key[2]), state) for kind, key, state in expected
        ]
        for item, (_, key, _) in zip(evicted, expected, strict=True):
            chain = [root_digest(key[0]), *self.tree.digests(key[0], array("q", key[2]), 0, item.depth)]
            assert chain[-2:] == [item.parent_digest, item.digest]
            assert array("q", item.tokens).tolist() == list(key[2][-self.grid.endpoint :])
            self.seen[f"evicted {item.kind}"] += 1

    # ---- the check

    def check(self) -> None:
        self.tree.audit()
        audit(
            self.books,
            [*self.tree.holdings(), *(Holding(str(id(r)), r.pages, r.slots) for r in self.running)],
        )
        store, found = self.tree.store, {}
        for root in store.roots.values():
            for node in descendants(root):
                above, edges = node, []
                while above.parent is not None:
                    edges.append(above.edge)
                    above = above.parent
                ids = array("q", b"".join(reversed(edges)))
                found[self.key(root.space.name, ids, len(ids))] = (node.pages, node.state, node.pins, node.state_pins)
        live = {key: entry for key, entry in self.entries.items() if key[1] == self.generations[key[0]]}
        assert found == {key: (e.pages, e.state, e.pins, e.state_pins) for key, e in live.items()}
        stats = self.tree.stats()
        assert stats.num_nodes == len(self.entries) == self.tree.num_tokens // self.grid.endpoint
        assert stats.num_states == sum(entry.state is not None for entry in self.entries.values())
        assert stats.num_pins == len(self.running) - sum(r.pin is None for r in self.running)

    def close(self) -> None:
        """Everybody goes home: nothing may be left."""
        while self.running:
            self.drop_running(self.running[0])
            self.check()
        self.tree.flush()
        self.entries.clear()
        self.check()
        assert self.books.pages.num_used == self.books.slots.num_used == 0
