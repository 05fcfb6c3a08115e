"""Reads the answer out of a reply and compares it: numbers and words, from the response channel alone.

In: a `Reply`, a check {"kind", "gold"}. Out: `Score`.
Kinds: number (what stands in the last \\boxed{...}, else the last thing with a digit in it), exact (the last box, else
the whole response; a full stop at the end is let pass).
Invariants: thoughts earn nothing; a reply that was cut off earns nothing, even if the answer stands in it already;
right or wrong, no partial credit; one answer: what holds several (a box with two numbers, 41-42, ±42), or only a piece
of something else (1/42, 1e42, x42, the end of 84 - 42), is no number and wrong; digits are those of ASCII; the text is
compared, never evaluated, in time that grows with its length.
Source: docs/spec/training.md A.4; docs/rooms/envs.md lists the attacks that are tests.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from decimal import Decimal

from baltoro.envs.base import Json, Reply, Score, Step, Task, infrastructure
from baltoro.errors import ConfigError

NUMBER_TOLERANCE = Decimal("1e-4")  # of golds with decimals, but
RELATIVE_TOLERANCE = Decimal("1e-2")  # never more than this share of the gold: 0 is not near to 0.00005
LONGEST_NUMBER = 100  # characters; anything longer is no answer to a task of ours, and slow to read
_NUMBER = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?")
# what is one thing with the digits in it; \x1a stands for other digits, \x1b for what changes those beside it
_WORD = re.compile(r"[0-9A-Za-z_.,/^%+\x1a\x1b-]+")
_HAS_DIGIT = re.compile(r"[0-9\x1a]")
_FRACTION = re.compile(r"\\[dt]?frac *\{([^{}]*)\} *\{([^{}]*)\}")
_OPERATOR = re.compile(r"[0-9)] *(?:[-+*/x^]|\\times|\\cdot|\\div)+ *\Z")  # before a number: it is the end of a sum
_SIGN_APART = re.compile(r"(\A|[=:({]) *- +(?=[0-9])")
_MINUS = frozenset("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d")
_TIMES = frozenset("\u00d7\u00f7\u00b7\u22c5\u2215")
_JOINS = frozenset("\u00b1\u2213\u221a\u221b\u221e")  # a sign before a number that makes another of it


def judge(reply: Reply, check: Json) -> Score:
    """Score of a single reply. Errors: ConfigError for a kind that is not known."""
    if check["kind"] not in KINDS:
        raise ConfigError(f"check kind {check['kind']!r} is not known; use one of {', '.join(KINDS)}")
    extract, is_equal = KINDS[check["kind"]]
    if reply.finish_reason in ("abort", "error"):
        return infrastructure(f"the completion ended with {reply.finish_reason}")
    answer = extract(reply.content)
    if reply.finish_reason == "length":
        return Score(0.0, "truncated", answer)
    if answer is None:
        thought = extract(reply.reasoning or "")
        is_known = thought is not None and is_equal(thought, check["gold"])
        return Score(0.0, "wrong_channel" if is_known else "no_answer", thought if is_known else None)
    return Score(1.0, "right", answer) if is_equal(answer, check["gold"]) else Score(0.0, "wrong", answer)


def number_in(text: str) -> str | None:
    """The number that a text ends on, without thousands separators; or what stands in its place and is none."""
    box = _box(text)
    words = _words(text if box is None else box)
    if not words:
        return None
    if box is not None and len(words) > 1:
        return box.strip()[:LONGEST_NUMBER]
    word = words[-1]
    if len(word) > LONGEST_NUMBER:
        return None
    return word.replace(",", "") if _is_plain(word) else word


def words_in(text: str) -> str | None:
    """The answer where it is a word or a phrase."""
    box = _box(text)
    return (text if box is None else box).strip().removesuffix(".").strip() or None


def _box(text: str) -> str | None:
    """What stands in the last \\boxed{...}, braces inside it included; None if there is none or it does not end."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[begin:place]
    return None


def _words(text: str) -> list[str]:
    """Everything with a digit in it, each with all that belongs to it; the last with the operator before it."""
    text = _FRACTION.sub(r"\1/\2", text.replace("\x1a", " ").replace("\x1b", " "))
    if not text.isascii():
        text = "".join(c if c.isascii() else _plain(c) for c in text)
    text = _SIGN_APART.sub(r"\1-", re.sub(r"-{2,}|\.{2,}", " ", text))
    found = [one for one in _WORD.finditer(text) if _HAS_DIGIT.search(one[0])]
    words = [one[0].strip("_").rstrip(".,").removeprefix("+") for one in found]
    if found and (before := _OPERATOR.search(text[max(0, found[-1].start() - LONGEST_NUMBER) : found[-1].start()])):
        words[-1] = before[0].replace(" ", "") + words[-1]
    return words


def _plain(sign: str) -> str:
    """What is not ASCII as a sign that is: see the patterns above; a space for all that separates."""
    category = unicodedata.category(sign)
    if sign in _MINUS:
        return "-"
    if sign in _TIMES:
        return "*"
    if category[0] == "N":
        return "\x1a"
    return "\x1b" if sign in _JOINS or category[0] == "M" or category == "Cf" else " "


def _is_plain(word: str) -> bool:
    return any(digit in word for digit in "0123456789") and _NUMBER.fullmatch(word) is not None


def _is_number(answer: str, gold: object) -> bool:
    if not _is_plain(answer):
        return False
    wanted = Decimal(str(gold))
    tolerance = min(NUMBER_TOLERANCE, RELATIVE_TOLERANCE * abs(wanted)) if isinstance(gold, float) else Decimal(0)
    return abs(Decimal(answer) - wanted) <= tolerance


def _is_exact(answer: str, gold: object) -> bool:
    return answer == str(gold).strip().removesuffix(".").strip()


KINDS: Mapping[str, tuple[Callable[[str], str | None], Callable[[str, object], bool]]] = {
    "number": (number_in, _is_number),
    "exact": (words_in, _is_exact),
}


class SingleTurn:
    """The env of tasks that are one question and one reply. Single writer: its rollout."""

    def __init__(self, score_reply: Callable[[Reply, Task], Score] | None = None) -> None:
        self._score_reply = score_reply or (lambda reply, task: judge(reply, task.check))
        self._task: Task | None = None
        self._reply: Reply | None = None

    def reset(self, task: Task) -> tuple[Json, ...]:
        self._task, self._reply = task, None
        return task.messages

    def step(self, reply: Reply) -> Step:
        self._reply = reply
        return Step(is_done=True)

    def score(self) -> Score:
        if self._task is None or self._reply is None:
            return infrastructure("there was no reply to judge")
        return self._score_reply(self._reply, self._task)

    def close(self) -> None:
        self._task = self._reply = None
