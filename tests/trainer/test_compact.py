"""The compact form: weights to bf16's precision, the place in the data, parts that belong together or are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baltoro.errors import ConfigError
from baltoro.trainer.compact import _joined, _planes, has_compact, read_compact, write_compact
from baltoro.trainer.config import BatchConfig, TrainConfig
from baltoro.trainer.loop import train
from baltoro.trainer.run import RAMP_STEPS, Run
from baltoro.trainer.step import train_step
from tests.trainer.harness import make_data, tiny_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny_recipe(make_data(tmp_path_factory.mktemp("compact")), steps=30)


def stepped(config: TrainConfig, steps: int) -> Run:
    run = Run.create(config)
    for _ in range(steps):
        train_step(run)
    return run


def test_planes_come_back_for_every_bf16_number() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(_joined(*_planes(bits)), bits)
    exponents, _ = _planes(torch.tensor([1.0, -1.5, 1.99]).bfloat16().view(torch.uint16).numpy())
    assert set(exponents[:2].tolist()) == {127}  # the sign is no part of it


def test_what_is_read_back_is_the_run_to_bf16_at_the_same_place(recipe: TrainConfig, tmp_path: Path) -> None:
    run = stepped(recipe, 3)
    paths = write_compact(run, tmp_path, part_bytes=20_000)
    assert len(paths) > 2 and all(path.stat().st_size < 20_200 for path in paths) and has_compact(tmp_path)
    again = Run.create(recipe)
    read_compact(again, tmp_path)
    assert (again.step, again.tokens, again.restarted_at) == (3, run.tokens, 3)
    assert again.feed.state() == run.feed.state()
    for (name, old), new in zip(run.model.named_parameters(), again.model.parameters(), strict=True):
        is_exact = name.endswith("e_score_correction_bias")
        assert torch.equal(new, old if is_exact else old.bfloat16().float()), name
    assert not again.muon.state and not again.adam.state


def test_it_is_a_third_smaller_than_bf16_and_a_tenth_of_a_checkpoint(recipe: TrainConfig, tmp_path: Path) -> None:
    run = stepped(recipe, 1)
    size = sum(path.stat().st_size for path in write_compact(run, tmp_path))
    weights = sum(tensor.numel() for tensor in run.model.tensors().values())
    assert (size - 8000) * 8 < 11.5 * weights  # the head holds the config


def test_the_rate_rises_again_after_it_and_only_then(recipe: TrainConfig, tmp_path: Path) -> None:
    run = stepped(recipe, 2)
    write_compact(run, tmp_path)
    again = Run.create(recipe)
    read_compact(again, tmp_path)
    ratios = [train_step(again).lr / train_step(run).lr for _ in range(3)]
    assert ratios == pytest.approx([1 / RAMP_STEPS, 2 / RAMP_STEPS, 3 / RAMP_STEPS])
    later = Run.create(recipe)
    later.load_state(again.state())  # a checkpoint keeps the ramp
    assert later.ramp() == again.ramp() == pytest.approx(4 / RAMP_STEPS)
    again.step = 2 + 2 * RAMP_STEPS
    assert again.ramp() == 1.0


def test_parts_of_two_moments_or_with_a_gap_are_refused(recipe: TrainConfig, tmp_path: Path) -> None:
    run = stepped(recipe, 1)
    paths = write_compact(run, tmp_path, part_bytes=30_000)
    old = paths[1].read_bytes()
    train_step(run)
    write_compact(run, tmp_path, part_bytes=30_000)
    fresh = paths[1].read_bytes()
    for data in (old, None, fresh[:-1]):
        paths[1].unlink(missing_ok=True)
        if data is not None:
            paths[1].write_bytes(data)
        with pytest.raises(ConfigError, match="incomplete or of several moments"):
            read_compact(Run.create(recipe), tmp_path)
    paths[1].write_bytes(fresh)
    read_compact(Run.create(recipe), tmp_path)


def test_a_shorter_form_leaves_no_parts_of_a_longer_one(recipe: TrainConfig, tmp_path: Path) -> None:
    run = stepped(recipe, 1)
    write_compact(run, tmp_path, part_bytes=20_000)
    write_compact(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["resume.part-0"]
    read_compact(Run.create(recipe), tmp_path)


def test_other_settings_are_refused_by_name(recipe: TrainConfig, tmp_path: Path) -> None:
    write_compact(Run.create(recipe), tmp_path)
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        read_compact(Run.create(replace(recipe, optim=replace(recipe.optim, lr=0.5))), tmp_path)
    read_compact(Run.create(replace(recipe, device="cpu", threads=1)), tmp_path)


@pytest.mark.nightly
def test_a_run_that_lost_its_moments_ends_as_low_as_one_that_did_not(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path / "data"), steps=45, batch=BatchConfig(tokens=128, micro_tokens=128))
    stages = (replace(config.stages[0], until=1.0),)
    config = replace(config, stages=stages, optim=replace(config.optim, lr=0.02))

    def losses_of(*, is_cut: bool) -> list[float]:
        run, losses = Run.create(config), []
        for step in range(config.steps):
            if is_cut and step == 12:
                write_compact(run, tmp_path / "carry")
                run = Run.create(config)
                read_compact(run, tmp_path / "carry")
            losses.append(train_step(run).loss)
        return losses

    cut, whole = losses_of(is_cut=True), losses_of(is_cut=False)
    assert cut[:12] == whole[:12] and whole[12] > 0.3  # there was something left to learn
    assert max(cut[12:]) < whole[11] + 0.1
    assert cut[-1] < 0.05


def test_the_loop_goes_on_from_parts_where_there_is_no_checkpoint(recipe: TrainConfig, tmp_path: Path) -> None:
    config = replace(recipe, steps=4, checkpoint=replace(recipe.checkpoint, every_s=1e9))
    run = train(config, tmp_path / "one", compact=tmp_path / "carry", stop_after_s=0.01)
    assert run.step == 1 and has_compact(tmp_path / "carry")
    seen: list[int] = []
    end = train(config, tmp_path / "two", compact=tmp_path / "carry", listener=lambda p: seen.append(p.record.step))
    assert end.step == 4 and seen == [2, 3, 4]
    stood = train(config, tmp_path / "three", compact=tmp_path / "carry", stop_after_s=0)
    assert stood.step == 4 and not (tmp_path / "three" / "checkpoints").exists()
