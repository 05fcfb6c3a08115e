"""Books of the KV pages of a fixed arena: which are free, and how many requests share each.

In: numbers of pages wanted, pages given back. Out: page ids, highest first (pages grow from the arena's high end).
Invariants: page 0 (the sink) is never handed out; a page is free exactly when nobody holds it and no hold keeps it
(`books.py`); taking is all or nothing. Only full pages are shared: a page that is still written to has one holder.
Single writer: the scheduler. No bytes here (`pool.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from baltoro.errors import LeakError, PoolExhausted


class PageBook:
    """Pages first..first+count-1; a `PageStore` whose ids are physical. Single writer: the scheduler."""

    def __init__(self, first: int, count: int) -> None:
        if first < 1:
            raise ValueError("page 0 is the sink")
        self.first, self.count = first, count
        self.is_cramped = False
        self.num_pending = 0
        self._free = list(range(first, first + count))
        self._holders = [0] * count
        self._holds: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free) - self.num_pending

    def take(self, count: int) -> list[int]:
        """`count` free pages. Errors: PoolExhausted, with nothing taken."""
        self.is_cramped = len(self._free) < count <= len(self._free) + self.num_pending
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
            if self._holders[page - self.first]:
                continue
            if self._holds[page]:
                self.num_pending += 1
            else:
                self._free.append(page)

    def hold(self, pages: Iterable[int]) -> None:
        """Keep the bytes of these pages until `unhold`. Errors: LeakError for a page nobody holds."""
        for page in pages:
            if not self.holders(page):
                raise LeakError(f"page {page} is free and cannot be held")
            self._holds[page] += 1

    def unhold(self, pages: Iterable[int]) -> None:
        """End one hold of each. Errors: LeakError for a page that is not held."""
        for page in pages:
            if not self._holds[page]:
                raise LeakError(f"page {page} is not held")
            self._holds[page] -= 1
            if not self._holds[page] and not self.holders(page):
                self.num_pending -= 1
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold `page`. Errors: LeakError for an id outside the book."""
        if not self.first <= page < self.first + self.count:
            raise LeakError(f"page {page} is outside {self.first}..{self.first + self.count - 1}")
        return self._holders[page - self.first]

    def physical(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same ids."""
        return pages

    def used_ids(self) -> tuple[int, ...]:
        """For the audit."""
        return tuple(page for page, holders in enumerate(self._holders, self.first) if holders)

    def faults(self) -> list[str]:
        """For the audit: what does not add up within the book."""
        free = set(self._free)
        faults = (
            [f"the free list of pages holds {len(self._free) - len(free)} twice"] if len(free) < self.num_free else []
        )
        kept = {page for page, holds in self._holds.items() if holds and not self.holders(page)}
        every, used = set(range(self.first, self.first + self.count)), set(self.used_ids())
        if free & (used | kept) or free | used | kept != every or len(kept) != self.num_pending:
            faults.append(f"pages: {len(free)} free, {len(used)} used and {len(kept)} pending are not all {self.count}")
        return faults


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // page_size)
