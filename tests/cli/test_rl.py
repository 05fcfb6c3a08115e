"""The verb: its dry run loads nothing and refuses, its table has a row a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baltoro.cli import app
from baltoro.cli.rl import COLUMNS, cells, make_table
from baltoro.config import load_config
from baltoro.errors import ConfigError
from baltoro.rl.recipe import RLConfig
from tests.contract.tree import ROOT

RECIPE = ROOT / "recipes" / "rl-mini.toml"
LINE = {
    "step": 4,
    "reward": 0.5,
    "k3": 1e-13,
    "max_dlogp": 5e-6,
    "adapter_norm": 1.25,
    "length_mean": 12.0,
    "staleness_max": 0,
    "zero_std": 0.25,
    "clip_low": 0.01,
    "clip_high": 0.02,
    "step_s": 1.5,
    "eval": {"sampled": 0.52, "greedy": 0.7},
    "canary": {"ratio": 40.0, "own_effect": 0.1},
}


def test_a_dry_run_says_what_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = CliRunner().invoke(app, ["rl", str(RECIPE), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    for word in ("publication", "64 attempts, at most 2,048", "training phase", "aggregation", "standard deviation"):
        assert word in shown.output


def test_a_dry_run_says_where_the_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And connects to nobody."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("BALTORO_RL_TOKEN", raising=False)
    place = "engine.place=tcp://192.0.2.1:7400"  # an address that nobody has
    shown = CliRunner().invoke(app, ["rl", str(RECIPE), "--dry-run", "--set", place])
    assert shown.exit_code == 0, shown.output
    for words in ("at tcp://192.0.2.1:7400", "BALTORO_RL_TOKEN is not set", "resident 1x on each host", "rl-engine"):
        assert words in shown.output


@pytest.mark.parametrize(
    ("words", "why"), [(["--listen", "0.0.0.0:7400"], "write tcp://HOST:PORT"), ([], "BALTORO_RL_TOKEN is not set")]
)
def test_an_engine_says_what_it_lacks_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("BALTORO_RL_TOKEN", raising=False)
    shown = CliRunner().invoke(app, ["rl-engine", str(RECIPE), *words])
    assert isinstance(shown.exception, ConfigError) and why in str(shown.exception)


def test_a_dry_run_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["rl", str(RECIPE), "--dry-run", "--set", "engine.options.max_loras=1"]
    shown = CliRunner().invoke(app, arguments)
    assert isinstance(shown.exception, ConfigError) and "max_loras" in str(shown.exception)


def test_the_table_has_a_row_for_each_step(tmp_path: Path) -> None:
    config = load_config(RLConfig, RECIPE)
    console = Console(record=True, width=100, file=(tmp_path / "out").open("w"))
    console.print(make_table([{"step": 0, "version": 3}, LINE], config))
    text = console.export_text()
    assert "4 of 30 steps" in text and "52%" in text and "x40" in text and "1.0e-13" in text


def test_the_table_fits_into_80_columns(tmp_path: Path) -> None:
    widest = {
        **LINE,
        "step": 1000,
        "reward": -0.123,
        "eval": {"sampled": 1.0, "greedy": 1.0},
        "adapter_norm": 12.3,
        "length_mean": 1234.5,
        "zero_std": 1.0,
        "clip_low": 0.2,
        "step_s": 117.9,
        "canary": {"ratio": 1.0, "own_effect": 0.1},
    }
    console = Console(record=True, width=80, file=(tmp_path / "out").open("w"))
    console.print(make_table([LINE, widest], load_config(RLConfig, RECIPE)))
    text = console.export_text()
    assert "…" not in text and all(word in text for word in (*COLUMNS, *cells(widest, 3.0), *cells(LINE, 3.0)))


def test_every_column_is_explained() -> None:
    page = (ROOT / "docs" / "rl.md").read_text()
    assert all(f"| `{name}` |" in page for name in COLUMNS)


def test_a_canary_that_proves_nothing_says_so() -> None:
    assert "not yet" in cells({**LINE, "canary": {"ratio": 1.0, "own_effect": 0.1}}, 3.0)
    assert "not yet" in cells({**LINE, "canary": {"ratio": 1e9, "own_effect": 0.0}}, 3.0)
