"""How full an engine is, for a client that can hold back: what runs, what waits, how much of the pool is spoken for.

In: scheduler and memory. Out: a Pressure, and what a throttle policy makes of it: how many more requests to send.
Memory that only the prefix cache holds counts as free: it goes when somebody needs it.
Invariants: shares lie in 0..1; the policy is a pure function, so a client can run it on the numbers of `/server_info`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baltoro.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """One look at an engine.

    active, queued  requests that run and that wait; max_running: how many may run at once
    page_share, slot_share  what requests hold, of the pages and of the slots that could exist
    is_unified      both kinds take from one room, so that their shares add up; otherwise the fuller one counts
    retractions     since the start: if it grows, too much was let in
    """

    active: int
    queued: int
    max_running: int
    page_share: float
    slot_share: float
    is_unified: bool
    retractions: int

    @property
    def pool_share(self) -> float:
        """How full the pool is with what only requests can give back."""
        if self.is_unified:
            return min(1.0, self.page_share + self.slot_share)
        return max(self.page_share, self.slot_share)


def pressure(scheduler: Scheduler) -> Pressure:
    """Now."""
    books, holders = scheduler.memory.books, scheduler.roster.holders()
    pages = len({page for request in holders for page in request.pages})
    slots = sum(request.slot is not None for request in holders)
    return Pressure(
        active=len(scheduler.running),
        queued=len(scheduler.waiting),
        max_running=scheduler.max_running,
        page_share=_share(pages, books.pages.count),
        slot_share=_share(slots, books.slots.count),
        is_unified=scheduler.config.pool == "unified",
        retractions=scheduler.counts.retractions,
    )


def send_room(now: Pressure, before: Pressure | None = None, *, high: float = 0.85, queue: int = 8) -> int:
    """Requests that a client may send now: so many that `queue` wait, and none while the pool is fuller than `high` or
    since `before` (its last look) something had to be retracted."""
    if before is not None and now.retractions > before.retractions:
        return 0
    if now.pool_share >= high:
        return 0
    return max(0, now.max_running - now.active + queue - now.queued)


def _share(used: int, count: int) -> float:
    return min(1.0, used / count) if count else 0.0
