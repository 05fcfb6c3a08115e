"""Reads the answer out of a reply and compares it: numbers and words, from the response channel alone.

In: a `Reply`, a check {"kind", "gold"}. Out: `Score`.
Kinds: number (the last \\boxed{...}, else the last number), exact (the last box, else the whole response; a full stop
at the end is let pass).
Invariants: thoughts earn nothing; a reply that was cut off earns nothing, even if the answer stands in it already;
right or wrong, no partial credit; the text is compared, never evaluated.
Source: docs/spec/training.md A.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from baltoro.envs.base import Json, Reply, Score, Step, Task, infrastructure
from baltoro.errors import ConfigError

NUMBER_TOLERANCE = Decimal("1e-4")  # of golds with decimals
LONGEST_NUMBER = 100  # characters; anything longer is no answer to a task of ours, and slow to read
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


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
    """The number that a text ends on, without thousands separators."""
    boxes = _BOX.findall(text)
    found = _NUMBER.findall((boxes[-1] if boxes else text).replace(",", ""))
    return found[-1] if found and len(found[-1]) <= LONGEST_NUMBER else None


def words_in(text: str) -> str | None:
    """The answer where it is a word or a phrase."""
    boxes = _BOX.findall(text)
    return (boxes[-1] if boxes else text).strip().removesuffix(".").strip() or None


def _is_number(answer: str, gold: object) -> bool:
    tolerance = NUMBER_TOLERANCE if isinstance(gold, float) else 0
    return abs(Decimal(answer) - Decimal(str(gold))) <= tolerance


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
