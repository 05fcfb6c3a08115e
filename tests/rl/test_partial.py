"""The book of partial rollout against simulated rounds: its share, its order, its cap, its bound on starvation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.errors import InvariantError
from baltoro.rl.config import PartialConfig
from baltoro.rl.partial import Book, Key, Order
from baltoro.rl.types import Group, Trajectory

BUDGET = 400
# heavy-tailed: most are short, some are fifty times as long
LENGTHS = st.lists(st.one_of(st.integers(1, 8), st.integers(1, 40), st.integers(100, BUDGET)), min_size=60, max_size=60)


def _group(number: int, size: int) -> list[Trajectory]:
    return [Trajectory(task=f"t{number}", group=number, index=n, prompt=(number,)) for n in range(size)]


@dataclass
class World:
    """An engine of `slots` rows that says one token a beat in each, and a loop that keeps `num_active` active."""

    config: PartialConfig
    lengths: Sequence[int]
    size: int
    num_active: int
    slots: int
    book: Book = field(init=False)
    version: int = 0
    num_groups: int = 0
    beats: list[int] = field(default_factory=list)
    entered: dict[Key, int] = field(default_factory=dict)  # the round in which it was first active
    ended: dict[Key, int] = field(default_factory=dict)
    shares: list[tuple[int, int]] = field(default_factory=list)  # (ended, active) of each round
    used: list[tuple[int, Group]] = field(default_factory=list)  # (version at use, group)
    orders: list[list[Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = Book(self.config)

    def length(self, key: Key) -> int:
        return self.lengths[(key[0] * self.size + key[1]) % len(self.lengths)]

    def round(self) -> None:
        going = [t.key for t in self.book.pending() if t.status in ("paused", "running")]
        fresh: list[Trajectory] = []
        while len(going) + len(fresh) + self.size <= self.num_active or not (going or fresh):
            fresh += _group(self.num_groups, self.size)
            self.num_groups += 1
        orders = self.book.begin(self.version, fresh)
        self.orders.append(orders)
        left = {order.key: self.length(order.key) - (len(order.ids) - 1) for order in orders}
        for key in left:
            self.entered.setdefault(key, len(self.beats))
        beats, num_active = 0, len(left)
        while not self.book.is_over():
            beats += 1
            for key in list(left)[: self.slots]:
                self.book.say(key, [1], [-0.5], self.version)
                left[key] -= 1
            for key in [key for key in list(left)[: self.slots] if not left[key]]:
                del left[key]
                self.book.finish(key)
                self.book.judge(key, 1.0)
                self.ended[key] = len(self.beats)
        self.shares.append((num_active - len(left), num_active))
        assert set(self.book.stop()) == set(left)
        self.beats.append(beats)
        self.used += [(self.version, group) for group in self.book.take(self.version)]
        self.version += 1


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.integers(1, 4), st.integers(4, 12), st.integers(0, 6))
def test_nobody_starves(lengths: list[int], share: float, size: int, num_active: int, spare: int) -> None:
    """Whoever is resumed runs in every beat of its round, so it is at its end after as many rounds as its length has
    tokens of a round, and the one in which it came in. So many rows must the engine have as may be left over."""
    num_active = max(num_active, size)
    slots = max(1, num_active - math.ceil(share * num_active)) + spare
    config = PartialConfig(share=share, max_tokens=BUDGET, max_staleness=1000)
    world = World(config, lengths, size, num_active, slots)
    for _ in range(8):
        world.round()
    for key, entered in world.entered.items():
        last = world.ended.get(key, len(world.beats))
        full = world.beats[entered + 1 : last + 1]
        if full:
            assert last - entered <= math.ceil(world.length(key) / min(full))


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([0.3, 0.5, 0.9, 1.0]), st.integers(1, 4), st.integers(4, 12))
def test_a_round_ends_at_its_share_and_not_before(lengths: list[int], share: float, size: int, num_active: int) -> None:
    config = PartialConfig(share=share, max_tokens=BUDGET, max_staleness=1000)
    world = World(config, lengths, size, max(num_active, size), 1)  # one at a time: it can be hit exactly
    for _ in range(6):
        world.round()
    assert all(ended == math.ceil(share * active) for ended, active in world.shares)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 4), st.integers(0, 3), st.integers(1, 12))
def test_finish_first_keeps_every_group_within_the_cap(
    lengths: list[int], share: float, size: int, cap: int, slots: int
) -> None:
    """Whatever the lengths: nothing is dropped, and nothing that is used is too old. Cap 0 is strictly on-policy."""
    config = PartialConfig(share=share, max_tokens=BUDGET, max_staleness=cap)
    world = World(config, lengths, size, 8, slots)
    for _ in range(8):
        world.round()
    for version, group in world.used:
        assert all(t.status == "complete" and t.staleness(version) <= cap for t in group.members)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([0.25, 0.5]), st.integers(1, 4), st.integers(0, 2))
def test_drop_marks_exactly_what_is_older_than_the_cap(lengths: list[int], share: float, size: int, cap: int) -> None:
    config = PartialConfig(share=share, max_tokens=BUDGET, max_staleness=cap, stale="drop")
    world = World(config, lengths, size, 8, 8)
    for _ in range(8):
        world.round()
    for version, group in world.used:
        for t, score in zip(group.members, group.scores, strict=True):
            assert (t.status == "stale") == (t.staleness(version) > cap) == (score is None)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 4), st.integers(1, 12))
def test_every_token_is_used_once_and_the_old_go_first(lengths: list[int], share: float, size: int, slots: int) -> None:
    world = World(PartialConfig(share=share, max_tokens=BUDGET), lengths, size, 8, slots)
    for _ in range(8):
        world.round()
    taken = [t for _, group in world.used for t in group.members]
    keys = [t.key for t in (*taken, *world.book.pending())]
    assert sorted(keys) == sorted(world.entered) and len(set(keys)) == len(keys)
    assert all(len(t.tokens) == world.length(t.key) and t.key in world.ended for t in taken)
    for number, orders in enumerate(world.orders):
        is_fresh = [world.entered[order.key] == number for order in orders]
        assert is_fresh == sorted(is_fresh)
        assert [order.key for order in orders] == sorted(order.key for order in orders)
        assert all(order.max_tokens == BUDGET - (len(order.ids) - 1) for order in orders)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from([0.25, 0.5]), st.integers(1, 7))
def test_a_book_from_a_checkpoint_goes_on_as_the_first_would_have(lengths: list[int], share: float, at: int) -> None:
    def run(is_killed: bool) -> World:
        world = World(PartialConfig(share=share, max_tokens=BUDGET), lengths, 3, 9, 6)
        for number in range(8):
            if is_killed and number == at:
                world.book = Book.restored(world.config, world.book.state())
            world.round()
        return world

    plain, killed = run(False), run(True)
    assert plain.used == killed.used and plain.orders == killed.orders and plain.book.state() == killed.book.state()


def _begun(**settings: Any) -> Book:
    book = Book(PartialConfig(**({"share": 0.5, "max_tokens": 10} | settings)))
    book.begin(5, _group(0, 2))
    return book


def test_modes_are_data() -> None:
    """reprefill always starts anew; carry goes on with the state of the version that began it, if it is still there."""
    for resume, expected in (("reprefill", [None, None]), ("carry", [5, None])):
        book = _begun(resume=resume)
        for version in (5, 6):
            book.say((0, 1), [8], [-1.0], version)
            if version == 5:
                book.finish((0, 0))
            assert book.stop() == [(0, 1)]
            if version == 6:
                book.forget_states()
            (order,) = book.begin(version + 1)
            assert order.state_version == expected[version - 5]
            assert order.ids == (0, *(8,) * (version - 4)) and order.max_tokens == 10 - (version - 4)
        assert book.pending()[1].sampled_versions == (5, 6)


def test_a_budget_is_for_life() -> None:
    book = _begun()
    book.say((0, 0), [1] * 6, [0.0] * 6, 5)
    book.hear((0, 0), [2] * 50)
    book.say((0, 0), [1] * 3, [0.0] * 3, 5)
    with pytest.raises(InvariantError, match="after 9 of 10"):
        book.say((0, 0), [1] * 2, [0.0] * 2, 5)
    book.say((0, 0), [1], [0.0], 5)
    assert book.stop() == [(0, 1)]
    ended = book.pending()[0]
    assert ended.status == "complete" and ended.is_truncated and ended.num_sampled == 10


def test_a_failure_is_excluded_and_ends_the_wait_for_it() -> None:
    book = _begun()
    book.fail((0, 0), "sandbox_lost")
    assert book.is_over()
    book.say((0, 1), [1], [0.0], 5)
    book.finish((0, 1))
    assert not book.take(5)  # there is no verdict yet
    book.judge((0, 1), 1.0, answer="4", reason="right")
    (group,) = book.take(5)
    assert group.scores == (None, 1.0) and group.members[0].reason == "sandbox_lost"
    assert not book.take(5) and not book.pending()


def test_a_verdict_may_come_rounds_later_and_the_cap_is_measured_then() -> None:
    for late, status in ((2, "complete"), (3, "stale")):
        book = Book(PartialConfig(max_staleness=2))
        book.begin(0, _group(0, 1))
        book.say((0, 0), [1], [0.0], 0)
        book.finish((0, 0))
        book.stop()
        book.judge((0, 0), 1.0)
        assert [t.status for g in book.take(late) for t in g.members] == [status]


def test_a_round_cut_off_by_a_crash_is_paused() -> None:
    book = _begun(resume="carry")
    book.say((0, 1), [8], [-1.0], 5)
    again = Book.restored(book.config, book.state())
    assert not again.is_open and [t.status for t in again.pending()] == ["paused"] * 2
    orders = again.begin(5)
    assert [(o.ids, o.state_version) for o in orders] == [((0,), None), ((0, 8), None)]


def test_what_the_book_cannot_believe_is_refused() -> None:
    book = _begun()
    with pytest.raises(InvariantError, match="version 4"):
        book.say((0, 0), [1], [0.0], 4)
    with pytest.raises(InvariantError, match="does not run"):
        book.say((1, 0), [1], [0.0], 5)
    with pytest.raises(InvariantError, match="nothing to judge"):
        book.judge((0, 0), 1.0)
    with pytest.raises(InvariantError, match="open: True"):
        book.begin(6)
    book.finish((0, 0))
    with pytest.raises(InvariantError, match="does not run"):
        book.finish((0, 0))
    book.stop()
    for fresh in (_group(0, 2), _group(1, 2)[1:], [*_group(1, 1), *_group(1, 1)]):
        with pytest.raises(InvariantError, match="fresh group"):
            book.begin(6, fresh)
    with pytest.raises(InvariantError, match="no round"):
        book.is_over()
    with pytest.raises(InvariantError, match="without trajectories"):
        Book(PartialConfig()).begin(0)
