"""The step loop: plan -> run -> commit, plain or overlapped.

Plain: one plan at a time. Overlapped: while plan n is on the device, n+1 is made and queued behind it, then n is
committed; the device never waits for the books. What that needs is written in `batch.py`. When the scheduler asks for a
quiet moment (memory can only be had from what is in flight), one plan is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from baltoro.engine.batch import Plan
from baltoro.engine.runner import Ticket
from baltoro.engine.scheduler import Scheduler
from baltoro.protocol.completion import TokenDelta

LOADING_S = 0.0005
"""Pause when all that waits waits for a slower tier: short beside reading a file, long beside a look."""


class Launcher(Protocol):
    """What the loop asks of a runner: plans are run one after the other."""

    def launch(self, plan: Plan) -> Ticket: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that is on the device."""

    plan: Plan
    ticket: Ticket


class Loop:
    """Drives one scheduler and one runner. Single writer: the engine's thread."""

    def __init__(self, scheduler: Scheduler, runner: Launcher, *, is_overlapped: bool) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._is_overlapped = is_overlapped
        self._flight: Flight | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether a step is on the device between two calls."""
        return self._flight is not None

    def step(self) -> list[TokenDelta]:
        """One step; returns all there is to tell, which may be only what was aborted since the last."""
        flight = self._flight or self._launch()
        self._flight = None
        if flight is not None:
            if self._is_overlapped and not self._scheduler.wants_quiet:
                self._flight = self._launch()
            self._scheduler.commit(flight.plan, flight.ticket.wait())
        elif self._scheduler.waiting:
            time.sleep(LOADING_S)
        return self._scheduler.take_deltas()

    def settle(self) -> None:
        """Commit what is in flight, so that nothing is."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._scheduler.commit(flight.plan, flight.ticket.wait())

    def _launch(self) -> Flight | None:
        plan = self._scheduler.plan()
        return None if plan is None else Flight(plan, self._runner.launch(plan))
