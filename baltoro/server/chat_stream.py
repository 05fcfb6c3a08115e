"""One chat completion on its way out: deltas -> pieces of reasoning, answer and tool calls, with their tokens.

In: the engine's deltas. Out: `Piece`s, each of one kind, in the order in which they are shown.
Invariants: pieces do not depend on how the ids were cut; nothing of a stop string and no half character is let out;
tokens of content, put together, are the content (but for white space that the parser strips). Ids of markers belong to
the piece after them.
Not here: events out of ids (`chat.parser`), JSON (`server.chat`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baltoro.chat.events import ContentDelta, Event, ReasoningDelta, ReasoningWasContent
from baltoro.chat.parser import StreamParser
from baltoro.chat.tokenizer import SEP, Tokenizer
from baltoro.protocol.completion import TokenDelta
from baltoro.server.chat_plan import ChatPlan
from baltoro.server.stream import Ending, ending_of
from baltoro.server.tokens import Holdback, Rest, Token, tokens_of


@dataclass(frozen=True, slots=True)
class Piece:
    """One event and the tokens it is made of. `markers` are ids that came before it and have no text."""

    event: Event
    tokens: tuple[Token, ...]
    markers: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """All ids since the piece before."""
        return [*self.markers, *(token.id for token in self.tokens)]


class ChatStream:
    """Parses one of the n completions of a request. Single writer: its handler."""

    def __init__(self, tokenizer: Tokenizer, plan: ChatPlan) -> None:
        self._tokenizer = tokenizer
        self._submit = plan.submit
        self._hold = Holdback(tokenizer, plan.submit.params.stop)
        self._parser = StreamParser(
            tokenizer, thinking=plan.is_thinking, has_tools=plan.has_tools, start_index=plan.num_past_calls
        )
        self._sep = tokenizer.special(SEP)
        self._waiting: list[Token] = []
        self._markers: list[int] = []
        self.ending: Ending | None = None
        self.num_reasoning = 0

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._parser.num_calls

    def push(self, delta: TokenDelta) -> list[Piece]:
        """The pieces that `delta` completes. After its last delta `ending` says why it ended."""
        if delta.finish_reason is None:
            free = [token for pushed in tokens_of(delta) for token in self._hold.push(pushed)]
            pieces = [piece for token in free for piece in self._token(token)]
        else:
            rest = self._hold.finish(delta)
            pieces = [piece for token in rest.whole for piece in self._token(token)]
            pieces += self._last(rest)
            self.ending = ending_of(delta, rest.matched, self._tokenizer, self._submit)
        for piece in pieces:
            self._count(piece)
        return _merged(pieces)

    def _token(self, token: Token) -> Iterator[Piece]:
        self._waiting.append(token)
        events = self._parser.push([token.id])
        if not events:
            if token.id == self._sep:  # a marker ends here and has no text
                self._markers += [t.id for t in self._waiting]
                self._waiting.clear()
            return
        tokens, markers = tuple(self._waiting), tuple(self._markers)
        self._waiting.clear()
        self._markers.clear()
        for event in events:
            yield Piece(event, tokens, markers)
            tokens, markers = (), ()

    def _last(self, rest: Rest) -> list[Piece]:
        """What is left at the end: the part of a token before a stop string in it, and what the parser held back."""
        spelled = self._tokenizer.encode(rest.text.decode(errors="ignore"))
        events = [*self._parser.push(spelled), *self._parser.finish()]
        tokens = (*self._waiting, *rest.cut)
        return [Piece(event, () if at else tokens) for at, event in enumerate(events)]

    def _count(self, piece: Piece) -> None:
        if isinstance(piece.event, ReasoningDelta):
            self.num_reasoning += len(piece.tokens)
        elif isinstance(piece.event, ReasoningWasContent):
            self.num_reasoning = 0


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of text of one kind as one piece, so that a step of several tokens is one event."""
    merged: list[Piece] = []
    for piece in pieces:
        joint = _joint(merged[-1], piece) if merged else None
        if joint is None:
            merged.append(piece)
        else:
            merged[-1] = joint
    return merged


def _joint(first: Piece, second: Piece) -> Piece | None:
    """Both as one piece; None where their kinds differ or it is no text."""
    event: Event
    match first.event, second.event:
        case ReasoningDelta(text), ReasoningDelta(more):
            event = ReasoningDelta(text + more)
        case ContentDelta(text), ContentDelta(more):
            event = ContentDelta(text + more)
        case _:
            return None
    return Piece(event, (*first.tokens, *second.tokens), (*first.markers, *second.markers))
