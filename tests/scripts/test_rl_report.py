"""Runs of several seeds put together: gains, intervals, the shares that are claimed, and what has nothing to report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.rl_report import main, mean_and_half, read_runs, report, table


def lines(gain: float) -> list[dict[str, Any]]:
    """Three steps of a run that starts at 40 % and 50 %."""
    found: list[dict[str, Any]] = []
    for step in range(4):
        line: dict[str, Any] = {"step": step}
        if step in (0, 3):
            part = gain * step / 3
            rates = {"sampled": 0.4 + part, "greedy": 0.5 + part / 2, "half_width": 0.05}
            line |= {"eval": {**rates, "tasks": 256, "draws": 4}, "eval_s": 5.0}
        if step:
            line |= {"k3": 1e-5 * step, "max_dlogp": 0.1, "adapter_norm": float(step), "step_s": 4.0, "publish_s": 0.1}
            line |= {"rollout_s": 3.0, "train_s": 0.5, "rollout_tokens": 3000, "failed": 0, "sync": {"num_bytes": 99}}
            line["memory"] = {"rest_share": 0.01, "base_bytes": 100}
        found.append(line)
    return found


def write(folder: Path, gains: dict[str, float]) -> list[Path]:
    paths = []
    for name, gain in gains.items():
        (folder / name).mkdir()
        path = folder / name / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines(gain)))
        paths.append(path)
    return paths


def test_three_seeds_are_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, {"seed-1": 0.2, "seed-2": 0.3, "seed-3": 0.4})
    main([*map(str, paths), "--json", str(tmp_path / "r.json"), "--pack", str(tmp_path / "all.gz")])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["sampled"]["gain"] == pytest.approx(0.3) and found["greedy"]["gain"] == pytest.approx(0.15)
    assert found["sampled"]["half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5)
    one = found["runs"]["seed-2"]
    assert one["sync"] == {"bytes": 99, "ms": pytest.approx(100), "share": pytest.approx(0.025)}
    assert one["seconds"] == 22.0 and one["rollout_tokens_a_second"] == 1000 and one["k3"]["max"] == pytest.approx(3e-5)
    printed = capsys.readouterr().out
    assert "+30.0 ± 24.8 points" in printed and printed.count("\n") == 6
    again = report(read_runs([tmp_path / "all.gz"]))
    assert again == found and table(again) in printed


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write(tmp_path, {"a": 0.2, "b": 0.1})
    main([*map(str, paths), "--picture", str(tmp_path / "pictures" / "rl.png")])
    assert (tmp_path / "pictures" / "rl.png").stat().st_size > 10_000


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    assert mean_and_half([0.25]) == (0.25, None)
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(lines(0.1)[0]) + "\n")
    with pytest.raises(SystemExit, match="no gain"):
        main([str(path)])
    path.write_text("")
    with pytest.raises(SystemExit, match="no lines"):
        main([str(path)])
