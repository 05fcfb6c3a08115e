"""Books of the KV pages: which are free, and how many requests share each.

In: numbers of pages wanted, pages given back. Out: page ids, highest first (pages grow from the arena's high end).
Invariants: page 0 (the sink) is never handed out; a page is free exactly when nobody holds it; taking is all or
nothing. Only full pages are shared: a page that is still written to has one holder.
Single writer: the scheduler. No bytes here (`pool.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from baltoro.errors import LeakError, PoolExhausted


class PageBook:
    """Pages first..first+count-1. Single writer: the scheduler."""

    def __init__(self, first: int, count: int) -> None:
        if first < 1:
            raise ValueError("page 0 is the sink")
        self.first, self.count = first, count
        self._free = list(range(first, first + count))
        self._holders = [0] * count

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages. Errors: PoolExhausted, with nothing taken."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} KV pages wanted, {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page - self.first] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each. Errors: LeakError for a page nobody holds."""
        for page in pages:
            if not self.holders(page):
                raise LeakError(f"page {page} is free and cannot be shared")
            self._holders[page - self.first] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each; the last one frees it. Errors: LeakError for a page nobody holds."""
        for page in pages:
            if not self.holders(page):
                raise LeakError(f"page {page} was released twice")
            self._holders[page - self.first] -= 1
            if not self._holders[page - self.first]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold `page`. Errors: LeakError for an id outside the book."""
        if not self.first <= page < self.first + self.count:
            raise LeakError(f"page {page} is outside {self.first}..{self.first + self.count - 1}")
        return self._holders[page - self.first]

    def free_ids(self) -> tuple[int, ...]:
        """For the audit."""
        return tuple(self._free)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // page_size)
