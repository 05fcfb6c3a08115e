"""Host and third tier together: where a prefix is found, and that bytes come back whatever gave way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.cache.disk import DiskTier
from baltoro.cache.host import HostBook
from baltoro.cache.host_entry import HostEntry
from baltoro.cache.host_store import HostShape, HostStore
from baltoro.cache.shape import ArenaLayout, Part
from baltoro.cache.tier import Chain, TierRecord, find_chain, promote, spill

LAYOUT = ArenaLayout((Part((2, 3), torch.float32),), Part((3, 5), torch.bfloat16), 4)
ENDPOINT = 8
BLOCK, STATE = ENDPOINT * 30, LAYOUT.slot_bytes


def key(index: int) -> bytes:
    return b"" if index < 0 else bytes([index]) * 16


def make_store(num_blocks: int, num_states: int) -> tuple[HostBook, HostStore]:
    return HostBook(num_blocks, num_states), HostStore(
        HostShape(BLOCK, STATE, num_blocks, num_states), LAYOUT, ENDPOINT
    )


def write_back(book: HostBook, store: HostStore, tier: DiskTier | None, index: int, *, has_state: bool) -> None:
    """Block `index` of the one chain comes from the device."""
    ticket = book.reserve(key(index), key(index - 1), ENDPOINT * (index + 1), has_state)
    spill(ticket.spilled, store, tier)
    assert ticket.entry is not None
    store.block_bytes(ticket.entry.block)[:] = bytes([index + 1]) * BLOCK
    if ticket.entry.state is not None:
        store.state_bytes(ticket.entry.state)[:] = bytes([index + 101]) * STATE
    book.land(ticket)


def is_right(entry: HostEntry, store: HostStore) -> bool:
    """Whether the slabs of `entry` hold what was written under its digest."""
    index = entry.digest[0]
    is_state_right = entry.state is None or bytes(store.state_bytes(entry.state)) == bytes([index + 101]) * STATE
    return is_state_right and bytes(store.block_bytes(entry.block)) == bytes([index + 1]) * BLOCK


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier.open(tmp_path, 100_000, make_store(1, 1)[1].fingerprint("weights"))


def test_a_chain_is_found_across_host_and_tier(tier: DiskTier) -> None:
    book, store = make_store(2, 1)
    for index in (3, 2, 1, 0):  # the end is evicted from the device first
        write_back(book, store, tier, index, has_state=index % 2 == 1)
    tier.close()
    names = [key(index) for index in range(5)]
    assert find_chain(names, book, tier) == Chain(("host", "host", "tier", "tier"), 4)
    assert find_chain(names, book, None) == Chain(("host", "host"), 2)
    assert find_chain(names[2:], book, None) == Chain((), 0)
    book.drop(key(1))
    assert find_chain(names, book, tier) == Chain(("host",), 0), "a gap ends it, and without a state nothing is usable"


def test_a_hit_ends_at_the_last_state_in_either(tier: DiskTier) -> None:
    book, store = make_store(4, 4)
    write_back(book, store, tier, 0, has_state=False)
    write_back(book, store, tier, 1, has_state=False)
    assert tier.put(TierRecord(key(0), b"", ENDPOINT, b"\1" * BLOCK, b"\x65" * STATE))
    assert find_chain([key(0), key(1)], book, tier) == Chain(("tier", "host"), 1), "the tier alone has the state"
    record = tier.get(key(0))
    assert record is not None and promote(record, book, store, tier)
    assert find_chain([key(0), key(1)], book, tier) == Chain(("host", "host"), 1)
    tier.close()


def test_every_byte_survives_the_way_down_and_up(tier: DiskTier) -> None:
    """A host of two blocks and one state, eight blocks with four states: all of them go down, and come up one by one
    while others make room."""
    book, store = make_store(2, 1)
    for index in range(8):
        write_back(book, store, tier, index, has_state=index % 2 == 0)
    for index in [5, 0, 7, 2, 2, 4, 1, 6, 3, 0]:
        while tier.stats().num_pending_bytes:
            tier.landed()
        record = tier.get(key(index))
        if record is not None:
            assert promote(record, book, store, tier)
        near = book.lookup(key(index))
        assert near is not None and is_right(near, store)
        assert (near.state is not None) == (index % 2 == 0)
        book.audit()
    assert tier.stats().num_refused_total == 0
    tier.close()


def test_what_the_tier_has_is_not_written_again(tier: DiskTier) -> None:
    book, store = make_store(1, 1)
    for index in (0, 1, 0, 1, 0):
        write_back(book, store, tier, index, has_state=True)
    tier.close()
    assert tier.stats().num_written_total == 2


def test_a_promotion_without_room_leaves_all_as_it_was(tier: DiskTier) -> None:
    book, store = make_store(1, 1)
    write_back(book, store, tier, 0, has_state=True)
    pin = book.pin([key(0)])
    assert not promote(TierRecord(key(1), key(0), 16, b"\2" * BLOCK, None), book, store, tier)
    entry = book.lookup(key(0))
    assert entry is not None and is_right(entry, store)
    book.unpin(pin)
    assert promote(TierRecord(key(1), key(0), 16, b"\2" * BLOCK, None), book, store, None)
    assert book.lookup(key(0)) is None
    tier.close()


def test_a_fingerprint_tells_layouts_and_weights_apart_but_not_page_sizes() -> None:
    shape = HostShape(BLOCK, STATE, 1, 1)
    store = HostStore(shape, LAYOUT, ENDPOINT)
    other_page = HostStore(shape, ArenaLayout(LAYOUT.slot_parts, LAYOUT.row, 16), ENDPOINT)
    other_row = HostStore(shape, ArenaLayout(LAYOUT.slot_parts, Part((5, 3), torch.bfloat16), 4), ENDPOINT)
    assert store.fingerprint("a") == other_page.fingerprint("a")
    assert len({store.fingerprint("a"), store.fingerprint("b"), other_row.fingerprint("a")}) == 3
