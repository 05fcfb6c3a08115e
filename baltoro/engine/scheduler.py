"""plan() and commit(): who gets memory and tokens in a step, and what the step changed. Writes books, moves no bytes.

plan:   decodes first (a page where one is due; when there is none, the last in precedence is retracted), then the rest
        of prompts that are under way, then new admissions, until the token budget is spent.
commit: the only place where requests change because of what a step found; TokenDeltas are born here.

Invariants
- precedence (priority, age) decides everything: the first is never retracted for another, so it always advances;
- nothing is admitted in a step that had to retract;
- a plan may be made while another is in flight: it then goes on from what that one will have done (`num_planned`);
- memory of a request in flight is given back when the last plan it is part of is committed, never before. What can
  only be had from such requests is waited for: `wants_quiet` asks the loop to leave one plan out.
Source: spec/serving.md B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from baltoro.engine.adapters import AdapterBook, AdapterVersion
from baltoro.engine.batch import Found, Plan, PlanBuilder, Result, Span
from baltoro.engine.classes import LongShort
from baltoro.engine.config import EngineConfig
from baltoro.engine.deltas import make_delta
from baltoro.engine.memory import Memory
from baltoro.engine.prefix_key import carried_namespace, namespace_of
from baltoro.engine.queue import Headroom, WaitingLine, insert_in_order, remove_in_order
from baltoro.engine.request import Ending, Request, State
from baltoro.errors import InvariantError, UserError
from baltoro.protocol.completion import TokenDelta

MAX_FLIGHTS = 2
"""A plan names tokens of one plan in flight at most (`Request.drawn_at`)."""
ABORTED = Ending("abort")
NO_NUMBER = Ending("error", error="the model gave no finite logit for this request", error_status=500)
NO_TOKEN_ALLOWED = Ending("error", error="the grammar allows no token here", error_status=500)


@dataclass(slots=True)
class Counts:
    """Totals since the start, for stats."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    finished: int = 0
    aborted: int = 0


