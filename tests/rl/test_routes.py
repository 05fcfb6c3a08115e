"""Routing replay in a run: near ties part engine and trainer without it, and do not with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baltoro.errors import ConfigError, ShapeError
from baltoro.model.config import K3Config
from baltoro.model.routes import bytes_per_token
from baltoro.model.weights import load_model, save_model
from baltoro.rl.drift import perturbed
from baltoro.rl.log import read_dumps, read_log
from baltoro.rl.loop import run
from baltoro.rl.parts import Parts, engine_config, open_parts
from baltoro.rl.plan import make_plan
from baltoro.rl.replay import replay
from baltoro.rl.samples import StepSamples, make_samples
from baltoro.rl.types import Group
from baltoro.trainer.policy_sample import Replayed, pack_policy, replayed
from baltoro.trainer.ratio import Drift, drift
from tests.model.routing import make_near_ties
from tests.rl.runs import MODEL, Brief, recipe

ON: dict[str, Any] = {"rollout": {"replays_routes": True}}
SIZE = bytes_per_token(MODEL)


@pytest.fixture(scope="module")
def near_ties(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with experts in pairs that a router can tell apart by rounding alone."""
    return write_near_ties(tiny_folder, tmp_path_factory.mktemp("near_ties"))


def write_near_ties(source: Path, folder: Path, **options: float) -> Path:
    """A copy of a float32 model's folder with near ties in every layer."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    model = load_model(source, dtype=torch.float32)
    make_near_ties(model, **options)
    save_model(model, folder)
    return folder


@pytest.fixture
def opened() -> Iterator[list[Parts]]:
    found: list[Parts] = []
    yield found
    for parts in found:
        parts.close()


def start(opened: list[Parts], folder: Path, **changes: Any) -> Parts:
    opened.append(open_parts(recipe(folder, **(ON | changes)), families=[Brief()]))
    parts = opened[-1]
    parts.sync.publish(parts.version, parts.trainer.adapter())
    return parts


def collect(parts: Parts) -> list[Group]:
    return parts.collector.collect(parts.version, parts.fresh(), parts.config.rollout.group_size)


def samples_of(parts: Parts, groups: list[Group], *, replays: bool = True) -> StepSamples:
    config = parts.config
    return make_samples(
        groups, config.advantages, config.shaping, max_tokens=config.partial.max_tokens, version=parts.version,
        replays_routes=replays,
    )  # fmt: skip


@torch.no_grad()
def compared(parts: Parts, samples: StepSamples) -> tuple[Drift, Replayed]:
    """Engine and trainer over all counted tokens, packed into one forward."""
    batches = pack_policy(samples.samples, 1 << 12, parts.trainer.model.config)
    assert len(batches) == 1 and len(batches[0].lengths) > 4
    return drift(parts.trainer.logprobs(batches[0]), batches[0].old, batches[0].mask), replayed(batches[0])


def test_near_ties_part_engine_and_trainer_and_replay_joins_them(near_ties: Path, opened: list[Parts]) -> None:
    parts = start(opened, near_ties)
    groups = collect(parts)
    apart, nothing = compared(parts, samples_of(parts, groups, replays=False))
    assert apart.abs_max > 1e-3 and apart.k3 > 1e-7 and nothing == Replayed()
    joined, found = compared(parts, samples_of(parts, groups))
    assert joined.abs_max <= 1e-5 and joined.k3 <= 1e-10
    assert found.missing == 0 and found.changed > 0
    assert found.tokens == sum(len(t.prompt) + len(t.tokens) - 1 for group in groups for t in group.members)


def test_a_run_replays_and_its_dumps_are_trained_on_with_their_routes(near_ties: Path, tmp_path: Path) -> None:
    config = recipe(near_ties, steps=2, checks={"has_start_test": False, "max_k3": 1.0}, **ON)
    parts = open_parts(config, families=[Brief()])
    try:
        run(parts, tmp_path)
    finally:
        parts.close()
    lines = read_log(tmp_path)[1:]
    assert all(line["k3"] <= 1e-10 and line["max_dlogp"] <= 2e-5 for line in lines)
    assert all(line["routes_changed"] > 0 and line["routes_missing"] == 0 for line in lines)
    assert all(0.9 * SIZE < line["routes_bytes_per_token"] < SIZE for line in lines)
    again = replay(config, read_dumps(tmp_path))
    for key in ("loss", "grad_norm", "adapter_norm", "k3", "routes_tokens", "routes_changed"):
        assert [line[key] for line in again] == pytest.approx([line[key] for line in lines], rel=1e-6, abs=1e-12)
    without = replay(recipe(near_ties, steps=2), read_dumps(tmp_path))
    assert all(line["k3"] > 1e-7 and line["routes_tokens"] == 0 for line in without)


def test_dumps_without_routes_are_trained_on_by_the_routers_choice_and_that_is_counted(
    tiny_folder: Path, tmp_path: Path
) -> None:
    parts = open_parts(recipe(tiny_folder, steps=1, checks={"has_start_test": False}), families=[Brief()])
    try:
        run(parts, tmp_path)
    finally:
        parts.close()
    line = read_log(tmp_path)[1]
    assert "routes_bytes" not in line and line["routes_tokens"] == line["routes_missing"] == 0
    (again,) = replay(recipe(tiny_folder, **ON), read_dumps(tmp_path))
    assert again["routes_tokens"] == 0 and again["routes_missing"] > 100
    assert again["k3"] == pytest.approx(line["k3"], rel=1e-6)


def test_what_goes_on_after_an_update_has_the_routes_of_its_newest_forward(
    tiny_folder: Path, opened: list[Parts]
) -> None:
    """Mode reprefill: every token is computed again by the new version, and its routes are those. Who was at its end
    before the update keeps the routes of then."""
    parts = start(opened, tiny_folder, partial={"share": 0.4, "max_tokens": 40, "max_staleness": 6})
    num_mixed = 0
    for number in range(4):
        if number:
            trial = perturbed(parts.trainer.adapter(), 0.3, seed=number)
            parts.version += 1
            parts.trainer.install(trial)
            parts.sync.publish(parts.version, trial)
        groups = collect(parts)
        members = [t for group in groups for t in group.members]
        assert all(t.routes and len(t.routes) == SIZE * (len(t.prompt) + len(t.tokens) - 1) for t in members)
        samples = samples_of(parts, groups)
        for t, sample in zip(members, samples.samples, strict=True):
            (batch,) = pack_policy([sample], 512, MODEL)
            with torch.no_grad():
                parts.trainer.logprobs(batch)
            found = replayed(batch)
            assert (found.tokens, found.missing) == (len(sample) - 1, 0)
            assert (found.changed == 0) == (t.sampled_versions[-1] == parts.version)
        num_mixed += sum(len(t.sampled_versions) > 1 for t in members)
    assert num_mixed


def test_routes_of_another_length_stop_the_step(tiny_folder: Path, opened: list[Parts]) -> None:
    parts = start(opened, tiny_folder)
    samples = samples_of(parts, collect(parts)).samples
    longer = samples[0].routes or b""
    object.__setattr__(samples[0], "routes", longer * 2)
    with pytest.raises(ShapeError, match=f"a token takes {SIZE} bytes"):
        parts.trainer.step(samples)


def test_a_recipe_that_cannot_replay_is_refused_and_one_that_can_says_what_it_costs() -> None:
    config = recipe(Path("x"), **ON)
    assert engine_config(config).keeps_routed_experts and not engine_config(recipe(Path("x"))).keeps_routed_experts
    assert make_plan(config, MODEL, engine_config(config)).route_bytes == SIZE == 2 * 3 * 2
    dense: K3Config = MODEL.with_(num_experts=0)
    with pytest.raises(ConfigError, match="has no experts"):
        make_plan(config, dense, engine_config(config))
    deaf = recipe(Path("x"), engine={"options": {"keeps_routed_experts": False}}, **ON)
    with pytest.raises(ConfigError, match=r"engine\.options\.keeps_routed_experts"):
        make_plan(deaf, MODEL, engine_config(deaf))
