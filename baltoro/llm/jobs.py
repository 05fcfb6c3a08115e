"""What `LLM` has under way: a request, its completions as far as they have come, what their way back has to know.

In: Submits, TokenDeltas. Out: ids and logprobs of each completion, collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baltoro.protocol.completion import TokenDelta, TopLogprob
from baltoro.protocol.worker import Submit


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """What the way back of an answer has to know."""

    is_thinking: bool
    has_tools: bool
    num_past_calls: int


@dataclass(slots=True)
class Part:
    """One completion, as far as it has come. Single writer: `LLM._run`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.tops += delta.top_logprobs or ()
        self.deltas = [*self.deltas[:1], delta]  # the first and the last hold what is not a token


@dataclass(slots=True)
class Job:
    """One request and its completions."""

    submit: Submit
    chat: ChatFacts | None = None
    parts: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [Part() for _ in range(self.submit.n)]
