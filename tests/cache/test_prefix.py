"""Properties of the prefix tree, one by one: what a hit is, what is kept, what goes first, what is refused."""

from __future__ import annotations

import time
from array import array
from random import Random

import pytest

from baltoro.cache.answers import Inserted
from baltoro.cache.audit import Holding, audit
from baltoro.cache.books import FixedBooks
from baltoro.cache.grid import Grid
from baltoro.cache.prefix import PrefixTree
from baltoro.cache.retention import CheckpointKind, Turns, retention_by_name
from baltoro.errors import ConfigError, LeakError

NAME = b"base"


class Cache:
    """A tree, its books, and a request that computes, inserts and goes in one call."""

    def __init__(
        self, *, page: int = 16, endpoint: int = 64, chunk: int = 64, num_slots: int = 20, **options: bool | int
    ) -> None:
        self.page = page
        self.others: list[Holding] = []  # of requests that are still there
        self.books = FixedBooks(1, 4096, num_slots)
        options = {"has_states": True, "is_unified": False} | options
        self.grid = Grid(chunk, endpoint, 4 * chunk * endpoint)
        self.tree = PrefixTree(self.grid, page, self.books, Turns(), **options)  # type: ignore[arg-type]

    def put(
        self, ids: array[int], depth: int, *, has_state: bool = True, kind: CheckpointKind = "turn_end"
    ) -> tuple[list[int], int | None, Inserted]:
        pages = self.books.pages.take(-(-len(ids) // self.page)) if self.tree.has_pages else []
        slot = self.books.slots.take() if has_state else None
        done = self.tree.insert(NAME, ids, depth, pages, state=slot, kind=kind)
        self.books.pages.release(pages)
        if slot is not None and not done.is_state_taken:
            self.books.slots.release(slot)
        self.check()
        return pages, slot, done

    def depth(self, ids: array[int], namespace: bytes = NAME) -> int:
        return self.tree.match(namespace, ids, len(ids) - 1).depth

    def check(self) -> None:
        self.tree.audit()
        audit(self.books, [*self.tree.holdings(), *self.others])


def prompt(length: int, seed: int = 0) -> array[int]:
    random = Random(seed)
    return array("q", [random.randrange(-(2**40), 2**40) for _ in range(length)])


def test_a_hit_is_the_deepest_state_not_the_deepest_kv() -> None:
    cache, ids = Cache(), prompt(400)
    pages, slot, _ = cache.put(ids, 128)
    cache.put(ids, 384, has_state=False)
    match = cache.tree.match(NAME, ids, 399)
    assert (match.depth, match.kv_depth, match.state) == (128, 384, slot)
    assert match.pages == tuple(pages[:8])
    assert match.branch == 384


def test_without_states_a_hit_goes_as_far_as_the_kv() -> None:
    cache, ids = Cache(has_states=False), prompt(400)
    pages, _, _ = cache.put(ids, 384, has_state=False)
    match = cache.tree.match(NAME, ids, 399)
    assert (match.depth, match.state, match.branch) == (384, None, 0)
    assert match.pages == tuple(pages[:24])


@pytest.mark.parametrize("length", [128, 129, 130, 192, 193])
def test_the_last_token_is_left_to_compute(length: int) -> None:
    cache, ids = Cache(), prompt(length)
    cache.put(ids, 64)
    cache.put(ids, 128)
    assert cache.depth(ids) == (64 if length == 128 else 128)


@pytest.mark.parametrize("page", [1, 16, 64, 192, 128])
def test_a_prefix_is_found_at_every_endpoint_whatever_the_page(page: int) -> None:
    cache, ids = Cache(page=page), prompt(600)
    pages, _, _ = cache.put(ids, 576, has_state=False)
    for depth in range(64, 577, 64):
        cache.put(ids, depth, kind="prompt_end")
        other = ids[:depth] + prompt(100, seed=depth)
        match = cache.tree.match(NAME, other, len(other) - 1)
        assert match.depth == depth
        assert match.pages == tuple(pages[: -(-depth // page)])


def test_a_page_of_several_endpoints_comes_from_the_deepest_node() -> None:
    """A second request copies a page it found in part and writes on in the copy: only the copy has all rows."""
    cache, common = Cache(page=192), prompt(64)
    first, _, _ = cache.put(common + prompt(200, 1), 64)
    second, _, _ = cache.put(common + prompt(200, 2), 192)
    assert cache.tree.match(NAME, common + prompt(9, 3), 70).pages == (first[0],)
    assert cache.tree.match(NAME, common + prompt(200, 2), 200).pages == (second[0],)
    (holding,) = cache.tree.holdings()
    assert sorted(holding.pages) == sorted([first[0], second[0]])


def test_the_second_arrival_plants_at_the_fork_and_the_third_hits() -> None:
    """Shared prefix of 257, chunk 64: 0, 0 with a branch at 256, then 256."""
    cache, common = Cache(), prompt(257)
    arrivals = [common + prompt(500, seed) for seed in (1, 2, 3)]
    matches = []
    for ids in arrivals:
        match = cache.tree.match(NAME, ids, len(ids) - 1)
        matches.append((match.depth, match.branch))
        if match.branch:
            cache.put(ids, match.branch, kind="branch")
        cache.put(ids, 704)
    assert matches == [(0, 0), (0, 256), (256, 0)]


def test_a_branch_lies_on_the_grid_not_on_the_endpoint() -> None:
    cache, ids = Cache(endpoint=16, chunk=64), prompt(300)
    cache.put(ids, 240, has_state=False)
    match = cache.tree.match(NAME, ids, 299)
    assert (match.kv_depth, match.branch) == (240, 192)


def test_a_state_stands_on_a_node_of_its_own_depth_only() -> None:
    cache, ids = Cache(endpoint=16, chunk=64), prompt(300)
    pages, slot = cache.books.pages.take(19), cache.books.slots.take()
    with pytest.raises(LeakError, match="a state of depth 80 cannot stand on a grid of 64"):
        cache.tree.insert(NAME, ids, 80, pages, state=slot, kind="prefill")
    with pytest.raises(LeakError, match="depth 70 is no hash endpoint"):
        cache.tree.insert(NAME, ids, 70, pages, state=None, kind="prefill")
    with pytest.raises(LeakError, match="do not reach depth 320"):
        cache.tree.insert(NAME, ids, 320, pages, state=None, kind="prefill")
    cache.others.append(Holding("request", pages, [slot]))
    cache.check()


def test_a_second_state_for_one_prefix_is_refused_and_stays_the_callers() -> None:
    cache, ids = Cache(), prompt(200)
    _, slot, _ = cache.put(ids, 128, kind="prefill")
    _, _, done = cache.put(ids, 128, kind="prompt_end")
    assert done == Inserted(0, False, ())
    assert cache.tree.match(NAME, ids, 199).state == slot
    _, _, done = cache.put(ids, 192)
    assert done.superseded == (), "it was reached again as the end of a prompt, and is no passing one any more"


def test_namespaces_do_not_meet() -> None:
    cache, ids = Cache(), prompt(200)
    cache.put(ids, 192)
    assert cache.depth(ids) == 192
    assert cache.depth(ids, b"adapter 1") == cache.depth(ids, b"") == 0
    digests = [cache.tree.digests(name, ids, 64, 192) for name in (NAME, b"adapter 1")]
    assert len(digests[0]) == 2 and not set(digests[0]) & set(digests[1])


def test_digests_say_what_the_tree_says() -> None:
    cache, ids = Cache(), prompt(300)
    cache.put(ids, 256)
    match = cache.tree.match(NAME, ids, 299)
    every = cache.tree.digests(NAME, ids, 0, 256)
    assert match.digest == every[-1]
    assert cache.tree.digests(NAME, ids, 128, 256) == every[2:]
    assert cache.tree.digests(NAME, ids, 128, 256, parent=every[1]) == every[2:]
    ids[0] += 1
    assert not set(cache.tree.digests(NAME, ids, 0, 256)) & set(every), "a digest covers everything above it"


def test_what_is_pinned_stays_and_a_receipt_is_given_back_once() -> None:
    cache, ids = Cache(), prompt(300)
    cache.put(ids, 128)
    cache.put(ids, 256, has_state=False)
    pin = cache.tree.pin(cache.tree.match(NAME, ids, 299))
    evicted = cache.tree.evict_page_holders(1000)
    assert [item.depth for item in evicted] == [256, 192]
    assert cache.tree.evict_states(10) == []
    cache.tree.flush()
    assert cache.depth(ids) == 128
    cache.tree.unpin(pin)
    with pytest.raises(LeakError, match="given back twice"):
        cache.tree.unpin(pin)
    cache.tree.flush()
    assert cache.depth(ids) == cache.tree.num_tokens == cache.books.pages.num_used == cache.books.slots.num_used == 0


def test_a_stale_match_cannot_be_pinned() -> None:
    cache, ids = Cache(), prompt(300)
    cache.put(ids, 128)
    match = cache.tree.match(NAME, ids, 299)
    cache.tree.evict_states(1)
    with pytest.raises(LeakError, match="stale"):
        cache.tree.pin(match)


def test_a_receipt_without_the_state_lets_the_state_be_superseded() -> None:
    cache, ids = Cache(), prompt(300)
    _, slot, _ = cache.put(ids, 128, kind="prefill")
    pin = cache.tree.pin_at(NAME, ids, 128)
    assert pin is not None and cache.tree.pin_at(NAME, ids, 256) is None
    _, _, done = cache.put(ids, 192, kind="decode")
    assert done.superseded == (slot,)
    assert cache.tree.pin_at(NAME, ids, 128, has_state=True) is None
    cache.tree.unpin(pin)


def test_a_receipt_saves_the_way_and_is_checked() -> None:
    cache, ids, other = Cache(), prompt(400), prompt(400, seed=1)
    cache.put(ids, 128)
    pin = cache.tree.pin(cache.tree.match(NAME, ids, 399))
    pages = cache.books.pages.take(25)
    done = cache.tree.insert(NAME, ids, 384, pages, state=None, kind="decode", start=pin)
    assert done.num_new_tokens == 256
    deeper = cache.tree.pin_at(NAME, ids, 384, start=pin)
    assert deeper is not None
    with pytest.raises(LeakError, match="another request"):
        cache.tree.insert(NAME, other, 384, pages, state=None, kind="decode", start=pin)
    with pytest.raises(LeakError, match="another request"):
        cache.tree.pin_at(b"adapter 1", ids, 384, start=pin)
    cache.others.append(Holding("request", pages))
    cache.check()


def test_leaves_go_oldest_first_and_the_end_of_a_path_before_its_start() -> None:
    cache = Cache()
    first, second = prompt(200, 1), prompt(200, 2)
    cache.put(first, 128)
    cache.put(second, 128)
    assert cache.depth(first) == 128  # used again
    evicted = cache.tree.evict_page_holders(9)
    assert [(item.depth, item.state is not None) for item in evicted] == [(128, True), (64, False), (128, True)]
    assert evicted[0].parent_digest == evicted[1].digest != evicted[2].parent_digest
    assert array("q", evicted[1].tokens) == second[:64]
    cache.check()


def test_leaves_whose_pages_are_in_use_anyway_go_last() -> None:
    cache, ids = Cache(), prompt(200, 1)
    pages = cache.books.pages.take(13)
    cache.others.append(Holding("request", pages))
    cache.tree.insert(NAME, ids, 192, pages, state=None, kind="prefill")
    cache.put(prompt(200, 2), 64)
    (evicted,) = cache.tree.evict_page_holders(4)
    assert evicted.depth == 64, "the younger one: only it frees pages"
    assert len(cache.tree.evict_page_holders(1)) == 3, "freeing nothing, they go when nothing else is left"
    cache.check()


def test_a_state_that_goes_alone_leaves_its_kv() -> None:
    cache, ids = Cache(), prompt(300)
    pages, slot, _ = cache.put(ids, 128)
    (evicted,) = cache.tree.evict_states(1)
    assert (evicted.kind, evicted.state, evicted.pages) == ("state", slot, tuple(pages[4:8]))
    match = cache.tree.match(NAME, ids, 299)
    assert (match.depth, match.kv_depth, match.branch) == (0, 128, 128)
    assert cache.tree.stats().num_tombstones == 1
    cache.put(ids, 128)
    assert cache.tree.stats().num_tombstones == 0 and cache.depth(ids) == 128


def test_only_the_node_of_a_hit_grows_young() -> None:
    cache, ids = Cache(), prompt(300)
    _, shallow, _ = cache.put(ids, 64)
    cache.put(prompt(300, 1), 64)
    cache.put(ids, 256)
    assert cache.depth(ids) == 256
    assert [item.state for item in cache.tree.evict_states(1)] == [shallow]


def test_in_split_pools_only_the_kind_that_is_short_goes() -> None:
    cache = Cache(num_slots=3)
    for seed in range(3):
        cache.put(prompt(200, seed), 192)
    evicted = cache.tree.evict_for(0, 2)
    assert [item.kind for item in evicted] == ["state", "state"]
    num_free = cache.books.pages.num_free
    evicted = cache.tree.evict_for(num_free + 5, 0)
    assert {item.kind for item in evicted} == {"leaf"}
    assert cache.books.has_room(num_free + 5, 0)
    assert cache.tree.evict_for(1, 1) == []
    cache.check()


def test_in_one_room_the_oldest_goes_whatever_it_is() -> None:
    cache = Cache(num_slots=3, is_unified=True)
    ids = prompt(200)
    cache.put(ids, 64)
    cache.put(ids, 192)
    evicted = cache.tree.evict_for(cache.books.pages.num_free + 1, 1)
    assert [(item.kind, item.depth) for item in evicted] == [("state", 64), ("leaf", 192)]


def test_nothing_goes_while_the_books_only_lack_a_quiet_moment() -> None:
    cache, ids = Cache(num_slots=1), prompt(200)
    slot = cache.books.slots.take()
    cache.books.hold([], [slot])
    cache.books.slots.release(slot)  # pending: a step in flight may still write there
    cache.put(ids, 192, has_state=False)
    assert not cache.books.has_room(0, 1) and cache.books.is_cramped
    assert cache.tree.evict_for(0, 1) == [] and cache.tree.num_tokens == 192
    cache.books.unhold([], [slot])
    assert cache.books.has_room(0, 1)


def test_a_dropped_namespace_is_gone_at_once_and_its_pages_when_they_are_unpinned() -> None:
    """After a sync of weights nothing of the old policy version is found (miles#2782)."""
    cache, ids = Cache(), prompt(300)
    cache.put(ids, 256)
    cache.put(ids[:128] + prompt(100, 1), 192)
    pin = cache.tree.pin(cache.tree.match(NAME, ids, 200))
    deep = cache.tree.pin(cache.tree.match(NAME, ids, 299))
    cache.tree.drop_namespace(NAME)
    cache.check()
    assert cache.depth(ids) == 0 and cache.tree.num_tokens == 256
    pages = cache.books.pages.take(19)
    assert cache.tree.insert(NAME, ids, 256, pages, state=None, kind="decode", start=deep) == Inserted(0, False, ())
    cache.books.pages.release(pages)
    cache.tree.unpin(pin)
    cache.tree.unpin(deep)
    cache.check()
    assert cache.tree.num_tokens == cache.books.pages.num_used == cache.books.slots.num_used == 0


def test_without_kv_only_states_and_the_way_to_them_are_kept() -> None:
    cache, ids = Cache(has_pages=False), prompt(300)
    assert cache.put(ids, 256, has_state=False)[2] == Inserted(0, False, ())
    cache.put(ids, 128)
    cache.put(ids[:128] + prompt(200, 1), 256)
    match = cache.tree.match(NAME, ids, 299)
    assert (match.depth, match.pages) == (128, ())
    assert cache.tree.num_tokens == 256
    assert [item.depth for item in cache.tree.evict_states(1)] == [256]
    assert cache.tree.num_tokens == 128
    cache.tree.evict_for(0, 20)
    assert cache.tree.num_tokens == 0
    cache.check()


def test_short_prefixes_are_left_out_where_that_is_asked_for() -> None:
    cache, ids = Cache(min_depth=128), prompt(300)
    assert cache.put(ids, 64)[2] == Inserted(0, False, ())
    assert cache.put(ids, 128)[2].is_state_taken


def test_a_page_that_does_not_go_with_the_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="one must be a multiple of the other"):
        Cache(page=48)


@pytest.mark.slow
def test_a_long_prompt_is_matched_fast_in_a_large_tree() -> None:
    """The figure is 5 ms for 100,000 tokens among 10^6; here with room for a busy machine."""
    books = FixedBooks(1, 20_000, 100)
    tree = PrefixTree(Grid(64, 64, 256), 64, books, retention_by_name("turns", interval=256), has_states=True)
    long = prompt(100_000)
    lengths = [100_000, *[10_000] * 90]
    for seed, length in enumerate(lengths):
        ids = long if not seed else long[:5_000] + prompt(length, seed)
        pages, depth = books.pages.take(len(ids) // 64), len(ids) // 64 * 64
        tree.insert(NAME, ids, depth, pages, state=books.slots.take(), kind="turn_end")
        books.pages.release(pages)
    assert tree.num_tokens > 900_000
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert tree.match(NAME, long, 99_999).depth == 99_968
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02
