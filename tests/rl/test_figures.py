"""The scripts that make the figures of docs/rl.md, on a small scale: partial rollout fills the rows, a soak at rate 0
moves nothing, and what engine and trainer disagree on is found where it was put."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baltoro.rl.parts import open_parts
from baltoro.trainer.ratio import Drift
from scripts.rl import long_tail, near_ties, result, run_figures, soak, split
from tests.rl.runs import Brief, recipe

INLINE = {"max_running": 8, "memory_bytes": 1 << 23}
PROCESS = {"max_running": 8, "memory_bytes": 1 << 23, "page_size": 16, "is_poisoned": True}


def occupied(folder: Path, share: float) -> dict[str, Any]:
    config = recipe(
        folder,
        engine={"options": INLINE},
        rollout={"groups": 5},
        partial={"share": share, "max_tokens": 120, "max_staleness": 8},
        optim={"lr": 0.0},
        throttle={"most": 8},
    )
    parts = open_parts(config, families=[Brief()])
    try:
        return long_tail.measure(parts, 3)
    finally:
        parts.close()


@pytest.mark.slow
def test_partial_rollout_fills_the_rows_that_a_long_tail_leaves_empty(tiny_folder: Path) -> None:
    """Lengths of a geometric distribution, two and a half times as many attempts as rows."""
    off, on = occupied(tiny_folder, 1.0), occupied(tiny_folder, 0.7)
    assert on["occupied"] >= 0.85 > off["occupied"] + 0.1
    assert on["tokens_per_step"] > 1.1 * off["tokens_per_step"]
    for arm in (on, off):
        assert arm["reported"] == pytest.approx(arm["occupied"], abs=0.1)
    assert off["staleness_max"] == 0 < on["staleness_max"] <= 8


def soaked(folder: Path, out: Path, steps: int, families: Any) -> dict[str, Any]:
    config = recipe(
        folder,
        steps=steps,
        is_deterministic=False,
        engine={"place": "process", "sleeps": True, "options": PROCESS},
        optim={"lr": 0.0},
        save={"every_steps": 10},
    )
    return soak.soak(config, out, families)


@pytest.mark.nightly
def test_a_soak_at_rate_zero_moves_neither_kl_nor_memory(tiny_folder: Path, tmp_path: Path) -> None:
    found = soaked(tiny_folder, tmp_path / "run", 100, [Brief()])
    assert found["steps"] == found["versions"] == 100
    assert found["k3_max"] < 1e-10 and found["k3_last"] < 2 * found["k3_first"] + 1e-13 and found["max_dlogp"] < 1e-4
    assert found["adapter_norm"] == 0.0 and found["tensors_changed_after_the_first"] == 0
    for name in ("trainer_growth", "engine_awake_growth", "engine_asleep_growth"):
        assert found[name] <= 4 << 20, name
    assert len(found["pool_given_back"]) == len(found["shared_bytes"]) == 1
    assert found["engine_awake_bytes"] - found["engine_asleep_bytes"] > 0.8 * found["pool_given_back"][0] > 1 << 20
    assert len(found["open_files"]) <= 2


def test_growth_is_seen() -> None:
    flat, leaking = [100] * 100, [100 + n for n in range(100)]
    assert soak.growth(flat) == 0 and soak.growth(leaking) == 64


@pytest.mark.slow
def test_a_difference_is_found_where_it_was_put(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = split.split(recipe(tiny_folder), [Brief()])
    assert found.pop("weights") == 0
    fp8 = found.pop("weights in FP8")
    rows = [row for row in found.values() if isinstance(row, Drift)]
    assert len(rows) == 5 and all(row.tokens > 20 and row.k3 < 1e-8 and row.abs_max < 1e-4 for row in rows)
    assert isinstance(fp8, Drift) and fp8.k3 > 1e3 * max(row.k3 for row in rows)

    def other(*_: Any, **__: Any) -> Any:
        parts = open_parts(*_, **__)
        with torch.no_grad():
            parts.trainer.model.lm_head.weight[:, 1] *= 1.5
        return parts

    monkeypatch.setattr(split, "open_parts", other)
    found = split.split(recipe(tiny_folder), [Brief()])
    assert found["weights"] == 1
    same, moved = found["decode, prefill"], found["prefill, forward"]
    assert isinstance(same, Drift) and isinstance(moved, Drift) and moved.k3 > 1e3 * same.k3


def test_the_other_choice_at_a_small_margin_costs_more_than_rounding(tiny_folder: Path) -> None:
    parts, found = (
        open_parts(recipe(tiny_folder, rollout={"replays_routes": True}), families=[Brief()]),
        near_ties.Found(),
    )
    try:
        parts.sync.publish(parts.version, parts.trainer.adapter())
        pieces = [tuple(range(first, first + 24)) for first in (20, 50, 80)]
        near_ties.look(parts, near_ties.by_engine(parts, pieces, 0), found)
    finally:
        parts.close()
    assert found.picks == 3 * 24 * 2 and found.changed == 0 and not found.parted
    assert found.replayed.tokens == 3 * 23 and found.replayed.abs_max < 1e-4
    assert len(found.forced) == near_ties.NUM_FORCED and found.forced[0]["margin"] == found.smallest
    assert max(one["max_dlogp"] for one in found.forced) > 100 * found.replayed.abs_max


def test_figures_of_a_run_are_those_of_its_lines() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval": {"sampled": 0.4, "half_width": 0.1, "greedy": 0.5}}]
    for step in range(1, 11):
        more = {"sync": {"num_bytes": 8, "seconds": 0.5}, "canary": {"ratio": 9.0}}
        figures = {"k3": step * 1e-12, "max_dlogp": 1e-5, "adapter_norm": step, "reward": 0.1, "failed": 0}
        lines.append({"step": step, "rollout_s": 1.0, "train_s": 0.5, **more, **figures})
    lines[-1]["eval"] = {"sampled": 0.7, "half_width": 0.1, "greedy": 0.6}
    found = run_figures.figures(lines)
    assert found["sampled_gain"] == pytest.approx(0.3) and found["sync_share"] == 0.25 and found["steps"] == 10
    assert found["k3_max"] == 1e-11 and found["k3_first_fifth"] == pytest.approx(1.5e-12) and found["step_s"] == 1.5


def test_a_section_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result.record("a", {"x": 1}, path)
    result.record("b", result.rounded({"y": [1.23456, 2]}), path)
    found = json.loads(path.read_text())["sections"]
    assert found["a"]["x"] == 1 and found["b"]["y"] == [1.235, 2]
