"""Takes pages and slots from the books and lists every copy that comes due, all in one order.

In: wishes of requests and of the prefix cache (virtual ids). Out: virtual ids, and the plan's moves (physical ids).
Invariants: copies are listed in the order in which the books changed, so running them in that order is right; a page
is zeroed when it is handed out (masked rows may still be multiplied, and zero times NaN is NaN), or filled with NaN
where debugging asks for it; a slot is not: a span from position 0 ignores what it finds there.
Single writer: the scheduler, through `memory.py` and `prefix.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from baltoro.cache.books import Books
from baltoro.engine.batch import Move


class Ledger:
    """Books, and the copies due since the last plan. Single writer: the scheduler."""

    def __init__(self, books: Books, page_size: int, *, is_poisoned: bool = False) -> None:
        self.books = books
        self.page_size = page_size
        self._is_poisoned = is_poisoned
        self._moves: list[Move] = []

    def take_pages(self, count: int) -> list[int]:
        """`count` clean pages. Errors: PoolExhausted, with nothing taken."""
        if not count:
            return []
        pages = self.books.pages.take(count)
        self._drain()
        kind = "poison_page" if self._is_poisoned else "zero_page"
        self._moves += [Move(kind, page) for page in self.physical_pages(pages).tolist()]  # type: ignore[arg-type]
        return pages

    def take_slot(self) -> int:
        """A slot with anything in it. Errors: PoolExhausted."""
        slot = self.books.slots.take()
        self._drain()
        if self._is_poisoned:
            self._moves.append(Move("poison_slot", self.books.slots.physical(slot)))
        return slot

    def copy_slot(self, source: int, target: int) -> None:
        """Virtual ids."""
        physical = self.books.slots.physical
        self._moves.append(Move("copy_slot", physical(target), physical(source)))

    def copy_page(self, source: int, target: int) -> None:
        """Virtual ids."""
        at = self.physical_pages((source, target)).tolist()
        self._moves.append(Move("copy_page", at[1], at[0]))

    def note(self, move: Move) -> None:
        """List another copy; its physical ids are right now."""
        self._moves.append(move)

    def physical_pages(self, pages: Sequence[int]) -> np.ndarray:
        """int64."""
        return self.books.pages.physical(np.array(pages, dtype=np.int64))

    def release(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """One holder less for each page; the slots are free."""
        self.books.pages.release(pages)
        for slot in slots:
            self.books.slots.release(slot)

    def collect(self) -> tuple[Move, ...]:
        """The copies that came due since the last call, in order."""
        self._drain()
        moves, self._moves = tuple(self._moves), []
        return moves

    def _drain(self) -> None:
        for move in self.books.take_moves():
            kind = "copy_slot" if move.kind == "slot" else "copy_page"
            self._moves.append(Move(kind, move.target, move.source))  # type: ignore[arg-type]
