"""What crosses plan -> run -> commit: Span, Move, Plan out of the scheduler, Result out of the runner.

    plan()  ----Plan---->  run()  ----Result---->  commit()
    reads and reserves     moves tensors           the only place where requests change

Decodes (spans of one token with something before them) come first in a plan, because their kernels differ.
Invariants: a Plan is frozen and names everything the runner needs; the runner never looks into a Request. Pages and
slots of a plan are physical: what a later plan moves, it moves after this one on the same stream. The types are
msgspec structs: a plan makes several for every request, and these cost a fraction of a frozen dataclass.

Overlap: plan n+1 is made while n is on the device, so it cannot name the token that n samples. It names its place
instead: `Span.source` is the place among the draws of n, and the runner fills the id in on the device.

    plan n      r0 draws (place 0)   r1 draws (place 1)
    plan n+1    r0 decodes token ?0  r1 decodes token ?1        made before n is back
    commit n    r0 ends: its memory stays, since n+1 still writes it; the over-run row of n+1 is thrown away
    commit n+1  r0's memory goes back
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from baltoro.cache.pages import pages_for
from baltoro.engine.adapters import Install
from baltoro.engine.request import DueSnapshot, MediaRun, Request
from baltoro.protocol.completion import TopLogprob
from baltoro.protocol.sampling import SamplingParams

ALIGNMENT = 64
"""Prompts are cut at multiples of this where the budget allows: the chunk of the KDA kernels, which would otherwise
work on two short chunks, and the grid on which states can be kept."""
BLIND = (0,)
"""Stands for a token that is still on the device."""


MoveKind = Literal[
    "copy_slot",
    "copy_page",
    "zero_page",
    "poison_slot",
    "poison_page",
    "save_block",
    "save_state",
    "load_block",
    "load_state",
]


class Move(msgspec.Struct, frozen=True):
    """Bytes to copy, in the order listed; ids are physical. Poisoning is a debugging aid.

    save and load  between the device and the host tier: `num_rows` rows from row `row` of pages[0] on, and a host block
                   (`target` or `source`); or a slot and a host state
    """

    kind: MoveKind
    target: int
    source: int = 0
    pages: tuple[int, ...] = ()
    row: int = 0
    num_rows: int = 0


class Draw(msgspec.Struct, frozen=True):
    """How the token after a span is sampled: depends on nothing but this and the logits.

    position  of the token to be drawn; with `seed` it defines the random number
    prompt    ids of the prompt, each once, and counts of the output's ids: None unless a penalty needs them
    banned    ids that may not come yet (ends, while below min_tokens)
    allowed   bitmask of a grammar; empty: every id
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: Collection[int] = ()
    counts: Mapping[int, int] | None = None
    banned: tuple[int, ...] = ()
    allowed: bytes = b""

    @property
    def is_edited(self) -> bool:
        """Whether logits change before the draw."""
        return bool(self.banned or self.allowed or self.params.logit_bias or self.counts is not None)


class SpanSnapshot(msgspec.Struct, frozen=True):
    """The state after the first `length` tokens of a span is also wanted in `slot` (physical)."""

    length: int
    slot: int


class Span(msgspec.Struct, frozen=True):
    """Consecutive tokens of one request done in this step.

    source        place among the draws of the plan in flight whose token this decode reads; None: `tokens` has it
    slot, pages   physical; pages int64 [pages of all it sees]
    targets       prompt tokens to be scored, the first of them by the logits of row `first_target` of the span
    snapshots     of a prefill: taken inside the forward; those of decodes are in the plan's `after`
    adapter       adapter slot, 0 for the base
    routes_from   routes of the positions from here to the span's end are wanted; None: none are
    """

    request: Request
    tokens: Sequence[int]
    start: int
    slot: int
    pages: np.ndarray
    draw: Draw | None
    source: int | None = None
    targets: Sequence[int] = ()
    first_target: int = 0
    num_top: int = 0
    media: tuple[MediaRun, ...] = ()
    snapshots: tuple[SpanSnapshot, ...] = ()
    adapter: int = 0
    routes_from: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        return len(self.tokens) == 1 and self.start > 0


class Plan(msgspec.Struct, frozen=True):
    """One step: decodes first. `num_decodes` leading spans take the decode kernels. `moves` and `installs` (adapters
    into their slots) are made before the layers run, `after` behind them."""

    spans: tuple[Span, ...]
    num_decodes: int
    moves: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()
    installs: tuple[Install, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)


class Found(msgspec.Struct, frozen=True):
    """One sampled token. Not valid: the model gave no finite logit. `logprob` is raw: before temperature, penalties,
    masks; None if nobody asked."""

    token: int
    is_valid: bool = True
    logprob: float | None = None
    top: tuple[TopLogprob, ...] | None = None


class Scored(msgspec.Struct, frozen=True):
    """Logprobs of prompt tokens, and the best alternatives at each place if they were wanted."""

    logprobs: Sequence[float]
    tops: Sequence[tuple[TopLogprob, ...]]


class Result(msgspec.Struct, frozen=True):
    """What the runner found: one Found per span with a draw, one Scored per span with targets, the routes of every span
    that wants some, each in plan order."""

    found: Sequence[Found]
    scores: Sequence[Scored] = ()
    routes: Sequence[bytes] = ()


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


def num_pages(span: Span, page_size: int) -> int:
    """Pages that hold everything the span sees."""
    return pages_for(span.end, page_size)
