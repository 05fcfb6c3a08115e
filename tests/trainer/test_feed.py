"""The feed: what a thread makes ahead is what would have been made in turn, and a checkpoint knows nothing of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.errors import ConfigError
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.data import Mixture
from baltoro.trainer.feed import Feed, StepBatches
from tests.trainer.harness import make_data, tiny_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny_recipe(make_data(tmp_path_factory.mktemp("feed")), steps=12)


def feed(config: TrainConfig, *, prefetch: bool) -> Feed:
    config = replace(config, data=replace(config.data, prefetch=prefetch))
    mixture = Mixture.open(config.data.folder, "train", {"prose", "talk"}, unit_tokens=48, seed=1)
    return Feed(config, mixture)


def ids(step: StepBatches) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in step.batches]


def test_ahead_or_not_the_steps_and_the_states_after_them_are_the_same(recipe: TrainConfig) -> None:
    ahead, plain = feed(recipe, prefetch=True), feed(recipe, prefetch=False)
    for step in range(recipe.steps):
        one, other = ahead.take(step), plain.take(step)
        assert ids(one) == ids(other) and one.total == other.total and one.ahead_total == other.ahead_total
        assert ahead.state() == plain.state() == one.after


@settings(max_examples=15, deadline=None)
@given(jumps=st.lists(st.integers(0, 11), min_size=1, max_size=4))
def test_another_step_than_the_next_one_reads_on_from_what_was_handed_out(
    recipe: TrainConfig, jumps: list[int]
) -> None:
    ahead, plain = feed(recipe, prefetch=True), feed(recipe, prefetch=False)
    for step in jumps:
        assert ids(ahead.take(step)) == ids(plain.take(step))
        assert ahead.state() == plain.state()


def test_a_state_resumes_at_the_step_after_it_whatever_was_ahead(recipe: TrainConfig) -> None:
    first = feed(recipe, prefetch=True)
    for step in range(4):
        first.take(step)
    state, rest = first.state(), [ids(first.take(step)) for step in range(4, 8)]
    again = feed(recipe, prefetch=True)
    again.take(0)  # something is ahead when the state comes
    again.load_state(state)
    assert [ids(again.take(step)) for step in range(4, 8)] == rest


def test_an_error_of_the_thread_comes_with_the_step_that_has_it(recipe: TrainConfig) -> None:
    # its second stage asks for a corpus that was not opened
    stages = (recipe.stages[0], replace(recipe.stages[1], mix={"prose": 1.0, "poems": 9.0}))
    broken = feed(replace(recipe, steps=2, stages=stages), prefetch=True)
    broken.take(0)
    with pytest.raises(KeyError, match="poems"):
        broken.take(1)


def test_a_batch_too_small_for_a_dialogue_is_refused_as_without_a_thread(recipe: TrainConfig) -> None:
    batch = replace(recipe.batch, tokens=5, micro_tokens=5)
    stages = tuple(replace(stage, max_length=5, mix={"talk": 1.0}) for stage in recipe.stages)
    with pytest.raises(ConfigError, match="micro_tokens"):
        feed(replace(recipe, batch=batch, stages=stages), prefetch=True).take(0)


def test_denominators_are_the_sums_of_the_weights(recipe: TrainConfig) -> None:
    step = feed(recipe, prefetch=False).take(0)
    assert len(step.batches) == 2
    assert step.total == pytest.approx(sum(float(batch.weights.sum()) for batch in step.batches))
    ahead = sum(float(weights.sum()) for batch in step.batches for _, weights in batch.ahead)
    assert step.ahead_total == pytest.approx(ahead)
    by_source = torch.tensor([batch.source_weights for batch in step.batches]).sum(0)
    assert float(by_source.sum()) == pytest.approx(step.total)
