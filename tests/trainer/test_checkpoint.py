"""Checkpoints: whole or not at all, refused where they do not fit; going on is bit-identical, also after kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baltoro.errors import ConfigError
from baltoro.trainer.checkpoint import load_checkpoint, save_checkpoint
from baltoro.trainer.loop import METRICS, train
from baltoro.trainer.run import Run
from baltoro.trainer.state_file import latest_state
from baltoro.trainer.step import train_step
from tests.trainer.harness import make_data, tiny_recipe

ROOT = Path(__file__).resolve().parents[2]
UNREPEATABLE = {"step_s"}


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in UNREPEATABLE} for line in lines]


def states_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(states_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(states_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_a_loaded_run_is_the_saved_run_and_goes_on_bit_identically(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path / "data"))
    run = Run.create(config)
    for _ in range(2):
        train_step(run)
    path = save_checkpoint(run, tmp_path, keep=2)
    other = Run.create(config)
    load_checkpoint(other, path)
    assert states_equal(run.state(), other.state())
    assert train_step(run) == train_step(other)
    assert states_equal(run.state(), other.state())


def test_only_the_newest_are_kept_and_half_written_files_are_no_checkpoints(tmp_path: Path) -> None:
    run = Run.create(tiny_recipe(make_data(tmp_path / "data")))
    paths = []
    for run.step in (1, 2, 10):
        paths.append(save_checkpoint(run, tmp_path, keep=2))
    assert [path.exists() for path in paths] == [False, True, True]
    (tmp_path / "checkpoints" / "step-00000011.part").write_bytes(b"half")
    assert latest_state(tmp_path) == paths[-1]


def test_a_write_that_fails_halfway_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tiny_recipe(make_data(tmp_path / "data")))
    path = save_checkpoint(run, tmp_path, keep=1)
    assert list(path.parent.iterdir()) == [path]
    before = path.read_bytes()

    def fail(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):  # also over the very same step
        save_checkpoint(run, tmp_path, keep=1)
    assert latest_state(tmp_path) == path and path.read_bytes() == before


def test_other_settings_are_refused_by_name_and_harmless_ones_are_not(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path / "data"))
    path = save_checkpoint(Run.create(config), tmp_path, keep=1)
    other = Run.create(replace(config, optim=replace(config.optim, lr=0.5)))
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        load_checkpoint(other, path)
    harmless = replace(config, eval=replace(config.eval, every_steps=9), threads=1, name="again")
    load_checkpoint(Run.create(harmless), path)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path / "data"), steps=1)
    train(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="--resume"):
        train(config, tmp_path / "run")


@pytest.mark.slow
def test_log_lines_past_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path / "data"))
    train(config, tmp_path / "whole")
    rare = replace(config, checkpoint=replace(config.checkpoint, every_s=0.0, keep=9))
    train(rare, tmp_path / "cut")
    for step in (4, 5, 6):  # as if it had died after writing the lines of steps 4 to 6
        (tmp_path / "cut" / "checkpoints" / f"step-{step:08d}.pt").unlink()
    train(rare, tmp_path / "cut", resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


CHILD = """
import sys, torch
from pathlib import Path
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
from baltoro.trainer.loop import train
from tests.trainer.harness import tiny_recipe
torch.use_deterministic_algorithms(True)
config = tiny_recipe(Path(sys.argv[2]), steps=int(sys.argv[4]))
train(replace(config, threads=1), Path(sys.argv[3]), resume=True)
"""


def child(data: Path, out: Path, steps: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(ROOT), str(data), str(out), str(steps)]
    return subprocess.Popen(command, env=environment, cwd=ROOT)


@pytest.mark.slow
def test_run_killed_with_sigkill_at_any_moment_ends_with_the_same_losses_and_weights(tmp_path: Path) -> None:
    data, steps = make_data(tmp_path / "data"), 12
    assert child(data, tmp_path / "whole", steps).wait(timeout=200) == 0
    killed = 0
    for wanted in (3, 8):
        process = child(data, tmp_path / "killed", steps)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)  # and look at its log so often
                break
            log = tmp_path / "killed" / METRICS
            if log.is_file() and log.read_bytes().count(b"\n") >= wanted:
                process.send_signal(signal.SIGKILL)
                break
        killed += process.wait(timeout=30) == -signal.SIGKILL
    assert killed == 2
    assert child(data, tmp_path / "killed", steps).wait(timeout=200) == 0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    last = [torch.load(latest_state(tmp_path / name) or "", weights_only=True) for name in ("whole", "killed")]
    assert states_equal(*last)
