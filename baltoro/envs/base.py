"""The contract of tasks and envs: a problem, the world it is tried in, and the judgement of what came out.

In: replies of a policy, as `chat` parsed them. Out: messages to show next, and one `Score` at the end.
Invariants: a score is a number, the answer that was read, and a reason; an attempt that could not be judged has no
number, is excluded from its group, and is never 0; `score` may be called once a step said that it is done; what a
family draws depends on split and seed alone, so a cursor is a count.
Not here: rendering to ids (`chat`), collecting attempts (`rl`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol, get_args

import msgspec

from baltoro.chat.events import Parsed, ParsedCall
from baltoro.errors import ConfigError
from baltoro.protocol.sampling import FinishReason

Json = Mapping[str, Any]
Split = Literal["train", "eval"]
ReasonCode = Literal["right", "wrong", "no_answer", "wrong_channel", "truncated", "timeout", "infrastructure"]
REASON_CODES: tuple[ReasonCode, ...] = get_args(ReasonCode)


class Score(msgspec.Struct, frozen=True):
    """What an attempt is worth. `answer` is what was read out of it, `detail` for people.

    right          the answer is the right one
    wrong          it is not
    no_answer      the response holds none
    wrong_channel  the response holds none, but the thoughts hold the right one
    truncated      the reply was cut off by a limit
    timeout        judging the answer did not end in time
    infrastructure something of ours failed: no score, excluded
    """

    score: float | None
    reason: ReasonCode
    answer: str | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.score is None) != (self.reason == "infrastructure"):
            raise ConfigError(f"reason {self.reason} with score {self.score}: infrastructure has none, all others have")
        if self.score is not None and not math.isfinite(self.score):
            raise ConfigError(f"a score must be a finite number, not {self.score}")

    @property
    def is_excluded(self) -> bool:
        return self.score is None


def infrastructure(detail: str) -> Score:
    """Could not be judged."""
    return Score(None, "infrastructure", detail=detail)


def count_reasons(scores: Iterable[Score]) -> dict[ReasonCode, int]:
    """How often each reason came, those that did not included."""
    found = Counter(score.reason for score in scores)
    return {code: found[code] for code in REASON_CODES}


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `id` is the same wherever and whenever it is drawn; `check` is how its family judges."""

    id: str
    family: str
    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    check: Json = field(default_factory=dict)

    @property
    def question(self) -> str:
        return str(self.messages[-1]["content"])


def question_task(family: str, question: str, check: Json, tools: tuple[Json, ...] = ()) -> Task:
    """A task of one message; its id is made of family and question."""
    digest = hashlib.sha256(f"{family}:{question}".encode()).hexdigest()
    return Task(f"{family}/{digest[:16]}", family, ({"role": "user", "content": question},), tools, check)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    finish_reason: FinishReason = "stop"


def reply_of(parsed: Parsed, finish_reason: FinishReason) -> Reply:
    """What `chat` made of a completion."""
    return Reply(parsed.content, parsed.reasoning, parsed.tool_calls, finish_reason)


@dataclass(frozen=True, slots=True)
class Step:
    """What the world says to a reply: messages that follow it, and whether the attempt is over."""

    messages: tuple[Json, ...] = ()
    is_done: bool = False


class Env(Protocol):
    """The world of one attempt at a time. Single writer: the rollout it belongs to."""

    def reset(self, task: Task) -> tuple[Json, ...]:
        """Begin an attempt. Out: the messages it opens with; tools are the task's."""

    def step(self, reply: Reply) -> Step:
        """Take a turn. Never raises for what a reply says."""

    def score(self) -> Score:
        """Judge the attempt."""

    def close(self) -> None:
        """Give everything back. May be called again."""


class Family(Protocol):
    """Tasks of one kind, and the world they are tried in."""

    @property
    def name(self) -> str:
        """As it stands in task ids and tables."""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Without end; the same for the same split and seed. No task of one split comes in the other."""

    def env(self) -> Env:
        """A new world."""

    def reference(self, task: Task) -> Sequence[Reply]:
        """Replies that score 1."""


def fixed_set(family: Family, count: int, *, split: Split = "eval", seed: int = 0, tries: int = 50) -> list[Task]:
    """`count` different tasks, always the same. Errors: ConfigError where the family has too few."""
    found: dict[str, Task] = {}
    for task in islice(family.tasks(split, seed), tries * count):
        found.setdefault(task.id, task)
        if len(found) == count:
            return list(found.values())
    raise ConfigError(f"{family.name} has only {len(found)} different tasks to evaluate with, not {count}")


def play(env: Env, task: Task, replies: Sequence[Reply]) -> Score:
    """An attempt with replies that are known beforehand."""
    env.reset(task)
    for reply in replies:
        if env.step(reply).is_done:
            break
    return env.score()


def validate(family: Family, tasks: Iterable[Task]) -> list[str]:
    """Tasks whose reference does not score 1, or that pay for saying nothing; an empty set is a complaint as well."""
    complaints: list[str] = []
    count = 0
    for task in tasks:
        count += 1
        env = family.env()
        try:
            for name, replies, wanted in (("reference", family.reference(task), 1.0), ("silence", [Reply("")], 0.0)):
                score = play(env, task, replies)
                if score.score != wanted:
                    complaints.append(f"{task.id}: the {name} scores {score.score} ({score.reason} {score.detail})")
        finally:
            env.close()
    return complaints if count else [f"{family.name}: there was no task to validate"]
