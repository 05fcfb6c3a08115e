"""The waiting line, and how much memory to keep back for those that run already.

In: requests that are new or were retracted. Out: the next one to admit, by precedence (priority, then age).
Invariants: the order is strict, so nobody is overtaken by a later request of equal priority; a retracted request is
never refused for a full line, and comes before everything younger than itself.
Single writer: the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from baltoro.cache.pages import pages_for
from baltoro.engine.request import Request
from baltoro.errors import QueueFull


class WaitingLine:
    """Waiting requests in order of precedence. Single writer: the scheduler."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def check(self) -> None:
        """Errors: QueueFull if one more would not fit."""
        if len(self._line) >= self.limit:
            raise QueueFull(f"{len(self._line)} requests are waiting, the limit is {self.limit}: try again later")

    def push(self, request: Request) -> None:
        insert_in_order(self._line, request)

    def head(self) -> Request | None:
        return self._line[0] if self._line else None

    def remove(self, request: Request) -> bool:
        """Take `request` out; False if it is not in the line."""
        return remove_in_order(self._line, request)


class Headroom:
    """Estimates how many pages running requests will still take: a share of what they may write at most.

    The share is learnt: a retraction says that it was too small, every quiet step lets it sink again. A request that is
    admitted too early costs its victim a whole prefill, one admitted too late only waits.
    """

    START, LOWEST, ON_RETRACT, DECAY = 0.3, 0.05, 0.2, 0.998
    # A request that may write without limit says nothing about what it will write.
    LONGEST_TOKENS = 4096

    def __init__(self) -> None:
        self.share = self.START

    def on_step(self) -> None:
        self.share = max(self.LOWEST, self.share * self.DECAY)

    def on_retract(self) -> None:
        self.share = min(1.0, self.share + self.ON_RETRACT)

    def reserve(self, running: Iterable[Request], page_size: int) -> int:
        """Pages to keep back for `running`."""
        tokens = sum(min(r.max_tokens - r.num_output, self.LONGEST_TOKENS) for r in running)
        return pages_for(int(tokens * self.share), page_size)


def insert_in_order(line: list[Request], request: Request) -> None:
    """Insert into a list that is sorted by precedence."""
    insort(line, request, key=_precedence)


def remove_in_order(line: list[Request], request: Request) -> bool:
    """Remove from a list that is sorted by precedence; False if it is not there."""
    at = bisect_left(line, request.precedence, key=_precedence)
    if at == len(line) or line[at] is not request:
        return False
    del line[at]
    return True


def _precedence(request: Request) -> tuple[int, int, int]:
    return request.precedence
