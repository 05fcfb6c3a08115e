"""Do engine and trainer speak of one policy: what the checks let pass, and what each of them catches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest
import torch

from baltoro.errors import DigestMismatch, InvariantError, TransferError
from baltoro.model.adapter import Adapter, SiteFactors
from baltoro.model.context import FakeQuant
from baltoro.rl.drift import LEAST_EFFECT, Canary, check_drift, compare, distances, perturbed, start_test
from baltoro.rl.inline import InlinePolicy
from baltoro.rl.parts import Parts, open_parts
from baltoro.rl.sync import Sync, check_is_zero
from baltoro.trainer.ratio import Drift
from baltoro.transfer.manifest import Raw
from baltoro.transfer.transaction import Receipt
from tests.model.routing import make_near_ties
from tests.rl.runs import Brief, recipe

IDS = tuple(range(20, 52))


@pytest.fixture
def parts(tiny_folder: Path) -> Iterator[Parts]:
    found = open_parts(recipe(tiny_folder), families=[Brief()])
    yield found
    found.close()


class Deaf(InlinePolicy):
    """Says that it installed what it did not."""

    def publish(self, version: int, tensors: Mapping[str, Raw]) -> Receipt:
        receipt = super().publish(version, tensors)
        self.engine.load_adapter("policy", zeroed(self.engine.adapters.select("policy").weights))
        return receipt


class Shared(InlinePolicy):
    """Scores with the trainer's own adapter: one object for both ends, so that nothing is ever compared."""

    source: Parts

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        return self.source.trainer.score(prompt_ids, output_ids)


class Base(Shared):
    """Scores as the trainer does without its adapter."""

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        return self.source.trainer.score(prompt_ids, output_ids, has_adapter=False)


def zeroed(adapter: Adapter | None) -> Adapter:
    assert adapter is not None
    factors = {m: SiteFactors(one.a, torch.zeros_like(one.b), one.scale) for m, one in adapter.factors.items()}
    return Adapter(adapter.settings, factors)


def begin(parts: Parts) -> None:
    start_test(parts.policy, parts.trainer, parts.sync, IDS, version=3, std=0.3, is_first=True)


def test_an_honest_pair_passes_and_all_is_as_before(parts: Parts) -> None:
    before = parts.policy.score(IDS[:8], IDS[8:])
    found = start_test(parts.policy, parts.trainer, parts.sync, IDS, version=3, std=0.3, is_first=True)
    assert found.effect > 0.01 and found.withheld == 0.0 and found.gap < 1e-4 and found.zero_gap < 1e-5
    assert parts.policy.version == 3 and parts.trainer.norm == 0.0
    assert parts.policy.score(IDS[:8], IDS[8:]) == pytest.approx(before, abs=1e-5)


def test_an_engine_that_ignores_the_adapter_is_caught(parts: Parts) -> None:
    parts.policy.__class__ = Deaf
    with pytest.raises(InvariantError, match="ignores the adapter"):
        begin(parts)


def test_one_object_for_both_ends_is_caught_by_the_withheld_publication(parts: Parts) -> None:
    assert isinstance(parts.policy, InlinePolicy)
    parts.policy.__class__ = Shared
    parts.policy.source = parts  # type: ignore[attr-defined]
    with pytest.raises(InvariantError, match="although nothing was published"):
        begin(parts)


def test_a_perturbation_too_small_to_see_is_no_pass(parts: Parts) -> None:
    with pytest.raises(InvariantError, match=r"raise checks\.perturbation"):
        start_test(parts.policy, parts.trainer, parts.sync, IDS, version=3, std=1e-9, is_first=True)


def test_the_canary_sees_an_engine_that_stopped_listening(parts: Parts) -> None:
    begin(parts)
    canary = Canary(IDS[:6], IDS[6:], floor=3.0, most=16)
    quiet = canary.look(parts.policy, parts.trainer)
    assert quiet.own_effect == 0.0 and canary.word(quiet) == "not yet testable"
    trial = perturbed(parts.trainer.adapter(), 0.3)
    parts.trainer.install(trial)
    parts.sync.publish(4, trial)
    loud = canary.look(parts.policy, parts.trainer)
    assert loud.ratio > 100 and loud.max_gap < 1e-4
    parts.policy.__class__ = Deaf
    louder = perturbed(trial, 0.3, seed=1)
    parts.trainer.install(louder)
    parts.sync.publish(5, louder)
    with pytest.raises(InvariantError, match="does not use the adapter"):
        canary.look(parts.policy, parts.trainer)


def test_a_router_that_tips_over_is_no_effect_of_the_adapter(parts: Parts) -> None:
    """An adapter that changes nothing beyond rounding, and near ties: scores jump, and an engine that did not jump with
    them would look deaf."""
    assert isinstance(parts.policy, InlinePolicy)
    for model in (parts.trainer.model, parts.policy.engine.runner.model):
        make_near_ties(model)
    begin(parts)
    trial = perturbed(parts.trainer.adapter(), 1e-7)
    parts.trainer.install(trial)
    parts.sync.publish(4, trial)
    canary = Canary(IDS[:6], IDS[6:], floor=3.0, most=32)
    base = parts.trainer.score(canary.prompt, canary.output, has_adapter=False)
    assert fmean(distances(parts.trainer.score(canary.prompt, canary.output), base)) > 3 * LEAST_EFFECT
    assert canary.look(parts.policy, parts.trainer).own_effect < 0.1 * LEAST_EFFECT


