"""Takes and gives back what requests hold: one state slot each, and the pages of their positions.

In: requests (their tokens say how much they need). Out: their `slot` and `pages`, and the copies that come due.
Invariants: a request holds a slot and pages for all its tokens, or nothing; full prompt pages may be shared between
the forks of one prompt, the page that is written next never is; every taking is all or nothing.
Single writer: the scheduler. The bytes are moved by the runner, along `collect_moves`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from baltoro.cache.audit import Holding, audit
from baltoro.cache.books import Books
from baltoro.cache.pages import pages_for
from baltoro.engine.batch import Move
from baltoro.engine.request import Request
from baltoro.errors import InvariantError


class Memory:
    """Pages and slots of running requests. Single writer: the scheduler."""

    def __init__(self, books: Books, page_size: int, *, is_poisoned: bool = False) -> None:
        self.books = books
        self.pages, self.slots = books.pages, books.slots
        self.page_size = page_size
        self.is_poisoned = is_poisoned
        self._moves: list[Move] = []

    def has_room(self, num_tokens: int, *, reserve: int) -> bool:
        """Whether a slot is free, and pages for `num_tokens` on top of `reserve` pages that others will want."""
        wanted = pages_for(num_tokens, self.page_size)
        return self.slots.num_free > 0 and wanted + reserve <= self.pages.num_free

    def admit(self, request: Request) -> None:
        """A slot, and pages for all tokens so far. Errors: PoolExhausted, with nothing taken."""
        if request.slot is not None or request.pages:
            raise InvariantError(f"request {request.name} is admitted but holds memory already")
        pages = self.pages.take(pages_for(len(request.tokens), self.page_size))
        try:
            request.slot = self.slots.take()
        finally:
            if request.slot is None:
                self.pages.release(pages)
        request.pages = array("q", pages)
        self._poison(pages, request.slot)

    def grow(self, request: Request) -> bool:
        """Pages for the tokens that came since; False, with nothing taken, if none is free."""
        missing = pages_for(len(request.tokens), self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.pages.num_free:
            return False
        pages = self.pages.take(missing)
        request.pages.extend(pages)
        self._poison(pages, None)
        return True

    def fork(self, parent: Request, child: Request, *, reserve: int) -> bool:
        """Let `child` stand where `parent` stands: full pages shared, the rest copied. False if there is no room."""
        num_shared = parent.num_computed // self.page_size
        missing = pages_for(len(child.tokens), self.page_size) - num_shared
        if not self.slots.num_free or missing + reserve > self.pages.num_free:
            return False
        assert parent.slot is not None
        shared, own = parent.pages[:num_shared], self.pages.take(missing)
        self.pages.share(shared)
        child.pages = shared + array("q", own)
        child.slot = self.slots.take()
        child.num_computed = parent.num_computed
        self._poison(own, child.slot)
        self._moves.append(Move("copy_slot", child.slot, parent.slot))
        if parent.num_computed % self.page_size:
            self._moves.append(Move("copy_page", own[0], parent.pages[num_shared]))
        return True

    def release(self, request: Request) -> None:
        """Give everything back; harmless for a request that holds nothing."""
        self.pages.release(request.pages)
        request.pages = array("q")  # a new one: spans in flight keep the old
        if request.slot is not None:
            self.slots.release(request.slot)
            request.slot = None
        request.num_computed = 0

    def collect_moves(self) -> tuple[Move, ...]:
        """The copies that came due since the last call, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def audit(self, requests: Iterable[Request]) -> None:
        """Compare the books with what `requests` (all that live) hold. Errors: LeakError."""
        audit(self.books, [Holding(r.name, r.pages, () if r.slot is None else (r.slot,)) for r in requests])

    def _poison(self, pages: Iterable[int], slot: int | None) -> None:
        if not self.is_poisoned:
            return
        self._moves += [Move("poison_page", page) for page in pages]
        if slot is not None:
            self._moves.append(Move("poison_slot", slot))
