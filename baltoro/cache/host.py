"""Books of the host tier: which prefixes lie in CPU memory, in which slabs, and who may take their place.

A block holds the KV rows between two hash endpoints, a state is one slot's bytes; both are slabs of one size. An entry
is found by its digest and has a block, and a state if the checkpoint of that depth came along: KV and state move
together. Any key works as a digest, so a retracted request's private backup is an entry like any other.

    reserve() -> Reserved ----copy device to host----> land()      from now on lookup() finds it
                          \\-------- gave up --------> cancel()     as if it had never been asked for

In: digests of what the device evicts, and of what a prompt is looking for. Out: slabs to copy to, entries to copy from,
and what had to make room (for a third tier).
Invariants: an entry is not found until its copies landed; what is pinned, or still being copied to, is not spilled; of
a chain the end goes first; a state may be spilled alone while the KV below it stays, together with a copy of that KV.
Single writer: the scheduler. No bytes here (`host_store.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baltoro.cache.host_entry import HostEntry, HostPin, HostStats, Reserved
from baltoro.cache.lru import LeafLru
from baltoro.errors import LeakError


@dataclass(slots=True)
class _Item:
    parent: bytes
    depth: int
    block: int
    state: int | None = None
    is_block_ready: bool = False
    is_state_ready: bool = False


class HostBook:
    """Entries of the host tier. Single writer: the scheduler."""

    def __init__(self, num_blocks: int, num_states: int) -> None:
        self.num_blocks, self.num_states = num_blocks, num_states
        self._items: dict[bytes, _Item] = {}
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_states = list(range(num_states - 1, -1, -1))
        self._lru = LeafLru()  # entries
        self._state_lru = LeafLru()  # entries with a state that is ready; any of them may lose it
        self._pins: dict[int, HostPin] = {}
        self._in_flight: dict[int, Reserved] = {}
        self._last_receipt = 0
        self._num_landed = self._num_spilled = self._num_refused = 0

    def reserve(self, digest: bytes, parent: bytes, depth: int, has_state: bool) -> Reserved:
        """Room for a block, and a state if `has_state`: all or nothing. What is there already is not asked for again.

        The entry stays unfindable (or without its state) and safe from spilling until land() or cancel().
        """
        item = self._items.get(digest)
        needs_block = item is None
        needs_state = has_state and (item is None or item.state is None)
        can_block = not needs_block or self._free_blocks or self._lru.oldest() is not None
        can_state = not needs_state or self._free_states or self._state_lru.oldest() is not None
        if not (can_block and can_state):
            self._num_refused += 1
            return Reserved(None)
        if item is not None:
            self._hold(digest)  # before anything makes room: it must not be this one
        spilled = []
        if needs_state and not self._free_states:  # first: the block of its entry may become free as well
            spilled.append(self._spill(self._state_lru.oldest()))
        if needs_block and not self._free_blocks:
            spilled.append(self._spill(self._lru.oldest()))
        if item is None:
            item = self._items[digest] = _Item(parent, depth, self._free_blocks.pop())
            self._lru.add(digest, parent or None)
            self._hold(digest)
        if needs_state:
            item.state = self._free_states.pop()
        entry = HostEntry(digest, item.parent, item.depth, item.block, item.state)
        self._last_receipt += 1
        ticket = Reserved(entry, needs_block, needs_state, tuple(spilled), self._last_receipt)
        self._in_flight[ticket.number] = ticket
        self._touch(digest)
        return ticket

    def land(self, ticket: Reserved) -> None:
        """The copies of `ticket` are done: lookup() finds them. Errors: LeakError for a ticket not in flight."""
        digest, item = self._close(ticket)
        item.is_block_ready |= ticket.needs_block
        if ticket.needs_state:
            item.is_state_ready = True
            self._state_lru.add(digest, holds=self._lru.num_holds(digest))
        self._num_landed += ticket.needs_block or ticket.needs_state
        self._remove_if_abandoned(digest, item)

    def cancel(self, ticket: Reserved) -> None:
        """The copies of `ticket` will not come: give its slabs back. A block that was given up takes its entry with
        it, as soon as no other ticket names it. Errors: LeakError for a ticket not in flight."""
        digest, item = self._close(ticket)
        if ticket.needs_state:
            self._remove_state(digest)
        self._remove_if_abandoned(digest, item)

    def lookup(self, digest: bytes) -> HostEntry | None:
        """The entry if it has landed; without its state while that is still on its way. Touches nothing."""
        item = self._items.get(digest)
        if item is None or not item.is_block_ready:
            return None
        return HostEntry(digest, item.parent, item.depth, item.block, item.state if item.is_state_ready else None)

    def lookup_chain(self, digests: Sequence[bytes]) -> tuple[tuple[HostEntry, ...], int]:
        """(entries of the longest unbroken run from digests[0], how many of them reach the last state in it).

        A hit of a model with states is the second: KV beyond the last state cannot be used. Touches nothing.
        """
        entries: list[HostEntry] = []
        num_usable = 0
        for digest in digests:
            entry = self.lookup(digest)
            if entry is None:
                break
            entries.append(entry)
            if entry.state is not None:
                num_usable = len(entries)
        return tuple(entries), num_usable

    def pin(self, digests: Iterable[bytes]) -> HostPin:
        """Keep these entries, their states too, until unpin(); they count as used now. Errors: LeakError for one that
        lookup() does not find, with nothing pinned."""
        digests = tuple(digests)
        for digest in digests:
            if self.lookup(digest) is None:
                raise LeakError(f"{digest.hex()} is not on the host and cannot be pinned")
        for digest in digests:
            self._hold(digest)
            self._touch(digest)
        self._last_receipt += 1
        pin = HostPin(self._last_receipt, digests)
        self._pins[pin.number] = pin
        return pin

    def unpin(self, pin: HostPin) -> None:
        """Errors: LeakError if it was unpinned before."""
        if self._pins.pop(pin.number, None) is None:
            raise LeakError(f"host pin {pin.number} was unpinned twice")
        for digest in pin.digests:
            self._unhold(digest)

    def drop(self, digest: bytes) -> bool:
        """Forget an entry, with or without children; False if there is none. Errors: LeakError if it is pinned or in
        flight."""
        if digest not in self._items:
            return False
        self._remove(digest)
        return True

    def clear(self) -> int:
        """Forget everything that nobody holds; how many entries that were."""
        digests = [digest for digest in self._items if not self._lru.num_holds(digest)]
        for digest in digests:
            self._remove(digest)
        return len(digests)

    def stats(self) -> HostStats:
        return HostStats(
            num_entries=len(self._items),
            num_blocks=self.num_blocks,
            num_blocks_used=self.num_blocks - len(self._free_blocks),
            num_states=self.num_states,
            num_states_used=self.num_states - len(self._free_states),
            num_pinned=self._lru.num_held,
            num_landed_total=self._num_landed,
            num_spilled_total=self._num_spilled,
            num_refused_total=self._num_refused,
        )

    @property
    def num_receipts(self) -> tuple[int, int]:
        """Pins and tickets that are out."""
        return len(self._pins), len(self._in_flight)

    def audit(self) -> None:
        """Every slab is free or has one entry; every hold has a pin or a ticket. Errors: LeakError."""
        blocks = sorted([*self._free_blocks, *(item.block for item in self._items.values())])
        held_states = [item.state for item in self._items.values() if item.state is not None]
        faults = []
        if blocks != list(range(self.num_blocks)):
            faults.append(f"host blocks free or held are {blocks}, not 0..{self.num_blocks - 1} once each")
        if sorted([*self._free_states, *held_states]) != list(range(self.num_states)):
            faults.append(f"host states free {sorted(self._free_states)} and held {sorted(held_states)} do not add up")
        reasons = Counter(digest for pin in self._pins.values() for digest in pin.digests)
        reasons.update(ticket.entry.digest for ticket in self._in_flight.values() if ticket.entry is not None)
        for digest, item in self._items.items():
            holds, wanted = self._lru.num_holds(digest), reasons[digest]
            if holds != wanted:
                faults.append(f"host entry {digest.hex()} has {holds} holds for {wanted} pins and tickets")
            if (digest in self._state_lru) != item.is_state_ready or item.is_state_ready > (item.state is not None):
                faults.append(f"host entry {digest.hex()}: its state is in the wrong list")
            if digest in self._state_lru and self._state_lru.num_holds(digest) != holds:
                faults.append(f"host entry {digest.hex()}: its state is held differently")
        if reasons.keys() - self._items.keys() or len(self._lru) != len(self._items):
            faults.append("pins, tickets or ages name entries that are not there")
        if faults:
            raise LeakError("; ".join(faults))

    def _close(self, ticket: Reserved) -> tuple[bytes, _Item]:
        if ticket.entry is None or self._in_flight.pop(ticket.number, None) is None:
            raise LeakError("a reservation of the host tier was closed twice, or never made")
        self._unhold(ticket.entry.digest)
        return ticket.entry.digest, self._items[ticket.entry.digest]

    def _remove_if_abandoned(self, digest: bytes, item: _Item) -> None:
        # without a block there are no pins: what holds it now are other tickets
        if not item.is_block_ready and not self._lru.num_holds(digest):
            self._remove(digest)

    def _spill(self, digest: bytes | None) -> HostEntry:
        """Make room: the whole entry if it is the end of its chain, its state alone otherwise."""
        assert digest is not None
        entry = self.lookup(digest)
        assert entry is not None, "what may go has landed"
        self._num_spilled += 1
        if self._lru.may_go(digest):
            self._remove(digest)
        else:
            self._remove_state(digest)
        return entry

    def _remove(self, digest: bytes) -> None:
        self._lru.remove(digest)
        self._remove_state(digest)
        self._free_blocks.append(self._items.pop(digest).block)

    def _remove_state(self, digest: bytes) -> None:
        item = self._items[digest]
        if item.state is None:
            return
        if item.is_state_ready:
            self._state_lru.remove(digest)
        self._free_states.append(item.state)
        item.state, item.is_state_ready = None, False

    def _touch(self, digest: bytes) -> None:
        self._lru.touch(digest)
        if digest in self._state_lru:
            self._state_lru.touch(digest)

    def _hold(self, digest: bytes) -> None:
        self._lru.hold(digest)
        if digest in self._state_lru:
            self._state_lru.hold(digest)

    def _unhold(self, digest: bytes) -> None:
        self._lru.unhold(digest)
        if digest in self._state_lru:
            self._state_lru.unhold(digest)
