"""Takes and gives back what requests hold: one working slot each, and the pages of their positions.

In: requests (their tokens say how much they need). Out: their `slot` and `pages`, and the copies that come due.
Invariants: a request holds a slot and pages for all its tokens, or nothing; full pages may be shared, with forks of the
same prompt and with the prefix cache, the page that is written next never is (but by the cache, which reads only what
lies before); every taking is all or nothing, after the cache has given up what it can.
Single writer: the scheduler. The bytes are moved by the runner, along `collect_moves`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from baltoro.cache.audit import Holding, audit
from baltoro.cache.pages import pages_for
from baltoro.engine.batch import Move
from baltoro.engine.ledger import Ledger
from baltoro.engine.lookup import Found
from baltoro.engine.plan_builder import Draft
from baltoro.engine.prefix import PrefixCache
from baltoro.engine.request import DueSnapshot, Places, Request
from baltoro.errors import InvariantError, LeakError


class Memory:
    """Pages and slots of running requests. Single writer: the scheduler."""

    def __init__(self, ledger: Ledger, cache: PrefixCache | None = None) -> None:
        self.ledger, self.cache = ledger, cache
        self.books = ledger.books
        self.page_size = ledger.page_size

    # ---- room ----------------------------------------------------------------------------------------------------
    def admit(self, request: Request, *, held: int, slots_held: int, reserve: int) -> bool:
        """A slot, and pages for all tokens so far; what the cache has of them is found instead of computed. False,
        with nothing taken, when there is no room. `held`, `slots_held`: pages and slots of requests;
        `reserve`: pages kept for them."""
        if request.slot is not None or request.pages:
            raise InvariantError(f"request {request.name} is admitted but holds memory already")
        if self.cache is None:
            return self._enter(request, Found(), held, slots_held, reserve)
        found = self.cache.lookup.find(request)
        if self._enter(request, found, held, slots_held, reserve):
            return True
        self.cache.lookup.leave(found)
        if held or not found.depth or request.hold.backup is not None:
            return False
        # Nobody else holds anything: what is pinned for the hit itself is in the way. Without it there is always room.
        return self._enter(request, self.cache.lookup.nothing(request), held, slots_held, reserve)

    def _enter(self, request: Request, found: Found, held: int, slots_held: int, reserve: int) -> bool:
        num_full = min(found.device_depth // self.page_size, len(found.pages))  # none where there is no KV
        wanted = pages_for(len(request.tokens), self.page_size) - num_full
        if not self._can_have(wanted, held, slots_held, reserve) or not self._make_room(wanted, 1):
            return False
        self.books.pages.share(found.pages[:num_full])
        own = self.ledger.take_pages(wanted)
        request.slot = self.ledger.take_slot()
        request.pages = array("q", [*found.pages[:num_full], *own])
        request.num_computed = request.num_planned = found.depth
        if self.cache is not None:
            self.cache.enter(request, found, own)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Pages for `num_tokens`; False, with nothing taken, if they cannot be had."""
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        if not self._make_room(missing, 0):
            return False
        request.pages.extend(self.ledger.take_pages(missing))
        return True

    def fork(self, parent: Request, child: Request, *, held: int, slots_held: int, reserve: int) -> bool:
        """Let `child` stand where `parent` stands: full pages shared, the rest copied. False if there is no room."""
        assert parent.slot is not None
        num_shared, rest = divmod(parent.num_planned, self.page_size)
        missing = pages_for(len(child.tokens), self.page_size) - num_shared
        if not self._can_have(missing, held, slots_held, reserve) or not self._make_room(missing, 1):
            return False
        shared = parent.pages[:num_shared]
        self.books.pages.share(shared)
        own = self.ledger.take_pages(missing)
        child.pages = shared + array("q", own)
        child.slot = self.ledger.take_slot()
        child.num_computed = child.num_planned = parent.num_planned
        child.hold.num_cached = parent.hold.num_cached
        self.ledger.copy_slot(parent.slot, child.slot)
        if rest:
            self.ledger.copy_page(parent.pages[num_shared], own[0])
        return True

    def release(self, request: Request) -> None:
        """Give everything back, the cache keeping what is worth it; harmless for a request that holds nothing."""
        if request.is_in_flight:
            raise InvariantError(f"request {request.name} is in flight and cannot lose its memory")
        if request.slot is not None:
            if self.cache is not None:
                self.cache.keep(request)
            slots = [] if request.slot is None else [request.slot]
            self.ledger.release(request.pages, slots)
        elif self.cache is not None:
            self.cache.forget(request)
        request.pages = array("q")
        request.slot = request.places = None
        request.num_computed = request.num_planned = 0

    def shed(self, requests: Iterable[Request]) -> bool:
        """Let the first of `requests` that holds anything only for the cache let go of it; whether there was one."""
        return self.cache is not None and any(self.cache.shed(request) for request in requests)

    def retract(self, request: Request) -> None:
        """Take everything from a running request; the host may keep a copy."""
        if self.cache is not None:
            self.cache.back_up(request)
        self.release(request)

    def _can_have(self, num_pages: int, held: int, slots_held: int, reserve: int) -> bool:
        """Whether `num_pages` and a reserve on top are free or could be taken from the cache, which holds at least what
        requests do not. (Only an estimate: taking may still fail, softly.)"""
        if not held and not slots_held:
            return True  # all there is can be had
        pages, slots = self.books.pages, self.books.slots
        cached = max(0, pages.num_used - held) + max(0, slots.num_used - slots_held) * self.books.pages_per_slot
        return num_pages + reserve <= pages.num_free + cached

    def _make_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether so many can be taken now, after the cache has given up what it must."""
        if self.books.has_room(num_pages, num_slots):
            return True
        if self.cache is not None:
            self.cache.give_up(num_pages, num_slots)
        return self.books.has_room(num_pages, num_slots)

    # ---- one plan ------------------------------------------------------------------------------------------------
    def snapshots(self, draft: Draft) -> tuple[DueSnapshot, ...]:
        """States to be kept on the way through this span, with slots taken for them."""
        return () if self.cache is None else self.cache.snapshots(draft)

    def after(self, draft: Draft, taken: tuple[DueSnapshot, ...]) -> list[Move]:
        """Copies of a decode's snapshots, behind the layers."""
        if not draft.is_decode or not taken:
            return []
        assert draft.request.slot is not None
        source = self.physical_slot(draft.request.slot)
        return [Move("copy_slot", self.physical_slot(due.slot), source) for due in taken]

    def physical_slot(self, slot: int) -> int:
        return self.books.slots.physical(slot)

    def places(self, request: Request, end: int) -> tuple[int, np.ndarray]:
        """Physical slot of `request`, and int64 the pages that hold its first `end` positions. Looked up again only
        when a block was moved or the request got more pages."""
        places, num_moves = request.places, self.books.num_moves
        if places is None or places.num_moves != num_moves or len(places.pages) != len(request.pages):
            assert request.slot is not None
            pages = self.ledger.physical_pages(request.pages)
            places = request.places = Places(num_moves, self.books.slots.physical(request.slot), pages)
        return places.slot, places.pages[: -(-end // self.page_size)]

    def freeze(self) -> None:
        """A plan is in flight: what it names may not be moved."""
        self.books.freeze()
        if self.cache is not None and self.cache.tier is not None:
            self.cache.tier.start()

    def thaw(self) -> None:
        """A plan is committed."""
        self.books.thaw()
        if self.cache is not None and self.cache.tier is not None:
            self.cache.tier.end()

    def must_load(self, request: Request) -> bool:
        """Whether a request that is about to be admitted should wait for a slower tier instead."""
        return self.cache is not None and self.cache.lookup.must_load(request)

    def poll(self) -> None:
        """Pick up what arrived from slower tiers."""
        if self.cache is not None and self.cache.tier is not None:
            self.cache.tier.poll()

    def is_loading(self, request: Request) -> bool:
        """Whether a waiting request waits for a prefix on its way up from a slower tier."""
        return self.cache is not None and self.cache.lookup.is_loading(request)

    def collect_moves(self) -> tuple[Move, ...]:
        """The copies that came due since the last call, in order."""
        return self.ledger.collect()

    def settle(self, request: Request) -> None:
        """A step of `request` is done up to num_computed: its snapshots have landed and may be found."""
        if self.cache is not None:
            self.cache.settle(request)

    # ---- books ---------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Forget every prefix that nobody stands on."""
        if self.cache is not None:
            self.cache.flush()

    def leave_device(self) -> None:
        """Nobody runs any more: forget every prefix of the device. Errors: LeakError if something is still held."""
        if self.cache is not None:
            self.cache.leave_device()
        if self.books.pages.num_used or self.books.slots.num_used:
            raise LeakError(f"{self.books.pages.num_used} pages, {self.books.slots.num_used} slots are held by nobody")

    def move(self, request: Request, namespace: bytes) -> None:
        """Prefixes of `request` are found under `namespace` from now on."""
        if self.cache is not None:
            self.cache.move(request, namespace)
        request.namespace = namespace

    def close(self) -> None:
        """Finish what slower tiers are writing."""
        if self.cache is not None and self.cache.tier is not None:
            self.cache.tier.close()

    def audit(self, requests: Iterable[Request]) -> None:
        """Compare the books with what `requests` (all that are alive or leaving) and the cache say they hold, and add
        the cache up. Errors: LeakError."""
        holdings, holds = [], []
        for request in requests:
            hold = request.hold
            holds.append(hold)
            slots = [due.slot for due in (*hold.due, hold.tracked) if due is not None]
            slots += [] if request.slot is None else [request.slot]
            holdings.append(Holding(request.name, request.pages, slots))
        if self.cache is not None:
            self.cache.audit(holds)
            holdings += self.cache.holdings()
        audit(self.books, holdings)
