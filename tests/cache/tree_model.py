"""What a prefix tree should hold, as a dictionary from (namespace, ids) to entries; every answer is a search.

It shares nothing with the tree but the retention policy (tested by itself) and the books' ids.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from baltoro.cache.grid import Grid
from baltoro.cache.retention import PASSING, CheckpointKind, Retention

# (namespace, how often it was dropped before, ids)
Key = tuple[bytes, int, tuple[int, ...]]
# (kind of Evicted, what went, its state)
Gone = tuple[str, Key, int | None]
Enough = Callable[[int, int], bool]


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


class Model:
    """Entries by key."""

    def __init__(self, grid: Grid, page_size: int, retention: Retention, *, has_states: bool, has_pages: bool) -> None:
        self.grid, self.page_size, self.retention = grid, page_size, retention
        self.has_states, self.has_pages = has_states, has_pages
        self.entries: dict[Key, Entry] = {}
        self.generations: Counter[bytes] = Counter()
        self.clock = self.order = 0

    def key(self, namespace: bytes, ids: array[int], depth: int) -> Key:
        return namespace, self.generations[namespace], tuple(ids[:depth])

    def is_findable(self, key: Key) -> bool:
        return key[1] == self.generations[key[0]]

    def below(self, key: Key) -> list[Entry]:
        """The entry of `key` and all that go on from it."""
        return [e for k, e in self.entries.items() if k[:2] == key[:2] and k[2][: len(key[2])] == key[2]]

    def num_children(self, entry: Entry) -> int:
        depth = entry.depth + self.grid.endpoint
        return sum(other.depth == depth for other in self.below(entry.key))

    def find(self, namespace: bytes, ids: array[int], limit: int) -> tuple[int, int, Entry | None]:
        """(usable depth, depth of KV, entry at the usable depth), and one use of that entry."""
        depths = range(self.grid.endpoint, limit + 1, self.grid.endpoint)
        entries = [self.entries.get(self.key(namespace, ids, depth)) for depth in depths]
        there = [entry for entry in entries if entry is not None]
        usable = [entry for entry in there if entry.state is not None or not self.has_states]
        best = usable[-1] if usable else None
        if best is not None:
            self.use(best)
        return best.depth if best else 0, there[-1].depth if there else 0, best

    def use(self, entry: Entry) -> None:
        self.clock += 1
        entry.last_used = self.clock

    def insert(
        self, namespace: bytes, ids: array[int], depth: int, pages: list[int], slot: int | None, kind: CheckpointKind
    ) -> tuple[bool, list[int]]:
        """(whether the slot is taken, slots that are superseded)."""
        endpoint, size = self.grid.endpoint, self.page_size
        keys = [self.key(namespace, ids, end) for end in range(endpoint, depth + 1, endpoint)]
        fresh = [key for key in keys if key not in self.entries]
        if fresh and not self.has_pages and slot is None:
            return False, []
        for key in fresh:
            end = len(key[2])
            own = tuple(pages[(end - endpoint) // size : -(-end // size)]) if self.has_pages else ()
            self.order += 1
            self.entries[key] = Entry(key, own, self.order, self.clock)
        entry = self.entries[keys[-1]]
        gone: list[Entry] = []
        is_taken = slot is not None and entry.state is None
        if is_taken:
            entry.state, entry.kind = slot, kind
            above = [self.entries[key] for key in keys[:-1] if self.entries[key].state is not None]
            for other in above:
                other.is_fork = self.num_children(other) > 1
            gone = self.retention.superseded(above, entry)
        elif entry.state is not None and kind not in PASSING:
            entry.kind = kind
        slots = [other.state for other in gone if other.state is not None]
        for other in gone:
            other.state = None
        self.use(entry)
        return is_taken, slots

    def pin(self, key: Key | None, by: int, *, has_state: bool) -> None:
        if key is not None:
            self.entries[key].pins += by
            self.entries[key].state_pins += by * has_state
            self.prune()

    def prune(self) -> None:
        """What nothing keeps goes: in dropped namespaces, and everywhere if there is no KV."""
        for key, entry in self.entries.items():
            if not self.is_findable(key) and not entry.state_pins:
                entry.state = None
        if self.has_pages and all(self.is_findable(key) for key in self.entries):
            return
        wanted = {
            (*key[:2], key[2][:depth])
            for key, entry in self.entries.items()
            if entry.pins or entry.state is not None or (self.has_pages and self.is_findable(key))
            for depth in range(self.grid.endpoint, entry.depth + 1, self.grid.endpoint)
        }
        self.entries = {key: entry for key, entry in self.entries.items() if key in wanted}

    def flush(self) -> None:
        """All that no receipt keeps goes."""
        for key, entry in list(self.entries.items()):
            entry.state = entry.state if entry.state_pins else None
            if not any(other.pins for other in self.below(key)):
                del self.entries[key]

    def drop(self, namespace: bytes) -> None:
        """A name under which nothing was keeps its meaning: a request that runs may still enter its tokens."""
        self.generations[namespace] += any(key[0] == namespace and self.is_findable(key) for key in self.entries)
        had_pages, self.has_pages = self.has_pages, True
        self.prune()
        self.has_pages = had_pages

    def evict(
        self, used: Set[int], is_enough: Enough, may_leaf: Enough | None = None, may_state: Enough | None = None
    ) -> list[Gone]:
        """What should go, in order, until `is_enough`(pages freed, states gone). `used`: pages that requests hold."""
        gone: list[Gone] = []
        freed = num_states = 0
        while not is_enough(freed, num_states):
            leaf = self.oldest_leaf(used) if may_leaf is None or may_leaf(freed, num_states) else None
            state = self.oldest_state() if may_state is None or may_state(freed, num_states) else None
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
                self.prune()
            else:
                break
        return gone

    def oldest_leaf(self, used: Set[int]) -> Entry | None:
        """Of those that free something if there is one."""
        parents = {(*key[:2], key[2][: -self.grid.endpoint]) for key in self.entries}
        leaves = [e for e in self.entries.values() if self.has_pages and not e.pins and e.key not in parents]
        useful = [entry for entry in leaves if not used >= set(entry.pages)]
        return min(useful or leaves, key=lambda entry: (entry.last_used, entry.order), default=None)

    def oldest_state(self) -> Entry | None:
        states = [e for e in self.entries.values() if e.state is not None and not e.state_pins]
        return min(states, key=lambda entry: (entry.last_used, entry.order), default=None)
