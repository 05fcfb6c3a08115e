"""Who gives way when memory runs out: the last in precedence goes back to the line, so that the first always advances.

In: a request that needs pages for its next token. Out: whether it has them; requests retracted; pages to be kept back
for those that run (`Headroom`, which learns from every retraction).
Invariants: nobody is retracted for one that comes after; what requests hold only for others goes first; one in flight
is never retracted: `wants_quiet` then asks the loop to leave one plan out.
Single writer: the scheduler. Source: spec/serving.md B.
"""

from __future__ import annotations

from baltoro.engine.memory import Memory
from baltoro.engine.queue import Headroom
from baltoro.engine.request import Request
from baltoro.engine.roster import Roster


class Retraction:
    """Takes memory back. `every`: for debugging, retract somebody every so many steps. Single writer: the scheduler."""

    def __init__(self, roster: Roster, memory: Memory, every: int) -> None:
        self.wants_quiet = False
        self.headroom = Headroom()
        self._roster, self._memory, self._every = roster, memory, every
        self._is_due = False

    def make_room(self, request: Request, *, is_in_flight: bool) -> bool:
        """Pages for the next token, taken from the last in precedence if need be; False if that is `request`, or if
        they must be waited for: `is_in_flight` says whether any plan is."""
        running = self._roster.running
        while not self._memory.grow(request, request.num_known):
            if is_in_flight:
                self.wants_quiet = True
                return False
            if self._memory.shed(reversed(running)):
                continue
            victim = running[-1]
            self.retract(victim)
            if victim is request:
                return False
        return True

    def retract(self, victim: Request) -> None:
        """For want of room, which is counted and learnt from."""
        self._roster.retract(victim)
        self._roster.counts.retractions += 1
        self.headroom.on_retract()

    def retract_for_debugging(self, num_steps: int, *, is_in_flight: bool) -> None:
        """Every `every` steps the last in precedence that has advanced since it was admitted."""
        self._is_due |= bool(self._every) and num_steps % self._every == 0
        if not self._is_due:
            return
        if is_in_flight:
            self.wants_quiet = True
            return
        self._is_due = False
        for request in reversed(self._roster.running):
            if request.num_since_admitted:
                self.retract(request)
                return
