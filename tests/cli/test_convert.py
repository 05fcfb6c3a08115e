"""`baltoro convert`, called in process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from baltoro.cli import app
from baltoro.errors import ConfigError
from baltoro.model.build import new_model
from baltoro.model.weights import load_model, save_model
from tests.tiny import tiny_k3


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny_k3(dtype="bfloat16")
    save_model(new_model(config, dtype=torch.bfloat16, std=0.1), tmp_path / "a")
    return tmp_path / "a"


def test_quantise_dequantise_and_cut(folder: Path, tmp_path: Path) -> None:
    result = run(folder, tmp_path / "b", "--quantise", "mxfp4", "--max-shard-bytes", "100K")
    assert result.exit_code == 0 and f"wrote {tmp_path / 'b'}" in result.output
    assert load_model(tmp_path / "b").config.are_experts_packed
    assert len(list((tmp_path / "b").glob("model-*"))) > 3
    assert run(tmp_path / "b", tmp_path / "c", "--dequantise", "bf16").exit_code == 0
    assert not load_model(tmp_path / "c").config.are_experts_packed


def test_a_folder_in_use_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty"):
        run(folder, folder)


@pytest.mark.parametrize("option", [("--quantise", "int4"), ("--dequantise", "fp8")])
def test_formats_that_do_not_exist_are_refused(folder: Path, tmp_path: Path, option: tuple[str, str]) -> None:
    result = run(folder, tmp_path / "b", *option)
    assert result.exit_code == 2 and option[1] in result.output
