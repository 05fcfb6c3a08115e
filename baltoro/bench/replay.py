"""Replays a trace against the real Scheduler and Memory, without a model and without bytes: the books alone.

A runner that computes nothing answers each plan with the tokens that the trace wants, and says how long the step would
have taken: `step_s` and `token_s` for each token. Time is that clock; the plans are those of a real engine.

In: a trace, an EngineConfig, a model's shape. Out: a Replayed: totals, one Outcome a request, samples over time.
Not there: host and disk tiers; time for the copies of a plan.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from baltoro.bench.books_runner import DEFAULT_COST, BooksRunner, StepCost
from baltoro.bench.replay_plan import CHUNK, plan_replay
from baltoro.bench.trace import TraceRequest, TraceText
from baltoro.cache.shape import ArenaLayout
from baltoro.engine.assemble import build_books
from baltoro.engine.config import EngineConfig
from baltoro.engine.loop import Loop
from baltoro.engine.memory import Memory
from baltoro.engine.planner import MemoryPlan, arena_layout
from baltoro.engine.prefix_key import namespace_of
from baltoro.engine.request import Request
from baltoro.engine.scheduler import Scheduler
from baltoro.model.config import K3Config
from baltoro.protocol.sampling import SamplingParams

MAX_SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request fared. Times in seconds of the replay's clock; `num_cached` at its first admission."""

    id: str
    label: str
    arrival: float
    ended: float
    num_prompt: int
    num_output: int
    num_cached: int
    num_retracted: int
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one moment."""

    time_s: float
    running: int
    waiting: int
    slots: int
    pages: int
    tree_states: int
    tree_pages: int
    gap_bytes: int
    moves: int
    lookup_tokens: int
    hit_tokens: int
    retractions: int


@dataclass(slots=True)
class Replayed:
    """What a replay found. `computed_tokens`: prompt tokens that went through the model, again after a retraction."""

    plan: MemoryPlan
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0
    time_s: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    retractions: int = 0
    moves: int = 0
    superseded: int = 0
    evicted_states: int = 0
    evicted_nodes: int = 0
    held_bytes: float = 0.0  # by the tree, mean over steps
    peak_held_bytes: int = 0

    def totals(self) -> dict[str, Any]:
        """Everything but the lists, for a table and a record."""
        left_out = ("plan", "outcomes", "samples")
        found: dict[str, Any] = {key: value for key, value in asdict(self).items() if key not in left_out}
        done = [one for one in self.outcomes if not one.is_refused]
        return {
            "requests": len(self.outcomes),
            "refused": len(self.outcomes) - len(done),
            "without_retraction": sum(not one.num_retracted for one in done),
            **found,
            "hit_share": self.hit_tokens / max(1, sum(one.num_prompt for one in done)),
            "computed_share": self.computed_tokens / max(1, self.prompt_tokens),
        }


class Replay:
    """One trace on one engine without a model."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: EngineConfig,
        model: K3Config,
        *,
        dtype: torch.dtype = torch.bfloat16,
        cost: StepCost = DEFAULT_COST,
        plan: MemoryPlan | None = None,
    ) -> None:
        """`plan`: instead of what the planner makes of `config`. Errors: ConfigError."""
        self._layout = arena_layout(model, dtype, config.page_size, has_routes=config.keeps_routed_experts)
        plan = plan or plan_replay(config, model, self._layout, dtype)
        self._memory = build_books(config, self._layout, plan, chunk=CHUNK)
        self._scheduler = Scheduler(config, self._memory, max_running=plan.max_running)
        self._outputs: dict[str, array[int]] = {}
        self._runner = BooksRunner(self._outputs, cost)
        self._loop = Loop(self._scheduler, self._runner, is_overlapped=plan.is_overlapped)
        self._text = TraceText(trace, model.vocab_size)
        self._trace = trace
        self._alive: dict[str, tuple[TraceRequest, Request]] = {}
        self._seen: set[str] = set()  # were admitted once
        self._retracted: dict[str, int] = {}
        self._stride = 1
        self.found = Replayed(plan)

    def run(self, on_end: Callable[[], None] = lambda: None) -> Replayed:
        """Until every request has ended; `on_end` after each."""
        ready, later = self._line()
        scheduler, runner, found = self._scheduler, self._runner, self.found
        while ready or scheduler.has_work:
            if not scheduler.has_work:
                runner.clock = max(runner.clock, ready[0][0])
            while ready and ready[0][0] <= runner.clock:
                self._submit(heapq.heappop(ready)[2], ready, later, on_end)
            if not scheduler.has_work:
                continue
            before = found.retractions
            deltas = self._loop.step()
            self._note(before)
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._end(delta.request_id, ready, later)
                    on_end()
        self._close()
        return found

    def _line(self) -> tuple[list[tuple[float, int, TraceRequest]], dict[str, list[tuple[int, TraceRequest]]]]:
        """Requests that only wait for their time, and those that wait for another to end."""
        ready: list[tuple[float, int, TraceRequest]] = []
        later: dict[str, list[tuple[int, TraceRequest]]] = {}
        for at, request in enumerate(self._trace):
            if request.after:
                later.setdefault(request.after, []).append((at, request))
            else:
                ready.append((request.arrival, at, request))
        heapq.heapify(ready)
        return ready, later

    def _submit(self, line: TraceRequest, ready: list[Any], later: dict[str, Any], on_end: Callable[[], None]) -> None:
        prompt, output = self._text.spell(line)
        most = self.found.plan.max_context
        if len(prompt) >= most:
            clock = self._runner.clock
            self.found.outcomes.append(Outcome(line.id, line.label, line.arrival, clock, len(prompt), 0, 0, 0, True))
            self._release(line.id, ready, later)
            on_end()
            return
        self.found.prompt_tokens += len(prompt)
        self._outputs[line.id] = output
        request = Request(
            request_id=line.id,
            index=0,
            arrival=len(self.found.outcomes) + len(self._alive),
            priority=0,
            params=SamplingParams(temperature=0.0),
            seed=0,
            tokens=prompt,
            namespace=namespace_of(None, "", 0),
            num_prompt=len(prompt),
            max_tokens=min(line.output, most - len(prompt)),
            stop_ids=frozenset(),
        )
        self._alive[line.id] = (line, request)
        self._scheduler.submit([request])

    def _end(self, name: str, ready: list[Any], later: dict[str, Any]) -> None:
        line, request = self._alive.pop(name)
        del self._outputs[name]
        self._seen.discard(name)
        num_cached = request.hold.num_cached or 0
        self.found.hit_tokens += num_cached
        counts = (request.num_prompt, request.num_output, num_cached, self._retracted.pop(name, 0))
        self.found.outcomes.append(Outcome(name, line.label, line.arrival, self._runner.clock, *counts))
        self._release(name, ready, later)

    def _release(self, name: str, ready: list[Any], later: dict[str, Any]) -> None:
        """Requests that waited for `name` to end come in at their own time, or now."""
        for at, request in later.pop(name, ()):
            heapq.heappush(ready, (max(request.arrival, self._runner.clock), at, request))

    def _note(self, before: int) -> None:
        scheduler, found = self._scheduler, self.found
        found.retractions = scheduler.counts.retractions
        if found.retractions > before:
            for request in scheduler.waiting:
                if request.request_id in self._seen:
                    self._retracted[request.request_id] = self._retracted.get(request.request_id, 0) + 1
        self._seen.clear()
        self._seen.update(request.request_id for request in scheduler.running)
        found.steps += 1
        sample = self._sample()
        held = sample.tree_states * self._layout.slot_bytes + sample.tree_pages * self._layout.page_bytes
        found.held_bytes += (held - found.held_bytes) / found.steps
        found.peak_held_bytes = max(found.peak_held_bytes, held)
        if found.steps % self._stride == 0:
            found.samples.append(sample)
        if len(found.samples) > MAX_SAMPLES:
            found.samples = found.samples[1::2]
            self._stride *= 2

    def _sample(self) -> Sample:
        scheduler, books, cache = self._scheduler, self._memory.books, self._memory.cache
        return Sample(
            time_s=self._runner.clock,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots=books.slots.num_used,
            pages=books.pages.num_used,
            tree_states=0 if cache is None else cache.tree.store.counts.states,
            tree_pages=0 if cache is None else len(cache.tree.store.page_counts),
            gap_bytes=free_bytes(self._memory, self._layout),
            moves=books.num_moves,
            lookup_tokens=0 if cache is None else cache.counts.lookup_tokens,
            hit_tokens=0 if cache is None else cache.counts.hit_tokens,
            retractions=scheduler.counts.retractions,
        )

    def _close(self) -> None:
        """Totals; the books must add up at the end. Errors: LeakError."""
        self._scheduler.audit()
        found, cache = self.found, self._memory.cache
        found.time_s = self._runner.clock
        found.computed_tokens = self._scheduler.counts.prompt_tokens
        found.moves = self._memory.books.num_moves
        if cache is not None:
            tree = cache.tree.stats()
            found.superseded = tree.num_superseded
            found.evicted_states, found.evicted_nodes = tree.num_evicted_states, tree.num_evicted_nodes


def free_bytes(memory: Memory, layout: ArenaLayout) -> int:
    """Bytes that nobody holds: of a unified pool the one gap between slots and pages, of a fixed one both sides'."""
    gap = getattr(memory.books, "free_gap_bytes", None)
    if gap is not None:
        return int(gap())
    return memory.books.slots.num_free * layout.slot_bytes + memory.books.pages.num_free * layout.page_bytes
