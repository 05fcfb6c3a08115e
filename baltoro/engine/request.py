"""Request: one generation the engine was asked for, and everything the engine knows about it.

In: a `Submit` (ids only). Single writer: the scheduler; runner and sampler read a plan, not this.
Life: WAITING -> RUNNING -> FINISHED; a retraction leads from RUNNING back to WAITING, with its tokens but no memory.
Invariants: `tokens` is prompt and output as far as committed; positions below `num_computed` have their KV in `pages`
and are folded into `slot`; those below `num_planned` will, once the plan in flight is committed; a waiting request
holds nothing; the last token is not computed until the step that samples the next one. A finished request that is
still in flight keeps its memory until that plan is committed.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from baltoro.cache.answers import Pin
from baltoro.cache.host_entry import Reserved
from baltoro.cache.retention import CheckpointKind
from baltoro.engine.adapter_version import AdapterVersion
from baltoro.protocol.completion import TopLogprob
from baltoro.protocol.sampling import FinishReason, SamplingParams, StopRule, TokenMask
from baltoro.protocol.worker import MediaItem


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class MediaRun:
    """Positions first..last-1 of a prompt take the features of one picture, in order."""

    item: MediaItem
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended; `num_trimmed` tokens at its end belong to the stop, not to the answer."""

    reason: FinishReason
    stop_reason: int | str | None = None
    num_trimmed: int = 0
    error: str | None = None
    error_status: int | None = None


@dataclass(frozen=True, slots=True)
class HostBackup:
    """On the host: everything a retracted request had computed, the KV of `num_tokens` tokens and its state with the
    last block."""

    num_tokens: int
    tickets: tuple[Reserved, ...]


@dataclass(slots=True)
class CacheHold:
    """The prefix cache's side of a request. Single writer: `engine/memory.py`.

    ids         token ids that tell its prefixes apart, as far as they are known; positions of pictures hold pseudo ids
    pin         keeps the path it stands on in the tree
    branch      depth at which its prefill is to leave a state checkpoint because others went another way; 0 is none
    due         snapshots in flight, shallowest first
    tracked     a snapshot that has landed and is worth keeping only if the request ends before the next
    num_cached  prompt tokens found in the cache when it was first admitted; None before
    depth       how far its prefix is registered in the tree; `pin` stands there
    state_depth depth of its last state in the tree that it brought itself
    loading     digests of its prefix that were asked of the third tier; num_asks: how often it asked
    backup      while it waits after a retraction: where its KV and state are on the host
    """

    ids: array[int] = field(default_factory=lambda: array("q"))
    pin: Pin | None = None
    branch: int = 0
    due: list[DueSnapshot] = field(default_factory=list)
    num_cached: int | None = None
    tracked: DueSnapshot | None = None
    depth: int = 0
    state_depth: int = 0
    backup: HostBackup | None = None
    loading: set[bytes] = field(default_factory=set)
    num_asks: int = 0


@dataclass(frozen=True, slots=True)
class DueSnapshot:
    """A state on its way into `slot` (virtual): that of the first `depth` tokens."""

    depth: int
    slot: int
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class Places:
    """Physical ids of a request's slot and of its pages (int64), right while the books have made `num_moves` moves."""

    num_moves: int
    slot: int
    pages: np.ndarray


