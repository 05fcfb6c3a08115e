"""Is an answer right? Strict comparisons, and how sure the count of right ones makes us.

In: the assistant's message of a reply, a check {"kind", "gold"}. Out: bool; Wilson intervals.
Kinds: number (the last number of the text), exact (the text), has (one of several words or phrases is in the text),
one_of (the text is one of several), overlap (F1 of the words), calls (names and typed arguments, in order; no calls if
gold is empty), json (the text is that value).
Invariants: right or wrong, no partial credit; types count (1 is not true, 5 is not "5", and 5.0 is not the integer 5).
Source: E. B. Wilson 1927 for the interval.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from baltoro.errors import ConfigError

NUMBER_TOLERANCE = 1e-4  # of decimals: reasoning-gym's own for probabilities
SMALLEST_OVERLAP = 0.6
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Message = Mapping[str, Any]


def is_right(message: Message, check: Mapping[str, Any]) -> bool:
    """Errors: ConfigError for a kind that is not known."""
    judge = JUDGES.get(check["kind"])
    if judge is None:
        raise ConfigError(f"check kind {check['kind']!r} is not known; use one of {', '.join(JUDGES)}")
    return judge(message, check["gold"])


def same(found: object, gold: object) -> bool:
    """Equal in value and type; a float may be written as a whole number."""
    if isinstance(gold, dict):
        return isinstance(found, dict) and found.keys() == gold.keys() and all(same(found[k], gold[k]) for k in gold)
    if isinstance(gold, list):
        return (
            isinstance(found, list)
            and len(found) == len(gold)
            and all(same(f, g) for f, g in zip(found, gold, strict=True))
        )
    if isinstance(gold, float) and type(found) is int:
        return found == gold
    return type(found) is type(gold) and found == gold


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of the share that `right` of `asked` supports; z = 1.96 is 95 %."""
    if asked == 0:
        return 0.0, 1.0
    share, room = right / asked, z * z / asked
    middle = (share + room / 2) / (1 + room)
    half = z / (1 + room) * math.sqrt(share * (1 - share) / asked + room / (4 * asked))
    return max(0.0, middle - half), min(1.0, middle + half)


def _text(message: Message) -> str:
    return (message.get("content") or "").strip()


def _number(message: Message, gold: Any) -> bool:
    found = _NUMBER.findall(_text(message).replace(",", ""))
    if not found:
        return False
    return bool(abs(float(found[-1]) - gold) <= (NUMBER_TOLERANCE if isinstance(gold, float) else 0))


def _exact(message: Message, gold: Any) -> bool:
    text = _text(message)
    return gold in (text, text.rstrip("."))


def _has(message: Message, gold: Any) -> bool:
    text = _text(message).lower()
    return any(re.search(rf"(?<!\w){re.escape(phrase.lower())}(?!\w)", text) for phrase in gold)


def _one_of(message: Message, gold: Any) -> bool:
    return _text(message).rstrip(".").lower() in {phrase.lower() for phrase in gold}


def _overlap(message: Message, gold: Any) -> bool:
    """Words of the answer, without its subject ("word: ..."), against those of the nearest gold."""
    text = _text(message)
    body = text.partition(": ")[2] or text
    return max(f1(body, phrase) for phrase in gold) >= SMALLEST_OVERLAP


def f1(found: str, gold: str) -> float:
    """F1 of the sets of words."""
    one, two = (set(re.findall(r"\w+", text.lower())) for text in (found, gold))
    shared = len(one & two)
    return 2 * shared / (len(one) + len(two)) if shared else 0.0


def _calls(message: Message, gold: Any) -> bool:
    calls = message.get("tool_calls") or []
    if len(calls) != len(gold):
        return False
    for call, wanted in zip(calls, gold, strict=True):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            return False
        if call["function"]["name"] != wanted["name"] or not same(arguments, wanted["arguments"]):
            return False
    return True


def _json(message: Message, gold: Any) -> bool:
    try:
        return same(json.loads(_text(message)), gold)
    except ValueError:
        return False


JUDGES: Mapping[str, Callable[[Message, Any], bool]] = {
    "number": _number,
    "exact": _exact,
    "has": _has,
    "one_of": _one_of,
    "overlap": _overlap,
    "calls": _calls,
    "json": _json,
}