@pytest.mark.parametrize(("dtype", "looks"), [("float32", 1), ("bfloat16", 3)])
def test_rounding_may_look_like_a_deaf_engine_in_16_bits(tiny_folder: Path, dtype: str, looks: int) -> None:
    """The engine answers as the base does: at the third look in a row that is no chance, after a good one it may be."""
    parts = open_parts(recipe(tiny_folder, engine={"place": "inline", "options": {"dtype": dtype}}), families=[Brief()])
    trainer, canary = parts.trainer, Canary(IDS[:6], IDS[6:], floor=3.0, most=32)
    assert isinstance(parts.policy, InlinePolicy)
    parts.policy.source = parts  # type: ignore[attr-defined]
    trainer.install(perturbed(trainer.adapter(), 0.3))

    def look(kind: type[InlinePolicy]) -> None:
        parts.policy.__class__ = kind
        assert canary.look(parts.policy, trainer).own_effect > LEAST_EFFECT

    try:
        for _ in range(2):
            for kind in (*[Base] * (looks - 1), Shared):
                look(kind)
        for _ in range(looks - 1):
            look(Base)
        with pytest.raises(InvariantError, match="does not use the adapter"):
            look(Base)
    finally:
        parts.close()


def test_a_canary_of_nothing_is_refused() -> None:
    with pytest.raises(InvariantError, match="nothing would be compared"):
        Canary((1,), (), floor=3.0, most=4)
    with pytest.raises(InvariantError, match="cannot be compared"):
        compare([], [], [], [])


def test_drift_over_the_limit_stops_the_run_and_no_number_too() -> None:
    check_drift(Drift(10, 0.0, 1e-4, 0.0, 0.0, 10.0, 10.0), 1e-3)
    for sum_of_k3 in (1.0, float("nan")):
        with pytest.raises(InvariantError, match="max_k3"):
            check_drift(Drift(10, 0.0, sum_of_k3, 0.0, 0.0, 10.0, 10.0), 1e-3)
    with pytest.raises(InvariantError, match="nothing was compared"):
        check_drift(Drift(), 1e-3)


def test_a_first_version_must_change_nothing(parts: Parts) -> None:
    trial = perturbed(parts.trainer.adapter(), 0.1)
    with pytest.raises(InvariantError, match="B is not zero"):
        parts.sync.publish(1, trial, is_first=True)
    assert parts.policy.version == 0
    with pytest.raises(InvariantError, match="no site at all"):
        check_is_zero(Adapter(trial.settings, {}))


def test_a_version_that_changes_nothing_is_refused(parts: Parts) -> None:
    first = parts.trainer.adapter()
    assert parts.sync.publish(1, first, is_first=True).num_changed == 2 * len(first.factors)
    with pytest.raises(InvariantError, match="no tensor of version 2"):
        parts.sync.publish(2, first)
    assert parts.policy.version == 1


def test_an_old_version_is_refused_and_the_new_one_serves_on(parts: Parts) -> None:
    parts.sync.publish(5, parts.trainer.adapter())
    with pytest.raises(TransferError, match="not newer"):
        parts.sync.publish(4, perturbed(parts.trainer.adapter(), 0.1))
    assert parts.policy.version == 5


def test_another_digest_is_an_error(parts: Parts) -> None:
    class Mixing(InlinePolicy):
        def publish(self, version: int, tensors: Mapping[str, Raw]) -> Receipt:
            names = list(tensors)
            a, b = next((x, y) for x in names for y in names if x < y and tensors[x].shape == tensors[y].shape)
            return super().publish(version, {**tensors, a: tensors[b], b: tensors[a]})

    parts.policy.__class__ = Mixing
    with pytest.raises(DigestMismatch):
        Sync(parts.policy, parts.trainer.model.config).publish(1, perturbed(parts.trainer.adapter(), 0.1))


def test_inputs_in_mxfp8_are_one_setting_of_both_ends(tiny_folder: Path) -> None:
    """engine.options.expert_inputs rounds in the engine and in the trainer; rounded at one end only, it shows."""
    prompt, output = [5, 9, 30, 7], [11, 12, 13, 40, 41]

    def gap(end: str) -> tuple[float, list[float]]:
        config = recipe(tiny_folder, engine={"place": "inline", "options": {"expert_inputs": "mxfp8"}})
        parts = open_parts(config, families=[Brief()])
        try:
            if end == "engine":
                parts.trainer.quant = FakeQuant()
            scored, trained = parts.policy.score(prompt, output), parts.trainer.score(prompt, output)
        finally:
            parts.close()
        return max(abs(a - b) for a, b in zip(scored, trained, strict=True)), scored

    both, rounded = gap("both")
    one, _ = gap("engine")
    assert both < 1e-4 < 1e-3 < one
    plain = open_parts(recipe(tiny_folder, engine={"place": "inline"}), families=[Brief()])
    try:
        assert max(abs(a - b) for a, b in zip(plain.policy.score(prompt, output), rounded, strict=True)) > 1e-3
    finally:
        plain.close()
