"""Sums: right golds, splits that never meet, the same draws for the same seed; one held-out rule for corpora and RL."""

from __future__ import annotations

from itertools import islice

import pytest

from baltoro.envs.base import Reply, fixed_set, play, validate
from baltoro.envs.tasks import held_out
from baltoro.envs.tasks.arithmetic import Arithmetic, value
from baltoro.errors import ConfigError
from scripts.data.tiny import exchange

FAMILIES = [
    Arithmetic(),
    Arithmetic(operations="x", high_factor=99),
    Arithmetic(operations="+-x", low=0, high=999, num_terms=4),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_references_score_1_and_silence_0(family: Arithmetic) -> None:
    assert validate(family, fixed_set(family, 40)) == []
    assert validate(family, islice(family.tasks("train", 3), 40)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_golds_are_the_values_of_the_expressions(family: Arithmetic) -> None:
    for task in islice(family.tasks("train", 1), 100):
        assert task.check["gold"] == eval(task.check["expression"].replace("x", "*"))
        assert task.check["expression"] in task.question


def test_products_come_first() -> None:
    assert value([2, 3, 4, 5], ["+", "x", "-"]) == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_the_splits_never_meet(family: Arithmetic) -> None:
    train = {task.check["expression"] for task in islice(family.tasks("train", 0), 3000)}
    other = {task.check["expression"] for task in islice(family.tasks("eval", 0), 300)}
    assert not train & other


def test_no_order_of_a_held_out_pair_is_trained_on() -> None:
    for task in islice(Arithmetic().tasks("train", 0), 2000):
        assert not held_out.shows_held_out_pair(task.question)


def test_the_rule_is_that_of_the_corpora() -> None:
    pairs = [(a, b) for a in range(5, 105, 7) for b in range(5, 105, 3)]
    assert [held_out.pair_is_held_out(*p) for p in pairs] == [exchange.pair_is_held_out(*p) for p in pairs]
    assert [held_out.is_mine("eval", "gcd", p) for p in pairs] == [exchange.is_mine("eval", "gcd", p) for p in pairs]
    texts = [f"{a} {sign} {b}" for a, b in pairs for sign in ("+", "minus", "x")]
    assert [held_out.shows_held_out_pair(t) for t in texts] == [exchange.shows_held_out_pair(t) for t in texts]


def test_the_same_seed_draws_the_same() -> None:
    one, two, other = (list(islice(Arithmetic().tasks("train", seed), 20)) for seed in (1, 1, 2))
    assert one == two != other


def test_a_wrong_number_scores_0() -> None:
    family = Arithmetic()
    task = next(family.tasks("train", 0))
    assert play(family.env(), task, [Reply(f"It is {task.check['gold'] + 1}.")]).reason == "wrong"


def test_settings_with_nothing_to_ask_are_refused() -> None:
    for options in ({"operations": "/"}, {"low": 9, "high": 3}, {"num_terms": 1}, {"operations": ""}):
        with pytest.raises(ConfigError):
            Arithmetic(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no eval tasks"):
        next(Arithmetic(low=20, high=20).tasks("eval", 0))
