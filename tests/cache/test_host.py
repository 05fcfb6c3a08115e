"""Books of the host tier against a plain account of every entry, under random operations, audited after each."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baltoro.cache.host import HostBook
from baltoro.cache.host_entry import HostEntry, Reserved
from baltoro.errors import LeakError

NUM_CHAINS, CHAIN = 3, 5


def key(chain: int, index: int) -> bytes:
    """Digest of a block of one of a few chains; block 0 has the empty parent."""
    return b"" if index < 0 else bytes([chain, index])


def place(book: HostBook, chain: int, index: int, *, has_state: bool) -> Reserved:
    """An entry that has landed."""
    ticket = book.reserve(key(chain, index), key(chain, index - 1), 64 * (index + 1), has_state)
    assert ticket.entry is not None
    book.land(ticket)
    return ticket


@dataclass
class Account:
    """What the test knows of one entry."""

    parent: bytes
    used: int
    has_state: bool = False
    state_used: int = 0
    is_ready: bool = False
    is_state_ready: bool = False
    holds: int = 0
    tickets: list[Reserved] = field(default_factory=list)


class HostModel(RuleBasedStateMachine):
    """Every answer of the book is foretold by walking over all accounts."""

    @initialize(num_blocks=st.integers(1, 6), num_states=st.integers(0, 3))
    def start(self, num_blocks: int, num_states: int) -> None:
        self.book = HostBook(num_blocks, num_states)
        self.accounts: dict[bytes, Account] = {}
        self.pins: list[object] = []
        self.now = 0

    def leaves(self) -> list[bytes]:
        parents = {account.parent for account in self.accounts.values()}
        return [name for name, a in self.accounts.items() if not a.holds and name not in parents]

    def oldest_leaf(self) -> bytes | None:
        return min(self.leaves(), key=lambda name: self.accounts[name].used, default=None)

    def oldest_state(self) -> bytes | None:
        names = [name for name, a in self.accounts.items() if a.is_state_ready and not a.holds]
        return min(names, key=lambda name: self.accounts[name].state_used, default=None)

    def touch(self, name: bytes) -> None:
        self.now += 1
        self.accounts[name].used = self.now
        if self.accounts[name].is_state_ready:
            self.accounts[name].state_used = self.now

    def make_room(self, needs_block: bool, needs_state: bool) -> list[bytes] | None:
        """Names that have to give way, taken out of the accounts; None if there can be no room."""
        num_states = sum(account.has_state for account in self.accounts.values())
        lacks_block = needs_block and len(self.accounts) == self.book.num_blocks
        lacks_state = needs_state and num_states == self.book.num_states
        if (lacks_block and self.oldest_leaf() is None) or (lacks_state and self.oldest_state() is None):
            return None
        gone = []
        if lacks_state:
            name = self.oldest_state()
            assert name is not None
            gone.append(name)
            if name in self.leaves():
                del self.accounts[name]
            else:
                self.accounts[name].has_state = self.accounts[name].is_state_ready = False
        if needs_block and len(self.accounts) == self.book.num_blocks:
            name = self.oldest_leaf()
            assert name is not None
            gone.append(name)
            del self.accounts[name]
        return gone

    @rule(chain=st.integers(0, NUM_CHAINS - 1), index=st.integers(0, CHAIN - 1), has_state=st.booleans())
    def reserve(self, chain: int, index: int, has_state: bool) -> None:
        name, parent = key(chain, index), key(chain, index - 1)
        known = self.accounts.get(name)
        needs_block, needs_state = known is None, has_state and not (known and known.has_state)
        if known:
            known.holds += 1
        gone = self.make_room(needs_block, needs_state)
        ticket = self.book.reserve(name, parent, index + 1, has_state)
        if gone is None:
            assert ticket == Reserved(None)
            if known:
                known.holds -= 1
            return
        assert ticket.entry is not None
        assert (ticket.needs_block, ticket.needs_state) == (needs_block, needs_state)
        assert [entry.digest for entry in ticket.spilled] == gone
        account = self.accounts.setdefault(name, Account(parent, 0, holds=1))
        account.has_state |= needs_state
        account.tickets.append(ticket)
        self.touch(name)

    def tickets(self) -> list[tuple[bytes, Reserved]]:
        return [(name, ticket) for name, account in sorted(self.accounts.items()) for ticket in account.tickets]

    def close(self, data: st.DataObject) -> tuple[bytes, Account, Reserved]:
        name, ticket = data.draw(st.sampled_from(self.tickets()))
        account = self.accounts[name]
        account.tickets = [other for other in account.tickets if other != ticket]
        account.holds -= 1
        return name, account, ticket

    @precondition(lambda self: self.tickets())
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        name, account, ticket = self.close(data)
        self.book.land(ticket)
        account.is_ready |= ticket.needs_block
        if ticket.needs_state:
            account.is_state_ready = True
            self.now += 1
            account.state_used = self.now
        if not account.is_ready and not account.tickets:
            del self.accounts[name]

    @precondition(lambda self: self.tickets())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name, account, ticket = self.close(data)
        self.book.cancel(ticket)
        account.has_state &= not ticket.needs_state
        if not account.is_ready and not account.tickets:
            del self.accounts[name]

    @rule(data=st.data(), chain=st.integers(0, NUM_CHAINS - 1), length=st.integers(1, CHAIN))
    def pin(self, data: st.DataObject, chain: int, length: int) -> None:
        names = [key(chain, index) for index in range(length)]
        if not all(name in self.accounts and self.accounts[name].is_ready for name in names):
            with pytest.raises(LeakError, match="not on the host"):
                self.book.pin(names)
            return
        self.pins.append(self.book.pin(names))
        for name in names:
            self.accounts[name].holds += 1
            self.touch(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.book.unpin(pin)
        for name in pin.digests:
            self.accounts[name].holds -= 1
        with pytest.raises(LeakError, match="twice"):
            self.book.unpin(pin)

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.accounts)))
        if self.accounts[name].holds:
            with pytest.raises(LeakError, match="held"):
                self.book.drop(name)
        else:
            assert self.book.drop(name)
            assert not self.book.drop(name)
            del self.accounts[name]

    @precondition(lambda self: len(self.accounts) > 4)
    @rule()
    def clear(self) -> None:
        names = [name for name, account in self.accounts.items() if not account.holds]
        assert self.book.clear() == len(names)
        for name in names:
            del self.accounts[name]

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "accounts"):
            return
        self.book.audit()
        assert self.book.stats().num_entries == len(self.accounts)
        for chain in range(NUM_CHAINS):
            names = [key(chain, index) for index in range(CHAIN)]
            found = [self.book.lookup(name) for name in names]
            for name, entry in zip(names, found, strict=True):
                account = self.accounts.get(name)
                assert (entry is not None) == (account is not None and account.is_ready)
                assert entry is None or (entry.state is not None) == self.accounts[name].is_state_ready
            run = found.index(None) if None in found else CHAIN
            entries, num_usable = self.book.lookup_chain(names)
            assert list(entries) == found[:run]
            assert num_usable == max((i + 1 for i, e in enumerate(entries) if e.state is not None), default=0)


TestHostModel = HostModel.TestCase
TestHostModel.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.mark.nightly
def test_host_books_under_many_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(HostModel, settings=settings(max_examples=2000, stateful_step_count=50, deadline=None))


def test_a_hit_ends_at_the_last_state_though_kv_goes_on() -> None:
    """KV of 128 tokens and a state at 64 only are a hit of 64."""
    book = HostBook(4, 2)
    place(book, 0, 0, has_state=True)
    place(book, 0, 1, has_state=False)
    entries, num_usable = book.lookup_chain([key(0, 0), key(0, 1), key(0, 2)])
    assert [entry.depth for entry in entries] == [64, 128]
    assert entries[num_usable - 1].depth == 64


def test_nothing_is_found_before_its_copies_landed() -> None:
    book = HostBook(2, 2)
    ticket = book.reserve(b"a", b"", 64, True)
    assert book.lookup(b"a") is None
    book.land(ticket)
    first = book.lookup(b"a")
    assert first is not None and first.state is not None
    with pytest.raises(LeakError, match="closed twice"):
        book.land(ticket)


def test_a_state_that_comes_later_joins_its_block() -> None:
    book = HostBook(2, 2)
    place(book, 0, 0, has_state=False)
    ticket = book.reserve(key(0, 0), b"", 64, True)
    assert (ticket.needs_block, ticket.needs_state) == (False, True)
    found = book.lookup(key(0, 0))
    assert found is not None and found.state is None, "the state is not there yet, the block is"
    book.land(ticket)
    found = book.lookup(key(0, 0))
    assert found == ticket.entry
    again = book.reserve(key(0, 0), b"", 64, True)
    assert not again.needs_block and not again.needs_state


def test_a_chain_is_spilled_from_its_end() -> None:
    book = HostBook(3, 0)
    for index in range(3):
        place(book, 0, index, has_state=False)
    gone = [place(book, 1, index, has_state=False).spilled for index in range(3)]
    assert [entry.digest for entries in gone for entry in entries] == [key(0, 2), key(0, 1), key(0, 0)]


def test_a_child_may_arrive_before_its_parent() -> None:
    book = HostBook(3, 0)
    for index in (2, 1, 0):
        place(book, 0, index, has_state=False)
    (gone,) = place(book, 1, 0, has_state=False).spilled
    assert gone.digest == key(0, 2), "the oldest and the end"
    assert book.lookup_chain([key(0, 0), key(0, 1)])[0]


def test_a_state_in_the_middle_is_spilled_with_its_kv_and_the_kv_stays() -> None:
    book = HostBook(4, 1)
    place(book, 0, 0, has_state=True)
    place(book, 0, 1, has_state=False)
    ticket = place(book, 1, 0, has_state=True)
    assert ticket.spilled == (HostEntry(key(0, 0), b"", 64, 0, 0),)
    assert ticket.entry is not None and ticket.entry.state == 0, "the slab changed hands"
    stays = book.lookup(key(0, 0))
    assert stays is not None and stays.block == 0 and stays.state is None


def test_pinned_entries_are_refused_and_nothing_gives_way() -> None:
    """A retracted request's backup waits for its owner, whatever else comes."""
    book = HostBook(2, 1)
    backup = b"request 7"
    book.land(book.reserve(backup, b"", 37, True))
    pin = book.pin([backup])
    place(book, 0, 0, has_state=False)
    assert book.reserve(key(1, 0), b"", 64, True) == Reserved(None), "no state: the block must not be taken either"
    assert book.lookup(key(0, 0)) is not None
    with pytest.raises(LeakError, match="held"):
        book.drop(backup)
    book.unpin(pin)
    assert book.drop(backup)
    assert book.stats().num_refused_total == 1
    book.audit()


def test_a_block_given_up_takes_a_waiting_state_with_it() -> None:
    book = HostBook(1, 1)
    block = book.reserve(b"a", b"", 64, False)
    state = book.reserve(b"a", b"", 64, True)
    book.cancel(block)
    book.land(state)
    assert book.lookup(b"a") is None
    assert book.stats().num_blocks_used == book.stats().num_states_used == 0
    book.audit()


def test_audit_names_what_does_not_add_up() -> None:
    book = HostBook(2, 1)
    place(book, 0, 0, has_state=True)
    book._free_blocks.append(0)
    book._free_states.append(0)
    with pytest.raises(
        LeakError, match=r"host blocks free or held are \[0, 0, 1\].*host states free \[0\] and held \[0\]"
    ):
        book.audit()
