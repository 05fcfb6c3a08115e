"""Request: one generation the engine was asked for, and everything the engine knows about it.

In: a `Submit` (ids only). Single writer: the scheduler; runner and sampler read the Draft of a plan, not this.
Life: WAITING -> RUNNING -> FINISHED; a retraction leads from RUNNING back to WAITING, with its tokens but no memory.
Invariants: `tokens` is prompt and output; positions below `num_computed` have their KV in `pages` and are folded into
`slot`; a waiting request holds nothing; the last token is not computed until the step that samples the next one.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from dataclasses import dataclass, field

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


@dataclass(slots=True, kw_only=True)
class Request:
    """One of the n completions of a Submit. Single writer: the scheduler."""

    request_id: str
    index: int
    arrival: int
    priority: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    """Output tokens at most: what was asked, or what the context leaves."""
    stop_ids: frozenset[int]
    stop_rule: StopRule | None = None
    mask: TokenMask | None = None
    media: tuple[MediaRun, ...] = ()
    forks: list[Request] = field(default_factory=list)
    """Siblings that wait for this one to compute the prompt they share."""

    state: State = State.WAITING
    num_computed: int = 0
    pages: array[int] = field(default_factory=lambda: array("q"))
    slot: int | None = None
    is_in_flight: bool = False
    """Part of a plan that is not committed: its memory may still be written."""
    wish: Ending | None = None
    """How it ends once the plan in flight is committed."""
    num_since_admitted: int = 0
    prompt_ids: frozenset[int] = frozenset()
    counts: Counter[int] = field(default_factory=Counter)
    """Ids of prompt and output, kept only when a penalty needs them."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of the second prompt token onwards, as far as they are known, if they were asked for."""
    prompt_tops: list[tuple[TopLogprob, ...]] = field(default_factory=list)

    @property
    def precedence(self) -> tuple[int, int, int]:
        """Sort key: who is served first and retracted last. Higher priority first, then older, then lower index."""
        return (-self.priority, self.arrival, self.index)

    @property
    def name(self) -> str:
        return f"{self.request_id}/{self.index}"

    @property
    def num_scored(self) -> int:
        """Prompt tokens with a logprob; also the first row whose logits are still wanted for one."""
        return len(self.prompt_logprobs)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens not yet computed; 1 means decode."""
        return len(self.tokens) - self.num_computed

    def take(self, token: int) -> Ending | None:
        """Append a sampled token and say whether the request ends with it: stop ids and strings before the length."""
        self.tokens.append(token)
        self.num_since_admitted += 1
        if has_penalty(self.params):
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


def has_penalty(params: SamplingParams) -> bool:
    """Whether sampling depends on the tokens so far."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