@dataclass(slots=True, kw_only=True)
class Request:
    """One of the n completions of a Submit. Single writer: the scheduler."""

    request_id: str
    index: int
    arrival: int
    priority: int
    params: SamplingParams
    seed: int
    tokens: array[int]
    num_prompt: int
    max_tokens: int
    """Output tokens at most: what was asked, or what the context leaves."""
    stop_ids: frozenset[int]
    stop_rule: StopRule | None = None
    mask: TokenMask | None = None
    media: tuple[MediaRun, ...] = ()
    forks: list[Request] = field(default_factory=list)
    """Siblings that wait for this one to compute the prompt they share."""

    adapter: AdapterVersion | None = None
    """The version that its next token comes from; None is the base."""
    adapter_slot: int = 0
    """Where that version lies while the request runs; 0 for the base."""
    namespace: bytes = b""
    """Prefixes are shared only within one: adapter version, cache salt, policy version. One that was carried from
    version to version has one of its own."""
    cache_salt: str = ""

    state: State = State.WAITING
    num_computed: int = 0
    num_planned: int = 0
    pages: array[int] = field(default_factory=lambda: array("q"))
    """Virtual ids, one per page_size positions."""
    slot: int | None = None
    """Virtual id of the working slot."""
    num_in_flight: int = 0
    """Plans not yet committed that it is part of: its memory may still be written."""
    drawn_at: int | None = None
    """Place among the draws of the plan in flight; None if that plan samples nothing for it."""
    wish: Ending | None = None
    """How it ends once the plan in flight is committed."""
    hold: CacheHold = field(default_factory=lambda: CacheHold())
    """What it has to do with the prefix cache."""
    num_since_admitted: int = 0
    prompt_ids: frozenset[int] = frozenset()
    counts: Counter[int] = field(default_factory=Counter)
    """Ids of prompt and output, kept only when a penalty needs them."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of the second prompt token onwards, as far as they are known, if they were asked for."""
    prompt_tops: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    num_scoring: int = 0
    """Prompt tokens whose logprobs the plan in flight will bring."""
    places: Places | None = None
    """Where slot and pages lie. Single writer: `engine/memory.py`."""
    wants_routes: bool = False
    """Whether it is to be told which experts the routers took."""
    num_routed: int = 0
    """Positions from 0 on whose routes are here, or will come with the plan in flight; 0 again after a retraction."""
    routes: bytearray = field(default_factory=bytearray)
    """Of positions 0 .. as far as they were computed, of the newest forward of each (`model/routes.py`)."""
    has_penalty: bool = field(init=False)
    """Whether sampling depends on the tokens so far."""

    def __post_init__(self) -> None:
        params = self.params
        self.has_penalty = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @property
    def precedence(self) -> tuple[int, int, int]:
        """Sort key: who is served first and retracted last. Higher priority first, then older, then lower index."""
        return (-self.priority, self.arrival, self.index)

    @property
    def name(self) -> str:
        return f"{self.request_id}/{self.index}"

    @property
    def num_scored(self) -> int:
        """Prompt tokens with a logprob now or soon; also the first row whose logits are still wanted for one."""
        return len(self.prompt_logprobs) + self.num_scoring

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens that the next plan may name: those committed, and the one that the plan in flight will sample."""
        return len(self.tokens) + (self.drawn_at is not None)

    @property
    def num_remaining(self) -> int:
        """Tokens that no plan has computed yet; 1 means decode."""
        return self.num_known - self.num_planned

    @property
    def is_in_flight(self) -> bool:
        return self.num_in_flight > 0

    @property
    def can_advance(self) -> bool:
        """Whether a plan may go on with it: not when it is to end, nor when what comes next depends on a token that is
        still on the device."""
        if self.wish is not None or self.state is State.FINISHED:
            return False
        if self.drawn_at is None:
            return True
        is_blind = self.mask is not None or self.has_penalty
        return not is_blind and self.num_output + 1 < self.max_tokens

    def plan_routes(self, end: int) -> int:
        """The first position whose routes the next plan, which computes up to `end`, is to bring: behind those that are
        here or on their way. At first that is 0: a prefix from the cache brings those it was computed with."""
        first, self.num_routed = self.num_routed, end
        return first

    def keep_routes(self, first: int, end: int, found: bytes) -> None:
        """Routes of positions first .. end-1; what was known of these and later ones is forgotten."""
        self.routes[first * (len(found) // (end - first)) :] = found

    def take(self, token: int) -> Ending | None:
        """Append a sampled token and say whether the request ends with it: stop ids and strings before the length."""
        self.tokens.append(token)
        self.num_since_admitted += 1
        if self.has_penalty:
            self.counts[token] += 1
        if self.mask is not None:
            self.mask.push(token)
        if token in self.stop_ids:
            return Ending("stop", stop_reason=token, num_trimmed=1)
        matched = self.stop_rule.push(token) if self.stop_rule is not None else None
        if matched is not None and self.num_output >= self.params.min_tokens:
            return Ending("stop", num_trimmed=min(matched, self.num_output))
        if self.num_output >= self.max_tokens:
            return Ending("length")
        return None
