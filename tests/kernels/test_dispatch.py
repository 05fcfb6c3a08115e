"""The dispatch table: every operation has a row on every device, and a row above another wins where its needs hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from typer.testing import CliRunner

from baltoro.cli import app
from baltoro.errors import ConfigError, InvariantError
from baltoro.kernels.device import machine
from baltoro.kernels.dispatch import TABLE, Kernels, Row, choices, kernels_for, select
from baltoro.kernels.kda import fused_reference
from baltoro.kernels.kda.chunk import chunked
from baltoro.kernels.mla import reference as mla


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operation_has_an_implementation_and_a_reason(device: str) -> None:
    picked = choices(torch.device(device))
    assert [c.op for c in picked] == [f.name for f in fields(Kernels)]
    assert all(c.implementation and c.reason for c in picked)


def test_every_row_names_an_operation() -> None:
    assert {row.op for row in TABLE} == {f.name for f in fields(Kernels)}


def test_kernels_hold_the_functions_of_the_table() -> None:
    assert kernels_for(torch.device("cpu")).kda_chunk is chunked


def test_first_row_that_fits_wins_and_needs_are_asked() -> None:
    def fast() -> None:
        return None

    row = Row(
        "kda_enter", ("cuda",), "fast", fast, "for new devices", lambda here: (here.capability or (0, 0)) >= (9, 0)
    )
    table = (row, *TABLE)
    here = replace(machine("cpu"), kind="cuda", capability=(9, 0))
    assert select("kda_enter", here, table) is row
    assert select("kda_enter", replace(here, capability=(8, 0)), table).implementation == "reference"
    assert select("kda_enter", machine("cpu"), table).implementation == "reference"


def test_operation_without_a_row_is_our_bug() -> None:
    with pytest.raises(InvariantError, match="kda_chunk"):
        select("kda_chunk", machine("cpu"), ())


def test_explain_prints_every_operation() -> None:
    result = CliRunner().invoke(app, ["explain", "--device", "cuda"])
    assert result.exit_code == 0, result.output
    assert all(f.name in result.output for f in fields(Kernels))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The choice of kernels is made anew, here and afterwards."""
    kernels_for.cache_clear()
    yield monkeypatch
    kernels_for.cache_clear()


def test_a_named_operation_runs_its_reference(fresh: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    fresh.setenv("BALTORO_REFERENCE", "kda_decode, mla_attend")
    assert kernels_for(cpu).kda_decode is fused_reference.decode and kernels_for(cpu).mla_attend is mla.attend
    assert kernels_for(cpu).mla_attend_absorbed is not mla.attend_absorbed
    forced = [choice.op for choice in choices(cpu) if choice.reason.startswith("forced by BALTORO_REFERENCE")]
    assert forced == ["kda_decode", "mla_attend"]


def test_all_runs_every_reference(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("BALTORO_REFERENCE", "all")
    assert {choice.implementation for choice in choices(torch.device("cuda"))} == {"reference"}


def test_an_unknown_operation_is_refused_with_the_list(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("BALTORO_REFERENCE", "kda_decode,experts")
    with pytest.raises(ConfigError, match=r"'experts'.*kda_decode.*expert_product"):
        kernels_for(torch.device("cpu"))


def test_explain_prints_both_devices_and_the_modules() -> None:
    result = CliRunner().invoke(app, ["explain", "--device", "all"], env={"COLUMNS": "200"})
    assert "cpu: " in result.output and "cuda: " in result.output and "kernels.kda.chunk" in result.output
