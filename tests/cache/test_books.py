"""Books of pages and slots against a dictionary, under random operations, audited after each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baltoro.cache.audit import Holding, audit
from baltoro.cache.books import FixedBooks
from baltoro.cache.pages import PageBook, pages_for
from baltoro.cache.slots import SlotBook
from baltoro.errors import LeakError, PoolExhausted

FIRST = 3


class Books(RuleBasedStateMachine):
    """Owners take, share and give back; the dictionary of what each holds is the truth."""

    @initialize(num_pages=st.integers(1, 12), num_slots=st.integers(1, 4))
    def start(self, num_pages: int, num_slots: int) -> None:
        self.books = FixedBooks(FIRST, num_pages, num_slots)
        self.pages, self.slots = self.books.pages, self.books.slots
        self.held: dict[int, tuple[list[int], int]] = {}
        self.next_owner = 0

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        free_pages, free_slots = self.pages.num_free, self.slots.num_free
        try:
            taken = self.pages.take(count)
        except PoolExhausted:
            assert count > free_pages == self.pages.num_free, "a failed taking takes nothing"
            return
        assert len(set(taken)) == count and all(FIRST <= page < FIRST + self.pages.count for page in taken)
        try:
            slot = self.slots.take()
        except PoolExhausted:
            assert free_slots == 0
            self.pages.release(taken)
            return
        assert 1 <= slot <= self.slots.count
        self.held[self.next_owner] = (taken, slot)
        self.next_owner += 1

    @precondition(lambda self: self.held and self.slots.num_free)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages, _ = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.pages.share(prefix)
        self.held[self.next_owner] = (prefix, self.slots.take())
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages, slot = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.pages.release(pages)
        self.slots.release(slot)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "held"):
            return
        audit(self.books, [Holding(str(name), pages, (slot,)) for name, (pages, slot) in self.held.items()])
        counts = Counter(page for pages, _ in self.held.values() for page in pages)
        assert self.pages.num_used == len(counts)
        assert self.slots.num_used == len(self.held)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_is_released_twice_is_named() -> None:
    pages, slots = PageBook(FIRST, 4), SlotBook(2)
    (page,), slot = pages.take(1), slots.take()
    pages.release([page])
    slots.release(slot)
    with pytest.raises(LeakError, match=f"page {page} was released twice"):
        pages.release([page])
    with pytest.raises(LeakError, match=f"slot {slot} was released twice"):
        slots.release(slot)
    with pytest.raises(LeakError, match="cannot be shared"):
        pages.share([page])
    for stranger in (0, FIRST + 4):
        with pytest.raises(LeakError, match="outside"):
            pages.release([stranger])
        with pytest.raises(LeakError, match="outside"):
            slots.release(stranger)


def test_audit_names_the_difference() -> None:
    books = FixedBooks(1, 4, 2)
    taken, slot = books.pages.take(2), books.slots.take()
    with pytest.raises(LeakError, match=r"pages \[\d, \d\]: leaked.*slots \[1\]: leaked"):
        audit(books, [])
    with pytest.raises(LeakError, match="booked for 1 holders, 2 claim it"):
        audit(books, [Holding("a", taken, (slot,)), Holding("b", taken[:1])])
    with pytest.raises(LeakError, match="two owners: a and b"):
        audit(books, [Holding("a", taken, (slot,)), Holding("b", [], (slot,))])
    with pytest.raises(LeakError, match="slots \\[2\\]: claimed, but free"):
        audit(books, [Holding("a", taken, (slot,)), Holding("b", [], (2,))])
    with pytest.raises(LeakError, match="lists a page twice"):
        audit(books, [Holding("a", [*taken, taken[0]], (slot,))])
    audit(books, [Holding("a", taken, (slot,))])


def test_what_is_held_comes_back_only_after_the_last_hold() -> None:
    books = FixedBooks(FIRST, 1, 1)
    (page,), slot = books.pages.take(1), books.slots.take()
    for _ in range(2):
        books.hold([page], [slot])
    books.pages.release([page])
    books.slots.release(slot)
    audit(books, [])
    assert books.pages.num_used == books.slots.num_used == 0
    assert not books.has_room(1, 0) and books.is_cramped
    assert not books.has_room(2, 0) and not books.is_cramped, "not even without holds"
    with pytest.raises(PoolExhausted):
        books.slots.take()
    assert books.is_cramped
    books.unhold([page], [slot])
    assert not books.has_room(0, 1)
    books.unhold([page], [slot])
    audit(books, [])
    assert books.has_room(1, 1) and not books.is_cramped
    assert books.pages.take(1) == [page] and books.slots.take() == slot
    with pytest.raises(LeakError, match="not held"):
        books.unhold([page], [])


def test_pages_come_from_the_high_end_and_slots_from_the_low_end() -> None:
    assert PageBook(5, 4).take(2) == [8, 7]
    slots = SlotBook(3)
    assert [slots.take(), slots.take()] == [1, 2]


def test_page_counts_round_up() -> None:
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
