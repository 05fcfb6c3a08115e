"""What a completion says, piece by piece, and the whole that the pieces add up to.

In: events of `StreamParser`. Out: `Parsed`.
Invariants: `collect` is the only way to a whole answer, so a streamed answer and a whole one cannot differ; fragments
of one call, put together, are the JSON text of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model thinks."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class ReasoningWasContent(msgspec.Struct, frozen=True):
    """The model skipped its think channel: all that was called reasoning so far, `text`, was the answer."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call starts. `index` counts the calls of this message from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments."""

    index: int
    json_fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The arguments are whole. A call that was cut off has no end, and its JSON stays open."""

    index: int


Event = ReasoningDelta | ContentDelta | ReasoningWasContent | ToolCallBegin | ToolCallArguments | ToolCallEnd


class ParsedCall(msgspec.Struct, frozen=True):
    """One tool call; `arguments` is JSON text, valid if `is_whole`."""

    id: str
    name: str
    arguments: str
    is_whole: bool


class Parsed(msgspec.Struct, frozen=True):
    """A whole answer. `reasoning` is None where the model did not think."""

    reasoning: str | None
    content: str
    tool_calls: tuple[ParsedCall, ...] = ()


def collect(events: Iterable[Event]) -> Parsed:
    """Put the events of one completion together."""
    reasoning: list[str] = []
    content: list[str] = []
    begun: list[ToolCallBegin] = []
    fragments: list[list[str]] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ReasoningWasContent(text):
                reasoning.clear()
                content.append(text)
            case ToolCallBegin():
                begun.append(event)
                fragments.append([])
            case ToolCallArguments(index, fragment):
                fragments[index].append(fragment)
            case ToolCallEnd(index):
                ended.add(index)
    calls = zip(begun, fragments, strict=True)
    return Parsed(
        reasoning="".join(reasoning) if reasoning else None,
        content="".join(content),
        tool_calls=tuple(ParsedCall(b.id, b.name, "".join(parts), b.index in ended) for b, parts in calls),
    )


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """The same events with neighbours of one kind made one, and without empty ones."""
    for _, group in groupby(events, key=lambda e: (type(e), getattr(e, "index", None))):
        first, *rest = group
        if isinstance(first, ReasoningDelta | ContentDelta):
            if text := first.text + "".join(e.text for e in rest if isinstance(e, ReasoningDelta | ContentDelta)):
                yield type(first)(text)
        elif isinstance(first, ToolCallArguments):
            fragments = (e.json_fragment for e in rest if isinstance(e, ToolCallArguments))
            if text := first.json_fragment + "".join(fragments):
                yield ToolCallArguments(first.index, text)
        else:
            yield first
            yield from rest
