"""What one step will do, collected under its budgets, and frozen into a Plan once its memory is settled.

    fit()  how much of a request fits     add()  a Draft, books are advanced     build()  Drafts -> Spans -> Plan

In: requests in the order in which the scheduler lets them advance; what their memory says (`PlanMemory`). Out: a Plan.
Invariants: budgets of tokens and of logit rows are never exceeded; a decode whose token is still on the device names
its place (`batch.py`); ids become physical only when nothing is moved any more.
Single writer: the scheduler, inside one plan().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from baltoro.engine.adapter_version import Install
from baltoro.engine.batch import Draw, Move, Plan, Span, SpanSnapshot
from baltoro.engine.request import DueSnapshot, MediaRun, Request

ALIGNMENT = 64
"""Prompts are cut at multiples of this where the budget allows: the chunk of the KDA kernels, which would otherwise
work on two short chunks, and the grid on which states can be kept."""
BLIND = (0,)
"""Stands for a token that is still on the device."""


class Draft(msgspec.Struct, frozen=True):
    """A span before its memory is settled: tokens start..end-1 of `request`, and the prompt tokens they score."""

    request: Request
    start: int
    end: int
    is_decode: bool
    targets: Sequence[int] = ()
    first_target: int = 0


class PlanBuilder:
    """Collects what one step will do, under its budgets. Single writer: the scheduler, inside one plan()."""

    def __init__(self, max_tokens: int, max_logit_rows: int) -> None:
        self.room = max_tokens
        self.logit_room = max_logit_rows
        self.drafts: list[Draft] = []

    def fit(self, request: Request, end: int, *, room: int | None = None) -> int:
        """How many tokens of `request` from num_planned towards `end` fit into what is left; 0 is none.

        Cut where a checkpoint is to be planted, and on the grid where the budget ends and that is progress."""
        start = request.num_planned
        stop = min(end, start + (self.room if room is None else min(room, self.room)))
        if _is_scored(request):
            stop = min(stop, max(start, request.num_scored) + self.logit_room)
        if start < request.hold.branch < stop:
            stop = request.hold.branch
        elif stop < end and stop // ALIGNMENT * ALIGNMENT > start:
            stop = stop // ALIGNMENT * ALIGNMENT
        return stop - start

    def add(self, request: Request, length: int) -> None:
        """The next `length` tokens of `request`."""
        start = request.num_planned
        end = request.num_planned = start + length
        is_decode = length == 1 and start > 0
        if _is_scored(request):
            first = max(start, request.num_scored)
            targets = request.tokens[first + 1 : min(end, request.num_prompt - 1) + 1]
            self.drafts.append(Draft(request, start, end, is_decode, targets, first - start))
            self.logit_room -= len(targets)
            request.num_scoring += len(targets)
        else:
            self.drafts.append(Draft(request, start, end, is_decode))
        self.room -= length
        request.num_in_flight += 1

    def build(self, memory: PlanMemory, installs: tuple[Install, ...] = ()) -> Plan:
        """Freeze it. Order of spans: decodes first; draws are counted in that order."""
        drafts = [d for d in self.drafts if d.is_decode] + [d for d in self.drafts if not d.is_decode]
        marks = [memory.snapshots(draft) for draft in drafts]  # may move blocks, so before ids become physical
        spans = tuple(_span(draft, taken, memory) for draft, taken in zip(drafts, marks, strict=True))
        after = [
            move for draft, taken in zip(drafts, marks, strict=True) if taken for move in memory.after(draft, taken)
        ]
        place = 0
        for span in spans:
            span.request.drawn_at = None
            if span.draw is not None:
                span.request.drawn_at = place
                place += 1
        return Plan(spans, sum(d.is_decode for d in drafts), memory.collect_moves(), tuple(after), installs)

    def __bool__(self) -> bool:
        return bool(self.drafts)


class PlanMemory(Protocol):
    """What building a plan asks of the memory of requests."""

    def snapshots(self, draft: Draft) -> tuple[DueSnapshot, ...]:
        """States to be kept on the way through this span, with slots taken for them."""
        ...

    def after(self, draft: Draft, taken: tuple[DueSnapshot, ...]) -> list[Move]:
        """Copies of a decode's snapshots, behind the layers."""
        ...

    def physical_slot(self, slot: int) -> int: ...

    def places(self, request: Request, end: int) -> tuple[int, np.ndarray]:
        """Physical slot of `request`, and int64 the pages that hold its first `end` positions."""
        ...

    def collect_moves(self) -> tuple[Move, ...]: ...


def _span(draft: Draft, taken: tuple[DueSnapshot, ...], memory: PlanMemory) -> Span:
    request, start, end = draft.request, draft.start, draft.end
    is_blind = end > len(request.tokens)
    tokens: Sequence[int] = BLIND if is_blind else request.tokens[start:end]
    source = request.drawn_at if is_blind else None
    slot, pages = memory.places(request, end)
    media: tuple[MediaRun, ...] = ()
    if request.media:
        media = tuple(run for run in request.media if run.first < end and run.last > start)
    snapshots: tuple[SpanSnapshot, ...] = ()
    if taken and not draft.is_decode:
        snapshots = tuple(SpanSnapshot(due.depth - start, memory.physical_slot(due.slot)) for due in taken)
    return Span(
        request=request,
        tokens=tokens,
        start=start,
        slot=slot,
        pages=pages,
        draw=make_draw(request, end) if end == request.num_known else None,
        source=source,
        targets=draft.targets,
        first_target=draft.first_target,
        num_top=request.params.prompt_logprobs or 0,
        media=media,
        snapshots=snapshots,
        adapter=request.adapter_slot,
        routes_from=request.plan_routes(end) if request.wants_routes else None,
    )


def _is_scored(request: Request) -> bool:
    """Whether logprobs of prompt tokens are still wanted."""
    return request.params.prompt_logprobs is not None and request.num_scored < request.num_prompt - 1


def make_draw(request: Request, position: int) -> Draw:
    """How the token at `position` of `request` is drawn."""
    params = request.params
    banned = tuple(request.stop_ids) if position - request.num_prompt < params.min_tokens else ()
    allowed = request.mask.allowed() if request.mask is not None else b""
    if not request.has_penalty:
        return Draw(params, request.seed, position, (), None, banned, allowed)
    return Draw(params, request.seed, position, request.prompt_ids, request.counts, banned, allowed)
