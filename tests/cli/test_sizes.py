"""`baltoro sizes`, called in process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baltoro.cli import app
from baltoro.errors import ConfigError
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["sizes", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_sizes_of_the_published_model(k3_data: Path) -> None:
    found = json.loads(run(k3_data, "--tp", "8", "--memory", "400G", "--json"))
    assert found["recurrent_bytes_per_request"] == 54_263_808
    assert found["kv_bytes_per_token"] == 27_648
    assert found["text_parameters"] == 2_779_484_478_208
    assert round(found["active_parameters_without_embedding"] / 1e9, 1) == 104.2
    assert found["fit"]["memory_bytes"] == 400 * 10**9
    assert found["fit"]["max_requests"]["32768"] > 100
    shown = run(k3_data / "config.json", "--tp", "8", "--memory", "400G")
    for text in ("54,263,808", "27,648", "2,779,484,478,208", "104.2B", "weights per rank", "requests of 1,048,576"):
        assert text in shown


def test_too_little_memory_says_how_much_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    assert "The weights do not fit: " in run(tmp_path, "--memory", "10K")


def test_packed_files_count_more_than_a_config_that_does_not_say_so(tmp_path: Path) -> None:
    save_model(new_model(tiny_k3(are_experts_packed=True)), tmp_path)
    expected = json.loads(run(tmp_path, "--json"))
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    assert json.loads(run(tmp_path, "--json")) == expected


def test_heads_that_do_not_divide_are_an_error_with_the_sizes_that_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    with pytest.raises(ConfigError, match="3 heads do not divide over 2 ranks; possible sizes: 1, 3"):
        run(tmp_path, "--tp", "2")
