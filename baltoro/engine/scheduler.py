"""plan() and commit(): who gets memory and tokens in a step, and what the step changed. Writes books, moves no bytes.

plan:   decodes first (a page where one is due; when there is none, the last in precedence is retracted), then the rest
        of prompts that are under way, then new admissions, until the token budget is spent.
commit: the only place where requests change because of what a step found; TokenDeltas are born here.

Invariants
- precedence (priority, age) decides everything: the first is never retracted for another, so it always advances;
- nothing is admitted in a step that had to retract;
- a plan may be made while another is in flight: it then goes on from what that one will have done (`num_planned`);
- memory that can only be had from requests in flight is waited for: `wants_quiet` asks the loop to leave one plan out.
Where requests are, and how they get there: `roster.py`; who gives way: `retraction.py`.
Source: spec/serving.md B.
"""

from __future__ import annotations

from collections.abc import Sequence

from baltoro.engine.adapter_version import AdapterVersion
from baltoro.engine.adapters import AdapterBook
from baltoro.engine.batch import Found, Plan, Result, Span
from baltoro.engine.classes import LongShort
from baltoro.engine.config import EngineConfig
from baltoro.engine.deltas import make_delta
from baltoro.engine.memory import Memory
from baltoro.engine.plan_builder import PlanBuilder
from baltoro.engine.request import Ending, Request, State
from baltoro.engine.retraction import Retraction
from baltoro.engine.roster import Roster
from baltoro.errors import InvariantError, UserError
from baltoro.protocol.completion import TokenDelta

MAX_FLIGHTS = 2
"""A plan names tokens of one plan in flight at most (`Request.drawn_at`)."""
ABORTED = Ending("abort")
NO_NUMBER = Ending("error", error="the model gave no finite logit for this request", error_status=500)
NO_TOKEN_ALLOWED = Ending("error", error="the grammar allows no token here", error_status=500)


class Scheduler:
    """Single writer of requests, pages and slots. `waiting`, `running`, `counts` are the roster's."""

    def __init__(
        self, config: EngineConfig, memory: Memory, *, max_running: int, adapters: AdapterBook | None = None
    ) -> None:
        self.config = config
        self.memory = memory
        self.max_running = max_running
        self.policy_version = 0
        self.is_asleep = False
        self.classes = LongShort(config, memory.books.pages.count * memory.page_size)
        self.adapters = adapters or AdapterBook()
        self.roster = Roster(memory, self.adapters, config.max_waiting)
        self.waiting, self.running, self.counts = self.roster.waiting, self.roster.running, self.roster.counts
        self.retraction = Retraction(self.roster, memory, config.retract_every)
        self._num_flights = 0
        self._deltas: list[TokenDelta] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or is to be told; who waits while everything sleeps is no work."""
        return bool((self.roster.has_alive and not self.is_asleep) or self._deltas or self.roster.leaving)

    @property
    def wants_quiet(self) -> bool:
        """Whether the last plan lacked what can only be had when nothing is in flight."""
        return self.retraction.wants_quiet

    # ---- requests come and go ------------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        """The n completions of one Submit, which count as one in the line: siblings follow the first one's prompt.
        Errors: QueueFull."""
        self.roster.join(requests)

    def abort(self, request_id: str) -> None:
        """End all completions of a request wherever they are; unknown ids are no error (it may just have ended)."""
        for request in self.roster.completions(request_id):
            if request.is_in_flight:
                request.wish = ABORTED
            else:
                self._finish(request, ABORTED)

    def carry(self, old: AdapterVersion | None, new: AdapterVersion) -> int:
        """Requests of `old` (None: of the base) go on with `new`: what they have computed stays as it is, and is kept
        from everybody else's prefixes. Nothing may be in flight. Out: how many."""
        return self.roster.carry(old, new, self.policy_version)

    def flush(self) -> None:
        """Forget cached prefixes."""
        self.memory.flush()

    def take_deltas(self) -> list[TokenDelta]:
        """What there is to tell since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def audit(self) -> None:
        """Errors: LeakError when pages, slots, adapters and requests do not add up."""
        self.roster.audit()

    # ---- plan ----------------------------------------------------------------------------------------------------
    def plan(self) -> Plan | None:
        """The next step, with its memory reserved; None when nothing can advance now."""
        if self.is_asleep:
            return None
        if self._num_flights >= MAX_FLIGHTS:
            raise InvariantError(f"{self._num_flights} plans are in flight: one must be committed first")
        self.counts.steps += 1
        self.retraction.wants_quiet = False
        self.memory.poll()
        self.classes.start_step()
        self.retraction.retract_for_debugging(self.counts.steps, is_in_flight=self._num_flights > 0)
        before = self.counts.retractions
        self._start_forks()
        builder = PlanBuilder(self.config.max_batch_tokens, self.config.max_logit_rows)
        self._plan_decodes(builder)
        self._plan_prefills(builder)
        if self.counts.retractions == before:
            self.retraction.headroom.on_step()
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
            self.roster.retract(request)
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
                self.roster.run(child)
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
            if has_room or self.retraction.make_room(request, is_in_flight=self._num_flights > 0):
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
                self.retraction.wants_quiet |= self.memory.books.is_cramped
                return
            self.waiting.remove(request)
            self.roster.run(request)
            if not self._plan_prompt(builder, request):
                return

    def _room(self) -> dict[str, int]:
        """Pages and slots that requests hold, and pages to keep back for them."""
        held, slots_held = self.roster.num_held()
        reserve = self.retraction.headroom.reserve(self.running, self.memory.page_size)
        return {"held": held, "slots_held": slots_held, "reserve": reserve}

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
                    self.roster.depart(request)
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
        self.roster.finish(request)
        self.counts.finished += 1
        self.counts.aborted += ending.reason == "abort"
        self._deltas.append(make_delta(request, found, ending, self._version(request)))

    def _version(self, request: Request) -> int:
        """What a token is told to come from: the adapter's version, or that of the base."""
        return self.policy_version if request.adapter is None else request.adapter.number
