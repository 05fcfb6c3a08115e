"""What crosses plan -> run -> commit: Span, Move, Plan out of the scheduler, Result out of the runner.

    plan()  ----Plan---->  run()  ----Result---->  commit()
    reads and reserves     moves tensors           the only place where requests change

Decodes (spans of one token with something before them) come first in a plan, because their kernels differ.
Invariants: a Plan is frozen and names everything the runner needs; the runner never looks into a Request. The page
arrays of spans belong to requests and only ever grow at the end while the plan is in flight.
Door for overlap: a plan made while another is in flight would name a token by its position instead of its id.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baltoro.cache.pages import pages_for
from baltoro.engine.request import MediaRun, Request, has_penalty
from baltoro.protocol.completion import TopLogprob
from baltoro.protocol.sampling import SamplingParams

ALIGNMENT = 64
"""Prompts are cut at multiples of this where the budget allows: the chunk of the KDA kernels, which would otherwise
work on two short chunks, and the grid on which states can be kept."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to copy before the layers run, in the order listed. Poisoning is a debugging aid."""

    kind: Literal["copy_slot", "copy_page", "poison_slot", "poison_page"]
    target: int
    source: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
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


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one request done in this step; `targets` are prompt tokens to be scored, the first of them
    by the logits of row `first_target` of the span."""

    request: Request
    tokens: Sequence[int]
    start: int
    slot: int
    pages: array[int]
    draw: Draw | None
    targets: Sequence[int] = ()
    first_target: int = 0
    num_top: int = 0
    media: tuple[MediaRun, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        return len(self.tokens) == 1 and self.start > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decodes first. `num_decodes` leading spans take the decode kernels."""

    spans: tuple[Span, ...]
    num_decodes: int
    moves: tuple[Move, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Found:
    """One sampled token. Not valid: the model gave no finite logit. `logprob` is raw: before temperature, penalties,
    masks; None if nobody asked."""

    token: int
    is_valid: bool = True
    logprob: float | None = None
    top: tuple[TopLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of prompt tokens, and the best alternatives at each place if they were wanted."""

    logprobs: Sequence[float]
    tops: Sequence[tuple[TopLogprob, ...]]


@dataclass(frozen=True, slots=True)
class Result:
    """What the runner found: one Found per span with a draw, one Scored per span with targets, in plan order."""

    found: Sequence[Found]
    scores: Sequence[Scored] = ()


class PlanBuilder:
    """Collects the spans of one step under its budgets. Single writer: the scheduler, inside one plan()."""

    def __init__(self, max_tokens: int, max_logit_rows: int) -> None:
        self.room = max_tokens
        self.logit_room = max_logit_rows
        self._decodes: list[Span] = []
        self._others: list[Span] = []

    def fit(self, request: Request, end: int) -> int:
        """How many tokens of `request` from num_computed towards `end` fit into what is left; 0 is none."""
        start = request.num_computed
        stop = min(end, start + self.room)
        if request.params.prompt_logprobs is not None and request.num_scored < request.num_prompt - 1:
            stop = min(stop, max(start, request.num_scored) + self.logit_room)
        if stop < end and stop // ALIGNMENT * ALIGNMENT > start:
            stop = stop // ALIGNMENT * ALIGNMENT
        return stop - start

    def add(self, request: Request, length: int) -> None:
        """The next `length` tokens of `request`."""
        assert request.slot is not None
        start, end = request.num_computed, request.num_computed + length
        targets: Sequence[int] = ()
        first = max(start, request.num_scored)
        if request.params.prompt_logprobs is not None and first < request.num_prompt - 1:
            targets = request.tokens[first + 1 : min(end, request.num_prompt - 1) + 1]
        span = Span(
            request=request,
            tokens=request.tokens[start:end],
            start=start,
            slot=request.slot,
            pages=request.pages,
            draw=make_draw(request) if end == len(request.tokens) else None,
            targets=targets,
            first_target=first - start,
            num_top=request.params.prompt_logprobs or 0,
            media=tuple(run for run in request.media if run.first < end and run.last > start),
        )
        self.room -= length
        self.logit_room -= len(targets)
        (self._decodes if span.is_decode else self._others).append(span)
        request.is_in_flight = True

    def build(self, moves: tuple[Move, ...]) -> Plan:
        return Plan((*self._decodes, *self._others), len(self._decodes), moves)

    def __bool__(self) -> bool:
        return bool(self._decodes or self._others)


def make_draw(request: Request) -> Draw:
    """How the next token of `request` is drawn."""
    params = request.params
    banned = tuple(request.stop_ids) if request.num_output < params.min_tokens else ()
    allowed = request.mask.allowed() if request.mask is not None else b""
    position = len(request.tokens)
    if not has_penalty(params):
        return Draw(params, request.seed, position, banned=banned, allowed=allowed)
    return Draw(params, request.seed, position, request.prompt_ids, request.counts, banned, allowed)


def num_pages(span: Span, page_size: int) -> int:
    """Pages that hold everything the span sees."""
    return pages_for(span.end, page_size)