class Scheduler:
    """Single writer of requests, pages and slots."""

    def __init__(
        self, config: EngineConfig, memory: Memory, *, max_running: int, adapters: AdapterBook | None = None
    ) -> None:
        self.config = config
        self.memory = memory
        self.max_running = max_running
        self.waiting = WaitingLine(config.max_waiting)
        self.running: list[Request] = []  # by precedence
        self.counts = Counts()
        self.policy_version = 0
        self.wants_quiet = False
        self.is_asleep = False
        self.classes = LongShort(config, memory.books.pages.count * memory.page_size)
        self.adapters = adapters or AdapterBook()
        self._alive: dict[str, list[Request]] = {}
        self._leaving: list[Request] = []  # ended, but still part of a plan in flight
        self._num_flights = 0
        self._is_retraction_due = False
        self._headroom = Headroom()
        self._deltas: list[TokenDelta] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or is to be told; who waits while everything sleeps is no work."""
        return bool((self._alive and not self.is_asleep) or self._deltas or self._leaving)

    def is_alive(self, request_id: str) -> bool:
        return request_id in self._alive

    def alive_ids(self) -> tuple[str, ...]:
        return tuple(self._alive)

    # ---- requests come and go ------------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        """The n completions of one Submit, which count as one in the line: siblings follow the first one's prompt.
        Errors: QueueFull."""
        self.waiting.check()
        first, *rest = requests
        self._alive[first.request_id] = list(requests)
        self.adapters.join(requests)
        self.waiting.push(first)
        if first.num_prompt > 1:
            first.forks = rest
        else:
            for request in rest:
                self.waiting.push(request)

    def abort(self, request_id: str) -> None:
        """End all completions of a request wherever they are; unknown ids are no error (it may just have ended)."""
        for request in list(self._alive.get(request_id, ())):
            if request.is_in_flight:
                request.wish = ABORTED
            else:
                self._finish(request, ABORTED)

    def carry(self, old: AdapterVersion | None, new: AdapterVersion) -> int:
        """Requests of `old` (None: of the base) go on with `new`: what they have computed stays as it is, and is kept
        from everybody else's prefixes. Nothing may be in flight. Out: how many."""
        alive = list(chain.from_iterable(self._alive.values()))
        moved = self.adapters.carry(old, new, alive, self.running)
        for request in moved:
            has_old = request.slot is not None or request.hold.backup is not None
            fresh = namespace_of(new.namespace, request.cache_salt, self.policy_version)
            self.memory.move(request, carried_namespace(new.namespace, request) if has_old else fresh)
        return len(moved)

    def flush(self) -> None:
        """Forget cached prefixes."""
        self.memory.flush()

    def take_deltas(self) -> list[TokenDelta]:
        """What there is to tell since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def audit(self) -> None:
        """Errors: LeakError when pages, slots and requests do not add up."""
        self.memory.audit(self.holders())
        self.adapters.audit(chain.from_iterable(self._alive.values()), self.running)

    def holders(self) -> list[Request]:
        """All requests that may hold memory: those alive, and those that ended but are still in flight."""
        return [*chain.from_iterable(self._alive.values()), *self._leaving]

    # ---- plan ----------------------------------------------------------------------------------------------------
    def plan(self) -> Plan | None:
        """The next step, with its memory reserved; None when nothing can advance now."""
        if self.is_asleep:
            return None
        if self._num_flights >= MAX_FLIGHTS:
            raise InvariantError(f"{self._num_flights} plans are in flight: one must be committed first")
        self.counts.steps += 1
        self.wants_quiet = False
        self.memory.poll()
        self.classes.start_step()
        self._retract_for_debugging()
        before = self.counts.retractions
        self._start_forks()
        builder = PlanBuilder(self.config.max_batch_tokens, self.config.max_logit_rows)
        self._plan_decodes(builder)
        self._plan_prefills(builder)
        if self.counts.retractions == before:
            self._headroom.on_step()
            self._admit(builder)
        if not builder:
            has_more = self.running or self.waiting
            if has_more and not self._num_flights and not any(self.memory.is_loading(r) for r in self.waiting):
                raise InvariantError("requests wait but none can advance")
            return None
        return self._send(builder.build(self.memory, self.adapters.take_installs()))

    def _send(self, plan: Plan) -> Plan:
        self._num_flights += 1
        self.memory.freeze()
        return plan

    def sleep(self) -> Plan:
        """Everybody waits and nothing is held on the device; no plan is made until `wake`. Out: a plan of the copies
        that were still due (backups among them), to be run and committed. Nothing may be in flight."""
        for request in list(reversed(self.running)):
            self._retract(request, is_crowded=False)
        self.memory.leave_device()
        self.is_asleep = True
        return self._send(Plan((), 0, self.memory.collect_moves(), (), self.adapters.take_installs()))

    def wake(self) -> None:
        """Plans are made again."""
        self.is_asleep = False

    def _start_forks(self) -> None:
        """Requests whose shared prompt stands but for its last token: give each sibling a copy to go on from."""
        for parent in [r for r in self.running if r.forks and r.num_remaining == 1 and r.can_advance]:
            self._fork(parent)

    def _fork(self, parent: Request) -> None:
        children, parent.forks = parent.forks, []
        for child in children:
            if len(self.running) < self.max_running and self.memory.fork(parent, child, **self._room()):
                self._run(child)
            else:  # no room to fork: it reads the prompt itself when its turn comes
                self.waiting.push(child)

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        page_size = self.memory.page_size
        for request in list(self.running):
            if not builder.room:
                return
            if request.state is not State.RUNNING or request.num_remaining != 1 or not request.can_advance:
                continue
            has_room = request.num_known <= len(request.pages) * page_size
            if has_room or self._make_room(request):
                builder.add(request, 1)

    def _plan_prefills(self, builder: PlanBuilder) -> None:
        for request in self.running:
            if not builder.room:
                return
            if request.num_remaining > 1 and request.can_advance:
                self._plan_prompt(builder, request)

    def _plan_prompt(self, builder: PlanBuilder, request: Request) -> bool:
        """As much of what is known and not computed as fits; siblings fork before the last token."""
        if request.forks and request.num_remaining == 1:  # the cache had all that they share
            self._fork(request)
        end = len(request.tokens) - 1 if request.forks else len(request.tokens)
        room = self.classes.step_room(request, builder.room, self.waiting)
        length = builder.fit(request, end, room=room)
        if length > 0:
            self.classes.spend(request, length)
            builder.add(request, length)
        return length > 0

    def _admit(self, builder: PlanBuilder) -> None:
        """New requests in order of precedence; a class that has spent its share lets the other pass."""
        while builder.room and len(self.running) < self.max_running:
            request = self.classes.next(self.adapters.ready(self.waiting, self.running), self.running)
            if request is not None and self.memory.must_load(request):
                return
            if request is None or not self.memory.admit(request, **self._room()):
                self.wants_quiet |= self.memory.books.is_cramped
                return
            self.waiting.remove(request)
            self._run(request)
            if not self._plan_prompt(builder, request):
                return

    def _room(self) -> dict[str, int]:
        """Pages and slots that requests hold, and pages to keep back for them."""
        held = sum(len(r.pages) for r in self.running) + sum(len(r.pages) for r in self._leaving)
        slots_held = len(self.running) + len(self._leaving)
        return {
            "held": held,
            "slots_held": slots_held,
            "reserve": self._headroom.reserve(self.running, self.memory.page_size),
        }

    def _run(self, request: Request) -> None:
        self.adapters.enter(request, self.running)
        request.state = State.RUNNING
        request.num_since_admitted = 0
        insert_in_order(self.running, request)

    # ---- retraction ----------------------------------------------------------------------------------------------
    def _make_room(self, request: Request) -> bool:
        """Pages for the next token, taken from the last in precedence if need be; False if that is `request`, or if
        they must be waited for."""
        while not self.memory.grow(request, request.num_known):
            if self._num_flights:
                self.wants_quiet = True
                return False
            if self.memory.shed(reversed(self.running)):
                continue
            victim = self.running[-1]
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _retract(self, victim: Request, *, is_crowded: bool = True) -> None:
        """Back to the line without memory; what the cache did not keep of it will be computed again. `is_crowded`: for
        want of room, which is counted and learnt from."""
        if victim.is_in_flight:
            raise InvariantError(f"request {victim.name} is in flight and cannot be retracted")
        remove_in_order(self.running, victim)
        self.memory.retract(victim)
        victim.state, victim.adapter_slot, victim.num_routed = State.WAITING, 0, 0
        self.waiting.push(victim)
        if is_crowded:
            self.counts.retractions += 1
            self._headroom.on_retract()

    def _retract_for_debugging(self) -> None:
        """Every `retract_every` steps the last in precedence that has advanced since it was admitted."""
        every = self.config.retract_every
        self._is_retraction_due |= bool(every) and self.counts.steps % every == 0
        if not self._is_retraction_due:
            return
        if self._num_flights:
            self.wants_quiet = True
            return
        self._is_retraction_due = False
        for request in reversed(self.running):
            if request.num_since_admitted:
                self._retract(request)
                return

    # ---- commit --------------------------------------------------------------------------------------------------
    def commit(self, plan: Plan, result: Result) -> None:
        """Settle what the step computed: progress, tokens, endings."""
        drawn, scores, routes = iter(result.found), iter(result.scores), iter(result.routes)
        self._num_flights -= 1
        self.memory.thaw()
        for span in plan.spans:
            request = span.request
            request.num_in_flight -= 1
            request.num_scoring -= len(span.targets)
            if not request.num_in_flight:
                request.drawn_at = None
            found = next(drawn) if span.draw is not None else None
            scored = next(scores) if span.targets else None
            routed = next(routes) if span.routes_from is not None else None
            if request.state is State.FINISHED:  # it ended while this step was under way
                if not request.num_in_flight:
                    self._leaving.remove(request)
                    self.memory.release(request)
                continue
            self._advance(request, span)
            if routed is not None and span.routes_from is not None:
                request.keep_routes(span.routes_from, span.end, routed)
            if scored is not None:
                request.prompt_logprobs += scored.logprobs
                request.prompt_tops += scored.tops
            if request.wish is not None:
                self._finish(request, request.wish)
            elif found is not None:
                self._settle(request, span, found)

    def _advance(self, request: Request, span: Span) -> None:
        request.num_computed = span.end
        self.memory.settle(request)
        if span.start < request.num_prompt:
            self.counts.prompt_tokens += min(span.end, request.num_prompt) - span.start

    def _settle(self, request: Request, span: Span, found: Found) -> None:
        """One sampled token: keep it, tell it, end with it."""
        if not found.is_valid:
            is_mask_empty = span.draw is not None and span.draw.allowed and not any(span.draw.allowed)
            self._finish(request, NO_TOKEN_ALLOWED if is_mask_empty else NO_NUMBER)
            return
        self.counts.output_tokens += 1
        try:
            ending = request.take(found.token)
        except UserError as error:  # its stop rule or mask cannot go on
            self._finish(request, Ending("error", error=str(error), error_status=error.status))
            return
        if ending is not None:
            self._finish(request, ending, found)
        else:
            self._deltas.append(make_delta(request, found, None, self._version(request)))

    def _finish(self, request: Request, ending: Ending, found: Found | None = None) -> None:
        """The single point of release: now, or with the last plan it is part of."""
        if request.is_in_flight:
            self._leaving.append(request)
        else:
            self.memory.release(request)
        if not remove_in_order(self.running, request):
            self.waiting.remove(request)
        request.state = State.FINISHED
        group = self._alive[request.request_id]
        group.remove(request)
        if not group:
            del self._alive[request.request_id]
        for child in request.forks:  # whoever ends before its siblings forked leaves them to themselves
            if child.state is State.WAITING:
                self.waiting.push(child)
        request.forks = []
        self.adapters.leave(request)
        self.counts.finished += 1
        self.counts.aborted += ending.reason == "abort"
        self._deltas.append(make_delta(request, found, ending, self._version(request)))

    def _version(self, request: Request) -> int:
        """What a token is told to come from: the adapter's version, or that of the base."""
        return self.policy_version if request.adapter is None else request.adapter.number
