"""`scripts/rl/probe.py`: its shares are those of the attempts, and a kind that cannot be made does not end it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from baltoro.envs.base import Score
from scripts.rl import probe


def tried(task: int, draw: int, score: float | None, reason: str = "wrong") -> Any:
    verdict = Score(score, reason if score != 1.0 else "right")  # type: ignore[arg-type]
    return SimpleNamespace(key=(task, draw), score=verdict, num_sampled=10)


def test_shares() -> None:
    ones = [tried(0, -1, 1.0), tried(0, 0, 1.0), tried(0, 1, 0.0), tried(1, -1, 0.0), tried(1, 0, 0.0)]
    ones.append(tried(1, 1, 0.0, "truncated"))
    args = SimpleNamespace(tasks=2, draws=2)
    assert probe._figures(ones, args).split() == ["25%", "50%", "50%", "50%", "10", "17%"]  # type: ignore[arg-type]


def test_a_kind_that_cannot_be_made_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    words = "probe recipes/rl-mini.toml arithmetic:low:num_terms=1 arithmetic:high:high=10,low=0 --tasks 3 --draws 2"
    changes = "engine.place=inline engine.options.device=cpu threads=1"
    sets = [word for change in changes.split() for word in ("--set", change)]
    monkeypatch.setattr(sys, "argv", [*words.split(), *sets])
    probe.main()
    _, bad, good = capsys.readouterr().out.strip().splitlines()[-3:]
    assert "ConfigError" in bad and "two terms" in bad
    assert good.startswith("arithmetic:high:high=10,low=0") and good.split()[1].endswith("%")
