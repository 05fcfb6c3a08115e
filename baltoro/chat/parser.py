"""Ids of a completion -> events: reasoning, answer, tool calls, as they come.

In: ids, in any cut. Out: events (`events.py`). The completion continues a prompt that opened `think` or `response`:
    thoughts <|close|>think<|sep|> <|open|>response<|sep|> answer <|close|>response<|sep|>
    [<|open|>tools<|sep|> (<|open|>call tool="NAME" index="1"<|sep|>
        (<|open|>argument key="K" type="T"<|sep|> value <|close|>argument<|sep|>)*
    <|close|>call<|sep|>)* <|close|>tools<|sep|>] <|close|>message<|sep|> <|end_of_msg|>
Invariants: a marker starts with the id of `<|open|>` or `<|close|>` and ends with that of `<|sep|>`, so text that looks
like one is text; the cut of the ids does not change the sum of the events; text is never split inside a character; a
malformed call costs only itself.
Models err: a channel that opens closes the one before; a marker that fits nowhere is passed on as text inside a
channel; half a marker at the end is dropped.
Source: K3's completion grammar; the recoveries are those of the engines that serve it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from baltoro.chat.arguments import ArgumentStream
from baltoro.chat.events import (
    ContentDelta,
    Event,
    Parsed,
    ReasoningDelta,
    ReasoningWasContent,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    collect,
    joined,
)
from baltoro.chat.tokenizer import CLOSE, END_OF_MSG, EOS, OPEN, SEP, IncrementalDecoder, Tokenizer

_MAX_HEADER_BYTES = 4096  # a marker longer than this is text: a stray open may not swallow the answer
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


class Place(Enum):
    """Where in the message the stream is."""

    THINK = auto()
    RESPONSE = auto()
    BETWEEN = auto()  # outside of all channels
    TOOLS = auto()
    CALL = auto()
    ARGUMENT = auto()
    JSON = auto()
    DROPPED = auto()  # a tools channel that nobody asked for
    END = auto()


def parse(
    ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool, has_tools: bool = False, start_index: int = 0
) -> Parsed:
    """A whole completion, parsed by the stream parser."""
    parser = StreamParser(tokenizer, thinking=thinking, has_tools=has_tools, start_index=start_index)
    return collect([*parser.push(ids), *parser.finish()])


class StreamParser:
    """Parses one completion. Single writer: the stream it belongs to.

    `thinking`: the prompt opened the think channel, not the response. `has_tools`: without tools a tools channel is
    dropped. `start_index`: tool calls in the conversation so far; ids of calls are NAME_index counted on from there.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, has_tools: bool = False, start_index: int = 0) -> None:
        self._tokenizer = tokenizer
        self._open, self._close, self._sep = (tokenizer.special(name) for name in (OPEN, CLOSE, SEP))
        self._ends = (tokenizer.special(END_OF_MSG), tokenizer.special(EOS))
        self._has_tools = has_tools
        self._start_index = start_index
        self._place = Place.THINK if thinking else Place.RESPONSE
        self._decoder = IncrementalDecoder(tokenizer)
        self._header: bytearray | None = None  # bytes since an open or close id
        self._is_opening = False
        self._has_think_marker = not thinking
        self._reasoning: list[str] = []
        self._strips = False  # white space that comes next is no content
        self._arguments: ArgumentStream | None = None  # of the call that is open; None in a malformed one
        self._is_writing = False  # inside an argument or json block that counts
        self._raw: list[str] = []
        self._out: list[Event] = []
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is a thought."""
        return self._place is Place.THINK

    def push(self, ids: Sequence[int]) -> list[Event]:
        """Take the next ids."""
        for token in ids:
            if self._place is Place.END:
                break
            if self._tokenizer.is_control(token):
                self._control(token)
            elif self._header is not None:
                self._header += self._tokenizer.token_bytes(token)
                if len(self._header) > _MAX_HEADER_BYTES:
                    self._text(self._literal(is_ended=False))
            else:
                self._text(self._decoder.push([token]))
        events = list(joined(self._out))
        self._out = []
        return events

    def finish(self) -> list[Event]:
        """The completion is over, wherever it was cut. Bytes held back come out; half a marker is dropped."""
        self._text(self._decoder.flush())
        self._place = Place.END
        return self.push([])

    def _control(self, token: int) -> None:
        self._text(self._decoder.flush())
        if token == self._sep:
            if self._header is None:
                self._text(SEP)
                return
            header = self._header.decode("utf-8", errors="replace")
            tag, _, attributes = header.partition(" ")
            found = {key: unescape(value) for key, value in _ATTRIBUTE.findall(attributes)}
            if not self._marker(self._is_opening, tag.strip(), found):
                self._text(self._literal())
            self._header = None
            return
        if self._header is not None:
            self._text(self._literal(is_ended=False))
        if token in self._ends:
            self._close_call()
            self._place = Place.END
        elif token in (self._open, self._close):
            self._header = bytearray()
            self._is_opening = token == self._open

    def _literal(self, *, is_ended: bool = True) -> str:
        """The text of the marker that was being read, which is then forgotten."""
        text = (self._header or b"").decode("utf-8", errors="replace")
        self._header = None
        return (OPEN if self._is_opening else CLOSE) + text + (SEP if is_ended else "")

    def _text(self, text: str) -> None:
        """Text of the place where the stream is."""
        if not text:
            return
        if self._place is Place.THINK:
            self._reasoning.append(text)
            self._out.append(ReasoningDelta(text))
        elif self._place in (Place.RESPONSE, Place.BETWEEN):
            if self._strips:
                text = text.lstrip()
                self._strips = not text
            self._out.append(ContentDelta(text))
        elif self._place is Place.ARGUMENT and self._is_writing and self._arguments is not None:
            self._fragment(self._arguments.text(text))
        elif self._place is Place.JSON:
            self._raw.append(text)

    def _fragment(self, fragment: str) -> None:
        self._out.append(ToolCallArguments(self.num_calls - 1, fragment))

    def _marker(self, is_opening: bool, tag: str, attributes: dict[str, str]) -> bool:
        """Act on a marker. False if it means nothing here and is text."""
        if self._place in (Place.ARGUMENT, Place.JSON):
            ends = tag in ("call", "argument", "json") or (not is_opening and tag in ("tools", "message"))
            if not ends:
                return False
            self._close_value()
            self._place = Place.CALL
        if tag in ("call", "argument", "json"):
            return self._call_marker(is_opening, tag, attributes)
        if tag in ("think", "response", "tools"):
            self._channel_marker(is_opening, tag)
            return True
        if tag == "message":
            if not is_opening:
                self._close_call()
                self._place = Place.END
            return True
        return self._place not in (Place.THINK, Place.RESPONSE)

    def _channel_marker(self, is_opening: bool, tag: str) -> None:
        self._close_call()
        was = self._place
        self._place = Place.BETWEEN
        self._strips = True
        if is_opening and tag == "think":
            self._place = Place.THINK
        elif is_opening and tag == "response":
            self._place = Place.RESPONSE
            self._strips = self.num_calls > 0
        elif is_opening:
            self._place = Place.TOOLS if self._has_tools else Place.DROPPED
        elif tag == "response" and was is Place.THINK and not self._has_think_marker and self._reasoning:
            self._out.append(ReasoningWasContent("".join(self._reasoning)))
            self._reasoning.clear()
        elif tag == "think" and was is Place.RESPONSE:
            self._place, self._strips = was, False  # nothing to close: the answer goes on
        self._has_think_marker |= tag == "think"

    def _call_marker(self, is_opening: bool, tag: str, attributes: dict[str, str]) -> bool:
        if self._place in (Place.THINK, Place.RESPONSE):
            return False
        if not self._has_tools:
            self._place = Place.DROPPED
            return True
        if tag == "call":
            self._close_call()
            self._place = Place.CALL if is_opening else Place.TOOLS
            if is_opening and (name := attributes.get("tool", "").strip()):
                self._begin_call(name)
        elif is_opening and self._place is Place.CALL:
            self._place = Place.ARGUMENT if tag == "argument" else Place.JSON
            key = attributes.get("key")
            self._is_writing = self._arguments is not None and (tag == "json" or key is not None)
            if self._is_writing and self._arguments is not None and key is not None and tag == "argument":
                self._fragment(self._arguments.open(key, attributes.get("type", "string")))
        return True

    def _begin_call(self, name: str) -> None:
        index = self.num_calls
        self.num_calls += 1
        self._arguments = ArgumentStream()
        self._out.append(ToolCallBegin(index, f"{name}_{self._start_index + index}", name))

    def _close_value(self) -> None:
        """End the argument or json block that is open."""
        if self._is_writing and self._arguments is not None:
            is_raw = self._place is Place.JSON
            self._fragment(self._arguments.raw("".join(self._raw)) if is_raw else self._arguments.close())
        self._raw.clear()
        self._is_writing = False

    def _close_call(self) -> None:
        """End the call that is open, if one is."""
        if self._place in (Place.ARGUMENT, Place.JSON):
            self._close_value()
        if self._arguments is not None:
            self._fragment(self._arguments.end())
            self._out.append(ToolCallEnd(self.num_calls - 1))
            self._arguments = None


def unescape(value: str) -> str:
    """The text of an attribute value."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
