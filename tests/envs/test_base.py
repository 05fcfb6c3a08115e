"""Scores, reason codes, tasks, and the validation of families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from baltoro.envs.base import (
    REASON_CODES,
    Env,
    Reply,
    Score,
    Split,
    Task,
    count_reasons,
    fixed_set,
    infrastructure,
    play,
    question_task,
    validate,
)
from baltoro.envs.rewards import SingleTurn
from baltoro.errors import ConfigError


def test_infrastructure_alone_has_no_score() -> None:
    assert infrastructure("x").is_excluded
    for score, reason in ((0.0, "infrastructure"), (None, "wrong"), (None, "timeout"), (float("nan"), "right")):
        with pytest.raises(ConfigError):
            Score(score, reason)  # type: ignore[arg-type]


def test_a_zero_is_not_excluded() -> None:
    assert not Score(0.0, "wrong").is_excluded


def test_the_histogram_has_every_reason() -> None:
    counts = count_reasons([Score(1.0, "right"), Score(0.0, "wrong"), Score(1.0, "right")])
    assert counts == {**dict.fromkeys(REASON_CODES, 0), "right": 2, "wrong": 1}


@dataclass(frozen=True)
class Toy:
    """Ten tasks: what number is it?"""

    name: str = "toy"
    gold_shift: int = 0

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        while True:
            for i in range(10):
                yield question_task(self.name, f"Say {i}.", {"kind": "number", "gold": i + self.gold_shift})

    def env(self) -> Env:
        return SingleTurn()

    def reference(self, task: Task) -> Sequence[Reply]:
        return [Reply(task.question)]


def test_ids_are_those_of_the_question() -> None:
    first, second = (next(Toy().tasks("train", seed)) for seed in (0, 1))
    assert first == second and first.id.startswith("toy/")
    assert question_task("toy", "Say 1.", {}).id != first.id != question_task("other", "Say 0.", {}).id


def test_a_fixed_set_has_different_tasks_or_is_refused() -> None:
    assert len({task.id for task in fixed_set(Toy(), 10)}) == 10
    with pytest.raises(ConfigError, match="only 10"):
        fixed_set(Toy(), 11)


def test_validation_finds_a_wrong_gold_and_an_empty_set() -> None:
    tasks = fixed_set(Toy(), 3)
    assert validate(Toy(), tasks) == []
    wrong = replace(tasks[1], check={"kind": "number", "gold": -5})
    assert validate(Toy(), [tasks[0], wrong]) == [f"{wrong.id}: the reference scores 0.0 (wrong )"]
    assert validate(Toy(), []) == ["toy: there was no task to validate"]


def test_validation_finds_pay_for_silence() -> None:
    class Generous(SingleTurn):
        def score(self) -> Score:
            return Score(1.0, "right")

    class GenerousToy(Toy):
        def env(self) -> Env:
            return Generous()

    assert "the silence scores 1.0" in validate(GenerousToy(), fixed_set(Toy(), 1))[0]


def test_an_attempt_without_a_reply_is_no_zero() -> None:
    env = SingleTurn()
    assert env.score().is_excluded
    env.reset(next(Toy().tasks("train", 0)))
    assert env.score().is_excluded


def test_an_env_forgets_the_attempt_before() -> None:
    env, (one, two) = SingleTurn(), fixed_set(Toy(), 2)
    assert play(env, one, [Reply("0")]).score == 1.0
    env.reset(two)
    assert env.score().is_excluded
