"""The typed arguments of one tool call -> JSON text in fragments.

In: keys, types and pieces of values. Out: fragments of one JSON object, `{"key": value, ...}`.
Invariants: strings are passed on as they come; other values are held back until they are whole, because only then
can be seen whether they are JSON: what is none becomes a string.
Source: K3's tools channel; the raw fallback is that of its parsers.
"""

from __future__ import annotations

import json


class ArgumentStream:
    """Arguments of one call. Single writer: the parser of the stream. Every method returns the next fragment."""

    def __init__(self) -> None:
        self._is_empty = True
        self._has_raw = False
        self._is_string = False
        self._held: list[str] = []

    def open(self, key: str, kind: str) -> str:
        """Start the value of `key`. Only `kind` "string" is raw text."""
        if self._has_raw:
            return ""
        start = "{" if self._is_empty else ", "
        self._is_empty = False
        self._is_string = kind == "string"
        return f"{start}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_string else "")

    def text(self, piece: str) -> str:
        """More of the value."""
        if self._has_raw:
            return ""
        if self._is_string:
            return json.dumps(piece, ensure_ascii=False)[1:-1]
        self._held.append(piece)
        return ""

    def close(self) -> str:
        """End the value."""
        if self._has_raw:
            return ""
        if self._is_string:
            self._is_string = False
            return '"'
        value = "".join(self._held)
        self._held.clear()
        return value.strip() if is_json(value) else json.dumps(value, ensure_ascii=False)

    def raw(self, text: str) -> str:
        """All arguments at once, as the model wrote them. Counts only if nothing came before it."""
        if not self._is_empty or self._has_raw:
            return ""
        self._has_raw = True
        return text

    def end(self) -> str:
        """End the object."""
        if self._has_raw:
            return ""
        return "{}" if self._is_empty else "}"


def is_json(text: str) -> bool:
    """True for JSON as the standard has it: NaN and Infinity are none."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no JSON")
