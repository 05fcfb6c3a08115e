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
from typing import Literal

import msgspec
import numpy as np

from baltoro.cache.pages import pages_for
from baltoro.engine.adapter_version import Install
from baltoro.engine.request import MediaRun, Request
from baltoro.protocol.completion import TopLogprob
from baltoro.protocol.sampling import SamplingParams

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


def num_pages(span: Span, page_size: int) -> int:
    """Pages that hold everything the span sees."""
    return pages_for(span.end, page_size)
