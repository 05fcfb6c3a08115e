"""Stop strings: over token ids for the engine, over text for what users see.

In: ids one by one, or text in pieces. Out: when to stop and how many ids belong to the stop string; or the text before.
Invariants: matching is on UTF-8 bytes, so a stop string may start and end in the middle of ids and its characters may
be spread over ids. Of several strings the one that is complete first counts (of these the longest): then the cut does
not depend on how the text came, and ids and text agree.
Markers of the chat protocol are not text: what stands between `<|open|>` or `<|close|>` and `<|sep|>` matches nothing,
and no match reaches over a control id.
Limit: what a model thinks is text too, so a stop string ends it there.
Source: what OpenAI's `stop` means, on ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import AnyStr

from baltoro.chat.tokenizer import CLOSE, OPEN, SEP, Tokenizer
from baltoro.errors import RequestError
from baltoro.protocol.sampling import StopRule


def make_stop_rule(tokenizer: Tokenizer, stops: Sequence[str]) -> StopRule:
    """The rule for one request. Errors: RequestError for an empty stop string."""
    return TextStopRule(tokenizer, check_stops(stops))


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings, without doubles. Errors: RequestError if one is empty."""
    if not all(stops):
        raise RequestError("stop strings must not be empty; leave stop out to have none", param="stop")
    return tuple(dict.fromkeys(stops))


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to where the stop string starts that is complete first; all of it if there is none."""
    found = first_stop(text, stops)
    return text if found is None else text[: found[0]]


def first_stop(text: AnyStr, stops: Sequence[AnyStr]) -> tuple[int, AnyStr] | None:
    """(place, stop string) of the one that is complete first in `text`, of several such the longest."""
    found = [(place + len(stop), place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


class TextStopRule:
    """A StopRule for strings. Single writer: the engine, for one completion."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop.encode() for stop in stops]
        self._reach = max(map(len, self._stops), default=1) - 1  # bytes before the newest id that can still matter
        self._openers = (tokenizer.special(OPEN), tokenizer.special(CLOSE))
        self._sep = tokenizer.special(SEP)
        self._is_in_marker = False
        self._tail = b""
        self._sizes: deque[int] = deque()  # bytes of each id that has some in the tail

    def push(self, token: int) -> int | None:
        """None: go on. n: stop; the last n ids lie wholly in the stop string (or after it).

        n is 0 when the string starts in the middle of the newest id; the id before the last n may hold its start.
        """
        if self._tokenizer.is_control(token):
            self._is_in_marker = token in self._openers or (self._is_in_marker and token != self._sep)
            self._forget()
            return None
        if self._is_in_marker:
            return None
        piece = self._tokenizer.token_bytes(token)
        self._tail += piece
        self._sizes.append(len(piece))
        if (found := first_stop(self._tail, self._stops)) is not None:
            num_trimmed = self._num_after(found[0])
            self._forget()
            return num_trimmed
        self._shorten()
        return None

    def _num_after(self, place: int) -> int:
        """How many of the last ids start at or after byte `place` of the tail."""
        start, count = len(self._tail), 0
        for size in reversed(self._sizes):
            start -= size
            if start < place:
                break
            count += 1
        return count

    def _shorten(self) -> None:
        """Drop whole ids that no match can reach any more."""
        while self._sizes and len(self._tail) - self._sizes[0] >= self._reach:
            self._tail = self._tail[self._sizes.popleft() :]

    def _forget(self) -> None:
        self._tail = b""
        self._sizes.clear()


class StopCutter:
    """Text in pieces -> the same text up to the first stop string. Single writer: the stream it belongs to.

    Text that may be the beginning of a stop string is held back. The pieces put together equal `cut_at_stop` of all.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """The text that is safe to show."""
        if self.is_stopped:
            return ""
        text = self._held + text
        cut = cut_at_stop(text, self._stops)
        if len(cut) < len(text):
            self.is_stopped, self._held = True, ""
            return cut
        num_safe = len(text) - max((_num_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[num_safe:]
        return text[:num_safe]

    def finish(self) -> str:
        """The stream is over: what was held back is text after all, unless a stop string came."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
