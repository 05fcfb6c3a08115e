"""Whole runs on a tiny model: the reward rises, controls do not, a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from baltoro.config import load_config
from baltoro.errors import ConfigError, InvariantError
from baltoro.rl.checkpoint import load
from baltoro.rl.log import read_dumps, read_log
from baltoro.rl.loop import run
from baltoro.rl.parts import open_parts
from baltoro.rl.plot import plot_run
from baltoro.rl.recipe import RLConfig
from baltoro.rl.replay import replay, rescore
from tests.contract.tree import ROOT
from tests.rl.runs import Brief, recipe
from tests.rl.test_drift import Deaf

TIMES = {"rollout_s", "train_s", "publish_s", "sleep_s", "wake_s", "step_s", "eval_s"}


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Without what a clock decides."""
    found = []
    for line in read_log(out):
        kept = {key: value for key, value in line.items() if key not in TIMES}
        kept.pop("sync", None)
        found.append(kept)
    return found


def go(folder: Path, out: Path, *, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
    parts = open_parts(recipe(folder, **changes), families=[Brief()])
    try:
        run(parts, out, resume=resume)
    finally:
        parts.close()
    return read_log(out)


def gain(lines: list[dict[str, Any]]) -> float:
    rewards = [line["score"] for line in lines if line["step"]]
    third = max(1, len(rewards) // 3)
    return fmean(rewards[-third:]) - fmean(rewards[:third])


def test_a_short_run_writes_what_it_says(tiny_folder: Path, tmp_path: Path) -> None:
    lines = go(tiny_folder, tmp_path / "run", steps=2)
    assert [line["step"] for line in lines] == [0, 1, 2] and [line["version"] for line in lines] == [3, 4, 5]
    assert all(line["k3"] < 1e-8 and line["max_dlogp"] < 1e-4 and line["ess"] > 0.999 for line in lines[1:])
    assert all(line["sync"]["num_changed"] > 0 and line["canary"]["max_gap"] < 1e-4 for line in lines[1:])
    assert lines[0]["eval"]["tasks"] == 2 and lines[2]["eval"]["version"] == 5
    assert lines[2]["adapter_norm"] > lines[1]["adapter_norm"] > 0
    with pytest.raises(ConfigError, match="--resume"):
        go(tiny_folder, tmp_path / "run", steps=2)
    pytest.importorskip("matplotlib")
    assert plot_run(tmp_path / "run").stat().st_size > 10_000


def test_a_run_that_is_out_of_time_ends_evaluated_and_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    """One step at least, though the time is over; its last line has an evaluation; then to the end."""
    parts = open_parts(recipe(tiny_folder, steps=3, save={"every_steps": 100}), families=[Brief()])
    try:
        run(parts, tmp_path, until=time.monotonic())
    finally:
        parts.close()
    lines = read_log(tmp_path)
    assert [line["step"] for line in lines] == [0, 1] and "eval" in lines[-1]
    assert lines[-1]["memory"]["base_bytes"] > lines[-1]["memory"]["own_bytes"] > 0
    lines = go(tiny_folder, tmp_path, resume=True, steps=3, save={"every_steps": 100})
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and "eval" not in lines[2] and "eval" in lines[3]


def test_a_replay_takes_the_steps_that_the_run_took(tiny_folder: Path, tmp_path: Path) -> None:
    lines = go(tiny_folder, tmp_path, steps=2, checks={"has_start_test": False})
    config = recipe(tiny_folder, steps=2)
    again = replay(config, read_dumps(tmp_path))
    for key in ("loss", "grad_norm", "adapter_norm", "reward", "k3"):
        assert [line[key] for line in again] == pytest.approx([line[key] for line in lines[1:]], rel=1e-6, abs=1e-12)
    with pytest.raises(ConfigError, match="does not name"):
        rescore(config, read_dumps(tmp_path), "task")
    with pytest.raises(ConfigError, match="no dumped rollouts"):
        list(read_dumps(tmp_path / "nothing"))


def test_another_reward_judges_the_dumps_of_a_run(tiny_folder: Path, tmp_path: Path) -> None:
    config = recipe(tiny_folder, steps=1)
    parts = open_parts(config)
    try:
        run(parts, tmp_path)
    finally:
        parts.close()
    same = rescore(config, read_dumps(tmp_path), "task")
    assert same.old == same.new and all(old == new for old, new in same.moved)
    other = rescore(config, read_dumps(tmp_path), "tests.rl.judges:generous", tmp_path / "new")
    assert other.means[1] == 1.0 and len(other.new) == 8
    (dumped,) = read_dumps(tmp_path / "new")
    assert {t.score for group in dumped.groups for t in group.members} == {1.0}


def test_an_effort_budget_is_measured_first_and_costs_who_is_over_it(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "steps": 2,
        "rollout": {"pool": 2, "b0_attempts": 6},
        "shaping": {"counted": "output", "b0_over": "all"},
        "tau_stages": [{"until": 0.5, "tau": 0.8}, {"until": 1.0, "tau": 99.0}],
    }
    lines = go(tiny_folder, tmp_path, **changes)
    assert lines[1]["rules"]["over_budget"] > 0 and lines[1]["reward"] < lines[1]["score"]
    assert lines[2]["rules"] == {} and lines[2]["reward"] == lines[2]["score"]
    tasks = [set(dump.tasks) for dump in read_dumps(tmp_path)]
    assert tasks[0] == tasks[1] and len(tasks[0]) == 2
    again = replay(recipe(tiny_folder, **changes), read_dumps(tmp_path))
    for key in ("rules", "reward"):
        assert [line[key] for line in again] == [line[key] for line in lines[1:]], "a replay has the budgets of the run"


def test_a_step_in_which_nothing_counts_is_skipped_and_said(tiny_folder: Path, tmp_path: Path) -> None:
    family = Brief(failures=tuple(f"train {number}" for number in range(7)))
    parts = open_parts(recipe(tiny_folder, steps=2), families=[family])
    try:
        run(parts, tmp_path)
    finally:
        parts.close()
    lines = read_log(tmp_path)[1:]
    assert [line["skipped"] for line in lines] == [True, True] and {line["version"] for line in lines} == {3}
    assert all(line["reasons"] == {"failed": 8} and line["score"] is None for line in lines)
    assert all(line["adapter_norm"] == 0.0 and "sync" not in line for line in lines)


@pytest.mark.slow
def test_a_few_steps_raise_the_reward(tiny_folder: Path, tmp_path: Path) -> None:
    lines = go(tiny_folder, tmp_path, **LEARNING)
    assert gain(lines) > 0.3
    assert lines[-1]["eval"]["sampled"] > lines[0]["eval"]["sampled"] + 0.3
    assert max(line["k3"] for line in lines[1:]) < 1e-8


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [{"reward": "random"}, {"optim": {"lr": 0.0, "micro_tokens": 512}}], ids=str)
def test_a_control_does_not_rise(tiny_folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    lines = go(tiny_folder, tmp_path, **{**LEARNING, **changes})
    assert abs(gain(lines)) < 0.05
    if "optim" in changes:
        assert lines[-1]["adapter_norm"] == 0.0 and lines[-1]["version"] == lines[0]["version"] + LEARNING["steps"]


@pytest.mark.parametrize(
    ("checks", "caught_by", "last_step"),
    [
        ({}, "start-up test: the engine is .* it ignores the adapter", None),
        ({"has_start_test": False}, "canary by .* does not use the adapter", 0),
        ({"has_start_test": False, "canary_floor": 1e9}, "k3 between engine and trainer", 1),
    ],
    ids=("start-up test", "canary", "drift"),
)
def test_an_engine_that_ignores_the_adapter_is_caught_three_times(
    tiny_folder: Path, tmp_path: Path, checks: dict[str, Any], caught_by: str, last_step: int | None
) -> None:
    """Before the first step; without that test after the first step; without both in the second."""
    parts = open_parts(recipe(tiny_folder, checks=checks, optim={"lr": 2e-2}), families=[Brief()])
    parts.policy.__class__ = Deaf
    try:
        with pytest.raises(InvariantError, match=caught_by):
            run(parts, tmp_path)
    finally:
        parts.close()
    assert [line["step"] for line in log_of(tmp_path)] == ([] if last_step is None else list(range(last_step + 1)))


def log_of(out: Path) -> list[dict[str, Any]]:
    return read_log(out) if (out / "metrics.jsonl").read_text() else []


LEARNING: dict[str, Any] = {
    "steps": 10,
    "rollout": {"groups": 4, "group_size": 8},
    "optim": {"lr": 3e-3, "micro_tokens": 2048},
    "save": {"every_steps": 100},
    "eval": {"every_steps": 100, "tasks": 4, "draws": 4},
}

PARTIAL = """
name = "killed"
model = "{folder}"
steps = 5
threads = 1
is_deterministic = true
reward = "random"  # the model of the tests is never right: what counts here is that there is something to learn
[[tasks]]
family = "arithmetic"
[rollout]
groups = 2
group_size = 4
thinking = false
[partial]
share = 0.6
max_tokens = 24
[adapter]
rank = 3
[optim]
lr = 5e-3
micro_tokens = 512
[engine]
place = "inline"
[engine.options]
max_running = 16
memory_bytes = 8388608
[eval]
every_steps = 100
tasks = 2
draws = 1
[checks]
perturbation = 0.3
max_k3 = 1e-6
[save]
every_steps = 2
keep = 3
"""


def verb(recipe_file: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """`baltoro rl` in a process of its own."""
    command = [sys.executable, "-m", "baltoro", "rl", str(recipe_file), "--out", str(out), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def num_lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_tokens_and_losses(tiny_folder: Path, tmp_path: Path) -> None:
    """SIGKILL from outside, after a checkpoint that holds trajectories in the middle of their answers."""
    file, whole, cut = tmp_path / "recipe.toml", tmp_path / "whole", tmp_path / "cut"
    file.write_text(PARTIAL.format(folder=tiny_folder))
    assert verb(file, whole).wait(200) == 0
    with verb(file, cut) as running:
        while num_lines(cut) < 4:  # step 3 is in the log, and in no checkpoint
            assert running.poll() is None
            with suppress(subprocess.TimeoutExpired):
                running.wait(0.01)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    saved = load(cut / "checkpoints" / "step-00000002.pt", load_config(RLConfig, file)).pending.book.trajectories
    assert any(t.status == "paused" and t.tokens for t in saved), "nothing was pending: the test would show nothing"
    assert verb(file, cut, "--resume").wait(200) == 0
    assert json.dumps(lines_of(cut)) == json.dumps(lines_of(whole))
    assert any(line.get("loss") for line in lines_of(whole))
    for one, two in zip(read_dumps(whole), read_dumps(cut), strict=True):
        assert one == two
    assert any(t.sampled_versions[1:] for d in read_dumps(whole) for g in d.groups for t in g.members)
    paths = [folder / "checkpoints" / "step-00000005.pt" for folder in (whole, cut)]
    states = [torch.load(path, weights_only=True)["trainer"]["masters"] for path in paths]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
