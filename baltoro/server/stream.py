"""From the engine's deltas to what a client sees: counted, checked, cut at stop strings, decoded to whole characters.

In: submits. Out: deltas; for plain text also increments of text with their tokens.
Invariants: leaving the generator aborts what runs; errors of the engine are raised as the class their status names;
text never ends inside a character; a stream's increments put together are the whole reply.
Not here: the channels of a chat answer (`server.chat_stream`), HTTP (`server.http`).
"""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import BaltoroError, CapacityError, PoolExhausted, QueueFull, RequestError
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import FinishReason
from baltoro.protocol.worker import Submit
from baltoro.server.service import Service
from baltoro.server.tokens import Holdback, Token, tokens_of

_BY_STATUS: dict[int, type[BaltoroError]] = {400: RequestError, 429: QueueFull, 503: PoolExhausted}


async def run(service: Service, submits: Sequence[Submit]) -> AsyncGenerator[TokenDelta, None]:
    """Deltas of all requests until everything has ended; counted in the metrics.

    Errors: WorkerLost; RequestError, QueueFull and the like when the engine refuses or fails a request.
    """
    start = time.monotonic()
    last: dict[tuple[str, int], float] = {}
    is_done = False
    with service.worker.submit(submits) as stream:
        for _ in submits:
            service.metrics.accepted()
        try:
            async for delta in stream:
                if delta.finish_reason == "error":
                    raise _error(delta)
                _count(service, delta, start, last)
                yield delta
            is_done = True
        finally:
            for _ in submits:
                service.metrics.ended(time.monotonic() - start, is_aborted=not is_done)


def _count(service: Service, delta: TokenDelta, start: float, last: dict[tuple[str, int], float]) -> None:
    now, key = time.monotonic(), (delta.request_id, delta.index)
    if not any(request_id == delta.request_id for request_id, _ in last):
        service.metrics.started(delta.num_prompt_tokens, delta.num_cached_tokens, now - start)
    service.metrics.produced(len(delta.token_ids), now - last[key] if key in last else None)
    last[key] = now


def _error(delta: TokenDelta) -> BaltoroError:
    """The error a failed delta stands for."""
    status = delta.error_status or 500
    kind = _BY_STATUS.get(status, CapacityError if status == 503 else BaltoroError)
    return kind(delta.error or "the engine failed this request")


@dataclass(slots=True)
class Ending:
    """Why a completion ended, as its client is told."""

    reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Increment:
    """More of a completion: text, the tokens it is made of, and the end if this is it."""

    text: str
    tokens: list[Token]
    ending: Ending | None = None


@dataclass(slots=True)
class Counts:
    """Tokens of one request, as usage tells them. Single writer: whoever reads its deltas."""

    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0
    seen: set[str] = field(default_factory=set)

    def add(self, delta: TokenDelta) -> None:
        """Count a delta. The prompt is counted once for each request, with its first delta."""
        if delta.request_id not in self.seen:
            self.seen.add(delta.request_id)
            self.num_prompt += delta.num_prompt_tokens
            self.num_cached += delta.num_cached_tokens
        self.num_output += len(delta.token_ids)


def ending_of(delta: TokenDelta, matched: str | None, tokenizer: Tokenizer, submit: Submit) -> Ending | None:
    """The end that a delta tells. The end-of-message id is no stop reason of its own unless it was asked for."""
    if delta.finish_reason is None:
        return None
    reason = delta.stop_reason if delta.stop_reason is not None else matched
    if reason in tokenizer.eos_ids and reason not in submit.params.stop_token_ids:
        reason = None
    return Ending(delta.finish_reason, reason)


class TextStream:
    """One plain-text completion: tokens in, increments of text out. Single writer: its handler."""

    def __init__(
        self, tokenizer: Tokenizer, submit: Submit, *, keeps_stop: bool = False, shows_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._submit = submit
        self._keeps_stop = keeps_stop
        self._shows_special = shows_special
        self._hold = Holdback(tokenizer, submit.params.stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, delta: TokenDelta) -> Increment:
        """What `delta` adds. Control ids have no text unless they are structural, or all are to be shown."""
        if delta.finish_reason is None:
            tokens = [free for token in tokens_of(delta) for free in self._hold.push(token)]
            return Increment(self._utf8.decode(self._spell(tokens)), tokens)
        rest = self._hold.finish(delta)
        ending = ending_of(delta, rest.matched, self._tokenizer, self._submit)
        if self._keeps_stop:
            tokens = rest.everything
            return Increment(self._utf8.decode(self._spell(tokens), final=True), tokens, ending)
        text = self._utf8.decode(self._spell(rest.whole) + rest.text, final=True)
        return Increment(text, rest.whole + rest.cut, ending)

    def _spell(self, tokens: list[Token]) -> bytes:
        hidden = self._tokenizer.is_special
        return self._tokenizer.decode_bytes(t.id for t in tokens if self._shows_special or not hidden(t.id))
