"""Every request by where it is in its life - in line, running, leaving - and the steps from one to the next.

    join ---> waiting ---run---> running ---finish---> gone
                 ^                  |        \\----> leaving ---depart---> gone     (part of a plan in flight)
                 \\----retract------/

In: requests that come, are admitted, lose their memory or end; the scheduler says which and when. Out: who is alive,
who runs, who holds memory.
Invariants: a request is in one place; both lines are in order of precedence; memory of a request in flight is given
back when the last plan it is part of is committed, never before; siblings follow the first one's prompt, and whoever
ends before they forked leaves them to themselves.
Single writer: the scheduler. Source: spec/serving.md B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from baltoro.engine.adapter_version import AdapterVersion
from baltoro.engine.adapters import AdapterBook
from baltoro.engine.memory import Memory
from baltoro.engine.prefix_key import carried_namespace, namespace_of
from baltoro.engine.queue import WaitingLine, insert_in_order, remove_in_order
from baltoro.engine.request import Request, State
from baltoro.errors import InvariantError


@dataclass(slots=True)
class Counts:
    """Totals since the start, for stats."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    finished: int = 0
    aborted: int = 0


class Roster:
    """Who is there. Single writer: the scheduler."""

    def __init__(self, memory: Memory, adapters: AdapterBook, max_waiting: int) -> None:
        self.waiting = WaitingLine(max_waiting)
        self.running: list[Request] = []  # by precedence
        self.leaving: list[Request] = []  # ended, but still part of a plan in flight
        self.counts = Counts()
        self._memory, self._adapters = memory, adapters
        self._alive: dict[str, list[Request]] = {}

    # ---- who is there --------------------------------------------------------------------------------------------
    @property
    def has_alive(self) -> bool:
        return bool(self._alive)

    def is_alive(self, request_id: str) -> bool:
        return request_id in self._alive

    def ids(self) -> tuple[str, ...]:
        """Of all that are alive."""
        return tuple(self._alive)

    def completions(self, request_id: str) -> tuple[Request, ...]:
        """Those of a Submit that have not ended; none of an id that is not known (it may just have ended)."""
        return tuple(self._alive.get(request_id, ()))

    def holders(self) -> list[Request]:
        """All requests that may hold memory: those alive, and those that ended but are still in flight."""
        return [*chain.from_iterable(self._alive.values()), *self.leaving]

    def num_held(self) -> tuple[int, int]:
        """Pages and slots that requests hold."""
        pages = sum(len(r.pages) for r in self.running) + sum(len(r.pages) for r in self.leaving)
        return pages, len(self.running) + len(self.leaving)

    def audit(self) -> None:
        """Errors: LeakError when pages, slots, adapters and requests do not add up."""
        self._memory.audit(self.holders())
        self._adapters.audit(chain.from_iterable(self._alive.values()), self.running)

    # ---- steps of a life -----------------------------------------------------------------------------------------
    def join(self, requests: Sequence[Request]) -> None:
        """The n completions of one Submit, which count as one in the line. Errors: QueueFull."""
        self.waiting.check()
        first, *rest = requests
        self._alive[first.request_id] = list(requests)
        self._adapters.join(requests)
        self.waiting.push(first)
        if first.num_prompt > 1:
            first.forks = rest
        else:
            for request in rest:
                self.waiting.push(request)

    def run(self, request: Request) -> None:
        """`request` has its memory and runs from now on; it is in no line any more."""
        self._adapters.enter(request, self.running)
        request.state = State.RUNNING
        request.num_since_admitted = 0
        insert_in_order(self.running, request)

    def retract(self, victim: Request) -> None:
        """Back to the line without memory; what the cache did not keep of it will be computed again. Errors:
        InvariantError for one in flight."""
        if victim.is_in_flight:
            raise InvariantError(f"request {victim.name} is in flight and cannot be retracted")
        remove_in_order(self.running, victim)
        self._memory.retract(victim)
        victim.state, victim.adapter_slot, victim.num_routed = State.WAITING, 0, 0
        self.waiting.push(victim)

    def finish(self, request: Request) -> None:
        """`request` ends wherever it is. The single point of release: now, or with the last plan it is part of."""
        if request.is_in_flight:
            self.leaving.append(request)
        else:
            self._memory.release(request)
        if not remove_in_order(self.running, request):
            self.waiting.remove(request)
        request.state = State.FINISHED
        group = self._alive[request.request_id]
        group.remove(request)
        if not group:
            del self._alive[request.request_id]
        for child in request.forks:
            if child.state is State.WAITING:
                self.waiting.push(child)
        request.forks = []
        self._adapters.leave(request)

    def depart(self, request: Request) -> None:
        """The last plan of one that is leaving is committed."""
        self.leaving.remove(request)
        self._memory.release(request)

    def carry(self, old: AdapterVersion | None, new: AdapterVersion, policy_version: int) -> int:
        """Requests of `old` (None: of the base) go on with `new`: what they have computed stays as it is, and is kept
        from everybody else's prefixes. Nothing may be in flight. Out: how many."""
        alive = list(chain.from_iterable(self._alive.values()))
        moved = self._adapters.carry(old, new, alive, self.running)
        for request in moved:
            has_old = request.slot is not None or request.hold.backup is not None
            fresh = namespace_of(new.namespace, request.cache_salt, policy_version)
            self._memory.move(request, carried_namespace(new.namespace, request) if has_old else fresh)
        return len(moved)
