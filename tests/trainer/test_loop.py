"""The loop: how often numbers are read changes no line, a run may stop by the clock, a torn log is mended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baltoro.errors import ConfigError
from baltoro.trainer.config import LogConfig, TrainConfig
from baltoro.trainer.loop import METRICS, Progress, train
from tests.trainer.harness import make_data, tiny_recipe
from tests.trainer.test_checkpoint import metrics


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_recipe(make_data(tmp_path_factory.mktemp("loop")))
    return replace(config, checkpoint=replace(config.checkpoint, every_s=1e9, keep=9))


def test_every_step_has_its_line_however_rarely_they_are_read(recipe: TrainConfig, tmp_path: Path) -> None:
    train(recipe, tmp_path / "each")
    seen: list[Progress] = []
    train(replace(recipe, log=LogConfig(every_steps=4)), tmp_path / "rare", listener=seen.append)
    assert metrics(tmp_path / "rare") == metrics(tmp_path / "each")
    assert [one.record.step for one in seen] == [1, 2, 3, 4, 5, 6]
    # an evaluation is of the last step before it
    assert [one.record.step for one in seen if one.held_out is not None] == [3, 6]


def test_stopped_by_the_clock_and_resumed_is_the_whole_run(recipe: TrainConfig, tmp_path: Path) -> None:
    train(recipe, tmp_path / "whole")
    config = replace(recipe, log=LogConfig(every_steps=4))
    stops = [train(config, tmp_path / "cut", resume=True, stop_after_s=1e-3).step for _ in range(7)]
    assert stops == [1, 2, 3, 4, 5, 6, 6]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_a_line_that_was_cut_off_by_a_kill_is_dropped(recipe: TrainConfig, tmp_path: Path) -> None:
    train(recipe, tmp_path, stop_after_s=1e-3)
    with (tmp_path / METRICS).open("a") as log:
        log.write('{"step": 2, "lo')
    train(recipe, tmp_path, resume=True, stop_after_s=1e-3)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]


def test_reading_never_is_refused(recipe: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="every_steps"):
        replace(recipe, log=LogConfig(every_steps=0))
