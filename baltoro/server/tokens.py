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


@dataclass(frozen=True, slots=True)
class Rest:
    """The end of an answer: `whole` tokens, then `text`, which is the part before the stop string of the token in which
    it starts. That token itself is in `cut` if it belongs to the answer's ids. `everything` has the stop in it."""

    everything: list[Token]
    whole: list[Token]
    cut: list[Token]
    text: bytes
    matched: str | None


class Holdback:
    """Lets tokens go once no stop string can begin inside them. Single writer: the stream of one completion."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._held: deque[tuple[Token, bytes]] = deque()
        self._text = b""

    def push(self, token: Token) -> list[Token]:
        """The tokens that are free now, oldest first."""
        if not self._stops:
            return [token]
        spelled = self._tokenizer.token_bytes(token.id)
        self._held.append((token, spelled))
        self._text += spelled
        keep = 0 if self._tokenizer.is_control(token.id) else self._start_of_stop()
        free: list[Token] = []
        while self._held and len(self._text) - len(self._held[0][1]) >= keep:
            self._text = self._text[len(self._held[0][1]) :]
            free.append(self._held.popleft()[0])
        return free

    def finish(self, delta: TokenDelta) -> Rest:
        """The end, told by the last delta.

        Its `num_trimmed` counts the ids at the end that are not in the answer: a stop id, or those of a stop string;
        the id in which the string starts may or may not be among them.
        """
        left = [token for token, _ in self._held] + list(tokens_of(delta))
        self._held.clear()
        kept = left[: max(0, len(left) - delta.num_trimmed)]
        is_string = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, int)
        if not is_string or not self._stops:
            return Rest(left, kept, [], b"", None)
        return self._cut(left, len(kept))

    def _cut(self, left: list[Token], num_kept: int) -> Rest:
        """Cut at the first stop string; none reaches over a control id."""
        controls = [i for i, token in enumerate(left) if self._tokenizer.is_control(token.id)]
        first = controls[-1] + 1 if controls else 0
        spelled = [self._tokenizer.token_bytes(token.id) for token in left[first:]]
        text = b"".join(spelled)
        starts = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not starts:
            return Rest(left, left[:num_kept], [], b"", None)
        at, stop = min(starts)
        num_whole = 0
        while num_whole < len(spelled) and len(spelled[num_whole]) <= at:
            at -= len(spelled[num_whole])
            num_whole += 1
        num_whole += first
        rest = self._tokenizer.token_bytes(left[num_whole].id)[:at]
        return Rest(left, left[:num_whole], left[num_whole:num_kept], rest, stop.decode())

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
