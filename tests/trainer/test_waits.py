"""A step is launched without waiting for the device: counted on a CPU, where the same operations run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baltoro.bench.ops import FROM_HOST, OpCounter
from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.moe import device_grouped
from baltoro.model.build import new_model
from baltoro.model.context import FakeQuant
from baltoro.trainer.pack import pack
from baltoro.trainer.prepare import prepare
from baltoro.trainer.record import read_records
from baltoro.trainer.run import Run
from baltoro.trainer.sample import TrainSample
from baltoro.trainer.step import launch_step, objective
from tests.tiny import tiny_k3
from tests.trainer.harness import make_data, tiny_recipe


@contextmanager
def device_forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The expert product of a GPU instead of the plain one; the other plain forms ask nothing."""

    def picked(device: torch.device) -> object:
        return replace(kernels_for(device), expert_product=device_grouped.expert_product)

    with monkeypatch.context() as patch:
        patch.setattr("baltoro.model.context.kernels_for", picked)
        yield


@pytest.mark.parametrize("stage", [0, 1], ids=["plain", "quantised"])
def test_a_step_waits_for_nothing_and_takes_nothing_from_the_host(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_recipe(make_data(tmp_path), dtype="bfloat16")
    config = replace(config, data=replace(config.data, prefetch=False))
    run = Run.create(replace(config, stages=(replace(config.stages[stage], until=1.0),)))
    with device_forms(monkeypatch):
        launch_step(run)  # tables and optimizer state are made in the first step
        counter = OpCounter()
        monkeypatch.setattr(run.feed, "take", counter.wrap(run.feed.take, "host"))
        with counter.counting():
            pending = [launch_step(run) for _ in range(2)]
    assert counter.ops["other"] > 1000
    assert {place: count for place, count in counter.waits.items() if place[0] != "host"} == {}
    with counter.counting(), counter.counting_for("read"):
        records = read_records(pending)
    assert counter.waits_in("read") == {("read", "tolist"): 1}
    assert [record.step for record in records] == [2, 3]


def test_pictures_of_several_sizes_ask_nothing_either() -> None:
    config = tiny_k3()
    model = new_model(config, std=0.2, decay="slow")

    def document(size: tuple[int, int]) -> TrainSample:
        ids = torch.tensor([1, *[126] * (size[0] * size[1] // 144), 2, 3])
        return TrainSample(ids[:-1], ids[1:], torch.ones(len(ids) - 1), "x", np.full((1, *size), 7, np.uint8))

    batch = prepare(pack([document(s) for s in ((12, 12), (12, 24), (12, 12), (24, 24), (12, 24))]), config)
    counter = OpCounter()
    with counter.counting(), torch.no_grad():
        features = model.features(batch.media.pixels, batch.media.grids)  # type: ignore[union-attr]
    assert counter.waits_in() == {} and len(features) == 1 + 2 + 1 + 4 + 2
    losses, _ = objective(model, batch, FakeQuant())
    assert losses.shape == (batch.num_tokens,)


def test_the_counter_sees_what_would_wait() -> None:
    x, mask = torch.arange(6.0), torch.tensor([True, False] * 3)
    kinds = {
        "_local_scalar_dense": lambda: x[0].item(),
        "nonzero": lambda: mask.nonzero(),
        "index by mask": lambda: x[mask],
        "bincount": lambda: torch.bincount(torch.tensor([1, 2])),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "repeat_interleave": lambda: x.repeat_interleave(torch.tensor([1, 2, 1, 1, 1, 1])),
        FROM_HOST: lambda: torch.tensor([1.0, 2.0]),
    }
    for kind, act in kinds.items():
        counter = OpCounter()
        with counter.counting(), counter.counting_for("here"):
            act()
        assert counter.waits["here", kind] == 1, kind
    free = OpCounter()
    with free.counting():
        x.view(2, 3).sum(0).index_select(0, torch.arange(2))
    assert free.waits_in() == {}
