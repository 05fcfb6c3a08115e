"""The host tier as the prefix cache uses it: put aside what the device gives up, find it again, bring it back.

Write-back: a prefix goes to host memory only when it is evicted from the device. KV and state of a block move together.
All copies are moves of a plan on the forward stream; an entry can be found once the plan that wrote it is committed.
What the host has to give up goes on to a third tier, if there is one, which works behind its own thread.

In: what the tree evicted; prompts that are about to be admitted; requests that lose their memory. Out: Finds, Backups,
moves in the ledger.
Invariants: what is found is pinned until the plan that loads it is committed; a backup is complete or not there.
Single writer: the scheduler, through `prefix.py`. Source: spec/serving.md A.8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from baltoro.cache.evict import Evicted
from baltoro.cache.host import HostBook
from baltoro.cache.host_entry import HostEntry, HostPin, Reserved
from baltoro.cache.host_store import HostStore
from baltoro.cache.tier import Tier, promote, spill
from baltoro.engine.batch import Move
from baltoro.engine.ledger import Ledger
from baltoro.engine.request import HostBackup, Request
from baltoro.errors import LeakError


@dataclass(frozen=True, slots=True)
class Find:
    """Blocks on the host that continue what the device has, in order, pinned; the state of the last one counts."""

    entries: tuple[HostEntry, ...]
    pin: HostPin


class HostTier:
    """Books and moves of the host tier. Single writer: the scheduler."""

    def __init__(self, book: HostBook, store: HostStore, ledger: Ledger, *, third: Tier | None = None) -> None:
        self.book, self.store, self.third = book, store, third
        self._ledger = ledger
        self._new: list[Reserved] = []  # listed since the last plan
        self._flights: deque[tuple[list[Reserved], list[HostPin], list[Reserved]]] = deque()
        self._pins: list[HostPin] = []
        self._spent: list[Reserved] = []  # backups that the next plan reads
        self._asked: set[bytes] = set()  # of the third tier
        self.num_loaded_tokens = 0

    # ---- going down ------------------------------------------------------------------------------------------------
    def put_aside(self, evicted: Sequence[Evicted]) -> None:
        """List copies of what has just left the tree; its bytes are whole until something is taken."""
        for one in evicted:
            ticket = self._reserve(one.digest, one.parent_digest, one.depth, has_state=one.state is not None)
            if ticket.entry is None:
                continue
            if ticket.needs_block and one.page_places:
                row = (one.depth - self.store.endpoint) % self._ledger.page_size
                move = Move(
                    "save_block", ticket.entry.block, pages=one.page_places, row=row, num_rows=self.store.endpoint
                )
                self._ledger.note(move)
            if ticket.needs_state:
                assert ticket.entry.state is not None and one.state_place is not None
                self._ledger.note(Move("save_state", ticket.entry.state, one.state_place))
            self._new.append(ticket)

    def back_up(self, request: Request) -> HostBackup | None:
        """List copies of all that a request holds; None, with nothing done, if the host has no room."""
        assert request.slot is not None
        num_tokens, step = request.num_computed, self.store.endpoint
        name, parent = request.name.encode(), b""
        tickets: list[Reserved] = []
        for first in range(0, num_tokens, step):
            key = blake2b(name, digest_size=16, salt=first.to_bytes(8, "little"), person=b"backup").digest()
            last = min(first + step, num_tokens)
            ticket = self._reserve(key, parent, last, has_state=last == num_tokens)
            if ticket.entry is None:
                for other in tickets:
                    self.book.cancel(other)
                return None
            tickets.append(ticket)
            parent = key
        for ticket in tickets:
            self._save(request, ticket, step)
        return HostBackup(num_tokens, tuple(tickets))

    def _save(self, request: Request, ticket: Reserved, step: int) -> None:
        entry = ticket.entry
        assert entry is not None and request.slot is not None
        first = (entry.depth - 1) // step * step
        self._ledger.note(self._block_move("save_block", request, entry, first))
        if ticket.needs_state:
            assert entry.state is not None
            self._ledger.note(Move("save_state", entry.state, self._ledger.books.slots.physical(request.slot)))

    # ---- coming up -------------------------------------------------------------------------------------------------
    def find(self, digests: Sequence[bytes], num_known: int, *, has_states: bool) -> Find | None:
        """How far the host carries a prompt on: blocks of `digests` in order, of which the device still has the KV of
        the first `num_known`. None if not to any further state."""
        entries: list[HostEntry | None] = []
        best = 0
        for at, digest in enumerate(digests):
            entry = self.book.lookup(digest)
            if entry is None and at >= num_known:
                break
            entries.append(entry)
            if entry is not None and (entry.state is not None or not has_states):
                best = len(entries)
        found = [
            entry
            for at, entry in enumerate(entries[:best])
            if entry is not None and (at >= num_known or at + 1 == best)
        ]
        if not found:
            return None
        return Find(tuple(found), self.book.pin(entry.digest for entry in found))

    def prefetch(self, digests: Sequence[bytes], num_known: int, *, has_states: bool) -> set[bytes]:
        """Ask the third tier for what only it has of a prompt (arguments as `find`); those that are on their way."""
        if self.third is None:
            return set()
        wanted: list[tuple[int, bytes]] = []
        best = 0
        for at, digest in enumerate(digests):
            near, far = self.book.lookup(digest), self.third.lookup(digest)
            if near is None and self.third.is_landing(digest):
                return {digest}  # wait until it is written: what lies behind it is told then
            if near is None and far is None and at >= num_known:
                break
            has_near = near is not None and near.state is not None
            has_far = far is not None and far.has_state
            if has_near or has_far or ((near or far) and not has_states):
                best = at + 1
            if far is not None and (near is None or (has_far and not has_near)):
                wanted.append((at, digest))
        asked = set()
        for at, digest in wanted:
            is_of_use = at < best and (at >= num_known or at + 1 == best)
            if is_of_use and (digest in self._asked or self.third.prefetch(digest)):
                asked.add(digest)
        self._asked |= asked
        if asked:  # they count as used now, so that what comes does not push out the rest of its own prefix
            self.book.unpin(self.book.pin(digest for digest in digests[:best] if self.book.lookup(digest)))
        return asked

    def poll(self) -> None:
        """Bring up what the third tier has read."""
        if self.third is None:
            return
        for done in self.third.landed():
            if done.kind == "get" and done.digest in self._asked:  # else it was forgotten meanwhile
                self._asked.discard(done.digest)
                if done.record is not None:
                    promote(done.record, self.book, self.store, self.third)

    def is_asked(self, digests: set[bytes]) -> bool:
        """Whether any of these is still on its way."""
        third = self.third
        return not self._asked.isdisjoint(digests) or (third is not None and any(map(third.is_landing, digests)))

    def load(self, request: Request, find: Find, first_depth: int) -> None:
        """List copies into the request's own memory: KV beyond `first_depth`, and the last state."""
        step = self.store.endpoint
        for entry in find.entries:
            if entry.depth > first_depth:
                self._ledger.note(self._block_move("load_block", request, entry, entry.depth - step))
                self.num_loaded_tokens += step
        self._load_state(request, find.entries[-1])
        self._pins.append(find.pin)

    def restore(self, request: Request, backup: HostBackup) -> None:
        """List copies of a backup into new memory; it is gone once the plan is committed."""
        step = self.store.endpoint
        for ticket in backup.tickets:
            assert ticket.entry is not None
            first = (ticket.entry.depth - 1) // step * step
            self._ledger.note(self._block_move("load_block", request, ticket.entry, first))
        last = backup.tickets[-1].entry
        assert last is not None
        self._load_state(request, last)
        self._spent += backup.tickets

    def forget(self, backup: HostBackup) -> None:
        """A backup is not needed any more. Copies into it that are still listed are harmless: until they are made,
        nothing else is written there that a reader could expect."""
        self._spent += backup.tickets

    def leave(self, find: Find) -> None:
        """What was found is not wanted after all."""
        self.book.unpin(find.pin)

    # ---- plans -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """A plan takes along everything that was listed."""
        self._flights.append((self._new, self._pins, self._spent))
        self._new, self._pins, self._spent = [], [], []

    def end(self) -> None:
        """The oldest plan in flight is committed: what it wrote can be found, what it read may go."""
        tickets, pins, spent = self._flights.popleft()
        for ticket in tickets:
            self.book.land(ticket)
        for pin in pins:
            self.book.unpin(pin)
        for ticket in spent:
            self.book.cancel(ticket)

    def flush(self) -> None:
        """Forget everything that nobody holds. What is listed to be written, or on its way up, will not be found."""
        self._spent += self._new
        self._new = []
        self._asked.clear()
        self.book.clear()
        if self.third is not None:
            self.third.clear()

    def close(self) -> None:
        """Finish what is pending in the third tier."""
        if self.third is not None:
            self.third.close()

    def audit(self, backups: Iterable[HostBackup | None]) -> None:
        """The books add up, and every receipt that is out is in `backups`, listed or in flight. Errors: LeakError."""
        self.book.audit()
        tickets = len(self._new) + len(self._spent) + sum(len(new) + len(spent) for new, _, spent in self._flights)
        tickets += sum(len(backup.tickets) for backup in backups if backup is not None)
        pins = len(self._pins) + sum(len(pins) for _, pins, _ in self._flights)
        if (pins, tickets) != self.book.num_receipts:
            raise LeakError(f"{self.book.num_receipts} host pins and tickets are out, {(pins, tickets)} are held")

    # ---- helpers ---------------------------------------------------------------------------------------------------
    def _reserve(self, digest: bytes, parent: bytes, depth: int, *, has_state: bool) -> Reserved:
        if not self.store.shape.num_states:
            has_state = False
        ticket = self.book.reserve(digest, parent, depth, has_state)
        spill(ticket.spilled, self.store, self.third)
        return ticket

    def _block_move(self, kind: str, request: Request, entry: HostEntry, first: int) -> Move:
        """Rows first..entry.depth-1 of a request, to or from the entry's block."""
        size = self._ledger.page_size
        pages = request.pages[first // size : -(-entry.depth // size)]
        places = tuple(self._ledger.physical_pages(pages).tolist())
        rows = entry.depth - first
        if kind == "save_block":
            return Move("save_block", entry.block, pages=places, row=first % size, num_rows=rows)
        return Move("load_block", 0, entry.block, pages=places, row=first % size, num_rows=rows)

    def _load_state(self, request: Request, entry: HostEntry) -> None:
        if entry.state is not None and request.slot is not None:
            self._ledger.note(Move("load_state", self._ledger.books.slots.physical(request.slot), entry.state))
