"""reasoning-gym as tasks: gold answers score 1, splits do not meet, the package's scorers run in the pool."""

from __future__ import annotations

from itertools import islice

import pytest

from baltoro.envs.base import Reply, Score, fixed_set, infrastructure, play, validate
from baltoro.envs.pool import Job, RewardPool
from baltoro.envs.tasks.gym import FAMILIES, Gym
from baltoro.errors import ConfigError
from scripts.data.tiny.gym import FAMILIES as CORPUS

pytest.importorskip("reasoning_gym", reason="the extra `train` is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_gold_answers_score_1_and_silence_0(name: str) -> None:
    family = Gym(name)
    assert validate(family, islice(family.tasks("train", 0), 10)) == []
    assert validate(family, fixed_set(family, 3)) == []


@pytest.mark.slow
def test_splits_do_not_meet_and_seeds_decide() -> None:
    family = Gym("gcd")
    train = {task.question for task in islice(family.tasks("train", 0), 500)}
    assert not train & {task.question for task in islice(family.tasks("eval", 0), 50)}
    one, two = ([task.id for task in islice(family.tasks("train", seed), 10)] for seed in (4, 4))
    assert one == two


def test_families_and_options_are_those_of_the_corpora() -> None:
    assert {name: (kind, dict(options)) for name, (kind, options) in FAMILIES.items()} == {
        name: (family.kind, family.options) for name, family in CORPUS.items()
    }


def test_options_can_be_made_harder() -> None:
    family = Gym("chain_sum", {"min_terms": 6, "max_terms": 6, "min_digits": 3, "max_digits": 3})
    question = next(family.tasks("train", 0)).question
    assert question.count(" + ") + question.count(" - ") == 5


def test_a_near_answer_is_wrong() -> None:
    family = Gym("spell_backward")
    task = next(family.tasks("train", 0))
    assert play(family.env(), task, [Reply(f"{task.check['answer']}x")]).reason == "wrong"


@pytest.mark.slow
def test_other_families_are_judged_by_the_package_in_the_pool() -> None:
    with RewardPool(1, timeout_s=20) as pool:
        family = Gym("countdown", pool=pool)
        task = next(family.tasks("train", 0))
        assert validate(family, [task]) == []
        assert play(family.env(), task, [Reply("1 + 1")]).reason == "wrong"
        assert play(family.env(), task, [Reply("1", finish_reason="length")]).reason == "truncated"


class Brittle(RewardPool):
    """A judge that dies of some answers, or of all."""

    def __init__(self, dies_of: str) -> None:
        super().__init__(1)
        self.dies_of = dies_of

    def score(self, job: Job) -> Score:
        answer = str(job.arguments["answer"])
        return infrastructure("died") if self.dies_of in answer else Score(1.0, "right", answer)


def test_an_answer_that_breaks_the_scorer_is_wrong_and_a_broken_scorer_excludes() -> None:
    """Else breaking it would be a way out of a low reward."""
    for dies_of, reason in (("boom", "wrong"), ("", "infrastructure")):
        family = Gym("countdown", pool=Brittle(dies_of))
        task = next(family.tasks("train", 0))
        assert play(family.env(), task, [Reply("boom")]).reason == reason


def test_what_the_package_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward pool"):
        Gym("countdown")
    with pytest.raises(ConfigError, match="cannot make gcd"):
        Gym("gcd", {"no_such_option": 1})
    with pytest.raises(ConfigError, match="cannot make spell_backward"):  # its list has no word so long: IndexError
        Gym("spell_backward", {"min_word_len": 12, "max_word_len": 16})
