"""Tokens on their way out: held back while they may belong to a stop string, spelled with their logprobs.

In: token deltas. Out: `Token`s that are safe to show, and the pieces of OpenAI's logprobs.
Invariants: what was let go never has to be taken back, so a stream and a whole reply are equal; with no stop strings
nothing is held; a cut inside a token keeps the text before the stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from baltoro.chat.tokenizer import Tokenizer
from baltoro.protocol.completion import TokenDelta, TopLogprob
from baltoro.protocol.openai_reply import TokenLogprob, TopTokenLogprob
from baltoro.protocol.worker import Submit


@dataclass(frozen=True, slots=True)
class Token:
    """One id with what was asked about it."""

    id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


def tokens_of(delta: TokenDelta) -> Iterator[Token]:
    """The tokens of a delta."""
    for i, token in enumerate(delta.token_ids):
        yield Token(
            token,
            None if delta.logprobs is None else delta.logprobs[i],
            () if delta.top_logprobs is None else delta.top_logprobs[i],
        )


def prompt_tokens(submit: Submit, delta: TokenDelta) -> list[Token]:
    """The tokens of a prompt, with their logprobs where `delta` brings them (the first one never has any)."""
    num = len(submit.token_ids)
    logprobs = delta.prompt_logprobs or (None,) * num
    tops: tuple[tuple[TopLogprob, ...] | None, ...] = delta.prompt_top_logprobs or (None,) * num
    return [Token(i, logprob, top or ()) for i, logprob, top in zip(submit.token_ids, logprobs, tops, strict=True)]


class Holdback:
    """Lets tokens go once no stop string can begin inside them. Single writer: the stream of one completion."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._held: deque[tuple[Token, bytes]] = deque()
        self._text = b""
        self.matched: str | None = None
        """The stop string that ended the completion, once it has ended."""

    def push(self, token: Token) -> list[Token]:
        """The tokens that are free now, oldest first."""
        if not self._stops:
            return [token]
        spelled = self._tokenizer.token_bytes(token.id)
        self._held.append((token, spelled))
        self._text += spelled
        keep = self._start_of_stop()
        free: list[Token] = []
        while self._held and len(self._text) - len(self._held[0][1]) >= keep:
            self._text = self._text[len(self._held[0][1]) :]
            free.append(self._held.popleft()[0])
        return free

    def finish(self, last: list[Token], num_trimmed: int, *, keeps_stop: bool = False) -> tuple[list[Token], bytes]:
        """The end, with the tokens of the last delta: (all that is left of the answer, bytes before the stop string).

        `num_trimmed` tokens at the end hold a stop string, or are a stop id; the bytes are those of the first of them.
        They stay in the answer when it `keeps_stop`.
        """
        left = [token for token, _ in self._held] + last
        self._held.clear()
        num_kept = max(0, len(left) - num_trimmed)
        dropped = self._tokenizer.decode_bytes(token.id for token in left[num_kept:])
        starts = [(at, stop) for stop in self._stops if (at := dropped.find(stop)) >= 0]
        at, stop = min(starts, default=(0, None))
        self.matched = None if stop is None else stop.decode()
        return (left, b"") if keeps_stop else (left[:num_kept], dropped[:at])

    def _start_of_stop(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def spell(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Text and bytes of one id. A piece of a character is spelled `bytes:\\xe4\\xbd`, as OpenAI does."""
    raw = tokenizer.token_bytes(token)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
    return text, list(raw)


def logprob_entry(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
    """A token of OpenAI's `logprobs.content`. The token must carry a logprob."""
    assert token.logprob is not None
    text, raw = spell(tokenizer, token.id)
    top = [TopTokenLogprob(*_top(tokenizer, t)) for t in token.top]
    return TokenLogprob(text, token.logprob, raw, top)


def _top(tokenizer: Tokenizer, top: TopLogprob) -> tuple[str, float, list[int]]:
    text, raw = spell(tokenizer, top.token)
    return text, top.logprob, raw
